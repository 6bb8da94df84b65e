"""The first kernel whose rows differ although this item's rows of all its inputs are equal. Pure: no torch.

Two runs are compared call by call, by the digests of the rows of all that each call read and wrote. A call is an
*origin* where all that it read is equal for the items that both runs have, and something that it wrote is not. From the
outputs that differ we walk back through reads that differ: the origins reached are the sources, the first of them is
the kernel. Origins that are not reached are benign.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from hashbench.batch.draws import drawer_before
from hashbench.batch.judged import Judged, RowEffect, RowRun, reads_by_view
from hashbench.batch.layout import ItemSubset
from hashbench.batch.match import Agreement, CallRows, Match, TensorRows, match
from hashbench.batch.twins import Twins
from hashbench.compare.align import OVERWRITING, name_of
from hashbench.records import OpRecord, Ref

_ADDING = frozenset({"_index_put_impl_", "index_copy_", "index_fill_", "index_put_", "put_", "scatter_"})
"""Those of :data:`OVERWRITING` that leave a part of their target as it was."""

_SIZES = re.compile(r"(?<![\w.])-?\d+(?![\w.])")
"""Whole numbers in the text of arguments: most are sizes."""


@dataclass(frozen=True)
class Comparison:
    """Two compared runs.

    Attributes:
        subset: the items of both runs.
        reference: the run of all items.
        other: the run of the subset.
        counterparts: ids of records of the other run → those of the reference.
        differing: names of the results that differ.
        sources: ids, in the other run, of the records in which a difference entered that reached a result, in order.
        detail: what is special about the sources, or why there is none.
    """

    subset: ItemSubset
    reference: RowRun
    other: RowRun
    counterparts: Mapping[str, str]
    differing: tuple[str, ...] = ()

    @cached_property
    def judged(self) -> Mapping[str, Judged]:
        """Map the id of every call of the other run that wrote something to its effect. Calls inside a custom op are
        left out: the op is the unit."""
        return {
            record.id: self._judge(record)
            for record in self.other.trace.records
            if record.id in self.other.calls and not record.inside
        }

    @property
    def benign(self) -> tuple[str, ...]:
        """Ids of the records that changed items' rows without effect on a result."""
        found, sources = self.judged, set(self.sources)
        return tuple(
            node
            for node, one in found.items()
            if one.effect is RowEffect.ORIGIN
            and node not in sources
            and any(m.sizes and not m.equal for m in one.written)
        )

    @property
    def not_attributable(self) -> tuple[str, ...]:
        """Ids of the records whose effect on the rows of an item is unknown."""
        unknown = (node for node, one in self.judged.items() if one.effect is RowEffect.UNKNOWN)
        return tuple(node for node in unknown if node not in self.sources)

    @property
    def sources(self) -> tuple[str, ...]:
        return self._found[0]

    @property
    def detail(self) -> str:
        return self._found[1]

    @property
    def drawn(self) -> bool:
        """Whether the runs differ by the states of the generators from which their calls draw."""
        return bool(self._redrawn)

    @cached_property
    def _redrawn(self) -> str:
        """The first source of all, if it differs by the state of its generator; else ""."""
        first = self._origins[0] if self._origins else ""
        return first if first and self.judged[first].redrawn and self.judged[first].effect is RowEffect.ORIGIN else ""

    @cached_property
    def _origins(self) -> tuple[str, ...]:
        reached = self._slice(strictly=False) if self.differing else set()
        return tuple(node for node in self._order if node in reached and self._is_source(node))

    @cached_property
    def _found(self) -> tuple[tuple[str, ...], str]:
        if not self.differing:
            return (), ""
        if self._origins:
            return self._with_drawer(self._origins)
        reached = self._slice(strictly=False)
        strict = set() if self.subset.together else self._slice(strictly=True)
        moved = tuple(node for node in self._order if node in strict and self._permutes_rows_first(self.judged[node]))
        hidden = any(one.grouped for node in reached for one in self.judged[node].written)
        if moved and not hidden:
            return moved[:1], "it gives an item other items' rows, or as many as there are items"
        unknown = [node for node in self._order if node in reached and self.judged[node].effect is RowEffect.UNKNOWN]
        first = next((n for n in self._order if n in reached and self.judged[n].effect is not RowEffect.SAME), "")
        there, here = self._twins.uneven.get(first.rpartition("#")[0], (0, 0))
        if self.subset.together and min(there, here) > 1:
            loop = f"a loop makes {there} calls like {first} in the one run and {here} in the other"
            return (), f"not attributable: {loop}, and which of them are for the same tokens cannot be told"
        older = next((node for node in self._order if node in reached and self._made_before(node)), "")
        if older and self.subset.together:
            return (), f"what {older} reads was made by an earlier run, and is not what the reference has in its place"
        if unknown:
            return (), f"which rows belong to which item cannot be told from {unknown[0]} on"
        return (), _shown_by_view(self) or "no call differs whose rows could be followed to the outputs"

    def _is_source(self, node: str) -> bool:
        return self.judged[node].effect is RowEffect.ORIGIN or self._parts(node) or bool(self.by_view(node))

    def by_view(self, node: str) -> tuple[str, ...]:
        """Return the arguments in which a call reads, through a view, memory that holds other items in the other
        run."""
        if self.subset.together or not self.judged[node].reference or self._twins.shifted(self._records[node]):
            return ()
        return reads_by_view(self._records[node], self.judged, self._records, self.unit)

    def _with_drawer(self, origins: tuple[str, ...]) -> tuple[tuple[str, ...], str]:
        """Return the sources and the detail of the first.

        If the first source differs only by its random numbers, the call that drew another amount of them is put before
        it.
        """
        first, judged = self._records[origins[0]], self.judged[origins[0]]
        if self._redrawn:
            drawer = drawer_before(self.other, self.reference, (first.id, judged.reference), self._names)
            node = self.unit(drawer.node) if drawer.node else first.id
            before = f", so that the generator stands elsewhere before {_named(first)}" if node != first.id else ""
            said = f"random numbers differ by the {self._on}: {drawer.how}{before}"
            return tuple(dict.fromkeys((node, *origins))), said
        views = [self.other.views.get(first.id, {}).get(path, ()) for path in self.by_view(first.id)]
        if views:
            through = ", ".join(dict.fromkeys(op for chain in views for op in chain)) or "a view"
            return origins, f"through {through} it reads memory that holds other content for another {self._on}"
        return origins, judged.coupled or self._instead_of(first.id)

    @property
    def _on(self) -> str:
        return "context" if self.subset.together else "batch"

    @property
    def couples_items(self) -> bool:
        """Whether the first source makes an item depend on others by definition, not by the order of sums."""
        if not self.sources or not self.judged[self.sources[0]].reference:
            return False
        one = self.judged[self.sources[0]]
        reduces = any(m.sizes for m in one.read.values()) and all(m.equal or m.sizes is None for m in one.written)
        return one.effect is not RowEffect.ORIGIN or bool(one.coupled) or reduces

    def _parts(self, node: str) -> bool:
        """Return True if only the smaller run makes this call, on equal inputs. Masks and positions of tokens do not
        count: they are made in other ways for other numbers of tokens."""
        if self.subset.together and (not self._records[node].inputs or self._made_before(node)):
            return False
        return not self.judged[node].reference and not self._unclean(node)

    def _made_before(self, node: str) -> str:
        """Return the id of what a call reads from before its run and the reference lacks, else ""."""
        known = self._leaves[0].keys() | self._records.keys()
        return next((ref.source for ref in self._records[node].inputs if ref.source not in known), "")

    def _unclean(self, node: str) -> list[str]:
        """Return the calls that wrote what a call read, and may have left other rows than their counterparts."""
        writers = dict.fromkeys(self.unit(ref.source) for ref in self._records[node].inputs)
        return [
            writer
            for writer in writers
            if writer in self.judged and writer != node and self.judged[writer].effect is not RowEffect.SAME
        ]

    def _instead_of(self, node: str) -> str:
        """Name the ops that only the reference calls, if only the smaller run makes this call, else return ""."""
        if self.judged[node].reference:
            return ""
        alone = self._references.keys() - set(self.counterparts.values())
        module = self._records[node].module
        ops = dict.fromkeys(
            one.op for one in self._references.values() if one.id in alone and one.module == module and one.outputs
        )
        return f"{self._names[1]} calls other ops here ({', '.join([*ops][:4]) or 'none'})"

    @property
    def _names(self) -> tuple[str, str]:
        """Of the smaller run, and of the reference."""
        some, of_all = self.subset.size, self.subset.batch
        if self.subset.together:
            return f"the run of {some} tokens", f"the run of {of_all} tokens"
        return f"a batch of {some}", f"a batch of {of_all}"

    @staticmethod
    def _permutes_rows_first(one: Judged) -> bool:
        return all(m.strictly_equal for m in one.read.values()) and not all(m.strictly_equal for m in one.written)

    @cached_property
    def _twins(self) -> Twins:
        return Twins(self.reference, self.other)

    @cached_property
    def _records(self) -> Mapping[str, OpRecord]:
        return {record.id: record for record in self.other.trace.records}

    @cached_property
    def _references(self) -> Mapping[str, OpRecord]:
        return {record.id: record for record in self.reference.trace.records}

    @cached_property
    def _order(self) -> Sequence[str]:
        return [record.id for record in self.other.trace.records if record.id in self.judged]

    # ------------------------------------------------------------------------------------------- the causal slice

    def _slice(self, *, strictly: bool) -> set[str]:
        """Return the calls from which a difference may have reached the results that differ."""
        equal: Callable[[Match], bool] = (lambda m: m.strictly_equal) if strictly else (lambda m: m.surely_equal)
        waiting = [result.source for result in self.other.trace.results if result.name in self.differing]
        reached: set[str] = set()
        while waiting:
            node = self.unit(waiting.pop())
            if node in reached or node not in self.judged:
                continue
            reached.add(node)
            one, record = self.judged[node], self._records[node]
            if one.effect is RowEffect.ORIGIN and not strictly:
                continue
            differ = [ref for ref in record.inputs if ref.argument in one.read and not equal(one.read[ref.argument])]
            if not one.reference:
                waiting += self._unclean(node)
            # An item's rows that are equal here, and reach a reader that sees others, were written by an earlier call
            # into the same memory.
            wrote_equal = one.written and all(map(equal, one.written))
            differ += [ref for ref in record.inputs if ref.written and wrote_equal]
            waiting += [ref.source for ref in differ]
        return reached

    def unit(self, node: str) -> str:
        """Return the id of the custom op inside which a record was made; for most records their own id."""
        while node in self._records and self._records[node].inside:
            node = self._records[node].inside
        return node

    # -------------------------------------------------------------------------------------------------- one call

    def _judge(self, record: OpRecord) -> Judged:
        rows, node = self.other.calls[record.id], self.counterparts.get(record.id, "")
        matched = self._compared(record, rows, node)
        astray = matched is None or matched.redrawn or not all(one.surely_equal for one in matched.read.values())
        if astray and self._twins.shifted(record):
            twins = self._twins.of_content(record, rows)
            matched = next((self._compared(record, rows, twin) for twin in twins), matched)
        if matched is not None and matched.redrawn:
            others = (self._compared(record, rows, twin) for twin in self._twins.of_state(record, rows))
            matched = next((one for one in others if one is not None and one.effect is RowEffect.SAME), matched)
        return matched or Judged(RowEffect.UNKNOWN if rows.written else RowEffect.SAME)

    def _compared(self, record: OpRecord, rows: CallRows, node: str) -> Judged | None:
        """Compare a call with one of the reference; ``None`` if that lacks an input of this call.

        The reference may have more inputs (as many tensors as there are items). With tokens either may: a mask that the
        other run does without.
        """
        reference = self.reference.calls.get(node)
        there = dict(reference.read) if reference is not None else {}
        if reference is None or not (self.subset.together or there.keys() >= dict(rows.read).keys()):
            return None
        if len(rows.written) != len(reference.written):
            return None
        counts = {ref.argument: ref for ref in record.inputs}
        given = {
            path: self._match_state(there[path], here)
            for path, here in rows.read
            if path in there and not self._is_not_read(record, counts.get(path))
        }
        tables = {path for path, here in rows.read if path in given and _is_table(here, given[path])}
        inherited = tuple(given.values())
        written = tuple(
            match(whole, part, self.subset, inherited)
            for part, whole in zip(rows.written, reference.written, strict=True)
        )
        effect, coupled, redrawn = RowEffect.SAME, "", False
        if not all(one.equal for one in written):
            redrawn = rows.drew is not None and reference.drew is not None and rows.drew.before != reference.drew.before
            held = tuple(one for path, one in given.items() if path not in tables)
            reordered = {one.sizes for one in held if one.agreement is Agreement.FOUND}
            weighed = held if any(one.sizes in reordered for one in written if not one.equal) else inherited
            effect, coupled = self._effect(record, self._references[node], weighed, written, redrawn=redrawn)
        return Judged(effect, node, given, written, coupled, redrawn)

    def _effect(
        self,
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
            return RowEffect.ORIGIN, f"it draws from a generator in another state for another {self._on}"
        known = any(one.agreement is Agreement.DIFFERENT for one in written)
        other_arguments = record.arguments != reference.arguments
        if not known or _has_mixed_row_order(given) or (other_arguments and self._twins.shifted(record)):
            return RowEffect.UNKNOWN, ""
        if self.subset.together and not given:
            return RowEffect.ORIGIN, f"it reads nothing, and follows from {record.arguments} and {reference.arguments}"
        if _SIZES.sub("", record.arguments) != _SIZES.sub("", reference.arguments):
            return (
                RowEffect.ORIGIN,
                f"its arguments depend on the {self._on}: {record.arguments} and {reference.arguments}",
            )
        return RowEffect.ORIGIN, ""

    def _match_state(self, reference: TensorRows, other: TensorRows) -> Match:
        if reference.state != other.state or self._state_of(self.reference, reference) != self._state_of(
            self.other, other
        ):
            return Match(Agreement.DIFFERENT)
        return match(reference, other, self.subset)

    def _state_of(self, run: RowRun, rows: TensorRows) -> Any:
        return self._leaves[run is self.other].get(rows.state[0]) if rows.state else None

    @cached_property
    def _leaves(self) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        first, second = ({leaf.id: leaf.digest for leaf in run.trace.leaves} for run in (self.reference, self.other))
        return first, second

    def _is_not_read(self, record: OpRecord, ref: Ref | None) -> bool:
        """Return True if an op takes a tensor without reading its content: an ``out=``, a target that it overwrites,
        uninitialised memory."""
        if ref is None:
            return False
        source = self._records.get(ref.source)
        if source is not None and source.blank:
            return True
        name = name_of(record)
        filled = name in OVERWRITING - _ADDING or not ref.argument[:1].isdigit()
        return ref.written and filled


def _shown_by_view(found: Comparison) -> str:
    """Describe the result that is a view of other memory, else return ""."""
    for result in found.other.trace.results:
        node = found.unit(result.source)
        one = found.judged.get(node) if result.name in found.differing else None
        if one is not None and one.reference and all(match.strictly_equal for match in one.written):
            return f"{result.name} is a view, and shows other memory of what {node} left"
    return ""


def _named(record: OpRecord) -> str:
    """Format ``aten.rand.default in Model.step``."""
    return f"{record.op} in {record.module}" if record.module else record.op


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


# ----------------------------------------------------------------------------------- where no call alone shows it


@dataclass(frozen=True, slots=True)
class Entry:
    """The place where a difference is read that no single call shows: only the smaller run makes the first source, or
    it reads a view of other memory.

    Attributes:
        reads: ``(record, its counterpart, argument)`` in which both runs read what differs.
        results: names of results that are the difference themselves.
        before: ``(record, its counterpart)`` of those that wrote what the source read.
        node: the source that only the smaller run makes; "" for a view.
    """

    reads: tuple[tuple[str, str, str], ...]
    results: tuple[str, ...] = ()
    before: tuple[tuple[str, str], ...] = ()
    node: str = ""


def entry_of(found: Comparison) -> Entry | None:
    """Return where the difference of the first source is read; ``None`` where experiments on its call can tell."""
    if not found.sources or found.subset.together or found.subset.turned:
        return None
    first, records = found.sources[0], found.other.trace.records
    judged, unit = found.judged, found.unit
    record = next(one for one in records if one.id == first)
    writers = dict.fromkeys(unit(ref.source) for ref in record.inputs)
    before = tuple((node, judged[node].reference) for node in writers if node in judged and judged[node].reference)
    if paths := found.by_view(first):
        return Entry(tuple((first, judged[first].reference, path) for path in paths), (), before)
    if judged[first].reference:
        return None
    inside, reads = {first}, []
    for one in records:
        fed = [ref for ref in one.inputs if unit(ref.source) in inside]
        known = judged.get(one.id)
        if known is not None and known.reference:
            reads += [(one.id, known.reference, ref.argument) for ref in fed if ref.argument in known.read]
        elif fed or unit(one.id) in inside:
            inside.add(one.id)
    results = tuple(one.name for one in found.other.trace.results if unit(one.source) in inside)
    return Entry(tuple(reads), tuple(name for name in results if name in found.differing), before, first)


# ------------------------------------------------------------------------------------------------------ what is said


@dataclass(frozen=True, slots=True)
class RowDifference:
    """Distance between rows that should be equal; ``None`` without a number (not floating point, not measured).

    Attributes:
        max_abs: largest absolute difference.
        max_relative: largest relative difference.
        max_ulp: largest distance in representable values.
    """

    max_abs: float | None = None
    max_relative: float | None = None
    max_ulp: int | None = None


@dataclass(frozen=True, slots=True)
class BatchFinding:
    """The kernel by which results depend on the batch, between a run of ``batch`` items and one of the first ``size``.

    Attributes:
        size: items of the smaller run.
        batch: items of the reference.
        kernel: name of the op; "" if no kernel can be named, ``detail`` then says why.
        record: id of its record.
        module: where it was called.
        source_line: file and line of the call.
        shapes: of its tensor arguments at ``size``: ``(1,256)x(256,512)``.
        reference_shapes: the same at ``batch``.
        difference: distance of its rows.
        sources: ids of all records in which a difference entered that reached an output, the named one first.
        benign: ids of those that reached none.
        not_attributable: number of records whose rows cannot be assigned to items.
        detail: what is special about the kernel, or why there is none.
        coupled: whether it couples items by definition: it reduces over the batch, permutes its rows, or takes a number
            or a generator that depends on the batch.
        drawn: whether the kernel, or the first call behind it that differs, drew random numbers from another generator
            state.
        entry: where the difference is read, if no single call shows it.
        call: the captured call at ``batch``; ``None`` if it could not be captured.
        pair: the call as both runs made it (:class:`~hashbench.batch.call_pair.CallPair`), if the first items of
            ``call`` alone do not differ from the rest.
    """

    size: int
    batch: int
    kernel: str = ""
    record: str = ""
    module: str = ""
    source_line: str = ""
    shapes: str = ""
    reference_shapes: str = ""
    difference: RowDifference = RowDifference()
    sources: tuple[str, ...] = ()
    benign: tuple[str, ...] = ()
    not_attributable: int = 0
    detail: str = ""
    coupled: bool = False
    drawn: bool = False
    entry: Entry | None = None
    call: Any = field(default=None, compare=False, repr=False)
    pair: Any = field(default=None, compare=False, repr=False)
