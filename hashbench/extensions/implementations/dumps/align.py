"""Align two dumps by what their tensors hold, and find the first tensor of a side without a partner. No torch."""

from __future__ import annotations

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hashbench.extensions.implementations.digest import TensorHeader
from hashbench.extensions.implementations.dumps.sketch import Doubles, Sketch

NEAR = 6
"""Parts of a fused tensor stand among so many tensors without a partner, one after another."""


CANDIDATES = 16
"""Different contents whose rows are compared with those of a tensor: the ones with the nearest moments."""


@dataclass(frozen=True, slots=True)
class Partner:
    """What a tensor corresponds to.

    Attributes:
        places: of the tensors of the other side that hold the same, the surest first; of the parts if ``fused``.
        how: ``bit by bit``, ``rows``, ``sums``, ``fused`` (of several of the other side), ``part`` (of one).
        distance: of the moments, relative to the sums of magnitudes.
    """

    places: tuple[int, ...]
    how: str
    distance: float


WAYS = ("bit by bit", "rows", "sums")
"""By what two tensors hold the same, the surest first."""

Partners = Mapping[int, Partner]
"""Place of a tensor in its dump -> its partner."""


@dataclass(frozen=True, slots=True)
class First:
    """The first tensor of a side without a partner.

    Attributes:
        place: its place.
        before: place of the last tensor before it that has one and that is not seen earlier; ``None``: there is none.
        usual: largest distance of the pairs before it.
        again: tensors behind it that hold something new and have a partner.
        nearest: distance and place of the tensor of the other side that is most like it; ``None``: no candidate.
    """

    place: int
    before: int | None
    usual: float
    again: int
    nearest: tuple[float, int] | None


def align(a: Sequence[Sketch], b: Sequence[Sketch], tolerance: float) -> tuple[Partners, Partners]:
    """Return the partners of the tensors of each side; steps correspond where both sides have the same ones.

    Args:
        a, b: both sides in order.
        tolerance: relative, of moments.
    """
    of_a, of_b = dict[int, Partner](), dict[int, Partner]()
    for ours, theirs in _steps(a, b):
        _wholes(a, b, ours, theirs, tolerance, of_a, of_b)
        left_a, left_b = ([i for i in places if i not in of] for places, of in ((ours, of_a), (theirs, of_b)))
        _fused(a, b, left_a, left_b, tolerance, of_a, of_b)
        _fused(b, a, left_b, left_a, tolerance, of_b, of_a)
    return of_a, of_b


def _steps(a: Sequence[Sketch], b: Sequence[Sketch]) -> Iterator[tuple[list[int], list[int]]]:
    groups = [defaultdict[int | None, list[int]](list) for _ in range(2)]
    for side, group in zip((a, b), groups, strict=True):
        for place, each in enumerate(side):
            group[each.step].append(place)
    if groups[0].keys() == groups[1].keys():
        yield from ((groups[0][step], groups[1][step]) for step in groups[0])
    else:
        yield list(range(len(a))), list(range(len(b)))


def distances(one: Sketch, others: Sequence[Sketch]) -> Doubles:
    """Return how far the moments of a tensor are from those of others; infinite where other elements are special."""
    sums, sizes = _table(others)
    return _apart(one, sums, sizes, np.array([each.moments.special for each in others]))


def _table(sketches: Sequence[Sketch]) -> tuple[Doubles, Doubles]:
    shape = (len(sketches), 4)
    sums = np.array([each.moments.sums for each in sketches]).reshape(shape)
    return sums, np.array([each.moments.sizes for each in sketches]).reshape(shape)


def _apart(one: Sketch, sums: Doubles, sizes: Doubles, special: np.ndarray) -> Doubles:
    both = np.array(one.moments.sizes) + sizes
    ratio = np.abs(np.array(one.moments.sums) - sums) / np.where(both > 0, both, 1.0)
    found: Doubles = np.where(special == one.moments.special, ratio.max(-1, initial=0.0), np.inf)
    return found


def _wholes(
    a: Sequence[Sketch], b: Sequence[Sketch], ours: list[int], theirs: list[int], tolerance: float,
    of_a: dict[int, Partner], of_b: dict[int, Partner],
) -> None:  # fmt: skip
    """Add the partners that are one tensor."""
    others = [a[place] for place in ours]
    sums, sizes = _table(others)
    special = np.array([each.moments.special for each in others])
    for place in theirs:
        apart = _apart(b[place], sums, sizes, special)
        found, seen = [], dict[tuple[int, TensorHeader], tuple[str, float]]()
        for near in np.argsort(apart, kind="stable"):
            kind = others[near].digest, others[near].header
            if not apart[near] <= tolerance or (kind not in seen and len(seen) == CANDIDATES):
                break
            how, rows_apart = seen.setdefault(kind, seen.get(kind) or _how(others[near], b[place], tolerance))
            if how:
                found.append((WAYS.index(how), max(rows_apart, float(apart[near])), ours[near], how))
        found.sort()
        found = [each for each in found if each[3] == found[0][3]]
        if found:
            (_, distance, _, how) = found[0]
            of_b[place] = Partner(tuple(each[2] for each in found), how, distance)
        for _, distance, other, how in found:
            known = of_a.get(other)
            if known is None or (known.how, known.distance) != (how, distance):
                of_a[other] = Partner((*(known.places if known else ()), place), how, distance)


def _how(a: Sketch, b: Sketch, tolerance: float) -> tuple[str, float]:
    """Return by what two tensors hold the same, and how far rows are apart; ``""`` if they do not."""
    if (a.digest, a.header.dtype, a.header.count) == (b.digest, b.header.dtype, b.header.count):
        return "bit by bit", 0.0
    apart = _rows_apart(a.rows, b.rows, (_width(a), _width(b)))
    if apart is None or (apart > tolerance and _width(a) != _width(b)):
        return ("sums" if a.header.count == b.header.count else ""), 0.0
    return ("rows" if apart <= tolerance else ""), apart


def _width(sketch: Sketch) -> int:
    return sketch.header.shape[-1] if sketch.header.shape else 1


def _rows_apart(a: Doubles | None, b: Doubles | None, widths: tuple[int, int]) -> float | None:
    """Return how far the rows of two tensors are apart, in their order or sorted; ``None``: they cannot be compared.

    It is half of the largest difference of a row, or four times the mean: rounding is far smaller in most rows.
    """
    narrow, wide = sorted(widths)
    if (
        a is None
        or b is None
        or wide % narrow
        or any(len(x) % (wide // w) for x, w in zip((a, b), widths, strict=True))
    ):
        return None
    a, b = (rows.reshape(-1, wide // width, 8).sum(1) for rows, width in zip((a, b), widths, strict=True))
    a, b = a[a[:, 5] > 0], b[b[:, 5] > 0]  # without padding
    if len(a) != len(b):
        return np.inf if narrow == wide else None
    if not len(a):
        return 0.0
    one, other = _features(a), _features(b)
    apart = [np.abs(x - y) for x, y in ((one, other), (np.sort(one, 0), np.sort(other, 0)))]
    return min(max(float(each.max()) / 2, float(each.mean()) * 4) for each in apart)


def _features(rows: Doubles) -> Doubles:
    """Return what an error of the elements changes by as much: sums over magnitudes, and half the log of that of x².

    A small row has the error of a usual one, as where large terms cancelled.
    """
    usual = rows[:, 4:].mean(0)
    odd = rows[:, [0, 2, 3]] / (rows[:, [4, 6, 7]] + usual[[0, 2, 3]])
    found: Doubles = np.concatenate([odd, np.log(rows[:, 1:2] + usual[1]) / 2], -1)
    return found


def _fused(
    parts: Sequence[Sketch], wholes: Sequence[Sketch], left: list[int], left_wholes: list[int], tolerance: float,
    of_parts: dict[int, Partner], of_wholes: dict[int, Partner],
) -> None:  # fmt: skip
    """Add the tensors of ``wholes`` that are made of two or three of ``parts``."""
    chosen = [each for each in _near(left) if len(each) > 1]
    if not chosen:
        return
    sums, sizes = (np.array([table[list(each)].sum(0) for each in chosen]) for table in _table(parts))
    special = np.array([sum(parts[place].moments.special for place in each) for each in chosen])
    counts = np.array([sum(parts[place].header.count for place in each) for each in chosen])
    for place in left_wholes:
        apart = np.where(counts == wholes[place].header.count, _apart(wholes[place], sums, sizes, special), np.inf)
        for near in np.argsort(apart, kind="stable"):
            if not apart[near] <= tolerance:
                break
            if _is_fused([parts[part] for part in chosen[near]], wholes[place], tolerance):
                of_wholes[place] = Partner(chosen[near], "fused", float(apart[near]))
                for part in chosen[near]:
                    of_parts[part] = Partner((place,), "part", float(apart[near]))
                break


def _near(places: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield one, two and three places that are near each other."""
    for at, first in enumerate(places):
        for number in range(3):
            yield from ((first, *more) for more in itertools.combinations(places[at + 1 : at + NEAR], number))


def _is_fused(parts: Sequence[Sketch], whole: Sketch, tolerance: float) -> bool:
    """Return whether the rows of a tensor are those of its parts, side by side or one after another."""
    rows = [each.rows for each in parts if each.rows is not None]
    if whole.rows is None or len(rows) < len(parts):
        return False
    widths = [_width(each) for each in parts]
    if sum(widths) == _width(whole) and {len(each) for each in rows} == {len(whole.rows)}:
        made = np.sum(rows, axis=0)
    elif set(widths) == {_width(whole)}:
        made = np.concatenate(rows)
    else:
        return False
    apart = _rows_apart(made, whole.rows, (_width(whole), _width(whole)))
    return apart is not None and apart <= tolerance


def fresh(side: Sequence[Sketch]) -> list[int]:
    """Return the places of tensors that hold something new: not all the same, and not seen before."""
    first = {each.digest: place for place, each in reversed([*enumerate(side)])}
    return [place for place, each in enumerate(side) if not each.constant and first[each.digest] == place]


def first_without(
    own: Sequence[Sketch], other: Sequence[Sketch], of_own: Partners, of_other: Partners, ordered: tuple[bool, bool]
) -> First | None:
    """Return the first tensor that has no partner though the other side has a tensor without one in its place.

    Where the other side has none there, it did not dump that tensor. What lacks a partner in several layers, each time
    with partners behind it, is another tensor than the other side dumped.

    Args:
        own, other: the sides; the first tensor is one of ``own``.
        of_own, of_other: partners of their tensors.
        ordered: whether each of them is in the order of calls. If the other one is not, every place of it is looked at.
    """
    anchors = [place for place in fresh(own) if place in of_own]
    alone = [place for place in range(len(own)) if place not in of_own]
    missing = []
    for place in alone:
        before, after = [each for each in anchors if each < place], [each for each in anchors if each > place]
        low = min(of_own[before[-1]].places) if before and all(ordered) else -1
        high = max(of_own[after[0]].places) if after and all(ordered) else len(other)
        free = [each for each in range(low + 1, high) if each not in of_other]
        near = alone[max(0, alone.index(place) - NEAR) :][: 2 * NEAR]
        if free and _fits(own[place].header.count, own, near, other, free):
            missing.append((place, before, after))
    with_partner = {_template(own[place].name) for place in of_own}
    usual = Counter(_template(own[place].name) for place, _, after in missing if after)
    if ordered == (True, False):  # the surest are those behind all that agrees
        missing.sort(key=lambda each: len(each[2]))
    for place, before, after in missing:
        kind = _template(own[place].name)
        if not after or usual[kind] < 2 or kind in with_partner:
            nearest = _nearest(own[place], other, of_other)
            largest = max((of_own[each].distance for each in before), default=0.0)
            return First(place, before[-1] if before else None, largest, len(after), nearest)
    return None


def _fits(count: int, own: Sequence[Sketch], near: Sequence[int], other: Sequence[Sketch], free: Sequence[int]) -> bool:
    """Return whether one to three tensors of the other side have as many elements as this one, or it with others."""
    theirs = {sum(other[each].header.count for each in places) for places in _near(free)}
    if count in theirs:
        return True
    sums = (
        sum(own[each].header.count for each in places)
        for places in _near(near)
        if count in (own[p].header.count for p in places)
    )
    return not theirs.isdisjoint(sums)


def _template(name: str) -> str:
    return re.sub(r"\d+", "#", name)


def _nearest(one: Sketch, other: Sequence[Sketch], of_other: Partners) -> tuple[float, int] | None:
    """Return the tensor of as many elements that is most like this one; those without a partner first."""
    sized = [place for place, each in enumerate(other) if each.header.count == one.header.count]
    sized = [place for place in sized if place not in of_other] or sized
    apart = distances(one, [other[place] for place in sized])
    rows = [_rows_apart(one.rows, other[place].rows, (_width(one), _width(other[place]))) or 0.0 for place in sized]
    return min(zip(np.maximum(apart, rows).tolist(), sized, strict=True), default=None)
