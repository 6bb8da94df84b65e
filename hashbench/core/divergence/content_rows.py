"""Tensors that correspond by rows: tokens that are packed or padded, decoded one by one, one item beside a batch."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
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
    found: tuple[MutableMapping[str, tuple[str, ...]], Mapping[str, tuple[str, ...]]],
) -> dict[str, tuple[str, ...]]:
    """Return nodes of the second run that correspond by rows, with their counterparts.

    A node corresponds to one that has all of its rows, each as often, such as one decoded token to the tensor of all
    tokens. It also corresponds to nodes whose rows it has all, such as a batch to one item of it. Then it has to share
    as large a part of its rows as the data that it read: an op that spoils some rows shares less. Rows of integers or
    of one number are no evidence.

    Args:
        graphs: both runs.
        nodes: of each run those with rows that are compared.
        found: of each run the nodes that are aligned already; those of the first that correspond are added.
    """
    kept = tuple([node for node in side if node.rows is not None and len(node.rows)] for side in nodes)
    if not all(kept):
        return {}
    a, b = _rows(kept[0]), _rows(kept[1])
    i, j = matches(a.contents, b.contents)
    within = _contained(b, a, j, i)
    around = [(outer, inner) for inner, outer in _contained(a, b, i, j)]
    candidates: dict[str, list[int]] = {}
    for at_b, at_a in within:
        candidates.setdefault(kept[1][at_b].id, []).append(at_a)
        found[0].setdefault(kept[0][at_a].id, ())
    parts: dict[str, list[int]] = {}
    for at_b, at_a in around:
        parts.setdefault(kept[1][at_b].id, []).append(at_a)
        if kept[1][at_b].id in found[1]:
            found[0].setdefault(kept[0][at_a].id, ())
    shares = _shares(a, b, i, j, around)
    index = {node.id: at_b for at_b, node in enumerate(kept[1])}
    shared: dict[str, tuple[str, ...]] = {}
    part: dict[str, float] = {}
    scale = len(kept[0]) / len(kept[1])
    for node in graphs[1]:
        data = [read for read in node.reads if read in part and graphs[1].nodes[read].kind in DATA]
        expected = min((part[read] for read in data), default=0.0 if node.kind in DATA else 1.0)
        part[node.id] = 1.0 if node.id in found[1] else expected
        if node.id in found[1]:
            continue
        if node.id in candidates:
            place = index[node.id] * scale
            best = min(candidates[node.id], key=lambda at: (kept[0][at].op != node.op, abs(at - place)))
            shared[node.id], part[node.id] = (kept[0][best].id,), 1.0
        elif node.id in parts and not _follows(graphs[1], node) and shares[index[node.id]] >= expected * (1 - 1e-9):
            shared[node.id], part[node.id] = tuple(kept[0][at].id for at in parts[node.id]), shares[index[node.id]]
            found[0].update(dict.fromkeys(shared[node.id], ()))
    return shared


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


def _shares(a: _Rows, b: _Rows, i: Ints, j: Ints, around: Sequence[tuple[int, int]]) -> dict[int, float]:
    """Return for each node of ``b`` the part of its rows that nodes have which it contains."""
    contained = np.zeros((len(b.distinct), len(a.distinct)), bool)
    for at_b, at_a in around:
        contained[at_b, at_a] = True
    rows = np.unique(j[contained[b.owner[j], a.owner[i]]])
    shared = np.bincount(b.owner[rows], b.count[rows], len(b.distinct))
    total = np.bincount(b.owner, b.count, len(b.distinct))
    return dict(enumerate((shared / total).tolist()))


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
