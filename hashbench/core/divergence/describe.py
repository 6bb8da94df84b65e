"""Describe a source as the place in the program where the difference entered."""

from __future__ import annotations

from dataclasses import replace

from hashbench.core.catalog import OPAQUE, Origin
from hashbench.core.divergence.align import SECOND, PairedRuns
from hashbench.core.divergence.introduce import Source
from hashbench.core.records import Divergence, EarlyRead, OpRecord, Steering, op_of


def divergence_at(runs: PairedRuns, source: Source, steered_by: Steering | None = None) -> Divergence:
    """Return the divergence whose difference entered at a source."""
    a, b = runs.records.get(source.first_visible_at or source.node, (None, None))
    record = a or b
    if record is None and runs.first.records:
        record = runs.first.records[min(source.position, len(runs.first.records) - 1)]
    where = record or OpRecord("", phase="", iteration=None, module="", op="")
    return Divergence(
        origin=source.origin,
        node=source.node.removeprefix(SECOND),
        kernel="" if where.opaque or source.origin == Origin.RANKS else where.op,
        op_index=runs.position.get(source.first_visible_at, source.position) if record is not None else None,
        phase=where.phase,
        iteration=_iteration(runs, where),
        module=where.module,
        forward_op=where.forward_op,
        detail=source.detail,
        first=source.first,
        second=source.second,
        source=where.source,
        opaque_producer=source.opaque_producer,
        steered_by=steered_by,
        inside=op_of(where.inside),
    )


def entered_at(runs: PairedRuns, source: Source) -> str:
    """Name where a difference entered: an op, or a leaf; a leaf without a name by the op that read it first."""
    node = source.first_visible_at or source.node
    if node in runs.records:
        return op_of(node)
    is_unnamed = any(leaf is not None and leaf.kind == "other" for leaf in runs.leaves.get(node, ()))
    return (divergence_at(runs, source).kernel if is_unnamed else "") or node


def early_divergence(runs: PairedRuns, read: EarlyRead, origin: Origin) -> Divergence:
    """Return the divergence of two traces that agree only because they waited where the program does not."""
    node = read.collective if read.is_result else read.reader
    node = node if node in runs.records else runs.node_of[node]
    reader = f"the result {read.reader}" if read.is_result else op_of(read.reader)
    detail = (
        f"{reader} reads what {read.collective} receives before its Work is done: the trace waited for it, and an "
        "untraced run, which does not, may read other data. Wait for the Work before its output is used"
    )
    at = runs.position[node]
    divergence = divergence_at(runs, Source(origin, node, at, detail, "", "", first_visible_at=node))
    return replace(divergence, source=read.source or divergence.source)


def _iteration(runs: PairedRuns, record: OpRecord) -> int | None:
    """Return the iteration of a record: 0 before the first counted one, ``None`` if no iteration was counted."""
    counted = record.iteration is None and any(
        other.iteration is not None for run in (runs.first, runs.second) for other in run.records
    )
    return 0 if counted else record.iteration


def unseen(runs: PairedRuns) -> str:
    """Describe, in sentences, what the traces did not record."""
    opaque = runs.opaque
    if not opaque:
        return ""
    what = next(record.opaque for record in runs.records[opaque] if record is not None and record.opaque)
    times = max(sum(record.opaque == what for record in run.records) for run in (runs.first, runs.second))
    return (
        f"{what.capitalize()} ran {'once, as' if times == 1 else f'{times} times, first as'} "
        f"{opaque.removeprefix(SECOND)}: what it does is not recorded, and no kernel behind it is named. "
        f"{OPAQUE.get(what, '')}"
    ).rstrip()
