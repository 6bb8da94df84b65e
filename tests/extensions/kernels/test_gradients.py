"""Gradients are taken of the kernel as it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hashbench.core.run.wide import WideMode
from hashbench.extensions.kernels.gradients import NoGradientError, gradients_of
from hashbench.extensions.kernels.inputs import KernelInputs

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


def product(x: torch.Tensor, rows: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return x[rows] * scale


def pair(kernel: Any = product, reference: Any = product, *args: Any) -> Any:
    given = args or (X, torch.tensor([1, 1, 3]), torch.ones(6))
    return gradients_of(kernel, reference, KernelInputs.of(given, {}), seed=5)


def test_gradients_are_those_of_autograd() -> None:
    found = pair()
    (args, kwargs, (cotangent,)), _ = found.inputs.arguments()
    of_x, of_scale = found.of(product)(args, kwargs, (cotangent,))
    assert found.names == ("gradient of input 0", "gradient of input 2")
    assert torch.equal(of_scale, (X[[1, 1, 3]] * cotangent).sum(0))
    assert torch.equal(of_x[1], cotangent[0] + cotangent[1])
    assert found.inputs.names() == ["input 0", "input 1", "input 2", "gradient of output"]
    assert found.remarks == ("no gradient: input 1 (integers or bools)",)


def test_the_reference_has_its_gradients_in_float64() -> None:
    found = pair(product, product, X.bfloat16(), torch.tensor([0, 2]), torch.ones(6, dtype=torch.bfloat16))
    arguments, _ = found.inputs.arguments()
    with WideMode():
        gradients = found.of(product)(*arguments)
    assert {gradient.dtype for gradient in gradients} == {torch.float64}
    assert {gradient.dtype for gradient in found.of(product)(*arguments)} == {torch.bfloat16}


def test_a_gradient_that_is_missing_is_zeros() -> None:
    found = pair(lambda x, rows, scale: product(x, rows, scale.detach()))
    arguments, _ = found.inputs.arguments()
    assert not bool(found.of(lambda x, rows, scale: product(x, rows, scale.detach()))(*arguments)[1].any())


def test_a_kernel_without_gradient_is_told_what_to_do() -> None:
    with pytest.raises(NoGradientError, match=r"no result of the kernel has a gradient.*torch\.autograd\.Function"):
        pair(lambda x, rows, scale: product(x.detach(), rows, scale.detach()))


def test_a_reference_without_gradient_is_told() -> None:
    with pytest.raises(NoGradientError, match="the reference has no gradient"):
        pair(product, lambda x, rows, scale: product(x, rows, scale).argmax(-1))


def test_a_result_without_gradient_is_left_out() -> None:
    def two(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * 2, x.logsumexp(-1)

    def kernel(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * 2, x.logsumexp(-1).detach()

    found = pair(kernel, two, X)
    assert found.outputs == (0,)
    assert "result 1 of the kernel has no gradient" in found.remarks[0]


def test_the_same_seed_draws_the_same_cotangents() -> None:
    assert torch.equal(pair().inputs.leaves[-1], pair().inputs.leaves[-1])
