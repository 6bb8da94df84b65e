"""Pairs that may differ in float64 although both are right, each beside one with a mistake."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hashbench.extensions.implementations.pair.check import compare_implementations
from hashbench.extensions.implementations.pair.finding import finding_of
from hashbench.extensions.implementations.pair.sides import Side
from hashbench.extensions.implementations.pair.verdict import ImplementationsVerdict, PairOutcome
from tests.core.run.one_dtype import drawn, kernels
from tests.extensions.implementations.pair.modules import compared, weights

THE_SAME = (PairOutcome.EQUAL, PairOutcome.ROUNDING)
X = drawn(32, 16)


def of_models(a: nn.Module, b: nn.Module, *, x: torch.Tensor = X) -> ImplementationsVerdict:
    """Compare two models that were built before."""
    return compare_implementations(Side(lambda: a, lambda: (x,)), Side(lambda: b, lambda: (x,)), weights=False)


# -------------------------------------------------------------------------------------------------------- choices


def one_way(model: Any, x: torch.Tensor) -> torch.Tensor:
    """Return numbers of which each second one is equal to the one before it."""
    return torch.stack([x @ model.w0, x @ model.w0], -1).flatten(1)


def other_way(model: Any, x: torch.Tensor) -> torch.Tensor:
    """Return the same, equal but for rounding."""
    reversed_sum = sum(x[:, i : i + 1] * model.w0[i] for i in reversed(range(16)))
    return torch.stack([x @ model.w0, reversed_sum], -1).flatten(1)


def after(choose: Callable[[torch.Tensor], torch.Tensor], numbers: Any) -> Any:
    def function(model: Any, x: torch.Tensor) -> torch.Tensor:
        return choose(numbers(model, x)).to(x.dtype).reshape(32, -1).cumsum(0)

    return function


def quantized(divide: bool) -> Any:
    def function(model: Any, x: torch.Tensor) -> torch.Tensor:
        scaled = x / 0.1 if divide else x * 10.0
        return scaled.round().clamp(-128, 127).to(torch.int8).to(x.dtype) @ model.w0.to(x.dtype)

    return function


HALVES = ((torch.arange(512, dtype=torch.float64) - 250.5) * 0.1).reshape(32, 16)

CHOICES = {
    "topk": lambda numbers: numbers.topk(3)[1],
    "argmax": lambda numbers: numbers.argmax(-1),
    "maximum of a dimension": lambda numbers: numbers.max(-1)[1],
    "sort": lambda numbers: numbers.sort(dim=-1, stable=True)[1] * torch.arange(32),
    "comparison": lambda numbers: (numbers[:, ::2] > numbers[:, 1::2]) * torch.arange(1, 17),
}


@pytest.mark.parametrize("name", CHOICES)
def test_a_choice_between_equal_values_is_not_known(name: str) -> None:
    verdict = compared(after(CHOICES[name], one_way), after(CHOICES[name], other_way), X)
    assert verdict.outcome is PairOutcome.NOT_KNOWN
    assert " in Made chooses between values that are equal to 12 digits" in verdict.reason
    assert verdict.parted[0].note == verdict.reason
    assert "With what (a) has there, all results of (b) agree in float64." in " ".join(str(finding_of(verdict)).split())


def test_rounding_to_eight_bits_at_a_half_is_not_known() -> None:
    verdict = compared(quantized(True), quantized(False), HALVES)
    assert verdict.outcome is PairOutcome.NOT_KNOWN
    assert verdict.reason.startswith("aten.round.default in Made chooses between")


@pytest.mark.parametrize(
    ("a", "b"),
    [
        pytest.param(after(lambda n: n.topk(2)[1], one_way), after(lambda n: n.topk(1)[1], one_way), id="another k"),
        pytest.param(after(lambda n: n.argmax(-1), one_way), after(lambda n: n.argmin(-1), one_way), id="the smallest"),
        pytest.param(
            after(lambda n: n.sort(-1)[1] * torch.arange(32), one_way),
            after(lambda n: n.sort(-1, descending=True)[1] * torch.arange(32), one_way),
            id="descending",
        ),
        pytest.param(
            after(lambda n: n[:, ::2] > 0.1, one_way), after(lambda n: n[:, ::2] > 0.2, one_way), id="threshold"
        ),
    ],
)
def test_a_real_mistake_at_a_choice_is_one(a: Any, b: Any) -> None:
    verdict = compared(a, b, X)
    assert verdict.outcome is PairOutcome.MISTAKE
    assert not verdict.notes


def test_another_rounding_of_what_is_no_half_is_a_mistake() -> None:
    def floor(model: Any, x: torch.Tensor) -> torch.Tensor:
        return (x * 10.0).floor().clamp(-128, 127).to(torch.int8).to(x.dtype) @ model.w0.to(x.dtype)

    assert compared(quantized(True), floor, X.double()).outcome is PairOutcome.MISTAKE


def test_a_mistake_behind_a_choice_is_named_and_the_choice_is_told() -> None:
    def scaled(model: Any, x: torch.Tensor) -> torch.Tensor:
        return after(CHOICES["argmax"], other_way)(model, x).sin() * 1.001

    def right(model: Any, x: torch.Tensor) -> torch.Tensor:
        return after(CHOICES["argmax"], one_way)(model, x).sin()

    verdict = compared(right, scaled, X)
    assert verdict.outcome is PairOutcome.MISTAKE
    assert verdict.parted[0].b is not None
    assert verdict.parted[0].b.op == "aten.mul.Tensor"
    (note,) = verdict.notes
    assert note.startswith("aten.argmax.default in Made chooses between values")


def test_a_choice_behind_a_fallback_is_known_to_its_digits() -> None:
    with kernels() as ops:

        def low(model: Any, x: torch.Tensor) -> torch.Tensor:
            return torch.stack([ops.mm32(x, model.w0), x @ model.w0], -1).flatten(1)

        verdict = compared(after(CHOICES["argmax"], one_way), after(CHOICES["argmax"], low), X)
    assert verdict.outcome is PairOutcome.NOT_KNOWN
    assert "equal to 5 digits" in verdict.reason


# ---------------------------------------------------------------------------------------------------------- draws


class Dropped(nn.Module):
    """A dropout between two matrices. ``before`` numbers are drawn before it."""

    def __init__(self, *, p: float = 0.5, before: int = 0, scale: float = 1.0, by_hand: bool = False) -> None:
        super().__init__()
        self.first, self.second = map(nn.Parameter, weights())
        self.dropout, self.before, self.scale, self.by_hand = nn.Dropout(p), before, scale, by_hand

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.before:
            torch.rand(self.before)
        hidden = (x @ self.first).tanh()
        if self.by_hand and self.training:
            hidden = hidden * (torch.rand(hidden.shape) < 0.5).to(x.dtype) * 2.0
        else:
            hidden = self.dropout(hidden)
        return (hidden @ self.second * self.scale).sigmoid()


def test_the_same_draws_align() -> None:
    assert of_models(Dropped(), Dropped()).outcome in THE_SAME


def test_draws_that_differ_are_not_known() -> None:
    verdict = of_models(Dropped(), Dropped(before=3))
    assert verdict.outcome is PairOutcome.NOT_KNOWN
    assert verdict.reason.startswith("aten.bernoulli_.float in Dropped.dropout draws random numbers that differ: use ")


def test_draws_of_another_op_are_not_known() -> None:
    verdict = of_models(Dropped(), Dropped(before=3, by_hand=True))
    assert verdict.outcome is PairOutcome.NOT_KNOWN
    assert "draws random numbers that differ" in verdict.reason


@pytest.mark.parametrize(
    ("b", "op"),
    [
        pytest.param(Dropped(before=3, scale=1.001), "aten.mul.Tensor", id="behind draws that differ"),
        pytest.param(Dropped(p=0.4), "aten.div_.Scalar", id="another probability"),
        pytest.param(Dropped().eval(), "aten.mm.default", id="on one side only"),
    ],
)
def test_a_mistake_beside_draws_is_one(b: nn.Module, op: str) -> None:
    verdict = of_models(Dropped(), b)
    assert verdict.outcome is PairOutcome.MISTAKE
    assert op in {parted.b.op for parted in verdict.parted if parted.b is not None}


# ------------------------------------------------------------------------------------------------------ constants


class Rotary(nn.Module):
    """Rotary embeddings whose frequencies are a buffer in float32, or are computed in each call."""

    inv_freq: torch.Tensor

    def __init__(self, *, buffer: bool, theta: float = 10000.0, width: int = 16) -> None:
        super().__init__()
        self.first, self.second = map(nn.Parameter, weights())
        self.theta, self.width, self.buffer = theta, width, buffer
        if buffer:
            self.register_buffer("inv_freq", self.frequencies(), persistent=False)

    def frequencies(self) -> torch.Tensor:
        return 1.0 / self.theta ** (torch.arange(0, self.width, 2).float() / self.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        frequencies = self.inv_freq if self.buffer else self.frequencies()
        angles = torch.outer(torch.arange(len(x)).float() * 17, frequencies)
        first, second = (x @ self.first).chunk(2, -1)
        turned = first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()
        return torch.cat(turned, -1) @ self.second


@pytest.mark.parametrize("buffer_of_a", [True, False], ids=["in a", "in b"])
def test_a_constant_that_is_kept_in_float32_is_taken_for_equal(*, buffer_of_a: bool) -> None:
    verdict = of_models(Rotary(buffer=buffer_of_a), Rotary(buffer=not buffer_of_a))
    assert verdict.outcome in THE_SAME
    (note,) = verdict.notes
    assert note.startswith(f"({'a' if buffer_of_a else 'b'}) keeps it in float32 (")
    assert "inv_freq of" in note
    assert note.endswith("taken for equal.")
    assert "taken for equal" in " ".join(str(finding_of(verdict)).split())


@pytest.mark.parametrize("theta", [10100.0, 10000.1])
@pytest.mark.parametrize("buffer_of_a", [True, False], ids=["in a", "in b"])
def test_another_constant_is_a_mistake(theta: float, *, buffer_of_a: bool) -> None:
    verdict = of_models(Rotary(buffer=buffer_of_a), Rotary(buffer=not buffer_of_a, theta=theta))
    assert verdict.outcome is PairOutcome.MISTAKE
    assert not verdict.notes


def test_a_mistake_beside_a_constant_in_float32_is_named() -> None:
    class Scaled(Rotary):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (super().forward(x) / math.sqrt(1.001)).sigmoid()

    class Right(Rotary):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (super().forward(x) / math.sqrt(1.0)).sigmoid()

    verdict = of_models(Right(buffer=True), Scaled(buffer=False))
    assert verdict.outcome is PairOutcome.MISTAKE
    assert verdict.parted[0].b is not None
    assert verdict.parted[0].b.op == "aten.div.Tensor"
    assert "taken for equal" in verdict.notes[0]


# --------------------------------------------------------------------------------------------------- hidden casts


@pytest.mark.parametrize("name", ["cast", "autocast"])
def test_a_hidden_cast_is_rounding_and_is_named(name: str) -> None:
    def plain(model: Any, x: torch.Tensor) -> torch.Tensor:
        return (x @ model.w0).tanh() @ model.w1

    def cast(model: Any, x: torch.Tensor) -> torch.Tensor:
        return (x @ model.w0).bfloat16().float().tanh() @ model.w1

    def autocast(model: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return ((x @ model.w0).tanh() @ model.w1).float()

    verdict = compared(plain, {"cast": cast, "autocast": autocast}[name])
    assert verdict.outcome is PairOutcome.ROUNDING
    first = verdict.parted[0]
    assert first.b is not None
    assert first.b.op == {"cast": "aten._to_copy.default", "autocast": "aten.mm.default"}[name]
    assert first.note == "(a) holds it in float32, (b) in bfloat16."


def test_a_cast_and_back_inside_one_op_is_told_by_its_values() -> None:
    def rounded(model: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x.bfloat16().float(), model.w0).tanh()

    verdict = compared(lambda model, x: torch.nn.functional.linear(x, model.w0).tanh(), rounded)
    assert verdict.outcome is PairOutcome.ROUNDING
    assert "bfloat16" in verdict.parted[0].note
