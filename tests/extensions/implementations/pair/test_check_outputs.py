"""What is compared, and what is told not to be."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hashbench.extensions.implementations.pair.check import compare_implementations
from hashbench.extensions.implementations.pair.finding import finding_of
from hashbench.extensions.implementations.pair.sides import Side
from hashbench.extensions.implementations.pair.verdict import Outcome


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
    assert verdict.outcome is Outcome.EQUAL
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
