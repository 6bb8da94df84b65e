"""Models and functions whose invariances are checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from runner_helpers import FunctionRunner

from hashbench.core.records import BATCH_INVARIANCE, ModelSpec, Row, RunOptions
from hashbench.core.run.workload import Workload

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


def options(invariance: str, **more: Any) -> RunOptions:
    return RunOptions(mode=f"{invariance}-invariance", deterministic="off", diagnose_budget=20.0, **more)


def row_of(options: RunOptions, build: Callable[[], Workload]) -> Row:
    runner = FunctionRunner(options)
    runner.build = build
    return runner.run_model(ModelSpec("zoo", "model"))


IDS = {"input_ids": torch.arange(24).view(2, 12)}


class Attends(torch.nn.Module):
    """One layer of attention on keys that are kept, in float32: what rounds does so by the number of its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.project = torch.nn.Embedding(32, 64), torch.nn.Linear(64, 64)

    def forward(
        self, input_ids: torch.Tensor, past_key_values: torch.Tensor | None = None, use_cache: bool = False
    ) -> dict[str, torch.Tensor]:
        new = self.project(self.embed(input_ids))
        known = new if past_key_values is None else torch.cat([past_key_values, new], dim=1)
        return {"logits": new * 2, "past_key_values": known} if use_cache else {"logits": new * 2}
