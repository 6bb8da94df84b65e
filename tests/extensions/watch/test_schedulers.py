"""The state of schedulers, found by the optimizer that they hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

import hashbench
from hashbench.extensions.watch import file
from hashbench.extensions.watch.schedulers import WatchedSchedulers, schedulers_of


class OwnSchedule:
    """A schedule that inherits nothing of torch, as those of timm."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.metric = optimizer, None

    def step(self) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class Loop:
    """A trainer: it holds the optimizer, and is no scheduler."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        pass


def optimizer() -> torch.optim.SGD:
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)


@pytest.mark.parametrize(
    "kind",
    [
        lambda of: lr_scheduler.StepLR(of, 30),
        lambda of: lr_scheduler.ReduceLROnPlateau(of),
        lambda of: lr_scheduler.LambdaLR(of, lambda _: 1.0),
        OwnSchedule,
    ],
)
def test_a_scheduler_is_found_by_its_optimizer(kind: Any) -> None:
    mine, other = optimizer(), optimizer()
    scheduler, strange, loop = kind(mine), kind(other), Loop(mine)
    assert schedulers_of([mine]) == [scheduler]
    assert strange not in schedulers_of([mine])
    assert loop not in schedulers_of([mine])
    assert schedulers_of([]) == []


def test_what_changed_is_told_by_name() -> None:
    mine = optimizer()
    first, second = lr_scheduler.StepLR(mine, 30), lr_scheduler.StepLR(mine, 50)
    watched = WatchedSchedulers()
    watched.look_up([mine])
    told = watched.changes()
    assert (told["StepLR 1.step_size"], told["StepLR 2.step_size"]) == ("30", "50")
    assert not any("optimizer" in key or "_last_lr" in key for key in told)
    assert watched.changes() == {}
    mine.step()
    second.step()
    changes = watched.changes()
    assert changes["StepLR 2.last_epoch"] == "1"
    assert "StepLR 1.last_epoch" not in changes
    assert first.last_epoch == 0


def test_a_recording_has_the_state_of_schedulers_in_each_step(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1)
    stepped = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = lr_scheduler.StepLR(stepped, 30)
    with hashbench.watch(tmp_path, model=model):
        for number in range(4):
            model(torch.ones(1, 2)).sum().backward()
            stepped.step()
            if number != 1:
                scheduler.step()
    steps = file.read(tmp_path / "rank0.jsonl").steps
    assert [step.parts["scheduler"]["StepLR.last_epoch"] for step in steps.values()] == ["0", "1", "1", "2"]
    assert [batch.shape for batch in steps[3].batches] == [(1, 2)]


class Wrapper(torch.optim.SGD):
    """An optimizer around another one, as accelerate's."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer.param_groups[0]["params"])
        self.optimizer = optimizer


def test_the_scheduler_of_what_wraps_an_optimizer_is_its_own() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    schedule = OwnSchedule(Wrapper(optimizer))
    OwnSchedule(torch.optim.SGD([torch.zeros(1, requires_grad=True)]))
    assert schedulers_of([optimizer]) == [schedule]
