"""Tensors that correspond by rows: tokens that are packed or padded, decoded one by one, one item beside a batch."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from hashbench.core.divergence.content import ContentGraph, ContentNode
from hashbench.core.divergence.content_sums import DATA, Bools, Contents, Floats, Ints, matches

_EVIDENCE = 4
"""Numbers in rows that are neither integers nor all equal which a tensor must have to correspond by rows."""


@dataclass(frozen=True, slots=True)
class _Rows:
    """Distinct rows of many nodes.

    Attributes:
        contents: their moments.
        owner: index of the node of each.
        count: how often the node has it.
        distinct: number of distinct rows of each node.
        evident: nodes whose rows are enough to tell them apart.
    """

    contents: Contents
    owner: Ints
    count: Ints
    distinct: Ints
    evident: Bools


def rows_shared(
    graphs: tuple[ContentGraph, ContentGraph],
    nodes: tuple[Sequence[ContentNode], Sequence[ContentNode]],
    aligned: tuple[Container[str], Container[str]],
) -> tuple[dict[str, tuple[str, ...]], dict[str, tuple[str, ...]]]:
    """Return nodes of each run that correspond by rows to nodes of the other.

    A node corresponds to one that has all of its rows, each as often, such as one decoded token to the tensor of all
    tokens. It also corresponds to nodes whose rows it has all, such as a batch to one item of it. Then it has to share
    as large a part of its rows as the data that it read: an op that spoils some rows shares less. Rows of integers or
    of one number are no evidence.

    Args:
        graphs: both runs.
        nodes: of each run those with rows that are compared.
        aligned: of each run the nodes that are aligned already.
    """
    kept = tuple([node for node in side if node.rows is not None and len(node.rows)] for side in nodes)
    if not all(kept):
        return {}, {}
    a, b = _rows(kept[0]), _rows(kept[1])
    i, j = matches(a.contents, b.contents)
    in_b, in_a = _contained(a, b, i, j), _contained(b, a, j, i)
    return (
        _found(graphs[0], kept[0], kept[1], in_b, in_a, _shares(b, a, j, i, in_a), aligned[0]),
        _found(graphs[1], kept[1], kept[0], in_a, in_b, _shares(a, b, i, j, in_b), aligned[1]),
    )


def _found(
    graph: ContentGraph,
    ours: Sequence[ContentNode],
    theirs: Sequence[ContentNode],
    within: Iterable[tuple[int, int]],
    around: Iterable[tuple[int, int]],
    shares: Sequence[float],
    aligned: Container[str],
) -> dict[str, tuple[str, ...]]:
    """Return the counterparts of nodes of one run.

    Args:
        graph: the run.
        ours, theirs: the compared nodes of it and of the other.
        within: pairs of a node of ours and one of theirs that has its rows.
        around: pairs of a node of theirs and one of ours that has its rows.
        shares: of ours, the part of the rows that such nodes of theirs have.
        aligned: nodes that are aligned already.
    """
    holders: dict[str, list[int]] = {}
    parts: dict[str, list[int]] = {}
    for at, other in within:
        holders.setdefault(ours[at].id, []).append(other)
    for other, at in around:
        parts.setdefault(ours[at].id, []).append(other)
    index = {node.id: at for at, node in enumerate(ours)}
    scale = len(theirs) / len(ours)

    def distance(other: int, node: ContentNode) -> tuple[bool, float]:
        return theirs[other].op != node.op, abs(other - index[node.id] * scale)

    found: dict[str, tuple[str, ...]] = {}
    share: dict[str, float] = {}
    for node in graph:
        data = [read for read in node.reads if read in share and graph.nodes[read].kind in DATA]
        expected = min((share[read] for read in data), default=0.0 if node.kind in DATA else 1.0)
        share[node.id] = 1.0 if node.id in aligned else expected
        if node.id in aligned:
            continue
        if node.id in holders:
            best = min(holders[node.id], key=lambda other, node=node: distance(other, node))  # type: ignore[misc]
            found[node.id], share[node.id] = (theirs[best].id,), 1.0
        elif node.id in parts and not _follows(graph, node) and shares[index[node.id]] >= expected * (1 - 1e-9):
            found[node.id] = tuple(theirs[other].id for other in parts[node.id])
            share[node.id] = shares[index[node.id]]
    return found


def _contained(inner: _Rows, outer: _Rows, one: Ints, other: Ints) -> list[tuple[int, int]]:
    """Return pairs of nodes: one of ``inner``, and one of ``outer`` that has all of its rows.

    Args:
        inner, outer: the rows.
        one, other: pairs of equal rows, as indices in each.
    """
    often = inner.count[one] <= outer.count[other]
    rows = np.unique(np.stack([one[often], outer.owner[other[often]]]), axis=1)
    pairs, shared = np.unique(np.stack([inner.owner[rows[0]], rows[1]]), axis=1, return_counts=True)
    whole = (shared == inner.distinct[pairs[0]]) & inner.evident[pairs[0]]
    return [(first, second) for first, second in pairs[:, whole].T.tolist()]


def _shares(a: _Rows, b: _Rows, i: Ints, j: Ints, around: Iterable[tuple[int, int]]) -> list[float]:
    """Return for each node of ``b`` the part of its rows that nodes of ``a`` have which it contains."""
    contained = np.zeros((len(b.distinct), len(a.distinct)), bool)
    for at_a, at_b in around:
        contained[at_b, at_a] = True
    rows = np.unique(j[contained[b.owner[j], a.owner[i]]])
    shared = np.bincount(b.owner[rows], b.count[rows], len(b.distinct))
    total = np.bincount(b.owner, b.count, len(b.distinct))
    return [float(x) for x in shared / total]


def _follows(graph: ContentGraph, node: ContentNode) -> bool:
    """Return whether a node is aligned if what it copies is, and not by having the rows of one part of it."""
    reads = [graph.nodes[read] for read in node.reads if read in graph.nodes]
    return node.copies and any(read.kind in DATA and read.rows is not None for read in reads)


def _rows(nodes: Sequence[ContentNode]) -> _Rows:
    rows: list[Floats] = [node.rows for node in nodes if node.rows is not None]
    lengths = np.array([len(each) for each in rows])
    owner = np.repeat(np.arange(len(nodes)), lengths)
    sums = np.concatenate(rows)
    widths = [node.shape[-1] if node.shape else node.numel / max(n, 1) for node, n in zip(nodes, lengths, strict=True)]
    width = np.array(widths, np.float64)[owner]
    norm = np.sqrt(sums[:, 1])
    sizes = np.stack([np.sqrt(width) * norm, norm**2, norm**3, 3 * np.sqrt(width) * norm], axis=1)
    tolerance = np.array([node.tolerance for node in nodes])[owner]
    order = np.lexsort((sums[:, 1], owner))
    sums, sizes, owner, tolerance, width = sums[order], sizes[order], owner[order], tolerance[order], width[order]
    limit = tolerance[1:, None] * (sizes[1:] + sizes[:-1])
    again = (owner[1:] == owner[:-1]) & (np.abs(sums[1:] - sums[:-1]) <= limit).all(1)
    first = np.flatnonzero(np.concatenate([[True], ~again]))
    count = np.diff(np.append(first, len(owner)))
    contents = Contents(sums[first], sizes[first], np.zeros(len(first), np.int64), tolerance[first])
    owner = owner[first]
    telling = ~contents.integral & ~contents.single
    evidence = np.bincount(owner, np.where(telling, width[first], 0), len(nodes))
    return _Rows(contents, owner, count, np.bincount(owner, minlength=len(nodes)), evidence >= _EVIDENCE)
