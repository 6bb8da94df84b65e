"""Models whose runs differ in a known way, and the runner of these tests."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import torch
from runner_helpers import FunctionRunner

from hashbench.core.check.model import BenchmarkRunner
from hashbench.core.records import ModelSpec, Row, RunOptions
from hashbench.core.run.outcome import Outcome
from hashbench.core.run.workload import Workload

RUNS: list[int] = [0]
"""Counts the runs of a model across its deep copies: what differs from run to run in these tests."""


TRAINING = RunOptions(mode="training", diagnose_budget=0)  # why runs differ is for test_diagnosis


INFERENCE = RunOptions(mode="inference", diagnose_budget=0)


class Counting(torch.nn.Module):
    """Knows in which run it is: a deep copy is made for each."""

    run = 0

    def __deepcopy__(self, memo):
        RUNS[0] += 1
        memo[id(self)] = made = self.__class__.__new__(self.__class__)
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        made.run = RUNS[0]
        return made


class Linear(Counting):
    """One layer with a buffer; ``change`` may act on it in every forward pass, knowing the run."""

    def __init__(self, change: Callable[[Linear, torch.Tensor], torch.Tensor | None] | None = None) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)
        self.register_buffer("count", torch.zeros(1))
        self.change = change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.layer(x)
        changed = self.change(self, out) if self.change is not None else None
        return out if changed is None else changed


def workload(change=None, **parts) -> Workload:
    return Workload(**{"module": Linear(change), "inputs": (torch.ones(4, 3),), **parts})


def check(made: Workload, options: RunOptions = INFERENCE, **arguments) -> Outcome:
    torch.manual_seed(0)
    return BenchmarkRunner(options).check_accuracy(replace(made, iterations=made.iterations or 1), **arguments)


def row_of(build: Callable[[], Workload], options: RunOptions = INFERENCE, **spec) -> Row:
    runner = FunctionRunner(options)
    runner.build = build
    return runner.run_model(ModelSpec(suite="here", name="model", **spec))


def _in_second_run(model: Linear) -> float:
    return float(model.run % 2 == 0)


def no_optimizer(parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.0)


def _put(_model, out):
    return out + torch.zeros(4).put_(torch.tensor([0, 1]), torch.ones(2), accumulate=False).sum()
