"""Lost elements of a sum: an error that is the sum of some of the terms, or of all before a block's border."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from hashbench.core.run.rounding import NEAR
from hashbench.extensions.kernels.misses import Index, Misses, number
from hashbench.extensions.kernels.slices import Axis, Indices, axis_of, words_for

_MOST_TERMS = 1 << 19
"""Terms that are looked at; of fewer wrong elements where a sum is long."""

_ONE_BY_ONE = 64
"""Wrong elements of which each error must be made of terms."""

_TOGETHER = 1024
"""Wrong elements of which a regression is made."""

_FOUND = 0.95
"""Share of the wrong elements whose error the lost terms must be."""

_EXPLAINED = 0.5
"""Share of the squares of the errors that terms found by regression must explain."""

_FEWEST = 64
"""Elements from which on a regression counts: of fewer, some of many groups of terms fits by chance."""

_CHANCE = 1e-2
"""Probability with which a term may be the error of a single element by chance."""

_BLOCKS = (8, 16, 32, 64, 128, 256, 512, 1024)

_LINES = 128
"""Lines of a result that are looked at for jumps."""

_MOST_JUMPS = 0.35
"""Share of the places along a dimension at which the error of a scan may jump."""


@dataclass(frozen=True, slots=True)
class _Sum:
    """The terms of a sum: of wrong elements (rows) by position in it (columns)."""

    words: str
    terms: torch.Tensor


def lost_elements(miss: Misses, inputs: Mapping[str, torch.Tensor]) -> str:
    """Return which elements of a sum are lost, or counted twice; empty if the error is not made of terms.

    Sums that are known: of an input over a dimension, its mean, sum of squares and of magnitudes; matrix products of
    two inputs; and the products of two inputs, summed over a dimension.
    """
    if miss.value.is_complex() or not bool(miss.finite.any()):
        return ""
    at = miss.some(_ONE_BY_ONE)
    for made in _sums(miss, _numbers(inputs), at):
        found = _lost_of(miss, at, made)
        if found:
            return found
    return ""


def _numbers(inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().to("cpu") for name, tensor in inputs.items() if _is_number(tensor)}


def _is_number(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_complex() and not tensor.is_quantized and tensor.dim() > 0


def lost_on_average(miss: Misses, inputs: Mapping[str, torch.Tensor]) -> str:
    """Return the same where rounding hides it in each element: what is lost is told by regression on all of them."""
    if miss.value.is_complex() or int(miss.finite.sum()) < _FEWEST:
        return ""
    at = miss.some(_TOGETHER)
    for made in _sums(miss, _numbers(inputs), at):
        if found := _regressed(miss, at, made):
            return found
    return ""


def _regressed(miss: Misses, at: Index, made: _Sum) -> str:
    count, length = made.terms.shape
    index = _chosen(at, length)
    error, unit = miss.error[index].reshape(-1), miss.unit[index].reshape(-1)
    weight = 1 / (unit.square() + unit.square().mean() + 1e-300)
    total = float((weight * error.square()).sum())
    best = (0.0, "")
    all_terms = made.terms.sum(1)
    if float((weight * error * all_terms).sum().square() / (weight * all_terms.square()).sum()) > 0.9 * total:
        return ""  # it is scaled
    for sums, places in _groups(made.terms):
        squares = (weight[:, None] * sums.square()).sum(0).clamp_min(1e-300)
        slope = (weight * error) @ sums / squares
        gain = slope.square() * squares  # what it explains of the sum of squares
        spread = ((total - gain).clamp_min(0) / count / squares).sqrt()
        for sign, verb in ((-1.0, "lacks"), (1.0, "counts twice")):
            alike = ((slope - sign).abs() <= 0.15 + 3 * spread) & (spread < 0.2)
            if places.block == 1 and int(alike.sum()) > 1:
                if found := _several(error, sums, weight, alike, sign, total):
                    best = max(best, (found[0], f"{made.words} {verb} {_named(found[1], length)}"))
            elif bool(alike.any()):
                group = int(torch.where(alike, gain, 0.0).argmax())
                if len(places(group)) < length:
                    best = max(best, (float(gain[group]), f"{made.words} {verb} {_named(places(group), length)}"))
    left = (total - best[0]) / count  # in squares of units: rounding explains it
    return best[1] if best[0] > _EXPLAINED * total and left < NEAR**2 and count >= _FEWEST else ""


def _several(
    error: torch.Tensor, terms: torch.Tensor, weight: torch.Tensor, alike: torch.Tensor, sign: float, total: float
) -> tuple[float, Indices] | None:
    """Return what several terms explain together, and which they are; ``None`` if they are not lost together."""
    places = alike.nonzero()[:, 0]
    if 4 * len(places) > len(error) or 2 * len(places) > len(alike):
        return None
    root = weight.sqrt()
    for _ in range(2):  # those that only correlate with others drop out
        slopes = torch.linalg.lstsq(terms[:, places] * root[:, None], (error * root)[:, None]).solution[:, 0]
        near = (slopes - sign).abs() <= 0.25
        if bool(near.all()) or not bool(near.any()):
            break
        places = places[near]
    if not bool(near.all()):
        return None
    left = error - sign * terms[:, places].sum(1)
    return total - float((weight * left.square()).sum()), places.numpy()


def _named(places: Indices, length: int) -> str:
    return words_for(places, Axis(length, "element")).text


def _chosen(at: Index, length: int) -> Index:
    most = max(_MOST_TERMS // length, 16)
    return tuple(index[:: max(-(-len(index) // most), 1)] for index in at)


def _sums(miss: Misses, inputs: Mapping[str, torch.Tensor], at: Index) -> Iterator[_Sum]:
    shape = tuple(miss.value.shape)
    for name, tensor in inputs.items():
        for dim, size in enumerate(tensor.shape):
            kept = (*tensor.shape[:dim], *tensor.shape[dim + 1 :])
            if size > 1 and shape in (kept, (*tensor.shape[:dim], 1, *tensor.shape[dim + 1 :])):
                index = _chosen(at, size)
                index = index if len(index) == len(kept) else (*index[:dim], *index[dim + 1 :])
                terms = tensor.movedim(dim, -1)[index].double() if kept else tensor.double()[None]
                for what, made in (("", terms), ("the square of ", terms.square()), ("the magnitude of ", terms.abs())):
                    yield _Sum(f"the sum of {what}{name} over dimension {dim}", made)
                yield _Sum(f"the mean of {name} over dimension {dim}", terms / size)
    for one, other in itertools.permutations(inputs, 2):
        yield from _products(shape, one, inputs[one], other, inputs[other], at)


def _products(
    shape: tuple[int, ...], one: str, a: torch.Tensor, other: str, b: torch.Tensor, at: Index
) -> Iterator[_Sum]:
    """Yield the terms of ``a @ b`` and of ``a @ b.mT``, with and without leading dimensions."""
    if a.dim() < 2 or b.dim() < 2 or len(shape) < 2 or tuple(a.shape[:-1]) != shape[:-1]:
        return
    leading = tuple(b.shape[:-2])
    if leading not in ((), shape[:-2]):
        return
    for turned in (False, True):
        wide = b.mT if turned else b
        if wide.shape[-2] == a.shape[-1] and wide.shape[-1] == shape[-1] and a.shape[-1] > 1:
            index = _chosen(at, a.shape[-1])
            columns = wide.movedim(-1, len(leading))
            there = columns[(*index[:-2], index[-1])] if leading else columns[index[-1]]
            yield _Sum(f"the product of {one} and {other}", a[index[:-1]].double() * there.double())


def _lost_of(miss: Misses, at: Index, made: _Sum) -> str:
    length = made.terms.shape[1]
    index = _chosen(at, length)
    error, unit = (miss.error[index].reshape(-1), miss.unit[index].reshape(-1))
    for sign, verb in ((-1.0, "lacks"), (1.0, "counts twice")):
        wanted = sign * error
        everything = (wanted - made.terms.sum(1)).abs() <= NEAR * unit
        if float(everything.double().mean()) > 0.8:
            continue  # it is scaled
        for terms, places in _groups(made.terms):
            agree = (wanted[:, None] - terms).abs() <= NEAR * unit[:, None]
            share = agree.double().mean(0)
            best = int(share.argmax())
            if len(error) == 1 and len(share) * NEAR * float(unit) > _CHANCE * float(terms.std()):
                continue  # of so many terms one fits by chance
            # One group, or neighbours of it that add nothing, and not many by chance.
            if share[best] >= _FOUND and int((share >= _FOUND).sum()) <= max(len(share) // 16, 1):
                inside = places(best)
                if len(inside) == length:
                    continue
                return f"{made.words} {verb} {_named(inside, length)}"
    return ""


def _groups(terms: torch.Tensor) -> Iterator[tuple[torch.Tensor, _LostPlaces]]:
    """Yield sums of terms that may be lost, and which terms each column has: one, those from one on, those before one,
    a block."""
    length = terms.shape[1]
    yield terms, _LostPlaces(1, length)
    yield terms.flip(1).cumsum(1).flip(1)[:, 1:], _LostPlaces(0, length, behind=True)
    yield terms.cumsum(1)[:, :-1], _LostPlaces(0, length)
    for block in _BLOCKS:
        if block * 2 <= length:
            padded = torch.nn.functional.pad(terms, (0, -length % block))
            yield padded.view(len(terms), -1, block).sum(2), _LostPlaces(block, length)


@dataclass(frozen=True, slots=True)
class _LostPlaces:
    """The terms of a group by its number; ``block``: 0 for all up to it, or behind it."""

    block: int
    length: int
    behind: bool = False

    def __call__(self, group: int) -> Indices:
        if self.block:
            first, last = group * self.block, min((group + 1) * self.block, self.length)
        else:
            first, last = (group + 1, self.length) if self.behind else (0, group + 1)
        return torch.arange(first, last).numpy()


# ------------------------------------------------------------------------------------------------------------- scans


def lost_carry(miss: Misses) -> str:
    """Return at which places of a dimension the error jumps, if it is constant between a few of them: what a scan
    should have carried across them is lost, or counted twice. Empty if it is not so."""
    if miss.value.is_complex() or not bool((miss.value.isfinite() & miss.exact.isfinite()).all()):
        return ""
    for dim, size in enumerate(miss.value.shape):
        if size < 8 or miss.value.dim() == 0:
            continue
        axis = axis_of(tuple(miss.value.shape), dim)
        if found := _carry_along(_some_lines(miss, dim), axis):
            return found
    return ""


def _some_lines(miss: Misses, dim: int) -> Misses:
    """Return lines along a dimension, some of them, as columns of a matrix."""
    columns = miss.value.numel() // miss.value.shape[dim]
    step = max(columns // _LINES, 1)
    return miss.changed(lambda tensor: tensor.movedim(dim, 0).reshape(tensor.shape[dim], -1)[:, ::step])


def _carry_along(miss: Misses, axis: Axis) -> str:
    error, size = miss.error, axis.size
    step = error.diff(dim=0).abs()
    unit = torch.maximum(miss.unit[1:], miss.unit[:-1])
    across = (step > 2 * NEAR * unit).double().mean(1)
    places = (across > 0.5).nonzero()[:, 0] + 1
    if not len(places) or int((across > 0.02).sum()) != len(places):
        return ""
    first = int(places[0])
    if 2 * len(places) > size - first or len(places) > _MOST_JUMPS * size or not _starts_right(miss, first):
        return ""
    near = NEAR * (miss.unit[first - 1] + miss.unit[first])
    lost = float(((error[first] + miss.exact[first - 1]).abs() <= near).double().mean()) >= _FOUND
    what = "what comes before is lost there" if lost else f"by up to {number(float(error[first].abs().max()))}"
    return f"the error is constant between jumps at {words_for(places.numpy(), axis).text}: {what}"


def _starts_right(miss: Misses, place: int) -> bool:
    """Return whether nothing is wrong before the first jump, and nearly all is behind it."""
    return not bool(miss.wrong[:place].any()) and float(miss.wrong[place:].double().mean()) > 0.5


# ------------------------------------------------------------------------------------------ sums of rows by an index

_ROWS = 16
"""Wrong rows whose terms are looked at."""

_TERMS = 16
"""Largest number of terms of a row that are looked at."""


def lost_by_index(miss: Misses, inputs: Mapping[str, torch.Tensor]) -> str:
    """Return which rows are lost that an index adds up, as in the backward of an embedding: ``row 5 lacks input 0 at
    17``; or are added though they should not be, or twice. Empty if the errors of rows are not made of such terms."""
    if miss.value.dim() != 2 or miss.value.is_complex():
        return ""
    size, width = miss.value.shape
    numbers = _numbers(inputs)
    indices = {name: t.flatten() for name, t in numbers.items() if not t.is_floating_point() and t.dtype != torch.bool}
    values = {
        name: t.reshape(-1, width).double()
        for name, t in numbers.items()
        if t.is_floating_point() and t.shape[-1] == width
    }
    rows = (miss.finite.double().mean(1) > 0).nonzero()[:, 0][:_ROWS].tolist()
    for index_name, index in indices.items():
        for name, terms in values.items():
            if len(terms) != len(index) or not len(index) or int(index.max()) >= size:
                continue
            found = [(row, _added(miss, row, terms, index)) for row in rows]
            told = [(row, sign, places) for row, (sign, places) in found if sign]
            if len(told) >= 0.8 * len(found) and len({sign for _, sign, _ in told}) == 1:
                row, sign, places = told[0]
                verb = "lacks" if sign < 0 else "has once too often"
                which = ", ".join(map(str, places[:4]))
                return f"row {row} {verb} {name} at {which}, where {index_name} names it"
    return ""


def _added(miss: Misses, row: int, terms: torch.Tensor, index: torch.Tensor) -> tuple[int, list[int]]:
    """Return -1 and the terms that a row lacks, or 1 and those that it has too often; 0 if its error is not of them."""
    places = (index == row).nonzero()[:, 0]
    among = miss.value[row].isfinite() & miss.exact[row].isfinite()
    if not len(places) or len(places) > _TERMS or int(among.sum()) < len(places) + 4:
        return 0, []
    error, unit = miss.error[row][among], miss.unit[row][among]
    slopes = torch.linalg.lstsq(terms[places][:, among].T, error[:, None]).solution[:, 0].round()
    left = (error - slopes @ terms[places][:, among]).abs()
    if not bool(slopes.any()) or float((left <= 2 * NEAR * unit).double().mean()) < 0.9:
        return 0, []
    signs = {int(slope) for slope in slopes.tolist() if slope}
    return (signs.pop(), places[slopes != 0].tolist()) if signs in ({-1}, {1}) else (0, [])
