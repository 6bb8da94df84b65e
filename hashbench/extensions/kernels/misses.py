"""The wrong elements of a result, as the questions about its kind of fault need them. Pure: tensors in, numbers out."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch

from hashbench.core.run.distance import unit_roundoff, wide
from hashbench.core.run.rounding import NEAR
from hashbench.core.run.rounding_judge import JudgedResult

_FITTED = 0.95
"""Share of the wrong elements that an explanation must explain."""

_REDUCED = 0.25
"""What an explanation must leave of the error at most, by root mean square."""


_NOTHING = 1e-12
"""Relative error that a sum of integers in float64 may have."""


Index = tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class Misses:
    """A result and its reference.

    Attributes:
        got: of the kernel, in its dtype.
        value: the same in float64 or complex128.
        exact: the reference, in the same.
        wrong: bools, the elements that are wrong.
        finite: bools, those and the ones that rounding explains with difficulty, where both sides are finite: what
            explains the wrong ones must explain them as well.
        unit: what rounding explains of each element, float64; next to nothing of integers.
    """

    got: torch.Tensor
    value: torch.Tensor
    exact: torch.Tensor
    wrong: torch.Tensor
    finite: torch.Tensor
    unit: torch.Tensor

    def changed(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Misses:
        """Return part of the elements, or all of them in another shape."""
        return replace(self, **{field.name: change(getattr(self, field.name)) for field in fields(self)})

    def some(self, most: int) -> Index:
        """Return the indices of up to so many of the suspect elements that are finite, spread over all of them."""
        flat = self.finite.flatten().nonzero()[:, 0]
        flat = flat[:: max(-(-len(flat) // most), 1)]
        return tuple(torch.unravel_index(flat, self.value.shape)) if self.value.dim() else ()

    @property
    def _roundoff(self) -> float:
        floating = self.got.is_floating_point() or self.got.is_complex()
        return unit_roundoff(self.got.dtype) if floating else _NOTHING

    @property
    def error(self) -> torch.Tensor:
        """Result less reference."""
        return self.value - self.exact

    def weights(self, among: torch.Tensor) -> torch.Tensor:
        """Return what the squares of errors are multiplied by: small where rounding is large; 0 outside of elements."""
        unit = self.unit + rms(self.unit[among]) + 1e-300
        return torch.where(among, unit.square().reciprocal(), 0.0)

    def fits(self, residual: torch.Tensor, among: torch.Tensor) -> bool:
        """Return whether rounding explains what an explanation leaves of the errors of elements.

        Args:
            residual: what is left, of the result's shape.
            among: bools, the elements.
        """
        left, error = residual[among].abs(), self.error[among].abs()
        if not len(left):
            return False
        # A result that is too large was rounded at its own size.
        rounded = self.value[among].abs() * self._roundoff
        near = left <= NEAR * (self.unit[among] + rounded)
        rms, before = (float(part.square().mean().sqrt()) for part in (left[near], error))
        return float(near.double().mean()) >= _FITTED and rms <= _REDUCED * before


def misses(judged: JudgedResult, got: torch.Tensor) -> Misses | None:
    """Return the wrong elements of a judged result; ``None`` if no single element is wrong."""
    if not bool(judged.beyond.any()):
        return None
    return _misses(judged, got, judged.beyond | (judged.units > NEAR))


def whole(judged: JudgedResult, got: torch.Tensor) -> Misses:
    """Return all elements of a judged result as suspect."""
    return _misses(judged, got, torch.ones_like(judged.beyond))


def _misses(judged: JudgedResult, got: torch.Tensor, suspect: torch.Tensor) -> Misses:
    got = got.detach().resolve_conj().resolve_neg()
    exact = wide(judged.exact)
    value = wide(got).to(exact.dtype)
    error = judged.error.abs()
    unit = torch.where((judged.units > 0) & error.isfinite(), error / judged.units, 0.0).nan_to_num(nan=0.0)
    if got.is_floating_point() or got.is_complex():
        # Where the error is not finite or 0, what is known is the roundoff of the dtype.
        unit = torch.where(unit > 0, unit, exact.abs().nan_to_num(posinf=0.0) * unit_roundoff(got.dtype))
    else:
        unit = exact.abs().clamp_min(1.0) * _NOTHING
    finite = suspect & value.isfinite() & exact.isfinite()
    return Misses(got, value, exact, judged.beyond, finite, unit)


def number(value: complex) -> str:
    """Return a number in four digits.

    >>> number(1.0), number(0.00031234), number(1e9)
    ('1', '0.0003123', '1e+09')
    """
    if isinstance(value, complex):
        size = abs(value)
        parts = [part if abs(part) > 1e-6 * size else 0.0 for part in (value.real, value.imag)]
        return f"{parts[0]:.4g}{parts[1]:+.4g}j"
    return f"{value:.4g}"


def rms(tensor: torch.Tensor) -> float:
    """Return the root mean square; 0 of nothing."""
    return float(torch.linalg.vector_norm(tensor)) / math.sqrt(max(tensor.numel(), 1))
