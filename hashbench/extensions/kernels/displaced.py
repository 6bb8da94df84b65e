"""Right values at other places: rows or elements of a result that are those of another row or element."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping

import torch

from hashbench.core.run.rounding import NEAR
from hashbench.extensions.kernels.misses import Index, Misses
from hashbench.extensions.kernels.slices import axis_of

_SAMPLE = 2048
"""Wrong elements that are looked for elsewhere."""

_FOUND = 0.95
"""Share of them that must be at the place that is supposed."""

_BY_CHANCE = 0.5
"""Largest share of them that may also agree with a place drawn at random."""

_SLICES = 12
"""Wrong rows that are looked for among all rows."""

_MOST_SORTED = 1 << 18
"""Elements of a result among which single values are looked for."""

_POSITIONS = 64
"""Elements that two rows are compared by."""

_SHIFTS = (1, 2, 3, 4, 8, 16, 32, 64, 128, 256)

Source = Callable[[Index], Index]
"""From where the value of an element came, by index."""


def displacement(miss: Misses) -> str:
    """Return where the values of the wrong elements belong, ``by 1 along dimension 0``; empty if that is not so."""
    sample = _sample(miss)
    if sample is None:
        return ""
    for words, source in _suppositions(miss.value.shape):
        if sample.came_from(source):
            return words
    return _slices(miss) or (sample.elsewhere() if miss.got.dtype in (torch.float32, torch.float64) else "")


def moved_input(miss: Misses, inputs: Mapping[str, torch.Tensor]) -> str:
    """Return which input the kernel seems to have read at other places, if the error is the difference that makes in a
    sum: ``input 1 is read so that its last two dimensions are transposed``; empty if it is not so."""
    index = miss.some(_SAMPLE)
    if miss.value.is_complex() or not index or len(index[0]) < 8:
        return ""
    error, unit = miss.error[index], miss.unit[index]
    for name, tensor in inputs.items():
        if tensor.shape != miss.value.shape or not tensor.is_floating_point():
            continue
        values = tensor.detach().to("cpu", torch.float64)
        for words, source in _suppositions(miss.value.shape):
            there = source(index)
            known = _exist(there, miss.value.shape)
            from_there = tuple(part[known] for part in there)
            left = error[known] - (values[from_there] - values[index][known])
            if float((left.abs() <= NEAR * unit[known]).sum()) >= _FOUND * len(error):
                return f"{name} is read at other places: {words}"
    return ""


class _DisplacedSample:
    """Some wrong elements, with what was got there."""

    def __init__(self, miss: Misses, at: Index) -> None:
        self._miss, self._at = miss, at
        self._got = miss.value[at]
        generator = torch.Generator().manual_seed(1337)
        mixed = torch.randint(miss.value.numel(), (len(self._got),), generator=generator)
        anywhere = torch.unravel_index(mixed, miss.value.shape)
        self._chance = self._agree(anywhere)

    def _agree(self, source: Index) -> float:
        known = _exist(source, self._miss.exact.shape)
        source = tuple(index[known] for index in source)
        if int(known.sum()) < max(0.5 * len(known), 1):
            return 0.0
        apart = (self._got[known] - self._miss.exact[source]).abs()
        return float((apart <= NEAR * self._miss.unit[source]).double().mean())

    def came_from(self, source: Source) -> bool:
        """Return whether the elements are those at the places that ``source`` says."""
        return self._chance <= _BY_CHANCE and self._agree(source(self._at)) >= _FOUND

    def elsewhere(self) -> str:
        """Return where the first element is found, if nearly all are elements of the reference, and not by chance."""
        if self._got.is_complex() or len(self._got) < 8 or self._miss.exact.numel() > _MOST_SORTED:
            return ""
        ordered, order = self._miss.exact.flatten().sort()
        unit = self._miss.unit.flatten()[order]

        def found(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            behind = torch.searchsorted(ordered, values).clamp(max=len(ordered) - 1)
            before = (behind - 1).clamp_min(0)
            near = torch.where((ordered[before] - values).abs() < (ordered[behind] - values).abs(), before, behind)
            return (ordered[near] - values).abs() <= NEAR * unit[near], order[near]

        there, places = found(self._got)
        moved = self._got * (1 + 0.05 * torch.rand(len(self._got), generator=torch.Generator().manual_seed(1)))
        if float(there.double().mean()) < _FOUND or float(found(moved)[0].double().mean()) > _BY_CHANCE:
            return ""
        first = int(there.to(torch.uint8).argmax())
        here = [int(index[first]) for index in self._at]
        source = [int(index) for index in torch.unravel_index(places[first], self._miss.exact.shape)]
        return f"{here} has the value of {source}"


def _exist(places: Index, shape: torch.Size) -> torch.Tensor:
    """Return which places lie inside a shape."""
    known = torch.ones(len(places[0]), dtype=torch.bool)
    for index, size in zip(places, shape, strict=True):
        known &= (index >= 0) & (index < size)
    return known


def _sample(miss: Misses) -> _DisplacedSample | None:
    at = miss.some(_SAMPLE)
    return _DisplacedSample(miss, at) if at and len(at[0]) > 1 else None


def _suppositions(shape: torch.Size) -> Iterator[tuple[str, Source]]:
    """Yield what may have happened, the simplest first, and from where an element then comes."""
    if len(shape) > 1 and shape[-1] == shape[-2]:
        yield "its last two dimensions are transposed", lambda at: (*at[:-2], at[-1], at[-2])
    for dim, size in enumerate(shape):
        if size > 1:
            yield from _along(dim, size, _name(shape, dim))
    if len(shape) > 1:
        rows, columns = shape[-2:]
        if rows > 1 and columns > 1:
            for turned, words in (
                (False, "the memory is that of the transpose"),
                (True, "the memory is read as that of the transpose"),
            ):
                yield words, functools.partial(_reordered, rows=rows, columns=columns, turned=turned)
        total = shape.numel()
        for step in (sign * shift for shift in _SHIFTS for sign in (1, -1) if shift < total):
            yield f"shifted by {step} in memory order", lambda at, step=step: _flat(at, shape, step)  # type: ignore[misc]


def _name(shape: torch.Size, dim: int) -> str:
    noun = axis_of(tuple(shape), dim).noun
    return noun if noun.startswith("dimension") else f"dimension {dim}"


def _along(dim: int, size: int, name: str) -> Iterator[tuple[str, Source]]:
    def changed(change: Callable[[torch.Tensor], torch.Tensor]) -> Source:
        return lambda at: (*at[:dim], change(at[dim]), *at[dim + 1 :])

    yield f"reversed along {name}", changed(lambda index: size - 1 - index)
    for shift in _SHIFTS:
        if shift >= size:
            break
        for step in (shift, -shift):
            yield f"shifted by {step} along {name}", changed(lambda index, step=step: (index - step) % size)  # type: ignore[misc]
        if shift & (shift - 1) == 0:
            pair = "neighbours" if shift == 1 else f"blocks of {shift}"
            yield f"{pair} swapped along {name}", changed(lambda index, shift=shift: index ^ shift)  # type: ignore[misc]


def _reordered(at: Index, *, rows: int, columns: int, turned: bool) -> Index:
    """Return the places whose values are at ``at`` if the transpose was written in memory order; ``turned``: if the
    result was read as if it were its transpose."""
    if turned:
        flat = at[-1] * rows + at[-2]
        return (*at[:-2], flat // columns, flat % columns)
    flat = at[-2] * columns + at[-1]
    return (*at[:-2], flat % rows, flat // rows)


def _flat(at: Index, shape: torch.Size, step: int) -> Index:
    flat = torch.zeros_like(at[0])
    for index, size in zip(at, shape, strict=True):
        flat = flat * size + index
    flat = (flat - step) % shape.numel()
    return tuple(torch.unravel_index(flat, shape))


def _slices(miss: Misses) -> str:
    """Return which row another row has become, if wrong rows are other rows; of any dimension."""
    for dim, size in enumerate(miss.value.shape):
        if size > 1 and miss.value.numel() // size >= 8:
            words = _slices_along(miss, dim)
            if words:
                return words
    return ""


def _slices_along(miss: Misses, dim: int) -> str:
    def lines(tensor: torch.Tensor) -> torch.Tensor:
        matrix = tensor.movedim(dim, 0).reshape(tensor.shape[dim], -1)
        return matrix[:, :: max(matrix.shape[1] // _POSITIONS, 1)]

    wrong, exact, unit, value = lines(miss.finite), lines(miss.exact), lines(miss.unit), lines(miss.value)
    wrong_lines = (wrong.double().mean(1) > 0.5).nonzero()[:, 0]
    if not len(wrong_lines) or exact.numel() > 1 << 22:
        return ""
    found = []
    for line in wrong_lines[:: -(-len(wrong_lines) // _SLICES)].tolist():
        share = ((value[line] - exact).abs() <= NEAR * unit).double().mean(1)
        best = int(share.argmax())
        if share[best] >= _FOUND and best != line and int((share >= _BY_CHANCE).sum()) == 1:
            found.append((line, best))
    looked = len(wrong_lines[:: -(-len(wrong_lines) // _SLICES)])
    if len(found) < 0.8 * looked or len({line - best for line, best in found}) == 0:
        return ""
    axis = axis_of(tuple(miss.value.shape), dim)
    (line, best), one = found[0], len({best for _, best in found}) == 1 < len(found)
    if one:
        return f"{axis.at(str(best), one=True)} repeated"
    return f"{axis.at(str(line), one=True)} has the values of {best}"
