"""Specimens whose loops are printed as wrong C++."""

from __future__ import annotations

from typing import Any

import torch
from _planted import Patches, plant_if
from torch import nn

Example = tuple[nn.Module, tuple[torch.Tensor, ...]]


def wrong_tail(patches: Patches) -> None:
    """Store other values in the tail of a vectorised loop: what is left where its size is no multiple of a vector."""
    from torch._inductor.codegen.cpp import CppVecKernel
    from torch._inductor.virtualized import ops

    right = CppVecKernel.store

    def wrong(self: Any, name: str, index: Any, value: Any, mode: Any = None) -> None:
        if self.tail_size is not None and value.dtype is not None and value.dtype.is_floating_point:
            value = ops.mul(value, ops.constant(1.25, value.dtype)).value
        right(self, name, index, value, mode)

    patches.attribute(CppVecKernel, "store", wrong)


def injected_relu(patches: Patches) -> None:
    """Switch on torch's own fault for tests of its tools: ``relu`` adds one."""
    from torch._inductor import config

    patches.attribute(config.cpp, "inject_relu_bug_TESTING_ONLY", "accuracy")


def maximum_without_nan(patches: Patches) -> None:
    """Print ``maximum`` as a comparison, which is false for NaN: it is lost where it is the first argument."""
    from torch._inductor.codegen.cpp import CppOverrides, CppVecOverrides

    right = CppVecOverrides.maximum

    def of_vectors(a: Any, b: Any) -> Any:
        return right(a, b) if a.dtype is torch.bool else f"decltype({a})::blendv({b}, {a}, {a} > {b})"

    patches.attribute(CppOverrides, "maximum", staticmethod(lambda a, b: f"({a} > {b} ? {a} : {b})"))
    patches.attribute(CppVecOverrides, "maximum", staticmethod(of_vectors))


def seven_bits(patches: Patches) -> None:
    """Keep seven bits of an index that was loaded: larger ones wrap around."""
    from torch._inductor.codegen.common import CSEProxy
    from torch._inductor.virtualized import ops

    right = CSEProxy.indirect_indexing

    def wrong(self: Any, var: Any, *args: Any, **kwargs: Any) -> Any:
        return right(self, ops.bitwise_and(var, ops.constant(127, var.dtype)).value, *args, **kwargs)

    patches.attribute(CSEProxy, "indirect_indexing", wrong)


class OddWidth(nn.Module):
    """Elementwise work on rows whose width is a multiple of no vector's."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(features))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(rows * self.scale) * 2


class Perceptron(nn.Module):
    """Two linear layers with a ``relu`` between them."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.widen = nn.Linear(features, 2 * features)
        self.narrow = nn.Linear(2 * features, features)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.narrow(torch.relu(self.widen(rows)))


class MissingValues(nn.Module):
    """The larger of two readings; where one is missing (NaN), a learnt default."""

    def __init__(self, sensors: int) -> None:
        super().__init__()
        self.default = nn.Parameter(torch.randn(sensors))
        self.weigh = nn.Linear(sensors, 4)

    def forward(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        larger = torch.maximum(first, second)
        return self.weigh(torch.where(torch.isnan(larger), self.default, larger))


class Vocabulary(nn.Module):
    """Embed tokens and score them."""

    def __init__(self, tokens: int, features: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(tokens, features)
        self.score = nn.Linear(features, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.score(torch.tanh(self.embed(tokens)))


def vector_tail(*, wrong: bool) -> Example:
    plant_if(wrong, wrong_tail)
    return OddWidth(67), (torch.randn(16, 67),)


def relu_injected(*, wrong: bool) -> Example:
    plant_if(wrong, injected_relu)
    return Perceptron(24), (torch.randn(16, 24),)


def nan_lost(*, wrong: bool) -> Example:
    plant_if(wrong, maximum_without_nan)
    first, second = torch.randn(16, 32), torch.randn(16, 32)
    return MissingValues(32), (first.masked_fill(first > 1, torch.nan), second)


def index_wraps(*, wrong: bool) -> Example:
    plant_if(wrong, seven_bits)
    return Vocabulary(300, 24), (torch.randint(300, (8, 20)),)


MODELS = {
    "vector_tail": lambda: vector_tail(wrong=True),
    "vector_tail_twin": lambda: vector_tail(wrong=False),
    "relu_injected": lambda: relu_injected(wrong=True),
    "relu_injected_twin": lambda: relu_injected(wrong=False),
    "nan_lost": lambda: nan_lost(wrong=True),
    "nan_lost_twin": lambda: nan_lost(wrong=False),
    "index_wraps": lambda: index_wraps(wrong=True),
    "index_wraps_twin": lambda: index_wraps(wrong=False),
}
