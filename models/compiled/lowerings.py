"""Specimens whose aten ops are lowered to the wrong loops."""

from __future__ import annotations

from typing import Any

import torch
from _planted import Patches, plant_if
from torch import nn
from torch.nn import functional

Example = tuple[nn.Module, tuple[torch.Tensor, ...]]


def scaled_lowering(patches: Patches, op: Any, factor: float) -> None:
    """Lower ``op`` to its loops, and scale what they compute."""
    from torch._inductor import lowering

    right = lowering.lowerings[op]
    multiply = lowering.lowerings[torch.ops.aten.mul.Tensor]
    patches.item(lowering.lowerings, op, lambda *args, **kwargs: multiply(right(*args, **kwargs), factor))


def wrong_erf(patches: Patches) -> None:
    """Scale ``erf``, which the decomposition of ``gelu`` calls."""
    scaled_lowering(patches, torch.ops.aten.erf.default, 1.02)


def wrong_pooling_backward(patches: Patches) -> None:
    """Scale the gradient of average pooling."""
    scaled_lowering(patches, torch.ops.aten.avg_pool2d_backward.default, 0.75)


class GatedFeatures(nn.Module):
    """Two linear layers with a normalised ``gelu`` between them."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(features)
        self.widen = nn.Linear(features, 3 * features)
        self.narrow = nn.Linear(3 * features, features)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.narrow(functional.gelu(self.widen(self.norm(rows))))


class PooledImage(nn.Module):
    """A convolution, overlapping average pooling and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.look = nn.Conv2d(3, 6, 3)
        self.pool = nn.AvgPool2d(3, stride=2, padding=1)
        self.classify = nn.Linear(6, 5)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.classify(torch.tanh(self.pool(self.look(images))).sum((2, 3)))


def gelu_lowering(*, wrong: bool) -> Example:
    plant_if(wrong, wrong_erf)
    return GatedFeatures(24), (torch.randn(16, 24),)


def pooling_backward(*, wrong: bool) -> Example:
    plant_if(wrong, wrong_pooling_backward)
    return PooledImage(), (torch.randn(4, 3, 15, 15),)


MODELS = {
    "gelu_lowering": lambda: gelu_lowering(wrong=True),
    "gelu_lowering_twin": lambda: gelu_lowering(wrong=False),
    "pooling_backward": lambda: pooling_backward(wrong=True),
    "pooling_backward_twin": lambda: pooling_backward(wrong=False),
}
