"""The same kernel in float32."""

from __future__ import annotations

import pytest
import torch

from hashbench.core.run.rounding_reference import ReferenceRuns
from hashbench.extensions.kernels.calls import Caller, Function
from hashbench.extensions.kernels.float32 import in_float32, resolves_float32
from hashbench.extensions.kernels.inputs import KernelInputs
from tests.extensions.kernels.judgements import drawn

X = drawn(16, 32)


def test_low_dtypes_become_float32_and_others_stay() -> None:
    (varied,) = in_float32(KernelInputs.of((X.bfloat16(), torch.arange(3), torch.bfloat16), {}), torch.Generator())
    assert [getattr(leaf, "dtype", leaf) for leaf in varied.inputs.leaves] == [
        torch.float32,
        torch.int64,
        torch.float32,
    ]
    assert list(in_float32(KernelInputs.of((X,), {}), torch.Generator())) == []


@pytest.mark.parametrize(
    ("kernel", "resolved"),
    [(lambda x: x.tanh() * 1.01, True), (lambda x: x.bfloat16().tanh().float(), False)],
    ids=["a scaled result", "bfloat16 inside"],
)
def test_a_kernel_that_casts_inside_does_not_resolve_float32(kernel: Function, resolved: bool) -> None:
    inputs, caller = KernelInputs.of((X,), {}), Caller(kernel, seed=0)

    def runs_of(each: KernelInputs) -> ReferenceRuns:
        return ReferenceRuns(torch.tanh, each.arguments()[0])

    assert resolves_float32(caller, runs_of, inputs, caller(inputs)) is resolved
