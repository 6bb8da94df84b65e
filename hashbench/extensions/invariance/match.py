"""Compare a tensor in two runs of different batches: by the digests of its rows, along its items or by content. Pure:
no torch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, NamedTuple

from hashbench.extensions.invariance.layout import Cut, ItemSubset, Shape

WIDE_ROW, MOST_COPIES = 16, 16
"""A row of so many elements is not met by chance; each may be there as often, on average."""


class TensorRows(NamedTuple):
    """A tensor that a call read or wrote, in rows.

    Attributes:
        cut: how it was cut; ``None``: it cannot be compared with that of the other run.
        width: bytes of one row in ``content``.
        content: digests of all rows.
        state: if not empty, replaces the content: the id of the parameter or buffer, and which part of it.
        given: if not empty, its own shape, of which ``shape`` leaves out repeats.
    """

    dtype: str
    shape: Shape
    cut: Cut | None
    content: bytes = b""
    width: int = 0
    state: tuple[Any, ...] = ()
    given: Shape = ()


class Draw(NamedTuple):
    """The states of the generator that a call may draw from, as digests: before and after the call."""

    before: int
    after: int


class CallRows(NamedTuple):
    """The rows that one call read, by argument, and wrote. ``drew``: the state of its generator; ``None`` if it drew
    nothing."""

    read: tuple[tuple[str, TensorRows], ...]
    written: tuple[TensorRows, ...]
    drew: Draw | None = None


class Agreement(Enum):
    """Relation of a tensor's rows in the smaller run to those of the reference."""

    SAME = "equal, item by item"
    FOUND = "equal to rows of the reference, at places that do not follow from the item"
    DIFFERENT = "not equal"
    UNKNOWN = "not equal, and which rows belong to which item is not known"


@dataclass(frozen=True, slots=True)
class Match:
    """Result of comparing a tensor in two runs.

    Attributes:
        agreement: relation of the rows.
        sizes: sizes of the dimension that was cut.
        outers: numbers of blocks (:class:`~hashbench.extensions.invariance.layout.ItemAxis`) under which its rows are
            the same.
        order: a number for the places at which rows were found differently; ``None`` if these are ambiguous (few unique
            rows).
        grouped: rows went to other places in groups that are not found again.
    """

    agreement: Agreement
    sizes: tuple[int, int] | None = None
    outers: frozenset[int] = frozenset()
    several: bool = False
    order: int | None = None
    grouped: bool = False

    @property
    def equal(self) -> bool:
        return self.agreement in (Agreement.SAME, Agreement.FOUND)

    @property
    def surely_equal(self) -> bool:
        """Whether it is equal by rows that are unique enough to prove it."""
        return self.agreement is Agreement.SAME or (self.agreement is Agreement.FOUND and self.order is not None)

    @property
    def strictly_equal(self) -> bool:
        """Whether each item's rows are where they are in the reference, and as many."""
        return self.agreement is Agreement.SAME and not self.several

    def outer(self, inherited: Sequence[Match]) -> int:
        """Return the number of its blocks; of rows that differ that of an input of the same sizes."""
        alike = (other.outers for other in inherited if other.sizes == self.sizes)
        return min(self.outers or next(alike, frozenset()), default=1)

    def itemwise(self, subset: ItemSubset) -> bool:
        """Return True if all items share it, or each item's rows are at a place that follows from the item."""
        if self.sizes is None:
            return self.agreement is not Agreement.UNKNOWN
        several, count = self.several and not subset.together, subset.multiple(*self.sizes)
        # Rows so common that they are found in any batch (signs of zero) were not moved: they differ where they are.
        placed = self.agreement is not Agreement.FOUND or (self.order is None and count == 1)
        return placed and not several and count > 0


def match(reference: TensorRows, other: TensorRows, subset: ItemSubset, inherited: Sequence[Match] = ()) -> Match:
    """Compare a tensor in two runs.

    For an output, ``inherited`` are the matches of the inputs of its call: a dimension with several rows per item is
    laid out as one of the same sizes among these, else its layout is unknown.
    """
    if reference.cut is None or other.cut is None or other.dtype != reference.dtype:
        return Match(Agreement.UNKNOWN)
    dim = other.cut.dim
    if reference.cut.dim != dim:  # it was cut for another call beside it
        return Match(Agreement.UNKNOWN)
    if dim is None:
        same = reference.content == other.content and reference.shape == other.shape
        return Match(Agreement.SAME if same else Agreement.DIFFERENT)
    sizes, several = (reference.shape[dim], other.shape[dim]), bool(reference.cut.narrowed)
    if reference.width == other.width:
        found = _by_layout(reference, other, sizes, subset) or _by_content(reference, other, dim, subset)
        if found is not None:
            return replace(found, sizes=sizes, several=several)
    alike = [match for match in inherited if match.sizes == sizes]
    if other.cut.step > 1 and any(match.agreement is Agreement.FOUND for match in alike):
        return Match(Agreement.UNKNOWN, sizes, several=several, grouped=True)
    wholly = all(subset.multiple(reference.shape[at], length) == 1 for at, _, length in reference.cut.narrowed)
    known = wholly and (subset.multiple(*sizes) == 1 or any(match.surely_equal for match in alike))
    return Match(Agreement.DIFFERENT if known else Agreement.UNKNOWN, sizes, several=several)


def _by_layout(reference: TensorRows, other: TensorRows, sizes: tuple[int, int], subset: ItemSubset) -> Match | None:
    """Return the match of rows that are equal item by item, with the layouts under which they are."""
    assert other.cut is not None
    step, content = other.cut.step, (reference.content, other.content)
    outers = (outer for outer in subset.outers(*sizes, step) if _same_rows(*content, sizes, step, outer, subset))
    found = frozenset(outers)
    return Match(Agreement.SAME, outers=found) if found else None


def _by_content(reference: TensorRows, other: TensorRows, dim: int, subset: ItemSubset) -> Match | None:
    """Return the match of rows that are all found in the reference, at whatever places. Shifted tokens are other
    tokens."""
    assert reference.cut is not None
    width = max(reference.width, other.width)
    there = places(reference.content, other.content, width) if width and not reference.cut.narrowed else None
    if there is None or (subset.together and _is_shifted(there)):
        return None
    return Match(Agreement.FOUND, order=_order_of(there, reference, dim))


def _same_rows(
    reference: bytes, other: bytes, sizes: tuple[int, int], step: int, outer: int, subset: ItemSubset
) -> bool:
    """Return True if each of ``outer`` blocks of the other run is a part of that of the reference."""
    rows = sizes[1] // step
    width = len(other) // rows if rows else 0
    block, long = rows // outer * width, sizes[0] // step // outer * width
    start = subset.start(sizes[0], outer) // step * width
    if subset.turned:
        item = block // subset.batch
        parts = [reference[at : at + item] for at in range(0, len(reference), item)] if item else []
        blocks = [parts[at : at + subset.batch][::-1] for at in range(0, len(parts), subset.batch)]
        return b"".join(part for block in blocks for part in block) == other
    return all(
        reference[long * at + start : long * at + start + block] == other[block * at : block * (at + 1)]
        for at in range(outer)
    )


def places(reference: bytes, other: bytes, width: int) -> list[int] | None:
    """Return for every row of the other run the index of an equal row of the reference, each used once; ``None`` if one
    has none."""
    free: dict[bytes, list[int]] = {}
    for place, row in enumerate(_rows(reference, width)):
        free.setdefault(row, []).append(place)
    for found_at in free.values():
        found_at.reverse()
    found = []
    for row in _rows(other, width):
        found_at = free.get(row, [])
        if not found_at:
            return None
        found.append(found_at.pop())
    return found


def _is_shifted(places: Sequence[int]) -> bool:
    """Return True if neighbours are neighbours at another place. Shifted tokens are other tokens: they have an
    order."""
    return all(after == before + 1 for before, after in itertools.pairwise(places))


def _order_of(places: Sequence[int], reference: TensorRows, dim: int) -> int | None:
    """Return a number for these places; ``None`` if such rows would be found in any batch, since few are unique.

    Rows of many elements may repeat as often as each token goes to experts.
    """
    rows = len(reference.content) // reference.width
    wide = math.prod(reference.shape) // reference.shape[dim] >= WIDE_ROW
    distinct = len(set(_rows(reference.content, reference.width)))
    return hash(tuple(places)) if distinct * (MOST_COPIES if wide else 2) > rows else None


def _rows(content: bytes, width: int) -> Iterator[bytes]:
    return (content[start : start + width] for start in range(0, len(content), width))
