"""Draws of a generator that depend on the batch: the call that drew another amount is named."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from runner_helpers import FunctionRunner

from hashbench.core.records import BATCH_INVARIANCE, ModelSpec, Row
from hashbench.core.run.workload import Workload
from tests.extensions.invariance.batch_invariance_helpers import BATCH, Lambda, checked


def row(accuracy: str, **more: Any) -> Row:
    return Row("cpu", "net", 8, accuracy, suite="zoo", mode=BATCH_INVARIANCE, dtype="float32", **more)


class Parts(torch.nn.Module):
    """Draws for each item in one part, and once for all in another."""

    def __init__(self, draw: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.drops, self.mixes = Lambda(lambda x: x + torch.rand(()) * 0), Lambda(draw), Lambda(shuffled)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mixes(self.drops(self.first(x)))


def shuffled(x: torch.Tensor) -> torch.Tensor:
    return x[:, torch.randperm(x.shape[1])]


@pytest.mark.parametrize("private", [False, True])
def test_call_that_drew_another_amount_is_blamed(*, private: bool):
    def drops(x: torch.Tensor) -> torch.Tensor:
        dropped = x * (torch.rand_like(x) > 0.5)
        return dropped + torch.rand((), generator=torch.Generator()) * 0 if private else dropped

    runner = FunctionRunner(replace(BATCH, diagnose_budget=20.0))
    runner.build = lambda: Workload(module=Parts(drops), inputs=(torch.arange(1.0, 801).view(8, 100),))
    row = runner.run_model(ModelSpec("zoo", "model"))
    assert (row.accuracy, row.kernel, row.module) == (
        "fail_batch_invariance_at_4",
        "aten.rand_like.default",
        "Parts.drops",
    )
    said = "random numbers differ by the batch: it draws another amount of them, so that the generator stands elsewhere"
    assert row.detail == row.because == f"{said} before aten.randperm.default in Parts.mixes"
    assert (row.cause, row.confidence) == ("batch_coupling", "proven")
    assert row.advice.startswith("Draw for each item from a torch.Generator of its own")


def test_equal_draws_for_every_batch_are_not_blamed():
    def drops(x: torch.Tensor) -> torch.Tensor:
        return x * (torch.rand(100) > 0.5)

    runner = FunctionRunner(BATCH)
    runner.build = lambda: Workload(module=Parts(drops), inputs=(torch.randn(8, 100),))
    assert runner.run_model(ModelSpec("zoo", "model")).accuracy == "pass"


def noisy(x: torch.Tensor) -> torch.Tensor:
    return torch.normal(x, 1.0)


def dropped(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.dropout(x, training=True)


@pytest.mark.parametrize("draw", [noisy, dropped])
def test_draws_after_another_amount_are_coupled(draw):
    def after_others(x: torch.Tensor) -> torch.Tensor:
        torch.rand(len(x))
        return draw(x)

    row = checked(after_others, torch.ones(8, 6), options=DIAGNOSED)
    assert (row.kernel, row.cause, row.confidence) == ("aten.rand.default", "batch_coupling", "proven"), row.because
    assert row.because.startswith("random numbers differ by the batch: it draws another amount of them")


DIAGNOSED = replace(BATCH, diagnose_budget=20.0)


def private_noise(x: torch.Tensor, *, normal: bool) -> torch.Tensor:
    draw = torch.randn if normal else torch.rand
    return x + draw(x.shape, generator=torch.Generator().manual_seed(3))


def noise_in_place(x: torch.Tensor) -> torch.Tensor:
    return x + torch.empty_like(x).normal_(generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize(
    ("function", "kernel"),
    [
        (functools.partial(private_noise, normal=True), "aten.randn.generator"),
        (noise_in_place, "aten.normal_.default"),
        (lambda x: x + torch.randn_like(x), "aten.randn_like.default"),
        (lambda x: x[torch.randperm(len(x))], "aten.randperm.default"),
    ],
    ids=["a private generator", "in place", "the default generator", "an order"],
)
def test_draws_by_number_of_items_are_attributed(function, kernel):
    """Normal numbers are drawn in blocks of 16, of which the last depends on how many there are."""
    row = checked(function, torch.ones(8, 6).cumsum(0), options=DIAGNOSED)
    assert (row.kernel, row.cause, row.confidence) == (kernel, "batch_coupling", "proven"), row.because
    assert "0 of 3 repetitions with the same items differ; 7 of 7 other numbers of items" in row.because
    assert row.advice.startswith("Draw for each item from a torch.Generator of its own")


def backwards(x: torch.Tensor) -> torch.Tensor:
    """Draw for one item after another, the last one first."""
    return torch.cat([x[at : at + 1] * torch.rand(1, x.shape[1]) for at in reversed(range(len(x)))][::-1])


def one_by_one(x: torch.Tensor) -> torch.Tensor:
    """Draw for one item after another: in the second iteration from where the first one ended."""
    return torch.stack([torch.nn.functional.dropout(item, 0.5) for item in x])


def turned_by_chance(x: torch.Tensor) -> torch.Tensor:
    """Turn each item by a number of places that Python reads."""
    shifts = [int(torch.randint(0, 6, ())) for _ in x]
    return torch.stack([item.roll(shift) for item, shift in zip(x, reversed(shifts), strict=True)])


@pytest.mark.parametrize(
    ("function", "kernel"),
    [(backwards, "aten.rand"), (one_by_one, "aten.bernoulli_"), (turned_by_chance, "aten.randint")],
)
@pytest.mark.parametrize("invariance", ["batch", "position"])
def test_loop_over_items_that_draws_is_blamed_for_its_draws_alone(function, kernel: str, invariance: str) -> None:
    options = replace(DIAGNOSED, mode=f"{invariance}-invariance")
    row = checked(function, torch.ones(8, 6).cumsum(0).cumsum(1), options=options)
    assert row.kernel.startswith(kernel), row
    assert (row.cause, row.confidence) == ("batch_coupling", "likely")
    assert row.because.startswith("which random numbers an item gets may follow from the other items: ")
    assert "draw nothing in eval(): a functional dropout takes training=self.training" in row.advice


def test_loop_over_items_that_draws_nothing_uneven_is_not_blamed_for_its_draws() -> None:
    def scaled(x: torch.Tensor) -> torch.Tensor:
        noise = torch.rand(6)
        return torch.stack([item * noise / x.sum() for item in x])

    row = checked(scaled, torch.ones(8, 6).cumsum(0), options=DIAGNOSED)
    assert (row.accuracy, row.kernel) == ("fail_batch_invariance_at_4", "aten.sum.default")
    assert "random numbers" not in row.because


def test_uniform_private_draws_are_invariant():
    assert checked(functools.partial(private_noise, normal=False), torch.ones(8, 6)).accuracy == "pass"


def test_draws_that_enter_computation_are_attributed_but_not_proven():
    row = checked(lambda x: torch.normal(x, 1.0), torch.ones(8, 6).cumsum(0), options=DIAGNOSED)
    assert (row.kernel, row.cause, row.confidence) == ("aten.normal.Tensor_float", "batch_coupling", "likely")


@pytest.mark.parametrize("draw", [torch.rand_like, torch.randn_like])
def test_draws_by_place_are_attributed_by_position(draw):
    options = replace(DIAGNOSED, mode="position-invariance")
    row = checked(lambda x: x + draw(x), torch.ones(8, 16).cumsum(0), options=options)
    assert (row.accuracy, row.cause, row.confidence) == ("fail_position_invariance", "batch_coupling", "proven")
    assert "at another place" in row.because


def in_a_loop(x: torch.Tensor, *, apart: bool) -> torch.Tensor:
    """A draw for each item, and one for all, from the same generator or from one that is seeded anew."""
    if apart:
        torch.manual_seed(4)
    rows = torch.cat([row[None] * (torch.rand(row.shape) > 0.5) for row in x])
    if apart:
        torch.manual_seed(5)
    return rows + torch.rand(rows.shape)


def cut_in_a_loop(x: torch.Tensor, *, apart: bool) -> torch.Tensor:
    """The same with a call inside the loop of the op that follows it."""
    if apart:
        torch.manual_seed(4)
    rows = torch.cat([torch.cat([row[None], torch.rand(1, 2)], 1) for row in x])
    if apart:
        torch.manual_seed(5)
    return rows + torch.rand(rows.shape)


@pytest.mark.parametrize("loop", [in_a_loop, cut_in_a_loop])
def test_of_a_loop_over_items_the_call_that_draws_is_named(loop):
    row = checked(functools.partial(loop, apart=False), torch.ones(8, 6), options=DIAGNOSED)
    assert (row.kernel, row.cause, row.confidence) == ("aten.rand.default", "batch_coupling", "proven"), row.because
    assert "a batch of 8 draws more often than a batch of 4" in row.because
    assert checked(functools.partial(loop, apart=True), torch.ones(8, 6)).accuracy == "pass"


def test_generator_seeded_by_the_batch_is_found():
    def seeded(x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand(6, generator=torch.Generator().manual_seed(len(x)))

    row = checked(seeded, torch.ones(8, 6), options=DIAGNOSED)
    assert (row.kernel, row.cause, row.confidence) == ("aten.rand.generator", "batch_coupling", "proven"), row.because
    assert "a generator that was seeded by it" in row.because


def test_draws_of_the_smaller_batch_alone_are_named():
    def draws_first(x: torch.Tensor) -> torch.Tensor:
        shift = torch.zeros(3) if len(x) > 4 else torch.rand(3) * 0
        return x + torch.randint(9, (6,)) + shift[0]

    row = checked(draws_first, torch.ones(8, 6), options=DIAGNOSED)
    assert (row.kernel, row.cause, row.confidence) == ("aten.rand.default", "batch_coupling", "proven"), row.because
    assert "a batch of 4 draws more often than a batch of 8" in row.because
    assert "before aten.randint.default" in row.because


class Regularized(torch.nn.Module):
    """Dropout that is left on, in two places."""

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.probability = probability
        self.first, self.second = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (self.first, self.second):
            x = torch.nn.functional.dropout(layer(x).sign(), self.probability, training=True)
        return x


def drops_alike() -> bool:
    """Whether dropout leaves the generator in one state for eight items and for four, as MKL's does."""
    states = []
    for items in (8, 4):
        torch.manual_seed(0)
        torch.nn.functional.dropout(torch.ones(items, 64), training=True)
        states.append(torch.get_rng_state())
    return torch.equal(*states)


def test_dropout_is_proven_by_generator_states():
    runner = FunctionRunner(DIAGNOSED)
    runner.build = lambda: Workload(Regularized(0.5), torch.randn(8, 64))
    row = runner.run_model(ModelSpec("zoo", "model"))
    if not drops_alike():
        assert (row.kernel, row.cause, row.confidence) == ("aten.bernoulli_.float", "batch_coupling", "proven")
        assert "it draws another amount of them, so that the generator stands elsewhere before" in row.because
    else:
        assert row.accuracy == "pass" or row.cause == "shape_dependent_kernel"
    runner.build = lambda: Workload(Regularized(0.0), torch.randn(8, 64))
    assert runner.run_model(ModelSpec("zoo", "model")).cause != "batch_coupling"
