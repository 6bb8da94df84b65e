"""What is left once all that is equal was taken: which two tensors should be equal, and what they differ in."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from hashbench.core.text import count, join_limited
from hashbench.extensions.implementations.dtypes import common_dtypes, rounded
from hashbench.extensions.implementations.lines import Line
from hashbench.extensions.implementations.located import ComparedElements, compare_lines, compare_whole
from hashbench.extensions.implementations.names import ExpectedNames, Pairs, split
from hashbench.extensions.implementations.pool import Pool
from hashbench.extensions.implementations.settled import difference_of
from hashbench.extensions.implementations.verdict import Names, WeightsDifference, WeightsMatch

SAMPLED = 4096
"""Elements by which the most similar tensor is chosen, where several have the same number of elements."""

ALIKE = 0.25
"""Least share of these that must be equal."""

MOST_COMPARED = 4096
"""Pairs of tensors of one size that are compared by these, at most."""


class Rest:
    """Tensors without partner, and what is found of them.

    Attributes:
        differences: what differs.
        unknown: what could not be compared, in sentences.
    """

    def __init__(self, a: Pool, b: Pool, pairs: Pairs, matches: Sequence[WeightsMatch]) -> None:
        self._a, self._b = a, b
        self._there = ExpectedNames.of(pairs, b.tensors.headers)
        self._here = ExpectedNames.of([(other, one) for one, other in pairs], a.tensors.headers)
        self._holder_b = {name: match.a for match in matches for name in match.b}
        self._holder_a = {name: match.b for match in matches for name in match.a}
        self.differences: list[WeightsDifference] = []
        self.unknown: list[str] = []
        self._by_name()
        self._by_size()
        self._by_sum()
        self._alone()
        self._constants("a", a, "b")
        self._constants("b", b, "a")

    def _by_name(self) -> None:
        """Compare what names expect to be equal; several tensors may be expected in one, so these come first."""
        fused, cut = defaultdict(list), defaultdict(list)
        for one in self._a.left:
            if (other := self._there.name(one)) in self._b.left:
                fused[other].append(one)
        for other in self._b.left:
            if (one := self._here.name(other)) in self._a.left:
                cut[one].append(other)
        expected: list[tuple[Names, Names]] = [(tuple(ours), (other,)) for other, ours in fused.items()]
        expected += [((one,), tuple(theirs)) for one, theirs in cut.items()]
        for ours, theirs in sorted(expected, key=lambda sides: -len(sides[0]) - len(sides[1])):
            if self._are_left(ours, theirs) and len(ours) + len(theirs) > 2:
                self._parts(ours, theirs)
        pairs = [(one, other) for ours, theirs in expected for one in ours for other in theirs]
        for same_count in (True, False):
            for one, other in pairs:
                fits = self._a.count(one) == self._b.count(other) or not same_count
                if fits and self._are_left((one,), (other,)):
                    self._unequal(one, other)

    def _are_left(self, ours: Names, theirs: Names) -> bool:
        return all(name in self._a.left for name in ours) and all(name in self._b.left for name in theirs)

    def _parts(self, ours: Names, theirs: Names) -> None:
        """Say that no part of a fused or cut tensor is what it should be."""
        self._a.take(ours)
        self._b.take(theirs)
        text = f"no row or column of {'them' if len(ours) > 1 else 'it'} is in b"
        self.differences.append(WeightsDifference(kind="changed", a=ours, b=theirs, text=text))

    def _by_size(self) -> None:
        """Compare tensors of one shape: the only ones of it, or the most similar ones."""
        shapes: defaultdict[tuple[int, ...], tuple[list[str], list[str]]] = defaultdict(lambda: ([], []))
        for side, pool in enumerate((self._a, self._b)):
            for name in pool.left:
                if name not in pool.constants:
                    shapes[tuple(sorted(pool.tensors.headers[name].shape))][side].append(name)
        for ours, theirs in shapes.values():
            alike = [(self._alike(one, other), one, other) for one in ours for other in theirs][:MOST_COMPARED]
            for share, one, other in sorted(alike, reverse=True):
                if share >= ALIKE and one in self._a.left and other in self._b.left:
                    self._unequal(one, other)
            ours = [name for name in ours if name in self._a.left]
            theirs = [name for name in theirs if name in self._b.left]
            if len(ours) == len(theirs) == 1:
                self._unequal(ours[0], theirs[0])

    def _by_sum(self) -> None:
        """Compare a tensor with all that are left of one kind on the other side, if these have as many elements."""
        for whole_is_b, pool, other in ((True, self._b, self._a), (False, self._a, self._b)):
            for whole in [name for name in pool.left if name not in pool.constants]:
                kinds = defaultdict(list)
                for name in other.left:
                    kinds[split(name)[0]].append(name)
                fitting = [names for names in kinds.values() if sum(map(other.count, names)) == pool.count(whole)]
                if len(fitting) == 1 and len(fitting[0]) > 1:
                    parts = tuple(fitting[0])
                    self._parts(*((parts, (whole,)) if whole_is_b else ((whole,), parts)))

    def _alike(self, one: str, other: str) -> float:
        """Return the share of the first elements that are equal."""
        common = common_dtypes(self._a.dtype(one), self._b.dtype(other))
        size = min(SAMPLED, self._a.count(one))
        if not common:
            return 0.0
        first, second = (
            rounded(pool.tensors.read(name, 0, size), pool.dtype(name), common[0])
            for pool, name in ((self._a, one), (self._b, other))
        )
        return float(np.mean(first == second))

    def _unequal(self, one: str, other: str) -> None:
        """Say in what two tensors differ that should be equal."""
        ours, theirs = (pool.tensors.headers[name] for pool, name in ((self._a, one), (self._b, other)))
        taken = self._a.take([one]), self._b.take([other])
        if not common_dtypes(ours.dtype, theirs.dtype):
            self.unknown.append(f"{one} is {ours} in a, {other} {theirs} in b: such dtypes are not compared.")
        elif ours.count != theirs.count:
            text = f"{ours} in a, {theirs} in b"
            self.differences.append(WeightsDifference(kind="changed", a=taken[0], b=taken[1], text=text))
        else:
            self.differences.append(difference_of(one, other, self._compared(one, other)))

    def _compared(self, one: str, other: str) -> ComparedElements:
        shapes = [tuple(size for size in pool.tensors.headers[name].shape if size > 1)
                  for pool, name in ((self._a, one), (self._b, other))]  # fmt: skip
        if len(shapes[0]) != 2 or shapes[0] == shapes[1] or shapes[0] != shapes[1][::-1]:
            return compare_whole(self._a.tensors, self._b.tensors, one, other)
        common = common_dtypes(self._a.dtype(one), self._b.dtype(other))[0]
        ours, theirs = self._a.lines(one, common), self._b.lines(other, common)
        pairs = [(Line(one, number), Line(other, number)) for number in range(shapes[0][0])]
        return compare_lines((self._a.tensors, ours, "rows"), (self._b.tensors, theirs, "columns"), pairs)

    def _alone(self) -> None:
        """Say which tensors one side alone has; of dtypes that cannot be compared nothing is known."""
        kinds = {id(pool): {pool.dtype(name) for name in pool.left} for pool in (self._a, self._b)}
        for side, pool, other, expected, holders in (
            ("a", self._a, self._b, self._there, self._holder_b),
            ("b", self._b, self._a, self._here, self._holder_a),
        ):
            strange = []
            for name in [name for name in pool.left if name not in pool.constants]:
                pool.take([name])
                if any(not common_dtypes(pool.dtype(name), dtype) for dtype in kinds[id(other)]):
                    strange.append(name)
                else:
                    self.differences.append(_missing(side, name, expected.name(name), holders))
            if strange:
                what = f"{count(len(strange), 'tensor')} of {side} may be there in another dtype"
                self.unknown.append(f"{what}, which is not compared: {join_limited(strange, 2)}.")

    def _constants(self, side: str, pool: Pool, other: str) -> None:
        if pool.left:
            names = join_limited([*pool.left], 2)
            self.unknown.append(
                f"{count(len(pool.left), 'tensor')} of one repeated value of {side} ({names}) "
                f"{'has' if len(pool.left) == 1 else 'have'} no counterpart in {other}: a value says nothing of a name."
            )


def _missing(side: str, name: str, expected: str, holders: dict[str, Names]) -> WeightsDifference:
    """Return that one side alone has a tensor; where it is expected on the other, another one may stand."""
    other = "b" if side == "a" else "a"
    ours, theirs = ((name,), (expected,)) if side == "a" else ((expected,), (name,))
    if expected and expected in holders:
        text = f"{other} has there what is {' and '.join(holders[expected][:2])} in {side}"
        return WeightsDifference(kind="copy", a=ours, b=theirs, text=text)
    alone: tuple[Names, Names] = ((name,), ()) if side == "a" else ((), (name,))
    return WeightsDifference(kind="missing", a=alone[0], b=alone[1], text=f"{other} has no tensor with its elements")
