"""Judge each pair of records: did it introduce a difference (and with which origin), or only propagate one?

The rules are the table in the docstring of :mod:`hashbench.core.divergence`, applied to the pairs of records in order.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from hashbench.core.catalog import Origin
from hashbench.core.divergence.align import OVERWRITING, SECOND, PairedRuns, name_of, thread_of
from hashbench.core.divergence.collective_calls import contributed_by, exchanges, has_pending
from hashbench.core.divergence.places import Parts, Written, written_elsewhere, written_in_place
from hashbench.core.records import Leaf, OpRecord, Ref, TensorDigest, op_of
from hashbench.core.trace.collective_ops import UNKNOWN


@dataclass(frozen=True, slots=True)
class Source:
    """A difference that entered at a node.

    Attributes:
        origin: an :class:`~hashbench.core.catalog.Origin`.
        node: the node, or the name of what is no node (``setting:…``).
        position: its index among the records of the first run.
        detail: a sentence.
        first, second: what the two runs had there.
        opaque_producer: written by code that torch does not see.
        first_visible_at: of a setting, the first record whose output it changed.
    """

    origin: str
    node: str
    position: int
    detail: str
    first: str
    second: str
    opaque_producer: bool = False
    first_visible_at: str = ""


@dataclass(frozen=True, slots=True)
class Differences:
    """The differences between two runs, for the records judged so far.

    Attributes:
        differs: nodes that differ.
        tainted: nodes whose memory may hold a difference.
        sources: by node, the difference that entered there.
        edges: by node, nodes from which a difference came other than through a tensor argument.
        scalars: records that returned different Python scalars.
        unmatched_scalars: scalar records of one run only.
        odd_views: by viewed node, a view that the runs took differently.
        viewed: by node, the last such view of the memory that it wrote.
        elsewhere: nodes that wrote to another part of a memory than in the first run.
        parts: by the last node that wrote to a memory, what the runs left in its parts while these differ.
        beside: by node, those that it reads beside the parts that differ.
        unmatched_draws: by generator state before it, a seeded op of one run only.
        shifts: the extra draws that put one run's generator ahead; the first explains all later states.
        exchanges: the collectives so far, in order.
        received: by node, the collective through which data of other ranks reached what it read.
    """

    runs: PairedRuns
    differs: set[str] = field(default_factory=set)
    tainted: set[str] = field(default_factory=set)
    sources: dict[str, Source] = field(default_factory=dict)
    edges: dict[str, list[str]] = field(default_factory=dict)
    scalars: list[str] = field(default_factory=list)
    unmatched_scalars: list[str] = field(default_factory=list)
    odd_views: dict[str, str] = field(default_factory=dict)
    viewed: dict[str, str] = field(default_factory=dict)
    elsewhere: set[str] = field(default_factory=set)
    parts: dict[str, Parts] = field(default_factory=dict)
    beside: dict[str, set[str]] = field(default_factory=dict)
    unmatched_draws: dict[tuple[bool, str], str] = field(default_factory=dict)
    shifts: list[str] = field(default_factory=list)
    exchanges: dict[str, None] = field(default_factory=dict)
    received: dict[str, str] = field(default_factory=dict)

    def propagate_received(self, node: str, *records: OpRecord | None) -> None:
        """Record whether data of other ranks reached a record's inputs, or its outputs."""
        read = (source if source in self.exchanges else self.received.get(source) for source in self.runs.read_by(node))
        through = next(filter(None, read), None) if self.exchanges else None
        if through is not None:
            self.received[node] = through
        if any(record is not None and exchanges(record) and record.outputs for record in records):
            self.exchanges[node] = None

    def traceable(self, node: str, source: Source) -> Source:
        """Return ``source``, which was found at ``node``, or an :attr:`Origin.RANKS` source where other ranks may be
        behind it.

        A kernel is named where nothing that it read came through a collective, and where either none was called before
        it or the content of all that it read was hashed: a trace does not record what a collective's callbacks do. Any
        other origin (another order, another argument) may follow from received data by way of Python: it is reported
        before the first collective only.
        """
        kernel = source.origin == Origin.KERNEL
        through = self.received.get(node) or (node if kernel and node in self.exchanges else "")
        if not through and not (kernel and self.runs.hashed):
            through = self.last_exchange(before=node)
        return self.behind_exchange(node, source) if through else source

    def last_exchange(self, *, before: str) -> str:
        """Return the last collective before a node, or ``""``."""
        return next((exchange for exchange in reversed(self.exchanges) if exchange != before), "")

    def behind_exchange(self, node: str, source: Source, last: str | None = None) -> Source:
        """Return ``source``, found at ``node``, rewritten with origin ``ranks``: other ranks may be behind it.

        The place stays the record that differs. ``last`` overrides the last judged collective before it.
        """
        last = self.last_exchange(before=node) if last is None else last
        reason, place = source.detail, op_of(node) if node in self.runs.records else node
        first, second = source.first, source.second
        if node != source.node and node in self.runs.records:  # found at a record, and blamed on memory that it reads
            first, second = ("absent" if record is None else _left(record) for record in self.runs.records[node])
            reason = f"the output differs ({reason})"
        elif source.origin == Origin.KERNEL and node in self.exchanges:
            reason = "received data differs although this rank contributed the same"
            if self._contributes_differently(node):
                reason = "this rank's contribution differs, although whatever wrote it is equal"
        before = "no collective comes before it"
        if last:
            outcome = "left different content in the two runs" if last in self.differs else "left the same in both runs"
            before = f"the last collective before it, {last.removeprefix(SECOND)}, {outcome}"
        detail = (
            f"not traceable across ranks: {place}: {reason}; {before}. Compare the two traces of each rank, and look "
            "first at a rank whose verdict names no collective"
        )
        if unknown := next(filter(self._exchanges_unknown, self.exchanges), ""):
            detail += f"; unknown collective {op_of(unknown)} (not in hashbench/core/trace/collectives.csv)"
        return replace(
            source,
            origin=Origin.RANKS,
            node=node,
            position=self.runs.position[node],
            first_visible_at=node if node in self.runs.records else "",
            detail=detail,
            first=first,
            second=second,
            opaque_producer=False,
        )

    def _contributes_differently(self, node: str) -> bool:
        """Return True if this rank contributed different content to a collective in the second run."""
        records = self.runs.records[node]
        contributions = [[ref.digest for ref in contributed_by(record)] for record in records if record is not None]
        return len(contributions) == len(records) and contributions[0] != contributions[1]

    def _exchanges_unknown(self, node: str) -> bool:
        kinds = {record.collective.kind for record in self.runs.records[node] if record and record.collective}
        return UNKNOWN in kinds

    def came_from(self, node: str) -> Iterator[str]:
        """Yield the nodes from which the difference at ``node`` came. A node that is blamed for what differs at another
        one may agree, as blank memory does: only that other leads to it."""
        source = self.sources.get(node)
        if source is not None:
            yield source.node
        beside = self.beside.get(node, ())
        for before in itertools.chain(self.edges.get(node, ()), self.runs.carried_by(node)):
            if (before in self.differs or before in self.tainted) and before not in beside:
                yield before

    def add_view(self, node: str) -> None:
        """Mark a view that the runs took differently, or one run only: its readers may read other elements."""
        self.differs.add(node)
        self.odd_views.update(dict.fromkeys(self.runs.read_by(node), node))

    def view_of(self, source: str) -> str:
        """Return the last view that the runs took differently of the memory that a node wrote, or ``""``.

        Of several such views the writer may use an earlier one: ``a = v[i]; b = v[:, j]; a.add_(1)``.
        """
        return self.odd_views.get(source) or self.viewed.get(source, "")

    def keep_view(self, node: str) -> None:
        """Record that views of the memory before ``node`` wrote to it are views of it afterwards."""
        if self.odd_views:
            overwritten = (source for source, ref in self.runs.reads(node) if ref.written)
            if view := next(filter(None, map(self.view_of, overwritten)), ""):
                self.viewed[node] = view

    def keep_beside(self, node: str, a: OpRecord, b: OpRecord) -> None:
        """Record what a pair of records reads beside the parts of it that differ."""
        for ref in a.inputs if self.parts else ():
            if ref.source in self.parts:
                break
        else:
            return
        dtypes = {output.dtype for output in (*a.outputs, *b.outputs)}
        pairs = list(zip(a.inputs, b.inputs, strict=False))
        for source in {ref.source for ref, _ in pairs} & self.parts.keys():
            parts, refs = self.parts[source], [pair for pair in pairs if pair[0].source == source]
            alike = all(self.runs.same_place(*pair) and not pair[0].written for pair in refs)
            if alike and parts.lie_before(min(ref.offset for ref, _ in refs), dtypes):
                self.beside.setdefault(node, set()).add(source)

    def add_place(self, node: str, first: Sequence[Written], second: Sequence[Written]) -> bool:
        """Follow the parts of the memory that a pair of records wrote; return True if it is the same in both runs.

        Of an op that wrote several memories nothing is followed.
        """
        if len(first) != 1 or len(second) != 1:
            return False
        source = first[0].ref.source
        if source != self.runs.node_of[second[0].ref.source]:
            return False
        parts = self.parts.pop(source, None)
        if parts is None and source in self.tainted:
            return False  # something differs of which the place is not known
        parts = parts or Parts()
        parts.add(first[0], second[0])
        if parts.agree():
            return True
        self.parts[node] = parts
        return False

    def add_edge(self, node: str, origin: str) -> bool:
        """Record that the difference at ``node`` came from ``origin``; return False if ``origin`` is empty."""
        if origin:
            self.edges.setdefault(node, []).append(origin)
        return bool(origin)


def find_differences(runs: PairedRuns, *, ranks_known: bool = False) -> Differences:
    """Judge leaves, then every pair of records in order.

    Args:
        runs: the aligned runs.
        ranks_known: the traces of the other ranks are at hand: a source behind a collective keeps its origin, and the
            caller judges the collectives.
    """
    differences = Differences(runs)
    _judge_leaves(differences)
    follows = not ranks_known and any(exchanges(record) for run in (runs.first, runs.second) for record in run.records)
    is_behind = opaque_first = False
    head = _equal_head(differences)
    for index, (node, (a, b)) in enumerate(runs.records.items()):
        if node == runs.opaque:
            is_behind, opaque_first = True, not differences.exchanges
        if follows:
            differences.propagate_received(node, a, b)
        if ranks_known and a is not None and b is not None and not a.inside and exchanges(a) and has_pending(a, b):
            differences.tainted.add(node)
        if index >= head:
            _judge_records(differences, node, a, b)
            _settle(differences, node, is_behind=is_behind, opaque_first=opaque_first, ranks_known=ranks_known)
    if not opaque_first:
        for node in list(differences.sources):
            _attribute_to_caller(differences, node)
        _put_leaves_behind_exchanges(differences)
    return differences


def _judge_leaves(differences: Differences) -> None:
    runs = differences.runs
    last = runs.position.get(runs.opaque, len(runs.first.records))
    for leaf, other in runs.leaves.values():
        if leaf is None or other is None or leaf.id in runs.only_filled:
            continue
        if leaf.digest != other.digest or leaf.initial != other.initial:
            differences.differs.add(leaf.id)
        if leaf.digest != other.digest:
            differences.tainted.add(leaf.id)
            hidden = max(leaf.position, other.position) > last
            differences.sources[leaf.id] = opaque_source(runs, runs.opaque) if hidden else _leaf_source(leaf, other)


def _judge_records(differences: Differences, node: str, a: OpRecord | None, b: OpRecord | None) -> None:
    if a is not None and b is not None:
        _judge_pair(differences, node, a, b)
    elif (record := a or b) is not None:
        _judge_unmatched(differences, node, record, in_first=a is not None)


def _settle(differences: Differences, node: str, *, is_behind: bool, opaque_first: bool, ranks_known: bool) -> None:
    """Rewrite the source at a record that was judged: code that no trace sees, or other ranks, may be behind it."""
    runs, sources = differences.runs, differences.sources
    if is_behind and node in sources:
        sources[node] = opaque_source(runs, runs.opaque)
    if node == runs.opaque:  # it may have read whatever differs among its inputs, however that is hashed
        differences.edges.setdefault(node, []).extend(runs.read_by(node))
    if node in sources and not opaque_first:
        sources[node] = differences.traceable(node, sources[node])
    if node in sources:
        sources[node] = adopted_memory(runs, sources[node], _STORAGE if ranks_known else _SHARED_STORAGE)


def _put_leaves_behind_exchanges(differences: Differences) -> None:
    """Let other ranks be behind tensors from outside that are first read after a collective."""
    runs = differences.runs
    for leaf in runs.first.leaves if differences.exchanges else ():
        source = differences.sources.get(leaf.id)
        earlier = [node for node in differences.exchanges if runs.position[node] < leaf.position]
        if source is not None and source.origin == Origin.OUTSIDE and earlier:
            differences.sources[leaf.id] = differences.behind_exchange(leaf.id, source, earlier[-1])


def _equal_head(differences: Differences) -> int:
    """Return the number of pairs before the first that differs, is opaque or reads a leaf that differs: none of them
    introduces or propagates a difference."""
    runs = differences.runs
    at = [read.position for leaf in differences.differs for read in runs.leaves[leaf] if read is not None]
    at += [runs.position[runs.opaque]] if runs.opaque else []
    at += itertools.islice((index for index, (a, b) in enumerate(runs.records.values()) if a != b), 1)
    return min(at, default=len(runs.records))


def _attribute_to_caller(differences: Differences, node: str) -> None:
    """Blame the calling op for what entered inside it, if it was called alike in both runs.

    That holds for a tensor or argument from elsewhere, another order of inner ops, and its own generator; not for a
    difference among its arguments, which a tensor or another order of ops inside passes on where no inputs were hashed.
    """
    runs, source = differences.runs, differences.sources[node]
    origins = (Origin.OUTSIDE, Origin.SEQUENCE, Origin.RNG)
    if source.origin not in origins or (differences.exchanges and node not in runs.records):
        return  # what lies behind a collective is of other origin by now, but for leaves
    first, second = runs.records[node] if node in runs.records else (_born_inside(runs, node), None)
    callers = {record.inside for record in (first,) if record is not None}
    callers |= {runs.node_of.get(record.inside, "") for record in (second,) if record is not None}
    caller = callers.pop() if len(callers) == 1 else ""
    a, b = runs.records.get(caller, (None, None))
    inner = first or second
    if a is None or b is None or inner is None:
        return
    read_digests = [[ref.digest for ref in record.inputs if ref.argument != "inside"] for record in (a, b)]
    outside = caller in differences.sources and differences.sources[caller].origin == Origin.OUTSIDE
    if outside or (runs.hashed and read_digests[0] != read_digests[1]):
        return
    read = [node for node, ref in runs.reads(caller) if ref.argument != "inside" and node in differences.tainted]
    if read and not runs.hashed and source.origin != Origin.RNG:
        del differences.sources[node]
        differences.edges.setdefault(node, []).extend(read)
        return
    if source.origin == Origin.RNG and not (a.rng and a.rng == b.rng):
        return  # the op was called with the generator in another state, or that is not known
    detail = f"{inner.op} inside it: {source.detail}"
    kernel = replace(
        source, origin=Origin.KERNEL, node=caller, first_visible_at=caller, detail=detail, opaque_producer=False
    )
    differences.sources[node] = kernel


def _born_inside(runs: PairedRuns, leaf: str) -> OpRecord | None:
    """Return the first reader of a leaf if it is inside an op that was not given that leaf, else ``None``."""
    if leaf.partition("/")[0] != "other":
        return None
    readers = [record for record in runs.first.records if any(ref.source == leaf for ref in record.inputs)]
    if not readers or not readers[0].inside:
        return None
    read, reader, outer = {record.id for record in readers}, readers[0], readers[0]
    while outer.inside:
        if outer.inside in read:
            return None
        callers = runs.records.get(outer.inside, (None, None))
        outer = next(record for record in callers if record is not None)
    return reader


def opaque_source(runs: PairedRuns, node: str) -> Source:
    """Return the source for differences in or behind an opaque record that no earlier source explains."""
    a, b = runs.records[node]
    what = next(record.opaque for record in (a, b) if record is not None and record.opaque)
    old, new = ("absent" if record is None else _left(record) for record in (a, b))
    detail = f"the runs diverge in {what} or behind it, where a trace names no kernel"
    if old == new:
        old = new = ""
    return Source(Origin.OUTSIDE, node, runs.position[node], detail, old, new, opaque_producer=True)


_ALIASES = frozenset({"alias", "detach", "lift_fresh"})
"""Views that equal their base: one more or less of them has no effect."""

_COPIES = frozenset({"_to_copy", "cat", "clone", "copy", "copy_", "lift_fresh_copy", "stack"})
"""Ops that only move elements: their kernel cannot introduce a difference."""


def _judge_unmatched(differences: Differences, node: str, record: OpRecord, *, in_first: bool) -> None:
    differences.keep_view(node)
    differences.differs.add(node)
    differences.tainted.add(node)
    has, lacks = ("first", "second") if in_first else ("second", "first")
    detail = f"op only in the {has} run; the {lacks} run has a different op here"
    call = f"{record.op}({record.arguments})"
    first, second = (call, "absent") if in_first else ("absent", call)
    beside = bool(thread_of(record)) and any(ref.written for ref in record.inputs)
    at = differences.runs.position[node]
    differences.sources[node] = Source(Origin.SEQUENCE, node, at, detail, first, second, opaque_producer=beside)
    if record.rng:
        differences.unmatched_draws.setdefault((in_first, record.rng), node)
    if record.scalar:
        differences.unmatched_scalars.append(node)
    elif not record.outputs and record.collective is None and name_of(record) not in _ALIASES:
        differences.add_view(node)


def _judge_pair(differences: Differences, node: str, a: OpRecord, b: OpRecord) -> None:
    differences.keep_view(node)
    begin = differences.runs.reordered.get(node)
    if begin is not None:
        if not begin or _keeps_a_difference(
            differences, *differences.runs.records[begin]
        ):  # the memory differs for now, or did
            differences.tainted.add(node)
        return
    differences.keep_beside(node, a, b)
    first, second = written_in_place(a), written_in_place(b)
    elsewhere = written_elsewhere(differences.runs, first, second)
    wrote = a.outputs != b.outputs or a.scalar != b.scalar
    source = _introduced(differences, node, a, b, wrote, elsewhere)
    if not a.outputs and not b.outputs and not a.scalar and not b.scalar:  # a view
        if a.collective is None and (source is not None or a.arguments != b.arguments):
            differences.add_view(node)
        if source is not None:
            differences.sources[node] = source
        return
    if a.scalar != b.scalar:
        differences.scalars.append(node)
    changed = wrote or elsewhere is not None
    keeps = changed or _keeps_a_difference(differences, a, b)
    if elsewhere is not None:
        differences.elsewhere.add(node)
    if not keeps or (differences.add_place(node, first, second) and a.scalar == b.scalar):
        return
    differences.tainted.add(node)
    if wrote:
        differences.differs.add(node)
    if changed and source is not None:
        differences.sources[node] = source


def _keeps_a_difference(differences: Differences, a: OpRecord | None, b: OpRecord | None) -> bool:
    """Return True if a difference stays in memory beside what a pair of records wrote."""
    runs = differences.runs
    return (
        a is not None
        and b is not None
        and any(
            x.written
            and x.source in differences.tainted
            and runs.coverage.writes_only_part(a, x.source)
            and not runs.replaced(a, b, x, y)
            for x, y in zip(a.inputs, b.inputs, strict=False)
        )
    )


# --------------------------------------------------------------------------------------------- the rules, in order


def _introduced(
    differences: Differences,
    node: str,
    a: OpRecord,
    b: OpRecord,
    wrote: bool,
    elsewhere: tuple[Written, Written] | None,
) -> Source | None:
    """Return how this pair of records introduced a difference; ``None`` if it only propagated one, or has none."""
    at, passed_on = differences.runs.position[node], False
    if a.rng != b.rng and node not in differences.runs.drawn_inside:
        passed_on = differences.add_edge(node, _extra_draw(differences, a, b))
        if not passed_on:
            detail = "RNG state before this op differs"
            return Source(Origin.RNG, node, at, detail, f"generator state {a.rng}", f"generator state {b.rng}")
    if a.arguments != b.arguments:
        passed_on = differences.add_edge(node, _scalar_among_arguments(differences, a, b))
        if not passed_on:
            detail = "a non-tensor argument differs"
            return Source(Origin.OUTSIDE, node, at, detail, f"({a.arguments})", f"({b.arguments})")
    if elsewhere is not None:
        if passed_on or differences.add_edge(node, differences.view_of(elsewhere[0].ref.source)):
            return None
        if not _is_laid_out_differently(differences, *elsewhere):
            detail = "it writes to a different part of the memory than in the first run"
            first, second = (str(written.place) for written in elsewhere)
            return Source(Origin.SEQUENCE, node, at, detail, first, second)
    behind = _written_behind(differences, node, a, b) if wrote else None
    if behind is not None:
        return behind
    if _wired_differently(differences.runs, a, b):
        if differences.add_edge(node, _view_of_another_part(differences, a, b) or _odd_view(differences, node, a, b)):
            return None
        detail = "it reads a different tensor than in the first run"
        return Source(Origin.SEQUENCE, node, at, detail, _wiring(a), _wiring(b))
    if not wrote or passed_on:
        return None
    if _read_a_difference(differences, node, a, b):
        differences.add_edge(node, _view_of_other_content(differences, a, b))
        return None
    if differences.add_edge(node, _met_other_strides(differences, a, b)):
        return None
    if differences.add_edge(node, _odd_view(differences, node, a, b)):
        return None
    return (
        _laid_out_differently(differences.runs, a, b)
        or _memory_read_blank(differences.runs, a)
        or _copied_after_hidden_write(differences.runs, node, a, b)
        or _kernel_source(node, at, a, b)
    )


def _extra_draw(differences: Differences, a: OpRecord, b: OpRecord) -> str:
    """Return the draw that only one run made: its generator is ahead from then on, in every later state."""
    extra = differences.unmatched_draws.get((False, a.rng)) or differences.unmatched_draws.get((True, b.rng))
    if extra:
        differences.shifts.append(extra)
    return differences.shifts[0] if differences.shifts else ""


def _scalar_among_arguments(differences: Differences, a: OpRecord, b: OpRecord) -> str:
    """Return the earlier record that returned the differing scalar among the arguments."""
    values_a, values_b = _values(a), _values(b)
    for name in reversed(differences.scalars):
        old, new = differences.runs.records[name]
        if old is not None and new is not None and old.scalar in values_a and new.scalar in values_b:
            return name
    return ""


def _is_laid_out_differently(differences: Differences, written: Written, other: Written) -> bool:
    """Return True if the memory itself may have other strides in the two runs, not only the part that is written."""
    source = written.ref.source
    known_apart = source in differences.tainted or source in differences.runs.only_filled
    return known_apart and written.place.offset == other.place.offset


def _view_of_another_part(differences: Differences, a: OpRecord, b: OpRecord) -> str:
    """Return the view by which this pair of records reads another part of the same memory, or ``""``."""
    for x, y in zip(a.inputs, b.inputs, strict=False):
        if (
            x.source == differences.runs.node_of[y.source]
            and x.offset != y.offset
            and (view := differences.view_of(x.source))
        ):
            return view
    return ""


def _view_of_other_content(differences: Differences, a: OpRecord, b: OpRecord) -> str:
    """Return the view by which this pair of records reads other content of memory that was written alike, where inputs
    were hashed, or ``""``: more or less of it from one place on."""
    for x, y in zip(a.inputs, b.inputs, strict=True) if differences.runs.hashed else ():
        other = (x.digest, x.layout) != (y.digest, y.layout)
        if (
            other
            and differences.runs.same_place(x, y)
            and x.source not in differences.tainted
            and (view := differences.view_of(x.source))
        ):
            return view
    return ""


def _odd_view(differences: Differences, node: str, a: OpRecord, b: OpRecord) -> str:
    """Return the view that showed an input differently (another slice or order), or ``""`` if the inputs are known to
    be equal."""
    read, other = ([(ref.digest, ref.layout) for ref in record.inputs] for record in (a, b))
    read_the_same = bool(read) and all(digest for digest, _ in read) and read == other
    if not differences.odd_views or (differences.runs.hashed and read_the_same):
        return ""
    view = next(
        (differences.odd_views[name] for name in differences.runs.read_by(node) if name in differences.odd_views), ""
    )
    return "" if view == node else view


def _wired_differently(runs: PairedRuns, a: OpRecord, b: OpRecord) -> bool:
    if len(a.inputs) != len(b.inputs):
        return True
    for ref_a, ref_b in zip(a.inputs, b.inputs, strict=True):
        if ref_a.argument != ref_b.argument:
            return True
        alike = ref_a.digest and (ref_a.digest, ref_a.layout) == (ref_b.digest, ref_b.layout)
        if runs.same_place(ref_a, ref_b) or alike:
            continue  # equal content in another place: what a kernel makes of that is its own doing
        if ref_a.offset != ref_b.offset or not runs.same_content(ref_a, ref_b):
            return True
    return False


def _read_a_difference(differences: Differences, node: str, a: OpRecord, b: OpRecord) -> bool:
    """Return True if any input differed: by its digest if inputs were hashed, else by its last writer."""
    runs = differences.runs
    refs = [pair for pair in zip(a.inputs, b.inputs, strict=True) if not runs.replaced(a, b, *pair)]
    if differences.runs.hashed:
        return any(x.digest != y.digest for x, y in refs if not _is_target(differences.runs, x))
    beside = differences.beside.get(node, ())
    return any(
        x.source in differences.tainted and x.source not in beside for x, y in refs if differences.runs.carries(x, y)
    )


def _met_other_strides(differences: Differences, a: OpRecord, b: OpRecord) -> str:
    """Return the node whose output, read or overwritten by this op, has different strides in the two runs."""
    for x, y in zip(a.inputs, b.inputs, strict=True):
        old, new = differences.runs.coverage.content(x.source), differences.runs.other_coverage.content(y.source)
        if x.source in differences.tainted and old is not None and new is not None and layouts_differ([old], [new]):
            return x.source
    return ""


def _is_target(runs: PairedRuns, ref: Ref) -> bool:
    """Return True if ``ref`` is fresh memory that the op fills: its old content is undefined."""
    return ref.written and bool(runs.coverage.allocation_behind(ref.source))


def _written_behind(differences: Differences, node: str, a: OpRecord, b: OpRecord) -> Source | None:
    """Return the source of an input whose content differs although its last recorded writer agreed in both runs."""
    if not differences.runs.hashed or len(a.inputs) != len(b.inputs):
        return None
    for ref_a, ref_b in zip(a.inputs, b.inputs, strict=True):
        changed = ref_a.digest != ref_b.digest and differences.runs.same_place(ref_a, ref_b)
        tainted = ref_a.source in differences.tainted and ref_a.source not in differences.beside.get(node, ())
        other_part = ref_a.layout != ref_b.layout or (not ref_a.layout and ref_a.source in differences.odd_views)
        if not changed or tainted or other_part or _is_target(differences.runs, ref_a):
            continue
        if (another := _another_output(differences, node, ref_a, ref_b)) is not None:
            return another
        writer = ref_a.source.rpartition("/")[2] or ref_a.source
        detail = f"argument {ref_a.argument} was modified outside the dispatcher after {writer}"
        at = differences.runs.position[node]
        behind = Source(Origin.OUTSIDE, node, at, detail, ref_a.digest, ref_b.digest, opaque_producer=True)
        return unwritten_memory(differences.runs, ref_a.source) or behind
    return None


def _another_output(differences: Differences, node: str, ref_a: Ref, ref_b: Ref) -> Source | None:
    """Return the source of a reader that was given another output of one op, such as ``x.aminmax()[i]``."""
    a, b = differences.runs.records.get(ref_a.source, (None, None))
    if a is None or b is None or a.outputs != b.outputs:
        return None
    values = [digest.value for digest in a.outputs]
    if len(values) < 2 or not {ref_a.digest, ref_b.digest} <= {*values}:
        return None
    first, second = (
        f"{ref.argument}={ref.source} output {values.index(ref.digest)}" for ref in (ref_a, ref_b._replace(source=a.id))
    )
    detail = "it reads a different output of one op than in the first run"
    return Source(Origin.SEQUENCE, node, differences.runs.position[node], detail, first, second)


def _laid_out_differently(runs: PairedRuns, a: OpRecord, b: OpRecord) -> Source | None:
    """Blame memory from outside that an op fills, if its strides differ between the runs: outputs are hashed in memory
    order."""
    if not layouts_differ(a.outputs, b.outputs):
        return None
    filled = (runs.only_filled[ref.source] for ref in a.inputs if ref.written and ref.source in runs.only_filled)
    return next((_leaf_source(*pair) for pair in filled if pair[0].digest.stride != pair[1].digest.stride), None)


def layouts_differ(a: Sequence[TensorDigest], b: Sequence[TensorDigest]) -> bool:
    """Return True if two lists of tensors agree in dtypes and shapes and differ in strides."""
    alike = [(x.dtype, x.shape) for x in a] == [(y.dtype, y.shape) for y in b]
    return alike and [x.stride for x in a] != [y.stride for y in b]


def contents_in_words(a: Sequence[TensorDigest], b: Sequence[TensorDigest]) -> tuple[str, str]:
    """Return two contents as text, with strides where those differ."""
    strided = layouts_differ(a, b)
    first, second = (
        " ".join(digest.word() + (f" stride {list(digest.stride)}" if strided else "") for digest in digests)
        for digests in (a, b)
    )
    return first, second


def _memory_read_blank(runs: PairedRuns, a: OpRecord) -> Source | None:
    """Blame the allocation if an op's inputs are equal except for memory that was never written."""
    if a.blank:
        return None
    reads_its_target = a.op.startswith("aten.") and name_of(a).endswith("_") and name_of(a) not in OVERWRITING
    read = (ref.source for ref in a.inputs if (reads_its_target if ref.written else not runs.hashed))
    return next(filter(None, (unwritten_memory(runs, source) for source in read)), None)


_UNINITIALISED = "uninitialised"
_STORAGE, _SHARED_STORAGE = "Storage>", "<shared UntypedStorage>"
"""In the text of the arguments of an op that adopts memory, such as bytes that Python has made; of memory that other
processes may write, as the workers of a ``DataLoader`` do."""


def unwritten_memory(runs: PairedRuns, node: str) -> Source | None:
    """Return the allocation behind a node's output, if the recorded writes since then did not cover all of it."""
    allocation = runs.coverage.allocation_behind(node)
    if not allocation:
        return None
    if allocation in runs.only_filled:
        return _leaf_source(*runs.only_filled[allocation])
    detail = "memory that this op allocated was read before it was written"
    return Source(Origin.KERNEL, allocation, runs.position[allocation], detail, _UNINITIALISED, _UNINITIALISED)


def adopted_memory(runs: PairedRuns, source: Source, adopted: str = _STORAGE) -> Source:
    """Return ``source``, as written outside torch if its op adopted unwritten memory: ranks exchange objects as bytes
    that Python has made. ``adopted`` is in the text of the op's arguments then."""
    records = runs.records.get(source.node, ())
    blank = source.origin == Origin.KERNEL and source.first == _UNINITIALISED
    if not blank or not any(record is not None and adopted in record.arguments for record in records):
        return source
    detail = "memory that this op adopted was written outside torch"
    return replace(source, origin=Origin.OUTSIDE, detail=detail, first="", second="", opaque_producer=True)


def _copied_after_hidden_write(runs: PairedRuns, node: str, a: OpRecord, b: OpRecord) -> Source | None:
    """Blame a hidden write for a copy that differs: copying equal memory cannot."""
    written = {ref.source for ref in a.inputs if ref.written}
    races = any(ref.source in written for ref in a.inputs if not ref.written)
    if runs.hashed or races or name_of(a) not in _COPIES or not a.inputs or layouts_differ(a.outputs, b.outputs):
        return None
    detail = "a copy of equal memory differs, so that memory was modified outside the dispatcher"
    return Source(Origin.OUTSIDE, node, runs.position[node], detail, _left(a), _left(b), opaque_producer=True)


def _leaf_source(a: Leaf, b: Leaf) -> Source:
    changed_since_start = (a.initial or a.digest.value) == (b.initial or b.digest.value) and (a.initial or b.initial)
    if changed_since_start:
        detail = f"{a.id} was modified outside the dispatcher before it was first read"
        return Source(Origin.OUTSIDE, a.id, a.position, detail, a.digest.value, b.digest.value, opaque_producer=True)
    origins = {"input": Origin.INPUT, "parameter": Origin.STATE, "buffer": Origin.STATE}
    origin = origins.get(a.kind, Origin.OUTSIDE)
    strided = layouts_differ([a.digest], [b.digest])
    differs = "has different strides" if strided else "differs"
    detail = {
        Origin.INPUT: f"the model input {a.id} {differs} before the first op",
        Origin.STATE: f"the {a.kind} {a.id.partition('/')[2]} {differs} before the first op",
    }.get(origin, f"a tensor that no recorded op wrote has different {'strides' if strided else 'content'}")
    return Source(origin, a.id, a.position, detail, *contents_in_words([a.digest], [b.digest]))


def _kernel_source(node: str, at: int, a: OpRecord, b: OpRecord) -> Source:
    names = [index for index, (x, y) in enumerate(zip(a.outputs, b.outputs, strict=False)) if x != y]
    which = f"output {', '.join(map(str, names))}" if names and len(a.outputs) > 1 else "the output"
    differs = "has different strides" if layouts_differ(a.outputs, b.outputs) else "differs"
    detail = f"{which} {differs} although every input is equal"
    first, second = contents_in_words(a.outputs, b.outputs)
    return Source(Origin.KERNEL, node, at, detail, first + a.scalar, second + b.scalar)


# ------------------------------------------------------------------------------------------------------- words


def _left(record: OpRecord) -> str:
    """Return everything that a record wrote or returned, as text."""
    return " ".join(digest.word() for digest in record.outputs) + record.scalar


def _wiring(record: OpRecord) -> str:
    return ", ".join(f"{ref.argument}={ref.source}" + (f"+{ref.offset}" if ref.offset else "") for ref in record.inputs)


_BETWEEN_VALUES = str.maketrans(",=[]", "    ")


def _values(record: OpRecord) -> list[str]:
    """Split a record's arguments, lists and keywords included, into single values."""
    return record.arguments.translate(_BETWEEN_VALUES).split()
