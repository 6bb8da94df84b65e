"""Judged results without a judge, and tensors to make them of."""

from __future__ import annotations

import torch

from hashbench.core.run.distance import unit_roundoff
from hashbench.core.run.rounding_judge import Bias, JudgedResult


def judged(got: torch.Tensor, exact: torch.Tensor, bias: Bias | None = None) -> JudgedResult:
    """Judge by a unit of a roundoff of each result and of a typical one."""
    exact = exact.double() if got.is_floating_point() else exact
    error = got.double() - exact.double()
    error = torch.where(got.isfinite() & exact.isfinite(), error, torch.inf)
    same = (got == exact) | (got.isnan() & exact.isnan())
    error = torch.where(same, 0.0, error)
    unit = torch.zeros_like(error)
    if got.is_floating_point():
        size = exact[exact.isfinite()].abs()
        unit = unit_roundoff(got.dtype) * (exact.abs() + size.square().mean().sqrt()).nan_to_num(posinf=1.0) + 1e-300
    units = torch.where(error == 0, 0.0, error.abs() / unit)
    return result_of(error, units, exact, bias)


def result_of(error: torch.Tensor, units: torch.Tensor, exact: torch.Tensor, bias: Bias | None = None) -> JudgedResult:
    ratio = float(units.max())
    return JudgedResult(ratio, "", None, None, bias, error, units, units > 16, exact)


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 5) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
