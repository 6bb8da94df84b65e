"""Walk back from the results that differ over all ranks of two runs: the nodes that differ, and where they came from.

A node is a record or leaf of a rank (as in :class:`~hashbench.core.divergence.align.PairedRuns`), or what that rank
*contributed* to a collective. What a rank received came from the contributions of the other ranks, and each of these
from its writers:

* A collective is innocent where any rank contributed different content in the two runs: the walk goes on at that rank.
* It is guilty (origin ``collective``) where all ranks contributed the same, and the output differs.
* A contribution was made outside torch (``outside``) where it differs and its writers agree: bytes that Python
  pickled, memory that something else wrote.
* Messages whose source is open are taken in the order in which they arrived: another order is the collective's doing.

Where a rank's trace, or its call, is missing, the walk ends: what is behind it is not known.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from hashbench.core.catalog import Origin
from hashbench.core.divergence.align import SECOND
from hashbench.core.divergence.collective_calls import (
    CollectiveCall,
    RankCalls,
    contributed_by,
    contributors_of,
    exchanges,
    has_pending,
    is_from_any_source,
    number_calls,
)
from hashbench.core.divergence.introduce import Differences, Source, adopted_memory, contents_in_words, unwritten_memory
from hashbench.core.divergence.slice import Slice, backward_slice
from hashbench.core.records import PENDING, Collective, OpRecord, Ref, Trace
from hashbench.core.text import format_ranks


class RankNode(NamedTuple):
    """A node of the walk.

    Attributes:
        rank: global rank.
        node: of the pair of runs of that rank; empty if the trace, or the call, is missing.
        is_contribution: what the rank contributed to the collective ``node``, in place of what it received.
    """

    rank: int
    node: str
    is_contribution: bool = False


@dataclass(frozen=True, slots=True)
class Candidate:
    """A difference that entered at a node.

    Attributes:
        at: the node.
        source: how it entered.
        missing: ranks without a trace, or without the call, that may be behind it.
    """

    at: RankNode
    source: Source
    missing: tuple[int, ...] = ()


_Exchange = tuple[OpRecord, OpRecord]


@dataclass(frozen=True)
class JudgedRanks:
    """The ranks of two runs, each pair of traces judged, the collectives left open.

    Attributes:
        first, second: the traces of each run, by global rank.
        differences: those of each rank whose traces differ. The other ranks have two equal traces.
    """

    first: Mapping[int, Trace]
    second: Mapping[int, Trace]
    differences: Mapping[int, Differences]
    _unread_by_rank: dict[int, list[RankNode]] = field(default_factory=dict, init=False, repr=False)
    _contribution_by_calls: dict[tuple[int, CollectiveCall | None, CollectiveCall | None], RankNode | None] = field(
        default_factory=dict, init=False, repr=False
    )

    @functools.cached_property
    def calls(self) -> tuple[Mapping[int, RankCalls], Mapping[int, RankCalls]]:
        """The numbered collectives of both runs."""
        return number_calls(self.first), number_calls(self.second)

    def walk(self, roots: Iterable[RankNode]) -> Slice[RankNode]:
        """Return what leads to the roots by tensors."""
        return backward_slice(filter(self._differs, roots), self._before, self._is_known)

    def walk_by_python(self, at: RankNode) -> Slice[RankNode]:
        """Return what leads to a node by way of Python: what differed among the scalars that were read, and among the
        received tensors (pickled objects) and the random numbers (orders of examples) that no recorded op read, before
        it; and whatever leads to these. Of a rank that sent such an object, also other tensors that no op read: the
        object may hold them."""
        return backward_slice(list(self._by_python(at)), self._before_by_python, self._is_known)

    def candidates(self, walked: Slice[RankNode]) -> Iterator[Candidate]:
        """Yield the differences that entered at the nodes of a walk."""
        for at, before in walked.reached.items():
            present = [node for node in before if node.node]
            if self.exchange_at(at) is not None and not at.is_contribution:
                if not present:
                    yield _from_exchange(self, at, tuple(sorted({node.rank for node in before})))
            elif at.is_contribution:
                if not before:
                    yield Candidate(at, _from_outside(self, at))
            elif (source := self.differences[at.rank].sources.get(at.node)) is not None:
                yield Candidate(at, source)

    def outermost(self, rank: int, node: str) -> str:
        """Return the collective that called a record, directly or not; else the node itself."""
        first, second = (calls[rank].inside for calls in self.calls)
        if node in first:
            return first[node]
        inside = second.get(node.removeprefix(SECOND)) if node.startswith(SECOND) else None
        return node if inside is None else self.differences[rank].runs.node_of[inside]

    def exchange_at(self, at: RankNode) -> _Exchange | None:
        """Return both records of a collective whose output differs, or is not known; ``None`` for any other node, and
        for an op that is told by the collectives inside."""
        a, b = self.differences[at.rank].runs.records.get(at.node, (None, None))
        if a is None or b is None or not (exchanges(a) and exchanges(b)):
            return None
        if any(record.id in calls[at.rank].judged_inside for record, calls in zip((a, b), self.calls, strict=True)):
            return None
        return (a, b) if at.is_contribution or a.outputs != b.outputs or has_pending(a, b) else None

    def call_at(self, at: RankNode) -> CollectiveCall | None:
        """Return what the collective at a node takes part in, in the first run, else in the second."""
        node, (first, second) = at.node, (calls[at.rank].by_record for calls in self.calls)
        return first.get(node) or second.get(node.removeprefix(SECOND))

    # ------------------------------------------------------------------------------------------------- edges

    def _is_known(self, at: RankNode) -> bool | None:
        return True if at.node else None

    def _differs(self, at: RankNode) -> bool:
        differences = self.differences[at.rank]
        return at.node in differences.differs or at.node in differences.tainted

    def _before(self, at: RankNode) -> Iterator[RankNode]:
        if at.is_contribution:
            writers = self._writers(at)
        elif self.exchange_at(at) is not None:
            yield from self._received_from(at)
            writers = _kept(self, at)
        else:
            writers = self.differences[at.rank].came_from(at.node)
        for node in writers:
            yield RankNode(at.rank, self.outermost(at.rank, node))

    def _before_by_python(self, at: RankNode) -> Iterator[RankNode]:
        before = list(self._before(at))
        yield from before
        source = self.differences[at.rank].sources.get(at.node)
        from_outside = not before if at.is_contribution else source is not None and source.origin in BY_PYTHON
        if from_outside:
            yield from self._by_python(at)

    def _by_python(self, at: RankNode) -> Iterator[RankNode]:
        return (node for node, _ in self.python_links(at))

    def python_links(self, at: RankNode) -> Iterator[tuple[RankNode, RankNode | None]]:
        """Yield the nodes that lead to a node by way of Python alone, each with the collective in which this rank
        received it from another one."""
        differences = self.differences[at.rank]
        until = self.place(at)
        for node in (*differences.scalars, *differences.unmatched_scalars):
            if self.place(RankNode(at.rank, node)) < until:
                yield RankNode(at.rank, self.outermost(at.rank, node)), None
        for unread in self._unread(at.rank):
            if self.place(unread) >= until:
                break
            if self.exchange_at(unread) is not None:
                yield from ((node, unread) for node in self._received_from(unread) if node.rank != at.rank)
            elif at.is_contribution or self._is_draw(unread):  # bytes of tensors perhaps; an order of examples
                yield unread, None

    def differing_contributions(self, rank: int) -> Iterator[RankNode]:
        """Yield what a rank contributed to collectives and is known to differ, in the order of the calls."""
        for node, call in self.calls[0][rank].by_record.items():
            pair = self.differences[rank].runs.records.get(node, (None, None))
            contribution = (
                self._contribution(rank, call, call)
                if None not in pair and any(map(contributed_by, filter(None, pair)))
                else None
            )
            if contribution is not None and contribution.is_contribution:
                yield contribution

    def _is_draw(self, at: RankNode) -> bool:
        """Return True for numbers that a generator in a different state drew: where no op reads them, Python does."""
        source = self.differences[at.rank].sources.get(at.node)
        return source is not None and source.origin == Origin.RNG

    def place(self, at: RankNode) -> float:
        """Return where a node lies among the records of its rank, of both runs. A leaf lies where it was first read."""
        return self.differences[at.rank].runs.place(at.node)

    def _unread(self, rank: int) -> list[RankNode]:
        """List the nodes that differ and were read by no recorded op that wrote anything: Python may have read them."""
        if rank not in self._unread_by_rank:
            runs = self.differences[rank].runs
            read = {
                source
                for node, pair in runs.records.items()
                if any(record is not None and record.outputs and record.collective is None for record in pair)
                for source, ref in runs.reads(node)
                if not ref.written
            }
            nodes = (node for node in self.differences[rank].differs if node in runs.records and node not in read)
            outermost = dict.fromkeys(self.outermost(rank, node) for node in nodes)
            self._unread_by_rank[rank] = sorted((RankNode(rank, node) for node in outermost), key=self.place)
        return self._unread_by_rank[rank]

    # ------------------------------------------------------------------------------------------- collectives

    def _received_from(self, at: RankNode) -> Iterator[RankNode]:
        """Yield the contributions to a collective, this rank's too, that differ: that alone whose writers differ, if
        there is any such."""
        contributions = list(dict.fromkeys(filter(None, self._contributions(at))))
        present = [node for node in contributions if node.node]
        written = [node for node in present if not node.is_contribution or any(True for _ in self._writers(node))]
        yield from written or present
        yield from (node for node in contributions if not node.node)

    def _contributions(self, at: RankNode) -> Iterator[RankNode | None]:
        records = self.differences[at.rank].runs.records[at.node]
        first, second = (
            calls[at.rank].by_record.get(record.id) if record is not None else None
            for calls, record in zip(self.calls, records, strict=True)
        )
        both = (first, second)
        if records[0] is not None and records[1] is not None and records[0].arguments != records[1].arguments:
            yield RankNode(at.rank, at.node, is_contribution=True)
        collectives = [record.collective for record in records if record is not None and record.collective is not None]
        if not any(map(is_from_any_source, collectives)) and _other_peers(first, second):
            yield RankNode(at.rank, at.node, is_contribution=True)
            return
        if first == second or not any(map(is_from_any_source, collectives)):
            for contributor in _contributors(collectives, both):
                yield self._contribution(contributor, first, second)
            return
        for record, call, calls in zip(records, both, self.calls, strict=True):
            possible = calls[at.rank].possible.get(record.id, ()) if record is not None else ()
            for message in possible if call is None else (call,):
                yield self._contribution(message.source, message, message)

    def _contribution(
        self, contributor: int, first: CollectiveCall | None, second: CollectiveCall | None
    ) -> RankNode | None:
        """Return what a rank contributed to one call of each run, if it differs; a node without a name if that is not
        known. Each is looked at once, however many ranks received it."""
        key = contributor, first, second
        if key not in self._contribution_by_calls:
            self._contribution_by_calls[key] = self._judge_contribution(contributor, first, second)
        return self._contribution_by_calls[key]

    def _judge_contribution(
        self, contributor: int, first: CollectiveCall | None, second: CollectiveCall | None
    ) -> RankNode | None:
        if contributor not in self.calls[0] or contributor not in self.calls[1]:
            return RankNode(contributor, "")
        a, b = (
            calls[contributor].records.get(call) if call is not None else None
            for calls, call in zip(self.calls, (first, second), strict=True)
        )
        if a is None and b is None:
            return RankNode(contributor, "", is_contribution=True)
        if contributor not in self.differences:
            return None
        runs = self.differences[contributor].runs
        if a is None or b is None:
            lone = a.id if a is not None else runs.node_of[b.id] if b is not None else ""
            return (
                RankNode(contributor, lone)
                if None in runs.records[lone]
                else RankNode(contributor, "", is_contribution=True)
            )
        if runs.node_of[b.id] != a.id:
            lone = _first_lone_call(self, contributor, first)
            return RankNode(contributor, lone or a.id, is_contribution=not lone)
        return (
            RankNode(contributor, a.id, is_contribution=True)
            if self._contributes_differently(contributor, a, b)
            else None
        )

    def _contributes_differently(self, rank: int, a: OpRecord, b: OpRecord) -> bool:
        """Return True if a contribution, or other arguments, differ; where the content was not hashed, if its
        writers do."""
        if (a.op, a.arguments) != (b.op, b.arguments):
            return True
        return any(not _is_equal(*pair) for pair in _pairs(a, b)) and (
            _is_hashed(a, b) or any(True for _ in self._writers(RankNode(rank, a.id, is_contribution=True)))
        )

    def _writers(self, at: RankNode) -> Iterator[str]:
        """Yield the nodes from which the difference in a contribution came."""
        differences = self.differences[at.rank]
        a, b = differences.runs.records[at.node]
        if a is None or b is None:
            return
        sources = [] if a.arguments == b.arguments else [*differences.edges.get(at.node, ())]
        for old, new in _pairs(a, b):
            if not _is_equal(old, new):
                sources += [old.source] if old is not None else []
                sources += [differences.runs.node_of[new.source]] if new is not None else []
                sources += [*differences.edges.get(at.node, ())]
        for node in dict.fromkeys(sources):
            if node in differences.differs or node in differences.tainted:
                yield node


BY_PYTHON = frozenset({Origin.OUTSIDE, Origin.SEQUENCE})
"""Origins of what may follow from other differences by way of Python."""

OTHERS_AGREE = "the other ranks contributed the same in both runs"


def _contributors(collectives: Iterable[Collective], calls: Iterable[CollectiveCall | None]) -> Iterable[int]:
    """Return the ranks whose data are received in these calls."""
    present = [call for call in calls if call is not None]
    if any(call.source >= 0 for call in present):
        return dict.fromkeys(call.source for call in present)
    return dict.fromkeys(rank for collective in collectives for rank in contributors_of(collective)) if present else ()


def missing_words(missing: Iterable[int], present: Iterable[int]) -> str:
    """Say which ranks have no trace, and which no such call: ``no trace of rank 3``."""
    uncalled = sorted(set(present))
    gone = sorted(set(missing) - set(uncalled))
    words = [f"no trace of {format_ranks(gone)}"] if gone else []
    words += [f"no such call in the traces of {format_ranks(uncalled)}"] if uncalled else []
    return " and ".join(words)


def _kept(judged: JudgedRanks, at: RankNode) -> Iterator[str]:
    """Yield what a collective read and sent to nobody, such as the other factor of a product of what is gathered,
    and differs."""
    differences = judged.differences[at.rank]
    collectives = [
        record.collective for record in differences.runs.records[at.node] if record is not None and record.collective
    ]
    contributed = {"inside", *(argument for collective in collectives for argument in collective.contributed)}
    if judged.call_at(at) is None or any(collective.root is not None for collective in collectives):
        return
    for node, ref in differences.runs.reads(at.node):
        if (
            not ref.written
            and ref.argument not in contributed
            and (node in differences.differs or node in differences.tainted)
        ):
            yield node


def _first_lone_call(judged: JudgedRanks, rank: int, call: CollectiveCall | None) -> str:
    """Return the first call in a channel that only one of the runs makes: it shifts the numbers of all later
    ones."""
    differences = judged.differences[rank]
    for node, pair in differences.runs.records.items():
        mine = judged.call_at(RankNode(rank, node)) if None in pair else None
        if mine is not None and call is not None and mine._replace(number=0) == call._replace(number=0):
            return node
    return ""


def _order_of_arrival(judged: JudgedRanks, at: RankNode, a: OpRecord, b: OpRecord) -> str:
    came = [calls[at.rank].by_record.get(record.id) for calls, record in zip(judged.calls, (a, b), strict=True)]
    reason = "equal messages arrived in a different order"
    first, second = (f"rank {call.source}" if call is not None else "" for call in came)
    return f"{reason}: from {first} in the first run, from {second} in the second" if first and second else reason


def _from_exchange(judged: JudgedRanks, at: RankNode, missing: tuple[int, ...]) -> Candidate:
    """Return the source of a collective whose output differs although no contribution is known to differ."""
    runs = judged.differences[at.rank].runs
    a, b = runs.records[at.node]
    assert a is not None
    assert b is not None
    is_unknown = a.id in judged.calls[0][at.rank].unknown
    origin = Origin.RANKS if missing or is_unknown or has_pending(a, b) else Origin.COLLECTIVE
    detail = "all ranks contributed the same; the collective's output differs"
    if missing:
        detail = f"{missing_words(missing, [rank for rank in missing if rank in judged.calls[0]])}: {OTHERS_AGREE}"
    elif origin == Origin.RANKS and not is_unknown:
        detail = "all ranks contributed the same; the output was read before it was waited for"
    elif is_unknown:
        detail = "semantics of this collective are unknown"
    elif a.collective is not None and is_from_any_source(a.collective):
        detail = _order_of_arrival(judged, at, a, b)
    source = Source(origin, at.node, runs.position[at.node], detail, *contents_in_words(a.outputs, b.outputs))
    return Candidate(at, source, missing)


def _from_outside(judged: JudgedRanks, at: RankNode) -> Source:
    """Return the source of a contribution that no recorded op wrote so."""
    differences = judged.differences[at.rank]
    runs = differences.runs
    a, b = runs.records[at.node]
    assert a is not None
    assert b is not None
    position = runs.position[at.node]
    both = [calls[at.rank].by_record.get(record.id) for record, calls in zip((a, b), judged.calls, strict=True)]
    if _other_peers(*both):
        detail = "the process group, or the peer, of this call differs"
        first, second = ("" if call is None else f"({call.word()})" for call in both)
        return Source(Origin.OUTSIDE, at.node, position, detail, first, second)
    if a.arguments != b.arguments and all(None in pair or _is_equal(*pair) for pair in _pairs(a, b)):
        detail = "a non-tensor argument differs"
        return Source(Origin.OUTSIDE, at.node, position, detail, f"({a.arguments})", f"({b.arguments})")
    source = differences.sources.get(at.node)
    if source is not None and source.origin == Origin.SEQUENCE:
        return source
    changed = [pair for pair in _pairs(a, b) if not _is_equal(*pair)]
    for old, _ in changed:
        memory = unwritten_memory(runs, old.source) if old is not None else None
        if memory is not None:
            return adopted_memory(runs, memory)
    argument = next((ref.argument for pair in changed for ref in pair if ref is not None), "")
    detail = f"argument {argument}, which this rank contributed, was written outside torch"
    first, second = (" ".join(ref.digest for ref in contributed_by(record)) for record in (a, b))
    return Source(Origin.OUTSIDE, at.node, position, detail, first, second, opaque_producer=True)


def _other_peers(first: CollectiveCall | None, second: CollectiveCall | None) -> bool:
    """Return True if a call is known to meet other ranks in the two runs: in another process group, or by a message
    to or from another rank."""
    if first is None or second is None:
        return False
    return first._replace(ordinal=0, number=0) != second._replace(ordinal=0, number=0)


def _pairs(a: OpRecord, b: OpRecord) -> Iterator[tuple[Ref | None, Ref | None]]:
    """Pair the contributions of two calls, by argument."""
    old, new = ({ref.argument: ref for ref in contributed_by(record)} for record in (a, b))
    yield from ((old.get(name), new.get(name)) for name in {**old, **new})


def _is_equal(old: Ref | None, new: Ref | None) -> bool:
    """Return True if two contributed tensors are known to be equal."""
    return old is not None and new is not None and old.digest == new.digest not in ("", PENDING)


def _is_hashed(a: OpRecord, b: OpRecord) -> bool:
    """Return True if all contributions of both calls were hashed."""
    return all(ref.digest not in ("", PENDING) for record in (a, b) for ref in contributed_by(record))
