"""Judge single calls by their effect on the rows of items, between two runs of different batches. Pure: no torch."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any

from hashbench.core.divergence.align import OVERWRITING, name_of
from hashbench.core.divergence.slice import backward_slice
from hashbench.core.records import OpRecord, Ref, Trace
from hashbench.extensions.invariance.layout import ItemSubset
from hashbench.extensions.invariance.match import Agreement, CallRows, Match, TensorRows, match

_ADDING = frozenset({"_index_put_impl_", "index_copy_", "index_fill_", "index_put_", "put_", "scatter_"})
"""Those of :data:`OVERWRITING` that leave a part of their target as it was."""

_SIZES = re.compile(r"(?<![\w.])-?\d+(?![\w.])")
"""Whole numbers in the text of arguments: most are sizes."""


@dataclass(frozen=True, slots=True)
class RowRun:
    """One run by rows.

    Attributes:
        trace: its trace.
        calls: id of a record → what the call read and wrote.
        views: record → argument → the ops through which it reads a view, in order.
    """

    trace: Trace
    calls: Mapping[str, CallRows]
    views: Mapping[str, Mapping[str, tuple[str, ...]]] = field(default_factory=dict)


@dataclass(frozen=True)
class RowRuns:
    """Two runs to compare by rows.

    Attributes:
        subset: the items of both runs.
        reference: the run of all items.
        other: the run of the subset.
        counterparts: ids of records of the other run → those of the reference.
    """

    subset: ItemSubset
    reference: RowRun
    other: RowRun
    counterparts: Mapping[str, str]

    @property
    def varied(self) -> str:
        """What the runs differ in, in one word."""
        return "context" if self.subset.together else "batch"

    @cached_property
    def records(self) -> Mapping[str, OpRecord]:
        """The records of the other run by id."""
        return {record.id: record for record in self.other.trace.records}

    @cached_property
    def references(self) -> Mapping[str, OpRecord]:
        """The records of the reference by id."""
        return {record.id: record for record in self.reference.trace.records}

    @cached_property
    def leaves(self) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """The digests of the leaves of the reference and of the other run, by id."""
        first, second = ({leaf.id: leaf.digest for leaf in run.trace.leaves} for run in (self.reference, self.other))
        return first, second

    @cached_property
    def judged(self) -> Mapping[str, JudgedCall]:
        """The effect of every call of the other run that wrote something, by id, in order. Calls inside a custom op are
        left out: the op is the unit."""
        calls = self.other.calls
        return {
            record.id: _judge(self, record)
            for record in self.records.values()
            if record.id in calls and not record.inside
        }

    def unit(self, node: str) -> str:
        """Return the id of the custom op inside which a record was made; for most records their own id."""
        while node in self.records and self.records[node].inside:
            node = self.records[node].inside
        return node

    # ------------------------------------------------------- calls that the runs make a different number of times

    @cached_property
    def uneven(self) -> Mapping[str, tuple[int, int]]:
        """Op in a module → its numbers of calls, if these differ, as those of a loop over the items do."""
        counts = [
            Counter(record.id.rpartition("#")[0] for record in run.trace.records if not record.inside)
            for run in (self.reference, self.other)
        ]
        both = {name: (counts[0][name], counts[1][name]) for name in counts[0] | counts[1]}
        return {name: (there, here) for name, (there, here) in both.items() if there != here}

    def shifted(self, record: OpRecord) -> bool:
        """Return True if the runs called this op in this module a different number of times."""
        return record.id.rpartition("#")[0] in self.uneven

    def of_content(self, record: OpRecord, rows: CallRows) -> Sequence[str]:
        """Return the calls of the reference with the same inputs, if whole tensors are passed."""
        return self._by_content.get(_content_key(record, rows), ()) if self.shifted(record) else ()

    def of_state(self, record: OpRecord, rows: CallRows) -> Sequence[str]:
        """Return the calls of the reference that drew from the same state of a generator."""
        return self._by_state.get(_state_key(record, rows), ()) if self.shifted(record) else ()

    @cached_property
    def _by_content(self) -> Mapping[Any, Sequence[str]]:
        return _grouped((_content_key(*call), call[0].id) for call in self._shifted_calls())

    @cached_property
    def _by_state(self) -> Mapping[Any, Sequence[str]]:
        return _grouped((_state_key(*call), call[0].id) for call in self._shifted_calls() if call[1].drew is not None)

    def _shifted_calls(self) -> Iterator[tuple[OpRecord, CallRows]]:
        calls = self.reference.calls
        return (
            (record, calls[record.id])
            for record in self.references.values()
            if record.id in calls and self.shifted(record)
        )


def _content_key(record: OpRecord, rows: CallRows) -> Any:
    return (
        record.op,
        record.module,
        record.arguments,
        record.rng,
        tuple(each._replace(cut=None) for _, each in rows.read),
    )


def _state_key(record: OpRecord, rows: CallRows) -> Any:
    return None if rows.drew is None else (record.op, record.module, rows.drew.before)


def _grouped(pairs: Iterator[tuple[Any, str]]) -> Mapping[Any, Sequence[str]]:
    found: dict[Any, list[str]] = {}
    for key, name in pairs:
        found.setdefault(key, []).append(name)
    return found


class RowEffect(Enum):
    """Effect of a call on the rows of the items."""

    SAME = "nothing that it wrote differs"
    PROPAGATED = "what it wrote differs, and so does what it read"
    ORIGIN = "what it wrote differs, and nothing that it read does"
    UNKNOWN = "it cannot be told"


@dataclass(frozen=True, slots=True)
class JudgedCall:
    """One call of the smaller run, compared with its counterpart.

    Attributes:
        effect: its effect on the rows.
        reference: id of the counterpart; "" without one.
        read: argument → match.
        written: matches of what it wrote.
        coupled: in words, what else came from the batch, if no tensor did.
        redrawn: whether both calls drew random numbers, from generators in different states.
    """

    effect: RowEffect
    reference: str = ""
    read: Mapping[str, Match] = field(default_factory=dict)
    written: tuple[Match, ...] = ()
    coupled: str = ""
    redrawn: bool = False


def _judge(runs: RowRuns, record: OpRecord) -> JudgedCall:
    """Compare a call with its counterpart. Of calls that the runs make a different number of times, one with the same
    content, or that drew from the same state, is as good."""
    rows = runs.other.calls[record.id]

    def compared(nodes: Iterable[str]) -> Iterator[JudgedCall]:
        return filter(None, (_compared(runs, record, rows, node) for node in nodes))

    matched = next(compared([runs.counterparts.get(record.id, "")]), None)
    if matched is None or matched.redrawn or not _all_sure(matched.read.values()):
        matched = next(compared(runs.of_content(record, rows)), matched)
    if matched is not None and matched.redrawn:
        same = (call for call in compared(runs.of_state(record, rows)) if call.effect is RowEffect.SAME)
        matched = next(same, matched)
    return matched or JudgedCall(RowEffect.UNKNOWN if rows.written else RowEffect.SAME)


def _all_sure(given: Iterable[Match]) -> bool:
    return all(match.surely_equal for match in given)


def _compared(runs: RowRuns, record: OpRecord, rows: CallRows, node: str) -> JudgedCall | None:
    """Compare a call with one of the reference; ``None`` if the two do not correspond."""
    reference = runs.reference.calls.get(node)
    if reference is None or not _correspond(runs, rows, reference):
        return None
    read = _matches_read(runs, record, rows, reference)
    inherited = tuple(read.values())
    pairs = zip(reference.written, rows.written, strict=True)
    written = tuple(match(whole, part, runs.subset, inherited) for whole, part in pairs)
    if all(match.equal for match in written):
        return JudgedCall(RowEffect.SAME, node, read, written)
    if not _all_sure(_weighed(rows, read, written)):
        return JudgedCall(RowEffect.PROPAGATED, node, read, written, redrawn=_drew_otherwise(rows, reference))
    if _drew_otherwise(rows, reference):
        coupled = f"it draws from a generator in another state for another {runs.varied}"
        return JudgedCall(RowEffect.ORIGIN, node, read, written, coupled, redrawn=True)
    effect, coupled = _effect(runs, record, runs.references[node], _weighed(rows, read, written), written)
    return JudgedCall(effect, node, read, written, coupled)


def _correspond(runs: RowRuns, rows: CallRows, reference: CallRows) -> bool:
    """Return True if both wrote as many tensors, and the reference has all inputs of the other run.

    It may have more: as many tensors as there are items. With tokens either may: a mask that the other run does
    without.
    """
    has_inputs = runs.subset.together or dict(reference.read).keys() >= dict(rows.read).keys()
    return has_inputs and len(rows.written) == len(reference.written)


def _matches_read(runs: RowRuns, record: OpRecord, rows: CallRows, reference: CallRows) -> Mapping[str, Match]:
    """Compare what both calls read, by argument."""
    there, refs = dict(reference.read), {ref.argument: ref for ref in record.inputs}
    return {
        path: _match_state(runs, there[path], here)
        for path, here in rows.read
        if path in there and not _is_not_read(runs, record, refs.get(path))
    }


def _weighed(rows: CallRows, read: Mapping[str, Match], written: Sequence[Match]) -> Sequence[Match]:
    """Return the inputs that may explain a difference. Where rows that differ were found in another order, tables of
    their places differ by design."""
    held = [read[path] for path, here in rows.read if path in read and not _is_table(here, read[path])]
    reordered = {match.sizes for match in held if match.agreement is Agreement.FOUND}
    by_design = any(match.sizes in reordered for match in written if not match.equal)
    return held if by_design else tuple(read.values())


def _drew_otherwise(rows: CallRows, reference: CallRows) -> bool:
    """Return True if both drew random numbers, from generators in different states."""
    return rows.drew is not None and reference.drew is not None and rows.drew.before != reference.drew.before


def _effect(
    runs: RowRuns, record: OpRecord, reference: OpRecord, read: Sequence[Match], written: Sequence[Match]
) -> tuple[RowEffect, str]:
    """Return the effect of a call that read equal rows and wrote others, and in words what else came from the batch."""
    known = any(match.agreement is Agreement.DIFFERENT for match in written)
    other_arguments = record.arguments != reference.arguments
    if not known or _has_mixed_row_order(read) or (other_arguments and runs.shifted(record)):
        return RowEffect.UNKNOWN, ""
    both = f"{record.arguments} and {reference.arguments}"
    if runs.subset.together and not read:
        return RowEffect.ORIGIN, f"it reads nothing, and follows from {both}"
    if _SIZES.sub("", record.arguments) == _SIZES.sub("", reference.arguments):
        return RowEffect.ORIGIN, ""
    return RowEffect.ORIGIN, f"its arguments depend on the {runs.varied}: {both}"


def _match_state(runs: RowRuns, reference: TensorRows, other: TensorRows) -> Match:
    pairs = zip((reference, other), runs.leaves, strict=True)
    states = [(rows.state, leaves.get(rows.state[0]) if rows.state else None) for rows, leaves in pairs]
    return match(reference, other, runs.subset) if states[0] == states[1] else Match(Agreement.DIFFERENT)


def _is_not_read(runs: RowRuns, record: OpRecord, ref: Ref | None) -> bool:
    """Return True if an op takes a tensor without reading its content: an ``out=``, a target that it overwrites,
    uninitialised memory."""
    if ref is None:
        return False
    source = runs.records.get(ref.source)
    if source is not None and source.blank:
        return True
    name = name_of(record)
    filled = name in OVERWRITING - _ADDING or not ref.argument[:1].isdigit()
    return ref.written and filled


def _is_table(rows: TensorRows, match: Match) -> bool:
    """Return True if a tensor may hold places of rows: whole numbers without items.

    Between rows in another order (tokens by their expert) such a table differs by design.
    """
    return match.sizes is None and match.agreement is Agreement.DIFFERENT and rows.dtype.startswith(("int", "uint"))


def _has_mixed_row_order(given: Sequence[Match]) -> bool:
    """Return True if a call reads rows of the same number in two orders; its outputs then need not be found again."""
    orders: dict[tuple[int, int], set[int | None]] = {}
    for rows in given:
        if rows.sizes is not None:
            orders.setdefault(rows.sizes, set()).add(rows.order)
    return any(len(found) > 1 for found in orders.values())


def reads_by_view(runs: RowRuns, node: str) -> tuple[str, ...]:
    """Return the arguments in which a call reads other rows although whatever wrote their memory left equal ones, at
    the places of their items: a view shows it other memory."""
    record, judged = runs.records[node], runs.judged[node]
    if runs.subset.together or not judged.reference or runs.shifted(record):
        return ()
    different = {path for path, rows in judged.read.items() if rows.agreement is Agreement.DIFFERENT}
    suspects = (ref for ref in record.inputs if ref.argument in different)
    return tuple(ref.argument for ref in suspects if _was_left_equal(runs, runs.unit(ref.source)))


def _was_left_equal(runs: RowRuns, unit: str) -> bool:
    """Return True if a call, and all whose memory it wrote into, left each item's rows at its place."""
    judged = runs.judged

    def overwritten_by(writer: str) -> Iterator[str]:
        inputs = runs.records[writer].inputs if writer in judged else ()
        return (runs.unit(ref.source) for ref in inputs if ref.written)

    def left_equal(writer: str) -> bool:
        if writer not in judged:
            return writer.startswith("input/")
        call = judged[writer]
        return call.effect is RowEffect.SAME and all(match.strictly_equal for match in call.written)

    return all(map(left_equal, backward_slice([unit], overwritten_by, lambda _: True).reached))
