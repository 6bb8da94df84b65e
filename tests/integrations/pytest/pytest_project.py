"""A project of somebody who uses the plug-in: one test for each thing that can happen. Run by test_pytest_plugin.py."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import secrets
import threading
import unittest
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

CALLS: dict[str, int] = {}
OWN_GENERATOR = torch.Generator()
COUNTER = itertools.count(1)


def called(name: str) -> int:
    CALLS[name] = CALLS.get(name, 0) + 1
    return CALLS[name]


@torch.library.custom_op("hashbench_pytest_project::noisy", mutates_args=())
def noisy(x: torch.Tensor) -> torch.Tensor:
    return x + secrets.randbits(20)


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return noisy(self.layer(x.cos())).sin()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    torch.nn.functional.dropout(model(x), 0.5).sum().backward()
    optimizer.step()


class Entry:
    """Refers to itself, so that only the garbage collector removes it."""

    def __init__(self) -> None:
        self.own = self


def scaled_by_garbage(x: torch.Tensor) -> torch.Tensor:
    gc.collect(0)  # from here on the collector does not run by itself before some hundred objects were made
    alive: weakref.WeakSet[Entry] = weakref.WeakSet()
    for _ in range(16):
        alive.add(Entry())
    return x * (1.0 + len(alive))


@pytest.fixture
def model() -> nn.Module:
    return nn.Linear(3, 2)


# ------------------------------------------------------------------------------------------- what must pass


def test_random_numbers_begin_anew(assert_runs_equal):
    assert_runs_equal(lambda: [torch.rand(3), secrets.SystemRandom().random() * 0])


def test_first_value_is_returned(assert_runs_equal):
    assert assert_runs_equal(torch.add, torch.ones(2), 1, runs=2).tolist() == [2, 2]


def test_arguments_are_copied_together(assert_runs_equal, model):
    optimizer, x = torch.optim.SGD(model.parameters(), lr=1), torch.ones(1, 3)
    before = model.weight.detach().clone()
    assert_runs_equal(train, model, optimizer, x=x)
    assert torch.equal(model.weight, before)
    assert model.weight.grad is None


@pytest.mark.run_to_run(runs=4)
def test_marked_training(model):
    called("training")
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    train(model, optimizer, torch.randn(4, 3))


def test_marked_training_ran_four_times():
    assert CALLS["training"] == 4


class TestClass:
    @pytest.mark.run_to_run
    @pytest.mark.parametrize("size", [1, 3])
    def test_marked_method(self, size, tmp_path):
        called(f"method {size}")
        (tmp_path / "file").write_text("written again")
        return torch.randn(size)

    def test_unmarked(self):
        assert called("unmarked") == 1
        assert (CALLS["method 1"], CALLS["method 3"]) == (3, 3)  # hashbench_runs in pyproject.toml


def test_all_is_put_back(assert_runs_equal, tmp_path):
    def careless():
        os.chdir(tmp_path)
        torch.set_grad_enabled(False)
        torch.use_deterministic_algorithms(True)
        return torch.rand(2)

    place, state = Path.cwd(), torch.get_rng_state()
    assert_runs_equal(careless)
    assert Path.cwd() == place
    assert torch.is_grad_enabled()
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.equal(torch.get_rng_state(), state)


def test_settings_are_those_of_the_test(assert_runs_equal):
    seen = []
    with torch.no_grad():
        assert_runs_equal(lambda: seen.append(torch.is_grad_enabled()) or torch.ones(1))
    assert_runs_equal(lambda: seen.append(torch.are_deterministic_algorithms_enabled()) or torch.ones(1))
    assert_runs_equal(
        lambda: seen.append(torch.are_deterministic_algorithms_enabled()) or torch.ones(1), deterministic="on"
    )
    assert seen == [False] * 6 + [True] * 3


@pytest.mark.run_to_run(allow_empty=True)
def test_empty_is_allowed():
    pass


@pytest.mark.run_to_run
def test_skips():
    pytest.skip("not here")


@pytest.mark.xfail(reason="known", strict=True)
@pytest.mark.run_to_run(diagnose=False)
def test_expected_failure():
    return torch.rand(2, generator=OWN_GENERATOR)


# ------------------------------------------------------------------------------------------- what must fail


def test_kernel(assert_runs_equal):
    assert_runs_equal(Noisy(), torch.ones(2, 3))


@pytest.mark.run_to_run
def test_generator():
    torch.ones(3).add(torch.rand(3, generator=OWN_GENERATOR))


def test_documented_failure(assert_runs_equal):
    from segments import with_noise  # not at the top: a repro imports this file for its op, from anywhere

    assert_runs_equal(with_noise, torch.randn(64, 8))


@pytest.mark.run_to_run(diagnose=False)
def test_sequence():
    x = torch.zeros(1)
    for _ in range(next(COUNTER)):
        x = x + 1


def test_other_structure(assert_runs_equal):
    assert_runs_equal(lambda: {f"part {next(COUNTER)}": torch.ones(1)}, diagnose=False)


def test_python_value(assert_runs_equal):
    assert_runs_equal(lambda: next(COUNTER), diagnose=False)


def test_strange_object(assert_runs_equal):
    assert_runs_equal(lambda: (torch.ones(1), object()))


def test_lock(assert_runs_equal):
    assert_runs_equal(lambda lock: torch.ones(1) if lock else None, threading.Lock())


@pytest.mark.run_to_run
def test_empty():
    pass


@pytest.mark.run_to_run(runs=3)
def test_fails_in_the_second_run():
    torch.ones(1).add(1)
    assert called("second") < 2


def test_ambiguous(assert_runs_equal):
    assert_runs_equal(lambda seed: torch.ones(seed), seed=3)


def test_result_of_a_call(assert_runs_equal):
    assert_runs_equal(torch.ones(1))


@pytest.mark.run_to_run(repeat=3)
def test_unknown_option():
    pass


@pytest.mark.run_to_run(5)
def test_positional_option():
    pass


@pytest.mark.run_to_run(runs=1)
def test_one_run():
    pass


@pytest.mark.run_to_run
async def test_coroutine():
    await asyncio.sleep(0)


class TestOld(unittest.TestCase):
    @pytest.mark.run_to_run
    def test_method(self):
        torch.ones(1)


def test_stressed(assert_runs_equal):
    assert_runs_equal(scaled_by_garbage, torch.ones(3), stress=True, diagnose=False)


def test_stressed_and_clean(assert_runs_equal):
    assert_runs_equal(torch.sin, torch.ones(3), stress=True)
