"""Which contents of two runs correspond: whole tensors, parts of fused ones, rows, and copies of what corresponds.

All of it is found by sorting moments, not by comparing all with all; what is summed up is bounded by windows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from hashbench.core.divergence.content import ContentAlignment, ContentGraph, ContentNode
from hashbench.core.divergence.content_follow import Following
from hashbench.core.divergence.content_rows import rows_shared
from hashbench.core.divergence.content_sums import DATA, Ints, contents_of, first_alike, matches

_PARTS = 8
_STRIDES = 4
_NEAR = 8


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
    """Fill ``found``: of each side the nodes that are aligned; those of the second with their partners."""

    def __init__(self, a: ContentGraph, b: ContentGraph) -> None:
        self._graphs = (a, b)
        self._nodes = tuple([node for node in graph if node.moments is not None] for graph in self._graphs)
        self._contents = tuple(contents_of(nodes) for nodes in self._nodes)
        self._weak = tuple(contents.weak for contents in self._contents)
        self.found: tuple[dict[str, tuple[str, ...]], dict[str, tuple[str, ...]]] = ({}, {})
        self.part_of: dict[str, str] = {}
        self.rows: dict[str, tuple[str, ...]] = {}

    def alignment(self) -> ContentAlignment:
        self._whole()
        self._sums(0)
        self._sums(1)
        self._by_rows()
        following = Following(self._graphs, self.found, self.part_of, self.rows)
        following.copies(0)
        following.copies(1)
        following.copies(0)
        return ContentAlignment(self.found[1], frozenset(self.found[0]), self.part_of, self.rows)

    def _strong(self, side: int) -> Ints:
        return np.flatnonzero(~self._weak[side])

    def _left(self, side: int) -> list[int]:
        """Return strong nodes of floating point numbers that are not aligned."""
        integral, nodes, found = self._contents[side].integral, self._nodes[side], self.found[side]
        return [k for k in self._strong(side).tolist() if nodes[k].id not in found and not integral[k]]

    def _whole(self) -> None:
        kept = self._strong(0), self._strong(1)
        pairs = matches(self._contents[0][kept[0]], self._contents[1][kept[1]])
        candidates: dict[int, list[int]] = {}
        for i, j in zip(kept[0][pairs[0]].tolist(), kept[1][pairs[1]].tolist(), strict=True):
            candidates.setdefault(j, []).append(i)
            self.found[0][self._nodes[0][i].id] = ()
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
        """Find nodes of ``side`` that are the sums of nodes of the other, where one of these is not aligned."""
        other = 1 - side
        usable = [~self._weak[each] & ~self._contents[each].integral for each in (0, 1)]
        targets = np.flatnonzero(usable[side])
        ids = [node.id for node in self._nodes[side]], [node.id for node in self._nodes[other]]
        ops = [node.op if ok else None for node, ok in zip(self._nodes[other], usable[other], strict=True)]
        for members in groups_of(ops):
            of, which = matches(self._contents[side][targets], self._contents[other].added(members))
            for k, group in zip(targets[of].tolist(), members[which].tolist(), strict=True):
                self._fuse(side, ids[0][k], tuple(ids[1][part] for part in group))

    def _fuse(self, side: int, whole: str, parts: tuple[str, ...]) -> None:
        self.found[side].setdefault(whole, parts if side else ())
        for part in parts:
            if part not in self.found[1 - side]:
                self.found[1 - side][part] = ()
                if not side:
                    self.part_of[part] = whole

    def _by_rows(self) -> None:
        """Find nodes that correspond by rows: those that are left, to these and to one of each other content."""
        both: tuple[list[ContentNode], list[ContentNode]] = ([], [])
        for side, kept in enumerate(both):
            left = set(self._left(side))
            first = first_alike(self._contents[side])
            for k in self._strong(side).tolist():
                node = self._nodes[side][k]
                if node.rows is not None and node.kind in DATA and (k in left or first[k] == k):
                    kept.append(node)
        covered, shared = rows_shared(self._graphs, both, self.found)
        self.rows.update(shared)
        self.found[0].update(dict.fromkeys(covered, ()))
        self.found[1].update(dict.fromkeys(shared, ()))


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
