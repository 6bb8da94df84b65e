"""Formulas beside one fused op."""

from __future__ import annotations

import torch

from hashbench.extensions.implementations.pair.check import compare_implementations
from hashbench.extensions.implementations.pair.sides import Side
from hashbench.extensions.implementations.pair.verdict import PairOutcome


def _fused(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.layer_norm(x, (16,), eps=1e-5) * 3.0


def _formula(x: torch.Tensor, *, eps: float = 1e-5, factor: float = 1.0) -> torch.Tensor:
    apart = x - x.mean(-1, keepdim=True)
    variance = apart.square().mean(-1, keepdim=True)
    inverse = torch.rsqrt(variance + eps)
    return apart * inverse * factor * 3.0


def _side(function: object) -> Side:
    x = torch.linspace(-2, 3, 80).reshape(5, 16).sin()
    return Side(lambda: function, lambda: (x,))


def test_an_op_of_a_formula_is_named_beside_a_fused_op() -> None:
    """Both variances agree with what the fused op computes inside; the sum with eps does not."""
    assert compare_implementations(_side(_fused), _side(_formula)).outcome is not PairOutcome.MISTAKE
    verdict = compare_implementations(_side(_fused), _side(lambda x: _formula(x, eps=1e-3)))
    assert verdict.outcome is PairOutcome.MISTAKE
    place = verdict.parted[0].b
    assert place is not None
    assert place.op == "aten.add.Tensor"
    assert "aten.mean.dim" not in place.ops
    ours = verdict.parted[0].a
    assert ours is not None
    assert ours.op == "aten.native_layer_norm.default"
