"""A specimen that exchanges data with other processes (origin ``ranks``). Here its group has no other member."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn

Example = tuple[nn.Module, tuple[torch.Tensor, ...]]


class SharedMean(nn.Module):
    """Center features on their mean over all ranks; behind that, the gain is drawn from the system's entropy."""

    def __init__(self, features: int, *, drawn: bool) -> None:
        super().__init__()
        self.mix = nn.Linear(features, features)
        self.drawn = drawn

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        mean = features.detach().mean(0)
        dist.all_reduce(mean)
        gain = 1 + (os.urandom(1)[0] / 256 if self.drawn else 0.5)
        return torch.tanh(self.mix(features - mean / dist.get_world_size())) * gain


def shared_mean(*, drawn: bool) -> Example:
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return SharedMean(8, drawn=drawn), (torch.randn(4, 8),)


MODELS = {
    "shared_mean": lambda: shared_mean(drawn=True),
    "shared_mean_twin": lambda: shared_mean(drawn=False),
}
