"""Runs of several ranks as one run: a node stands for the same call on all of them, and holds what they hold together.

    rank 0: mm -> [8, 16]   rank 1: mm -> [8, 16]     together: moments of both, those of [8, 32]

Moments are additive, so shards add up to the whole tensor. Ranks that hold the same count once: what is replicated, on
all ranks or on some, adds up likewise. The moments of partial sums, such as those before an ``all_reduce``, do not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
from operator import add
from typing import TypeVar

import numpy as np
import torch

from hashbench.core.divergence.align import align
from hashbench.core.divergence.content import ContentGraph, ContentNode, Kind
from hashbench.core.records import OpRecord
from hashbench.extensions.implementations.pair.record import NodeOrigin, RecordedRun

_Kept = TypeVar("_Kept")
_NAMED = (Kind.INPUT, Kind.WEIGHT)


def merged(runs: Sequence[RecordedRun]) -> RecordedRun:
    """Return the runs of all ranks, by rank, as one.

    Calls correspond as in two runs of one program (:func:`~hashbench.core.divergence.align.align`). What a rank calls
    beside rank 0 is kept with ``rank 1: `` before its module. Results are those of rank 0, all of them in ``parts``.
    """
    first, *others = runs
    records, members = list(first.trace.records), {name: [node] for name, node in first.graph.nodes.items()}
    names = [{name: name for name in first.graph.nodes}]
    outputs = dict(first.outputs)
    following: dict[str, list[str]] = {}
    for rank, run in enumerate(others, 1):
        calls, records = _joined(records, run, rank)
        known = _names(first, run, calls, rank)
        names.append(known)
        last = ""
        for name, node in run.graph.nodes.items():
            together = known[name]
            if together not in members:
                following.setdefault(last, []).append(together)
                outputs[together] = _renamed(run.outputs[name], calls)
            members.setdefault(together, []).append(replace(node, reads=tuple(known[read] for read in node.reads)))
            last = together
    nodes = {name: _together(name, members[name]) for name in _in_order(first.graph.nodes, following)}
    digests = _by_name(names, [run.digests for run in runs])
    values = _by_name(names, [run.values for run in runs])
    return replace(
        first,
        graph=ContentGraph(nodes, first.graph.results),
        outputs=outputs,
        trace=replace(first.trace, records=tuple(records)),
        digests={name: sum(set(each)) % 2**64 for name, each in digests.items()},
        values={name: each[0] for name, each in values.items()},
        parts=tuple(run.results for run in runs),
        sums={name: sum(each[1:], each[0]) for name, each in values.items() if _differ(each, len(runs))},
    )


def _differ(values: Sequence[torch.Tensor], ranks: int) -> bool:
    same_shape = len(values) == ranks and all(value.shape == values[0].shape for value in values)
    return same_shape and values[0].is_floating_point() and not all(torch.equal(value, values[0]) for value in values)


def _by_name(names: Sequence[Mapping[str, str]], kept: Sequence[Mapping[str, _Kept]]) -> dict[str, list[_Kept]]:
    """Collect what each rank keeps of its nodes, by id together."""
    found: dict[str, list[_Kept]] = {}
    for known, each in zip(names, kept, strict=True):
        for name, value in each.items():
            found.setdefault(known[name], []).append(value)
    return found


def own_names(keep: frozenset[str], rank: int) -> frozenset[str]:
    """Return ids of merged nodes as they are on a rank whose calls are those of rank 0, or its own."""
    return frozenset(name.removeprefix(f"rank {rank}: ") for name in keep)


def fitted(run: RecordedRun, like: Mapping[str, torch.Tensor], names: Mapping[str, str]) -> RecordedRun:
    """Return a merged run with whole results: shards are put together along the dimension that gives the shape of the
    other side's result; what has as many elements as that is rank 0's.

    Args:
        like: results of the other side.
        names: their names, by name of this one.
    """
    whole = {}
    for name, other in names.items():
        parts = [part[name] for part in run.parts if name in part]
        if parts and parts[0].numel() != like[other].numel():
            whole[name] = _put_together(parts, like[other].shape)
    return replace(run, results={**run.results, **whole})


def _put_together(parts: Sequence[torch.Tensor], shape: torch.Size) -> torch.Tensor:
    found = parts[0]
    for dim in reversed(range(parts[0].dim())):
        try:
            found = torch.cat(list(parts), dim)
        except RuntimeError:  # other dimensions differ
            continue
        if found.shape == shape:
            return found
    return found


def _joined(records: Sequence[OpRecord], run: RecordedRun, rank: int) -> tuple[dict[str, str], list[OpRecord]]:
    """Return the id of each record of a rank among those of all, and these with its own."""
    ids: dict[str, str] = {}
    joined: list[OpRecord] = []
    theirs = run.trace.records
    for i, j in align(records, theirs):
        if i is not None:
            joined.append(records[i])
            if j is not None:
                ids[theirs[j].id] = records[i].id
        elif j is not None:
            ids[theirs[j].id] = f"rank {rank}: {theirs[j].id}"
            joined.append(replace(theirs[j], id=ids[theirs[j].id], module=f"rank {rank}: {theirs[j].module}"))
    return ids, joined


def _names(first: RecordedRun, run: RecordedRun, calls: Mapping[str, str], rank: int) -> dict[str, str]:
    """Return the id together of each node of a rank: that of the same call, of the same leaf, or of what was read in
    its place."""
    ours = first.graph.nodes
    found: dict[str, str] = {}
    for name, node in run.graph.nodes.items():
        output = run.outputs[name]
        other = f"{calls[output.record]}:{output.index}" if output.record in calls else name
        if node.op and other in ours and len(ours[other].reads) == len(node.reads):
            for read, same in zip(node.reads, ours[other].reads, strict=True):
                if _is_unnamed(run.graph.nodes[read]) and _is_unnamed(ours[same]):
                    found.setdefault(read, same)
        if node.op or not _is_unnamed(node):
            found[name] = other if node.op or other in ours else f"rank {rank}: {name}"
    return {name: found.get(name, f"rank {rank}: {name}") for name in run.graph.nodes}


def _is_unnamed(node: ContentNode) -> bool:
    return not node.op and node.kind not in _NAMED


def _renamed(output: NodeOrigin, calls: Mapping[str, str]) -> NodeOrigin:
    return replace(output, record=calls.get(output.record, output.record))


def _in_order(first: Mapping[str, ContentNode], following: Mapping[str, Sequence[str]]) -> list[str]:
    order: list[str] = []
    todo = [*reversed([*following.get("", ()), *first])]
    while todo:
        name = todo.pop()
        order.append(name)
        todo += reversed(following.get(name, ()))
    return order


def _together(name: str, members: Sequence[ContentNode]) -> ContentNode:
    """Return the node of one call on all ranks."""
    first = members[0]
    distinct: list[ContentNode] = []
    for node in members:
        if not any(_agree(node, other) for other in distinct):
            distinct.append(node)
    kinds = [node.kind for node in members]
    node = replace(
        first,
        id=name,
        kind=Kind.COMPUTED if Kind.COMPUTED in kinds else first.kind,
        reads=tuple(dict.fromkeys(read for node in members for read in node.reads)),
        tolerance=max(node.tolerance for node in members),
    )
    if len(distinct) == 1:
        return node
    moments = [each.moments for each in distinct if each.moments is not None]
    rows = [each.rows for each in distinct if each.rows is not None]
    return replace(
        node,
        moments=reduce(add, moments) if len(moments) == len(distinct) else None,
        rows=np.concatenate(rows) if len(rows) == len(distinct) else None,
        numel=sum(each.numel for each in distinct),
        shape=(),
        ordered=(0.0, 0.0),
    )


def _agree(node: ContentNode, other: ContentNode) -> bool:
    if node.moments is None or other.moments is None:
        return node.moments is other.moments
    return node.moments.agree(other.moments, max(node.tolerance, other.tolerance))
