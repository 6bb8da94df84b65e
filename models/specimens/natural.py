"""Specimens of batch invariance that nobody planted: kernels of torch's own that may add in another order for another
number of items.

Whether one does so, and in which batches, the processor and the libraries decide: its truth is what torch alone does on
the machine at hand. Twins are the same with a remedy that helps on any: one item at a time, or as many items always.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

Example = tuple[nn.Module, tuple[torch.Tensor, ...]]
Remedy = Callable[[nn.Module, torch.Tensor], torch.Tensor]

ITEMS = 8


def at_once(kernel: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return kernel(x)


def one_by_one(kernel: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.cat([kernel(item) for item in x.split(1)])


def padded(kernel: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Always eight items, of which those that are no items are zero."""
    return kernel(functional.pad(x, [0, 0] * (x.dim() - 1) + [0, ITEMS - len(x)]))[: len(x)]


class Model(nn.Module):
    """The kernel between two ops that are exact."""

    def __init__(self, kernel: nn.Module, remedy: Remedy) -> None:
        super().__init__()
        self.kernel, self.remedy = kernel, remedy

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return -self.remedy(self.kernel, x * 2)


class ColumnSum(nn.Module):
    """Of a dimension that is not the last: several columns are added at once, and the rest one by one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.t().contiguous().sum(0)


class Attention(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(x, x, x)


class AttentionLayer(nn.MultiheadAttention):
    """Its fused kernel for inference, with the projections of all tokens in one product."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x, x, x, need_weights=False)[0]


def linear(remedy: Remedy = at_once) -> Example:
    """A product of a matrix and a vector for one row; few rows are tiled differently than many."""
    return Model(nn.Linear(512, 1000), remedy), (torch.randn(ITEMS, 512),)


def column_sum(remedy: Remedy = at_once) -> Example:
    return Model(ColumnSum(), remedy), (torch.randn(ITEMS, 1000),)


def attention(remedy: Remedy = at_once) -> Example:
    return Model(Attention(), remedy), (torch.randn(ITEMS, 4, 64, 32),)


def attention_layer(remedy: Remedy = at_once) -> Example:
    layer = AttentionLayer(128, 4, batch_first=True)
    return Model(layer, remedy), (torch.randn(ITEMS, 3, 128),)


def convolution(remedy: Remedy = at_once) -> Example:
    """For one image another algorithm may be chosen."""
    return Model(nn.Conv2d(8, 16, 3, stride=2), remedy), (torch.randn(ITEMS, 8, 16, 16),)


def gru_step(remedy: Remedy = at_once) -> Example:
    return Model(nn.GRUCell(512, 64), remedy), (torch.randn(ITEMS, 512),)


def embedding_bag(remedy: Remedy = at_once) -> Example:
    return Model(nn.EmbeddingBag(200, 33, mode="sum"), remedy), (torch.randint(0, 100, (ITEMS, 50)),)


MODELS = {
    "natural_linear": linear,
    "natural_linear_twin": lambda: linear(padded),
    "natural_sum": column_sum,
    "natural_sum_twin": lambda: column_sum(one_by_one),
    "natural_attention": attention,
    "natural_attention_twin": lambda: attention(one_by_one),
    "natural_multihead": attention_layer,
    "natural_multihead_twin": lambda: attention_layer(padded),
    "natural_convolution": convolution,
    "natural_convolution_twin": lambda: convolution(one_by_one),
    "natural_gru_step": gru_step,
    "natural_gru_step_twin": lambda: gru_step(padded),
    "natural_bags": embedding_bag,
    "natural_bags_twin": lambda: embedding_bag(one_by_one),
}
