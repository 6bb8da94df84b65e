"""The stages of a diagnosis: which follow from what is known before it, and which are passed over."""

from __future__ import annotations

import pytest

from hashbench.diagnose import driver
from hashbench.records import CallFacts, Divergence, Evidence, ExperimentResult, Failure, RunOptions, Verdict
from hashbench.run.outcome import Outcome

ENVIRONMENT = ["repeat_pair", "control_environment"]
STAGES = {
    "settings": [],
    "input": [*ENVIRONMENT, "start_processes"],
    "rng": [*ENVIRONMENT, "start_processes"],
    "state": [*ENVIRONMENT, "start_processes"],
    "outside": [*ENVIRONMENT, "start_processes", "start_processes_in_fixed_order"],
    "sequence": [*ENVIRONMENT, "start_processes", "start_processes_in_fixed_order"],
    "kernel": [
        *("capture_call", "replay_call", "poison_allocation"),
        *("repeat_pair_of_kernel", "control_environment", "start_processes"),
    ],
}


def case(origin: str, accuracy: str = "eager_two_runs_differ") -> driver.Case:
    divergence = Divergence(origin, "x", "aten.mm.default", 1, "forward", 0, "", "", "")
    outcome = Outcome(accuracy, "on", verdict=Verdict(("output",), divergence, ()))
    return driver.Case(lambda **_: Failure("no run"), RunOptions(diagnose_budget=60.0), outcome)


def result(name: str, differing: int, found: str = "") -> ExperimentResult:
    return ExperimentResult(name, "pair", 20, differing, 1 + differing, 0.1, found)


PROVEN = driver.Findings(Evidence("outside", arms=(result("pair", 20), result("generators", 0, "a.RNG"))))
OPEN = driver.Findings(Evidence("outside", arms=(result("pair", 20),)))


@pytest.mark.parametrize("origin", STAGES)
def test_the_origin_decides_which_stages_follow(origin: str) -> None:
    assert [stage.__name__ for stage in driver.stages_of(case(origin))] == STAGES[origin]


def test_runs_that_agree_under_the_trace_are_repeated_without_it() -> None:
    stages = driver.stages_of(case("kernel", accuracy="pass"))
    assert [stage.__name__ for stage in stages] == ["repeat_pair", "repeat_untraced"]


@pytest.mark.parametrize(("origin", "always"), [("state", True), ("outside", False), ("rng", False)])
def test_fresh_processes_are_spared_where_the_cause_is_proven_but_for_a_state(origin: str, *, always: bool) -> None:
    assert (PROVEN.proven, OPEN.proven) == (True, False)
    stage = next(stage for stage in driver.stages_of(case(origin)) if stage.__name__ == "start_processes")
    assert (stage(case(origin), PROVEN) is not PROVEN) == always
    assert [arm.name for arm in stage(case(origin), OPEN).evidence.arms] == ["pair", "fresh_process"]


@pytest.mark.parametrize("allocation", [True, False])
def test_an_allocation_is_not_replayed_but_poisoned(*, allocation: bool) -> None:
    findings = driver.Findings(Evidence("kernel", call=CallFacts("aten.empty.default", allocation=allocation)))
    poisoned = driver.poison_allocation(case("kernel"), findings)
    assert [arm.name for arm in poisoned.evidence.arms] == (["pair", "poison"] if allocation else [])
    repeated = driver.repeat_pair_of_kernel(case("kernel"), findings)
    assert [arm.name for arm in repeated.evidence.arms] == ([] if allocation else ["pair"])


def test_a_call_that_cannot_be_captured_says_why_and_is_not_replayed() -> None:
    findings = driver.capture_call(case("kernel"), driver.Findings(Evidence("kernel")))
    assert findings.evidence.call is not None
    assert (findings.call, findings.evidence.call.limits) == (None, "the run failed: no run")
    assert driver.replay_call(case("kernel"), findings) is findings
