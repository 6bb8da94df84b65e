"""What is compared, and what is told not to be."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hashbench.extensions.implementations.pair.check import compare_implementations
from hashbench.extensions.implementations.pair.finding import finding_of
from hashbench.extensions.implementations.pair.sides import Side
from hashbench.extensions.implementations.pair.verdict import PairOutcome


class _Tanh(nn.Module):
    def __init__(self, *, extra: bool = False, buffer: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.extra = extra
        if buffer:
            self.register_buffer("places", torch.rand(5))

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        y = torch.tanh(self.linear(x))
        return {"y": y, "cache": y * 2} if self.extra else {"y": y}


def _side(**options: bool) -> Side:
    return Side(lambda: _Tanh(**options), lambda: (torch.linspace(-1, 1, 24).reshape(3, 8),))


def test_outputs_of_one_side_alone_are_told() -> None:
    verdict = compare_implementations(_side(extra=True), _side())
    assert verdict.outcome is PairOutcome.EQUAL
    assert verdict.left == ("output.cache",)
    assert ("not compared", "output.cache, which one side alone returns") in finding_of(verdict).facts


def test_a_buffer_of_one_side_alone_is_no_difference_of_weights() -> None:
    def seeded(**options: bool) -> Side:
        made = _Tanh(**options)
        made.linear.load_state_dict({"weight": torch.eye(8) + torch.rand(8, 8), "bias": torch.rand(8)})
        return Side(lambda: made, lambda: (torch.ones(2, 8),))

    torch.manual_seed(0)
    a = seeded(buffer=True)
    torch.manual_seed(0)
    b = Side(lambda: _with_state(a.make()), a.inputs)
    held = compare_implementations(a, b).weights
    assert held is not None
    assert held.equal
    changed = Side(lambda: _with_state(a.make(), bias=torch.zeros(8)), a.inputs)
    told = compare_implementations(a, changed).weights
    assert told is not None
    assert not told.equal


def _with_state(model: nn.Module, **changed: torch.Tensor) -> nn.Module:
    made = _Tanh()
    made.linear.load_state_dict({**model.get_submodule("linear").state_dict(), **changed})
    return made


class _Fused(nn.Module):
    """The gates of two linear layers, in one matrix or in two."""

    def __init__(self, weight: torch.Tensor, *, fused: bool, scale: float = 1.0) -> None:
        super().__init__()
        parts = [weight] if fused else weight.chunk(2)
        self.parts = nn.ParameterList(nn.Parameter(part.clone()) for part in parts)
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = [x @ part.t() for part in self.parts]
        gate, up = made if len(made) == 2 else made[0].chunk(2, -1)
        return torch.sigmoid(gate) * up


def _trained(*, fused: bool) -> Side:
    weight = torch.linspace(-1, 1, 48).reshape(12, 4).sin()
    x = torch.linspace(-2, 2, 20).reshape(5, 4).cos()
    return Side(lambda: _Fused(weight, fused=fused), lambda: (x,), loss=lambda y: y.square().mean())


def test_gradients_are_compared_in_the_own_dtype() -> None:
    same = compare_implementations(_trained(fused=True), _trained(fused=True))
    assert same.outcome is PairOutcome.EQUAL
    assert [(each.name, each.units) for each in same.results if "gradient" in each.name] == [
        ("gradient of parts.0", 0.0)
    ]


def test_gradients_correspond_by_content_and_not_by_name() -> None:
    """Both sides call other parameters ``parts.0``."""
    assert compare_implementations(_trained(fused=False), _trained(fused=True)).outcome is not PairOutcome.MISTAKE


def test_gradients_that_nothing_was_compared_with_are_not_equal_bit_by_bit() -> None:
    verdict = compare_implementations(_trained(fused=False), _trained(fused=True))
    gradients = [each for each in verdict.results if "gradient" in each.name]
    assert gradients
    assert (verdict.outcome is PairOutcome.EQUAL) == all(each.units == 0 for each in verdict.results)


def test_outputs_without_elements_are_not_known() -> None:
    x = torch.linspace(0, 1, 12).reshape(3, 4)
    whole, none = (Side(lambda rows=rows: lambda x: x.sin()[:rows], lambda: (x,)) for rows in (3, 0))
    verdict = compare_implementations(whole, none)
    assert verdict.outcome is PairOutcome.NOT_KNOWN
    wanted = "output is float64[3, 4] in (a) and float64[0, 4] in (b), of which nothing could be compared"
    assert verdict.reason == wanted


def test_a_model_that_is_not_built_anew_is_not_run_again_with_constants_of_its_own_dtype() -> None:
    wrong = _Fused(torch.ones(12, 4), fused=True)
    x = torch.linspace(-2, 2, 20).reshape(5, 4).cos()
    said: list[str] = []

    def compared(a: Side) -> list[str]:
        said.clear()
        verdict = compare_implementations(a, Side(lambda: wrong, lambda: (x,)), progress=said.append)
        assert verdict.outcome is PairOutcome.MISTAKE
        return said

    weight = torch.linspace(-1, 1, 48).reshape(12, 4).sin()
    held = _Fused(weight, fused=True)
    again = "run both with constants of their own dtype"
    assert again not in compared(Side(lambda: held, lambda: (x,)))
    assert again in compared(Side(lambda: _Fused(weight, fused=True), lambda: (x,)))
