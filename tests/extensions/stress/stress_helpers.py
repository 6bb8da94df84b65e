"""Models that differ under a perturbation, and the rows of stressed models."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

import torch
from runner_helpers import FunctionRunner

from hashbench.core.diagnose.replay.controls.perturbations import oversubscribed
from hashbench.core.records import ModelSpec, Row, RunOptions
from hashbench.core.run.workload import Workload

CPU = torch.device("cpu")
STRESS = RunOptions(stress=True, replays=4, diagnose_budget=600.0, deterministic="off")
"""Experiments end by their number: no budget that a busy machine could use up."""


MIDDLE = 5 * 2**20
"""Of a workspace: where it begins, the C library may have kept addresses while it was free."""


class Scaled(torch.nn.Module):
    """Multiplies by what a function says."""

    def __init__(self, factor: Callable[[], float]) -> None:
        super().__init__()
        self.factor = [factor]  # in a list, which no module copies as a part

    def __deepcopy__(self, _: object) -> Scaled:
        return Scaled(self.factor[0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor[0]()


class Workspace(torch.nn.Module):
    """Adds a workspace that nobody writes, so large that the system hands it out anew: full of zeros in every pair."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.empty(MIDDLE * 2)[MIDDLE : MIDDLE + x.numel()].view_as(x)


def row_of(module: torch.nn.Module, options: RunOptions = STRESS) -> Row:
    runner = FunctionRunner(options)
    runner.build = lambda: Workload(module, (torch.ones(8),))
    return runner.run_model(ModelSpec("none", "model", arguments={"function": print}))  # which no process builds again


def provoking(name: str) -> Callable[[], float]:
    """A value that is another one while a perturbation is provoked, in every other of its variations."""
    return {
        "threads": lambda: float(torch.get_num_threads() < oversubscribed()),
        "load": lambda: float(any(one.name.startswith("hashbench load") for one in threading.enumerate())),
        "collector": lambda: float(gc.get_threshold()[0] > 10),
    }[name]
