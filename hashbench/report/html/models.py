"""The third part of a report: one model, from what to do down to the bits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hashbench.catalog import REPEATED, kind_of, letter_of
from hashbench.records import LABELS, Row
from hashbench.report.history import History, Interval, models_in_trouble
from hashbench.report.html.evidence import ArmRead, read_evidence, reasons
from hashbench.report.html.excerpts import Excerpt
from hashbench.text import deterministic_here, how_much, how_often, spaced

DETAILS = 150
"""Models of which a page tells everything, the newest trouble first."""

INTERVALS_TOLD = 12
"""Intervals that the table of a model lists, the newest first."""

INTERVALS_DRAWN = 200
"""Intervals that the strip of a model draws, the newest."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """One interval as a reader wants it: labels of its nights, how many there are, and what the model did in them."""

    first: str
    last: str
    nights: int
    accuracy: str
    kind: str
    letter: str
    kernel: str
    cause: str
    start: int


@dataclass(frozen=True, slots=True)
class Arms:
    """The experiments on one thing that was repeated."""

    on: str
    words: str
    arms: tuple[ArmRead, ...]


@dataclass(frozen=True, slots=True)
class ModelView:
    """Everything that a page says of one model. ``now`` is its status in the last night (empty: no row), ``since`` the
    label of the night in which what ``row`` tells began, ``over`` whether the last night tells otherwise."""

    index: int
    key: tuple[str, ...]
    row: Row
    now: str
    letter: str
    kind: str
    since: str
    told_on: str
    nights: int
    over: bool
    facts: tuple[tuple[str, str], ...]
    conditions: tuple[tuple[str, str], ...]
    arms: tuple[Arms, ...]
    not_run: tuple[tuple[str, tuple[ArmRead, ...]], ...]
    excerpt: Excerpt | None
    stretches: tuple[Stretch, ...]
    more_stretches: int
    drawn: tuple[Stretch, ...]
    repro: str


def model_views(
    history: History, excerpts: Mapping[tuple[str, ...], Excerpt], *, limit: int = DETAILS
) -> tuple[ModelView, ...]:
    """Views of the models that have something to tell, the newest trouble first."""
    return tuple(
        view
        for index in models_in_trouble(history)[:limit]
        if (view := _view(history, index, excerpts.get(history.models[index].key))) is not None
    )


def _view(history: History, index: int, excerpt: Excerpt | None) -> ModelView | None:
    model = history.models[index]
    row, night = model.trouble, model.trouble_night
    if row is None or night is None:
        return None
    now = model.newest.accuracy if model.newest is not None else ""
    interval = model.at(night)
    read = read_evidence(row)
    stretches = [_stretch(history, one) for one in reversed(model.intervals)]
    return ModelView(
        index=index,
        key=model.key,
        row=row,
        now=now,
        letter=letter_of(row.accuracy),
        kind=kind_of(row.accuracy),
        since=history.nights[interval.first].label if interval is not None else "",
        told_on=history.nights[night].label,
        nights=interval.nights if interval is not None else 1,
        over=night != len(history.nights) - 1,
        facts=tuple((name, text) for name, text in _facts(row) if text),
        conditions=tuple((name, text) for name, text in _conditions(row) if text),
        arms=tuple(_arms(read)),
        not_run=tuple(reasons(read)),
        excerpt=excerpt,
        stretches=tuple(stretches[:INTERVALS_TOLD]),
        more_stretches=len(stretches) - len(stretches[:INTERVALS_TOLD]),
        drawn=tuple(reversed(stretches[:INTERVALS_DRAWN])),
        repro=str(Path(excerpt.folder if excerpt else "") / row.repro) if row.repro else "",
    )


def _stretch(history: History, interval: Interval) -> Stretch:
    return Stretch(
        first=history.nights[interval.first].label,
        last=history.nights[interval.last].label,
        nights=interval.nights,
        accuracy=interval.accuracy,
        kind=kind_of(interval.accuracy),
        letter=letter_of(interval.accuracy),
        kernel=interval.kernel,
        cause=interval.cause,
        start=interval.first,
    )


def _arms(read: Sequence[ArmRead]) -> Iterator[Arms]:
    for on, repeated in REPEATED.items():
        found = tuple(one for one in read if one.arm.on == on and one.arm.ran)
        if found:
            yield Arms(on, repeated.heading, found)


# ------------------------------------------------------------------------------------------------------ facts


def _facts(row: Row) -> Iterator[tuple[str, str]]:
    yield "What differed", row.detail
    yield "Origin", row.origin if row.origin != "kernel" else ""
    yield "Phase", f"{row.phase}, iteration {row.iteration}" if row.phase else ""
    yield "Forward op", row.forward_op
    yield "Source line", row.source
    yield "Steered by", row.steered_by
    yield "How often", how_often(row)
    yield "How much", how_much(row)
    yield "Results", row.differing_results
    yield "Further sources", row.other_sources
    yield "Evidence", "" if row.evidence.results else row.evidence.text
    yield "Not captured", row.capture
    yield "Harmless differences", f"{row.benign}: {row.benign_ops}" if row.benign else ""
    yield from ((label, getattr(row, column)) for column, label in LABELS.items())
    yield "Deterministic algorithms here", deterministic_here(row)


def _conditions(row: Row) -> Iterator[tuple[str, str]]:
    yield "Batch", _number(row.batch_size)
    yield "Iterations", _number(row.iterations)
    yield "Runs", _number(row.runs)
    yield "Threads", _number(row.threads)
    yield "Deterministic", row.deterministic
    yield "No deterministic kernel", row.nondeterministic_op
    yield "Ops", _number(row.ops)
    yield "Seconds", "" if row.seconds is None else f"{row.seconds:.1f}"
    yield "Peak memory", "" if row.peak_memory_mib is None else f"{row.peak_memory_mib:.0f} MiB"
    yield "Peak on the device", "" if row.device_memory_mib is None else f"{row.device_memory_mib:.0f} MiB"
    yield "Retried after", row.retried
    yield "Environment", row.env


def _number(value: int | None) -> str:
    return "" if value is None else spaced(value)
