"""Choose among all differences that reached the results of any rank: the first of each rank, and of these the first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from hashbench.core.catalog import Origin
from hashbench.core.divergence.choose import odd_views, roots, settings_source, steering, written_after_the_last_record
from hashbench.core.divergence.collective_calls import CollectiveCall
from hashbench.core.divergence.describe import divergence_at, entered_at
from hashbench.core.divergence.introduce import Differences, opaque_source
from hashbench.core.divergence.slice import Slice
from hashbench.core.records import Result, op_of
from hashbench.extensions.ranks.messages import BY_MESSAGE, Messages, as_sent, in_doubt, messages_before
from hashbench.extensions.ranks.order import RankOrder
from hashbench.extensions.ranks.path import (
    AT_A_COLLECTIVE,
    call_of,
    hops_by_python,
    hops_to_other_ranks,
    in_one_word,
    path_text,
)
from hashbench.extensions.ranks.verdict import RankDivergence, RankResult
from hashbench.extensions.ranks.walk import BY_PYTHON, Candidate, JudgedRanks, RankNode

_BEFORE_ANY_OP = frozenset({Origin.INPUT, Origin.STATE})
_NEVER_BY_SETTINGS = AT_A_COLLECTIVE | _BEFORE_ANY_OP
_RESULT = "result:"


@dataclass(frozen=True, slots=True)
class DifferingResult:
    """A result that differs, with its value in both runs; ``None`` where it does not exist."""

    result: RankResult
    first: Result | None
    second: Result | None


@dataclass(frozen=True, slots=True)
class ChosenDivergences:
    """The divergences that were chosen.

    Attributes:
        first: those that no other one may have caused.
        later: others with a cause of their own.
        benign: number of records that differ and reach no result, by rank.
    """

    first: tuple[RankDivergence, ...] = ()
    later: tuple[RankDivergence, ...] = ()
    benign: Mapping[int, int] = field(default_factory=dict)


def choose_candidates(judged: JudgedRanks, differing: Mapping[int, Sequence[DifferingResult]]) -> ChosenDivergences:
    """Choose the divergences that explain the results that differ, by rank; without any results, all records.

    A difference is dropped where it may follow from others by way of Python, which no trace sees: another op, argument
    or data. That is taken to be so where the way leads to a kernel or a generator; where it leads to another rank, of
    those that have a difference of their own; and where several ranks make the same anew of tensors of one rank.

    It is a guess. Example: rank 1 receives a loss that differs, and its clock makes it skip a batch. The skipped batch
    is explained by the loss, and is not reported. Behind the first divergences less is dropped: there a difference is
    reported unless data that differ had come from other ranks before it.
    """
    graph: dict[RankNode, tuple[RankNode, ...]] = {}
    walked = judged.walk(_roots(judged, differing))
    graph.update(walked.reached)
    found = [*judged.candidates(walked), *_behind_the_records(judged, differing, graph)]
    chosen = _earliest(judged, found)
    by_python = _explained_by_python(judged, chosen, graph)
    if by_python.ranks:
        chosen = _earliest(judged, [*found, *by_python.causes])
    explained = by_python.still_explained(chosen)
    open_candidates = {rank: candidate for rank, candidate in chosen.items() if rank not in explained}
    firsts = _firsts(open_candidates, judged)
    later = [rank for rank in sorted(open_candidates) if rank not in firsts and not _may_follow(judged, chosen[rank])]
    _add_unseen_reads(found, chosen, graph)

    def described(rank: int) -> RankDivergence:
        candidate, messages = chosen[rank], by_python.doubts.get(rank)
        if messages is not None and candidate not in by_python.causes:
            candidate = in_doubt(candidate, messages)
        return _described(judged, candidate, graph)

    return ChosenDivergences(tuple(map(described, firsts)), tuple(map(described, later)), dict(_benign(judged, graph)))


def _add_unseen_reads(
    found: Iterable[Candidate], chosen: Mapping[int, Candidate], graph: dict[RankNode, tuple[RankNode, ...]]
) -> None:
    """Let later candidates of one source lead to the first: unseen code may read whatever it left before."""
    for later in found:
        first = chosen.get(later.at.rank)
        if first is not None and later.at != first.at and later.source.node == first.source.node:
            graph[later.at] = (*graph.get(later.at, ()), first.at)


@dataclass(frozen=True, slots=True)
class _ExplainedByPython:
    """Differences that may follow from others by way of Python.

    Attributes:
        ranks: those whose difference may.
        causes: the differences that explain them.
        doubts: the messages from which that of other ranks may follow as well.
    """

    ranks: Set[int]
    causes: Sequence[Candidate]
    doubts: Mapping[int, Messages]

    def still_explained(self, chosen: Mapping[int, Candidate]) -> Set[int]:
        """Return the ranks to drop, now that causes are candidates too; none where nothing would be left."""
        explained = {
            rank for rank in self.ranks if chosen[rank].source.origin in BY_MESSAGE and chosen[rank] not in self.causes
        }
        return set() if explained >= {*chosen} else explained


def _explained_by_python(
    judged: JudgedRanks, chosen: Mapping[int, Candidate], graph: dict[RankNode, tuple[RankNode, ...]]
) -> _ExplainedByPython:
    """Find the differences that may follow from others by way of Python; add the way to ``graph``."""
    alike = Counter(map(_made_alike, chosen.values()))
    explained: set[int] = set()
    contributors: dict[int, set[int]] = {}
    causes: list[Candidate] = []
    doubts: dict[int, Messages] = {}
    for rank, candidate in chosen.items():
        if candidate.source.origin not in BY_MESSAGE:
            continue
        behind = judged.walk_by_python(candidate.at)
        messages = messages_before(judged, candidate, behind)
        own_causes: list[Candidate] = []
        if candidate.source.origin in BY_PYTHON:
            entered = list(judged.candidates(behind))
            own_causes = [entry for entry in entered if entry.source.origin not in BY_PYTHON]
            if not own_causes and alike[_made_alike(candidate)] > 1:
                own_causes = _of_one_rank(judged, behind, candidate)
            contributors[rank] = {entry.at.rank for entry in entered} & {*chosen} - {rank}
        else:  # a seed
            contributors[rank] = {sent.at.rank for sent in messages.sent if messages.explain} & {*chosen}
        if not own_causes and not contributors[rank] and messages.explain:
            own_causes = [as_sent(judged, sent, candidate) for sent in messages.sent]
        elif not own_causes and messages.own:
            doubts[rank] = messages
        if own_causes:
            explained.add(rank)
        if own_causes or contributors[rank]:
            _add_way(judged, candidate, behind, graph)
            causes += own_causes
    of_their_own = {*chosen} - {rank for rank, ranks in contributors.items() if ranks}
    return _ExplainedByPython(
        explained | _explained_by_contributors(contributors, of_their_own | explained), causes, doubts
    )


def _add_way(
    judged: JudgedRanks,
    candidate: Candidate,
    behind: Slice[RankNode],
    graph: dict[RankNode, tuple[RankNode, ...]],
) -> None:
    """Add what leads to a candidate by way of Python to a graph, messages by their receivers."""
    graph |= {at: before for at, before in behind.reached.items() if at not in graph}
    by_python = [
        at
        for at, before in behind.reached.items()
        if at.is_contribution and any(node.rank != at.rank for node in before)
    ]
    for maker in (candidate.at, *by_python):
        for node, received in judged.python_links(maker):
            if received is not None and node in graph.get(maker, ()):
                graph[maker] = tuple(before for before in graph[maker] if before != node)
            for at, before in ((maker, received or node), (received, node)):
                if at is not None:
                    graph[at] = (*graph.get(at, ()), before)


def _explained_by_contributors(contributors: Mapping[int, set[int]], explained: Iterable[int]) -> set[int]:
    """Return the ranks whose differences came from ranks that are known, directly or through others."""
    reached = {*explained}
    while more := {rank for rank, others in contributors.items() if others & reached} - reached:
        reached |= more
    return reached - {*explained}


def _made_alike(candidate: Candidate) -> tuple[str, ...]:
    """Return what Python made in both runs: ranks that make the same anew have it from one place."""
    source = candidate.source
    return source.origin, op_of(source.node), source.first, source.second


def _of_one_rank(judged: JudgedRanks, behind: Slice[RankNode], made: Candidate) -> list[Candidate]:
    """Return the differences behind what Python made alike on several ranks, of which none follows from another by way
    of Python, if they are tensors of one rank alone."""
    causes = [
        candidate
        for candidate in judged.candidates(behind)
        if candidate.at != made.at and not any(judged.python_links(candidate.at))
    ]
    alone = len({candidate.at.rank for candidate in causes}) == 1 and not any(
        candidate.at.is_contribution for candidate in causes
    )
    return causes if alone else []


def _may_follow(judged: JudgedRanks, candidate: Candidate) -> bool:
    """Return True if Python may have made a difference of what it read of other ranks, which differed before."""
    if candidate.source.origin not in BY_PYTHON:
        return False
    rank, until = candidate.at.rank, _place(judged, candidate)
    nodes = (RankNode(rank, node) for node in judged.differences[rank].differs)
    return any(judged.exchange_at(at) is not None and judged.place(at) < until for at in nodes)


def unpreceded(reached: Mapping[int, Mapping[int, float]], places: Mapping[int, float]) -> list[int]:
    """Return the ranks whose place the data of no other rank had reached; ``reached`` says where those of each did."""
    pairs = [(at, rank) for other, at in reached.items() for rank in places if rank != other and rank in at]
    behind = {rank for at, rank in pairs if at[rank] < places[rank]}
    return sorted({*places} - behind) or sorted(places)


def order_of(judged: JudgedRanks) -> RankOrder:
    """Return the order of the ranks of the first run. Places are positions of records."""
    places: dict[int, dict[CollectiveCall, float]] = {}
    for rank, trace in judged.first.items():
        by_record = judged.calls[0][rank].by_record
        if rank in judged.differences:
            places[rank] = {call: judged.place(RankNode(rank, node)) for node, call in by_record.items()}
        else:
            at = {record.id: index for index, record in enumerate(trace.records) if record.id in by_record}
            places[rank] = {call: at[node] for node, call in by_record.items()}
    return RankOrder(judged.calls[0], places)


# ------------------------------------------------------------------------------------------------- candidates


def _roots(judged: JudgedRanks, differing: Mapping[int, Sequence[DifferingResult]]) -> list[RankNode]:
    """Return the nodes that wrote what differs."""
    by_results = any(trace.results or trace.steps for run in (judged.first, judged.second) for trace in run.values())
    starts: list[RankNode] = []
    for rank, differences in judged.differences.items():
        pairs = [(result.first, result.second) for result in differing.get(rank, ())]
        nodes = list(roots(differences, pairs) if by_results else sorted(differences.differs))
        if pairs and not _differ(differences, nodes):
            nodes += odd_views(differences, *pairs[0])
        starts += (RankNode(rank, judged.outermost(rank, node)) for node in nodes)
    return starts


def _differ(differences: Differences, nodes: Iterable[str]) -> bool:
    return any(node in differences.differs or node in differences.tainted for node in nodes)


def _behind_the_records(
    judged: JudgedRanks, differing: Mapping[int, Sequence[DifferingResult]], graph: Mapping[RankNode, object]
) -> Iterator[Candidate]:
    """Yield the differences of ranks whose results differ although no record does that leads to one."""
    reached = {at.rank for at in graph}
    for rank, several in differing.items():
        differences = judged.differences[rank]
        if not several or rank in reached:
            continue
        name = several[0].result.name
        if differences.runs.opaque:
            source = opaque_source(differences.runs, differences.runs.opaque)
        else:
            source = written_after_the_last_record(differences, name, several[0].first, several[0].second)
        yield Candidate(RankNode(rank, _RESULT + name), source)


def _earliest(judged: JudgedRanks, found: Iterable[Candidate]) -> dict[int, Candidate]:
    """Return the earliest candidate of each rank. A collective of several ranks is reported by the lowest."""
    seen: dict[CollectiveCall, int] = {}
    chosen: dict[int, Candidate] = {}
    for candidate in sorted(found, key=lambda candidate: (candidate.at.rank, _place(judged, candidate))):
        rank = candidate.at.rank
        call = call_of(judged, candidate)
        if call is not None and seen.setdefault(call, rank) != rank:
            continue
        chosen.setdefault(rank, candidate)
    return {rank: _by_settings(judged, candidate) for rank, candidate in chosen.items()}


def _by_settings(judged: JudgedRanks, candidate: Candidate) -> Candidate:
    """Return a setting that changed before the candidate in its place."""
    settings = settings_source(judged.differences[candidate.at.rank].runs)
    source = candidate.source
    if settings is None or source.origin in _NEVER_BY_SETTINGS or source.position < settings.position:
        return candidate
    return replace(candidate, source=replace(settings, first_visible_at=source.node))


def _place(judged: JudgedRanks, candidate: Candidate) -> float:
    source, at = candidate.source, candidate.at
    if source.origin in _BEFORE_ANY_OP:
        return -1
    if at.node.startswith(_RESULT):
        return float("inf")
    opaque = judged.differences[at.rank].runs.opaque
    felt = source.first_visible_at or (at.node if opaque and source.node == opaque else source.node)
    return judged.place(RankNode(at.rank, felt))  # of code that no trace sees, where what it left differed first


def _firsts(chosen: Mapping[int, Candidate], judged: JudgedRanks) -> list[int]:
    """Return the ranks whose candidate comes behind no other one."""
    if len(chosen) < 2:
        return list(chosen)
    order = order_of(judged)
    places = {rank: _place(judged, candidate) for rank, candidate in chosen.items()}
    reached = {}
    for rank, candidate in chosen.items():
        call = call_of(judged, candidate)
        starts = {other: at[call] for other, at in order.places.items() if call is not None and call in at}
        reached[rank] = order.reached_from({**starts, rank: places[rank]})
    return unpreceded(reached, places)


# ------------------------------------------------------------------------------------------------------ words


def _described(
    judged: JudgedRanks, candidate: Candidate, graph: Mapping[RankNode, Sequence[RankNode]]
) -> RankDivergence:
    rank, source = candidate.at.rank, candidate.source
    differences = judged.differences[rank]
    steered = steering(differences, source) if source.origin in BY_PYTHON else None
    found = divergence_at(differences.runs, source, steered)
    hops, begin = hops_to_other_ranks(judged, candidate, graph), entered_at(differences.runs, source)
    if not hops and steered is not None:
        hops, begin = hops_by_python(judged, candidate, graph), steered.kernel
    through = path_text(rank, in_one_word(begin), hops)
    return RankDivergence.of(found, rank, through=through, hops=hops, missing=candidate.missing)


def _benign(judged: JudgedRanks, graph: Mapping[RankNode, object]) -> Iterator[tuple[int, int]]:
    for rank, differences in judged.differences.items():
        inside = (judged.calls[0][rank].inside, judged.calls[1][rank].inside)
        idle = [
            node
            for node in differences.differs
            if node in differences.runs.records and differences.runs.wrote(node) and RankNode(rank, node) not in graph
        ]
        number = sum(node not in inside[0] and node[2:] not in inside[1] for node in idle)
        if number:
            yield rank, number
