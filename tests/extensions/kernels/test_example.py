"""The smallest input that shows a fault, with the judge's own results."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from hashbench.core.run.rounding_judge import JudgedResult, judge_results
from hashbench.core.run.rounding_reference import ReferenceRuns
from hashbench.extensions.kernels.example import Judge, example_of
from hashbench.extensions.kernels.verdict import Example

Function = Callable[..., torch.Tensor]
X = torch.randn(40, 200, generator=torch.Generator().manual_seed(5))


def _sum(x: torch.Tensor) -> torch.Tensor:
    return x.sum(1)


def _sum_without_the_tail(x: torch.Tensor) -> torch.Tensor:
    return x[:, : x.shape[1] // 32 * 32].sum(1)


def _judge(kernel: Function, reference: Function) -> Judge:
    def judge(args: tuple[object, ...]) -> tuple[torch.Tensor, JudgedResult] | None:
        got = kernel(*args)
        return got, judge_results([got], ReferenceRuns(reference, args))[0]

    return judge


def test_a_lost_tail_is_shown_by_one_element() -> None:
    found = example_of((X,), _judge(_sum_without_the_tail, _sum), seconds=20)
    assert found == Example(("float32[1, 1]: [[1]]",), (0,), 0.0, 1.0)


def test_a_nan_that_is_hidden_is_shown_by_a_nan() -> None:
    x = X.clone()
    x[3, 5] = math.nan
    found = example_of((x,), _judge(lambda x: x.nan_to_num(nan=-1.0) * 3, lambda x: x * 3), seconds=20)
    assert found is not None
    assert found.inputs[0].startswith("float32[1, 1]: [[nan")
    assert found.got == -3.0
    assert found.wanted is not None
    assert math.isnan(abs(found.wanted))


def test_what_only_the_mean_shows_has_no_example() -> None:
    x = X.bfloat16()
    assert example_of((x,), _judge(lambda x: (x * 1.01).bfloat16(), lambda x: x * 1.0), seconds=5) is None


def test_a_kernel_that_refuses_smaller_inputs_is_shown_by_those_it_takes() -> None:
    def kernel(x: torch.Tensor) -> torch.Tensor:
        assert x.shape == X.shape
        return 2 * x

    found = example_of((X,), _judge(kernel, lambda x: x.clone()), seconds=10)
    assert found is not None
    assert found.inputs[0].startswith("float32[40, 200], zeros but 1 at")
    assert (found.got, found.wanted) == (2.0, 1.0)
