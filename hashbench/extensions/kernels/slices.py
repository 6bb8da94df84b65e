"""Words for a set of indices along a dimension: ranges, steps, blocks, lists. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from hashbench.core.text import listed, spaced

Indices = np.ndarray[tuple[int], np.dtype[np.int64]]

_MOST_LISTED = 6
"""Ranges that are listed one by one."""


@dataclass(frozen=True, slots=True)
class Words:
    """A description and what it costs to state it, in bits."""

    text: str
    bits: float


@dataclass(frozen=True, slots=True)
class Axis:
    """What the indices of a dimension are called: rows and columns of a matrix, elements of a vector.

    Attributes:
        size: of the dimension.
        noun: ``row``; of a tensor of more than two dimensions ``dimension 1``.
    """

    size: int
    noun: str

    @property
    def _numbered(self) -> bool:
        return self.noun.startswith("dimension")

    def at(self, places: str, *, one: bool) -> str:
        """Return ``rows 96 to 127``, ``row 5`` or ``dimension 1 at 96 to 127``."""
        return f"{self.noun} at {places}" if self._numbered else f"{self.noun}{'' if one else 's'} {places}"

    def end(self, which: str, number: int) -> str:
        """Return ``the last row``, ``the first 5 rows`` or ``the last 5 of dimension 1``."""
        if self._numbered:
            return f"the {which}{'' if number == 1 else f' {spaced(number)}'} of {self.noun}"
        return f"the {which} {self.noun}" if number == 1 else f"the {which} {spaced(number)} {self.noun}s"

    def every(self, step: int) -> str:
        """Return ``every 32nd column``."""
        return f"every {_ordinal(step)}{' of' if self._numbered else ''} {self.noun}"

    def some(self, number: int, first: int) -> str:
        """Return ``57 of 128 rows, the first 3``."""
        if self._numbered:
            return f"{self.noun} at {spaced(number)} of {spaced(self.size)} places, the first {first}"
        return f"{spaced(number)} of {spaced(self.size)} {self.noun}s, the first {first}"


def axis_of(shape: tuple[int, ...], dim: int) -> Axis:
    """Return what the indices of a dimension of a shape are called."""
    names = {1: ("element",), 2: ("row", "column")}.get(len(shape))
    return Axis(shape[dim], names[dim] if names else f"dimension {dim}")


def entropy(number: float, total: float) -> float:
    """Return the bits that say which ``number`` of ``total`` are meant, where nothing is known about them."""
    if number <= 0 or number >= total:
        return 0.0
    share = number / total
    return -total * (share * math.log2(share) + (1 - share) * math.log2(1 - share))


def words_for(at: Indices, axis: Axis) -> Words:
    """Return the shortest description of indices, in order and not all of the axis, at least one."""
    rest = np.delete(np.arange(axis.size), at)
    found = [*_plain(at, axis)]
    found += [Words(f"all but {words.text}", words.bits + 1) for words in _plain(rest, axis)]
    if len(at) * 2 > axis.size:  # "all but the first 64 columns", not "the last 960"
        found = [replacement for replacement in found if not _is_end(replacement)] or found
    arbitrary = Words(axis.some(len(at), int(at[0])), entropy(len(at), axis.size) + 12)
    return min([*found, arbitrary], key=lambda words: words.bits)


def _is_end(words: Words) -> bool:
    return words.text.startswith(("the first", "the last"))


def _plain(at: Indices, axis: Axis) -> Iterator[Words]:
    number, first, last = len(at), int(at[0]), int(at[-1])
    index = math.log2(axis.size)
    breaks = np.flatnonzero(np.diff(at) != 1)
    starts, ends = at[np.concatenate(([0], breaks + 1))], at[np.concatenate((breaks, [number - 1]))]
    if len(starts) == 1:
        if first == 0:
            yield Words(axis.end("first", number), min(index, 2 * math.log2(number)) + 1)
        elif last == axis.size - 1:
            yield Words(axis.end("last", number), min(index, 2 * math.log2(number)) + 1)
        else:
            length = min(index, 2 * math.log2(number))
            yield Words(axis.at(_range(first, last), one=number == 1), index + length + 1)
        return
    if len(starts) <= _MOST_LISTED:
        ranges = [_range(int(a), int(b)) for a, b in zip(starts, ends, strict=True)]
        bits = sum(index if a == b else 2 * index for a, b in zip(starts, ends, strict=True))
        yield Words(axis.at(listed(ranges), one=False), bits + 4)
    if len(starts) > 2:
        yield from _repeated(starts, ends, axis)


def _repeated(starts: Indices, ends: Indices, axis: Axis) -> Iterator[Words]:
    """Yield words for ranges of one length at one distance, as borders of blocks are; the end may cut the last one."""
    steps, lengths = np.diff(starts), ends - starts + 1
    step, length, first = int(steps[0]), int(lengths[0]), int(starts[0])
    if (steps != step).any() or (lengths[:-1] != length).any():
        return
    if lengths[-1] != length and not (lengths[-1] < length and ends[-1] == axis.size - 1):
        return
    bits = 2 * math.log2(axis.size) + 4
    ended = "on" if starts[-1] + step >= axis.size else f"to {ends[-1]}"
    if length == 1:
        yield Words(f"{axis.every(step)} from {first} {ended}", bits)
    elif first < step:
        end = "" if ended == "on" else f" up to {ends[-1]}"
        yield Words(f"{axis.at(_range(first, first + length - 1), one=False)} of every {step}{end}", bits + 2)


def _range(first: int, last: int) -> str:
    return str(first) if first == last else f"{first} to {last}"


def _ordinal(number: int) -> str:
    ending = "th" if 10 <= number % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
