"""Eager runs in the stand-in: recognised, traced, and without effect on what the harness writes."""

from __future__ import annotations

import re
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from hashbench.core.trace.api import HashDebugTrace
from hashbench.core.trace.calls import CallRecorder
from hashbench.integrations.dynamo import eager_runs
from tests.integrations.dynamo.dynamo_helpers import NOISY, Standin
from tests.integrations.dynamo.standin_helpers import DIFFER, SKIPPED, planted_fault, with_us


def without_times(row: dict[str, str]) -> dict[str, str]:
    return {column: cell for column, cell in row.items() if column != "compilation_latency"}


@pytest.mark.slow
@pytest.mark.parametrize("year", ["2024", "2026"])
@pytest.mark.parametrize("flags", ["--inference", "--training --backend=aot_eager"])
def test_harness_row_is_the_same_without_us(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, year: str, flags: str
) -> None:
    standin = Standin(tmp_path / "csv", monkeypatch, year=year)
    plain, found = standin.run("steady", *flags.split()), with_us(standin, "steady", *flags.split())
    assert without_times(found.theirs) == without_times(plain.theirs)
    assert int(plain.theirs["calls_captured"]) > 0
    assert (found.row.accuracy, found.row.runs, found.row.error) == ("pass", 2, "")
    assert found.row.ops > 4


@pytest.mark.parametrize(("name", "trace"), [("steady", "always"), ("chatty", "on-demand")])
def test_printed_output_is_the_same_without_us(
    standin: Standin, capfd: pytest.CaptureFixture[str], name: str, trace: str
) -> None:
    def printed() -> list[str]:
        return [re.sub(r"\b[\d:.]+\b", "#", text) for text in capfd.readouterr()]  # torch's log has times

    standin.run(name)
    plain = printed()
    with_us(standin, name, trace=trace)
    assert printed() == plain
    assert "float32 only" in plain[1]
    logs = [path.read_text() for path in (standin.folder.parent / "ours" / "logs").iterdir()]
    forwards = 2 * 2  # one further pair of two iterations, each of which prints to both
    assert [text.count("forward\n") for text in logs] == ([] if name == "steady" else [2 * forwards])


def test_nothing_of_ours_is_compiled(standin: Standin, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    real = standin.common.optimize_ctx

    def optimize_ctx(function: Any) -> Any:
        seen.append(("run_n_iterations" in vars(function.__self__), _get_current_dispatch_mode_stack()))
        return real(function)

    monkeypatch.setattr(standin.common, "optimize_ctx", optimize_ctx)
    functions = standin.common.same, standin.common.reset_rng_state
    found = with_us(standin, "steady")
    assert seen == [(False, [])]
    assert (standin.common.same, standin.common.reset_rng_state) == functions
    assert "run_n_iterations" not in vars(found.runner)
    assert found.row.ops


@pytest.mark.parametrize("trace", ["always", "on-demand"])
def test_kernel_is_named_in_a_harness_of_2024(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trace: str) -> None:
    found = with_us(Standin(tmp_path / "csv", monkeypatch, year="2024"), "noisy", trace=trace)
    assert (found.row.kernel, found.row.module) == (NOISY, "Noisy.noise")


def test_on_demand_traces_no_equal_runs(standin: Standin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HashDebugTrace, "__enter__", lambda _: pytest.fail("traced"))
    found = with_us(standin, "steady", trace="on-demand")
    assert (found.row.accuracy, found.row.ops, found.row.error) == ("pass", None, "")


@pytest.mark.parametrize("fault", ["HashDebugTrace", "named_results", "settings"])
def test_fault_of_ours_keeps_the_harness_row(standin: Standin, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    plain = standin.run("steady")
    monkeypatch.setattr(eager_runs, fault, planted_fault())
    found = with_us(standin, "steady")
    assert without_times(found.theirs) == without_times(plain.theirs)
    assert found.row.accuracy == "pass"
    assert "a planted fault" in found.row.error


@pytest.mark.slow
def test_run_ended_by_our_code_is_rerun_untraced(standin: Standin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CallRecorder, "record", planted_fault())
    found = with_us(standin, "steady", "--training")
    assert found.theirs["accuracy"] == "pass"
    assert "the run failed only under the trace: RuntimeError: a planted fault" in found.row.error


@pytest.mark.slow
def test_failure_only_under_traces_is_the_traces(standin: Standin) -> None:
    plain, found = standin.run("shy"), with_us(standin, "shy", tracer="python")
    assert (plain.theirs["accuracy"], found.theirs["accuracy"]) == ("pass", "pass")
    assert "the run failed only under the trace: RuntimeError: shape" in found.row.error


@pytest.mark.parametrize("trace", ["always", "on-demand"])
def test_run_that_fails_once_has_failed(
    standin: Standin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trace: str
) -> None:
    plain, found = (
        standin.run("failingonce"),
        with_us(Standin(tmp_path / "again", monkeypatch), "failingonce", trace=trace),
    )
    assert (plain.theirs["accuracy"], found.theirs["accuracy"]) == ("eager_1st_run_fail", "eager_1st_run_fail")
    assert (found.row.accuracy, found.row.runs) == ("eager_1st_run_fail", 1)
    assert "RuntimeError: shape" in found.row.error


@pytest.mark.parametrize("trace", ["always", "on-demand"])
def test_nondeterministic_op_is_named(standin: Standin, trace: str) -> None:
    row = with_us(standin, "refusedlater", trace=trace).row
    assert row.accuracy == "eager_1st_run_fail"
    assert "put_" in row.nondeterministic_op


# ------------------------------------------------------------------------------------------------ other harnesses


def changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str) -> Standin:
    return Standin(tmp_path / "csv", monkeypatch, changed=change)


@pytest.mark.parametrize("change", ["reset", "keyword", "decorated"])
@pytest.mark.parametrize("trace", ["always", "on-demand"])
def test_eager_runs_are_recognised_by_what_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str, trace: str
) -> None:
    standin = changed(tmp_path, monkeypatch, change)
    steady, noisy = (with_us(standin, name, trace=trace) for name in ("steady", "noisy"))
    assert (steady.theirs["accuracy"], steady.row.accuracy, steady.row.error) == ("pass", "pass", "")
    assert (noisy.row.accuracy, noisy.row.kernel, noisy.row.iteration) == (DIFFER, NOISY, 1)


@pytest.mark.parametrize("change", ["device", "unknown"])
@pytest.mark.parametrize(("name", "word"), [("steady", "pass"), ("noisy", DIFFER)])
def test_harness_that_cannot_be_followed_is_not_judged(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    change: str,
    name: str,
    word: str,
) -> None:
    found = with_us(changed(tmp_path, monkeypatch, change), name, budget=60)
    assert found.theirs["accuracy"] == word
    assert found.row.accuracy == (SKIPPED if word == "pass" else DIFFER)
    assert found.row.error.startswith("cannot follow this harness: ")
    assert found.row.error.endswith(f"; the harness wrote {word}")
    assert (found.row.kernel, found.row.cause, found.row.confidence) == ("", "", "")
    printed = capfd.readouterr().err
    assert "Traceback" not in printed
    assert printed.count("hashbench: ") == printed.count("cannot follow this harness") <= 1


def test_no_copy_of_the_model_is_kept(standin: Standin, monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[weakref.ref[torch.nn.Module]] = []
    alive = []
    base = standin.common.BenchmarkRunner
    real = base.deepcopy_model

    def deepcopy_model(self: Any, model: torch.nn.Module) -> torch.nn.Module:
        alive.append(sum(copy() is not None for copy in copies[1:]))
        copies.append(weakref.ref(copied := real(self, model)))
        return copied  # type: ignore[no-any-return]

    monkeypatch.setattr(base, "deepcopy_model", deepcopy_model)
    plain = standin.run("steady"), list(alive)
    copies.clear(), alive.clear()
    with_us(standin, "steady")
    assert alive == plain[1]
    assert [copy() for copy in copies] == [None] * len(copies)
