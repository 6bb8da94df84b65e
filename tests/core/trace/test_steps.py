"""When a step counts, and what number it has."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
    register_optimizer_step_post_hook,
)

from hashbench.core.trace.steps import StepClock

SGD = torch.optim.SGD


def parameters() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(1))]


class Calling(SGD):
    """An optimizer that calls a function in its step, as Lookahead and SAM call another optimizer's."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__(parameters(), lr=0.1)
        self.call = call

    def step(self, closure: Any = None) -> Any:  # noqa: ARG002
        return self.call()


class Extended(SGD):
    """An optimizer whose step is that of its class, which torch's hooks see as well, and some more."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@contextmanager
def counted(clock: StepClock) -> Iterator[list[torch.optim.Optimizer]]:
    """Yield the optimizers of the steps that the clock counts meanwhile."""
    found: list[torch.optim.Optimizer] = []

    def after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        clock.count(optimizer)
        found.append(optimizer)

    clock.install(lambda *_: None, after)
    try:
        yield found
    finally:
        clock.remove()


@pytest.mark.parametrize(("each", "numbers"), [(False, [1, 1, 2, 3, 3]), (True, [1, 2, 3, 4, 5])])
def test_steps_are_those_of_the_most_frequent_optimizer_or_of_each(each: bool, numbers: list[int]) -> None:
    often, rarely = SGD(parameters(), lr=0.1), SGD(parameters(), lr=0.1)
    clock, found = StepClock(each=each), []
    with counted(clock):
        for optimizer in (often, rarely, often, often, rarely):
            optimizer.step()
            found.append(clock.number)
    assert found == numbers


@pytest.mark.parametrize(
    ("given", "expected"),
    [("", ["outer"]), ("outer", ["outer"]), ("inner", ["inner"]), ("inner outer", ["outer"])],
)
def test_of_steps_within_one_another_one_counts(given: str, expected: list[str]) -> None:
    inner = SGD(parameters(), lr=0.1)
    both = {"inner": inner, "outer": Calling(inner.step)}
    named = [both[name] for name in given.split()]
    with counted(StepClock(precedes=lambda one, around: one in named and around not in named)) as found:
        both["outer"].step()
    assert found == [both[name] for name in expected]


def test_a_step_within_that_of_its_subclass_is_part_of_it() -> None:
    SGD(parameters(), lr=0.1)  # from now on torch calls the hooks for each step of this class
    during: list[int] = []
    optimizer = Extended(parameters(), lr=0.1)
    with counted(StepClock()) as found:
        after = register_optimizer_step_post_hook(lambda *_: during.append(len(found)))
        optimizer.step()
        optimizer.step()
        after.remove()
    assert found == [optimizer] * 2
    assert during == [0, 1, 1, 2]


def test_a_step_that_raised_is_over() -> None:
    """Torch calls no hook then."""

    def fails() -> None:
        raise ZeroDivisionError

    failing, optimizer = Calling(fails), SGD(parameters(), lr=0.1)
    with counted(StepClock()) as found:
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                failing.step()
        optimizer.step()
    assert found == [optimizer]


def test_a_step_of_another_thread_is_no_part_of_one_that_goes_on() -> None:
    optimizer = SGD(parameters(), lr=0.1)

    def beside() -> None:
        thread = threading.Thread(target=optimizer.step)
        thread.start()
        thread.join()

    outer = Calling(beside)
    with counted(StepClock()) as found:
        outer.step()
    assert found == [optimizer, outer]


def test_a_step_that_is_compiled_is_noted_and_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, optimizer = StepClock(), SGD(parameters(), lr=0.1)
    with counted(clock) as found:
        optimizer.step()
        assert not clock.is_compiled
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
        optimizer.step()
    assert (found, clock.is_compiled) == ([optimizer], True)


def test_hooks_stay_while_torch_iterates_over_them() -> None:
    before = [dict(_global_optimizer_pre_hooks), dict(_global_optimizer_post_hooks)]
    clock, optimizer = StepClock(), SGD(parameters(), lr=0.1)
    clock.install(lambda *_: None, lambda *_: clock.remove())
    last = register_optimizer_step_post_hook(lambda *_: None)
    optimizer.step()
    last.remove()
    clock.remove()
    assert [dict(_global_optimizer_pre_hooks), dict(_global_optimizer_post_hooks)] == before
