"""Pairs whose ops have no float64 kernel, or cast inside."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hashbench.extensions.implementations.pair.verdict import PairOutcome
from tests.core.run.one_dtype import kernels
from tests.extensions.implementations.pair.modules import compared


@pytest.fixture
def ops() -> Iterator[Any]:
    with kernels() as made:
        yield made


FUNCTIONS = ("mm32", "mm16", "casts", "returns_low")


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("both", [True, False], ids=["on both sides", "on one side"])
def test_a_clean_pair_behind_a_fallback_is_no_mistake(ops: Any, name: str, *, both: bool) -> None:
    dtype = torch.bfloat16 if name == "mm16" else torch.float32

    def with_op(model: Any, x: torch.Tensor) -> torch.Tensor:
        return getattr(ops, name)(x, model.w0).tanh() @ model.w1

    def plain(model: Any, x: torch.Tensor) -> torch.Tensor:
        return (x @ model.w0).tanh() @ model.w1

    verdict = compared(with_op if both else plain, with_op, dtype=dtype)
    assert verdict.outcome in (PairOutcome.EQUAL, PairOutcome.ROUNDING)
    assert verdict.fallbacks is not None
    assert sum(verdict.fallbacks.values()) == (2 if both else 1)
    swapped = compared(with_op, plain, dtype=dtype)
    assert swapped.outcome in (PairOutcome.EQUAL, PairOutcome.ROUNDING)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_mistake_behind_a_fallback_is_named(ops: Any, name: str) -> None:
    dtype, factor = (torch.bfloat16, 1.05) if name == "mm16" else (torch.float32, 1.001)

    def plain(model: Any, x: torch.Tensor) -> torch.Tensor:
        return ((x @ model.w0).tanh() @ model.w1).sigmoid()

    def wrong(model: Any, x: torch.Tensor) -> torch.Tensor:
        return ((getattr(ops, name)(x, model.w0).tanh() * factor) @ model.w1).sigmoid()

    verdict = compared(plain, wrong, dtype=dtype)
    assert verdict.outcome is PairOutcome.MISTAKE
    assert verdict.parted[0].b is not None
    assert verdict.parted[0].b.op == "aten.mul.Tensor"


def test_grouped_mm_of_bfloat16_agrees_with_a_loop_of_matmuls() -> None:
    offsets = torch.tensor([4, 8], dtype=torch.int32)

    def grouped(model: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.grouped_mm(x, torch.stack([model.w0, model.w1]), offs=offsets)

    def loop(model: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x[:4] @ model.w0, x[4:] @ model.w1])

    verdict = compared(grouped, loop, dtype=torch.bfloat16)
    assert verdict.outcome in (PairOutcome.EQUAL, PairOutcome.ROUNDING)
    assert verdict.fallbacks == {"aten._grouped_mm.default": 1}


def test_rounding_to_eight_bits_on_purpose_stays() -> None:
    def first(model: Any, x: torch.Tensor) -> torch.Tensor:
        scale = x.abs().amax() / 127
        return ((x / scale).round().clamp(-128, 127).to(torch.int8).float() * scale) @ model.w0

    def other(model: Any, x: torch.Tensor) -> torch.Tensor:
        scale = x.abs().amax() / 127
        return (torch.clamp(torch.round(x * (1 / scale)), -128, 127).to(torch.int8).float() @ model.w0) * scale

    def wide(model: Any, x: torch.Tensor) -> torch.Tensor:
        return x @ model.w0

    assert compared(first, other).outcome in (PairOutcome.EQUAL, PairOutcome.ROUNDING)
    assert compared(first, wide).outcome is PairOutcome.MISTAKE
