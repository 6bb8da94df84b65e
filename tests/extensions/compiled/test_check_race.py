"""Two runs of one compilation differ: its own kernel is repeated, and nothing compiles it anew."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hashbench.core.catalog import Status
from hashbench.core.check import pipeline
from hashbench.core.check.model import BenchmarkRunner
from hashbench.core.check.pair import PairCheck, compared
from hashbench.core.check.subject import Subject
from hashbench.core.diagnose import driver
from hashbench.core.records import Divergence, Evidence, Failure, ModelSpec, RunOptions, Verdict
from hashbench.core.run.outcome import Outcome
from hashbench.core.run.workload import Workload
from hashbench.extensions.compiled.program import Compilation, compiling, runs_under
from tests.kernel_helpers import Scatter

OPTIONS = RunOptions(mode="inference", threads=2, replays=10, diagnose_budget=300.0, deterministic="off")
MOST_RUNS = 60
"""Runs in which eight threads race at least once, on however busy a machine."""

SPEC = ModelSpec("scatter", "zoo")


def outcome_of(*, accumulate: bool, output: Path) -> Outcome:
    """Compile once, run until two runs differ, and diagnose that."""
    options = replace(OPTIONS, output=str(output))
    runner = BenchmarkRunner(options)
    workload = Workload(Scatter(accumulate=accumulate), (torch.ones(()),), iterations=1)
    with compiling({"cpp.threads": 8}):
        program = runs_under(runner, workload, backend="inductor")
        first = program()
        assert not isinstance(first, Failure)
        outcome = Outcome(Status.PASS, "off", iterations=1)
        for number in range(2, MOST_RUNS if accumulate else 6):
            other = program()
            assert not isinstance(other, Failure)
            outcome = compared(outcome, first, other, number=number)
            if outcome.accuracy != Status.PASS:
                break
        graphs = Compilation.so_far().graphs
        check = PairCheck(Subject(program, SPEC, compiled=True), options, "off")
        outcome = pipeline.diagnose(check, outcome)
        assert Compilation.so_far().graphs == graphs == 1
    return outcome


@pytest.mark.slow
def test_atomic_addition_of_a_fused_kernel_is_accumulation_order(tmp_path: Path) -> None:
    outcome = outcome_of(accumulate=True, output=tmp_path)
    assert outcome.accuracy == Status.TWO_RUNS_DIFFER
    assert outcome.verdict is not None
    assert outcome.verdict.divergence is not None
    kernel = outcome.verdict.divergence.kernel
    assert kernel.startswith("cpp_fused")
    assert outcome.verdict.divergence.module == "Scatter"
    found = outcome.diagnosis
    assert found is not None
    assert (found.decision.cause, found.decision.confidence) == ("accumulation_order", "proven"), found
    counts = {name: found.evidence.arm(name, "call") for name in ("repeat", "one_thread", "exact_values")}
    assert counts["repeat"].differing
    assert all(arm.ran and not arm.differing for name, arm in counts.items() if name != "repeat")
    assert found.deterministic_doc == ""
    folder = tmp_path / found.repro
    assert kernel in (folder / "repro.py").read_text()
    assert (folder / "kernel.cpp").exists()
    assert "calls differ" in found.reproduced


@pytest.mark.slow
def test_twin_agrees(tmp_path: Path) -> None:
    outcome = outcome_of(accumulate=False, output=tmp_path)
    assert (outcome.accuracy, outcome.diagnosis) == (Status.PASS, None)


# ------------------------------------------------------------------------------------------ what compiles anew


def case_of(divergence: Divergence, *, compiled: bool) -> driver.DiagnosisCase:
    def attempt(**_: object) -> Failure:
        return Failure("stop")

    outcome = Outcome(Status.TWO_RUNS_DIFFER, "off", verdict=Verdict(("output",), divergence, ()))
    return driver.DiagnosisCase(attempt, OPTIONS, outcome, spec=SPEC, compiled=compiled)


DIVERGENCE = Divergence("kernel", "forward//cpp_fused_0#0", "cpp_fused_0", 0, "forward", 0, "", "", "it differs")


def test_processes_and_threads_are_not_used_on_a_compiled_program() -> None:
    case, findings = case_of(DIVERGENCE, compiled=True), driver.Findings(Evidence("kernel"))
    found = driver.start_processes_in_fixed_order(case, driver.start_processes(case, findings))
    found = driver.control_environment(case, found)
    notes = {arm.place: arm.note for arm in found.evidence.arms}
    for place in ("process/fresh_process", "process/fixed_order", "pair/one_thread"):
        assert notes[place] == driver.COMPILES_ANEW
    assert notes["pair/clocks"] != driver.COMPILES_ANEW


def test_threads_are_used_on_an_eager_one() -> None:
    case, findings = case_of(DIVERGENCE, compiled=False), driver.Findings(Evidence("kernel"))
    found = driver.control_environment(case, findings)
    assert found.evidence.arm("one_thread", "pair").note == "a run failed: stop"
