"""Which tracer made a trace is chosen in one place, stands in the trace, and keeps traces of different ones apart."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from runner_helpers import FunctionRunner

from hashbench import HashDebugTrace
from hashbench.cli import main
from hashbench.core.check.function import FunctionCall, check_function
from hashbench.core.check.model import BenchmarkRunner
from hashbench.core.divergence import find
from hashbench.core.errors import HashbenchError
from hashbench.core.native.build import Unavailable
from hashbench.core.records import ModelSpec, RunOptions, Trace
from hashbench.core.results.rows import environments_of, read_rows
from hashbench.core.run import environment, outcome
from hashbench.core.run.workload import Workload
from hashbench.core.sweep.run import ModelStarted, SweepInterrupted, SweepOpened
from hashbench.core.trace import file, op_schema, tracer
from hashbench.core.trace.tracer import Choice, choose
from hashbench.tools.numeric import run_model

NO_COMPILER = "there is no C++ compiler here"
INSTALL_ONE = "install one, or name it in $CXX"
MISSING = Unavailable(NO_COMPILER, INSTALL_ONE)
REASON = f"{NO_COMPILER}; {INSTALL_ONE}"
SCRIPT = Path(__file__).parents[2] / "integrations" / "dynamo" / "standin" / "zoo.py"


def traced(wanted: str = "auto") -> Trace:
    with HashDebugTrace(tracer=wanted) as trace:
        torch.ones(5, requires_grad=True).prod().backward()
    return trace.finish()


def available(monkeypatch: pytest.MonkeyPatch, missing: Unavailable | None = None) -> None:
    monkeypatch.setattr(tracer, "native_unavailable", lambda: missing)


@pytest.mark.parametrize(
    ("wanted", "sees", "chosen"),
    [("auto", True, "native"), ("auto", False, "python"), ("native", False, "native"), ("python", True, "python")],
)
def test_native_tracer_that_misses_collectives_within_ops_is_not_chosen(
    wanted: str, sees: bool, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    available(monkeypatch)
    monkeypatch.setattr(tracer, "native_sees_into_subclasses", lambda: sees)
    choice = choose(wanted, into_subclasses=True)
    assert choice.tracer == chosen
    assert bool(choice.reason) == (wanted == "auto" and not sees)
    assert choose(wanted).tracer == ("python" if wanted == "python" else "native")


@pytest.mark.parametrize(
    ("wanted", "missing", "chosen"),
    [
        ("auto", None, Choice("native")),
        ("auto", MISSING, Choice("python", REASON)),
        ("native", None, Choice("native")),
        ("python", None, Choice("python")),
        ("python", MISSING, Choice("python")),
    ],
)
def test_the_choice(wanted: str, missing: str, chosen: Choice, monkeypatch: pytest.MonkeyPatch) -> None:
    available(monkeypatch, missing)
    assert choose(wanted) == chosen


def test_unavailable_native_tracer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    available(monkeypatch, MISSING)
    refusal = rf"native tracer.*: {re.escape(NO_COMPILER)}, so nothing was traced\. Install one.*`auto`"
    with pytest.raises(HashbenchError, match=refusal):
        HashDebugTrace(tracer="native")
    with pytest.raises(HashbenchError, match=r"invalid tracer 'fast'.*auto, native, python"):
        HashDebugTrace(tracer="fast")


def test_a_trace_says_what_made_it_and_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    available(monkeypatch, MISSING)
    trace = HashDebugTrace(tmp_path / "a.log")
    assert (trace.tracer, trace.tracer_reason) == ("python", REASON)
    with trace:
        torch.ones(2)
    made = trace.finish()
    assert (made.tracer, made.tracer_reason) == ("python", REASON)
    head = (tmp_path / "a.log").read_text().split("\n")[0]
    assert head == f"hashbench-trace\t1\tplain\ttracer=python\ttracer_reason={REASON}"
    assert file.read(tmp_path / "a.log") == made
    trace.export_to_json(tmp_path / "a.json")
    written = json.loads((tmp_path / "a.json").read_text())
    assert (written["tracer"], written["tracer_reason"]) == ("python", REASON)


def test_a_python_tracer_that_was_asked_for_has_no_reason() -> None:
    assert file.dumps(traced("python")).split("\n")[0] == "hashbench-trace\t1\tplain\ttracer=python"


def test_a_native_trace_names_no_op_that_a_mode_changes() -> None:
    trace = traced("python")
    assert op_schema.mode_dependent(trace) == ("aten.prod.default",)
    assert op_schema.mode_dependent(replace(trace, tracer="native")) == ()


def test_traces_of_different_tracers_are_not_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    traces = traced("python"), replace(traced("python"), tracer="native")
    for first, second in (traces, traces[::-1]):
        with pytest.raises(HashbenchError, match=r"different tracers.*the Python dispatch mode changes which ops run"):
            find(first, second)
    for name, trace in zip("ab", traces, strict=True):
        file.write(trace, tmp_path / f"{name}.log")
    assert main(["diff", str(tmp_path / "a.log"), str(tmp_path / "b.log")]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert all(words in output.err for words in ("a.log is python", "b.log is native", "--tracer"))


# ------------------------------------------------------------------------------------------- asked for by facades


def environment_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a child process tells of this machine, told by this one."""

    def collected(*, device: str, tracer: str = "auto", **_: Any) -> dict[str, Any]:
        return environment.collect(device, tracer=tracer)

    monkeypatch.setattr(environment, "collect_in_child", collected)


def test_a_row_names_the_tracer_also_of_a_model_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(
        outcome, "HashDebugTrace", lambda **more: asked.append(more["tracer"]) or HashDebugTrace(**more)
    )
    runner = FunctionRunner(RunOptions(tracer="python"))
    runner.build = lambda: Workload(module=torch.nn.ReLU(), inputs=(torch.ones(2),))
    assert runner.run_model(ModelSpec("suite", "relu")).tracer == "python"
    runner.build = lambda: Workload(module=torch.nn.Linear(3, 3), inputs=(torch.ones(2),))
    failed = runner.run_model(ModelSpec("suite", "linear"))
    assert (failed.accuracy, failed.tracer) == ("eager_1st_run_fail", "python")
    assert set(asked) == {"python"}


@pytest.mark.parametrize(
    "check",
    [
        pytest.param(BenchmarkRunner, id="a model"),
        pytest.param(
            lambda options: check_function(FunctionCall(torch.ones, (2,), {}), "it", options), id="a function"
        ),
        pytest.param(
            lambda options: run_model(torch.nn.ReLU(), torch.nn.ReLU(), torch.ones(2), tracer=options.tracer),
            id="a numeric check",
        ),
        pytest.param(lambda options: environment.collect("cpu", tracer=options.tracer), id="a sweep"),
    ],
)
def test_api_refuses_unavailable_tracer(check: Callable[[RunOptions], object], monkeypatch: pytest.MonkeyPatch) -> None:
    available(monkeypatch, MISSING)
    with pytest.raises(HashbenchError, match="the native tracer is unavailable"):
        check(RunOptions(tracer="native"))


@pytest.mark.parametrize(
    "command",
    ["sweep --inference", "nightly --label a --suite specimens -- --tracer native", "audit", "dynamo SCRIPT"],
)
def test_unavailable_tracer_is_refused_before_any_output(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if command.startswith(("nightly", "dynamo")):
        pytest.importorskip("hashbench.extensions.report")
    available(monkeypatch, MISSING)
    environment_here(monkeypatch)
    name, *rest = command.replace("SCRIPT", str(SCRIPT)).split()
    output = "--results" if name == "dynamo" else "--output"
    own = [] if name == "nightly" else ["--tracer", "native"]
    assert main([name, *own, output, str(tmp_path / "new"), *rest]) == 2
    assert NO_COMPILER in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_sweep_says_once_why_it_fell_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    available(monkeypatch, MISSING)
    environment_here(monkeypatch)
    told: dict[str, Any] = {}

    def stopped(*_: Any, **arguments: Any) -> None:
        told.update(arguments["environment"])
        for _ in range(3):
            arguments["on_event"](ModelStarted("a"))
        arguments["on_event"](SweepOpened(total=1, done=0))
        raise SweepInterrupted(done=0, total=1, output=tmp_path)

    monkeypatch.setattr("hashbench.core.sweep.request.run_sweep", stopped)
    main(["sweep", "--inference", "--only", "resnet18", "--output", str(tmp_path / "results")])
    assert capsys.readouterr().err.count(NO_COMPILER) == 1
    assert (told["tracer"], told["tracer_reason"]) == ("python", REASON)


WITHOUT_COMPILER = {"CXX": "no-such-compiler", "OMP_NUM_THREADS": "1"}
ZOO = """
import torch

class Draws(torch.nn.Module):
    noise = torch.Generator()

    def forward(self, x):
        return x + torch.rand(x.shape, generator=self.noise)

MODELS = {"draws": lambda: (Draws(), (torch.ones(3),)), "adds": lambda: (torch.nn.Linear(3, 3), (torch.ones(1, 3),))}
"""


@pytest.mark.slow
def test_sweep_without_compiler_uses_python_tracer(tmp_path: Path) -> None:
    (tmp_path / "zoo.py").write_text(ZOO)
    folders = {"HASHBENCH_CACHE": str(tmp_path / "cache"), "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", "hashbench", "sweep", "--inference", "--suite", "zoo.py", "--jobs", "2"]
    command += ["--diagnose-budget", "0", "--output", "results"]
    environment = {**os.environ, **WITHOUT_COMPILER, **folders}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("C++")) == (0, 1), done.stderr
    note = next(line for line in done.stderr.splitlines() if "C++" in line)
    assert note == (
        "hashbench: the Python dispatch mode traces: there is no C++ compiler named 'no-such-compiler' by $CXX; "
        "install one, or name it in $CXX (docs/trace.md)"
    )
    rows = {row.name: row for row in read_rows(tmp_path / "results" / "accuracy.csv")}
    assert {row.tracer for row in rows.values()} == {"python"}
    assert (rows["draws"].kernel, rows["adds"].accuracy) == ("aten.rand.generator", "pass")
    (found,) = environments_of(tmp_path / "results" / "accuracy.csv")
    assert (found["tracer"], found["tracer_reason"] in note) == ("python", True)
    for path in rows["draws"].traces.split():
        assert file.read(tmp_path / "results" / path).tracer_reason == found["tracer_reason"]


def test_tracer_changes_environment_key_reason_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = []
    for missing in (None, MISSING, Unavailable("another torch", "install torch")):
        available(monkeypatch, missing)
        keys.append(environment.collect("cpu")["key"])
    assert keys[0] != keys[1] == keys[2]
