"""The error of a result in units of what rounding explains. Pure: tensors in, numbers out.

The unit of an element is the largest of three randomly rounded float64 evaluations' differences to float64 and of the
error that eager mode's own op makes, plus ``u |x|`` and the root mean square of those differences over the tensor
(``u``: unit roundoff of the dtype). References are asked for one after the other, and only as long as the ratio is not
known to be small: most results need none but eager mode's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from hashbench.core.run.distance import unit_roundoff, wide

LIMIT = 16.0
"""Largest ratio that counts as rounding: clean kernels of twelve programs reach 12.6, planted mistakes begin at 161."""

NEAR = 4.0
"""Ratio below which no further reference is evaluated; the ratio is then an upper bound."""

SAMPLES = 3
"""Randomly rounded evaluations that make the unit."""

MOST_FLIPS = 16
"""Evaluations with rounding :data:`LIMIT` times as large, for steps that flip (``round``, ``argmax``, a comparison)."""

_PLAIN = (torch.float32, torch.float64, torch.complex64, torch.complex128)
"""Dtypes that numbers are compared in."""


@dataclass(frozen=True, slots=True)
class References:
    """What a result is compared with. Tensors have its shape; ``own`` its dtype, the others float64 or complex128 where
    that is floating or complex.

    Attributes:
        own: eager mode's value.
        exact: evaluates in float64.
        rounded: evaluates in float64 with random rounding, with a seed and by so many units.
    """

    own: torch.Tensor
    exact: Callable[[], torch.Tensor]
    rounded: Callable[[int, float], torch.Tensor]


@dataclass(frozen=True, slots=True)
class MeasuredError:
    """Error of a result.

    Attributes:
        ratio: largest error of an element in its unit; an upper bound if below :data:`NEAR`; infinite if no rounding
            explains it.
        own: the same of eager mode's own result, 0 ... 1; None if the two are so near that nobody asked.
        relative: largest error over the largest magnitude of the reference, both absolute.
    """

    ratio: float
    own: float | None = None
    relative: float = 0.0


def measure(value: torch.Tensor, references: References) -> MeasuredError:
    """Return the error of ``value`` against its references, of the same shape."""
    own = references.own
    countable = own.dtype.itemsize > 1 or not own.dtype.is_floating_point  # torch.equal lacks float8
    if value.numel() == 0 or (countable and value.dtype is own.dtype and torch.equal(value, own)):
        return MeasuredError(0.0)
    if not (own.dtype.is_floating_point or own.dtype.is_complex):
        return _measure_discrete(value, references)
    apart = units_apart(value, own)
    if apart <= NEAR:
        return MeasuredError(apart, None, apart * unit_roundoff(own.dtype))
    return _measure_rounded(value, references)


def units_apart(value: torch.Tensor, own: torch.Tensor) -> float:
    """Return the largest difference of two results in units ``u |own|``, an upper bound of the ratio above 1; infinite
    where one is NaN or infinite and the other is not the same. Zeros of both signs are equal."""
    plain = value.dtype is own.dtype and own.dtype in _PLAIN  # there, differences of near numbers are exact
    reference = own if plain else wide(own)
    difference = _difference(value if plain else wide(value), reference)
    unit = reference.abs().mul_(unit_roundoff(own.dtype)).add_(_least(own.dtype))
    return float(_quotient(difference, unit).max())


def _measure_rounded(value: torch.Tensor, references: References) -> MeasuredError:
    units = _Units(value, references.own, references.exact())
    for seed in range(SAMPLES):
        if units.ratio <= NEAR:
            break
        units.add(references.rounded(seed, 1.0))
    if units.ratio > LIMIT:
        for seed in range(MOST_FLIPS):
            left = units.beyond
            units.add_flips(references.rounded(SAMPLES + seed, LIMIT))
            if not units.beyond or (seed % 4 == 3 and units.beyond == left):
                break
    return MeasuredError(units.ratio, units.own_ratio, units.relative)


def _measure_discrete(value: torch.Tensor, references: References) -> MeasuredError:
    """Compare integers or bools: equal to eager mode's, or to what rounding of the floats before them gives."""
    different = value != references.own
    if not bool(different.any()):
        return MeasuredError(0.0)
    different &= value != references.exact()
    for seed in range(SAMPLES):
        different &= value != references.rounded(seed, 1.0)
    if not bool(different.any()):
        return MeasuredError(1.0)
    for seed in range(MOST_FLIPS):
        left = int(different.sum())
        different &= value != references.rounded(SAMPLES + seed, LIMIT)
        if not bool(different.any()):
            return MeasuredError(LIMIT)
        if seed % 4 == 3 and int(different.sum()) == left:
            break
    return MeasuredError(math.inf)


class _Units:
    """Error and unit of each element of a floating or complex result."""

    def __init__(self, value: torch.Tensor, own: torch.Tensor, exact: torch.Tensor) -> None:
        self._value, own_value, exact_value = wide(value), wide(own), wide(exact)
        self._finite = all(_all_finite(item) for item in (self._value, own_value, exact_value))
        self._reference = exact_value
        if not self._finite:  # eager mode's may be finite where float64 and all random roundings of it are not
            self._known = exact_value.isfinite() | ~own_value.isfinite()
            self._reference = torch.where(self._known, exact_value, own_value)
        # Twice in float64: the reference is rounded like the result.
        unit = unit_roundoff(own.dtype) * (2 if own.dtype in (torch.float64, torch.complex128) else 1)
        self._floor = self._reference.abs().mul_(unit).add_(_least(own.dtype))
        self._error = _difference(self._value, self._reference)
        self._largest = self._own = _difference(own_value, self._reference)
        self._rms = _root_mean_square(self._own)
        self._flipped: torch.Tensor | None = None
        if not self._finite:
            self._explain(own_value)
            self._explain(wide(exact_value.to(own.dtype)))  # float64 has a larger range
        self._measure()

    def add(self, sample: torch.Tensor) -> None:
        """Take in a value with random rounding by one unit."""
        moved = wide(sample)
        difference = self._moved(moved)
        self._largest = torch.maximum(self._largest, difference)
        self._rms = max(self._rms, _root_mean_square(difference))
        if not self._finite:
            self._explain(moved)
        self._measure()

    def add_flips(self, sample: torch.Tensor) -> None:
        """Take in a value with random rounding by :data:`LIMIT` units."""
        moved = wide(sample)
        flipped = _same(moved, self._value)
        explained = (self._moved(moved) + self._floor).add_(self._rms)
        flipped |= (self._error <= explained) & self._error.isfinite()
        self._flipped = flipped if self._flipped is None else self._flipped | flipped
        self._measure()

    def _moved(self, sample: torch.Tensor) -> torch.Tensor:
        """Return how far random rounding moved the reference."""
        difference = _difference(sample, self._reference)
        return difference if self._finite else torch.where(self._known, difference, 0.0)

    def _explain(self, other: torch.Tensor) -> None:
        """Take NaN and infinities for right where ``other`` has the same."""
        self._error = torch.where(~self._value.isfinite() & _same(self._value, other), 0.0, self._error)

    def _measure(self) -> None:
        ratios = _quotient(self._error, self._allowed())
        if self._flipped is not None:
            ratios = torch.where(self._flipped, ratios.clamp(max=LIMIT), ratios)
        self.ratio = float(ratios.max())
        self.beyond = int((ratios > LIMIT).sum()) if self.ratio > LIMIT else 0

    def _allowed(self) -> torch.Tensor:
        return (self._largest + self._floor).add_(self._rms)

    @property
    def own_ratio(self) -> float:
        ratios = _quotient(self._own, self._allowed())
        return float(ratios.max()) if self._finite else float(ratios[ratios.isfinite()].max())

    @property
    def relative(self) -> float:
        reference = self._reference.abs()
        largest = float((reference if self._finite else torch.where(reference.isfinite(), reference, 0.0)).max())
        error = float(self._error.max())
        return error / largest if largest else (math.inf if error else 0.0)


def _same(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return (left == right) | (left.isnan() & right.isnan())


def _all_finite(value: torch.Tensor) -> bool:
    """Return True if a tensor has neither NaN nor infinities: one of them would be in its sum."""
    return bool(value.sum().isfinite())


def _difference(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return ``|left - right|``: 0 where both are the same, infinite where only one is finite."""
    difference = (left - right).abs()
    if _all_finite(difference):
        return difference
    return torch.where(_same(left, right), 0.0, difference.nan_to_num(nan=math.inf, posinf=math.inf))


def _quotient(error: torch.Tensor, unit: torch.Tensor) -> torch.Tensor:
    """Return ``error / unit``: 0 without an error, infinite where both are infinite."""
    quotient = error / unit
    if _all_finite(quotient):
        return quotient
    return torch.where(error == 0, 0.0, quotient.nan_to_num_(nan=math.inf, posinf=math.inf))


def _least(dtype: torch.dtype) -> float:
    """Return what may be lost of numbers near zero: those below the smallest normal one count as zero in vectorized
    kernels; in float16, whose range is small, they count."""
    info = torch.finfo(dtype)
    return info.tiny if info.tiny < 1e-30 else info.tiny * info.eps


def _root_mean_square(difference: torch.Tensor) -> float:
    if not _all_finite(difference):
        difference = difference[difference.isfinite()]
    return float(torch.linalg.vector_norm(difference)) / math.sqrt(max(difference.numel(), 1))
