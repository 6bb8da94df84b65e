"""The first kernel whose rows differ although this item's rows of all its inputs are equal. Pure: no torch.

Two runs are compared call by call, by the digests of the rows of all that each call read and wrote. A call is *guilty*
where all that it read is equal for the items that both runs have, and something that it wrote is not. From the outputs
that differ we walk back through reads that differ: the guilty calls reached are the sources, the first of them is the
kernel. Guilty calls that are not reached are benign.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from hashbench.batch.draws import drawer_before
from hashbench.batch.judged import Guilt, Judged, RowRun, reads_by_view
from hashbench.batch.layout import ItemSubset
from hashbench.batch.match import Agreement, CallRows, Match, TensorRows, match
from hashbench.batch.twins import Twins
from hashbench.divergence.align import OVERWRITING, name_of
from hashbench.records import OpRecord, Ref

_ADDING = frozenset({"_index_put_impl_", "index_copy_", "index_fill_", "index_put_", "put_", "scatter_"})
"""Those of :data:`OVERWRITING` that leave a part of their target as it was."""

_SIZES = re.compile(r"(?<![\w.])-?\d+(?![\w.])")
"""Whole numbers in the text of arguments: most are sizes."""


@dataclass(frozen=True)
class Comparison:
    """Two runs compared. ``differing`` are the names of the results that differ.

    ``sources`` are the ids, in the smaller run, of the records in which a difference entered that reached one of them,
    in order; ``detail`` says what is special about them, or why there is none. ``counterparts`` are the ids in the
    reference of the records of the smaller run.
    """

    subset: ItemSubset
    reference: RowRun
    other: RowRun
    counterparts: Mapping[str, str]
    differing: tuple[str, ...] = ()

    @cached_property
    def judged(self) -> Mapping[str, Judged]:
        """Every call of the smaller run that wrote something, by its id. What an op that is not torch's calls inside is
        left out: the op is the unit."""
        return {
            record.id: self._judge(record)
            for record in self.other.trace.records
            if record.id in self.other.calls and not record.inside
        }

    @property
    def benign(self) -> tuple[str, ...]:
        """Records in which a difference of items' rows entered that reached no result."""
        found, sources = self.judged, set(self.sources)
        return tuple(
            node
            for node, one in found.items()
            if one.guilt is Guilt.GUILTY and node not in sources and any(m.sizes and not m.equal for m in one.written)
        )

    @property
    def not_attributable(self) -> tuple[str, ...]:
        """Records of which it cannot be told whether the rows of an item differ."""
        unknown = (node for node, one in self.judged.items() if one.guilt is Guilt.NOT_ATTRIBUTABLE)
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
        """The first source of all, where it differs by the state of its generator; else empty."""
        first = self._guilty[0] if self._guilty else ""
        return first if first and self.judged[first].redrawn and self.judged[first].guilt is Guilt.GUILTY else ""

    @cached_property
    def _guilty(self) -> tuple[str, ...]:
        reached = self._slice(strictly=False) if self.differing else set()
        return tuple(node for node in self._order if node in reached and self._is_source(node))

    @cached_property
    def _found(self) -> tuple[tuple[str, ...], str]:
        if not self.differing:
            return (), ""
        if self._guilty:
            return self._with_drawer(self._guilty)
        reached = self._slice(strictly=False)
        strict = set() if self.subset.together else self._slice(strictly=True)
        moved = tuple(node for node in self._order if node in strict and self._moves(self.judged[node]))
        hidden = any(one.grouped for node in reached for one in self.judged[node].written)
        if moved and not hidden:
            return moved[:1], "it gives an item other items' rows, or as many as there are items"
        unknown = [
            node for node in self._order if node in reached and self.judged[node].guilt is Guilt.NOT_ATTRIBUTABLE
        ]
        first = next((n for n in self._order if n in reached and self.judged[n].guilt is not Guilt.CLEAN), "")
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
        return self.judged[node].guilt is Guilt.GUILTY or self._parts(node) or bool(self.by_view(node))

    def by_view(self, node: str) -> tuple[str, ...]:
        """The arguments in which a call reads, through a view, memory that holds other items in the other run."""
        if self.subset.together or not self.judged[node].reference or self._twins.shifted(self._records[node]):
            return ()
        return reads_by_view(self._records[node], self.judged, self._records, self.unit)

    def _with_drawer(self, guilty: tuple[str, ...]) -> tuple[tuple[str, ...], str]:
        """The sources, before them the call that drew another amount of random numbers where the first of them differs
        for that alone; and what is special about the first."""
        first, judged = self._records[guilty[0]], self.judged[guilty[0]]
        if self._redrawn:
            drawer = drawer_before(self.other, self.reference, (first.id, judged.reference), self._names)
            node = self.unit(drawer.node) if drawer.node else first.id
            before = f", so that the generator stands elsewhere before {_named(first)}" if node != first.id else ""
            said = f"random numbers differ by the {self._on}: {drawer.how}{before}"
            return tuple(dict.fromkeys((node, *guilty))), said
        views = [self.other.views.get(first.id, {}).get(path, ()) for path in self.by_view(first.id)]
        if views:
            through = ", ".join(dict.fromkeys(op for chain in views for op in chain)) or "a view"
            return guilty, f"through {through} it reads memory that holds other content for another {self._on}"
        return guilty, judged.coupled or self._instead_of(first.id)

    @property
    def _on(self) -> str:
        return "context" if self.subset.together else "batch"

    @property
    def coupled(self) -> bool:
        """Whether the first source makes an item depend on others by what it computes, whatever the order of sums."""
        if not self.sources or not self.judged[self.sources[0]].reference:
            return False
        one = self.judged[self.sources[0]]
        reduces = any(m.sizes for m in one.read.values()) and all(m.equal or m.sizes is None for m in one.written)
        return one.guilt is not Guilt.GUILTY or bool(one.coupled) or reduces

    def _parts(self, node: str) -> bool:
        """Whether the smaller run alone makes this call, of what is equal in both. Masks and positions of tokens are
        made in other ways for other numbers of them."""
        if self.subset.together and (not self._records[node].inputs or self._made_before(node)):
            return False
        return not self.judged[node].reference and not self._unclean(node)

    def _made_before(self, node: str) -> str:
        """What a call reads that was made before its run, and is nothing that the reference has; else empty."""
        known = self._leaves[0].keys() | self._records.keys()
        return next((ref.source for ref in self._records[node].inputs if ref.source not in known), "")

    def _unclean(self, node: str) -> list[str]:
        """The calls that wrote what a call read, and may have left other rows than their counterparts."""
        writers = dict.fromkeys(self.unit(ref.source) for ref in self._records[node].inputs)
        return [
            writer
            for writer in writers
            if writer in self.judged and writer != node and self.judged[writer].guilt is not Guilt.CLEAN
        ]

    def _instead_of(self, node: str) -> str:
        """Which ops the reference alone calls, where the smaller run alone makes a call; else empty."""
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
    def _moves(one: Judged) -> bool:
        """Whether a call is the first to have an item's rows elsewhere."""
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
        """The calls from which a difference may have come to the results that differ."""
        equal: Callable[[Match], bool] = (lambda m: m.strictly_equal) if strictly else (lambda m: m.surely_equal)
        waiting = [result.source for result in self.other.trace.results if result.name in self.differing]
        reached: set[str] = set()
        while waiting:
            node = self.unit(waiting.pop())
            if node in reached or node not in self.judged:
                continue
            reached.add(node)
            one, record = self.judged[node], self._records[node]
            if one.guilt is Guilt.GUILTY and not strictly:
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
        """The op of the program's own inside which a record was made; most are that themselves."""
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
            matched = next((one for one in others if one is not None and one.guilt is Guilt.CLEAN), matched)
        return matched or Judged(Guilt.NOT_ATTRIBUTABLE if rows.written else Guilt.CLEAN)

    def _compared(self, record: OpRecord, rows: CallRows, node: str) -> Judged | None:
        """The call beside one of the reference; ``None`` where that was not given what this one was. The reference may
        be given more: as many tensors as there are items. Of tokens either may: a mask that the other does without."""
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
        guilt, coupled, redrawn = Guilt.CLEAN, "", False
        if not all(one.equal for one in written):
            redrawn = rows.drew is not None and reference.drew is not None and rows.drew.before != reference.drew.before
            held = tuple(one for path, one in given.items() if path not in tables)
            reordered = {one.sizes for one in held if one.agreement is Agreement.FOUND}
            weighed = held if any(one.sizes in reordered for one in written if not one.equal) else inherited
            guilt, coupled = self._guilt(record, self._references[node], weighed, written, redrawn=redrawn)
        return Judged(guilt, node, given, written, coupled, redrawn)

    def _guilt(
        self,
        record: OpRecord,
        reference: OpRecord,
        given: Sequence[Match],
        written: Sequence[Match],
        *,
        redrawn: bool,
    ) -> tuple[Guilt, str]:
        if not all(one.surely_equal for one in given):
            return Guilt.PASSED_ON, ""
        if redrawn:
            return Guilt.GUILTY, f"it draws from a generator in another state for another {self._on}"
        known = any(one.agreement is Agreement.DIFFERENT for one in written)
        other_arguments = record.arguments != reference.arguments
        if not known or _mixes(given) or (other_arguments and self._twins.shifted(record)):
            return Guilt.NOT_ATTRIBUTABLE, ""
        if self.subset.together and not given:
            return Guilt.GUILTY, f"it reads nothing, and follows from {record.arguments} and {reference.arguments}"
        if _SIZES.sub("", record.arguments) != _SIZES.sub("", reference.arguments):
            return Guilt.GUILTY, f"its arguments depend on the {self._on}: {record.arguments} and {reference.arguments}"
        return Guilt.GUILTY, ""

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
        """Whether an op is given a tensor without computing with its content: an ``out=``, a target that it overwrites,
        memory that nobody has written."""
        if ref is None:
            return False
        source = self._records.get(ref.source)
        if source is not None and source.blank:
            return True
        name = name_of(record)
        filled = name in OVERWRITING - _ADDING or not ref.argument[:1].isdigit()
        return ref.written and filled


def _shown_by_view(found: Comparison) -> str:
    """Which result is a view that shows other memory; empty where none is."""
    for result in found.other.trace.results:
        node = found.unit(result.source)
        one = found.judged.get(node) if result.name in found.differing else None
        if one is not None and one.reference and all(match.strictly_equal for match in one.written):
            return f"{result.name} is a view, and shows other memory of what {node} left"
    return ""


def _named(record: OpRecord) -> str:
    """``aten.rand.default in Model.step``."""
    return f"{record.op} in {record.module}" if record.module else record.op


def _is_table(rows: TensorRows, one: Match) -> bool:
    """Whether a tensor may say where rows are, and not what they hold: whole numbers, of no item. Of rows that were
    reordered (tokens by their expert) it differs by right."""
    return one.sizes is None and one.agreement is Agreement.DIFFERENT and rows.dtype.startswith(("int", "uint"))


def _mixes(given: Sequence[Match]) -> bool:
    """Whether a call is given rows of the same number in two orders: what it makes of them need not be found again."""
    orders: dict[tuple[int, int], set[int | None]] = {}
    for one in given:
        if one.sizes is not None:
            orders.setdefault(one.sizes, set()).add(one.order)
    return any(len(found) > 1 for found in orders.values())


# ----------------------------------------------------------------------------------- where no call alone shows it


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a difference is read that no call alone shows, since only the smaller run makes the first source, or since
    it reads a view that shows other memory.

    ``reads`` are the arguments, as ``(record, its counterpart, argument)``, in which both runs read what differs, and
    ``results`` the names of results that are it. ``before`` are the records, each with its counterpart, that wrote what
    the source read. ``node`` is the source that only the smaller run makes; empty for a view.
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
    """How far rows that should be equal are apart: the largest absolute and relative difference and the largest
    distance in representable values; ``None`` where there is no number (not floating point, not measured)."""

    max_abs: float | None = None
    max_relative: float | None = None
    max_ulp: int | None = None


@dataclass(frozen=True, slots=True)
class BatchFinding:
    """Where an item's result came to depend on the batch: between a run at ``batch`` and one of its first ``size``
    items.

    ``kernel`` is the op's name, ``record`` the id of its record, ``module`` and ``source_line`` where it was called;
    empty where none can be named, and ``detail`` then says why. ``shapes`` and ``reference_shapes`` are those of its
    tensor arguments at ``size`` and at ``batch``, ``(1,256)x(256,512)``. ``sources`` are the ids of all records in
    which a difference entered that reached an output, the named one first; ``benign`` those of which none did.
    ``not_attributable`` counts records of which it cannot be told which rows belong to which item.
    ``coupled``: what it leaves of an item follows from other items, or from how many there are, by what it computes: it
    reduces over the batch, reorders its rows, or is given a number or a generator that depends on the batch.
    ``drawn``: the kernel, or the first call behind it that differs, drew random numbers from a generator in another
    state for another number of items. ``entry``: where what differs is read, if no call alone shows it.
    ``call`` is the call at ``batch``, captured for experiments; ``None`` where that was not possible. ``pair`` is the
    call as both runs made it (:class:`~hashbench.batch.call_pair.CallPair`), where the first items of ``call`` alone do
    not differ from the rest.
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
