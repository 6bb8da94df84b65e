"""Specimens whose addresses, and what decides about them, are printed as wrong Triton code."""

from __future__ import annotations

from typing import Any

import torch
from _planted import Patches, plant_if
from _triton import method_as, printed_as
from torch import nn

Example = tuple[nn.Module, tuple[torch.Tensor, ...]]


def previous_row(patches: Patches) -> None:
    """Read the row before the one that an index says."""
    from torch._inductor.codegen.common import CSEProxy
    from torch._inductor.codegen.triton import TritonKernel
    from torch._inductor.virtualized import V, ops

    right = CSEProxy.indirect_indexing

    def wrong(self: Any, var: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(V.kernel, TritonKernel):
            one, zero = (ops.constant(number, var.dtype) for number in (1, 0))
            var = ops.maximum(ops.sub(var, one), zero).value
        return right(self, var, *args, **kwargs)

    patches.attribute(CSEProxy, "indirect_indexing", wrong)


def stored_in_place_of_added(patches: Patches) -> None:
    """Store what is to be added: of several additions to one address the last is left."""

    def wrong(right: Any) -> Any:
        def store(self: Any, name: str, index: Any, value: Any, mode: Any = None) -> None:
            right(self, name, index, value, None if mode == "atomic_add" else mode)

        return store

    method_as(patches, "store", wrong)


def square_kept(patches: Patches) -> None:
    """Read a square that is to be transposed as it lies in memory."""

    def wrong(right: Any) -> Any:
        def load(self: Any, name: str, index: Any) -> Any:
            names = {str(symbol)[0]: symbol for symbol in index.free_symbols}
            if set(names) == {"x", "y"} and index.coeff(names["y"]) == 1:
                index = index.subs(dict(zip(names.values(), reversed(names.values()), strict=True)), simultaneous=True)
            return right(self, name, index)

        return load

    method_as(patches, "load", wrong)


def early_border(patches: Patches) -> None:
    """Compare positions with a border that is one too low."""

    def wrong(right: Any) -> Any:
        return lambda a, b: f"{a} < {b} - 1" if getattr(a, "dtype", None) in (torch.int32, torch.int64) else right(a, b)

    printed_as(patches, "lt", wrong)


class Vocabulary(nn.Module):
    """Embed tokens."""

    def __init__(self, tokens: int, features: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(tokens, features)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.embed(tokens))


class Histogram(nn.Module):
    """Sums of the weights that fall into each bin."""

    def __init__(self, bins: int) -> None:
        super().__init__()
        self.bins = bins

    def forward(self, bins: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return weights.new_zeros(self.bins).index_add(0, bins, weights)


class Symmetric(nn.Module):
    """A matrix and the transpose of another."""

    def forward(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return first + second.t()


class Beside(nn.Module):
    """Two groups of features beside each other, scaled."""

    def forward(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return torch.cat([torch.tanh(first), torch.sigmoid(second)], 1) * 2


def triton_gather(*, wrong: bool) -> Example:
    plant_if(wrong, previous_row)
    return Vocabulary(30, 12), (torch.randint(1, 30, (4, 5)),)


def triton_atomic_store(*, wrong: bool) -> Example:
    plant_if(wrong, stored_in_place_of_added)
    return Histogram(8), (torch.randint(8, (100,)), torch.full((100,), 0.25))


def triton_transpose(*, wrong: bool) -> Example:
    plant_if(wrong, square_kept)
    return Symmetric(), (torch.randn(24, 24), torch.randn(24, 24))


def triton_cat_border(*, wrong: bool) -> Example:
    plant_if(wrong, early_border)
    return Beside(), (torch.randn(12, 5), torch.randn(12, 7) + 2)


MODELS = {
    "triton_gather": lambda: triton_gather(wrong=True),
    "triton_gather_twin": lambda: triton_gather(wrong=False),
    "triton_atomic_store": lambda: triton_atomic_store(wrong=True),
    "triton_atomic_store_twin": lambda: triton_atomic_store(wrong=False),
    "triton_transpose": lambda: triton_transpose(wrong=True),
    "triton_transpose_twin": lambda: triton_transpose(wrong=False),
    "triton_cat_border": lambda: triton_cat_border(wrong=True),
    "triton_cat_border_twin": lambda: triton_cat_border(wrong=False),
}
