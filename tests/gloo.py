"""What the gloo of the installed torch can do."""

from __future__ import annotations

import functools
from datetime import timedelta

import torch
import torch.distributed as dist


@functools.cache
def exchanges_lists() -> bool:
    """Whether ``all_to_all`` takes lists of tensors: not in torch 2.11. Ask before a trace begins."""
    alone = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=60))
    try:
        alone.alltoall([torch.empty(1)], [torch.ones(1)]).wait()
    except RuntimeError:
        return False
    return True
