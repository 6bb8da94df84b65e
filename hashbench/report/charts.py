"""What the page draws and counts of a history: totals, courses over the nights, and the data of the heat map."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from hashbench.catalog import STATUSES, Kind, family_of, kind_of, letter_of
from hashbench.report.compare import EnvironmentChange
from hashbench.report.history import History, Measured, ModelHistory, Night
from hashbench.text import one_line, shorten

KIND_WORDS = {
    "differ": "differ",
    "latent": "flaky",
    "fail": "fail",
    "skip": "skipped",
    "pass": "pass",
}


def totals_of(history: History) -> dict[str, Any]:
    """What is counted of the last night: ``kinds`` and the ``change`` of each since the night before (``None``: there
    is none), ``models`` (of which one may have several rows), ``statuses`` as ``(status, now, before)``, ``suites`` as
    ``(suite, mode, count per kind)``, those with the most that differ first, and ``kernels`` as ``(kernel, cause,
    rows)``, the largest first."""
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
        (row.kernel or f"({row.origin or 'unknown'})", row.cause) for row in rows if kind_of(row.accuracy).has_cause
    )
    return {
        "kinds": kinds,
        "models": len({(row.suite, row.name) for row in rows}),
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
    """How many of each of :data:`KIND_WORDS`, from counts per status."""
    kinds = dict.fromkeys(KIND_WORDS, 0)
    for status, number in counts.items():
        if kind_of(status) in kinds:
            kinds[kind_of(status)] += number
    return kinds


@dataclass(frozen=True, slots=True)
class Course:
    """How many models differ or fail, night by night, as outlines of a drawing that is as wide as there are nights and
    100 high; ``top`` is the count at the top. ``marks`` are the nights whose environment is another than before."""

    differ: str
    both: str
    top: int
    marks: tuple[int, ...]


def course_of(nights: Sequence[Night]) -> Course:
    """The course over all nights."""
    kinds = [by_kind(night.counts) for night in nights]
    both = [kind["differ"] + kind["fail"] for kind in kinds]
    top = max(both, default=0)
    marks = tuple(index for index, night in enumerate(nights) if night.changed)
    return Course(_outline([kind["differ"] for kind in kinds], top), _outline(both, top), top, marks)


def _outline(counts: Sequence[int], top: int) -> str:
    """An SVG path of steps. Equal neighbours are one step: a thousand quiet nights cost a few bytes."""
    if not top:
        return ""
    path, at = "M0 100", 0
    for number, run in groupby(counts):
        at += len(list(run))
        path += f"V{round(100 - 100 * number / top, 1):g}H{at}"
    return f"{path}V100Z"


MEASURES = {"rate": ("How often it differs", ""), "seconds": ("Seconds", "s"), "peak_memory_mib": ("Memory", "MiB")}
"""Of each of the columns whose course is kept, what it is called, and its unit."""

STEPS = 100
"""Steps that a sparkline has at most; where there are more nights, each step shows the largest of several."""


ACROSS = 400
"""How wide a sparkline is, in the units of its drawing: about as many pixels, since a line that is stretched blurs."""


@dataclass(frozen=True, slots=True)
class Sparkline:
    """The course of a number as the outline of a drawing :data:`ACROSS` wide and 100 high, with its largest number at
    the top and 0 at the bottom; ``newest``, ``least`` and ``most`` as texts."""

    path: str
    newest: str
    least: str
    most: str


def sparkline(values: Measured, *, nights: int) -> Sparkline | None:
    """The sparkline of ``values`` over that many nights; ``None`` where there are none. A night without a value is a
    gap."""
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
"""Intervals that a page holds at most; where there are more, the oldest nights are left out."""

NAME = 80
"""Characters of a name."""


def payload_of(history: History, *, detailed: Collection[int] = ()) -> dict[str, object]:
    """What the page's script draws the heat map from. ``detailed`` are the indices of the models that the page has a
    diagnosis of.

    ``models`` holds ``[scope, name, detailed, intervals]`` each, intervals as a flat list of ``gap, length, state`` and
    states as indices into a table, so that ten thousand models over a thousand nights take about a megabyte.
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
    """The earliest night from which on all intervals fit into ``limit``."""
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
    """``packages.torch 2.15.0 → 2.16.0, threads.intra_op 2 → 4 and 3 more``."""
    texts = [
        f"{shorten(one.key, 40)} {shorten(one.base, 30) or '(none)'} → {shorten(one.new, 30) or '(none)'}"
        for one in changes[:limit]
    ]
    more = f" and {len(changes) - limit} more" if len(changes) > limit else ""
    return shorten(one_line(", ".join(texts) + more), 400)


def _name(text: str) -> str:
    return shorten(one_line(text), NAME)
