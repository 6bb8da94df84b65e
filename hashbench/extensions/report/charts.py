"""Compute what the page draws of a history: totals, charts over the nights, the data of the heat map."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from hashbench.core.catalog import STATUSES, Kind, family_of, kind_of, letter_of
from hashbench.core.extensions import blamed, mechanism
from hashbench.core.records import value_of
from hashbench.core.report.compare import EnvironmentChange
from hashbench.core.text import one_line, shorten
from hashbench.extensions.report.history import History, Measured, ModelHistory, Night

KIND_WORDS = {
    "differ": "differ",
    "latent": "flaky",
    "fail": "fail",
    "skip": "skipped",
    "pass": "pass",
}


def totals_of(history: History) -> dict[str, Any]:
    """Count the rows of the last night.

    Returns:
        ``kinds`` and the ``change`` of each since the night before (``None``: there is none);
        ``statuses`` as ``(status, now, before)``; ``suites`` as ``(suite, mode, count per kind)``, most
        differing first; ``kernels`` as ``(kernel, cause, rows)``, most rows first.
    """
    now = history.nights[-1].counts
    # A night that could not be read tells nothing of what there was before.
    before = next((night.counts for night in reversed(history.nights[:-1]) if night.counts), None)
    kinds, earlier = by_kind(now), by_kind(before or {})
    if not kinds[Kind.LATENT] and not earlier[Kind.LATENT]:
        kinds.pop(Kind.LATENT)  # no night was stressed
    order = {status: rank for rank, status in enumerate(STATUSES)}
    ranks = {kind: rank for rank, kind in enumerate(KIND_WORDS)}
    rows = [model.newest for model in history.models if model.newest is not None]
    suites: dict[tuple[str, str], Counter[str]] = {}
    for row in rows:
        suites.setdefault((row.suite, row.mode), Counter())[row.accuracy] += 1
    kernels = Counter(
        (blamed(row) or f"({row.origin or value_of(row, 'stage') or 'unknown'})", mechanism(row))
        for row in rows
        if kind_of(row.accuracy).has_cause
    )
    return {
        "kinds": kinds,
        "change": {kind: None if before is None else kinds[kind] - earlier[kind] for kind in kinds},
        "statuses": [
            (status, now.get(status, 0), None if before is None else before.get(status, 0))
            for status in sorted(
                {*now, *(before or ())},
                key=lambda status: (
                    ranks.get(kind_of(status), len(ranks)),
                    order.get(family_of(status), len(order)),
                    status,
                ),
            )
        ],
        "suites": sorted(
            ((*suite, _only(kinds, by_kind(counts))) for suite, counts in suites.items()),
            key=lambda suite: (*(-number for number in suite[2].values()), suite[:2]),
        ),
        "kernels": sorted(((*kernel, n) for kernel, n in kernels.items()), key=lambda kernel: (-kernel[2], kernel)),
    }


def _only(kinds: Collection[str], counts: Mapping[str, int]) -> dict[str, int]:
    return {kind: number for kind, number in counts.items() if kind in kinds}


def by_kind(counts: Mapping[str, int]) -> dict[str, int]:
    """Sum counts per status into counts per kind (:data:`KIND_WORDS`)."""
    kinds = dict.fromkeys(KIND_WORDS, 0)
    for status, number in counts.items():
        if kind_of(status) in kinds:
            kinds[kind_of(status)] += number
    return kinds


@dataclass(frozen=True, slots=True)
class Course:
    """Rows that differ or fail, night by night, as SVG outlines.

    Attributes:
        differ: the outline of those that differ; one unit wide per night, 100 high.
        both: that of those that differ or fail.
        top: the count at the top.
        marks: indices of the nights whose environment changed.
    """

    differ: str
    both: str
    top: int
    marks: tuple[int, ...]


def course_of(nights: Sequence[Night]) -> Course:
    """Draw the course over all nights."""
    kinds = [by_kind(night.counts) for night in nights]
    both = [kind["differ"] + kind["fail"] for kind in kinds]
    top = max(both, default=0)
    marks = tuple(index for index, night in enumerate(nights) if night.changed)
    return Course(_outline([kind["differ"] for kind in kinds], top), _outline(both, top), top, marks)


def _outline(counts: Sequence[int], top: int) -> str:
    """Draw counts as an SVG path of steps; equal neighbours are one step, so that long quiet stretches cost a few
    bytes."""
    if not top:
        return ""
    path, at = "M0 100", 0
    for number, run in groupby(counts):
        at += len(list(run))
        path += f"V{round(100 - 100 * number / top, 1):g}H{at}"
    return f"{path}V100Z"


MEASURES = {"rate": ("How often it differs", ""), "seconds": ("Seconds", "s"), "peak_memory_mib": ("Memory", "MiB")}
"""Label and unit of each measured column."""

STEPS = 100
"""Maximum steps of a sparkline; with more nights, each step shows the largest value of several."""


ACROSS = 400
"""Width of a sparkline in units of its drawing: about its pixels, since a stretched line blurs."""


@dataclass(frozen=True, slots=True)
class Sparkline:
    """A number over the nights.

    Attributes:
        path: the SVG path, :data:`ACROSS` wide and 100 high; the largest number at the top, 0 at the bottom.
        newest: the last number, as text.
        least: the smallest, as text.
        most: the largest, as text.
    """

    path: str
    newest: str
    least: str
    most: str


def sparkline(values: Measured, *, nights: int) -> Sparkline | None:
    """Draw ``values`` over that many nights; ``None`` without values. A night without a value is a gap."""
    if not values:
        return None
    top = max(value for _, value in values) or 1.0
    width = -(-nights // STEPS)
    steps: dict[int, float] = {}
    for night, value in values:
        steps[night // width] = max(value, steps.get(night // width, 0.0))
    path, end, height = "", -1, -1
    for step, value in steps.items():
        begin, level = step * width, round(100 - 100 * value / top)
        if begin != end:
            path += f"M{_across(begin, nights)} {level}"
        elif level != height:
            path += f"V{level}"
        else:
            path = path[: path.rindex("H")]
        end, height = min(nights, begin + width), level
        path += f"H{_across(end, nights)}"
    numbers = [value for _, value in values]
    return Sparkline(path, *(f"{value:.4g}" for value in (numbers[-1], min(numbers), max(numbers))))


def _across(night: int, nights: int) -> int:
    return round(ACROSS * night / nights)


def measured_of(history: History, name: str) -> Measured:
    values = ((index, getattr(night, name)) for index, night in enumerate(history.nights))
    return tuple((index, value) for index, value in values if value is not None)


# ------------------------------------------------------------------------------------- the data of the heat map

INTERVALS = 200_000
"""Maximum intervals in a page; beyond it the oldest nights are left out."""

NAME = 80
"""Maximum characters of a name."""


def payload_of(history: History, *, detailed: Collection[int] = ()) -> dict[str, object]:
    """Return the JSON data of the heat map.

    ``models`` holds ``[scope, name, detailed, intervals]`` each, intervals as a flat list of ``gap, length, state`` and
    states as indices into a table, so that ten thousand models over a thousand nights take about a megabyte.

    Args:
        history: all nights.
        detailed: indices of the models whose diagnosis is on the page.
    """
    start = first_night_shown(history)
    scopes: dict[tuple[str, ...], int] = {}
    states: dict[tuple[str, str, str], int] = {}
    models = [
        [
            scopes.setdefault(model.key[:-1], len(scopes)),
            _name(model.key[-1]),
            int(index in detailed),
            list(_flat(model, start, states)),
        ]
        for index, model in enumerate(history.models)
    ]
    nights = history.nights[start:]
    return {
        "start": start,
        "nights": [_name(night.label) for night in nights],
        "marks": {index: changes_text(night.changed) for index, night in enumerate(nights) if night.changed},
        "scopes": [[_name(part) for part in scope] for scope in scopes],
        "states": [
            [_name(accuracy), letter_of(accuracy), kind_of(accuracy), _name(kernel), _name(cause)]
            for accuracy, kernel, cause in states
        ],
        "models": models,
    }


def first_night_shown(history: History, *, limit: int = INTERVALS) -> int:
    """Return the earliest night from which on all intervals fit into ``limit``."""
    if sum(len(model.intervals) for model in history.models) <= limit:
        return 0
    ends = sorted((interval.last for model in history.models for interval in model.intervals), reverse=True)
    return min(ends[limit] + 1, max(0, len(history.nights) - 1))


def _flat(model: ModelHistory, start: int, states: dict[tuple[str, str, str], int]) -> Iterator[int]:
    at = start
    for interval in model.intervals:
        if interval.last < start:
            continue
        first = max(interval.first, start)
        state = states.setdefault((interval.accuracy, interval.kernel, interval.cause), len(states))
        yield from (first - at, interval.last - first + 1, state)
        at = interval.last + 1


def changes_text(changes: Sequence[EnvironmentChange], *, limit: int = 3) -> str:
    """Format changes: ``packages.torch 2.15.0 → 2.16.0, threads.intra_op 2 → 4 and 3 more``."""
    texts = [
        f"{shorten(change.key, 40)} {shorten(change.base, 30) or '(none)'} → {shorten(change.new, 30) or '(none)'}"
        for change in changes[:limit]
    ]
    more = f" and {len(changes) - limit} more" if len(changes) > limit else ""
    return shorten(one_line(", ".join(texts) + more), 400)


def _name(text: str) -> str:
    return shorten(one_line(text), NAME)
