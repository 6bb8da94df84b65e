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


class NotItemwiseError(Exception):
    """Why a call cannot be made on other items; the text is the reason."""


@dataclass(frozen=True, slots=True)
class ItemAxis:
    """The dimension of a tensor that holds the items of a batch.

    Index ``(o * items + item) * inner + i`` of ``dim``, which has size ``outer * items * inner``, belongs to ``item``.

    Attributes:
        dim: the dimension.
        outer: blocks that repeat all items (rows repeated as a whole).
        inner: indices of one item (flattened heads: ``batch * heads``).
        also: further dimensions of the items (scores of tokens for tokens); an item's part is its own in all of them.
    """

    dim: int
    outer: int = 1
    inner: int = 1
    also: tuple[int, ...] = ()

    def items(self, shape: Sequence[int]) -> int:
        """Return the number of items in a tensor of this shape.

        Raises:
            ValueError: the dimension is no multiple of ``outer * inner``.
        """
        items, rest = divmod(shape[self.dim], self.outer * self.inner)
        if rest:
            raise ValueError(f"dimension {self.dim} of {tuple(shape)} does not hold whole items of {self}")
        return items


class Cut(NamedTuple):
    """Rows of a tensor: slices of ``step`` indices along ``dim``, after each of ``narrowed`` was applied.

    Attributes:
        dim: ``None``: the whole tensor is one row.
        step: indices of one row.
        narrowed: ``(dimension, first index, length)`` each.
    """

    dim: int | None = None
    step: int = 1
    narrowed: tuple[tuple[int, int, int], ...] = ()


WHOLE = Cut()


@dataclass(frozen=True, slots=True)
class ItemSubset:
    """The items of two runs: the reference runs all of a batch, the other run some of them.

    Attributes:
        batch: items of the reference.
        size: items of the other run.
        first: index of the first of these in the reference.
        together: the items depend on each other by design, as the tokens of one sequence do.
        turned: the other run has all items in reverse order; a third run, of ``half`` of them, shows which dimensions
            scale.
    """

    batch: int
    size: int
    first: int = 0
    together: bool = False
    turned: bool = False

    @property
    def asked(self) -> int:
        """The size by which the other run is requested; negative if its items are in reverse order."""
        return -self.size if self.turned else self.size

    @property
    def half(self) -> int:
        """Half of the batch size."""
        return self.batch // 2

    def multiple(self, reference: int, other: int) -> int:
        """Return the indices of a dimension per item, by its sizes in both runs; 0 if it does not scale with the
        items."""
        count, rest = divmod(reference, self.batch)
        return count if not rest and count * self.size == other else 0

    def cuts(self, reference: Shape, other: Shape) -> tuple[Cut, Cut] | None:
        """Return the cuts of a tensor with these shapes in the two runs, so that rows of the other are found among
        those of the reference; ``None`` if the numbers of dimensions differ.

        The first dimension that differs is cut. Further ones are narrowed, in the reference, to the size in the other
        run.
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
        """Return the possible numbers of blocks (``ItemAxis.outer``) of a dimension of these sizes."""
        count = self.multiple(reference, other)
        whole = [outer for outer in range(1, count + 1) if count % outer == 0]
        fitting = [
            outer
            for outer in whole
            if not any(size % step for size in (reference // outer, other // outer, self.start(reference, outer)))
        ]
        return tuple(fitting) if count else (1,)

    def start(self, reference: int, outer: int) -> int:
        """Return the index, in each of ``outer`` blocks of a dimension of the reference, at which the other run's
        begins."""
        return reference // outer // self.batch * self.first if self.first else 0

    def _start(self, reference: int, other: int) -> int:
        return self.start(reference, 1) if self.multiple(reference, other) else 0

    def _step(self, reference: int, other: int, most: int) -> int:
        count = self.multiple(reference, other)
        if not count:
            return 1 if reference <= most else max(1, math.gcd(reference, other))
        steps = (step for step in range(1, count + 1) if count % step == 0 and reference // step <= most)
        return next(steps, count)
