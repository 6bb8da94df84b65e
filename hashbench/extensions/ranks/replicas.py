"""Check in one run that replicas agree: parameters of which several ranks must hold the same. Pure: no torch, no files.

Which parameters are replicas says :mod:`hashbench.extensions.ranks.replica_groups`. They are compared after every step.
Those that diverge first are explained: the traces of two of the ranks are aligned as two runs are, and the walk goes
back from the write through what differs on the two ranks. Ranks differ by design, in their batches, their seeds and
their parts of a tensor, and a collective makes them equal again. So the origin is

* ``unreduced``: the walk comes to data that differ by design, and no collective of these ranks lies on its way.
* ``sequence``: it ends in ops that one of the ranks has and the other has not.
* ``rng``: it ends in a generator in another state, or in the draw by which that of one rank is ahead.
* ``kernel``: it ends in a kernel whose inputs agree.
* ``collective``: it comes to a collective that should have left the same on both ranks.
* ``state``: the parameter differed before it was first read.
* ``outside``: the last recorded write agrees: something wrote the parameter outside the dispatcher.

From three ranks on, the ranks of the minority are named; of two, nobody can say which one is right.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from hashbench.core.catalog import Origin
from hashbench.core.divergence.align import SECOND, PairedRuns, pair
from hashbench.core.divergence.collective_calls import (
    equalizes,
    exchanges,
    group_word,
    inside_collectives,
    judged_inside,
)
from hashbench.core.divergence.introduce import Differences, Source, find_differences
from hashbench.core.divergence.slice import Slice, backward_slice
from hashbench.core.errors import HashbenchError
from hashbench.core.records import OpRecord, Ref, Result, TensorDigest, Trace, op_of
from hashbench.core.text import count, format_ranks, join_limited
from hashbench.core.trace.file import refuse_different
from hashbench.extensions.ranks.replica_groups import (
    CONVENTION,
    REDUCED,
    ParameterVersions,
    ReplacedParameters,
    Replica,
    differing_from_the_start,
    replicas_of,
    unexplained_drift,
    version_before,
)
from hashbench.extensions.ranks.whole_steps import results_by_step, up_to_common_step

UNREDUCED = "unreduced"
"""Origin of replicas whose gradient no collective reduces; no origin of two runs."""

MOST_EXPLAINED = 8
"""Number of parameters whose origin is looked for, of those that diverge in the first step."""


@dataclass(frozen=True, slots=True)
class ReplicaDifference:
    """A parameter that differs between ranks which must hold the same.

    Attributes:
        name: of the parameter.
        ranks: the ranks that must hold the same.
        minority: those whose content differs from that of most; empty if no content has a majority.
        step: the first step after which it differs; ``None`` at the end of a run that was not recorded by steps.
        written_by: id of the record, on ``compared[0]``, that wrote it so; empty if no record did.
        compared: the two ranks whose traces were compared.
        origin: see the module; empty if it was not looked for.
        rank: rank of the record where the ranks diverge; of the minority, where it has that record.
        node: id of that record; a leaf for ``state``.
        kernel: its op.
        module: its module.
        phase: its phase.
        iteration: its iteration.
        source: its source line.
        detail: a sentence.
        first, second: what the two ranks had there.
    """

    name: str
    ranks: tuple[int, ...]
    minority: tuple[int, ...]
    step: int | None
    written_by: str = ""
    compared: tuple[int, int] = (0, 0)
    origin: str = ""
    rank: int = 0
    node: str = ""
    kernel: str = ""
    module: str = ""
    phase: str = ""
    iteration: int | None = None
    source: str = ""
    detail: str = ""
    first: str = ""
    second: str = ""


@dataclass(frozen=True, slots=True)
class LocalSteps:
    """A replica that each rank trains by itself for some steps, and that is made equal again.

    Attributes:
        name: of the parameter.
        again: the steps before which it was made equal; ``None``: at the end.
    """

    name: str
    again: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class ReplicasVerdict:
    """The check of the replicas of one run.

    Attributes:
        world_size: number of ranks.
        differing: parameters that differ, those that diverge first in front.
        checked: number of parameters that were compared, by group of ranks.
        inferred: names of those that are taken for replicas as their gradient was reduced.
        steps: first and last step that was checked; ``None`` if the run was not recorded by steps.
        missing: ranks without a trace.
        unknown: sentences on what could not be checked.
        uncompared: names of parameters that diverged and of which nothing says that they are replicas
            (:func:`~hashbench.extensions.ranks.replica_groups.unexplained_drift`).
        by_convention: names of those that are taken for replicas as they are plain parameters beside DTensors.
        local: replicas that are apart between the steps that make them equal again, as in local SGD; no finding.
    """

    world_size: int
    differing: tuple[ReplicaDifference, ...] = ()
    checked: Mapping[tuple[int, ...], int] = field(default_factory=dict)
    inferred: tuple[str, ...] = ()
    steps: tuple[int, int] | None = None
    missing: tuple[int, ...] = ()
    unknown: tuple[str, ...] = ()
    uncompared: tuple[str, ...] = ()
    local: tuple[LocalSteps, ...] = ()
    by_convention: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        """True if parameters are known to be replicas, all that are or may be agree, and no rank is missing."""
        return bool(self.checked) and not (self.differing or self.missing or self.unknown or self.uncompared)


def check_replicas(traces: Mapping[int, Trace]) -> ReplicasVerdict:
    """Compare the replicas of one run over its ranks, after every step.

    Args:
        traces: traces by global rank.

    Raises:
        HashbenchError: there are fewer than two traces, of one tracer, or no step is whole on all ranks.
    """
    if len(traces) < 2:
        raise HashbenchError(
            f"{count(len(traces), 'rank')} left a trace",
            consequence="there are no replicas to compare",
            tip="Give the traces of two ranks of one run at least.",
        )
    tracers = [trace.tracer for trace in traces.values()]
    for tracer in tracers:
        refuse_different(tracers[0], tracer)
    whole = up_to_common_step(traces)
    run = whole.runs[0]
    size = max(
        [*(rank + 1 for rank in run), *(trace.rank.world_size for trace in run.values() if trace.rank is not None)]
    )
    missing = tuple(rank for rank in range(size) if rank not in run)
    replicas = replicas_of(run)
    apart = sorted(_diverged_replicas(run, replicas), key=lambda replica: (replica.step is None, replica.step or 0))
    first = {replica.step for replica in apart[:1]}
    explained = [replica for replica in apart if replica.step in first][:MOST_EXPLAINED]
    why = {replica.name: _explain(run, replica) for replica in explained}
    unreduced = all(found.origin == UNREDUCED for found in why.values())
    local = [replica for replica in apart if replica.again and unreduced]
    longer = [replica.since for replica in local if replica.since is not None]
    reported = [why.get(replica.name) or _plain(replica) for replica in apart if replica not in local]
    reported += [_explain(run, replica) for replica in longer[:MOST_EXPLAINED]] + [
        _plain(replica) for replica in longer[MOST_EXPLAINED:]
    ]
    unknown = list(whole.ended)
    if own := differing_from_the_start(run):
        unknown.append(
            f"{join_limited(sorted(own), 4)}: beside DTensors, and different on each rank from the start: replicas by "
            "convention, unless they are parameters of that rank alone."
        )
    if not replicas:
        unknown.append("No parameter is known to be a replica: nothing was compared.")
    return ReplicasVerdict(
        size,
        tuple(reported),
        dict(Counter(ranks for ranks, _ in replicas)),
        tuple(dict.fromkeys(name for (_, name), why in replicas.items() if why == REDUCED)),
        whole.steps,
        missing,
        tuple(unknown),
        unexplained_drift(run, replicas),
        tuple(LocalSteps(replica.name, replica.again) for replica in local if replica.since is None),
        tuple(dict.fromkeys(name for (_, name), why in replicas.items() if why == CONVENTION)),
    )


# ----------------------------------------------------------------------------------------------- what differs


@dataclass(frozen=True, slots=True)
class _DivergedReplica:
    """A replica that differs: by rank its result after the first step where it does.

    Attributes:
        again: the steps before which it had been made equal on all ranks again.
        since: the same, where it is apart for longer than it ever was before it was made equal.
    """

    name: str
    ranks: tuple[int, ...]
    step: int | None
    results: Mapping[int, Result]
    again: tuple[int | None, ...] = ()
    since: _DivergedReplica | None = None

    @property
    def minority(self) -> tuple[int, ...]:
        """The ranks whose content differs from that of most."""
        counts = Counter(result.digest for result in self.results.values()).most_common(2)
        if len(self.results) < 3 or counts[0][1] == counts[1][1]:
            return ()
        return tuple(rank for rank, result in self.results.items() if result.digest != counts[0][0])

    @property
    def compared(self) -> tuple[int, int]:
        """A rank of the majority, and one that differs from it."""
        base = next(rank for rank in self.results if rank not in self.minority)
        return base, next(rank for rank, result in self.results.items() if result.digest != self.results[base].digest)

    def like(self, rank: int) -> list[int]:
        """Return the ranks with the content of this one, itself included."""
        return [holder for holder, result in self.results.items() if result.digest == self.results[rank].digest]


def _diverged_replicas(run: Mapping[int, Trace], replicas: Iterable[Replica]) -> Iterator[_DivergedReplica]:
    """Yield the replicas that differ, after the first step where they do, and where no rank replaces them unread."""
    replaced = {rank: ReplacedParameters(trace) for rank, trace in run.items()}
    by_rank = {
        rank: {step: {result.name: result for result in results} for step, results in results_by_step(trace).items()}
        for rank, trace in run.items()
    }
    versions = {rank: ParameterVersions(trace) for rank, trace in run.items()}
    for ranks, name in replicas:
        periods: list[list[_DivergedReplica]] = [[]]
        again: list[int | None] = []
        before: int | None = None
        for step in by_rank[ranks[0]]:
            results = {rank: by_rank[rank].get(step, {}).get(name) for rank in ranks}
            present = {rank: result for rank, result in results.items() if result is not None}
            differs = len({result.digest for result in present.values()}) > 1
            contents = [versions[rank].before(name, step, since=before) for rank in present] if periods[-1] else []
            if contents and (not differs or frozenset.intersection(*contents)):
                again.append(step)
                periods.append([])
            if differs and not any(replaced[rank].replaced(name, step) for rank in present):
                periods[-1].append(_DivergedReplica(name, ranks, step, present))
            before = step
        yield from _once(periods, again)


def _once(periods: Sequence[Sequence[_DivergedReplica]], again: Sequence[int | None]) -> Iterator[_DivergedReplica]:
    """Yield a replica where it was apart first; ``periods`` are the steps behind which it was, up to ``again``."""
    first = next((replica for period in periods for replica in period), None)
    if first is None:
        return
    *made_equal, last = ([replica for replica in period if replica.step is not None] for period in periods)
    longest = max(map(len, made_equal), default=0)
    yield replace(first, again=tuple(again), since=last[longest] if again and len(last) > longest else None)


# --------------------------------------------------------------------------------------------- why they do not


def _plain(apart: _DivergedReplica) -> ReplicaDifference:
    return ReplicaDifference(apart.name, apart.ranks, apart.minority, apart.step, compared=apart.compared)


def _explain(run: Mapping[int, Trace], apart: _DivergedReplica) -> ReplicaDifference:
    """Return the difference with its origin."""
    base, other = apart.compared
    ranks = _ReplicaPair.of(run, apart)
    at = ranks.written(apart.results[base], apart.results[other])
    why = ranks.origin(at, apart)
    old, new = ranks.runs.records.get(why.node, (None, None))
    on_other = new is not None and (old is None or (bool(apart.minority) if why.rank is None else why.rank == other))
    record = new if on_other else old
    found = replace(
        _plain(apart),
        written_by=at.removeprefix(SECOND) if at in ranks.runs.records else "",
        origin=why.origin,
        rank=other if on_other or (record is None and apart.minority) else base,
        node=why.node,
        detail=why.detail,
        first=why.shown[0],
        second=why.shown[1],
    )
    if record is None:
        return found
    return replace(
        found,
        node=record.id,
        kernel=record.op,
        module=record.module,
        phase=record.phase,
        iteration=record.iteration,
        source=record.source,
    )


class _Why(NamedTuple):
    """How two ranks came to diverge.

    Attributes:
        origin: see the module; empty if it is not known.
        node: where they diverge.
        detail: a sentence.
        shown: what both had there.
        rank: the rank whose record is meant; ``None``: that of the minority, where it has one.
    """

    origin: str
    node: str
    detail: str
    shown: tuple[str, str]
    rank: int | None = None


@dataclass(frozen=True)
class _ReplicaPair:
    """Two ranks of a run, aligned as two runs are.

    Attributes:
        differences: what differs between them.
        ranks: their global ranks.
        alike: for each of them, the traces of those that hold the parameter as it does, by rank.
    """

    differences: Differences
    ranks: tuple[int, int]
    alike: Mapping[int, Mapping[int, Trace]]

    @classmethod
    def of(cls, run: Mapping[int, Trace], apart: _DivergedReplica) -> _ReplicaPair:
        """Align two ranks on which a parameter differs."""
        base, other = apart.compared
        differences = find_differences(pair(run[base], run[other]), ranks_known=True)
        alike = {rank: {member: run[member] for member in apart.like(rank)} for rank in (base, other)}
        return cls(differences, (base, other), alike)

    @property
    def runs(self) -> PairedRuns:
        """The aligned ranks."""
        return self.differences.runs

    @functools.cached_property
    def _inside(self) -> Mapping[str, str]:
        """The records that collectives call; those differ by design."""
        first = inside_collectives(self.runs.first, self._judged_inside)
        second = inside_collectives(self.runs.second, judged_inside(self.runs.second))
        node_of = self.runs.node_of
        return {**first, **{node_of[inner]: node_of[outer] for inner, outer in second.items()}}

    @functools.cached_property
    def _judged_inside(self) -> frozenset[str]:
        return judged_inside(self.runs.first)

    def written(self, first: Result, second: Result) -> str:
        """Return the node that wrote a parameter so: going back from the result, the first write of its memory that
        left different content on the two ranks."""
        node, digest = first.source, first.digest
        if not self._differs(node):
            other = self.runs.node_of.get(second.source, "")
            return other if other in self.runs.records and self._differs(other) else node
        seen: set[str] = set()
        while node not in seen:
            seen.add(node)
            before = [
                version for version in self._versions_before(node, digest) if self._left_other_content(version, digest)
            ]
            if not before:
                break
            node = next(filter(self._is_lone, before), before[0])
        return node

    def _versions_before(self, node: str, digest: TensorDigest) -> Iterator[str]:
        """Yield the nodes whose memory a write of a tensor of this shape went to: two, where one of the ranks has
        written it in between."""
        pair = self.runs.records.get(node, (None, None))
        found = [version_before(record, digest) if record is not None else "" for record in pair]
        first, second = found[0], self.runs.node_of.get(found[1], found[1])
        yield from dict.fromkeys(filter(None, (first, second)))

    def _left_other_content(self, node: str, digest: TensorDigest) -> bool:
        """Return True if a node left another tensor of this shape on the two ranks."""
        a, b = self.runs.records.get(node, (None, None))
        if a is None or b is None:
            return self._differs(node)
        old, new = ([output for output in record.outputs if output.shape == digest.shape] for record in (a, b))
        return old != new

    def origin(self, at: str, apart: _DivergedReplica) -> _Why:
        """Return the origin, the node where the ranks diverge, a sentence, and what both had there."""
        if at in self.runs.leaves:
            source = self.differences.sources.get(at)
            shown = (source.first, source.second) if source is not None else ("", "")
            return _Why(Origin.STATE, at, "the parameter differs between the ranks when it is first read", shown)
        if not self._differs(at):
            old, new = (apart.results[rank].digest.word() for rank in self.ranks)
            return _Why(
                Origin.OUTSIDE, at, "it was modified outside the dispatcher after its last recorded write", (old, new)
            )
        differs = self.differences.differs  # of memory that is tainted, the part that is read may agree
        surely, perhaps = (
            self._walked_origin(at, apart, nodes) for nodes in (differs, differs | self.differences.tainted)
        )
        return surely or perhaps or _Why("", at, "where the ranks diverge is not known", self._shown(at))

    def _walked_origin(self, at: str, apart: _DivergedReplica, suspects: AbstractSet[str]) -> _Why | None:
        """Return the origin to which these nodes lead back, or ``None``."""
        walked, group = self._walk(at, suspects), _group_of(apart)
        guilty = [node for node in walked.reached if self._should_be_equal(node)]
        if guilty:
            first = min(guilty, key=self.runs.order.__getitem__)
            return _Why(Origin.COLLECTIVE, first, f"it should have left the same on ranks {group}", self._shown(first))
        own = self.differences.sources.get(at)
        if own is not None and own.origin == Origin.OUTSIDE:
            return _Why(own.origin, at, own.detail, (own.first, own.second))
        moved = self._moved(at, apart.step)
        if moved is not None:
            return moved
        if any(self._is_by_design(node) for node in walked.reached if node != at):
            detail = f"this gradient was never reduced over ranks {group}"
            return _Why(UNREDUCED, at, detail, self._shown(at))
        lone = [node for node in walked.reached if self._is_lone(node)]
        if lone:
            first = self._first_of_lone(lone)
            has, lacks = self.ranks if self.runs.records[first][0] is not None else reversed(self.ranks)
            detail = (
                f"{_do(self._calling_as(has, first), 'run')} this op, {_do(self._calling_as(lacks, first), 'do')} not"
            )
            return _Why(Origin.SEQUENCE, first, detail, self._shown(first))
        sources = [self.differences.sources[node] for node in walked.reached if node in self.differences.sources]
        source = min(sources, key=self._position, default=None)
        if source is None:
            return None
        return _Why(source.origin, source.node, self._detail(source), (source.first, source.second))

    def _calling_as(self, rank: int, node: str) -> list[int]:
        """Return a rank, and those that hold the parameter as it does and call the op of a node as often."""
        op = op_of(node)
        times = {member: sum(record.op == op for record in trace.records) for member, trace in self.alike[rank].items()}
        return [member for member, number in times.items() if number == times[rank]]

    def _moved(self, at: str, step: int | None) -> _Why | None:
        """Return the draw by which the generator of one rank is ahead, if what led to a write in this step drew from
        that generator in another state on each rank, as behind an evaluation of one rank."""
        first, second = self.runs.records[at]
        if first is None or second is None:
            return None
        runs = self.runs.first, self.runs.second
        draws = draws_behind(runs[0], first.id, step), draws_behind(runs[1], second.id, step)
        if [record.op for record in draws[0]] != [record.op for record in draws[1]]:
            return None
        for drawn in zip(*draws, strict=True):
            for ahead, run in enumerate(runs):
                extra = None
                if drawn[0].rng != drawn[1].rng:
                    extra = earlier_draw(run, drawn[1 - ahead].rng, before=drawn[ahead].id)
                if extra is not None and extra not in draws[ahead]:
                    node = self.runs.node_of[extra.id] if ahead else extra.id
                    shown = f"generator state {drawn[0].rng}", f"generator state {drawn[1].rng}"
                    return _Why(Origin.RNG, node, self._moved_words(ahead, drawn[0].op), shown, self.ranks[ahead])
        return None

    def _moved_words(self, ahead: int, op: str) -> str:
        rank, other = self.ranks[ahead], self.ranks[1 - ahead]
        apart = f"after it {op} draws different numbers on each"
        return f"rank {rank} drew from its generator here, rank {other} did not; {apart}"

    def _first_of_lone(self, lone: Iterable[str]) -> str:
        """Return the first op of one rank alone that leads to these by such ops alone."""

        def before(node: str) -> Iterator[str]:
            return (before for before in self.runs.read_by(node) if self._is_lone(before))

        return min(backward_slice(lone, before, lambda _: True).reached, key=self.runs.order.__getitem__)

    def _detail(self, source: Source) -> str:
        base, other = self.ranks
        if source.origin == Origin.RNG:
            return f"RNG state differs between ranks {base} and {other}"
        if source.origin == Origin.SEQUENCE:
            return f"rank {other} reads a different tensor here than rank {base}"
        if source.origin == Origin.KERNEL:
            return f"the output differs between ranks {base} and {other} although every input is equal"
        return source.detail

    def _position(self, source: Source) -> tuple[int, int]:
        return source.position, self.runs.order.get(source.node, 0)

    # ---------------------------------------------------------------------------------------------- the walk

    def _walk(self, at: str, suspects: AbstractSet[str]) -> Slice[str]:
        """Return those of the nodes that lead to a write; nothing behind a collective, an op of one rank alone, or the
        version of the parameter before."""

        def before(node: str) -> Iterator[str]:
            node = self._inside.get(node, node)
            if node != at and self._ends(node):
                return
            for before in self.differences.came_from(node):
                yield self._inside.get(before, before)

        return backward_slice([at] if at in suspects else [], before, lambda node: node in suspects or None)

    def _ends(self, node: str) -> bool:
        return self._is_lone(node) or self._should_be_equal(node) or self._is_by_design(node)

    def _differs(self, node: str) -> bool:
        return node in self.differences.differs or node in self.differences.tainted

    def _exchange(self, node: str) -> tuple[OpRecord, OpRecord] | None:
        a, b = self.runs.records.get(node, (None, None))
        if a is None or b is None or a.id in self._judged_inside or not (exchanges(a) and exchanges(b)):
            return None
        return a, b

    def _should_be_equal(self, node: str) -> bool:
        """Return True for a collective that leaves the same on both ranks, and left different content."""
        both = self._exchange(node)
        if both is None or both[0].collective is None or both[1].collective is None:
            return False
        first, second = both[0].collective, both[1].collective
        alike = first.process_group == second.process_group and {*self.ranks} <= {*first.process_group}
        return alike and first.ordinal == second.ordinal and equalizes(first) and both[0].outputs != both[1].outputs

    def _is_by_design(self, node: str) -> bool:
        """Return True for what differs between ranks by design: leaves, data that were drawn, parts of a tensor, and
        what a collective gave each rank of its own."""
        if node in self.runs.leaves:
            return True
        both = self._exchange(node)
        if both is not None:
            alone = all(record.collective is not None and record.collective.kind != "combine" for record in both)
            return alone and not self._should_be_equal(node)
        if self._is_lone(node):
            return False
        source = self.differences.sources.get(node)
        other_parts = source is not None and source.origin == Origin.SEQUENCE and self._reads_other_parts(node)
        drawn = source is not None and source.origin == Origin.RNG and not any(self.runs.read_by(node))
        return other_parts or drawn or not self.runs.wrote(node)

    def _reads_other_parts(self, node: str) -> bool:
        """Return True if an op of both ranks read other parts of the same tensors."""
        a, b = self.runs.records[node]
        if a is None or b is None or len(a.inputs) != len(b.inputs):
            return False
        return all(self._is_same_tensor(*refs) for refs in zip(a.inputs, b.inputs, strict=True))

    def _is_same_tensor(self, a: Ref, b: Ref) -> bool:
        return a.source == self.runs.node_of[b.source]

    def _is_lone(self, node: str) -> bool:
        return node in self.runs.records and None in self.runs.records[node] and node not in self._inside

    def _shown(self, node: str) -> tuple[str, str]:
        first, second = (
            "absent" if record is None else " ".join(digest.word() for digest in record.outputs) or record.op
            for record in self.runs.records[node]
        )
        return first, second


def _do(ranks: Sequence[int], verb: str) -> str:
    """Format as ``rank 0 runs`` or ``ranks 1, 2 run``."""
    return f"{format_ranks(ranks)} {verb}{('es' if verb == 'do' else 's') if len(ranks) == 1 else ''}"


def draws_behind(run: Trace, node: str, step: int | None) -> list[OpRecord]:
    """Return the draws of a step that led to a record through no collective, in order."""
    begin = max((mark.position for mark in run.steps if step is not None and mark.number < step), default=0)
    records = {record.id: record for record in run.records[begin:]}

    def before(at: str) -> Iterator[str]:
        if at == node or not exchanges(records[at]):
            yield from (ref.source for ref in records[at].inputs if ref.source in records)

    reached = backward_slice([node] if node in records else [], before, lambda _: True).reached
    return [record for record in records.values() if record.id in reached and record.rng]


def earlier_draw(run: Trace, state: str, *, before: str) -> OpRecord | None:
    """Return the record of a draw that found its generator in this state, before another record."""
    for record in run.records:
        if record.id == before:
            return None
        if record.rng == state:
            return record
    return None


def _group_of(apart: _DivergedReplica) -> str:
    return group_word(apart.ranks).removeprefix("group ")
