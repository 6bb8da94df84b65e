"""Where the items of a batch are in a tensor: what scales between a run of many items and one of a part of them.

A dimension that is as large as the batch need not hold its items; one that has another size in a run of fewer items
does depend on them. So nothing is told from one shape alone. Pure: shapes only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

MOST_ROWS = 16384
"""A dimension that holds more rows is digested in groups of neighbours, all of one item, where it is known which are;
else it is not matched by content."""

MOST_ELEMENTS = 2**17
"""The same where a row is one element, which is kept as it is."""

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ItemAxis:
    """The dimension of a tensor along which the items of a batch lie.

    ``dim`` has size ``outer * items * inner``, and index ``(o * items + item) * inner + i`` belongs to ``item``:
    flattened heads (``batch * heads``) have ``inner`` = heads, rows repeated as a whole have ``outer`` > 1. ``also``
    are further dimensions along which the items lie one after the other (scores of tokens for tokens): of an item is
    what is its own in all of them.
    """

    dim: int
    outer: int = 1
    inner: int = 1
    also: tuple[int, ...] = ()

    def items(self, shape: Sequence[int]) -> int:
        """How many items a tensor of this shape holds.

        Raises:
            ValueError: the dimension is no multiple of ``outer * inner``.
        """
        items, rest = divmod(shape[self.dim], self.outer * self.inner)
        if rest:
            raise ValueError(f"dimension {self.dim} of {tuple(shape)} does not hold whole items of {self}")
        return items


class Cut(NamedTuple):
    """How a tensor is cut into rows: along ``dim``, ``step`` indices a row, after each of ``narrowed`` was limited to
    ``(dimension, first index, length)``. A ``dim`` of ``None``: the whole tensor is one row."""

    dim: int | None = None
    step: int = 1
    narrowed: tuple[tuple[int, int, int], ...] = ()


WHOLE = Cut()


@dataclass(frozen=True, slots=True)
class ItemSubset:
    """Two runs on the same items: the reference on ``batch`` of them, the other on ``size``, which are those from
    ``first`` on.

    ``together``: these depend on each other by right, as tokens of one sequence do, and are ``size`` of ``batch`` of
    them beside the others. ``turned``: the other run is on all items in reverse order; what scales is then
    told by a third run of ``half`` of them.
    """

    batch: int
    size: int
    first: int = 0
    together: bool = False
    turned: bool = False

    @property
    def asked(self) -> int:
        """What the other run is asked for by: the number of its items, below zero where they are in reverse order."""
        return -self.size if self.turned else self.size

    @property
    def half(self) -> int:
        """Half of the batch."""
        return self.batch // 2

    def multiple(self, reference: int, other: int) -> int:
        """How many indices of a dimension belong to each item, by its sizes in both runs; 0 where it does not scale
        with the number of items."""
        count, rest = divmod(reference, self.batch)
        return count if not rest and count * self.size == other else 0

    def cuts(self, reference: Shape, other: Shape) -> tuple[Cut, Cut] | None:
        """How to cut a tensor that has these shapes in the two runs, so that rows of the other are found among those of
        the reference; ``None`` where they have not the same number of dimensions.

        The first dimension that differs is cut. Further ones are limited, in the reference, to what the other run has.
        """
        if len(reference) != len(other):
            return None
        if self.turned:  # both are cut alike, by what ``other`` is in the run of half the items
            cuts = ItemSubset(self.batch, self.half).cuts(reference, other)
            return None if cuts is None or cuts[0].narrowed else (cuts[0], cuts[0])
        dims = [dim for dim, sizes in enumerate(zip(reference, other, strict=True)) if sizes[0] != sizes[1]]
        if not dims:
            return WHOLE, WHOLE
        if self.together:  # a mask for one sequence may be for all in the other run
            dims.sort(key=lambda at: not self.multiple(reference[at], other[at]))
        dim, *more = dims
        most = MOST_ELEMENTS if math.prod(other) == other[dim] else MOST_ROWS
        step = self._step(reference[dim], other[dim], most)
        narrowed = tuple((at, self._start(reference[at], other[at]), other[at]) for at in more)
        if any(reference[at] < other[at] for at in dims):
            return None
        return Cut(dim, step, narrowed), Cut(dim, step)

    def outers(self, reference: int, other: int, step: int = 1) -> tuple[int, ...]:
        """The numbers of blocks (``ItemAxis.outer``) that a dimension of these sizes may consist of."""
        count = self.multiple(reference, other)
        whole = [outer for outer in range(1, count + 1) if count % outer == 0]
        fitting = [
            outer
            for outer in whole
            if not any(size % step for size in (reference // outer, other // outer, self.start(reference, outer)))
        ]
        return tuple(fitting) if count else (1,)

    def start(self, reference: int, outer: int) -> int:
        """The index, in each of ``outer`` blocks of a dimension of the reference, at which the other run's begins."""
        return reference // outer // self.batch * self.first if self.first else 0

    def _start(self, reference: int, other: int) -> int:
        return self.start(reference, 1) if self.multiple(reference, other) else 0

    def _step(self, reference: int, other: int, most: int) -> int:
        count = self.multiple(reference, other)
        if not count:
            return 1 if reference <= most else max(1, math.gcd(reference, other))
        steps = (step for step in range(1, count + 1) if count % step == 0 and reference // step <= most)
        return next(steps, count)
