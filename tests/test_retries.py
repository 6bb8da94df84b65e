"""Two attempts at one model: which is believed."""

from __future__ import annotations

import pytest

from hashbench.catalog import Status
from hashbench.records import Row
from hashbench.sweep.run import believed, wants_repetition


def row(accuracy, **fields):
    return Row("cpu", "a", 1, accuracy, **fields)


@pytest.mark.parametrize("accuracy", Status)
def test_what_its_neighbours_may_have_caused(accuracy):
    assert wants_repetition(row(accuracy), died=False) == (accuracy in ("eager_1st_run_OOM", "eager_2nd_run_OOM"))
    assert wants_repetition(row(accuracy), died=True)


@pytest.mark.parametrize(
    ("first", "second", "accuracy", "retried"),
    [
        pytest.param("crashed", "pass", "pass", "crashed: killed", id="alone it works"),
        pytest.param("crashed", "crashed", "crashed", "crashed: killed", id="alone it crashes, too"),
        pytest.param("eager_1st_run_OOM", "timeout", "timeout", "eager_1st_run_OOM: killed", id="alone it is slow"),
        pytest.param(
            "eager_two_runs_differ",
            "pass",
            "eager_two_runs_differ",
            "alone it ended with pass: second",
            id="a difference that was seen is not taken back",
        ),
        pytest.param(
            "eager_two_runs_differ",
            "eager_two_runs_differ",
            "eager_two_runs_differ",
            "eager_two_runs_differ: killed",
            id="the diagnosis came to its end alone",
        ),
    ],
)
def test_two_attempts(first, second, accuracy, retried):
    found = believed(row(first, error="killed"), row(second, error="second"))
    assert (found.accuracy, found.retried) == (accuracy, retried)
    assert found.error == ("killed" if retried.startswith("alone") else "second")


def test_what_an_executor_repeated_by_itself_stays_known():
    found = believed(row("crashed"), row("pass", retried="its machine was lost"))
    assert found.retried == "crashed; its machine was lost"


def test_a_long_error_is_shortened():
    assert len(believed(row("crashed", error="word " * 1000), row("pass")).retried) <= 300
