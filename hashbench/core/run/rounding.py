"""The error of a result in units of what rounding explains. Pure: tensors in, numbers out.

Two judges use it: :func:`measure` for buffers of compiled graphs, and
:mod:`~hashbench.core.run.rounding_judge` for kernels and their references.

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

STILL = 4.0
"""Part of a rounding that is allowed where all values are exact: two results one place apart are then 8 units apart."""

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
    units = Units(value, references.own, references.exact())
    units.count_own()
    for seed in range(SAMPLES):
        if units.ratio <= NEAR:
            break
        units.add(references.rounded(seed, 1.0))
    if units.ratio > LIMIT:
        units.look_for_flips(references.rounded)
    return MeasuredError(units.ratio, units.own_ratio, units.relative)


def _measure_discrete(value: torch.Tensor, references: References) -> MeasuredError:
    """Compare integers or bools: equal to eager mode's, or to what rounding of the floats before them gives."""
    return MeasuredError(discrete_ratio(value, references)[0])


def discrete_ratio(value: torch.Tensor, references: References) -> tuple[float, torch.Tensor]:
    """Compare integers or bools with what some rounding of the floats before them gives.

    Returns:
        0 if equal to eager mode's, 1 if explained by rounding, :data:`LIMIT` if by larger rounding, else infinite; and
        where nothing explains them, as bools of the same shape.
    """
    different = value != references.own
    if not bool(different.any()):
        return 0.0, different
    different &= value != references.exact()
    for seed in range(SAMPLES):
        different &= value != references.rounded(seed, 1.0)
    if not bool(different.any()):
        return 1.0, different
    for seed in range(MOST_FLIPS):
        left = int(different.sum())
        different &= value != references.rounded(SAMPLES + seed, LIMIT)
        if not bool(different.any()):
            return LIMIT, different
        if seed % 4 == 3 and int(different.sum()) == left:
            break
    return math.inf, different


class Units:
    """Error and unit of each element of a floating or complex result.

    The unit grows by what is taken in: eager mode's own error, and samples of random rounding.

    Args:
        value: the result.
        own: eager mode's value; here it only says which NaN and infinities are right.
        exact: in float64.
        dtype: whose roundoff counts; ``None``: that of ``own``.
    """

    def __init__(
        self, value: torch.Tensor, own: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype | None = None
    ) -> None:
        dtype = dtype or own.dtype
        self._value, own_value, exact_value = wide(value), wide(own), wide(exact)
        self._finite = all(_all_finite(item) for item in (self._value, own_value, exact_value))
        self._reference = exact_value
        if not self._finite:  # eager mode's may be finite where float64 and all random roundings of it are not
            self._known = exact_value.isfinite() | ~own_value.isfinite()
            self._reference = torch.where(self._known, exact_value, own_value)
        # Twice in float64: the reference is rounded like the result.
        unit = unit_roundoff(dtype) * (2 if dtype in (torch.float64, torch.complex128) else 1)
        self.least = _least(dtype)
        """What may be lost of numbers near zero."""
        self._floor = self._reference.abs().mul_(unit).add_(self.least)
        self._error = _difference(self._value, self._reference)
        self._own = _difference(own_value, self._reference)
        self._largest: torch.Tensor | None = None
        self._rms = 0.0
        self._flipped: torch.Tensor | None = None
        if not self._finite:
            self._explain(own_value)
            self._explain(wide(exact_value.to(dtype)))  # float64 has a larger range
        self._ratio: float | None = None
        self._tight = False

    def count_own(self) -> None:
        """Take in the error that eager mode makes."""
        self._grow(self._own)

    def add(self, sample: torch.Tensor) -> None:
        """Take in a value with random rounding by one unit."""
        moved = wide(sample)
        self._grow(self._moved(moved))
        if not self._finite:
            self._explain(moved)

    def add_flips(self, sample: torch.Tensor) -> None:
        """Take in a value with random rounding by :data:`LIMIT` units."""
        moved = wide(sample)
        flipped = _same(moved, self._value)
        explained = (self._moved(moved) + self._floor).add_(self._rms)
        flipped |= (self._error <= explained) & self._error.isfinite()
        self._flipped = flipped if self._flipped is None else self._flipped | flipped
        self._ratio = None

    def tighten(self, tight: bool) -> None:
        """Allow, or no longer, only a part (:data:`STILL`) of a rounding where no sample moves: nothing is rounded."""
        self._tight, self._ratio = tight, None

    def look_for_flips(self, rounded: Callable[[int, float], torch.Tensor]) -> None:
        """Take in larger roundings until they explain all elements, or no more of them."""
        for seed in range(MOST_FLIPS):
            left = self.beyond
            self.add_flips(rounded(SAMPLES + seed, LIMIT))
            if not self.beyond or (seed % 4 == 3 and self.beyond == left):
                break

    def _grow(self, difference: torch.Tensor) -> None:
        self._largest = difference if self._largest is None else torch.maximum(self._largest, difference)
        self._rms = max(self._rms, _root_mean_square(difference))
        self._ratio = None

    def _moved(self, sample: torch.Tensor) -> torch.Tensor:
        """Return how far random rounding moved the reference."""
        difference = _difference(sample, self._reference)
        return difference if self._finite else torch.where(self._known, difference, 0.0)

    def _explain(self, other: torch.Tensor) -> None:
        """Take NaN and infinities for right where ``other`` has the same."""
        self._error = torch.where(~self._value.isfinite() & _same(self._value, other), 0.0, self._error)
        self._ratio = None

    def ratios(self) -> torch.Tensor:
        """Return the error of each element in its unit, in float64."""
        ratios = _quotient(self._error, self.allowed())
        return ratios if self._flipped is None else torch.where(self._flipped, ratios.clamp(max=LIMIT), ratios)

    @property
    def ratio(self) -> float:
        """Largest error of an element in its unit."""
        if self._ratio is None:
            self._ratio = float(self.ratios().max())
        return self._ratio

    @property
    def beyond(self) -> int:
        """Number of elements beyond :data:`LIMIT`."""
        return int((self.ratios() > LIMIT).sum()) if self.ratio > LIMIT else 0

    def allowed(self) -> torch.Tensor:
        """Return the unit of each element, in float64."""
        if self._largest is None:
            return self._floor
        floor = torch.where(self._largest == 0, self._floor / STILL, self._floor) if self._tight else self._floor
        return (self._largest + floor).add_(self._rms)

    @property
    def floor(self) -> torch.Tensor:
        """One rounding of each element to the dtype, in float64."""
        return self._floor

    @property
    def reference(self) -> torch.Tensor:
        """What elements are compared with: float64's value; eager mode's where only that is finite."""
        return self._reference

    @property
    def own_ratio(self) -> float:
        """Largest error of eager mode's own result in the same units."""
        ratios = _quotient(self._own, self.allowed())
        return float(ratios.max()) if self._finite else float(ratios[ratios.isfinite()].max())

    @property
    def better(self) -> float | None:
        """Root mean square error of eager mode's result over that of the value; ``None`` where one of them is 0."""
        own, mine = _root_mean_square(self._own), _root_mean_square(self._error)
        return own / mine if own and mine else None

    @property
    def relative(self) -> float:
        """Largest error over the largest magnitude of the reference."""
        largest = self.largest
        error = float(self._error.max())
        return error / largest if largest else (math.inf if error else 0.0)

    @property
    def largest(self) -> float:
        """Largest finite magnitude of the reference."""
        reference = self._reference.abs()
        return float((reference if self._finite else torch.where(reference.isfinite(), reference, 0.0)).max())


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
