"""Runs of a reference in its own dtype, in float64 and with random rounding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from hashbench.core.run.rounding_reference import NotJudgedError, ReferenceRuns, Rounding

ACCUMULATION, EACH_OP, LOW = Rounding
F32 = torch.float32


def drawn(*shape: int, dtype: torch.dtype = F32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def units_of(runs: ReferenceRuns, rounding: Rounding, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    """How far random rounding moves each element of the first result, in roundoffs of float32."""
    exact = runs.exact[0]
    return (runs.rounded(rounding, F32, seed, scale)[0] - exact).abs() / exact.abs() * 2**24


def gradient(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    def compute(x: torch.Tensor) -> torch.Tensor:
        leaf = x.detach().requires_grad_()
        return torch.autograd.grad(function(leaf).sum(), leaf)[0]

    return compute


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_reference_runs_in_its_own_dtype_and_in_float64(dtype: torch.dtype) -> None:
    x = drawn(4, 6, dtype=dtype)
    runs = ReferenceRuns(lambda x: (x.float().softmax(-1).to(x.dtype), {"b": x.argmax(-1)}), [x])
    assert [item.dtype for item in runs.own] == [dtype, torch.int64]
    assert torch.equal(runs.own[0], x.float().softmax(-1).to(dtype))
    assert torch.equal(runs.exact[0], x.double().softmax(-1))
    assert torch.equal(runs.exact[1], x.argmax(-1))


def test_gradients_are_taken_inside() -> None:
    x = drawn(4, 6, dtype=torch.bfloat16)
    runs = ReferenceRuns(gradient(lambda x: x.float().exp()), [x])
    assert runs.own[0].dtype is torch.bfloat16
    assert torch.equal(runs.exact[0], x.double().exp())
    assert 0 < float(units_of(runs, ACCUMULATION).max()) < 4


def test_each_run_has_its_own_arguments() -> None:
    def reference(x: torch.Tensor) -> torch.Tensor:
        x[1:].mul_(1 / 3)
        return x

    x = drawn(3)
    before = x.clone()
    runs = ReferenceRuns(reference, [x])
    assert torch.allclose(runs.own[0], runs.exact[0].float())
    assert torch.equal(x, before)
    moved = units_of(runs, EACH_OP, seed=1)
    assert moved[0] == 0
    assert bool((moved[1:] > 0).all())


def test_a_reference_that_draws_is_not_judged() -> None:
    x = drawn(4)
    before = torch.get_rng_state()
    with pytest.raises(NotJudgedError, match="random"):
        _ = ReferenceRuns(lambda x: functional.dropout(x), [x]).own
    with pytest.raises(NotJudgedError, match=r"aten\.randn"):
        _ = ReferenceRuns(lambda x: x + torch.randn(4, generator=torch.Generator()), [x]).own
    with pytest.raises(NotJudgedError, match=r"aten\.normal"), torch.random.fork_rng():
        _ = ReferenceRuns(lambda x: (torch.manual_seed(0), torch.normal(x, 1.0))[1], [x]).own
    assert torch.equal(before, torch.get_rng_state())
    assert ReferenceRuns(lambda x: functional.dropout(x, training=False), [x]).own[0].shape == (4,)


def test_what_the_reference_raises_is_raised() -> None:
    with pytest.raises(RuntimeError, match="size"):
        _ = ReferenceRuns(lambda x: x @ torch.ones(7), [drawn(4)]).own


def test_what_it_raises_in_float64_is_told() -> None:
    def reference(x: torch.Tensor) -> torch.Tensor:
        if x.dtype is torch.float64:
            raise ValueError("only float32")
        return x

    runs = ReferenceRuns(reference, [drawn(4)])
    assert runs.own[0].dtype is F32
    with pytest.raises(NotJudgedError, match="ValueError: only float32"):
        _ = runs.exact


def test_another_shape_in_float64_is_told() -> None:
    runs = ReferenceRuns(lambda x: x.view(torch.int32).view(-1), [drawn(4)])
    with pytest.raises(NotJudgedError, match="shapes"):
        _ = runs.exact


def test_views_move_nothing() -> None:
    runs = ReferenceRuns(lambda x: x.T.view(-1)[3:].unsqueeze(0), [drawn(4, 6).T.contiguous().T])
    assert torch.equal(runs.rounded(EACH_OP, F32)[0], runs.exact[0])


def test_copies_of_what_is_rounded_move_nothing_more() -> None:
    once = ReferenceRuns(lambda x: x / 3, [drawn(64)])
    copied = ReferenceRuns(
        lambda x: torch.cat([(x / 3).clone().contiguous()]).where(x < 9, 0.0).relu_().neg(), [drawn(64).abs()]
    )
    assert float(units_of(once, EACH_OP).max()) <= 2
    assert float(units_of(copied, EACH_OP).max()) <= 2


def test_what_the_dtype_holds_is_not_rounded() -> None:
    integers = drawn(8, 4096).mul(9).round()
    runs = ReferenceRuns(lambda x: (x.sum(1), (x.T @ x), x.cumsum(1), x.mean(1)), [integers])
    for exact, moved in zip(runs.exact, runs.rounded(ACCUMULATION, F32), strict=True):
        assert torch.equal(exact, moved)


def test_each_seed_is_another_rounding_and_the_same_when_repeated() -> None:
    first, again = (ReferenceRuns(lambda x: x.sigmoid(), [drawn(64)]).rounded(EACH_OP, F32, 1)[0] for _ in range(2))
    assert torch.equal(first, again)
    runs = ReferenceRuns(lambda x: x.sigmoid(), [drawn(64)])
    assert not torch.equal(first, runs.rounded(EACH_OP, F32, 2)[0])
    assert float(units_of(runs, EACH_OP, 1, scale=16).min()) > 8


def test_each_op_rounds_to_the_dtype_that_it_has() -> None:
    x = drawn(64, dtype=torch.bfloat16)
    low, high = (
        ReferenceRuns(function, [x])
        for function in (
            lambda x: x.exp() * 3,
            lambda x: (x.float().exp() * 3.0) if x.dtype != torch.float64 else x.exp() * 3.0,
        )
    )
    assert float(units_of(low, EACH_OP).max()) > 2**15
    assert float(units_of(low, ACCUMULATION).max()) < 4
    assert float(units_of(high, EACH_OP).max()) < 4


def test_a_cast_in_the_middle_rounds() -> None:
    x = drawn(64)
    runs = ReferenceRuns(lambda x: x.to(torch.bfloat16) * 3.0 - 1, [x])
    assert float(units_of(runs, EACH_OP).max()) > 2**15
    assert float(units_of(runs, ACCUMULATION).max()) < 2**10


@pytest.mark.parametrize(
    ("reference", "shape"),
    [
        pytest.param(lambda x: x.sum(-1), (8, 4096), id="sum"),
        pytest.param(lambda x: x @ torch.ones(4096, 3, dtype=x.dtype), (8, 4096), id="mm"),
        pytest.param(lambda x: x.cumsum(-1)[:, -1], (8, 4096), id="cumsum"),
        pytest.param(
            lambda x: functional.conv1d(x.unsqueeze(1), torch.ones(1, 1, 4096, dtype=x.dtype)),
            (8, 4096),
            id="convolution",
        ),
    ],
)
def test_the_rounding_of_a_sum_grows_with_its_terms(reference: Any, shape: tuple[int, ...]) -> None:
    one_sign = ReferenceRuns(reference, [drawn(*shape).abs()])
    median = float(units_of(one_sign, ACCUMULATION).median())
    assert 20 < median < 60  # 1 + sqrt(4096 / 3)
    signs = ReferenceRuns(reference, [drawn(*shape)])
    exact, moved = signs.exact[0], signs.rounded(ACCUMULATION, F32)[0]
    magnitudes = signs._folds
    assert magnitudes
    assert 0.5 < float((moved - exact).abs().median()) / (2**-24 * 4096 * 0.8) < 4


def test_sums_accumulate_in_the_low_dtype_at_last() -> None:
    runs = ReferenceRuns(lambda x: x.sum(-1), [drawn(8, 4096, dtype=torch.bfloat16).abs()])
    each, low = (float(units_of(runs, rounding).median()) / 2**16 for rounding in (EACH_OP, LOW))
    assert each < 3
    assert low > 5


def test_cancellation_is_in_the_samples() -> None:
    def one_pass(x: torch.Tensor) -> torch.Tensor:
        return (x * x).mean(-1) - x.mean(-1) ** 2

    x = drawn(8, 256) + 100
    one, two = (ReferenceRuns(function, [x]) for function in (one_pass, lambda x: x.var(-1, correction=0)))
    assert float(units_of(one, ACCUMULATION).median()) > 1000
    assert float(units_of(two, ACCUMULATION).median()) < 100


def test_steps_inside_an_op_are_rounded() -> None:
    x = drawn(8, 64) + 1000  # less its mean, it has a relative error of 1000 roundoffs
    runs = ReferenceRuns(lambda x: functional.layer_norm(x, [64]), [x])
    assert float(units_of(runs, ACCUMULATION).median()) > 100


def test_the_rounding_of_a_row_is_shared() -> None:
    runs = ReferenceRuns(lambda x: x.exp() / x.exp().sum(-1, keepdim=True), [drawn(64, 64, dtype=torch.bfloat16)])
    moved = (runs.rounded(EACH_OP, F32)[0] / runs.exact[0] - 1) * 2**8
    assert float(moved.mean(1).std()) > 2 * float(moved.std()) / 8


def test_complex_numbers_and_memory_of_closures() -> None:
    z = torch.view_as_complex(drawn(50, 2))
    weight = drawn(50, dtype=torch.bfloat16)
    runs = ReferenceRuns(lambda z: z * z.conj() * weight * 0.1, [z])
    assert runs.exact[0].dtype is torch.complex128
    moved = runs.rounded(ACCUMULATION, F32)[0]
    assert bool((moved.real != runs.exact[0].real).any())
    assert torch.allclose(moved, runs.exact[0])


def test_no_other_mode_sees_the_runs() -> None:
    seen: list[Any] = []

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    runs = ReferenceRuns(lambda x: x.exp(), [drawn(4)])
    with Watching():
        _ = runs.own, runs.exact, runs.rounded(EACH_OP, F32)
    assert seen == []
    assert torch.get_default_dtype() is F32


def test_ops_without_float64_are_counted() -> None:
    library = torch.library.Library("rounding_runs", "FRAGMENT")
    library.define("low(Tensor x) -> Tensor")

    def low(x: torch.Tensor) -> torch.Tensor:
        if x.dtype is not F32:
            raise RuntimeError("float32 only")
        return x * 3

    library.impl("low", low, "CPU")
    runs = ReferenceRuns(torch.ops.rounding_runs.low, [drawn(4)])
    assert runs.exact[0].dtype is torch.float64
    assert runs.fallbacks == {"rounding_runs.low.default": 1}


def test_a_sample_that_overflows_alone_explains_nothing() -> None:
    x = torch.full((64,), 65504.0, dtype=torch.float16)  # the largest number
    runs = ReferenceRuns(lambda x: x / 11 * 11, [x])
    assert bool(runs.own[0].isfinite().all())
    moved = [runs.rounded(EACH_OP, F32, seed)[0] for seed in range(8)]
    assert all(bool(each.isfinite().all()) for each in moved)
    unbounded = ReferenceRuns(lambda x: x / 0, [x])
    assert bool(unbounded.rounded(EACH_OP, F32)[0].isinf().all())


def test_steps_of_another_shape_are_not_taken() -> None:
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    q = drawn(1, 2, 8, 4)
    runs = ReferenceRuns(op, [q, q, q])
    assert [item.shape for item in runs.rounded(EACH_OP, F32)] == [item.shape for item in runs.own]
