"""One model in the hands of the stand-in: what the harness writes stays as it is, and ours says what happened."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from dynamo_helpers import Found, Standin, a_session
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from hashbench.integrations.dynamo import model_check
from hashbench.trace.api import HashDebugTrace
from hashbench.trace.mode import TracingMode


@pytest.fixture
def standin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Standin:
    return Standin(tmp_path / "csv", monkeypatch)


def with_us(standin: Standin, name: str, *flags: str, **session: Any) -> Found:
    mode = "training" if "--training" in flags else "inference"
    return standin.run(name, *flags, session=a_session(standin.folder.parent / "ours", mode=mode, **session))


def without_times(row: dict[str, str]) -> dict[str, str]:
    return {column: cell for column, cell in row.items() if column != "compilation_latency"}


def test_finder_tells_of_every_module_called_common(standin: Standin) -> None:
    assert [name for name in standin.found if not name.startswith("torch.")] == ["common"]


@pytest.mark.parametrize("year", ["2024", "2026"])
@pytest.mark.parametrize("mode", ["--training", "--inference"])
def test_row_of_the_harness_is_the_same_with_and_without_us(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, year: str, mode: str
) -> None:
    standin = Standin(tmp_path / "csv", monkeypatch, year=year)
    plain, found = standin.run("steady", mode), with_us(standin, "steady", mode)
    assert without_times(found.theirs) == without_times(plain.theirs)
    assert int(plain.theirs["calls_captured"]) > 0
    assert (found.row.accuracy, found.row.runs, found.row.error) == ("pass", 2, "")
    assert found.row.ops > 4


def test_nothing_of_ours_is_there_when_the_harness_compiles(standin: Standin, monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.slow
def test_model_that_differs_is_explained(standin: Standin) -> None:
    row = with_us(standin, "noisy", budget=1000).row
    assert (row.accuracy, row.kernel, row.module) == ("eager_two_runs_differ", "standin.noisy.default", "Noisy.noise")
    assert (row.cause, row.confidence, row.iteration) == ("rng", "proven", 1)
    assert row.reproduced.startswith("yes")
    ours = standin.folder.parent / "ours"
    assert (ours / row.repro / "repro.py").is_file()
    assert all((ours / trace).is_file() for trace in row.traces.split())


@pytest.mark.parametrize("trace", ["always", "on-demand"])
def test_kernel_is_named_in_a_harness_of_2024(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trace: str) -> None:
    found = with_us(Standin(tmp_path / "csv", monkeypatch, year="2024"), "noisy", trace=trace)
    assert (found.row.kernel, found.row.module) == ("standin.noisy.default", "Noisy.noise")


def test_difference_of_untraced_runs_is_named_by_further_ones(standin: Standin) -> None:
    found = with_us(standin, "noisy", trace="on-demand")
    assert (found.theirs["accuracy"], found.row.accuracy) == ("eager_two_runs_differ", "eager_two_runs_differ")
    assert (found.row.kernel, found.row.module) == ("standin.noisy.default", "Noisy.noise")


def test_on_demand_no_run_of_a_model_that_agrees_is_traced(standin: Standin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HashDebugTrace, "__enter__", lambda _: pytest.fail("traced"))
    found = with_us(standin, "steady", trace="on-demand")
    assert (found.row.accuracy, found.row.ops, found.row.error) == ("pass", None, "")


def test_rewritten_status_is_shown_with_what_happened(standin: Standin) -> None:
    found = with_us(standin, "listed")
    assert found.theirs["accuracy"] == "pass"
    assert found.ours is not None
    assert found.ours.harness_accuracy == "pass"
    assert (found.row.accuracy, found.row.kernel) == ("eager_two_runs_differ", "standin.noisy.default")
    assert "the harness wrote pass" in found.row.error


@pytest.mark.parametrize("trace", ["always", "on-demand"])
def test_runs_that_the_harness_does_not_compare_are_compared(standin: Standin, trace: str) -> None:
    found = with_us(standin, "exempt", trace=trace)
    assert found.theirs["accuracy"] == "pass_due_to_skip"
    assert (found.row.accuracy, found.row.kernel) == ("eager_two_runs_differ", "standin.noisy.default")
    assert "the harness wrote pass_due_to_skip" in found.row.error


@pytest.mark.parametrize("trace", ["always", "on-demand"])
@pytest.mark.parametrize("name", ["odd", "stranger"])
def test_results_that_the_harness_cannot_compare_are_reported_as_such(standin: Standin, name: str, trace: str) -> None:
    found = with_us(standin, name, trace=trace)
    assert found.theirs["accuracy"] == "eager_two_runs_differ"
    assert found.row.accuracy == "results_not_comparable"
    assert "unsupported type" in found.row.error
    assert ("bit by bit the two runs agree" in found.row.error) == ((name, trace) == ("odd", "always"))


def test_sign_of_zero_is_a_difference_here_and_none_there(standin: Standin) -> None:
    found = with_us(standin, "signs")
    assert found.theirs["accuracy"] == "pass"
    assert (found.row.accuracy, found.row.representation) == ("eager_two_runs_differ", "sign of zero")


def test_equal_bits_that_the_harness_calls_different_are_told_so(standin: Standin) -> None:
    found = with_us(standin, "notnumbers", "--float32")
    assert found.theirs["accuracy"] == "eager_two_runs_differ"
    assert found.row.accuracy == "pass"
    assert "same() of the harness said no" in found.row.error


def test_exception_that_the_harness_swallows_is_in_the_row(standin: Standin) -> None:
    found = with_us(standin, "failing")
    assert (found.theirs["accuracy"], found.row.accuracy) == ("eager_1st_run_fail", "eager_1st_run_fail")
    assert "ValueError: no such luck" in found.row.error


def test_op_that_torch_refuses_is_named(standin: Standin) -> None:
    found = with_us(standin, "refused")
    assert (found.theirs["accuracy"], found.row.accuracy) == ("eager_fail_to_run", "eager_fail_to_run")
    assert "put_" in found.row.nondeterministic_op
    assert "does not have a deterministic implementation" in found.row.error


def test_model_that_the_harness_does_not_run_is_not_called_a_pass(standin: Standin) -> None:
    found = with_us(standin, "huge")
    assert (found.theirs["accuracy"], found.row.accuracy) == ("pass_due_to_skip", "pass_due_to_skip")
    assert found.row.error == "the harness ran no eager pair"


def raises(*_: Any, **__: Any) -> None:
    raise RuntimeError("a planted fault")


@pytest.mark.parametrize("fault", ["HashDebugTrace", "named_results", "settings"])
def test_fault_of_ours_changes_nothing_that_the_harness_writes(
    standin: Standin, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    plain = standin.run("steady")
    monkeypatch.setattr(model_check, fault, raises)
    found = with_us(standin, "steady")
    assert without_times(found.theirs) == without_times(plain.theirs)
    assert found.row.accuracy == "pass"
    assert "a planted fault" in found.row.error


def test_run_that_fails_under_the_trace_alone_is_made_again_without(
    standin: Standin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TracingMode, "__torch_dispatch__", raises)
    found = with_us(standin, "steady", "--training")
    assert found.theirs["accuracy"] == "pass"
    assert "the run failed only under the trace: RuntimeError: a planted fault" in found.row.error


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
