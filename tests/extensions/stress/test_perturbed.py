"""Runs under perturbations, and which perturbation makes two of them differ."""

from __future__ import annotations

import gc
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hashbench.core import processes
from hashbench.core.catalog import Perturbation
from hashbench.core.diagnose.replay.controls.perturbations import WITHIN_A_RUN, oversubscribed
from hashbench.core.extensions import failure, shown
from hashbench.core.processes import phases_told_to
from hashbench.core.records import Failure
from hashbench.core.report.table import sweep_table
from hashbench.extensions.stress import perturbed
from tests.extensions.stress.stress_helpers import CPU, STRESS, Scaled, provoking, row_of
from tests.flat_rows import flat

pytestmark = pytest.mark.usefixtures("free_memory_given_back")


@pytest.mark.parametrize(
    ("names", "variations", "used"),
    [
        (("load",), (0, 1), [0, 1, 0, 2]),
        (("threads", "load"), (0, 1), [0, 1, 0, 2]),
        (("load",), (0, 0), [0, 0, 0, 0]),
        (("memory",), (1, 2), [1, 2, 1, 2]),
        (("load", "memory"), (0, 1), [0, 1, 0, 1]),
    ],
)
def test_runs_under_load_are_loaded_otherwise_each(
    names: tuple[str, ...], variations: tuple[int, int], used: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    @contextmanager
    def provoking_none(_: object, variation: int, *, device: object) -> Iterator[None]:  # noqa: ARG001
        seen.append(variation)
        yield

    monkeypatch.setattr(perturbed.controls, "provoked", provoking_none)
    make = perturbed.StressedAttempt(lambda *_, **__: Failure("no run"), names, variations, device=CPU)
    for _ in range(4):
        make()
    assert seen == used


@pytest.mark.slow
@pytest.mark.parametrize("name", ["load", "collector"])
def test_the_perturbation_that_brings_a_difference_about_is_named(name: str) -> None:
    row = row_of(Scaled(provoking(name)))
    assert (row.accuracy, flat(row).latent, flat(row).latent_kernel) == ("pass", name, "aten.mul.Tensor")


def test_what_an_earlier_run_changed_for_good_is_no_perturbation() -> None:
    phases = [""]

    def factor() -> float:
        return float("stress: run 2" in phases)

    with phases_told_to(phases.append):
        row = row_of(Scaled(factor), replace(STRESS, diagnose_budget=0))
    assert (row.accuracy, flat(row).latent, flat(row).latent_kernel) == ("pass", "process", "aten.mul.Tensor")
    assert "threads 0/1; load 0/1; memory 0/1" in flat(row).stressed


def test_chance_differences_are_tried_under_each_perturbation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(perturbed, "NAMING_SECONDS", 600.0)
    phases, runs = [""], Counter[str]()
    of_load = provoking("load")

    def factor() -> float:
        runs[phases[-1]] += 1
        return of_load()

    with phases_told_to(phases.append):
        row = row_of(Scaled(factor), replace(STRESS, iterations=1, diagnose_budget=0))
    assert (flat(row).latent, flat(row).latent_rate) == ("load", 1.0)
    assert runs["stress: threads alone"] == 3, "two pairs, which agree"
    assert runs["stress: load alone"] == 11, "ten pairs, which differ"


def by_phases(**others: Callable[[int], float]) -> tuple[Callable[[], float], Callable[[str], None]]:
    """A value that depends on what the process does just now, and what is to be told of that: in a phase whose words,
    with ``_`` between them, are a name of ``others``, what that gives for the number of the run in it; else 1."""
    phases, runs = [""], Counter[str]()

    def factor() -> float:
        name = phases[-1].removeprefix("stress: ").replace(" ", "_")
        runs[name] += 1
        return others[name](runs[name]) if name in others else 1.0

    return factor, phases.append


def test_a_busy_machine_does_not_use_up_the_time_to_tell_what_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(step=0.4)
    monkeypatch.setattr(processes, "monotonic", lambda: float(next(clock)))
    row = row_of(Scaled(provoking("load")), replace(STRESS, iterations=1, diagnose_budget=0))
    assert (flat(row).latent, flat(row).latent_rate) == ("load", 1.0)


def test_the_collector_is_named_whenever_it_would_have_run_by_itself() -> None:
    factor, told_to = by_phases(collector_alone=lambda number: float(number != 3))
    of_collector = provoking("collector")

    def value() -> float:
        by_itself = factor()  # counts in every run
        return by_itself if gc.isenabled() and gc.get_threshold()[0] > 10 else of_collector()

    with phases_told_to(told_to):
        row = row_of(Scaled(value), replace(STRESS, iterations=1, diagnose_budget=0))
    assert (flat(row).latent, flat(row).latent_rate) == ("collector", 1.0)


@pytest.mark.slow
def test_no_perturbation_is_blamed_at_equal_rates() -> None:
    """A difference of the first stressed run, and of one run with more threads alone."""
    chances = {"run_1": lambda _: 0.0, "threads_alone": lambda number: float(number != 2)}
    factor, told_to = by_phases(all_perturbations_again=lambda number: float(number not in (3, 4)), **chances)
    with phases_told_to(told_to):
        row = row_of(Scaled(factor), replace(STRESS, iterations=1, diagnose_budget=0))
    assert (row.accuracy, flat(row).latent, flat(row).latent_kernel) == ("pass", "together", "aten.mul.Tensor")
    assert flat(row).latent_rate == pytest.approx(3 / 11, abs=1e-3)
    assert "threads 0/1; load 0/1; memory 0/1" in flat(row).stressed
    assert flat(row).stressed.endswith("together 3/11")
    words = "3 of 11 pairs under several perturbations at once"
    assert f"it differs in {words} ({Perturbation.TOGETHER.meaning})" in sweep_table([row])
    assert f"they differ in {words}" in failure(shown(row), folder=Path()).headline


@pytest.mark.slow
@pytest.mark.parametrize(("both", "name"), [(lambda _: True, "threads"), (lambda busy: busy, "together")])
def test_only_contributing_perturbations_are_named(both: Callable[[bool], bool], name: str) -> None:
    """A difference that more threads bring about by chance: in any case, or under load alone."""
    of_load = provoking("load")
    turns = itertools.count()

    def value() -> float:
        many = torch.get_num_threads() >= oversubscribed()
        return float(next(turns) % 2) if many and both(bool(of_load())) else 1.0

    row = row_of(Scaled(value), replace(STRESS, iterations=1, diagnose_budget=0))
    assert (row.accuracy, flat(row).latent) == ("pass", name)


def test_missing_time_to_find_the_perturbation_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(perturbed, "NAMING_SECONDS", 0.0)
    monkeypatch.setattr(perturbed, "NAMING_SHARE", 0.0)
    row = row_of(Scaled(provoking("load")), replace(STRESS, iterations=1, diagnose_budget=0))
    assert (row.accuracy, flat(row).latent, flat(row).latent_cause) == ("pass", "together", "")
    assert row.because == "the time for experiments ended before each perturbation was tried alone"
    assert (
        row.advice == "The time for experiments ended before the cause was certain: give them more (--diagnose-budget)."
    )


def test_what_only_depends_on_the_number_of_threads_is_none() -> None:
    assert flat(row_of(Scaled(provoking("threads")))).latent == ""


CHANCE = [(("threads",), (0, 0)), (("load",), (0, 1)), (("threads", "load"), (0, 1))]


@pytest.mark.parametrize(
    ("names", "steady", "chance"),
    [
        (WITHIN_A_RUN, [("memory", (1, 2)), ("address", (0, 1)), ("address", (1, 2)), ("collector", (2, 1))], CHANCE),
        (("collector", "load"), [("collector", (2, 1))], [(("load",), (0, 1))]),
        (("memory",), [("memory", (1, 2))], []),
    ],
)
def test_steady_perturbations_are_tried_before_those_of_chance(
    names: Sequence[str],
    steady: list[tuple[str, tuple[int, int]]],
    chance: list[tuple[tuple[str, ...], tuple[int, int]]],
) -> None:
    few = [(*tried, (most, perturbed.AGAIN)) for most in (perturbed.FEW, perturbed.AGAIN) for tried in chance]
    always = [((name,), sides, (perturbed.TO_TELL, perturbed.TO_TELL)) for name, sides in steady]
    assert list(perturbed._tries(names)) == always + few
