"""Training loops for tests: a small model, one way to write the loop, and planted differences that cause themselves."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import hashbench

STEPS = 24


@torch.library.custom_op("planted_loops::racy", mutates_args=())
def racy(x: torch.Tensor) -> torch.Tensor:
    """Give another result where the environment says so: it stands for a kernel with a race."""
    return x * (1 + float(os.environ.get("PLANTED_RACE", "0")))


racy.register_fake(torch.empty_like)
racy.register_autograd(lambda _, gradient: gradient)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = torch.nn.Linear(6, 12), torch.nn.BatchNorm1d(12)
        self.drop, self.last = torch.nn.Dropout(0.5), torch.nn.Linear(12, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.ops.planted_loops.racy(self.norm(self.first(x)))
        return self.last(self.drop(torch.relu(x)))


@dataclass
class Plan:
    """What one run does otherwise in step ``at``.

    Attributes:
        at: the step.
        fault: name of the planted difference; empty: none.
        accumulate: micro-batches in a step.
        clip: clip the norm of gradients.
        amp: bfloat16 autocast.
        compiled: torch.compile.
        workers: of the DataLoader.
        steps: number of optimizer steps.
    """

    at: int = 10
    fault: str = ""
    accumulate: int = 1
    clip: bool = False
    amp: bool = False
    compiled: bool = False
    workers: int = 0
    steps: int = STEPS


def data(plan: Plan) -> Iterator[torch.Tensor]:
    """Yield batches; ``data order`` exchanges two of them."""
    torch.manual_seed(1)
    loader = torch.utils.data.DataLoader(torch.randn(2048, 6), batch_size=8, num_workers=plan.workers)
    batches = list(loader)
    if plan.fault == "data order":
        at = plan.at * plan.accumulate
        batches[at], batches[at + 1] = batches[at + 1], batches[at]
    yield from batches


@contextlib.contextmanager
def race(active: bool) -> Iterator[None]:
    """Let the racy kernel give another result."""
    if active:
        os.environ["PLANTED_RACE"] = "0.1"
    try:
        yield
    finally:
        os.environ.pop("PLANTED_RACE", None)


def train(folder: Path, plan: Plan, **watched: Any) -> None:
    """Train :class:`Net` as ``plan`` says, watched into ``folder``."""
    torch.manual_seed(0)
    batches = data(plan)
    model = Net()
    parameters = list(model.parameters())
    if plan.fault == "order":
        parameters.reverse()
    optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    called: Callable[..., Any] = torch.compile(model) if plan.compiled else model
    with hashbench.watch(folder, model=called, optimizer=optimizer, **watched):  # type: ignore[arg-type]
        for step in range(plan.steps):
            planted = plan.fault if step == plan.at else ""
            if planted == "generator":
                torch.rand(1)
            if planted == "scheduler":
                scheduler.step()
            if planted == "optimizer state":
                optimizer.state.clear()
            for _ in range(plan.accumulate):
                batch = next(batches)
                with race(planted == "kernel"), torch.autocast("cpu", torch.bfloat16, enabled=plan.amp):
                    loss = called(batch).float().square().mean() / plan.accumulate
                loss.backward()
            if planted == "gradient":
                parameters[1].grad *= 1.5
            if plan.clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if planted == "parameter":
                with torch.no_grad():
                    model.last.bias += 1e-3


FAULTS = {
    "generator": ("generator", 0),
    "data order": ("batch", 0),
    "kernel": ("loss", 0),
    "gradient": ("gradient", 0),
    "scheduler": ("lr", 0),
    "optimizer state": ("parameter", 0),
    "parameter": ("loss", 1),
}
"""Fault -> the part that differs first, and how many steps after it was planted."""
