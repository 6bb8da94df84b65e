"""Further compilations: what each finds, what is compared, what a cell says."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hashbench.core.diagnose import fresh_process
from hashbench.core.records import Failure, ModelSpec, Result, RunOptions, TensorDigest, Trace
from hashbench.extensions.compiled import compilations, compiled_kernels
from hashbench.extensions.compiled.compilations import (
    Again,
    Compiled,
    _compared,
    compiled_again,
    in_fresh_process,
    listed,
)
from hashbench.extensions.compiled.compiled_kernels import ListedKernel
from hashbench.extensions.compiled.varieties import VARIETIES, Variety
from tests.core.inductor import interpreted

FRESH = VARIETIES[0]


def digest(value: str) -> TensorDigest:
    return TensorDigest("float32", (2,), (1,), value)


def compiled(source: str = "s", error: str = "", **results: str) -> Compiled:
    kernels = (ListedKernel("cpp_fused_add_0", source, ("a",), ("b",)),) if source else ()
    return Compiled({name: digest(value) for name, value in results.items()}, kernels, error)


CASES: dict[str, tuple[Compiled, Compiled, str, tuple[str, ...]]] = {
    "equal": (compiled(x="1"), compiled(x="1"), "same", ()),
    "another source, equal results": (compiled(x="1"), compiled("t", x="1"), "same", ()),
    "other bits": (
        compiled(x="1", y="1", z="2"),
        compiled("t", x="2", y="2", z="2"),
        "2 results differ, first cpp_fused_add_0",
        ("x", "y"),
    ),
    "a result that is gone": (compiled(x="1", y="1"), compiled(x="1"), "1 results differ", ("y",)),
    "a new result": (compiled(x="1"), compiled(x="1", y="1"), "1 results differ", ("y",)),
    "kernels were not listed": (compiled("", x="1"), compiled(x="2"), "1 results differ", ("x",)),
    "it failed": (compiled(x="1"), compiled(error="no"), "not compared (no)", ()),
    "the first one failed": (compiled(error="no"), compiled(x="1"), "not compared (no)", ()),
}


@pytest.mark.parametrize("case", CASES)
def test_comparison_with_the_first_one(case: str) -> None:
    first, made, word, names = CASES[case]
    found = _compared(FRESH, first, made)
    assert (found.word(), found.results, found.differs) == (word, names, bool(names))


def test_kernels_out_of_a_cache_are_matched_by_their_names() -> None:
    known = (ListedKernel("k_0", "s", ("a",), ("b",), ("aten.add.Tensor",), "Net"), ListedKernel("k_1", "s"))
    cached = tuple(replace(one, ops=(), module="") for one in known)
    other = cached[0], replace(cached[1], source="t")
    for made, source in ((cached, ""), (other, "t")):
        found = _compared(FRESH, Compiled(kernels=known), Compiled(kernels=made)).difference
        assert found is not None
        assert ("" if found.first is None else found.first.shown.source) == source


def test_what_was_not_compared_does_not_differ() -> None:
    assert not Again(FRESH, note="no time").differs


def test_each_finds_the_cache_that_it_is_to_find(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, str]] = []

    def compile_in(_: Any, variety: Variety, folder: str) -> Compiled:
        assert Path(folder).is_dir()
        made.append((variety.name, folder))
        return compiled(x="1")

    def in_process(variety: Variety) -> Compiled:
        made.append((variety.name, ""))
        return compiled(x="2")

    monkeypatch.setattr(compilations, "_compiled", compile_in)
    again = list(compiled_again(lambda: Fake([]), compiled(x="1"), VARIETIES, in_process))
    assert [one.variety for one in again] == [*VARIETIES]
    assert [one.variety.name for one in again if one.differs] == ["fresh process"]
    folders = dict(made)
    assert folders["fresh cache"] == folders["warm cache"] != folders["compile threads"] != folders["max_autotune"]
    assert folders["fresh process"] == ""
    assert not any(Path(folder).exists() for folder in folders.values() if folder)


def test_a_warm_cache_alone_is_filled_first(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def compile_in(_: Any, __: Variety, folder: str) -> Compiled:
        made.append(folder)
        return compiled()

    monkeypatch.setattr(compilations, "_compiled", compile_in)
    list(compiled_again(lambda: Fake([]), compiled(), VARIETIES[1:2], lambda _: compiled()))
    assert made == [made[0]] * 2


@pytest.mark.parametrize("known", [{}, {"TORCHINDUCTOR_CACHE_DIR": "/here", "TRITON_CACHE_DIR": "/there"}])
def test_the_cache_is_elsewhere_for_a_while(known: Mapping[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    cleared: list[str | None] = []
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in known.items():
        monkeypatch.setenv(name, value)

    def now() -> str | None:
        return os.environ.get("TORCHINDUCTOR_CACHE_DIR")

    monkeypatch.setattr(compilations, "clear_compiler_caches", lambda: cleared.append(now()))
    with compilations._cache_in("/elsewhere"):
        assert os.environ["TRITON_CACHE_DIR"] == "/elsewhere/triton"
    assert cleared == ["/elsewhere", "/elsewhere"]  # of this process: nothing of one folder is found in the other
    assert {name: os.environ[name] for name in known} == known
    assert (now() is None) == (not known)


# ------------------------------------------------------------------------------------------------------- one run


@dataclass
class Fake:
    """A program whose runs are these."""

    runs: list[Any]
    watchers: list[Any] = field(default_factory=list)

    def __call__(self, given: Any = None, *, watcher: Any = None, **_: Any) -> Any:  # noqa: ARG002
        self.watchers.append(watcher)
        return self.runs.pop(0)


RUN: Any = SimpleNamespace(noted={"x": digest("1")})


def test_a_run_is_noted_and_a_second_one_lists_its_kernels() -> None:
    program = Fake([RUN, RUN])
    found = listed(program)
    assert (found.results, found.kernels, found.error) == ({"x": digest("1")}, (), "")
    assert [watcher is None for watcher in program.watchers] == [True, False]


def test_a_run_that_fails_is_told_and_kernels_that_could_not_be_listed_are_not() -> None:
    assert listed(Fake([Failure("no")])) == Compiled(error="no")
    assert listed(Fake([RUN, Failure("no")])) == Compiled({"x": digest("1")})


# ------------------------------------------------------------------------------------------------- a fresh process

SPEC = ModelSpec("here", "net")
OPTIONS = RunOptions(mode="inference", backend="inductor", output="/results")


def fresh(
    monkeypatch: pytest.MonkeyPatch, processes: Sequence[Any], failures: Sequence[str] = (), *, kernels: bool
) -> Any:
    """Let a fresh process return these traces, and leave kernels in its folder; return what it was asked."""
    asked: dict[str, Any] = {}

    def traces(spec: ModelSpec, options: RunOptions, **how: Any) -> Any:
        asked.update(how, output=options.output)
        if kernels:
            program = compilations.program_of(spec, options, compiled().kernels)
            compiled_kernels.write(Path(options.output), program)
        return SimpleNamespace(processes=processes, failures=failures)

    monkeypatch.setattr(fresh_process, "fresh_traces", traces)
    return asked


@pytest.mark.parametrize("kernels", [True, False])
def test_results_and_kernels_of_a_fresh_process(kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = Trace((), results=(Result("x", digest("1")),))
    asked = fresh(monkeypatch, [[trace]], kernels=kernels)
    found = in_fresh_process(SPEC, OPTIONS, "on", 60.0)
    assert found.results == {"x": digest("1")}
    assert found.kernels == (compiled().kernels if kernels else ())
    assert (asked["processes"], asked["runs"], asked["fixed_order"], asked["timeout"]) == (1, 1, False, 60.0)
    assert asked["output"] != "/results"
    assert not Path(asked["output"]).exists()


@pytest.mark.parametrize(("failures", "error"), [(["out of memory"], "out of memory"), ([], "nothing came back")])
def test_a_fresh_process_that_fails_is_told(failures: list[str], error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh(monkeypatch, [], failures, kernels=False)
    assert in_fresh_process(SPEC, OPTIONS, "on", 60.0) == Compiled(error=error)


# -------------------------------------------------------------------------------------------------- real compilation


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, interpreted.NEEDS_CUDA])])
def test_two_configurations_of_one_triton_kernel_are_told_with_other_bits(device: str) -> None:
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "tests.extensions.compiled.interpreted_configurations", device]
    env = interpreted.environment(device)
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["sources"] == 0
    one = r"XBLOCK \d+, R0_BLOCK \d+, \d+ warps?, \d+ stages?"
    words = rf"the same source, another configuration \({one} against {one}\), and different bits on equal inputs"
    assert re.fullmatch(words, found["what"])


@pytest.mark.slow
def test_a_fresh_and_a_warm_cache_give_the_same_bits() -> None:
    from hashbench.core.check.model import BenchmarkRunner
    from hashbench.core.run.outcome import RunMaker
    from hashbench.core.run.workload import Workload
    from hashbench.extensions.compiled.program import compiling, runs_under

    def make() -> RunMaker:
        return runs_under(BenchmarkRunner(OPTIONS), workload, backend="inductor")

    torch.manual_seed(0)
    workload = Workload(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()), (torch.randn(2, 4),), iterations=1)
    before = {name: os.environ.get(name) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
    with torch.no_grad():
        with compiling():
            first = listed(make())
        again = list(compiled_again(make, first, VARIETIES[:2], lambda _: Compiled()))
    assert [one.word() for one in again] == ["same", "same"]
    assert [one.difference is not None and one.difference.equal for one in again] == [True, True]
    assert {name: os.environ.get(name) for name in before} == before
    assert replace(first, results={}).kernels
