"""A subject written by hand takes part in every check: what makes its runs is all that a new kind brings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from hashbench.core.check.pair import PairCheck
from hashbench.core.check.subject import Subject
from hashbench.core.records import BATCH_INVARIANCE, RunOptions
from hashbench.core.run.outcome import Given, Prepared, add_result, prepared_runs
from hashbench.core.trace.api import HashDebugTrace

OPTIONS = RunOptions(diagnose_budget=0.0)


def subject_of(function: Callable[[torch.Tensor], torch.Tensor], made: list[int | None]) -> Subject:
    """A function of eight items; ``made`` are the numbers of its runs."""
    inputs = torch.arange(1.0, 25).view(8, 3)

    def prepare(given: Given | None) -> Prepared:
        (x,) = (inputs.clone(),) if given is None else given(function, (inputs.clone(),))

        def execute(trace: HashDebugTrace | None) -> dict[str, Any]:
            results: dict[str, Any] = {}
            assert trace is not None
            with trace:
                output = function(x)
            add_result(results, trace, "output.0", output, copied=True)
            return results

        return Prepared(torch.nn.Identity(), x, execute)

    make = prepared_runs(prepare, OPTIONS)

    def attempt(given: Given | None = None, *, number: int | None = None, **how: Any) -> Any:
        made.append(number)
        return make(given, **how)

    return Subject(attempt, runs=lambda: 3, inputs=(inputs,), batch=8)


def test_equal_runs_pass_and_are_numbered() -> None:
    made: list[int | None] = []
    outcome = PairCheck(subject_of(torch.exp, made), OPTIONS, "off").run()
    assert (outcome.accuracy, outcome.runs, made) == ("pass", 3, [1, 2, 3])


def test_a_difference_is_confirmed_by_runs_without_a_number() -> None:
    made: list[int | None] = []
    outcome = PairCheck(subject_of(lambda x: x + len(made), made), OPTIONS, "off").run()
    assert (outcome.accuracy, outcome.confirmed) == ("eager_two_runs_differ", "yes")
    assert made == [1, 2, 3, None, None]


@pytest.mark.parametrize(
    ("invariance", "function", "accuracy"),
    [
        (BATCH_INVARIANCE, torch.exp, "pass"),
        (BATCH_INVARIANCE, lambda x: x - x.mean(0), "fail_batch_invariance_at_4"),
        ("position-invariance", torch.exp, "pass"),
        ("position-invariance", lambda x: x.cumsum(0), "fail_position_invariance"),
        ("right-padding-invariance", torch.exp, "pass_due_to_skip"),
    ],
)
def test_its_items_are_run_in_every_variant(
    invariance: str, function: Callable[[torch.Tensor], torch.Tensor], accuracy: str
) -> None:
    check = pytest.importorskip("hashbench.extensions.invariance.check")
    options = replace(OPTIONS, mode=invariance)
    assert check.check_invariance(subject_of(function, []), options, "off").accuracy == accuracy
