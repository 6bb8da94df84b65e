"""Which tracer made a trace is chosen in one place, stands in the trace, and keeps traces of different ones apart."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hashbench import HashDebugTrace
from hashbench.cli import main
from hashbench.divergence import find
from hashbench.errors import HashbenchError
from hashbench.records import Trace
from hashbench.trace import file, op_schema, tracer
from hashbench.trace.tracer import Choice, choose

NO_COMPILER = "no C++ compiler was found"


def traced(wanted: str = "auto") -> Trace:
    with HashDebugTrace(tracer=wanted) as trace:
        torch.ones(5, requires_grad=True).prod().backward()
    return trace.finish()


def available(monkeypatch: pytest.MonkeyPatch, reason: str = "") -> None:
    monkeypatch.setattr(tracer, "native_unavailable", lambda: reason)


@pytest.mark.parametrize(
    ("wanted", "missing", "chosen"),
    [
        ("auto", "", Choice("native")),
        ("auto", NO_COMPILER, Choice("python", NO_COMPILER)),
        ("native", "", Choice("native")),
        ("python", "", Choice("python")),
        ("python", NO_COMPILER, Choice("python")),
    ],
)
def test_the_choice(wanted: str, missing: str, chosen: Choice, monkeypatch: pytest.MonkeyPatch) -> None:
    available(monkeypatch, missing)
    assert choose(wanted) == chosen


def test_a_native_tracer_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    available(monkeypatch, NO_COMPILER)
    with pytest.raises(HashbenchError, match=rf"native tracer.*{re.escape(NO_COMPILER)}.*`python`"):
        HashDebugTrace(tracer="native")
    with pytest.raises(HashbenchError, match=r"'fast' is not a tracer.*auto, native, python"):
        HashDebugTrace(tracer="fast")


def test_a_trace_says_what_made_it_and_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    available(monkeypatch, NO_COMPILER)
    trace = HashDebugTrace(tmp_path / "a.log")
    assert (trace.tracer, trace.tracer_reason) == ("python", NO_COMPILER)
    with trace:
        torch.ones(2)
    made = trace.finish()
    assert (made.tracer, made.tracer_reason) == ("python", NO_COMPILER)
    head = (tmp_path / "a.log").read_text().split("\n")[0]
    assert head == f"hashbench-trace\t1\tplain\ttracer=python\ttracer_reason={NO_COMPILER}"
    assert file.read(tmp_path / "a.log") == made
    trace.export_to_json(tmp_path / "a.json")
    written = json.loads((tmp_path / "a.json").read_text())
    assert (written["tracer"], written["tracer_reason"]) == ("python", NO_COMPILER)


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
