"""One model in the hands of the stand-in: what the harness writes stays as it is, and ours says what happened."""

from __future__ import annotations

import importlib
import itertools
import re
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import hashbench
from hashbench import repro
from hashbench.fingerprint import document
from hashbench.fingerprint.checking import check
from hashbench.fingerprint.verify import SAME
from hashbench.integrations.dynamo import eager_runs, hook, model_check, plug_in, watch_for_harness
from hashbench.integrations.dynamo.session import collect
from hashbench.trace.api import HashDebugTrace
from hashbench.trace.mode import TracingMode
from tests.integrations.dynamo.dynamo_helpers import NOISY, Found, Standin, a_session


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


class Asking:
    """A finder of somebody's own that asks all others, without thinking of one that asks back."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        others = [finder for finder in sys.meta_path if finder is not self]
        return next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)


@pytest.mark.parametrize(
    "order", ["ours", "asking ours", "ours asking", "ours ours", "ours asking ours", "asking ours ours"]
)
def test_watching_ends_and_tells_once_whatever_else_finds_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: str
) -> None:
    (tmp_path / "common.py").write_text("LOADER, SPEC = __loader__, __spec__.loader\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.delitem(sys.modules, "common", raising=False)
    found: list[ModuleType] = []
    for finder in reversed(order.split()):
        if finder == "ours":
            watch_for_harness(found.append)
        else:
            sys.meta_path.insert(0, Asking())
    module = importlib.import_module("common")
    monkeypatch.delitem(sys.modules, "common")
    assert found == [module]
    for loader in (module.LOADER, module.SPEC, module.__loader__, module.__spec__.loader):
        assert type(loader).__name__ == "SourceFileLoader"


def test_fault_of_the_plug_in_is_one_line_and_the_import_goes_on(
    standin: Standin, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hook, "attach", planted_fault())
    plug_in(standin.common)
    assert capsys.readouterr().err == "hashbench: cannot plug into this process: a planted fault\n"


@pytest.mark.parametrize("year", ["2024", "2026"])
@pytest.mark.parametrize("flags", ["--inference", "--training --backend=aot_eager"])
def test_row_of_the_harness_is_the_same_with_and_without_us(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, year: str, flags: str
) -> None:
    standin = Standin(tmp_path / "csv", monkeypatch, year=year)
    plain, found = standin.run("steady", *flags.split()), with_us(standin, "steady", *flags.split())
    assert without_times(found.theirs) == without_times(plain.theirs)
    assert int(plain.theirs["calls_captured"]) > 0
    assert (found.row.accuracy, found.row.runs, found.row.error) == ("pass", 2, "")
    assert found.row.ops > 4


@pytest.mark.parametrize(("name", "trace"), [("steady", "always"), ("chatty", "on-demand")])
def test_what_the_harness_and_its_model_print_is_the_same_with_and_without_us(
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


def test_kernel_is_known_where_the_process_ends_in_the_first_further_run(
    standin: Standin, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ends(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(model_check, "attempt", ends)
    with pytest.raises(KeyboardInterrupt):
        with_us(standin, "noisy", budget=60)
    (row,) = collect(a_session(standin.folder.parent / "ours"))
    assert (row.accuracy, row.kernel, row.module) == (DIFFER, NOISY, "Noisy.noise")
    assert row.error == "the process ended before a cause was found"


@pytest.mark.slow
def test_model_that_differs_is_explained(standin: Standin) -> None:
    row = with_us(standin, "noisy", budget=1000).row
    assert (row.accuracy, row.kernel, row.module) == ("eager_two_runs_differ", NOISY, "Noisy.noise")
    assert (row.cause, row.confidence, row.iteration) == ("rng", "proven", 1)
    ours = standin.folder.parent / "ours"
    assert re.fullmatch(r"in a fresh process [1-9]\d* of \d+ calls differ", row.reproduced)
    assert (ours / row.repro / "repro.py").is_file()
    assert all((ours / trace).is_file() for trace in row.traces.split())


DIFFER, SKIPPED = "eager_two_runs_differ", "pass_due_to_skip"
WORDS = [
    # model and flags, traced, the harness's word, ours, the kernel, in our error
    ("noisy", "on-demand", DIFFER, DIFFER, NOISY, ""),
    ("listed", "always", "pass", DIFFER, NOISY, "the harness wrote pass"),
    ("exempt", "always", SKIPPED, DIFFER, NOISY, "the harness wrote pass_due_to_skip"),
    ("exempt", "on-demand", SKIPPED, DIFFER, NOISY, "the harness wrote pass_due_to_skip"),
    ("odd", "always", DIFFER, "results_not_comparable", "", "bit by bit the two runs agree"),
    ("odd", "on-demand", DIFFER, "results_not_comparable", "", "unsupported type"),
    ("stranger", "always", DIFFER, "results_not_comparable", "", "bit by bit the two runs agree"),
    ("alien", "always", DIFFER, "results_not_comparable", "", "the recorded ops of the two runs agree"),
    ("noisyalien", "always", DIFFER, "results_not_comparable", NOISY, "the recorded ops of the two runs do not agree"),
    ("stranger", "on-demand", DIFFER, "results_not_comparable", "", "nothing of the two runs was recorded"),
    ("noisystranger", "always", DIFFER, DIFFER, NOISY, ""),
    ("noisystranger", "on-demand", DIFFER, DIFFER, NOISY, ""),
    ("notnumbers --float32", "always", DIFFER, "pass", "", "same() of the harness said no"),
    ("failing", "always", "eager_1st_run_fail", "eager_1st_run_fail", "", "ValueError: no such luck"),
    ("refused", "always", "eager_fail_to_run", "eager_fail_to_run", "", "does not have a deterministic implementation"),
    ("huge", "always", SKIPPED, SKIPPED, "", "the harness ran no eager pair"),
]


@pytest.mark.parametrize(("model", "traced", "theirs", "ours", "kernel", "said"), WORDS)
def test_word_of_the_harness_and_ours(
    standin: Standin, model: str, traced: str, theirs: str, ours: str, kernel: str, said: str
) -> None:
    name, *flags = model.split()
    found = with_us(standin, name, *flags, trace=traced)
    assert found.ours is not None
    assert (found.theirs["accuracy"], found.ours.harness_accuracy) == (theirs, theirs)
    assert (found.row.accuracy, found.row.kernel) == (ours, kernel)
    assert said in found.row.error
    assert ("bit by bit" in found.row.error) == said.startswith("bit by bit")
    assert ("put_" in found.row.nondeterministic_op) == (name == "refused")


def test_model_of_a_file_has_one_row_by_the_name_of_its_class(standin: Standin) -> None:
    file = standin.folder.parent / "net.py"
    file.write_text(
        "import torch\n\nclass Net(torch.nn.Linear):\n    def __init__(self):\n        super().__init__(4, 3)\n\n"
        "    def get_example_inputs(self):\n        return [torch.ones(2, 4)]\n"
    )
    found = standin.run("net", session=a_session(standin.folder.parent / "ours"), only=f"path:{file},class:Net")
    assert (found.theirs["name"], found.row.name, found.row.accuracy) == ("Net", "Net", "pass")


def test_sign_of_zero_is_a_difference_here_and_none_there(standin: Standin) -> None:
    found = with_us(standin, "signs")
    assert found.theirs["accuracy"] == "pass"
    assert (found.row.accuracy, found.row.representation) == (DIFFER, "sign of zero")


@pytest.mark.parametrize("trace", ["always", "on-demand"])
def test_kernel_is_named_in_a_harness_of_2024(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trace: str) -> None:
    found = with_us(Standin(tmp_path / "csv", monkeypatch, year="2024"), "noisy", trace=trace)
    assert (found.row.kernel, found.row.module) == (NOISY, "Noisy.noise")


def test_on_demand_no_run_of_a_model_that_agrees_is_traced(standin: Standin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HashDebugTrace, "__enter__", lambda _: pytest.fail("traced"))
    found = with_us(standin, "steady", trace="on-demand")
    assert (found.row.accuracy, found.row.ops, found.row.error) == ("pass", None, "")


def planted_fault() -> Callable[..., None]:
    """A function that raises, in what looks like a file of ours."""
    scope: dict[str, Any] = {}
    text = "def raises(*_, **__):\n    raise RuntimeError('a planted fault')\n"
    exec(compile(text, str(hashbench.__file__), "exec"), scope)
    return scope["raises"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("fault", ["HashDebugTrace", "named_results", "settings"])
def test_fault_of_ours_changes_nothing_that_the_harness_writes(
    standin: Standin, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    plain = standin.run("steady")
    monkeypatch.setattr(eager_runs, fault, planted_fault())
    found = with_us(standin, "steady")
    assert without_times(found.theirs) == without_times(plain.theirs)
    assert found.row.accuracy == "pass"
    assert "a planted fault" in found.row.error


def test_run_that_our_own_code_ends_is_made_again_without_a_trace(
    standin: Standin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TracingMode, "__torch_dispatch__", planted_fault())
    found = with_us(standin, "steady", "--training")
    assert found.theirs["accuracy"] == "pass"
    assert "the run failed only under the trace: RuntimeError: a planted fault" in found.row.error


def test_run_that_fails_under_every_trace_and_under_none_is_the_traces(standin: Standin) -> None:
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
def test_op_without_a_deterministic_implementation_is_named_where_an_eager_run_meets_it(
    standin: Standin, trace: str
) -> None:
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


@pytest.mark.parametrize("arguments", [("--accuracy",), ("--accuracy", "--only=noisy")])
@pytest.mark.parametrize("age", [10.0, 1990.0])
def test_diagnosis_is_left_out_only_where_the_harness_would_end_it(
    standin: Standin, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], age: float
) -> None:
    """A check that took long, of runs that did not: of loading, casting and copying."""
    session = replace(a_session(standin.folder.parent / "ours", budget=0.001), arguments=arguments)
    monkeypatch.setattr(repro, "run_in_fresh_process", lambda *_, **__: "not run here")
    monkeypatch.setattr(model_check, "_age", lambda: age)
    for module, seconds in ((model_check, 200), (eager_runs, 1)):
        clock = itertools.count(step=seconds)
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=clock.__next__))
    row = standin.run("noisy", session=session).row
    in_time = age < 100 or len(arguments) > 1
    assert row.confirmed == ("yes" if in_time else "not tried: the harness's --timeout is too near")


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


@pytest.mark.parametrize(("name", "flags"), [("steady", ["--training"]), ("noisy", []), ("failing", [])])
def test_kernel_fingerprints_lie_beside_the_rows(standin: Standin, tmp_path: Path, name: str, flags: list[str]) -> None:
    mode = "training" if flags else "inference"
    ours = a_session(tmp_path / "ours", mode=mode, fingerprints=True)
    alone = standin.run(name, *flags).theirs
    found = standin.run(name, *flags, session=ours)
    path = document.path_in(tmp_path / "ours", (found.row.suite, name, mode))

    assert found.theirs["accuracy"] == alone["accuracy"]
    assert path.exists() == (name != "failing")
    if path.exists():
        recorded = document.read(path)
        (model,) = recorded.models
        assert model.key[:4] == (found.row.suite, name, mode, "cpu")
        assert {kernel.phase for kernel in model.kernels} == ({"forward", "backward"} if flags else {"forward"})
        assert {checked.status for checked in check(recorded)} == {SAME}
        assert "torch" in recorded.environment["packages"]  # type: ignore[operator]


def test_where_the_harness_has_no_time_left_there_is_no_fingerprint_and_the_row_says_so(
    standin: Standin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_check, "_seconds_left", lambda *_: 0.0)
    found = standin.run("steady", session=a_session(tmp_path / "ours", fingerprints=True))

    assert found.row.accuracy == "pass"
    assert "no kernel fingerprint: the harness's --timeout is too near" in found.row.error
    assert not (tmp_path / "ours" / document.FOLDER).exists()


def test_what_passes_the_harness_is_stressed_and_its_row_stays_the_harnesss(standin: Standin) -> None:
    found = with_us(standin, "collected", stress=True)
    assert (found.theirs["accuracy"], found.row.accuracy, found.row.latent) == ("pass", "pass", "collector")
    assert found.row.latent_kernel == "aten.mul.Tensor"
    assert "process" in found.row.stressed
