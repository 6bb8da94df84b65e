"""Errors that are the same for each row, column or slice of a result: a factor, a constant, or both, of its own."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch

from hashbench.core.text import listed
from hashbench.extensions.kernels.misses import Misses, number, rms
from hashbench.extensions.kernels.slices import axis_of
from hashbench.extensions.kernels.verdict import FaultKind

FoundKind = tuple[FaultKind, str, str]
"""The kind, a clause with the measurement, and why it may be another."""

_LEAST = 8
"""Wrong elements that a line must have for its own factor to be looked for."""

_MOST_LINES = 64

_LONGEST = 2048
"""Elements of a line that are looked at."""

_FAR_BETTER = 0.4
"""What a factor for each line must leave of the error that one factor for all leaves."""

_ROUNDING = 0.5
"""Units that one factor for all must leave, by root mean square, for others to be looked for."""

_STATISTICS = "as if its mean or variance were off"
_SHARED = "a sum that each of them divides by may lack elements, or have too many: it scales them as well"


def lines_of(miss: Misses, inputs: Mapping[str, torch.Tensor]) -> FoundKind | None:
    """Return a factor, or a constant, or both, of each row, column, or slice along a dimension."""
    for dims, name in _lines(miss):
        lines = _ErrorLines(miss, dims)
        if not lines.many:
            continue
        if found := lines.factor():
            return FaultKind.SCALED, f"{name} by a factor of its own, {found}", _SHARED
        if found := lines.shift():
            return FaultKind.SHIFTED, f"{name} by a constant of its own, {found}", ""
    for dims, name in _lines(miss):
        beside = _beside(miss, dims, inputs)
        for used in ({}, beside) if beside else ({},):
            lines = _ErrorLines(miss, dims, [*used.values()])
            if lines.many and lines.combines():
                before = f" before {listed([*used])}" if used else ""
                return FaultKind.SCALED, f"{name} by a factor and a constant of its own{before}, {_STATISTICS}", ""
    return None


def factor_of_lines(miss: Misses, left: float) -> FoundKind | None:
    """Return a factor of each line if they explain much more than one factor for all, which leaves ``left``."""
    if left < _ROUNDING * rms(miss.unit[miss.finite]):
        return None
    for dims, name in _lines(miss):
        lines = _ErrorLines(miss, dims)
        if lines.many and (found := lines.factor()) and lines.left < _FAR_BETTER * left:
            return FaultKind.SCALED, f"{name} by a factor of its own, {found}", _SHARED
    return None


def _lines(miss: Misses) -> Iterator[tuple[list[int], str]]:
    """Yield the dimensions that a line extends over, and what lines are called."""
    shape = tuple(miss.value.shape)
    if len(shape) < 2 or miss.value.is_complex():
        return
    for dim, size in enumerate(shape):
        others = [other for other in range(len(shape)) if other != dim]
        if size > 1 and miss.value.numel() // size > 1:
            noun = axis_of(shape, dim).noun
            yield others, f"each {noun}" if len(shape) == 2 else f"each slice of {noun}"
        if len(shape) > 2 and size > 1:
            yield [dim], f"each line along dimension {dim}"


def _beside(miss: Misses, dims: Sequence[int], inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return inputs that lie along the dimensions of a line and of nothing else, as weight and bias of a norm."""
    shape = miss.value.shape
    found = {}
    for name, tensor in inputs.items():
        if tensor.is_floating_point() and tuple(tensor.shape) == tuple(shape[dim] for dim in dims):
            wanted = [size if dim in dims else 1 for dim, size in enumerate(shape)]
            found[name] = tensor.detach().to("cpu", torch.float64).reshape(wanted)
    return dict([*found.items()][:2])


class _ErrorLines:
    """Some of the lines that have enough wrong elements, as rows of a matrix."""

    def __init__(self, miss: Misses, dims: Sequence[int], beside: Sequence[torch.Tensor] = ()) -> None:
        shape = miss.value.shape
        kept = [dim for dim in range(len(shape)) if dim not in dims]
        length = math.prod(shape[dim] for dim in dims)
        step = max(length // _LONGEST, 1)

        def rows(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.broadcast_to(shape).permute(*kept, *dims).reshape(-1, length)

        chosen = (rows(miss.finite)[:, ::step].sum(1) >= _LEAST).nonzero()[:, 0]
        chosen = chosen[:: max(-(-len(chosen) // _MOST_LINES), 1)]
        self.many = len(chosen) > 1
        part = miss.changed(lambda tensor: rows(tensor)[chosen, ::step])
        self._part, self._known = part, part.finite
        self._beside = [torch.where(self._known, rows(tensor)[chosen, ::step], 0.0) for tensor in beside]
        self._weights = part.weights(self._known)
        self._value, self._exact = (torch.where(self._known, each, 0.0) for each in (part.value, part.exact))
        self.left = math.inf

    def _sum(self, tensor: torch.Tensor) -> torch.Tensor:
        return (self._weights * tensor).sum(1, keepdim=True)

    def _fits(self, residual: torch.Tensor) -> bool:
        self.left = rms(residual[self._known])
        return self._part.fits(residual, self._known)

    def factor(self) -> str:
        """Return the range of the factors that explain the errors; empty if none do."""
        factor = self._sum(self._value * self._exact) / self._sum(self._exact.square()).clamp_min(1e-300)
        return _range(factor) if self._fits(self._value - factor * self._exact) else ""

    def shift(self) -> str:
        """Return the range of the constants that explain the errors; empty if none do."""
        error = self._value - self._exact
        shift = self._sum(error) / self._weights.sum(1, keepdim=True).clamp_min(1e-300)
        return _range(shift) if self._fits(error - shift) else ""

    def combines(self) -> bool:
        """Return whether the errors of each line are a combination of its results, a constant, and what lies beside."""
        parts = [self._exact, torch.ones_like(self._exact), *self._beside]
        if not bool((self._known.sum(1) >= 3 * len(parts)).all()):
            return False
        error = torch.where(self._known, self._part.error, 0.0)
        root = self._weights.sqrt()
        basis = torch.stack([part * root for part in parts], 2)
        if not bool(basis.isfinite().all()):  # an input that no result depends on
            return False
        solution = torch.linalg.lstsq(basis, (error * root)[..., None], driver="gelsd").solution
        return self._fits(error - (torch.stack(parts, 2) @ solution)[..., 0])


def _range(each: torch.Tensor) -> str:
    return " to ".join(number(float(part)) for part in (each.min(), each.max()))
