"""The third part of a report: one model, from what to do down to the bits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hashbench.catalog import REPEATED, kind_of, letter_of
from hashbench.records import Row
from hashbench.report.describe import spell_at, worth_telling
from hashbench.report.history import History, Spell
from hashbench.report.html.evidence import ArmRead, read_evidence, reasons
from hashbench.report.html.excerpts import Excerpt

DETAILS = 150
"""Models of which a page tells everything, the newest trouble first."""

SPELLS_TOLD = 12
"""Spells that the table of a model lists, the newest first."""

SPELLS_DRAWN = 200
"""Spells that the strip of a model draws, the newest."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """One spell as a reader wants it: labels of its nights, how many there are, and what the model did in them."""

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
        for index in worth_telling(history)[:limit]
        if (view := _view(history, index, excerpts.get(history.models[index].key))) is not None
    )


def _view(history: History, index: int, excerpt: Excerpt | None) -> ModelView | None:
    model = history.models[index]
    row, night = model.told, model.told_night
    if row is None or night is None:
        return None
    now = model.newest.accuracy if model.newest is not None else ""
    spell = spell_at(model, night)
    read = read_evidence(row)
    stretches = [_stretch(history, one) for one in reversed(model.spells)]
    return ModelView(
        index=index,
        key=model.key,
        row=row,
        now=now,
        letter=letter_of(row.accuracy),
        kind=kind_of(row.accuracy),
        since=history.nights[spell.first].label if spell is not None else "",
        told_on=history.nights[night].label,
        nights=spell.last - spell.first + 1 if spell is not None else 1,
        over=night != len(history.nights) - 1,
        facts=tuple((name, text) for name, text in _facts(row) if text),
        conditions=tuple((name, text) for name, text in _conditions(row) if text),
        arms=tuple(_arms(read)),
        not_run=tuple(reasons(read)),
        excerpt=excerpt,
        stretches=tuple(stretches[:SPELLS_TOLD]),
        more_stretches=len(stretches) - len(stretches[:SPELLS_TOLD]),
        drawn=tuple(reversed(stretches[:SPELLS_DRAWN])),
        repro=str(Path(excerpt.folder if excerpt else "") / row.repro) if row.repro else "",
    )


def _stretch(history: History, spell: Spell) -> Stretch:
    return Stretch(
        first=history.nights[spell.first].label,
        last=history.nights[spell.last].label,
        nights=spell.last - spell.first + 1,
        accuracy=spell.accuracy,
        kind=kind_of(spell.accuracy),
        letter=letter_of(spell.accuracy),
        kernel=spell.kernel,
        cause=spell.cause,
        start=spell.first,
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
    yield "Not captured", row.capture
    yield "Confirmed by another pair", row.confirmed
    yield "Untraced runs", row.untraced
    yield "Settings changed", row.settings_changed
    yield "Harmless differences", f"{row.benign}: {row.benign_ops}" if row.benign else ""
    yield "torch documents", row.deterministic_doc
    yield "Deterministic algorithms here", deterministic_here(row)


def how_often(row: Row) -> str:
    """``33 of 33 replays (91 % to 100 %), 34 different outcomes``."""
    if row.rate is None or row.trials is None:
        return ""
    text = f"{round(row.rate * row.trials)} of {row.trials} {row.rate_of or 'runs'}"
    if row.rate_low is not None and row.rate_high is not None:
        text += f" (95 % interval: {row.rate_low:.1%} to {row.rate_high:.1%})"
    return text + (f", {row.distinct} different outcomes" if row.distinct else "")


def how_much(row: Row) -> str:
    """``101 169 elements (31 %), at most 3.6e-07 and 32 768 ULP apart``."""
    parts = []
    if row.differing_elements is not None:
        share = f" ({100 * row.count_variability:.2g} %)" if row.count_variability is not None else ""
        parts.append(f"{spaced(row.differing_elements)} elements{share}")
    if row.max_abs_diff is not None:
        parts.append(f"at most {row.max_abs_diff:.3g} apart")
    if row.max_ulp is not None:
        parts.append(f"{spaced(row.max_ulp)} units in the last place")
    return ", ".join([*parts, *filter(None, [row.representation])])


def spaced(number: int) -> str:
    """``32 768``, with narrow spaces that do not break."""
    return f"{number:,}".replace(",", "\N{NARROW NO-BREAK SPACE}")


def deterministic_here(row: Row) -> str:
    """What the deterministic algorithms did, and their price."""
    price = f", at {row.deterministic_price:.2g} times the time" if row.deterministic_price is not None else ""
    return row.deterministic_here + price if row.deterministic_here else ""


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


def scope_words(key: Sequence[str]) -> str:
    """``torchvision · training · float32 · cpu``, of a zoo file only its name."""
    suite, *rest = key[:-1]
    return " · ".join(part for part in (suite_words(suite), *rest) if part)


def suite_words(suite: str) -> str:
    """The name of a suite; of the path of a zoo file its last part."""
    return Path(suite).name if "/" in suite else suite
