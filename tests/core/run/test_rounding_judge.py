"""Verdicts on the results of kernels right and wrong."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from hashbench.core.run.rounding import LIMIT
from hashbench.core.run.rounding_judge import JudgedResult, judge_results, resolves
from hashbench.core.run.rounding_reference import ReferenceRuns
from tests.core.run import rounding_cases

LOW = [torch.bfloat16, torch.float16]
ALL = [torch.float32, *LOW]


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def judged(
    kernel: Callable[..., Any], reference: Callable[..., Any], *inputs: torch.Tensor, approximate: float | None = None
) -> JudgedResult:
    (found,) = judge_results([kernel(*inputs)], ReferenceRuns(reference, inputs), approximate=approximate)
    return found


def softmax(x: torch.Tensor) -> torch.Tensor:
    return x.softmax(-1)


def in_float32(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: function(x.float()).to(x.dtype)


def test_equal_results() -> None:
    found = judged(softmax, softmax, drawn(8, 64))
    assert (found.ratio, found.explained_by, found.right()) == (0, "equal", True)
    assert not bool(found.beyond.any())


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_a_kernel_that_accumulates_in_float32(dtype: torch.dtype) -> None:
    def steps(x: torch.Tensor) -> torch.Tensor:
        return x.exp() / x.exp().sum(-1, keepdim=True)

    found = judged(in_float32(steps), steps, drawn(64, 64, dtype=dtype))
    assert found.right()
    assert found.explained_by == "accumulation in float32"
    assert found.ratio <= 1.1


def test_a_kernel_that_rounds_each_op() -> None:
    def steps(x: torch.Tensor) -> torch.Tensor:
        e = (x - x.amax(-1, keepdim=True)).exp()
        return (e / e.sum(-1, keepdim=True) - 0.01) * 3

    x = drawn(64, 64, dtype=torch.bfloat16)
    found = judged(lambda x: steps(x.clone()) * 1.0 + 0, steps, x)
    assert found.explained_by == "equal"
    found = judged(lambda x: ((x.exp() / x.exp().sum(-1, keepdim=True)) - 0.01) * 3, steps, x)
    assert found.right()
    assert found.explained_by == "rounding after each op in bfloat16"


def test_a_kernel_that_accumulates_in_bfloat16() -> None:
    x = drawn(32, 1024, dtype=torch.bfloat16)
    found = judged(_chain, lambda x: x.sum(1), x)
    assert found.right()
    assert found.explained_by == "accumulation in bfloat16"
    assert found.better is not None
    assert found.better < 0.5


def test_a_sum_that_a_low_dtype_stops_is_wrong() -> None:
    x = drawn(32, 4096, dtype=torch.bfloat16).abs()
    assert not judged(_chain, lambda x: x.sum(1), x).right()


def _chain(x: torch.Tensor) -> torch.Tensor:
    total = torch.zeros_like(x[:, 0])
    for part in x.split(2, 1):
        total = total + part.sum(1)
    return total


@pytest.mark.parametrize("dtype", ALL, ids=str)
@pytest.mark.parametrize("factor", [1.01, 0.985])
def test_a_scaled_result_has_a_direction(dtype: torch.dtype, factor: float) -> None:
    found = judged(in_float32(lambda x: softmax(x) * factor), softmax, drawn(64, 256, dtype=dtype))
    assert not found.right()
    assert found.explained_by == ""
    assert found.bias is not None
    assert found.bias.direction == "result"
    assert found.bias.slope == pytest.approx(factor - 1, rel=0.05)


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_a_row_that_is_scaled_is_named(dtype: torch.dtype) -> None:
    x = drawn(64, 512, dtype=dtype)
    factor = torch.ones(64, 1)
    factor[5] = 1.02
    found = judged(in_float32(lambda x: functional.gelu(x) * factor), functional.gelu, x)
    assert not found.right()
    assert found.bias is not None
    assert found.bias.direction.endswith("at dimension 0, 5")
    assert found.bias.slope == pytest.approx(0.02, rel=0.1) or "constant" in found.bias.direction


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("factor", [1 / math.sqrt(96), math.log2(math.e), 1 / 0.9])
def test_a_constant_that_was_rounded_to_the_dtype_is_right(dtype: torch.dtype, factor: float) -> None:
    rounded = torch.tensor(factor).to(dtype)
    assert judged(lambda x: x * rounded, lambda x: x * factor, drawn(256, 256, dtype=dtype)).right()


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_equal_elements_have_equal_errors_and_thus_no_direction(dtype: torch.dtype) -> None:
    def steps(x: torch.Tensor) -> torch.Tensor:
        return ((x * 1.1) * 1.1) * 1.1

    found = []
    for value in torch.linspace(0.3, 0.6, 24).tolist():
        x = torch.full((64, 64), value, dtype=dtype)
        found.append(
            judged(steps, lambda x: x * 1.1 * 1.1 * 1.1 if x.dtype is torch.float64 else in_float32(steps)(x), x)
        )
    assert all(item.right() for item in found)
    assert max(float(item.units.max()) for item in found) > 0


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_numbers_that_a_dtype_flushes_to_zero_have_no_direction(dtype: torch.dtype) -> None:
    tiny = torch.finfo(dtype).tiny * torch.finfo(dtype).eps / 3
    x = torch.full((64, 64), tiny, dtype=torch.float32)
    assert judged(lambda x: x.to(dtype), lambda x: x.float().to(dtype) if x.dtype == torch.float32 else x, x).right()


def test_sums_in_any_order_are_right_and_lost_elements_are_not() -> None:
    a, b = drawn(64, 1024), drawn(1024, 48, seed=1)

    def split(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return sum(p @ q for p, q in zip(a.chunk(64, 1), b.chunk(64, 0), strict=True))  # type: ignore[return-value]

    assert judged(split, torch.mm, a, b).right()
    assert not judged(lambda a, b: a[:, :-1] @ b[:-1], torch.mm, a, b).right()


def test_the_argument_of_an_exponential_function_may_be_scaled() -> None:
    x = drawn(64, 256) * 30
    assert judged(lambda x: torch.exp2(x * math.log2(math.e)), torch.exp, x).right()
    assert not judged(lambda x: torch.exp2(x * 1.4427), torch.exp, x).right()


def test_a_scan_one_after_the_other_is_right_in_float32() -> None:
    def scan(x: torch.Tensor) -> torch.Tensor:
        columns, total = [], torch.zeros(len(x))
        for column in x.unbind(1):
            total = total + column
            columns.append(total)
        return torch.stack(columns, 1)

    for x in (drawn(8, 2048), drawn(8, 2048).abs()):
        found = judged(scan, lambda x: x.cumsum(1), x)
        assert found.right(), found.ratio
    x[:, 7] = 0.5
    assert not judged(lambda x: scan(x.masked_fill(x == 0.5, 0)), lambda x: x.cumsum(1), x).right()


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_small_integers_leave_no_room(dtype: torch.dtype) -> None:
    x = drawn(16, 64, dtype=dtype).sign()
    assert judged(in_float32(lambda x: x.view(16, 8, 8).sum(1).sum(1)), lambda x: x.sum(1), x).right()
    lost = judged(in_float32(lambda x: x[:, 1:].sum(1)), lambda x: x.sum(1), x)
    assert not lost.right()
    assert bool(lost.beyond.all())


def test_an_ill_conditioned_reference_has_large_units() -> None:
    def one_pass(x: torch.Tensor) -> torch.Tensor:
        return (x * x).mean(-1) - x.mean(-1) ** 2

    def two_passes(x: torch.Tensor) -> torch.Tensor:
        return x.var(-1, correction=0)

    x = drawn(64, 256) + 300
    assert judged(one_pass, lambda x: (x.square()).mean(-1) - x.mean(-1).square(), x).right()
    assert judged(two_passes, one_pass, x).right()
    assert not judged(one_pass, two_passes, x).right()


def test_an_approximation_is_wrong_unless_it_is_claimed() -> None:
    x = drawn(64, 256)
    tanh = lambda x: functional.gelu(x, approximate="tanh")  # noqa: E731
    assert not judged(tanh, functional.gelu, x).right()
    found = judged(tanh, functional.gelu, x, approximate=1e-3)
    assert found.right()
    assert found.explained_by == "approximation"
    assert not judged(tanh, functional.gelu, x, approximate=1e-6).right()
    assert not judged(lambda x: tanh(x) * torch.nan, functional.gelu, x, approximate=1.0).right()
    x[0] = torch.nan
    assert judged(tanh, functional.gelu, x, approximate=1e-3).right()
    assert not judged(lambda x: tanh(x).nan_to_num(nan=0.0), functional.gelu, x, approximate=1.0).right()


@pytest.mark.parametrize(
    ("got", "wanted", "right"),
    [
        ([math.nan, 1], [1, 1], False),
        ([math.inf, 1], [1, 1], False),
        ([1, 1], [math.nan, 1], False),
        ([math.nan, 1], [math.nan, 1], True),
        ([-math.inf, 1], [-math.inf, 1], True),
        ([math.inf, 1], [-math.inf, 1], False),
        ([0.0, 1], [-0.0, 1], True),
        ([0.0, 1], [1e-40, 1], True),
        ([math.inf, 2], [math.inf, 1], False),
    ],
)
def test_values_that_are_not_finite(got: list[float], wanted: list[float], right: bool) -> None:
    found = judged(lambda _: torch.tensor(got), lambda x: x * 1.0, torch.tensor(wanted))
    assert found.right() is right
    assert bool(found.error.isfinite().all()) is (right or got[0] == math.inf == wanted[0])


def test_overflow_of_the_dtype_is_right() -> None:
    x = torch.full((4,), 60000.0, dtype=torch.float16)
    assert judged(lambda x: (x.float() * 2).half(), lambda x: x * 2, x).right()


def test_integers_and_bools() -> None:
    x = drawn(64, 64, dtype=torch.bfloat16)
    assert judged(lambda x: x.argmax(1), lambda x: x.argmax(1), x).explained_by == "equal"
    wrong = judged(lambda x: (x.argmax(1) + 1) % 64, lambda x: x.argmax(1), x)
    assert wrong.ratio == math.inf
    assert wrong.beyond.shape == (64,)
    assert not judged(lambda x: x < 0.1, lambda x: x < 0, x).right()
    near = torch.tensor([[1.0, 1.0 + 2**-23]])
    assert judged(lambda _: torch.tensor([0]), lambda x: (x.exp() / 3).argmax(1), near).right()


@pytest.mark.parametrize("dtype", [torch.complex32, torch.complex64, torch.complex128], ids=str)
def test_complex_numbers(dtype: torch.dtype) -> None:
    z = torch.view_as_complex(drawn(64, 64, 2)).to(dtype)

    def reference(z: torch.Tensor) -> torch.Tensor:
        return z + z

    def kernel(z: torch.Tensor, factor: float = 2.0) -> torch.Tensor:
        return (z.to(torch.complex128) * factor).to(z.dtype)

    assert judged(reference, reference, z).explained_by == "equal"
    assert judged(kernel, reference, z).right()
    wrong = judged(lambda z: kernel(z, 2.02), reference, z)
    assert not wrong.right()
    assert wrong.error.dtype is torch.complex128


def test_float64_is_judged_in_float64() -> None:
    x = drawn(64, 64).double()
    assert judged(lambda x: x.exp() / x.exp().sum(-1, keepdim=True), softmax, x).right()
    assert not judged(lambda x: softmax(x.float()).double(), softmax, x).right()


@pytest.mark.parametrize(("given", "made"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
def test_the_narrower_dtype_counts(given: torch.dtype, made: torch.dtype) -> None:
    x = drawn(64, 64, dtype=given)
    assert judged(lambda x: softmax(x.float()).to(made), softmax, x).right()
    assert judged(lambda x: softmax(x.float()).bfloat16().to(made), softmax, x).right()


def test_empty_single_and_several_results() -> None:
    x = drawn(0, 4)
    assert judged(lambda x: x * 2, lambda x: x * 2, x).right()
    assert judged(lambda x: x * 2 + 0, lambda x: x * 2, torch.tensor(3.0)).right()
    assert not judged(lambda x: x * 2.1, lambda x: x * 2, torch.tensor(3.0)).right()
    x = drawn(6, 4).T
    runs = ReferenceRuns(lambda x: [x.exp(), x.argmax(0), x.T], [x])
    found = judge_results([x.exp() * 1.1, x.argmax(0), x.T], runs)
    assert [item.right() for item in found] == [False, True, True]


def test_another_structure_raises() -> None:
    with pytest.raises(ValueError, match=r"shapes \[\(2,\)\], the reference's \[\(4,\)\]"):
        judged(lambda x: x[:2], lambda x: x * 1, drawn(4))


def test_a_step_that_rounding_flips_is_right() -> None:
    x = torch.arange(-8, 8.0).div(2).add(1e-7)
    assert judged(lambda x: ((x * 3 + 1e-7) / 3).round(), lambda x: x.mul(3).div(3).round(), x).right()
    assert not judged(lambda x: x.round() + (x > 3), lambda x: x.round(), x).right()


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_gradients_are_judged_as_results(dtype: torch.dtype) -> None:
    def gradient(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
        def compute(x: torch.Tensor) -> torch.Tensor:
            leaf = x.detach().requires_grad_()
            return torch.autograd.grad(function(leaf).square().sum(), leaf)[0]

        return compute

    x = drawn(64, 64, dtype=dtype)
    right = lambda x: softmax(x.float()).to(x.dtype)  # noqa: E731
    assert judged(gradient(right), gradient(softmax), x).right()
    assert not judged(lambda x: gradient(right)(x) * 1.05, gradient(softmax), x).right()


def test_a_call_in_float32_that_rounds_to_bfloat16_is_known() -> None:
    x, w = drawn(64, 64), drawn(64, 64, seed=1)
    moved = x * (1 + 2**-14 * drawn(64, 64, seed=2).sign())
    reference = (x @ w, moved @ w)

    def answers(kernel: Callable[[torch.Tensor], torch.Tensor]) -> bool | None:
        return resolves(kernel(x), kernel(moved), *reference)

    assert answers(lambda x: x @ w) is True
    assert answers(lambda x: (x @ w) * 1.02) is True
    assert answers(lambda x: torch.cat([(x @ w)[:48], torch.zeros(16, 64)])) is True
    assert answers(lambda x: (x.bfloat16() @ w.bfloat16()).float()) is False
    assert answers(lambda x: x.bfloat16().float() @ w) is False
    assert resolves(x, x, x, x) is None


def test_the_ratio_of_the_reference_itself_is_told() -> None:
    found = judged(lambda x: x.exp() * 1.001, lambda x: x.exp(), drawn(64))
    assert found.ratio > LIMIT
    assert found.own_ratio is not None
    assert found.own_ratio <= 1


@pytest.mark.slow
def test_right_kernels_are_accepted_and_wrong_ones_that_show_are_found() -> None:
    """``python -m tests.core.run.rounding_cases`` has a line for each."""
    cases = [(dtype, case) for dtype in rounding_cases.DTYPES for case in rounding_cases.cases(dtype)]
    judged_otherwise = [
        (str(dtype), case.name)
        for dtype, case in cases
        if (case.right or case.shows) and rounding_cases.judged(case).right() is not case.right
    ]
    assert len(cases) > 240
    assert judged_otherwise == [
        # Each addition of the same terms rounds the same way; kernels that add 4,096 of them one by one are rare.
        ("torch.float32", "sum of a constant, one after the other")
    ]
