"""Partial sums of ranks: nodes that hold what the other side has only if they are added up, element by element."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import replace

import torch

from hashbench.core.divergence.content import ContentGraph, ContentNode, Kind
from hashbench.core.divergence.content_align import align_contents
from hashbench.extensions.implementations.pair.moments import measure
from hashbench.extensions.implementations.pair.record import RecordedRun
from hashbench.extensions.implementations.pair.running import recorded
from hashbench.extensions.implementations.pair.sides import Side

MOST_ELEMENTS = 2**26
"""Of all nodes that are added up: 0.5 GiB on each rank."""

SUMMED = " added up over ranks"
"""Follows dtype and shape of a node that is a partial sum."""


def with_sums(run: RecordedRun, side: Side, seed: int, aligned: Container[str], other: ContentGraph) -> RecordedRun:
    """Return a run on several ranks in which a partial sum has the content of the sum, where the other side has that.

    The ranks run once more, and keep what differs between them and is not aligned.

    Args:
        run: merged.
        side, seed: what was run.
        aligned: nodes that correspond already.
        other: the run of the other side.
    """
    left, wanted, returned = MOST_ELEMENTS, [], _copied(run.graph, run.graph.results.values())
    for node in run.graph:
        if _may_be_partial(node) and node.id not in aligned and node.id not in returned:
            left -= node.numel
            if left >= 0:
                wanted.append(node.id)
    if not wanted:
        return run
    sums = recorded(side, seed, wide=True, keep=frozenset(wanted)).sums
    tried = {name: _measured(run.graph.nodes[name], value) for name, value in sums.items() if name in run.graph.nodes}
    found = align_contents(other, _with(run.graph, tried)).partners
    kept = {name: node for name, node in tried.items() if found.get(name)}
    outputs = {name: replace(run.outputs[name], text=run.outputs[name].text + SUMMED, partial=True) for name in kept}
    return replace(run, graph=_with(run.graph, kept), outputs={**run.outputs, **outputs})


def _copied(graph: ContentGraph, results: Iterable[str]) -> set[str]:
    """Return the results and what they are copies of: returned before any reduction, a partial sum is a mistake."""
    found, todo = set[str](), list(results)
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            todo += graph.nodes[name].reads if graph.nodes[name].copies else ()
    return found


def _may_be_partial(node: ContentNode) -> bool:
    return bool(node.op) and node.kind is Kind.COMPUTED and node.shape == () and node.numel > 1


def _measured(node: ContentNode, value: torch.Tensor) -> ContentNode:
    found = measure(value, rows=True)
    return replace(
        node,
        moments=found.moments,
        rows=found.rows,
        ordered=found.ordered,
        numel=value.numel(),
        shape=tuple(value.shape),
    )


def _with(graph: ContentGraph, nodes: Mapping[str, ContentNode]) -> ContentGraph:
    return ContentGraph({**graph.nodes, **nodes}, graph.results)
