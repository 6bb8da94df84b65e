"""Judge single calls by their effect on the rows of items, between two runs of different batches. Pure: no torch."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
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
        return {one.id: _judge(self, one) for one in self.records.values() if one.id in calls and not one.inside}

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
        return ((one, calls[one.id]) for one in self.references.values() if one.id in calls and self.shifted(one))


def _content_key(record: OpRecord, rows: CallRows) -> Any:
    return record.op, record.module, record.arguments, record.rng, tuple(one._replace(cut=None) for _, one in rows.read)


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
    rows, node = runs.other.calls[record.id], runs.counterparts.get(record.id, "")
    matched = _compared(runs, record, rows, node)
    if matched is None or matched.redrawn or not all(one.surely_equal for one in matched.read.values()):
        matched = next((_compared(runs, record, rows, twin) for twin in runs.of_content(record, rows)), matched)
    if matched is not None and matched.redrawn:
        others = (_compared(runs, record, rows, twin) for twin in runs.of_state(record, rows))
        matched = next((one for one in others if one is not None and one.effect is RowEffect.SAME), matched)
    return matched or JudgedCall(RowEffect.UNKNOWN if rows.written else RowEffect.SAME)


def _compared(runs: RowRuns, record: OpRecord, rows: CallRows, node: str) -> JudgedCall | None:
    """Compare a call with one of the reference; ``None`` if that lacks an input of this call.

    The reference may have more inputs (as many tensors as there are items). With tokens either may: a mask that the
    other run does without.
    """
    reference = runs.reference.calls.get(node)
    there = dict(reference.read) if reference is not None else {}
    if reference is None or not (runs.subset.together or there.keys() >= dict(rows.read).keys()):
        return None
    if len(rows.written) != len(reference.written):
        return None
    counts = {ref.argument: ref for ref in record.inputs}
    given = {
        path: _match_state(runs, there[path], here)
        for path, here in rows.read
        if path in there and not _is_not_read(runs, record, counts.get(path))
    }
    tables = {path for path, here in rows.read if path in given and _is_table(here, given[path])}
    inherited = tuple(given.values())
    written = tuple(
        match(whole, part, runs.subset, inherited) for part, whole in zip(rows.written, reference.written, strict=True)
    )
    effect, coupled, redrawn = RowEffect.SAME, "", False
    if not all(one.equal for one in written):
        redrawn = rows.drew is not None and reference.drew is not None and rows.drew.before != reference.drew.before
        held = tuple(one for path, one in given.items() if path not in tables)
        reordered = {one.sizes for one in held if one.agreement is Agreement.FOUND}
        weighed = held if any(one.sizes in reordered for one in written if not one.equal) else inherited
        effect, coupled = _effect(runs, record, runs.references[node], weighed, written, redrawn=redrawn)
    return JudgedCall(effect, node, given, written, coupled, redrawn)


def _effect(
    runs: RowRuns,
    record: OpRecord,
    reference: OpRecord,
    given: Sequence[Match],
    written: Sequence[Match],
    *,
    redrawn: bool,
) -> tuple[RowEffect, str]:
    if not all(one.surely_equal for one in given):
        return RowEffect.PROPAGATED, ""
    if redrawn:
        return RowEffect.ORIGIN, f"it draws from a generator in another state for another {runs.varied}"
    known = any(one.agreement is Agreement.DIFFERENT for one in written)
    other_arguments = record.arguments != reference.arguments
    if not known or _has_mixed_row_order(given) or (other_arguments and runs.shifted(record)):
        return RowEffect.UNKNOWN, ""
    if runs.subset.together and not given:
        return RowEffect.ORIGIN, f"it reads nothing, and follows from {record.arguments} and {reference.arguments}"
    if _SIZES.sub("", record.arguments) == _SIZES.sub("", reference.arguments):
        return RowEffect.ORIGIN, ""
    coupled = f"its arguments depend on the {runs.varied}: {record.arguments} and {reference.arguments}"
    return RowEffect.ORIGIN, coupled


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


def _is_table(rows: TensorRows, one: Match) -> bool:
    """Return True if a tensor may hold places of rows: whole numbers without items.

    Between rows in another order (tokens by their expert) such a table differs by design.
    """
    return one.sizes is None and one.agreement is Agreement.DIFFERENT and rows.dtype.startswith(("int", "uint"))


def _has_mixed_row_order(given: Sequence[Match]) -> bool:
    """Return True if a call reads rows of the same number in two orders; its outputs then need not be found again."""
    orders: dict[tuple[int, int], set[int | None]] = {}
    for one in given:
        if one.sizes is not None:
            orders.setdefault(one.sizes, set()).add(one.order)
    return any(len(found) > 1 for found in orders.values())


def reads_by_view(runs: RowRuns, node: str) -> tuple[str, ...]:
    """Return the arguments in which a call reads other rows although whatever wrote their memory left equal ones, at
    the places of their items: a view shows it other memory."""
    record, judged = runs.records[node], runs.judged
    one = judged[node]
    if runs.subset.together or not one.reference or runs.shifted(record):
        return ()

    def overwritten_by(unit: str) -> Iterator[str]:
        inputs = runs.records[unit].inputs if unit in judged else ()
        return (runs.unit(ref.source) for ref in inputs if ref.written)

    def left_equal(unit: str) -> bool:
        if unit not in judged:
            return unit.startswith("input/")
        writer = judged[unit]
        return writer.effect is RowEffect.SAME and all(one.strictly_equal for one in writer.written)

    different = {path for path, one in one.read.items() if one.agreement is Agreement.DIFFERENT}
    return tuple(
        ref.argument
        for ref in record.inputs
        if ref.argument in different
        and all(map(left_equal, backward_slice([runs.unit(ref.source)], overwritten_by, lambda _: True).reached))
    )
