"""What a right kernel may do with varied inputs beside rounding."""

from __future__ import annotations

import pytest
import torch

from hashbench.extensions.kernels.calls import Function
from hashbench.extensions.kernels.excuses import excused
from hashbench.extensions.kernels.inputs import KernelInputs
from hashbench.extensions.kernels.pair import KernelTask, KernelUnderTest
from tests.extensions.kernels.judgements import drawn

X = drawn(8, 16)
NAN = X.clone()
NAN[0, 0] = torch.nan


def masked(x: torch.Tensor) -> torch.Tensor:
    return (x * torch.ones_like(x).triu()).sum(1)


def first_row_hidden(x: torch.Tensor) -> torch.Tensor:
    return masked(x.nan_to_num())


@pytest.mark.parametrize(
    ("reference", "right"),
    [(lambda x: (x * torch.zeros_like(x)).sum(1), True), (masked, False)],
    ids=["nothing depends on it", "a result depends on it"],
)
def test_nan_may_be_hidden_where_nothing_depends_on_the_input(reference: Function, right: bool) -> None:
    kernel = (lambda x: torch.zeros(len(x))) if right else first_row_hidden
    base, varied = KernelInputs.of((X,), {}), KernelInputs.of((NAN,), {})
    pair = KernelUnderTest(KernelTask(kernel, reference, base))
    judged = pair.judge(pair.kernel(varied), pair.runs_of(varied))
    assert not judged.right
    assert excused("nan", pair, varied, base, judged).right is right


def amplified(x: torch.Tensor) -> torch.Tensor:
    return x * 1e30


@pytest.mark.parametrize(
    ("kernel", "right"),
    [(lambda x: amplified(torch.where(x.abs() < 1e-38, 0.0, x)), True), (lambda x: 2 * amplified(x), False)],
    ids=["flushed", "doubled"],
)
def test_denormals_may_be_flushed(kernel: Function, right: bool) -> None:
    small = KernelInputs.of((X * 1e-40,), {})
    pair = KernelUnderTest(KernelTask(kernel, amplified, small))
    judged = pair.judge(pair.kernel(small), pair.runs_of(small))
    assert not judged.right
    assert excused("denormals", pair, small, small, judged).right is right
