"""Runs in float64 of programs that compute in lower dtypes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hashbench.core.divergence.content import COARSE, EXACT, FALLBACK
from hashbench.core.run.wide import WideMode, default_dtype
from tests.core.run.one_dtype import drawn, kernels

THIRD = torch.tensor([1.0, 3.0])


@pytest.fixture
def ops() -> Iterator[Any]:
    with kernels() as made:
        yield made


@pytest.mark.parametrize(
    "compute",
    [
        pytest.param(lambda x: x.bfloat16() / 3, id="cast"),
        pytest.param(lambda x: torch.softmax(x, 0, dtype=torch.float32), id="dtype argument"),
        pytest.param(lambda _: torch.ones(2, dtype=torch.float16) / 3, id="factory"),
        pytest.param(lambda _: THIRD / 3, id="tensor of a closure"),
        pytest.param(lambda _: torch.view_as_real(torch.polar(THIRD, THIRD)), id="complex"),
    ],
)
def test_low_dtypes_are_computed_in_float64(compute: Any) -> None:
    with WideMode() as mode:
        result = compute(THIRD.double())
    assert result.dtype is torch.float64
    assert (result != result.float().double()).any()
    assert not mode.fallbacks


def test_autocast_rounds_nothing() -> None:
    x = drawn(4, 4, dtype=torch.float64)
    with WideMode(), torch.autocast("cpu", torch.bfloat16):
        result = x @ x
    assert torch.equal(result, x @ x)


def test_quantized_and_integer_dtypes_stay() -> None:
    x = torch.tensor([0.3, 1.7], dtype=torch.float64)
    with WideMode():
        low, whole = x.to(torch.float8_e4m3fn), x.to(torch.int8)
        back = low.float()
    assert (low.dtype, whole.dtype) == (torch.float8_e4m3fn, torch.int8)
    assert back.tolist() == [0.3125, 1.75]


def test_views_of_one_low_tensor_see_each_others_writes() -> None:
    cache = torch.zeros(4)
    with WideMode():
        cache[:2].add_(torch.ones(2, dtype=torch.float64) / 3)
        seen = cache * 1.0
    assert seen.tolist() == [1 / 3, 1 / 3, 0.0, 0.0]
    assert cache.tolist() == [0.0] * 4


def test_the_default_dtype_comes_back_after_an_exception() -> None:
    with pytest.raises(RuntimeError, match="inside"), default_dtype(torch.float64):
        raise RuntimeError("inside")
    assert torch.get_default_dtype() is torch.float32


# ------------------------------------------------------------------------------------------------------- lower dtypes


@pytest.mark.parametrize(
    ("name", "counted", "tolerance"),
    [
        ("mm32", "pair_test.mm32.default", FALLBACK),
        ("mm16", "pair_test.mm16.default in bfloat16", COARSE),
        ("casts", "pair_test.casts.default", FALLBACK),
        ("returns_low", "pair_test.returns_low.default", FALLBACK),
    ],
)
def test_an_op_computed_in_a_lower_dtype_is_counted(ops: Any, name: str, counted: str, tolerance: float) -> None:
    x = drawn(4, 4, dtype=torch.float64)
    with WideMode() as mode:
        result = getattr(ops, name)(x, x)
    assert mode.fallbacks == {counted: 1}
    assert result.dtype is torch.float64
    assert 1e-9 < float((result - x @ x).abs().max() / (x @ x).abs().max()) < 10 * max(tolerance, 1e-6)
    assert mode.tolerance == EXACT


def test_a_custom_op_that_computes_in_float64_is_no_fallback(ops: Any) -> None:
    x = drawn(4, 4)
    with WideMode() as mode:
        ops.mm64(x, x)
    assert not mode.fallbacks


def test_writes_of_an_op_without_float64_kernel_arrive(ops: Any) -> None:
    x, into = drawn(4, 4, dtype=torch.float64), torch.zeros(4, 4, dtype=torch.float64)
    with WideMode() as mode:
        ops.mm_into(x, x, into)
        scaled = x.clone()
        same = ops.scale_(scaled, 1.5)
    assert same is scaled
    torch.testing.assert_close(into, x @ x, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(scaled, x * 1.5, rtol=1e-5, atol=1e-5)
    assert mode.fallbacks == {"pair_test.mm_into.default": 1, "pair_test.scale_.default": 1}


def test_what_raises_in_every_dtype_raises_its_first_error(ops: Any) -> None:
    with WideMode() as mode, pytest.raises(TypeError, match=r"only torch\.float32"):
        ops.scale_(torch.ones(2, dtype=torch.int64), 1.5)
    assert not mode.fallbacks
