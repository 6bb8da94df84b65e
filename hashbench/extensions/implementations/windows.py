"""Tensors inside vectors: fused biases and flattened parameters, found by sums over windows. No torch.

The additive digest of a stretch of a vector is the difference of two running sums; where it is that of a whole tensor
of the other side, this tensor lies there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from hashbench.extensions.implementations.digest import Words

LONGEST = 2**24
"""Elements of a vector that is searched: its running sums are all in memory."""

MOST_COMBINED = 200
"""Tensors of which pairs and triples are tried as the parts of a vector that is mixed from them."""


@dataclass(frozen=True, slots=True)
class Guest:
    """A tensor that may lie in a vector: its number of elements and its additive digest."""

    count: int
    additive: int


@dataclass(frozen=True, slots=True)
class Inside:
    """What lies in a vector.

    Attributes:
        parts: name -> the element at which it begins, in order.
        gaps: first element and the one behind the last of what nothing was found for.
    """

    parts: dict[str, int]
    gaps: tuple[tuple[int, int], ...]


def find(elements: Words, guests: Mapping[str, Guest]) -> Inside:
    """Return which guests lie in a vector, one behind the other.

    Args:
        elements: the hash of each element.
        guests: by name.
    """
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(elements, dtype=np.uint64)])
    by_count: defaultdict[int, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name, guest in guests.items():
        if 1 < guest.count < elements.size:
            by_count[guest.count][guest.additive].append(name)
    found: list[tuple[int, int, str]] = []
    for count, wanted in by_count.items():
        windows = sums[count:] - sums[:-count]
        for start in np.flatnonzero(np.isin(windows, np.array([*wanted], np.uint64))).tolist():
            found += [(start, count, name) for name in wanted[int(windows[start])]]
    return _laid_out(sorted(found, key=lambda each: (each[0], -each[1])), elements.size)


def _laid_out(found: list[tuple[int, int, str]], size: int) -> Inside:
    parts: dict[str, int] = {}
    gaps, end = [], 0
    for start, count, name in found:
        if start < end or name in parts:
            continue
        if start > end:
            gaps.append((end, start))
        parts[name], end = start, start + count
    return Inside(parts, (*gaps, *([(end, size)] if end < size else [])))


def mixed_from(host: Guest, guests: Mapping[str, Guest]) -> tuple[str, ...]:
    """Return two or three tensors that together have the elements of ``host``, in whatever order; none if none do."""
    small = {name: guest for name, guest in guests.items() if guest.count < host.count}
    if len(small) > MOST_COMBINED:
        return ()
    by_sum: defaultdict[tuple[int, int], list[str]] = defaultdict(list)
    for name, guest in small.items():
        by_sum[guest.count, guest.additive].append(name)
    for parts in _combined(small):
        rest = host.count - sum(small[part].count for part in parts)
        missing = (host.additive - sum(small[part].additive for part in parts)) % 2**64
        if rest == 0 and missing == 0:
            return parts
        third = [name for name in by_sum.get((rest, missing), ()) if name not in parts]
        if third:
            return (*parts, third[0])
    return ()


def _combined(guests: Mapping[str, Guest]) -> Iterator[tuple[str, ...]]:
    yield from combinations(guests, 2)
