"""The check of a compiled model, also beside PyTorch's own harness, whose status stays; programs only give results."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from hashbench.core.catalog import Status
from hashbench.core.check.subject import Subject
from hashbench.core.records import Failure, OpRecord, Result, RunOptions, TensorDigest, Trace
from hashbench.core.run.outcome import Outcome, Run
from hashbench.extensions.compiled import check as compiled
from hashbench.extensions.compiled.accuracy import Tolerance
from hashbench.extensions.compiled.cause import Blamed, CompiledCase
from hashbench.extensions.compiled.check import CompiledCheck, runs_of
from hashbench.extensions.compiled.facts import CompiledFacts
from hashbench.extensions.compiled.program import Compilation, CompiledModel


def run(value: float) -> Run:
    """A run of one kernel, whose result has this value."""
    digest = TensorDigest("float32", (2,), (1,), str(value))
    record = OpRecord("forward.0/Net/cpp_fused_0#0", "forward", 0, "Net", "cpp_fused_0", outputs=(digest,))
    trace = Trace((record,), results=(Result("result", digest, record.id),))
    return Run(trace, {"result": torch.full((2,), value)})


@dataclass
class Program:
    """Gives one result after another, the last one again and again."""

    values: list[float] = field(default_factory=list)

    def __call__(self, **_: Any) -> Run | Failure:
        return run(self.values.pop(0) if len(self.values) > 1 else self.values[0])


@pytest.fixture(autouse=True)
def explained(monkeypatch: pytest.MonkeyPatch) -> list[CompiledCase]:
    """The cases that are to be explained."""
    cases: list[CompiledCase] = []

    def explain(case: CompiledCase) -> Blamed:
        cases.append(case)
        return Blamed.at("lowering", op="aten.relu.default", module="relu", detail="found", semantic="yes")

    monkeypatch.setattr(compiled, "explain", explain)
    monkeypatch.setattr(Compilation, "so_far", lambda: Compilation(1, 0, 0, ()))
    return cases


def checked(
    *values: float, harness_status: str = "", budget: float = 60.0, tolerance: float = 1e-4, runs: int = 2
) -> Outcome:
    """Check a model whose eager result is 1 and whose compiled runs give these."""

    def make(*, backend: Any = None, **_: Any) -> Program:
        return Program([*values]) if backend else Program([1.0])

    model = CompiledModel(make, lambda one: one.results, Tolerance(tolerance), "Net")  # type: ignore[arg-type]
    subject = Subject(make(), runs=lambda: runs)  # type: ignore[arg-type]
    options = RunOptions(mode="inference", backend="aot_eager", diagnose_budget=budget)
    outcome = Outcome(Status.PASS, "on")
    return CompiledCheck(model, subject, options, "on", harness_status).compared(outcome, run(1.0))


def test_what_agrees_is_not_explained(explained: list[CompiledCase]) -> None:
    assert checked(1.0).accuracy == Status.PASS
    assert not explained


def test_what_differs_is_explained(explained: list[CompiledCase]) -> None:
    outcome = checked(2.0)
    assert outcome.accuracy == Status.FAIL_ACCURACY
    assert (outcome.of(CompiledFacts).stage, outcome.finding.module) == ("lowering", "Net.relu")
    assert (outcome.finding.differing_results, outcome.finding.detail) == ("result", "found")
    assert explained[0].failed == ("result",)


def test_tolerance_is_that_of_the_model() -> None:
    assert checked(1.05, tolerance=0.1).accuracy == Status.PASS
    assert checked(1.05, tolerance=0.01).accuracy == Status.FAIL_ACCURACY


def test_status_of_the_harness_stays_where_another_compilation_agrees(explained: list[CompiledCase]) -> None:
    outcome = checked(1.0, harness_status=Status.FAIL_ACCURACY)
    assert outcome.accuracy == Status.FAIL_ACCURACY
    assert outcome.finding.detail == "within the tolerance when it was compiled again; found"
    assert explained[0].failed == ()


def test_status_of_the_harness_stays_where_two_compiled_runs_differ(explained: list[CompiledCase]) -> None:
    assert checked(2.0, 3.0, budget=0).accuracy == Status.COMPILED_RUNS_DIFFER
    outcome = checked(2.0, 3.0, harness_status=Status.FAIL_ACCURACY)
    assert outcome.accuracy == Status.FAIL_ACCURACY
    assert outcome.finding.detail == "two compiled runs differ from cpp_fused_0 on; found"
    assert len(explained) == 1


def test_as_many_compiled_runs_as_asked_for_are_compared() -> None:
    assert checked(*[1.0] * 6, 2.0, runs=7, budget=0).accuracy == Status.COMPILED_RUNS_DIFFER
    assert checked(*[1.0] * 7, 2.0, runs=7, budget=0).accuracy != Status.COMPILED_RUNS_DIFFER


@pytest.mark.parametrize(
    ("asked", "seconds", "made"), [(2, 0.001, 5), (2, 3.0, 2), (9, 0.001, 9), (9, 3.0, 9), (1, 3.0, 2)]
)
def test_quick_runs_are_repeated_more_often(asked: int, seconds: float, made: int) -> None:
    assert runs_of(asked, seconds=seconds) == made


def test_nothing_is_explained_without_a_budget(explained: list[CompiledCase]) -> None:
    assert checked(2.0, harness_status=Status.FAIL_ACCURACY, budget=0).accuracy == Status.FAIL_ACCURACY
    assert not explained
