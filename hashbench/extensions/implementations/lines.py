"""Tensors that share rows or columns: which are fused, cut, padded or permuted, and which lines have no partner.

A line is a row or a column. Lines of both sides are joined by their digests; tensors that share some are one group. The
group is whole if each line of one side has its partner on the other.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hashbench.extensions.implementations.digest import SHORTEST_LINE, Lines, Words, line_of_zeros, mixed

AXES = ("rows", "columns")
MOST_OWNERS = 4
"""Lines with the same digest on one side: more of them tell nothing of where a tensor belongs."""


class Line(NamedTuple):
    """A row or column: the tensor that has it, and its number."""

    name: str
    number: int


@dataclass(frozen=True, slots=True)
class LineGroup:
    """Tensors of both sides that share lines.

    Attributes:
        a, b: names on both sides, and along which axis each one's lines are.
        length: elements of a line.
        pairs: equal lines.
        left_a, left_b: lines without partner, but for those that are zero.
        zeros_a, zeros_b: number of lines of zeros without partner.
    """

    a: Mapping[str, str]
    b: Mapping[str, str]
    length: int
    pairs: tuple[tuple[Line, Line], ...]
    left_a: tuple[Line, ...] = ()
    left_b: tuple[Line, ...] = ()
    zeros_a: int = 0
    zeros_b: int = 0

    @property
    def is_turned(self) -> bool:
        """Whether rows of one side are columns of the other."""
        return {*self.a.values()} != {*self.b.values()}

    @property
    def in_order(self) -> bool:
        """Whether every pair of tensors shares its lines as one piece, in the same order."""
        runs: defaultdict[tuple[str, str], set[int]] = defaultdict(set)
        for one, other in self.pairs:
            runs[one.name, other.name].add(other.number - one.number)
        return all(len(offsets) == 1 for offsets in runs.values())

    def parts_of(self, whole: str) -> tuple[str, ...]:
        """Return the tensors of the other side in the order in which they first appear in ``whole``."""
        ours = sorted(
            (mine.number, theirs.name)
            for one, other in self.pairs
            for mine, theirs in ((one, other), (other, one))
            if mine.name == whole and ((mine is one) == (whole in self.a))
        )
        return tuple(dict.fromkeys(name for _, name in ours))


@dataclass(frozen=True, slots=True)
class _LineTable:
    """All lines of one side, sorted by their keys."""

    names: Sequence[str]
    keys: Words
    owners: Words


Sides = tuple[Mapping[str, str], Mapping[str, str]]
"""Names on both sides, and along which axis each one's lines are."""


def grouped(a: Mapping[str, Lines], b: Mapping[str, Lines]) -> list[Sides]:
    """Return the tensors of two sides that share lines, as groups that share none with each other."""
    edges, axis_a, axis_b = _along(_votes(_table(a), _table(b)), a)
    return [
        (
            {name: axis_a[name] for name in a if name in names_a},
            {name: axis_b[name] for name in b if name in names_b},
        )
        for names_a, names_b in _connected(edges)
    ]


def _table(lines: Mapping[str, Lines]) -> _LineTable:
    keys, owners = [np.zeros(0, np.uint64)], [np.zeros(0, np.uint64)]
    for number, each in enumerate(lines.values()):
        for at, axis in enumerate(AXES):
            length, digests = each.length(axis), each.of(axis)
            if length < SHORTEST_LINE or digests.size < 2:
                continue
            told = digests[digests != np.uint64(line_of_zeros(length))]
            keys.append(told ^ mixed(np.array([length], np.uint64)))
            owners.append(np.full(told.size, 2 * number + at, np.uint64))
    key, owner = np.concatenate(keys), np.concatenate(owners)
    order = np.argsort(key, kind="stable")
    return _LineTable([*lines], key[order], owner[order])


Side = tuple[str, str]
"""Name of a tensor, and the axis of its lines."""


def _votes(a: _LineTable, b: _LineTable) -> Counter[tuple[Side, Side]]:
    """Return how many lines each tensor along each axis shares with each of the other side."""
    keys = np.intersect1d(a.keys, b.keys)
    found: Counter[tuple[Side, Side]] = Counter()
    first_a, count_a = _runs(a.keys, keys)
    first_b, count_b = _runs(b.keys, keys)
    many = np.uint64(2 * len(b.names))
    telling = (count_a <= MOST_OWNERS) & (count_b <= MOST_OWNERS)
    for i in range(MOST_OWNERS):
        for j in range(MOST_OWNERS):
            here = telling & (count_a > i) & (count_b > j)
            codes = a.owners[first_a[here] + i] * many + b.owners[first_b[here] + j]
            for code, votes in zip(*(each.tolist() for each in np.unique(codes, return_counts=True)), strict=True):
                one, other = divmod(code, int(many))
                found[_side(a, one), _side(b, other)] += votes
    return found


def _runs(keys: Words, wanted: Words) -> tuple[np.ndarray, np.ndarray]:
    first = np.searchsorted(keys, wanted, "left")
    return first, np.searchsorted(keys, wanted, "right") - first


def _side(table: _LineTable, owner: int) -> Side:
    number, axis = divmod(int(owner), 2)
    return table.names[number], AXES[axis]


def _along(
    votes: Counter[tuple[Side, Side]], lines: Mapping[str, Lines]
) -> tuple[list[tuple[str, str]], dict[str, str], dict[str, str]]:
    """Return which tensors belong together, and along which axis each one's lines are: where most elements agree."""
    axis_a: dict[str, str] = {}
    axis_b: dict[str, str] = {}
    edges = []
    covered = {sides: times * lines[sides[0][0]].length(sides[0][1]) for sides, times in votes.items()}
    for (one, ax), (other, bx) in sorted(covered, key=covered.__getitem__, reverse=True):
        if axis_a.get(one, ax) == ax and axis_b.get(other, bx) == bx:
            axis_a[one], axis_b[other] = ax, bx
            edges.append((one, other))
    return edges, axis_a, axis_b


def _connected(edges: Sequence[tuple[str, str]]) -> Iterator[tuple[set[str], set[str]]]:
    near: defaultdict[tuple[int, str], set[tuple[int, str]]] = defaultdict(set)
    for one, other in edges:
        near[0, one].add((1, other))
        near[1, other].add((0, one))
    seen: set[tuple[int, str]] = set()
    for start in near:
        if start in seen:
            continue
        found, waiting = set(), [start]
        while waiting:
            node = waiting.pop()
            if node not in found:
                found.add(node)
                waiting += near[node]
        seen |= found
        yield {name for side, name in found if side == 0}, {name for side, name in found if side == 1}


def group_of(sides: Sides, lines_a: Mapping[str, Lines], lines_b: Mapping[str, Lines]) -> LineGroup:
    """Return the group of these tensors, its lines paired in order."""
    a, b = sides
    waiting: defaultdict[int, list[Line]] = defaultdict(list)
    for name in reversed([*b]):
        digests = lines_b[name].of(b[name]).tolist()
        for number in range(len(digests) - 1, -1, -1):
            waiting[digests[number]].append(Line(name, number))
    pairs, left = [], []
    length = next(lines_a[name].length(axis) for name, axis in a.items())
    zero, zeros_a = line_of_zeros(length), 0
    for name, axis in a.items():
        for number, digest in enumerate(lines_a[name].of(axis).tolist()):
            line = Line(name, number)
            if waiting[digest]:
                pairs.append((line, waiting[digest].pop()))
            elif digest == zero:
                zeros_a += 1
            else:
                left.append(line)
    zeros_b = len(waiting.pop(zero, ()))
    left_b = sorted(
        (line for lines in waiting.values() for line in lines), key=lambda line: ([*b].index(line.name), line.number)
    )
    return LineGroup(a, b, length, tuple(pairs), tuple(left), tuple(left_b), zeros_a, zeros_b)


def how_turned(a: Lines, b: Lines) -> str:
    """Return how two tensors with the same elements in another order correspond."""
    if a.length("rows") == b.length("columns") and np.array_equal(a.rows, b.columns):
        return "transposed"
    for turned, word in ((False, ""), (True, "transposed, ")):
        for axis, other in zip(AXES, reversed(AXES) if turned else AXES, strict=True):
            fits = a.of(axis).size > 1 and a.length(axis) > 1 and a.length(axis) == b.length(other)
            if fits and _same_lines(a.of(axis), b.of(other)):
                return f"{word}{axis} permuted"
    return "in another order"


def _same_lines(one: Words, other: Words) -> bool:
    return one.size == other.size and bool(np.array_equal(np.sort(one), np.sort(other)))
