"""Functions checked for batch invariance as models are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from runner_helpers import FunctionRunner

from hashbench.records import BATCH_INVARIANCE, ModelSpec, Row, RunOptions
from hashbench.run.workload import Workload

BATCH = RunOptions(mode=BATCH_INVARIANCE, deterministic="off", diagnose_budget=0.0)


class Lambda(torch.nn.Module):
    """Computes what a function does."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = [function]  # in a list, which no module copies as a part

    def __deepcopy__(self, _: object) -> Lambda:
        return Lambda(self.function[0])

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.function[0](*inputs)


def checked(function: Callable[..., Any], *inputs: Any, options: RunOptions = BATCH, batch: int | None = None) -> Row:
    runner = FunctionRunner(options)
    runner.build = lambda: Workload(module=Lambda(function), inputs=inputs or (torch.randn(8, 6),))
    return runner.run_model(ModelSpec("zoo", "model", batch_size=batch))
