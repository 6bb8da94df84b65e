"""Ops that torch does not define."""

import itertools

import torch

LEVEL = {"shift": 0.0}
_CALLS = itertools.count()


@torch.library.custom_op("hashbench_golden::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@torch.library.custom_op("hashbench_golden::alternating", mutates_args=())
def alternating(x: torch.Tensor) -> torch.Tensor:
    """Differs from call to call."""
    return x + next(_CALLS) % 2


@torch.library.custom_op("hashbench_golden::level", mutates_args=())
def level(x: torch.Tensor) -> torch.Tensor:
    """Depends on a value that no trace sees."""
    return x + LEVEL["shift"]
