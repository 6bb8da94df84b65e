"""Pair whole tensors of both sides by their additive digests, and constants by their values. No torch."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from hashbench.extensions.implementations.digest import matrices
from hashbench.extensions.implementations.dtypes import common_dtypes, rounded, unsigned
from hashbench.extensions.implementations.lines import how_turned
from hashbench.extensions.implementations.pool import Level, Pool
from hashbench.extensions.implementations.verdict import WeightsMatch


def match_constants(a: Pool, b: Pool) -> tuple[int, int]:
    """Take the constants whose value is that of a constant of the other side; return how many of both sides."""
    taken = []
    for one, other in ((a, b), (b, a)):
        kinds = {(other.dtype(name), value) for name, value in other.constants.items()}
        taken.append(
            [
                name
                for name, value in one.constants.items()
                if any(_is_same(one.dtype(name), value, dtype, their) for dtype, their in kinds)
            ]
        )
    return len(a.take(taken[0])), len(b.take(taken[1]))


def _is_same(dtype: str, value: int, other: str, their: int) -> bool:
    return any(
        rounded(np.array([value], unsigned(dtype)), dtype, common)[0]
        == rounded(np.array([their], unsigned(other)), other, common)[0]
        for common in common_dtypes(dtype, other)
    )


def match_whole(a: Pool, b: Pool, level: Level) -> list[WeightsMatch]:
    """Take the tensors that have the same elements as one of the other side, in whatever order."""
    keyed_a, keyed_b = _keyed(a, level.a, level.common), _keyed(b, level.b, level.common)
    found = []
    for key, names_a in keyed_a.items():
        names_b = keyed_b.get(key, [])
        if not names_b or (level.rounded and not _is_rounded(a, b, names_a[0], names_b[0], level.common)):
            continue
        one, other = _first_pair(a, b, names_a, names_b, level.common)
        match = WeightsMatch(
            kind="same" if len(names_a) == len(names_b) == 1 else "tied",
            a=(one, *(name for name in names_a if name != one)),
            b=(other, *(name for name in names_b if name != other)),
            how=_how(a, b, one, other, level.common),
            cast=level.cast,
        )
        a.take(names_a)
        b.take(names_b)
        found.append(match)
    return found


def _keyed(pool: Pool, dtype: str, common: str) -> dict[tuple[int, int], list[str]]:
    found: defaultdict[tuple[int, int], list[str]] = defaultdict(list)
    for name in pool.candidates(dtype):
        digest = pool.digest(name, common)
        found[digest.count, digest.additive].append(name)
    return dict(found)


def _is_rounded(a: Pool, b: Pool, one: str, other: str, common: str) -> bool:
    return a.went_through(one, common) != b.went_through(other, common)


def _first_pair(a: Pool, b: Pool, names_a: list[str], names_b: list[str], common: str) -> tuple[str, str]:
    """Return the pair to describe: with the same name, else with the same order of elements."""
    for one in names_a:
        if one in names_b:
            return one, one
    for one in names_a:
        for other in names_b:
            if a.digest(one, common).positional == b.digest(other, common).positional:
                return one, other
    return names_a[0], names_b[0]


def _how(a: Pool, b: Pool, one: str, other: str, common: str) -> str:
    """Return in which order the elements are; empty for the same."""
    shapes = [_bare(pool.tensors.headers[name].shape) for pool, name in ((a, one), (b, other))]
    if a.digest(one, common).positional == b.digest(other, common).positional:
        return "" if shapes[0] == shapes[1] else "reshaped"
    if any(matrices(shape)[1] == 1 for shape in shapes):
        return "in another order"
    return how_turned(a.lines(one, common), b.lines(other, common))


def _bare(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)
