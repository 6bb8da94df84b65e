"""Ops that are computed in one dtype, and numbers of a seed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

Function = Callable[..., Any]


def drawn(*shape: int, seed: int = 3, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return normal numbers of a seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


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
