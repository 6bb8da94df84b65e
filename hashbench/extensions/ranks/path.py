"""Say by which collectives a difference came to other ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from hashbench.core.catalog import Origin
from hashbench.core.divergence.align import name_of
from hashbench.core.divergence.collective_calls import CollectiveCall
from hashbench.core.text import format_ranks
from hashbench.extensions.ranks.verdict import RankHop
from hashbench.extensions.ranks.walk import Candidate, JudgedRanks, RankNode

AT_A_COLLECTIVE = frozenset({Origin.COLLECTIVE, Origin.RANKS})
"""Origins of a difference that entered in a collective, on all ranks that received from it."""

_HOPS = 6

Graph = Mapping[RankNode, Sequence[RankNode]]
"""RankNode that differs → the nodes from which its difference came."""


def call_of(judged: JudgedRanks, candidate: Candidate) -> CollectiveCall | None:
    """Return the collective in which a difference entered; ``None`` if it entered on one rank."""
    return judged.call_at(candidate.at) if candidate.source.origin in AT_A_COLLECTIVE else None


def hops_to_other_ranks(judged: JudgedRanks, candidate: Candidate, graph: Graph) -> tuple[RankHop, ...]:
    """Return the collectives by which a difference came to each other rank first, in front that in which it entered."""
    call = call_of(judged, candidate)
    starts = [candidate.at]
    if call is not None:
        starts = [at for at in graph if not at.is_contribution and judged.call_at(at) == call] or starts
    made = _hops(judged, starts, graph)
    if not made and candidate.source.origin == Origin.SEQUENCE:
        made = _hops(judged, list(_lone_behind(judged, candidate, graph)), graph)
    if call is not None:
        entered = _hop(judged, candidate.at, None, call)
        made.insert(0, replace(entered, ranks=tuple(sorted({at.rank for at in starts}))))
    return tuple(made)


def hops_by_python(judged: JudgedRanks, candidate: Candidate, graph: Graph) -> tuple[RankHop, ...]:
    """Return the collectives by which other ranks had what led to a candidate by way of Python: a decision of one rank
    that all follow."""
    before = [at for at in judged.walk_by_python(candidate.at).reached if at.rank == candidate.at.rank and at in graph]
    return tuple(_hops(judged, before, graph))


def path_text(rank: int, begin: str, hops: Sequence[RankHop]) -> str:
    """Format the hops of a difference.

    ``rank 1: aten.index_put_ -> all_reduce #7 of group 0-1 -> rank 0``, with further hops behind semicolons; empty if
    it came to no other rank.

    Args:
        rank: where it entered.
        begin: what produced it, in one word (:func:`in_one_word`).
        hops: its hops.
    """
    hop_words = [
        f"{'' if hop.rank is None else f'rank {hop.rank}: '}{_call(hop)} -> {format_ranks(hop.ranks)}" for hop in hops
    ]
    if hop_words and hops[0].rank is not None and begin:
        hop_words[0] = hop_words[0].replace(f"rank {rank}: ", f"rank {rank}: {begin} -> ", 1)
    return "; ".join(hop_words[:_HOPS] + ([f"and {len(hop_words) - _HOPS} more"] if len(hop_words) > _HOPS else []))


def in_one_word(place: str) -> str:
    """Return the name of an op without its overload: ``aten.index_put_``; that of a leaf as it is: ``input/0``, and of
    what is no op: ``torch.compile``."""
    return place if "/" in place or place.count(".") < 2 else place.rpartition(".")[0]


def _hops(judged: JudgedRanks, starts: Collection[RankNode], graph: Graph) -> list[RankHop]:
    hops: dict[RankHop, list[int]] = {}
    for at, contributor in _arrivals(judged, starts, graph):
        hops.setdefault(_hop(judged, at, contributor, judged.call_at(at)), []).append(at.rank)
    return [replace(hop, ranks=tuple(takers)) for hop, takers in hops.items()]


def _arrivals(judged: JudgedRanks, starts: Collection[RankNode], graph: Graph) -> Iterator[tuple[RankNode, int]]:
    """Yield, for each rank that data of the starts came to, the node where they did first and the rank that gave them;
    ranks nearer to the starts come first."""
    readers: dict[RankNode, list[RankNode]] = {}
    for at, before in graph.items():
        for node in before:
            readers.setdefault(node, []).append(at)
    seen = {at.rank for at in starts}
    reached = dict.fromkeys(starts)
    waiting = list(reached)
    came: dict[int, tuple[float, int, RankNode]] = {}
    while waiting:
        at = waiting.pop()
        for reader in readers.get(at, ()):
            if reader.rank not in seen | {at.rank}:
                arrival = (judged.place(reader), at.rank, reader)
                came[reader.rank] = min(came.get(reader.rank, arrival), arrival)
            if reader not in reached:
                reached[reader] = None
                waiting.append(reader)
    while came:
        nearest = [rank for rank, (_, contributor, _) in came.items() if contributor in seen] or list(came)
        for rank in sorted(nearest, key=lambda rank: (came[rank][0], rank)):
            _, contributor, at = came.pop(rank)
            yield at, contributor
        seen |= {*nearest}


def _lone_behind(judged: JudgedRanks, candidate: Candidate, graph: Graph) -> Iterator[RankNode]:
    """Yield what one run alone did on the rank of a candidate from there on."""
    records, begin = judged.differences[candidate.at.rank].runs.records, judged.place(candidate.at)
    for at in graph:
        if at.rank == candidate.at.rank and None in records.get(at.node, ()) and judged.place(at) >= begin:
            yield at


def _hop(judged: JudgedRanks, at: RankNode, contributor: int | None, call: CollectiveCall | None) -> RankHop:
    """Return the hop by a collective, named ``all_reduce``, without those that it came to."""
    record = next(record for record in judged.differences[at.rank].runs.records[at.node] if record is not None)
    name = name_of(record).strip("_")
    for word in ("reduce", "gather", "to_all"):
        name = name.replace(f"all{word.replace('_', '')}", f"all_{word}")
    return RankHop(contributor, (), name, call)


def _call(hop: RankHop) -> str:
    """Name a collective as ``all_reduce #7 of group 0-1``."""
    return f"{hop.collective} {hop.call.word()}" if hop.call is not None else hop.collective
