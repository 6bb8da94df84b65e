"""What a comparison leaves as it was, and sides that raise."""

from __future__ import annotations

import random
import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hashbench.core.errors import HashbenchError
from hashbench.extensions.implementations.pair.check import compare_implementations
from hashbench.extensions.implementations.pair.sides import Side
from hashbench.extensions.implementations.pair.verdict import ImplementationsVerdict, PairOutcome
from tests.core.run.one_dtype import drawn
from tests.extensions.implementations.pair.modules import compared

X = drawn(8, 16)


class Counting(nn.Module):
    """Changes its input, a buffer, the generators and torch's settings in each call."""

    calls: torch.Tensor

    def __init__(self, *, fails: str = "") -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)
        self.linear = nn.Linear(16, 16)
        self.register_buffer("calls", torch.zeros(1))
        self.fails = fails

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        self.calls += 1
        torch.rand(3)
        if self.fails == "always" or (self.fails and x.dtype is torch.float64):
            raise ValueError("it fails on purpose")
        return self.linear(self.norm(x)) * self.calls


def models(a: nn.Module, b: nn.Module, x: torch.Tensor, **side: Any) -> ImplementationsVerdict:
    """Compare models that the caller holds, and tensors that are theirs."""
    return compare_implementations(Side(lambda: a, lambda: (x,), **side), Side(lambda: b, lambda: (x,), **side))


def state(*held: nn.Module, x: torch.Tensor) -> list[Any]:
    """Return everything that a comparison must not change."""
    of_models = [
        (name, value.clone(), value.dtype, value.data_ptr(), model.training)
        for model in held
        for name, value in [*model.named_parameters(), *model.named_buffers()]
    ]
    gradients = [parameter.grad for model in held for parameter in model.parameters()]
    generators = random.getstate()[1], np.random.get_state()[1].tolist(), torch.get_rng_state()  # type: ignore[index]
    return [of_models, gradients, generators, x.clone(), torch.get_default_dtype(), torch.is_grad_enabled()]


def assert_equal(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for first, second in zip(one, other, strict=True):
            assert_equal(first, second)
    else:
        assert one == other


@pytest.mark.parametrize("fails", ["", "in float64", "always"])
@pytest.mark.parametrize("gradients", [True, False], ids=["with gradients", "without"])
def test_models_inputs_generators_and_settings_stay_as_they_are(fails: str, *, gradients: bool) -> None:
    a, b, x = Counting(), Counting(fails=fails), X.clone()
    b.load_state_dict(a.state_dict())
    b.eval()
    loss = torch.sum if gradients else None
    before = state(a, b, x=x)
    try:
        verdict = models(a, b, x, loss=loss)
        assert verdict.outcome is (PairOutcome.NOT_KNOWN if fails else PairOutcome.MISTAKE)
    except HashbenchError:
        assert fails == "always"
    assert_equal(before, state(a, b, x=x))


def test_a_function_that_closes_over_a_model_leaves_it_as_it_is() -> None:
    model, x = Counting(), X.clone()
    before = state(model, x=x)
    assert models(lambda x: model.linear(x), lambda x: model.linear(x).tanh(), x).outcome is PairOutcome.MISTAKE  # type: ignore[arg-type]
    assert_equal(before, state(model, x=x))


def test_what_a_model_writes_into_its_inputs_and_buffers_is_not_seen_by_the_next_run() -> None:
    a = Counting()
    verdict = models(a, a, X.clone())
    assert verdict.outcome is PairOutcome.EQUAL


# ---------------------------------------------------------------------------------------------------- sides that raise


def plain(model: Any, x: torch.Tensor) -> torch.Tensor:
    return x @ model.w0


def insists(model: Any, x: torch.Tensor) -> torch.Tensor:
    if x.dtype is not torch.float32:
        raise TypeError("give float32")
    return x @ model.w0


def viewed(model: Any, x: torch.Tensor) -> torch.Tensor:
    return (x @ model.w0).view(torch.int32).float().view(8, 16)


@pytest.mark.parametrize(
    ("a", "b", "said"),
    [
        pytest.param(plain, insists, r"in float64 alone \(b\) raised TypeError: give float32 \(", id="by itself"),
        pytest.param(insists, plain, r"in float64 alone \(a\) raised TypeError: give float32 \(", id="the other side"),
        pytest.param(plain, viewed, r"\(b\) raised RuntimeError: .*\(aten\.view\.default in test_check\.py:", id="op"),
    ],
)
def test_what_raises_in_float64_alone_is_not_known(a: Any, b: Any, said: str) -> None:
    verdict = compared(a, b)
    assert verdict.outcome is PairOutcome.NOT_KNOWN
    assert re.search(said, verdict.reason), verdict.reason


def raising(*_: Any) -> Any:
    raise ValueError("no weights")


def made() -> nn.Module:
    return nn.Linear(16, 16)


def given() -> Any:
    return (X,)


@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize(
    ("side", "said"),
    [
        pytest.param(Side(raising, given), r"cannot build \(b\): it raised ValueError: no weights \(test_c", id="make"),
        pytest.param(
            Side(made, raising), r"cannot build \(b\): it raised ValueError: no weights \(test_c", id="inputs"
        ),
        pytest.param(
            Side(made, given, raising), r"cannot run \(b\): it raised ValueError: no weights \(test_c", id="outputs"
        ),
        pytest.param(
            Side(lambda: raising, given), r"cannot run \(b\): it raised ValueError: no weights \(test_c", id="run"
        ),
    ],
)
def test_what_raises_in_its_own_dtype_is_an_error_that_names_the_side(side: Side, said: str, *, weights: bool) -> None:
    with pytest.raises(HashbenchError, match=said) as raised:
        compare_implementations(Side(made, given), side, weights=weights)
    assert isinstance(raised.value.__cause__, ValueError)
