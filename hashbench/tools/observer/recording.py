"""The observations of one run, compared with those of another, and the mismatches as text. Pure: no torch, no files.

An observation is a record of a trace (:class:`~hashbench.core.records.OpRecord`) with a name: that of ``observe`` and
its like, or of an op under the hash mode. So observations are aligned as traces are, and one more of them is one
insertion.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from operator import attrgetter
from typing import Any, NamedTuple

from tabulate import tabulate

from hashbench.core.divergence.align import EDIT_LIMIT, align
from hashbench.core.records import OpRecord, TensorDigest
from hashbench.core.report.compare import EnvironmentChange
from hashbench.core.text import join_limited, one_line, shorten
from hashbench.core.trace.file import digest_text


class Saved(NamedTuple):
    """One tensor of a reference's file of tensors: its number there, and what it was in the reference run."""

    number: int
    dtype: str
    shape: tuple[int, ...]
    device: str


@dataclass(frozen=True, slots=True)
class Observation:
    """One thing observed. ``name`` is unique in its run (``output_2`` is the second ``output``).

    ``record.op`` says what was observed: ``observe output``, or the op. ``record.outputs`` are the digests of all
    tensors in it, ``record.arguments`` says where in the value they were. ``saved`` lists its tensors in the
    reference's file, where it was marked as nondeterministic. ``note`` says why a saved value could not be put back.
    """

    name: str
    record: OpRecord
    saved: tuple[Saved, ...] = ()
    note: str = ""

    @property
    def value(self) -> str:
        """The digests of all tensors in it as text: what other runs are told apart by."""
        return " ".join(output.word() for output in self.record.outputs)


@dataclass(frozen=True, slots=True)
class Recording:
    """One run's observations. ``checked`` tells a check from a reference run, ``put_back`` counts the values that came
    from the reference. ``error`` is that by which the run ended before its end, so that it is no reference."""

    name: str
    observations: tuple[Observation, ...]
    environment: Mapping[str, Any] = field(default_factory=dict)
    checked: bool = False
    put_back: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True)
class PutBack:
    """A value of the reference run that took the place of this run's. ``name``: that of ``observe_non_deterministic``,
    or the id of the op's record. ``differed``: the two had other bits.
    ``device`` says from which device to which it went, where that is another; else it is empty."""

    name: str
    differed: bool
    device: str = ""


class Kind(StrEnum):
    """How an observation does not match the reference."""

    CHANGED = "changed"
    INSERTED = "inserted"
    MISSING = "missing"
    NOT_PUT_BACK = "not put back"


@dataclass(frozen=True, slots=True)
class Mismatch:
    """One observation that does not match the reference.

    ``index`` counts this run's observations from 0, ``reference_index`` the reference's; ``None``: a side has none.
    ``current`` and ``reference`` are what was observed, as text (digests with dtype, shape, and stride where it is not
    contiguous), empty where a side has none. ``source`` is the line of code (of the reference for what is missing),
    ``module`` the path of the module that was being called. ``detail`` says in words what differs.
    """

    kind: Kind
    name: str
    op: str
    detail: str
    index: int | None
    reference_index: int | None
    reference_name: str = ""
    current: str = ""
    reference: str = ""
    phase: str = ""
    module: str = ""
    source: str = ""

    def __str__(self) -> str:
        """Describe on one line what differs, and where."""
        sides = f": {self.current or 'nothing'} now, {self.reference or 'nothing'} in the reference"
        return f"{self.name} {self.kind} ({_where(self)}): {self.detail}{sides}"


def _where(mismatch: Mismatch) -> str:
    return ", ".join(filter(None, (mismatch.phase, mismatch.module, mismatch.source)))


# ------------------------------------------------------------------------------------------------------ comparing


def mismatches(
    reference: Sequence[Observation], current: Sequence[Observation], *, finished: bool
) -> dict[str, Mismatch]:
    """List all that does not match, in order, by name: that of this run's observation, and ``reference:<name>`` for
    what only the reference has. Of a run that is not ``finished``, what the reference has after the last match is not
    missing yet."""
    if not finished:
        reference = reference[: len(current) + EDIT_LIMIT // 4]
    pairs = align([old.record for old in reference], [new.record for new in current])
    while not finished and pairs and pairs[-1][1] is None:
        pairs.pop()
    judged = [mismatch for pair in pairs if (mismatch := _judged(reference, current, *pair)) is not None]
    return {f"reference:{each.name}" if each.kind is Kind.MISSING else each.name: each for each in judged}


def newest_mismatch(reference: Sequence[Observation], current: Sequence[Observation]) -> Mismatch | None:
    """Return the mismatch of the newest observation, where all before it were in step with the reference."""
    index = len(current) - 1
    in_step = index < len(reference) and align([reference[index].record], [current[index].record]) == [(0, 0)]
    return _judged(reference, current, index if in_step else None, index)


def _judged(
    reference: Sequence[Observation], current: Sequence[Observation], reference_index: int | None, index: int | None
) -> Mismatch | None:
    """Return the mismatch of an aligned pair; ``None`` where the two match."""
    old = None if reference_index is None else reference[reference_index]
    new = None if index is None else current[index]
    kind, detail = _difference(old, new)
    shown = new or old
    if kind is None or shown is None:
        return None
    record = shown.record
    return Mismatch(
        kind,
        shown.name,
        record.op,
        detail,
        index,
        reference_index,
        reference_name=old.name if old is not None else "",
        current=_seen(new),
        reference=_seen(old),
        phase=record.phase,
        module=record.module,
        source=record.source,
    )


def _difference(old: Observation | None, new: Observation | None) -> tuple[Kind | None, str]:
    """Compare an observation with that of the reference, and describe the difference; ``None``: they match."""
    if new is None:
        return Kind.MISSING, "this run does not have it"
    if new.note:
        return Kind.NOT_PUT_BACK, new.note
    if old is None:
        return Kind.INSERTED, "the reference does not have it"
    detail = ", ".join(_changes(old.record, new.record))
    return (Kind.CHANGED, detail) if detail else (None, "")


def _changes(old: OpRecord, new: OpRecord) -> Iterator[str]:
    if old.arguments != new.arguments:
        parts = "its parts" if old.op.startswith("observe ") else "its arguments"
        yield f"{parts} were ({old.arguments}), are ({new.arguments})"
    if old.scalar != new.scalar:
        yield f"its value was {old.scalar or 'none'}, is {new.scalar or 'none'}"
    if old.outputs == new.outputs:
        return
    if len(old.outputs) != len(new.outputs):
        yield f"it had {len(old.outputs)} tensors, has {len(new.outputs)}"
    else:
        kinds = [_change(*pair) for pair in zip(old.outputs, new.outputs, strict=True) if pair[0] != pair[1]]
        which = "" if len(old.outputs) == 1 else f" ({len(kinds)} of {len(old.outputs)} tensors)"
        yield " and ".join(dict.fromkeys(kinds)) + which
    if old.rng != new.rng:
        yield "RNG state before it differs"


def _change(old: TensorDigest, new: TensorDigest) -> str:
    if old.dtype != new.dtype:
        return "different dtype"
    if old.shape != new.shape:
        return "different shape"
    if old.stride != new.stride:  # the digest is of the bytes in the order of memory
        return "different stride" if old.value == new.value else "different stride, and different bytes in memory order"
    return "different content"


def _seen(observation: Observation | None) -> str:
    """Format the observation as text."""
    if observation is None:
        return ""
    record = observation.record
    words = [*map(digest_text, record.outputs), *([f"= {record.scalar}"] if record.scalar else [])]
    return " ".join(words) or f"({record.arguments})"


# ---------------------------------------------------------------------------------------- mismatches as a table

_SHOWN = 50
_WIDTHS = {"kind": 12, "index": 15, "name": 44, "where": 40, "what": 60, "now": 44, "reference": 44}


def table(
    mismatches: Sequence[Mismatch],
    *,
    observed: int,
    expected: int,
    changes: Sequence[EnvironmentChange] = (),
    put_back: Sequence[PutBack] = (),
) -> str:
    """Return the first mismatches as a table, how many there are, the environment's changes, and which values were put
    back."""
    count = {0: "no mismatches", 1: "1 mismatch"}.get(len(mismatches), f"{len(mismatches)} mismatches")
    lines = [f"{count} in {observed} observations (the reference has {expected})"]
    if mismatches:
        cells = [list(map(shorten, _cells(mismatch), _WIDTHS.values())) for mismatch in mismatches[:_SHOWN]]
        lines.append(tabulate(cells, headers=list(_WIDTHS), disable_numparse=True))
    if len(mismatches) > _SHOWN:
        lines.append(f"and {len(mismatches) - _SHOWN} more")
    if changes:
        lines.append("this environment is not that of the reference:")
        lines += [f"  {one_line(c.key)}: {_side(c.base)} in the reference, {_side(c.new)} now" for c in changes]
    if put_back:
        differed = [one_line(value.name) for value in put_back if value.differed]
        names = f": {join_limited(differed)}" if differed else ""
        lines.append(f"values put back: {len(put_back)}, other than this run's: {len(differed)}{names}")
    moved = [f"{one_line(value.name)} ({value.device})" for value in put_back if value.device]
    if moved:
        lines.append(f"values put back on another device than they were saved from: {join_limited(moved)}")
    return "\n".join(lines)


def _cells(mismatch: Mismatch) -> list[str]:
    index = " / ".join("-" if number is None else str(number) for number in (mismatch.index, mismatch.reference_index))
    kind, name, what, now, reference = attrgetter("kind", "name", "detail", "current", "reference")(mismatch)
    texts = (kind, index, name, _where(mismatch), what, now, reference)
    return list(map(one_line, texts))


def _side(text: str) -> str:
    return shorten(one_line(text), 60) or "absent"
