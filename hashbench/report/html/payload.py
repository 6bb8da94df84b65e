"""What the page's script draws the heat map from: the intervals of all models, as short as JSON can say them.

Intervals are kept as gaps and lengths, and what a model did as an index into a table, so that ten thousand models over
a thousand nights take about a megabyte.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence

from markupsafe import Markup

from hashbench.catalog import kind_of, letter_of
from hashbench.report.history import History, Interval, ModelHistory
from hashbench.results.environments import EnvironmentChange
from hashbench.text import one_line, shorten

INTERVALS = 200_000
"""Intervals that a page holds at most; where there are more, the oldest nights are left out."""

NAME = 80
"""Characters of a name."""


def payload_of(history: History, *, detailed: Collection[int] = ()) -> dict[str, object]:
    """The content of the page's JSON. ``detailed`` are the indices of the models that the page has a diagnosis of.

    ``models`` holds ``[scope, name, detailed, intervals]`` each, intervals as a flat list of ``gap, length, state``.
    """
    start = first_night_shown(history)
    scopes: dict[tuple[str, ...], int] = {}
    states: dict[tuple[str, str, str], int] = {}
    models = [
        [
            scopes.setdefault(model.key[:-1], len(scopes)),
            _text(model.key[-1]),
            int(index in detailed),
            list(_flat(model, start, states)),
        ]
        for index, model in enumerate(history.models)
    ]
    return {
        "start": start,
        "nights": [_text(night.label) for night in history.nights[start:]],
        "marks": {
            place: changes_text(night.changed) for place, night in enumerate(history.nights[start:]) if night.changed
        },
        "scopes": [[_text(part) for part in scope] for scope in scopes],
        "states": [
            [_text(accuracy), letter_of(accuracy), kind_of(accuracy), _text(kernel), _text(cause)]
            for accuracy, kernel, cause in states
        ],
        "models": models,
    }


def first_night_shown(history: History, *, limit: int = INTERVALS) -> int:
    """The earliest night from which on all intervals fit into ``limit``."""
    if sum(len(model.intervals) for model in history.models) <= limit:
        return 0
    ends = sorted((interval.last for model in history.models for interval in model.intervals), reverse=True)
    return min(ends[limit] + 1, max(0, len(history.nights) - 1))


def _flat(model: ModelHistory, start: int, states: dict[tuple[str, str, str], int]) -> Iterable[int]:
    at = start
    for interval in model.intervals:
        if interval.last < start:
            continue
        first = max(interval.first, start)
        state = states.setdefault(_state(interval), len(states))
        yield from (first - at, interval.last - first + 1, state)
        at = interval.last + 1


def _state(interval: Interval) -> tuple[str, str, str]:
    return interval.accuracy, interval.kernel, interval.cause


def changes_text(changes: Sequence[EnvironmentChange], *, limit: int = 3) -> str:
    """``packages.torch 2.15.0 → 2.16.0, threads.intra_op 2 → 4 and 3 more``."""
    told = [
        f"{shorten(one.key, 40)} {shorten(one.base, 30) or '(none)'} → {shorten(one.new, 30) or '(none)'}"
        for one in changes[:limit]
    ]
    more = len(changes) - limit
    return _text(", ".join(told) + (f" and {more} more" if more > 0 else ""), width=400)


def _text(text: str, *, width: int = NAME) -> str:
    return shorten(one_line(text), width)


def as_script_content(content: object) -> Markup:
    """JSON that may stand inside ``<script>``: no text in it can end the element, begin a comment in it, or break a
    line (U+2028, U+2029: JSON in ASCII has none of those)."""
    text = json.dumps(content, ensure_ascii=True, separators=(",", ":"))
    for letter in "<>&":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return Markup(text)
