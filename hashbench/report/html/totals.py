"""The second part of a report: how many, of what, and how that went over the nights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hashbench.catalog import STATUSES, Kind, kind_of
from hashbench.report.history import History, ModelHistory, Night

KINDS = ("differ", "fail", "skip", "pass")
KIND_WORDS = {"differ": "differ", "fail": "fail", "skip": "skipped", "pass": "pass"}

KERNELS = 20
"""Kernels that the table names at most."""

MARKS = 60
"""Changes of the environment that drawings mark, the newest: a machine may be another one every night."""

SUITES = 40
"""Pairs of suite and mode that the table names at most."""


@dataclass(frozen=True, slots=True)
class Tile:
    """One kind of status: how many models have it, and how many more than in the night before (``None``: there is no
    such night)."""

    kind: str
    word: str
    count: int
    change: int | None


@dataclass(frozen=True, slots=True)
class Totals:
    """Everything that is counted of the last night. ``statuses`` are ``(status, now, before)``, ``suites`` ``(suite,
    mode, count per kind)``, ``kernels`` ``(kernel, cause, models)``, the largest first; ``more_*`` count what is left
    out."""

    models: int
    tiles: tuple[Tile, ...]
    statuses: tuple[tuple[str, int, int | None], ...]
    suites: tuple[tuple[str, str, Mapping[str, int]], ...]
    more_suites: int
    kernels: tuple[tuple[str, str, int], ...]
    more_kernels: int


def totals_of(history: History) -> Totals:
    """The totals of the last night."""
    now = history.nights[-1].counts if history.nights else {}
    # A night that could not be read tells nothing of what there was before.
    before = next((night.counts for night in reversed(history.nights[:-1]) if night.counts), None)
    newest = [model for model in history.models if model.newest is not None]
    suites, kernels = _suites(newest), _kernels(newest)
    return Totals(
        models=sum(now.values()),
        tiles=tuple(_tile(kind, now, before) for kind in KINDS),
        statuses=tuple(
            (status, now.get(status, 0), None if before is None else before.get(status, 0))
            for status in _in_order({*now, *(before or ())})
        ),
        suites=tuple(suites[:SUITES]),
        more_suites=len(suites) - len(suites[:SUITES]),
        kernels=tuple(kernels[:KERNELS]),
        more_kernels=len(kernels) - len(kernels[:KERNELS]),
    )


def by_kind(counts: Mapping[str, int]) -> dict[str, int]:
    """How many of each of :data:`KINDS`, from counts per status."""
    found = dict.fromkeys(KINDS, 0)
    for status, count in counts.items():
        if kind_of(status) in found:
            found[kind_of(status)] += count
    return found


def _tile(kind: str, now: Mapping[str, int], before: Mapping[str, int] | None) -> Tile:
    count = by_kind(now)[kind]
    return Tile(kind, KIND_WORDS[kind], count, None if before is None else count - by_kind(before)[kind])


def _in_order(statuses: set[str]) -> list[str]:
    known = {status: place for place, status in enumerate(STATUSES)}
    return sorted(statuses, key=lambda status: (known.get(status, len(known)), status))


def _suites(newest: Sequence[ModelHistory]) -> list[tuple[str, str, Mapping[str, int]]]:
    counts: dict[tuple[str, str], Counter[str]] = {}
    for model in newest:
        if model.newest is not None:
            counts.setdefault((model.key[0], model.key[1]), Counter())[model.newest.accuracy] += 1
    found = [(suite, mode, by_kind(count)) for (suite, mode), count in counts.items()]
    return sorted(found, key=lambda one: (-sum(one[2].values()), one[0], one[1]))


def _kernels(newest: Sequence[ModelHistory]) -> list[tuple[str, str, int]]:
    rows = [model.newest for model in newest if model.newest is not None]
    counts = Counter(
        (row.kernel or f"({row.origin or 'unknown'})", row.cause)
        for row in rows
        if kind_of(row.accuracy) is Kind.DIFFER
    )
    return sorted(((kernel, cause, n) for (kernel, cause), n in counts.items()), key=lambda one: (-one[2], one))


# -------------------------------------------------------------------------------------------------- over time


@dataclass(frozen=True, slots=True)
class Course:
    """How many models differ or fail, night by night, as outlines of a drawing that is ``len(nights)`` wide and 100
    high; ``top`` is the count at the top, ``marks`` are the newest nights whose environment is another than the night
    before, ``changes`` counts all such nights."""

    differ: str
    both: str
    top: int
    marks: tuple[int, ...]
    changes: int


def course_of(nights: Sequence[Night]) -> Course:
    """The course over all nights."""
    kinds = [by_kind(night.counts) for night in nights]
    differ = [kind["differ"] for kind in kinds]
    both = [kind["differ"] + kind["fail"] for kind in kinds]
    top = max(both, default=0)
    marks = [place for place, night in enumerate(nights) if night.changed]
    return Course(
        differ=_outline(differ, top),
        both=_outline(both, top),
        top=top,
        marks=tuple(marks[-MARKS:]),
        changes=len(marks),
    )


def _outline(counts: Sequence[int], top: int) -> str:
    """An SVG path of steps. Equal neighbours are one step: a thousand quiet nights cost a few bytes."""
    if not top:
        return ""
    parts, at = ["M0 100"], 0
    while at < len(counts):
        end = next((place for place in range(at, len(counts)) if counts[place] != counts[at]), len(counts))
        parts.append(f"V{round(100 - 100 * counts[at] / top, 1):g}H{end}")
        at = end
    return "".join(parts) + "V100Z"
