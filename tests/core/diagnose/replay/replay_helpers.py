"""Captured calls and short ways to run experiments on them."""

from __future__ import annotations

from typing import Any

import torch

from hashbench.core.catalog import EXPERIMENTS
from hashbench.core.diagnose.calls.call import CapturedCall
from hashbench.core.diagnose.calls.capture import capture
from hashbench.core.diagnose.replay import Replays, experiments
from hashbench.core.processes import Budget

aten = torch.ops.aten


REPLAYS = 8


def captured(func: Any, *args: Any, **kwargs: Any) -> CapturedCall:
    return capture(func, args, kwargs, limit_bytes=2**30)


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def tried(call: CapturedCall, *names: str, seconds: float = 120.0, replays: int = REPLAYS) -> Replays:
    """So many seconds are no time that is waited for: a busy machine may need them."""
    return experiments(call, replays=replays, budget=Budget(seconds), arms=names or EXPERIMENTS)


def overlapping() -> CapturedCall:
    view = numbers(1500, 1600)[:, :1500]
    return captured(aten.add_.Tensor, view, view.t())


DETERMINISTIC = {
    "a product": lambda: captured(aten.mm.default, numbers(64, 64), numbers(64, 64)),
    "a sum": lambda: captured(aten.sum.default, numbers(10_000)),
    "dropout": lambda: captured(aten.native_dropout.default, numbers(1000), 0.5, True),
    "a scatter with one target each": lambda: captured(
        aten.index_put_.default, torch.zeros(99), [torch.arange(99)], numbers(99)
    ),
    "a custom op": lambda: captured(torch.ops.replayed.doubled.default, numbers(50)),
    "a sparse tensor that is written": lambda: captured(aten.mul_.Tensor, numbers(4, 4).to_sparse(), torch.tensor(2.0)),
    "a quantized tensor": lambda: captured(
        aten.dequantize.self, torch.quantize_per_tensor(numbers(9), 0.1, 0, torch.qint8)
    ),
    "an argument that grows": lambda: captured(aten.add.out, numbers(3), numbers(3), out=torch.empty(0)),
    "a foreach op": lambda: captured(aten._foreach_mul_.Scalar, [numbers(3), numbers(4)], 2.0),
}


@torch.library.custom_op("replayed::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2
