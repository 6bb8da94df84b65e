"""Which elements of two tensors differ: how many, the first, its values, and whether rounding alone explains it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hashbench.extensions.implementations.digest import CHUNK, Lines, TensorSource
from hashbench.extensions.implementations.dtypes import (
    NARROWER,
    SIZES,
    Bits,
    common_dtypes,
    is_representable,
    rounded,
    unsigned,
    value_text,
)
from hashbench.extensions.implementations.lines import Line

Index = tuple[int, ...]

LINES_AT_ONCE = 2**22
"""Elements of lines that are held at once for a comparison."""


@dataclass(frozen=True, slots=True)
class ComparedElements:
    """Elements of two tensors, one by one.

    Attributes:
        differing, total: elements that differ, and all.
        first_a, first_b: index of the first that differs.
        value_a, value_b: its values.
        through: the dtype through which one side's elements became the other's; empty if none explains it.
        rounded_side: the side whose elements were rounded, ``a`` or ``b``.
    """

    differing: int
    total: int
    first_a: Index = ()
    first_b: Index = ()
    value_a: str = ""
    value_b: str = ""
    through: str = ""
    rounded_side: str = ""


@dataclass(frozen=True, slots=True)
class _Block:
    """Elements of both sides in their own dtypes, and the flat index of each."""

    a: Bits
    b: Bits
    at_a: np.ndarray
    at_b: np.ndarray


def compare_whole(a: TensorSource, b: TensorSource, one: str, other: str) -> ComparedElements:
    """Compare two tensors with the same number of elements, in order."""
    return _compared(a, b, one, other, _whole_blocks(a, b, one, other))


def _whole_blocks(a: TensorSource, b: TensorSource, one: str, other: str) -> Iterator[_Block]:
    count = a.headers[one].count
    for start in range(0, count, CHUNK):
        stop = min(count, start + CHUNK)
        at = np.arange(start, stop)
        yield _Block(a.read(one, start, stop), b.read(other, start, stop), at, at)


def compare_spans(
    a: TensorSource, b: TensorSource, one: str, other: str, start_a: int, start_b: int, count: int
) -> ComparedElements:
    """Compare ``count`` elements of two tensors from different starts on."""

    def blocks() -> Iterator[_Block]:
        for begin in range(0, count, CHUNK):
            size = min(CHUNK, count - begin)
            at_a, at_b = start_a + begin, start_b + begin
            yield _Block(
                a.read(one, at_a, at_a + size),
                b.read(other, at_b, at_b + size),
                np.arange(at_a, at_a + size),
                np.arange(at_b, at_b + size),
            )

    return _compared(a, b, one, other, blocks())


def compare_lines(
    a: tuple[TensorSource, Lines, str], b: tuple[TensorSource, Lines, str], pairs: Sequence[tuple[Line, Line]]
) -> ComparedElements:
    """Compare lines of two tensors, each side given with its lines and the axis; all pairs are of the same two."""
    one, other = pairs[0][0].name, pairs[0][1].name
    length = a[1].length(a[2])
    step = max(1, LINES_AT_ONCE // length)

    def blocks() -> Iterator[_Block]:
        for begin in range(0, len(pairs), step):
            some = pairs[begin : begin + step]
            sides = []
            for (tensors, lines, axis), name, numbers in (
                (a, one, [line.number for line, _ in some]),
                (b, other, [line.number for _, line in some]),
            ):
                places = np.array([lines.place(axis, number) for number in numbers])
                at = places[:, :1] + places[:, 1:] * np.arange(length)
                sides.append((_gathered(tensors, name, at), at.ravel()))
            (bits_a, at_a), (bits_b, at_b) = sides
            yield _Block(bits_a, bits_b, at_a, at_b)

    return _compared(a[0], b[0], one, other, blocks())


def _gathered(tensors: TensorSource, name: str, at: np.ndarray) -> Bits:
    """Return elements at flat indices, row after row of ``at``."""
    flat = at.ravel()
    found = np.empty(flat.size, unsigned(tensors.headers[name].dtype))
    order = np.argsort(flat, kind="stable")
    ordered = flat[order]
    begin = 0
    while begin < flat.size:
        first = int(ordered[begin])
        end = int(np.searchsorted(ordered, first + CHUNK))
        part = tensors.read(name, first, int(ordered[end - 1]) + 1)
        found[order[begin:end]] = part[ordered[begin:end] - first]
        begin = end
    return found


def _compared(a: TensorSource, b: TensorSource, one: str, other: str, blocks: Iterator[_Block]) -> ComparedElements:
    dtype_a, dtype_b = a.headers[one].dtype, b.headers[other].dtype
    common = common_dtypes(dtype_a, dtype_b)[0]
    through = {("b", way): True for way in NARROWER.get(dtype_a, ())} | {
        ("a", way): True for way in NARROWER.get(dtype_b, ())
    }
    differing = total = 0
    first: tuple[int, int, int, int] | None = None
    for block in blocks:
        unequal = np.flatnonzero(rounded(block.a, dtype_a, common) != rounded(block.b, dtype_b, common))
        differing, total = differing + unequal.size, total + block.a.size
        if unequal.size and first is None:
            at = unequal[0]
            first = (int(block.at_a[at]), int(block.at_b[at]), int(block.a[at]), int(block.b[at]))
        for side, way in [*through]:
            wide, narrow = ((block.a, dtype_a), (block.b, dtype_b))[:: 1 if side == "b" else -1]
            if not _is_rounding(wide, narrow, way):
                del through[side, way]
    if first is None:
        return ComparedElements(0, total)
    side, way = next(iter(through), ("", ""))
    at_a, at_b = (
        tuple(int(part) for part in np.unravel_index(index, tensors.headers[name].shape or (1,)))
        for index, tensors, name in ((first[0], a, one), (first[1], b, other))
    )
    values = value_text(first[2], dtype_a), value_text(first[3], dtype_b)
    return ComparedElements(differing, total, at_a, at_b, *values, way, side)


def _is_rounding(wide: tuple[Bits, str], narrow: tuple[Bits, str], way: str) -> bool:
    """Return whether the elements of ``narrow`` are those of ``wide``, rounded through ``way``."""
    bits, dtype = wide
    once = rounded(bits, dtype, way)
    if narrow[1] == way:
        return bool(np.array_equal(once, narrow[0]))
    if SIZES[narrow[1]] < SIZES[way]:
        return bool(np.array_equal(rounded(once, way, narrow[1]), narrow[0]))
    if narrow[1] not in NARROWER or way not in NARROWER[narrow[1]]:
        return False
    return bool(np.array_equal(once, rounded(narrow[0], narrow[1], way))) and is_representable(*narrow, way)
