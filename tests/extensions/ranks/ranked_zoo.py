"""A zoo of models with ranks: planted faults on one of them, and clean ones."""

from __future__ import annotations

import itertools
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

_CALLS = itertools.count(1)


@torch.library.custom_op("ranked_zoo::counted", mutates_args=())
def counted(x: torch.Tensor) -> torch.Tensor:
    """Add another number in each call."""
    return x + next(_CALLS) * 1e-3


counted.register_autograd(lambda _, gradient: gradient)


class OnRankOne(nn.Module):
    """Do something on rank 1 alone."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if dist.get_rank() != 1:
            return x
        if self.what == "count":
            return counted(x)
        if self.what == "raise":
            raise ValueError("no data")
        if self.what == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.what == "hang":
            Path(os.environ["RANKED_ZOO_FOLDER"], "hangs").write_text(str(os.getpid()))
            time.sleep(600)
        return x


def parallel(*between: nn.Module):
    net = nn.Sequential(nn.Linear(8, 8), *between, nn.Linear(8, 4))
    return DistributedDataParallel(net), (torch.randn(4, 8) + dist.get_rank(),)


def undeclared():
    from hashbench import Workload

    return Workload(module=nn.Linear(8, 4), inputs=(torch.randn(4, 8),), world_size=2)


MODELS = {
    "clean": lambda: parallel(),
    "counts": lambda: parallel(OnRankOne("count")),
    "raises": lambda: parallel(OnRankOne("raise")),
    "dies": lambda: parallel(OnRankOne("die")),
    "hangs": lambda: parallel(OnRankOne("hang")),
    "cannot_be_built": lambda: parallel(OnRankOne(["count"][dist.get_rank()])),
    "undeclared": undeclared,
}
