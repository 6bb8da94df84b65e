"""Moments of many tensors as arrays, and the pairs among them that agree, found by sorting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hashbench.core.divergence.content import ContentNode, Kind

DATA = frozenset({Kind.INPUT, Kind.COMPUTED, Kind.RANDOM})
"""Kinds of nodes through which a difference is followed; constants and weights are named beside them."""

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Contents:
    """Moments of many tensors, or of sums of tensors: ``sums`` and ``sizes`` are ``[n, 4]``."""

    sums: Floats
    sizes: Floats
    special: Ints
    tolerance: Floats

    def __getitem__(self, kept: Ints) -> Contents:
        return Contents(self.sums[kept], self.sizes[kept], self.special[kept], self.tolerance[kept])

    def added(self, members: Ints) -> Contents:
        """Return the contents of groups of tensors, ``[groups, size]``."""
        return Contents(
            self.sums[members].sum(1),
            self.sizes[members].sum(1),
            self.special[members].sum(1),
            self.tolerance[members].max(1),
        )

    @property
    def zero(self) -> Bools:
        """Which hold nothing but zeros, what counts in ``special`` aside."""
        return np.asarray((np.abs(self.sums) <= self.tolerance[:, None] * self.sizes).all(1))

    @property
    def integral(self) -> Bools:
        """Which hold integers only: their powers sum up to integers."""
        powers = self.sums[:, :3]
        return np.asarray(((powers == np.round(powers)) & (np.abs(powers) < 2.0**53)).all(1))

    @property
    def single(self) -> Bools:
        """Of which all elements but zeros are one number: the sums of powers are in proportion."""
        first, second, third = self.sums[:, 0], self.sums[:, 1], self.sums[:, 2]
        return np.asarray(np.abs(first * third - second**2) <= 1e-9 * second**2)

    @property
    def weak(self) -> Bools:
        """Which are equal by chance: zeros, and those of which all elements but zeros are one round number."""
        first, second = self.sums[:, 0], self.sums[:, 1]
        value = 64 * np.divide(second, first, out=np.zeros_like(first), where=first != 0)
        return np.asarray(self.zero | (self.single & (np.abs(value - np.round(value)) <= 1e-9 * np.abs(value))))


def contents_of(nodes: Sequence[ContentNode]) -> Contents:
    """Return the moments of nodes that have some, in their order."""
    moments = [node.moments for node in nodes]
    return Contents(
        np.array([m.sums for m in moments if m], np.float64).reshape(-1, 4),
        np.array([m.sizes for m in moments if m], np.float64).reshape(-1, 4),
        np.array([m.special for m in moments if m], np.int64),
        np.array([node.tolerance for node in nodes if node.moments], np.float64),
    )


def first_alike(contents: Contents, *, weak: bool = False) -> list[int]:
    """Return for each the index of the first that holds the same; of weak ones their own unless ``weak``."""
    kept = np.arange(len(contents.special)) if weak else np.flatnonzero(~contents.weak)
    pairs = (kept[each] for each in matches(contents[kept], contents[kept]))
    first = np.arange(len(contents.special))
    np.minimum.at(first, *reversed(tuple(pairs)))
    return first.tolist()


def matches(left: Contents, right: Contents) -> tuple[Ints, Ints]:
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
