"""Small modules made of a function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hashbench.extensions.implementations.pair.check import compare_implementations
from hashbench.extensions.implementations.pair.sides import Side
from hashbench.extensions.implementations.pair.verdict import ImplementationsVerdict
from tests.core.run.one_dtype import drawn

Function = Callable[..., Any]


class Made(torch.nn.Module):
    """``function(self, *inputs)``, with parameters ``w0``, ``w1``, …"""

    def __init__(self, function: Function, weights: tuple[torch.Tensor, ...]) -> None:
        super().__init__()
        self.function = function
        for index, weight in enumerate(weights):
            self.register_parameter(f"w{index}", torch.nn.Parameter(weight.clone()))

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.function(self, *inputs)


def weights(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    return drawn(16, 16, seed=1).div(4).to(dtype), drawn(16, 16, seed=2).div(4).to(dtype)


def compared(
    a: Function, b: Function, *inputs: torch.Tensor, dtype: torch.dtype = torch.float32, **side: Any
) -> ImplementationsVerdict:
    """Compare two functions of ``(model, *inputs)`` that share two weights; default input ``[8, 16]``."""
    given = inputs or (drawn(8, 16, dtype=dtype),)
    sides = (Side(lambda f=f: Made(f, weights(dtype)), lambda: given, **side) for f in (a, b))
    return compare_implementations(*sides, weights=False)
