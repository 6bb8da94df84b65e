"""Find the first divergence of two traces: where the difference entered that reached the results. Pure: no torch, no
files.

The two runs are aligned (``align``). Each pair of records is judged: it *introduced* a difference (with an origin),
only propagated one, or agrees (``introduce``). A backward slice from the differing results collects the nodes that
differ; the first introduction in it is the divergence. Records that differ outside the slice are benign.

Details beyond the table in ``docs/design.md``, "The verdict on a pair":

* Blank memory: an op that reads an unwritten allocation is not blamed; the allocation is
  (``aten.empty.memory_format``), also where later writes filled only a part. Ops that overwrite without reading
  (``copy_``, ``uniform_``) stop the slice.
* Views write nothing: a view that the runs took differently is blamed at its first read, or when it is itself a
  result.
* Strides: content is hashed in memory order, so equal digests with other strides are different tensors; the detail
  shows both.
* Scalars: a value from ``.item()`` among a later op's arguments is an edge. Where another op follows, the last
  differing scalar is named in ``steered_by``.
* Inside an op that calls others (native tracer): a difference that enters there (a tensor, an argument, the order of
  calls, a generator) is blamed on the outer op if both runs called it alike; the detail names the inner call.
* Settings are read when a run starts, at each iteration, and when it ends; a difference counts from the earlier
  reading.
* A result that differs although its last recorded writer agrees was written by code that bypassed the dispatcher.
* Collectives: a kernel is named only where none of its inputs came through a collective, and where no collective came
  before it or inputs were hashed.
* Early reads of a collective's output are ``ranks``, at the reader, where the traces agree otherwise.
* Memory that is only filled (``out=``, a DDP bucket, a buffer of ``all_gather``) counts as an allocation.
* Traces without results are judged by their first differing record.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from hashbench.catalog import OPAQUE, Origin
from hashbench.divergence.align import SECOND, PairedRuns, pair
from hashbench.divergence.introduce import (
    Differences,
    Source,
    contents_in_words,
    find_differences,
    first_opaque,
    layouts_differ,
    opaque_source,
    unwritten_memory,
)
from hashbench.divergence.text import PairVerdict
from hashbench.errors import HashbenchError
from hashbench.records import Divergence, EarlyRead, OpRecord, Result, Steering, TensorDigest, Trace, op_of
from hashbench.trace.file import refuse_different

_RANK: Mapping[str, int] = {Origin.INPUT: 0, Origin.STATE: 1}
"""Origins that lie before the first op, wherever the tensor is first read."""


def find(first: Trace, second: Trace, *, differing: Sequence[str] | None = None) -> PairVerdict:
    """Return the verdict on a pair of runs; its text is what ``hashbench diff`` prints.

    Args:
        first, second: the traces of two runs that should be identical.
        differing: names of the results that differ, where the caller compared them itself. Default: those whose
            digests differ. Traces without results (of a plain ``HashDebugTrace``) are judged by every record.

    Equal traces still have a divergence where either of them read a collective's output early: the trace waited for the
    collective, and the program does not.

    Raises:
        HashbenchError: a trace is empty, so that nothing would be compared, or they are of different tracers.
    """
    refuse_different(first.tracer, second.tracer)
    _refuse_empty(first, "first")
    _refuse_empty(second, "second")
    runs = pair(first, second)
    known = find_differences(runs)
    old, new = ({result.name: result for result in run.results} for run in (first, second))
    if differing is None:
        names = dict.fromkeys([*old, *new])
        differing = [name for name in names if _content(old.get(name)) != _content(new.get(name))]
    pairs = [(old.get(name), new.get(name)) for name in differing]
    by_results = bool(old or new)
    reached = _causal_slice(known, _roots(known, pairs) if by_results else sorted(known.differs))
    chosen = _choose(known, reached) if pairs or not by_results else None
    opaque = first_opaque(runs)
    if chosen is None and pairs:
        viewed = set() if opaque else _causal_slice(known, _odd_views(known, *pairs[0]))
        reached |= viewed
        chosen = (
            opaque_source(runs, opaque)
            if opaque
            else _choose(known, viewed) or _written_after_the_last_record(known, differing[0], *pairs[0])
        )
    if chosen is not None and chosen.origin in (Origin.SEQUENCE, Origin.OUTSIDE, Origin.RANKS):
        reached |= _causal_slice(known, _scalars_that_chose(known, chosen))
    idle = known.differs - reached
    nodes: Iterable[str] = runs.records
    if opaque and chosen is not None:  # whether what lies behind reaches a result is not known
        nodes = itertools.takewhile(lambda node: node != opaque, nodes)
    benign = tuple(node for node in nodes if node in idle and _wrote(runs, node))
    divergence = None if chosen is None else _divergence(known, chosen)
    early = tuple(dict.fromkeys([*first.early_reads, *second.early_reads]))
    if divergence is None and early:
        divergence = _early_divergence(known, early[0])
    unseen = _unseen(runs, opaque)
    leaves = tuple(leaf for leaf in _differing_leaves(first, second) if leaf not in reached)
    return PairVerdict(
        *(tuple(differing), divergence, benign, unseen),
        leaves=leaves,
        early_reads=early,
        first=first,
        second=second,
    )


def _unseen(runs: PairedRuns, opaque: str) -> str:
    """Describe, in sentences, what the traces did not record."""
    if not opaque:
        return ""
    what = next(record.opaque for record in runs.records[opaque] if record is not None and record.opaque)
    times = max(sum(record.opaque == what for record in run.records) for run in (runs.first, runs.second))
    return (
        f"{what.capitalize()} ran {'once, as' if times == 1 else f'{times} times, first as'} "
        f"{opaque.removeprefix(SECOND)}: what it does is not recorded, and no kernel behind it is named. "
        f"{OPAQUE.get(what, '')}"
    ).rstrip()


def _differing_leaves(first: Trace, second: Trace) -> Iterator[str]:
    """Yield the ids of leaves that differ between the traces or exist in one of them only."""
    old, new = ({leaf.id: (leaf.kind, leaf.digest, leaf.initial) for leaf in run.leaves} for run in (first, second))
    return (leaf for leaf in dict.fromkeys([*old, *new]) if old.get(leaf) != new.get(leaf))


def _refuse_empty(trace: Trace, name: str) -> None:
    if not trace.records and not trace.results:
        raise HashbenchError(
            f"the {name} trace is empty",
            consequence="nothing was compared, which is not the same as equal",
            tip="Check that the code under the trace ran any torch op in this thread.",
        )


def _content(result: Result | None) -> TensorDigest | None:
    return None if result is None else result.digest


# ------------------------------------------------------------------------------------------------ the causal slice


def _causal_slice(known: Differences, roots: Iterable[str]) -> set[str]:
    """Return the nodes that differ or propagate a difference, reachable backward from the roots."""
    reached: set[str] = set()
    waiting = list(_differing(known, roots))
    while waiting:
        node = waiting.pop()
        if node in reached:
            continue
        reached.add(node)
        source = known.sources.get(node)
        if source is not None and source.node != node:
            waiting.append(source.node)
        waiting += _differing(known, _edges(known, node))
    return reached


def _differing(known: Differences, nodes: Iterable[str]) -> Iterator[str]:
    return (node for node in nodes if node in known.tainted or node in known.differs)


def _edges(known: Differences, node: str) -> Iterator[str]:
    """Yield the nodes from which a difference may have reached this one."""
    yield from known.edges.get(node, ())
    a, b = known.runs.records.get(node, (None, None))
    runs = known.runs
    if a is None or b is None or len(a.inputs) != len(b.inputs):
        if a is not None:
            yield from (ref.source for ref in a.inputs if not runs.coverage.replaces(a, ref))
        if b is not None:
            yield from (runs.node_of[ref.source] for ref in b.inputs if not runs.other_coverage.replaces(b, ref))
        return
    for ref_a, ref_b in zip(a.inputs, b.inputs, strict=True):
        if runs.replaced(a, b, ref_a, ref_b):
            continue
        if known.runs.carries(ref_a, ref_b):
            yield from (ref_a.source, known.runs.node_of[ref_b.source])


def _roots(known: Differences, pairs: Iterable[tuple[Result | None, Result | None]]) -> Iterator[str]:
    """Yield the nodes that wrote the results; for a result that is a Python value, the records that returned it."""
    for a, b in pairs:
        if a is not None and a.source:
            yield a.source
        if b is not None and b.source:
            yield known.runs.node_of[b.source]
        values = [result.digest.value for result in (a, b) if result is not None and not result.source]
        for node in known.scalars if values else ():
            if any(record is not None and record.scalar in values for record in known.runs.records[node]):
                yield node


# ----------------------------------------------------------------------------------- the first introduction in it


def _choose(known: Differences, reached: Iterable[str]) -> Source | None:
    """Return the first introduction in a slice; a setting that changed before all of them takes their place."""
    candidates = [known.sources[node] for node in reached if node in known.sources]
    settings = _settings_source(known.runs)
    if settings is not None and all(settings.position <= source.position for source in candidates):
        early = [source for source in candidates if source.origin in _RANK]
        felt = min(candidates, key=lambda source: source.position, default=settings)
        candidates = early or [replace(settings, felt_at=felt.node)]
    return _earliest(known.runs, candidates)


def _earliest(runs: PairedRuns, candidates: Sequence[Source]) -> Source | None:
    """Return the earliest candidate: inputs and state before any op, then by position; node order breaks ties."""
    return min(
        candidates,
        key=lambda source: (_RANK.get(source.origin, 2), source.position, runs.order.get(source.node, 0)),
        default=None,
    )


def _settings_source(runs: PairedRuns) -> Source | None:
    """Return the first global torch setting in which the runs differ; its position is where it was last known equal."""
    position = 0
    for a, b in zip(runs.first.marks, runs.second.marks, strict=False):
        old, new = dict(a.settings), dict(b.settings)
        changed = [name for name in sorted({*old, *new}) if old.get(name) != new.get(name)]
        if changed:
            name = changed[0]
            detail = f"the runs differ in torch's global settings at {a.label}: {', '.join(changed)}"
            shown = (f"{name}={old.get(name, 'absent')}", f"{name}={new.get(name, 'absent')}")
            return Source(Origin.SETTINGS, f"setting:{name}", position, detail, *shown)
        position = a.position
    return None


def _odd_views(known: Differences, a: Result | None, b: Result | None) -> Iterator[str]:
    """Yield the views of a result's writer that the two runs took differently: the result may be another view of it."""
    if a is None or b is None or not a.source or unwritten_memory(known.runs, a.source) is not None:
        return
    for node, records in known.runs.records.items():
        view = node in known.differs and not _wrote(known.runs, node) and not any(r and r.opaque for r in records)
        if view and a.source in known.runs.read_by(node):
            yield node


def _written_after_the_last_record(known: Differences, name: str, a: Result | None, b: Result | None) -> Source:
    """Return the source of a result that differs although every record agrees: it was written without torch."""
    runs, writer = known.runs, a.source if a is not None else ""
    memory = unwritten_memory(runs, writer)
    if memory is not None:
        return known.traceable(writer, memory)
    if a is None or b is None:
        detail = f"the result {name} exists in one run only"
    elif writer:
        detail = f"the result {name} was written behind torch's back after its last recorded write"
    else:
        detail = f"the result {name} was not computed by any recorded op"
    at = runs.position.get(writer, max(0, len(runs.first.records) - 1))
    old, new = ("absent" if x is None else x.digest.value for x in (a, b))
    if a is not None and b is not None and layouts_differ([a.digest], [b.digest]):
        old, new = contents_in_words([a.digest], [b.digest])
    hidden = bool(writer) and a is not None and b is not None
    return known.traceable(writer, Source(Origin.OUTSIDE, writer, at, detail, old, new, opaque_producer=hidden))


def _scalars_that_chose(known: Differences, chosen: Source) -> list[str]:
    """List the scalars read out before the runs part: they reach the results by choosing what is run."""
    last = chosen.position if chosen.origin == Origin.OUTSIDE else len(known.runs.first.records)
    return [node for node in (*known.scalars, *known.lone_scalars) if known.runs.position[node] <= last]


def _wrote(runs: PairedRuns, node: str) -> bool:
    """Return True if either record wrote a tensor or returned a scalar; a view does neither."""
    return any(record is not None and (record.outputs or record.scalar) for record in runs.records[node])


def _divergence(known: Differences, source: Source) -> Divergence:
    runs = known.runs
    a, b = runs.records.get(source.felt_at or source.node, (None, None))
    record = a or b
    if record is None and runs.first.records:
        record = runs.first.records[min(source.position, len(runs.first.records) - 1)]
    where = record or OpRecord("", phase="", iteration=None, module="", op="")
    return Divergence(
        origin=source.origin,
        node=source.node.removeprefix(SECOND),
        kernel="" if where.opaque or source.origin == Origin.RANKS else where.op,
        op_index=runs.position.get(source.felt_at, source.position) if record is not None else None,
        phase=where.phase,
        iteration=_iteration(runs, where),
        module=where.module,
        forward_op=where.forward_op,
        detail=source.detail,
        first=source.first,
        second=source.second,
        source=where.source,
        opaque_producer=source.opaque_producer,
        steered_by=_steering(known, source) if source.origin in (Origin.SEQUENCE, Origin.OUTSIDE) else None,
        inside=op_of(where.inside),
    )


def _early_divergence(known: Differences, read: EarlyRead) -> Divergence:
    """Return the divergence of two traces that agree only because they waited where the program does not."""
    node = read.collective if read.is_result else read.reader
    node = node if node in known.runs.records else known.runs.node_of[node]
    reader = f"the result {read.reader}" if read.is_result else op_of(read.reader)
    detail = (
        f"{reader} reads what {read.collective} receives before its Work is done: the trace waited for it, and an "
        "untraced run, which does not, may read other data. Wait for the Work before its output is used"
    )
    at = known.runs.position[node]
    divergence = _divergence(known, Source(Origin.RANKS, node, at, detail, "", "", felt_at=node))
    return replace(divergence, source=read.source or divergence.source)


def _iteration(runs: PairedRuns, record: OpRecord) -> int | None:
    """Return the iteration of a record: 0 before the first counted one, ``None`` if no iteration was counted."""
    counted = record.iteration is None and any(
        other.iteration is not None for run in (runs.first, runs.second) for other in run.records
    )
    return 0 if counted else record.iteration


def _steering(known: Differences, source: Source) -> Steering | None:
    """Return the last differing scalar before ``source`` and the kernel where its difference entered."""
    earlier = [node for node in known.scalars if known.runs.position[node] <= source.position]
    if not earlier:
        return None
    name = earlier[-1]
    old, new = known.runs.records[name]
    reached = _causal_slice(known, [name])
    chosen = _earliest(known.runs, [known.sources[node] for node in reached if node in known.sources])
    kernel = ""
    if chosen is not None:
        record = next((record for record in known.runs.records.get(chosen.node, ()) if record is not None), None)
        kernel = record.op if record is not None else chosen.node
    return Steering(name, old.scalar if old else "", new.scalar if new else "", kernel)
