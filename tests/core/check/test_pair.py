"""Runs compared with the first, confirmed, and repeated with warnings."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from hashbench.core.run.workload import Workload
from tests.core.check.model_helpers import INFERENCE, RUNS, _put, check, row_of, workload


def test_nondeterministic_op_is_named_and_warned_about() -> None:
    for outcome in (row_of(lambda: workload(_put)), check(workload(_put), deterministic="on")):
        expected = ("pass", "warn", "aten.put_.default")
        assert (outcome.accuracy, outcome.deterministic, outcome.nondeterministic_op) == expected


@pytest.mark.parametrize("level", ["warn", "off"])
def test_nondeterministic_op_runs_if_allowed(level: str) -> None:
    row = row_of(lambda: workload(_put), replace(INFERENCE, deterministic=level))
    assert (row.accuracy, row.deterministic, row.nondeterministic_op) == ("pass", level, "")
    assert RUNS[0] == 2


def test_constructor_with_such_an_op_is_retried_with_warnings() -> None:
    def build() -> Workload:
        _put(None, torch.zeros(1))
        return workload()

    row = row_of(build)
    assert (row.accuracy, row.deterministic) == ("pass", "warn")
    assert row.nondeterministic_op.startswith("put_")


def _scattered(_model, out):
    return out.index_put((torch.tensor([0]),), out[:1])


@pytest.mark.parametrize("tracer", ["auto", "python"])
@pytest.mark.parametrize(
    ("change", "level", "named"),
    [
        (_scattered, "on", "aten.index_put.default"),
        (_scattered, "off", ""),
        (None, "on", ""),
        (lambda model, out: _scattered(model, out) + model.run, "on", ""),
    ],
    ids=["with the flag", "without", "no such op", "runs that differ"],
)
def test_ops_that_pass_by_the_flag_are_named(change, level: str, named: str, tracer: str) -> None:
    options = replace(INFERENCE, deterministic=level, tracer=tracer)
    assert row_of(lambda: workload(change), options).deterministic_ops == named


def test_every_run_is_compared_with_the_first() -> None:
    for change, accuracy, distinct in (
        (lambda model, out: out + (model.run == 4), "eager_two_runs_differ", 2),
        (lambda _, out: out, "pass", 1),
        (lambda model, out: out + model.run % 3, "eager_two_runs_differ", 3),
    ):
        RUNS[0] = 0
        outcome = check(workload(change), replace(INFERENCE, runs=5))
        assert (outcome.accuracy, outcome.runs) == (accuracy, 5)
        assert outcome.run_counts is not None
        assert outcome.run_counts.distinct == distinct


def _honest_when_watched(_model, out):
    # Different in every call, but only where nobody looks.
    return out if _get_current_dispatch_mode() is not None else out + random.SystemRandom().random()


def test_untraced_pair_shows_what_tracing_hides() -> None:
    row = row_of(lambda: workload(_honest_when_watched), replace(INFERENCE, untraced_pair=True, tracer="python"))
    assert (row.accuracy, row.untraced) == ("eager_two_runs_differ", "differ")
    assert row.differing_results == "output.0, output.1"
    assert row_of(lambda: workload(_honest_when_watched), replace(INFERENCE, tracer="python")).accuracy == "pass"


def test_difference_that_comes_again_is_confirmed() -> None:
    row = row_of(lambda: workload(lambda model, out: out + model.run))
    assert row.confirmed.startswith("yes")
    assert (row.origin, row.op_index is not None) == ("outside", True)


def test_difference_that_never_comes_again_is_not_confirmed() -> None:
    row = row_of(lambda: workload(lambda model, out: out + (model.run == 2)))
    assert (row.accuracy, row.confirmed) == ("eager_two_runs_differ", "no: 3 further pairs agreed")
    assert RUNS[0] == 2 + 2 * 3
