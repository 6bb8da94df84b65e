"""Small modules made of a function, and kernels that know one dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hashbench.extensions.implementations.pair.check import compare_implementations
from hashbench.extensions.implementations.pair.sides import Side
from hashbench.extensions.implementations.pair.verdict import ImplementationsVerdict

Function = Callable[..., Any]


def drawn(*shape: int, seed: int = 3, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return normal numbers of a seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


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


@contextmanager
def kernels() -> Iterator[Any]:
    """Register ops in ``torch.ops.pair_test`` that are computed in one dtype, and remove them."""

    def only(dtype: torch.dtype, function: Function) -> Function:
        def kernel(first: torch.Tensor, *others: Any) -> Any:
            if first.dtype != dtype:
                raise TypeError(f"only {dtype}")
            return function(first, *others)

        return kernel

    def write(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(a @ b)

    made = {
        "mm32(Tensor a, Tensor b) -> Tensor": only(torch.float32, torch.mm),
        "mm16(Tensor a, Tensor b) -> Tensor": only(torch.bfloat16, torch.mm),
        "mm64(Tensor a, Tensor b) -> Tensor": torch.mm,
        "mm_into(Tensor a, Tensor b, Tensor(a!) out) -> ()": only(torch.float32, write),
        "scale_(Tensor(a!) a, float s) -> Tensor(a!)": only(torch.float32, torch.Tensor.mul_),
        "casts(Tensor a, Tensor b) -> Tensor": lambda a, b: (a.float() @ b.float()).to(a.dtype),
        "returns_low(Tensor a, Tensor b) -> Tensor": lambda a, b: (a @ b).float(),
    }
    with torch.library._scoped_library("pair_test", "FRAGMENT") as library:
        for schema, function in made.items():
            library.define(schema)
            library.impl(schema.partition("(")[0], function, "CPU")
        yield torch.ops.pair_test
