"""What the pairs share: weights that let mistakes reach the result, and inputs from a seed."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import nn

M = TypeVar("M", bound=nn.Module)


def drawn(seed: int, *shape: int) -> torch.Tensor:
    """Draw a normal float32 tensor of ``shape``."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def tokens(seed: int, vocabulary: int, *shape: int) -> torch.Tensor:
    """Draw token ids below ``vocabulary``, of ``shape``."""
    return torch.randint(0, vocabulary, shape, generator=torch.Generator().manual_seed(seed))


def randomised(module: M, seed: int) -> M:
    """Draw all weights anew and return the module for inference: no norm is trivial, no bias zero."""
    with torch.no_grad():
        for number, (name, weight) in enumerate(module.named_parameters()):
            values = drawn(1000 * seed + number, *weight.shape)
            if weight.dim() < 2:
                drawn_before = bool((weight != weight.flatten()[0]).any())
                weight.copy_(0.2 * values + (0 if drawn_before else weight))
            elif "embed" in name:
                weight.copy_(values)
            else:
                fan_in = weight.shape[-1] if "experts" in name else weight[0].numel()
                weight.copy_(1.3 * values / fan_in**0.5)
        for number, (name, buffer) in enumerate(module.named_buffers()):
            if name.endswith("running_mean"):
                buffer.copy_(0.3 * drawn(2000 * seed + number, *buffer.shape))
            elif name.endswith("running_var"):
                buffer.copy_(0.5 + drawn(2000 * seed + number, *buffer.shape).square())
    return module.eval()
