"""Which contents of two runs correspond: whole tensors, parts of fused ones, rows, and copies of what corresponds.

All of it is found by sorting moments, not by comparing all with all; what is summed up is bounded by windows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hashbench.core.divergence.content import ContentAlignment, ContentGraph, ContentNode, Kind, Moments

DATA = frozenset({Kind.INPUT, Kind.COMPUTED, Kind.RANDOM})
"""Kinds of nodes through which a difference is followed; constants and weights are named beside them."""

_PARTS = 8
_STRIDES = 4
_NEAR = 8

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Contents:
    """Moments of many tensors, or of sums of tensors: ``sums`` and ``sizes`` are ``[n, 4]``."""

    sums: Floats
    sizes: Floats
    special: Ints
    tolerance: Floats

    def __getitem__(self, kept: npt.NDArray[np.generic]) -> _Contents:
        return _Contents(self.sums[kept], self.sizes[kept], self.special[kept], self.tolerance[kept])

    def added(self, members: Ints) -> _Contents:
        """Return the contents of groups of tensors, ``[groups, size]``."""
        return _Contents(
            self.sums[members].sum(1),
            self.sizes[members].sum(1),
            self.special[members].sum(1),
            self.tolerance[members].max(1),
        )

    @property
    def zero(self) -> npt.NDArray[np.bool_]:
        """Which hold nothing but zeros, what counts in ``special`` aside."""
        return np.asarray((np.abs(self.sums) <= self.tolerance[:, None] * self.sizes).all(1))

    @property
    def integral(self) -> npt.NDArray[np.bool_]:
        """Which hold integers only: their powers sum up to integers."""
        powers = self.sums[:, :3]
        return np.asarray(((powers == np.round(powers)) & (np.abs(powers) < 2.0**53)).all(1))

    @property
    def weak(self) -> npt.NDArray[np.bool_]:
        """Which are equal by chance: zeros, and those of which all elements but zeros are one round number.

        All are one number if the sums of ``x`` and ``x**3`` multiply to the square of that of ``x**2``.
        """
        first, second, third = self.sums[:, 0], self.sums[:, 1], self.sums[:, 2]
        one = np.abs(first * third - second**2) <= 1e-9 * second**2
        value = 64 * np.divide(second, first, out=np.zeros_like(first), where=first != 0)
        return np.asarray(self.zero | (one & (np.abs(value - np.round(value)) <= 1e-9 * np.abs(value))))


def contents_of(nodes: Sequence[ContentNode]) -> _Contents:
    """Return the moments of nodes that have some, in their order."""
    moments = [node.moments for node in nodes]
    return _Contents(
        np.array([m.sums for m in moments if m], np.float64).reshape(-1, 4),
        np.array([m.sizes for m in moments if m], np.float64).reshape(-1, 4),
        np.array([m.special for m in moments if m], np.int64),
        np.array([node.tolerance for node in nodes if node.moments], np.float64),
    )


def data_reads(graph: ContentGraph, node: ContentNode) -> tuple[str, ...]:
    """Return what a node read that depends on inputs or draws; if none does, all that it read."""
    reads = tuple(dict.fromkeys(read for read in node.reads if read in graph.nodes))
    return tuple(read for read in reads if graph.nodes[read].kind in DATA) or reads


def align_contents(a: ContentGraph, b: ContentGraph) -> ContentAlignment:
    """Find which nodes of two runs hold the same, in ``O(n log n)`` of their numbers.

    In this order: whole tensors; sums of two to eight tensors of one op that are called near each other; copies of what
    corresponds. Tensors of zeros, or of one round number, are equal by chance: they only correspond to those of the
    same op, and only if all that they read corresponds.

    Args:
        a, b: the runs.
    """
    return _Aligner(a, b).alignment()


class _Aligner:
    """Fill ``found``: of each side the nodes that are aligned, with their partners."""

    def __init__(self, a: ContentGraph, b: ContentGraph) -> None:
        self._graphs = (a, b)
        self._nodes = tuple([node for node in graph if node.moments is not None] for graph in self._graphs)
        self._contents = tuple(contents_of(nodes) for nodes in self._nodes)
        self._weak = tuple(contents.weak for contents in self._contents)
        self.found: tuple[dict[str, tuple[str, ...]], dict[str, tuple[str, ...]]] = ({}, {})

    def alignment(self) -> ContentAlignment:
        self._whole()
        self._sums(0)
        self._sums(1)
        for side in (0, 1):
            self._copies(side)
        return ContentAlignment(self.found[1], frozenset(self.found[0]))

    def _strong(self, side: int) -> Ints:
        return np.flatnonzero(~self._weak[side])

    def _whole(self) -> None:
        kept = self._strong(0), self._strong(1)
        pairs = matches(self._contents[0][kept[0]], self._contents[1][kept[1]])
        candidates: dict[int, list[int]] = {}
        for i, j in zip(kept[0][pairs[0]].tolist(), kept[1][pairs[1]].tolist(), strict=True):
            candidates.setdefault(j, []).append(i)
            self.found[0].setdefault(self._nodes[0][i].id, (self._nodes[1][j].id,))
        for j, same in candidates.items():
            self.found[1][self._nodes[1][j].id] = (self._nodes[0][self._nearest(same, j)].id,)

    def _nearest(self, same: Iterable[int], j: int) -> int:
        """Return the node of the first run that plays the part of node ``j``: of its kind and op, called when it is."""
        node, scale = self._nodes[1][j], len(self._nodes[0]) / len(self._nodes[1])

        def distance(i: int) -> tuple[bool, bool, float]:
            other = self._nodes[0][i]
            return (other.kind in DATA) != (node.kind in DATA), other.op != node.op, abs(i - j * scale)

        return min(same, key=distance)

    def _sums(self, side: int) -> None:
        """Find nodes of ``side`` that are the sums of nodes of the other."""
        other = 1 - side
        nodes, contents = self._nodes[side], self._contents[side]
        left = np.array([k for k in self._strong(side) if nodes[k].id not in self.found[side]], np.int64)
        left = left[~contents.integral[left]]
        if not len(left):
            return
        usable = ~self._weak[other] & ~self._contents[other].integral
        for members in groups_of(
            [node.op if ok else None for node, ok in zip(self._nodes[other], usable, strict=True)]
        ):
            of, which = matches(contents[left], self._contents[other].added(members))
            for k, group in zip(left[of].tolist(), members[which].tolist(), strict=True):
                self._fuse(side, nodes[k].id, tuple(self._nodes[other][part].id for part in group))

    def _fuse(self, side: int, whole: str, parts: tuple[str, ...]) -> None:
        if whole in self.found[side]:
            return
        self.found[side][whole] = parts
        for part in parts:
            self.found[1 - side].setdefault(part, (whole,))

    def _copies(self, side: int) -> None:
        """Align what follows from its reads alone, in order of calls."""
        graph, found = self._graphs[side], self.found[side]
        weak, other = self._chances(side), set(self._chances(1 - side).values())
        values = {chance.value for chance in other} | {_NOTHING}
        for node in graph:
            if node.id in found:
                continue
            settled = all(read in found for read in node.reads if read in graph.nodes)
            chance = weak.get(node.id)
            follows = (
                settled and bool(node.reads) and (node.moments is None or (node.copies and _holds_all(graph, node)))
            )
            if chance is not None:
                follows |= (settled and chance in other) if chance.data else chance.value in values
            if follows:
                found[node.id] = ()

    def _chances(self, side: int) -> dict[str, _Chance]:
        zero, contents = self._contents[side].zero, self._contents[side]
        chances = {}
        for k in np.flatnonzero(self._weak[side]).tolist():
            node, powers = self._nodes[side][k], contents.sums[k, :3].tolist()
            sums = (0.0, 0.0, 0.0) if zero[k] else tuple(float(f"{x:.9g}") for x in powers)
            chances[node.id] = _Chance(node.op, node.kind in DATA, (*sums, int(contents.special[k])))
        return chances


def _holds_all(graph: ContentGraph, node: ContentNode) -> bool:
    """Return whether nothing was chosen or set to zero where that may be the mistake.

    Of data a slice counts as a copy, not what is as large as its origin and holds something else (``triu``). Of
    constants nothing counts but what holds all elements as often (``cat``, ``expand``).
    """
    reads = [graph.nodes[read] for read in data_reads(graph, node)]
    if any(read.moments is None for read in (*reads, node)):
        return True
    total = sum(read.numel for read in reads)
    if node.kind in DATA and (total != node.numel or len(reads) != 1):
        return True
    times = max(1, node.numel // max(total, 1))
    whole = sum((read.moments for read in reads if read.moments), _NO_MOMENTS)
    scaled = Moments(tuple(times * x for x in whole.sums), tuple(times * x for x in whole.sizes), times * whole.special)  # type: ignore[arg-type]
    assert node.moments is not None
    return node.moments.agree(scaled, node.tolerance) or node.moments.agree(whole, node.tolerance)


_NO_MOMENTS = Moments((0.0, 0.0, 0.0, 0.0), (0.0, 0.0, 0.0, 0.0))


@dataclass(frozen=True, slots=True)
class _Chance:
    """What a weak node must have in common with one of the other side; a constant only the value."""

    op: str
    data: bool
    value: tuple[float, ...]


_NOTHING = (0.0, 0.0, 0.0, 0)


def groups_of(ops: Sequence[str | None]) -> list[Ints]:
    """Return groups of nodes of one op that may be parts of one tensor, by size: ``[groups, size]`` of indices.

    Of each op in order of calls: each second, third or fourth call as well, two to eight of them; and any two or three
    among eight calls.
    """
    by_op: dict[str, list[int]] = {}
    for index, op in enumerate(ops):
        if op is not None:
            by_op.setdefault(op, []).append(index)
    sized: dict[int, list[Ints]] = {}
    for indices in by_op.values():
        calls = np.array(indices, np.int64)
        for offsets in _offsets():
            if len(calls) > offsets[-1]:
                starts = np.arange(len(calls) - offsets[-1])
                sized.setdefault(len(offsets), []).append(calls[starts[:, None] + np.array(offsets)])
    return [np.concatenate(groups) for groups in sized.values()]


def _offsets() -> list[tuple[int, ...]]:
    sizes, strides, near = range(2, _PARTS + 1), range(1, _STRIDES + 1), range(1, _NEAR)
    found: list[tuple[int, ...]] = [tuple(range(0, size * stride, stride)) for size in sizes for stride in strides]
    found += [(0, i) for i in near]
    found += [(0, i, j) for i in near for j in near if i < j]
    return list(dict.fromkeys(found))


def matches(left: _Contents, right: _Contents) -> tuple[Ints, Ints]:
    """Return the indices of all pairs whose moments agree, as :meth:`~.content.Moments.agree` has it.

    Sorted by the sum of squares; tensors of similar size together, so that a large one widens no other's window.
    """
    pairs: list[tuple[Ints, Ints]] = []
    scale = np.floor(np.log2(np.maximum(left.sizes[:, 1], 1e-300)) / 8)
    for value in np.unique(scale):
        some = np.flatnonzero(scale == value)
        some = some[np.argsort(left.sums[some, 1])]
        keys = left.sums[some, 1]
        tolerance = np.maximum(right.tolerance, left.tolerance[some].max())
        reach = tolerance * (right.sizes[:, 1] + left.sizes[some, 1].max()) * (1 + 1e-12)
        low = np.searchsorted(keys, right.sums[:, 1] - reach, "left")
        high = np.searchsorted(keys, right.sums[:, 1] + reach, "right")
        for block in _blocks(high - low):
            count = (high - low)[block]
            j = np.repeat(np.arange(len(right.special))[block], count)
            within = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
            i = some[np.repeat(low[block], count) + within]
            agree = left.special[i] == right.special[j]
            limit = np.maximum(left.tolerance[i], right.tolerance[j])[:, None] * (left.sizes[i] + right.sizes[j])
            agree &= (np.abs(left.sums[i] - right.sums[j]) <= limit).all(1)
            pairs.append((i[agree], j[agree]))
    empty = np.zeros(0, np.int64)
    return np.concatenate([empty, *(i for i, _ in pairs)]), np.concatenate([empty, *(j for _, j in pairs)])


def _blocks(counts: Ints, limit: int = 1 << 20) -> list[slice]:
    """Cut counts into slices that sum up to about the limit."""
    ends = np.cumsum(counts)
    blocks, start = [], 0
    while start < len(counts):
        before = ends[start - 1] if start else 0
        end = max(start + 1, int(np.searchsorted(ends, before + limit, "right")))
        blocks.append(slice(start, end))
        start = end
    return blocks
