"""``--stress``: what passes by luck is found, named and told; what is clean stays clean; everything is put back."""

from __future__ import annotations

import importlib.util
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from runner_helpers import FunctionRunner

from hashbench import cli
from hashbench.core.catalog import LATENT
from hashbench.core.check.function import FunctionCall, check_function
from hashbench.core.check.model import BenchmarkRunner
from hashbench.core.diagnose import fresh_process
from hashbench.core.diagnose.causes import decide
from hashbench.core.diagnose.fresh_process import FreshRuns
from hashbench.core.extensions import failure, shown, written
from hashbench.core.processes import phases_told_to
from hashbench.core.records import NO_TIME, Decision, Diagnosis, Evidence, ExperimentResult, ModelSpec, Row, RunOptions
from hashbench.core.report.compare import Became, compare
from hashbench.core.report.table import sweep_table
from hashbench.core.results.load import Sweep
from hashbench.core.results.rows import read_rows
from hashbench.core.run.workload import Workload
from hashbench.extensions.stress import perturbed
from hashbench.extensions.stress import stage as stress
from hashbench.extensions.stress.stage import perturbation_of
from tests.extensions.stress.stress_helpers import MIDDLE, STRESS, Scaled, Workspace, provoking, row_of
from tests.flat_rows import changed, flat, made

pytestmark = pytest.mark.usefixtures("free_memory_given_back")


class Joined(torch.nn.Module):
    """Joins what three threads give, of which each takes longer than the one before."""

    def __init__(self, join: Callable[[list[Future[int]]], Iterable[Future[int]]], seconds: float) -> None:
        super().__init__()
        self.join, self.seconds = [join], seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def read(number: int) -> int:
            time.sleep(self.seconds * number)
            return number

        with ThreadPoolExecutor(3) as pool:
            for future in self.join[0]([pool.submit(read, number) for number in range(3)]):
                x = torch.tanh(x * (2 + future.result()))
        return x


def ready_by_a_deadline(futures: list[Future[int]]) -> Iterable[Future[int]]:
    done, _ = wait(futures, timeout=0.2)
    return [future for future in futures if future in done]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("join", "seconds", "name"),
    [
        pytest.param(ready_by_a_deadline, 0.002, "load", id="by a deadline"),
        pytest.param(as_completed, 0.1, "load", id="in order of arrival", marks=pytest.mark.exhaustive),
        pytest.param(list, 0.002, "", id="all of them"),
        pytest.param(list, 0.1, "", id="in the order in which they were started", marks=pytest.mark.exhaustive),
    ],
)
def test_a_program_that_joins_what_its_threads_have_ready_is_shown(
    join: Callable[[list[Future[int]]], Iterable[Future[int]]], seconds: float, name: str
) -> None:
    row = row_of(Joined(join, seconds), replace(STRESS, iterations=1))
    assert (row.accuracy, flat(row).latent) == ("pass", name), flat(row).stressed
    if name:
        assert (flat(row).latent_cause, flat(row).latent_confidence) == ("call_order", "proven"), row.because
        assert row.advice.startswith("Join the results of threads in the order they were started")


# ------------------------------------------------------------------------------------------------------- a model


@pytest.mark.slow
def test_a_model_that_reads_unwritten_memory_passes_and_is_found() -> None:
    row = row_of(Workspace())
    assert (row.accuracy, flat(row).latent, flat(row).latent_kernel) == ("pass", "memory", "aten.empty.memory_format")
    assert (flat(row).latent_cause, flat(row).latent_confidence, flat(row).latent_phase) == (
        "uninitialized_memory",
        "proven",
        "forward",
    )
    assert flat(row).latent_rate == 1.0
    assert (row.kernel, row.cause, row.origin) == ("", "", "")
    assert "memory 1/1" in flat(row).stressed


@pytest.mark.slow
def test_foreign_memory_that_nobody_wrote_is_found() -> None:
    row = row_of(Scaled(lambda: float(np.empty(MIDDLE * 2, dtype=np.float32)[MIDDLE])))
    assert (row.accuracy, flat(row).latent, flat(row).latent_kernel) == ("pass", "memory", "aten.mul.Tensor")
    assert (flat(row).latent_cause, flat(row).latent_confidence) == ("uninitialized_memory", "proven")


@pytest.mark.slow
def test_the_same_model_with_filled_memory_is_clean() -> None:
    row = row_of(Workspace(), replace(STRESS, deterministic="on"))
    assert (row.accuracy, flat(row).latent, flat(row).latent_cause, flat(row).latent_rate) == ("pass", "", "", None)
    assert flat(row).stressed.startswith("threads 0/")


class Selecting(torch.nn.Module):
    """Takes the row of a table whose number nobody has written."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.index_select(0, torch.empty(MIDDLE * 2, dtype=torch.int32)[MIDDLE : MIDDLE + 1])


def test_a_run_that_raises_under_one_perturbation_is_found() -> None:
    row = row_of(Selecting())
    assert (row.accuracy, flat(row).latent, flat(row).latent_rate) == ("pass", "memory", 1.0)
    assert flat(row).latent_kernel == "aten.index_select.default"
    assert "under memory alone 2 of 2 runs raise, and a plain one does not: IndexError" in row.because
    assert "load not run (a run failed: IndexError" in flat(row).stressed
    assert "the column because has the error" in sweep_table([row])
    assert "--diagnose-budget" not in sweep_table([row]), "none would look for the cause"


def test_exception_under_no_single_perturbation_blames_none() -> None:
    fails = iter((False, False, True))  # the first stressed run

    def factor() -> float:
        if next(fails, False):
            raise RuntimeError("once")
        return 1.0

    row = row_of(Scaled(factor), replace(STRESS, iterations=1))
    assert (row.accuracy, flat(row).latent) == ("pass", "")
    assert "threads not run (a run failed: RuntimeError: once)" in flat(row).stressed


def test_without_stress_nothing_is_provoked() -> None:
    row = row_of(Workspace(), replace(STRESS, stress=False))
    assert (row.accuracy, flat(row).latent, flat(row).stressed) == ("pass", "", "")


@pytest.mark.parametrize(
    ("step", "runs"), [(0.4, stress.MOST), (20.0, 2)], ids=["a busy machine", "a model that waits"]
)
def test_what_is_small_is_run_often_whatever_else_the_machine_does(
    monkeypatch: pytest.MonkeyPatch, step: float, runs: int
) -> None:
    clock, computed, phases = itertools.count(step=step), itertools.count(), list[str]()
    for module in (stress, perturbed):
        monkeypatch.setattr(module, "perf_counter", lambda: float(next(clock)))
    monkeypatch.setattr(perturbed, "process_time", lambda: next(computed) / 100)
    with phases_told_to(phases.append):
        row = row_of(Scaled(lambda: 1.0), replace(STRESS, iterations=1))
    assert (row.accuracy, flat(row).latent) == ("pass", "")
    assert len({phase for phase in phases if phase.startswith("stress: run ")}) == runs


@pytest.mark.slow
def test_a_flaky_row_says_that_the_time_ended_and_what_gives_more() -> None:
    def latent(budget: float) -> Row:
        row = row_of(Scaled(provoking("load")), replace(STRESS, iterations=1, diagnose_budget=budget))
        assert (row.accuracy, flat(row).latent, flat(row).latent_cause) == ("pass", "load", "outside_value")
        return row

    cut, whole = latent(0.001), latent(600.0)
    assert {result.note for result in cut.evidence.results} == {NO_TIME}
    assert "the time for experiments ended before these were complete: pair/pair, pair/generators" in cut.because
    assert cut.advice.startswith(
        "The time for experiments ended before the cause was certain: give them more (--diagnose-budget). Pass "
    )
    assert (
        "to do: The time for experiments ended before the cause was certain: give them more (--diagnose-budget). Pass"
        in sweep_table([cut])
    )
    assert "the time" not in whole.because
    assert whole.advice.startswith("Pass ")


def test_a_model_that_differs_anyway_is_not_stressed() -> None:
    runs = iter(range(1000))
    row = row_of(Scaled(lambda: float(next(runs))), replace(STRESS, diagnose_budget=0))
    assert (row.accuracy, flat(row).stressed) == ("eager_two_runs_differ", "")


STRINGS = """
import torch
from torch import nn

class Ordered(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.parts = nn.ModuleDict({name: nn.Linear(8, 8) for name in "abcdefghij"})
    def forward(self, x):
        for name in self.kind("abcdefghij"):
            x = self.parts[name](x)
        return x

def model(kind):
    return Ordered(kind), (torch.randn(2, 8),)

def built_by_threads():
    layer = nn.Linear(8, 8)
    nn.init.constant_(layer.weight, float(torch.get_num_threads()))
    return layer, (torch.randn(2, 8),)

MODELS = {"by_hash": lambda: model(set), "by_hash_twin": lambda: model(list), "of_threads": built_by_threads}
"""


@pytest.mark.slow
@pytest.mark.usefixtures("shared_servers")
def test_a_set_of_texts_is_found_in_another_process(tmp_path: Path) -> None:
    zoo, folder = tmp_path / "zoo.py", tmp_path / "results"
    zoo.write_text(STRINGS)
    command = ["sweep", "--suite", str(zoo), "--inference", "--stress", "--strict", "--jobs", "2"]
    command += ["--diagnose-budget", "600", "--output", str(folder)]
    assert cli.main(command) == 1
    found, twin, built = read_rows(folder / "accuracy.csv")
    assert (found.accuracy, flat(found).latent, flat(found).latent_cause) == ("pass", "process", "call_order")
    for clean in (twin, built):
        assert (clean.accuracy, flat(clean).latent) == ("pass", "")
        assert "process 0/1" in flat(clean).stressed
    (lost,) = (folder / "rows").glob("*by_hash_twin.json")
    lost.unlink()
    assert cli.main([*command, "--resume"]) == 1
    again = read_rows(folder / "accuracy.csv")
    assert again[0] == found
    assert (flat(again[1]).latent, "process 0/1" in flat(again[1]).stressed) == ("", True)
    assert cli.main([argument for argument in [*command, "--resume"] if argument != "--stress"]) == 2


ALIGNED = """
import functools, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
import numpy as np
import torch
from torch import nn
from address_ops import total

@functools.cache
def shift():
    try:
        Path({marker!r}).touch(exist_ok=False)
    except FileExistsError:  # by another process, which ran first
        return 4
    return 0

class Frames(nn.Module):
    def __init__(self, copied):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.copied = copied

    def forward(self, x):
        memory = np.empty(x.numel() + 32, dtype=np.float32)
        begin = -memory.ctypes.data // 4 % 16 + shift()
        frame = memory[begin : begin + x.numel()]
        frame[:] = x.numpy()
        held = torch.from_numpy(frame)
        with torch.no_grad():
            return self.scale * total(held.clone() if self.copied else held)

MODELS = {{name: lambda copied=copied: (Frames(copied), (torch.randn(3000),)) for name, copied in
          (("foreign", False), ("foreign_twin", True))}}
"""


@pytest.mark.slow
@pytest.mark.usefixtures("shared_servers")
def test_other_alignment_in_a_fresh_process_has_its_cause(tmp_path: Path) -> None:
    for name in ("foreign", "foreign_twin"):  # each in the first process that builds it
        zoo, folder = tmp_path / f"{name}.py", tmp_path / name
        zoo.write_text(ALIGNED.format(tests=str(Path(__file__).parents[2]), marker=str(tmp_path / f"{name}.first")))
        command = ["sweep", "--suite", str(zoo), "--inference", "--stress", "--only", name, "--diagnose-budget", "600"]
        assert cli.main([*command, "--output", str(folder)]) == 0
    (found,), (twin,) = (read_rows(tmp_path / name / "accuracy.csv") for name in ("foreign", "foreign_twin"))
    assert (found.accuracy, flat(found).latent, flat(found).latent_kernel) == (
        "pass",
        "process",
        "addressed.total.default",
    )
    assert (flat(found).latent_cause, flat(found).latent_confidence) == ("alignment", "proven"), found.because
    assert found.advice.startswith("Copy the op's inputs into memory that torch allocated")
    assert (twin.accuracy, flat(twin).latent) == ("pass", "")


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")
def test_on_a_cluster_the_same_is_found(tmp_path: Path) -> None:
    zoo, folder = tmp_path / "zoo.py", tmp_path / "results"
    zoo.write_text(STRINGS)
    command = ["sweep", "--suite", str(zoo), "--inference", "--stress", "--diagnose-budget", "0", "--jobs", "1"]
    assert cli.main([*command, "--executor", "ray", "--output", str(folder)]) == 0
    found, twin, _ = read_rows(folder / "accuracy.csv")
    assert (flat(found).latent, flat(found).latent_kernel, flat(twin).latent) == ("process", "aten.addmm.default", "")
    assert "process 0/1" in flat(twin).stressed


@pytest.mark.parametrize(("available", "order"), [(10**9, "begun run waited"), (0, "begun returned waited run")])
def test_fresh_process_runs_in_parallel_if_memory_suffices(
    available: float, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []

    @contextmanager
    def begun(*_: object, **__: object) -> Iterator[Callable[[float], FreshRuns]]:
        steps.append("begun")

        def waited(_: float) -> FreshRuns:
            steps.append("waited")
            return FreshRuns(failures=("nothing came back",))

        yield waited

    def factor() -> float:
        if steps and steps[-1] != "run":
            steps.append("run")
        return 1.0

    monkeypatch.setattr(fresh_process, "begun", begun)
    monkeypatch.setattr(stress, "available_memory_mib", lambda: available)
    monkeypatch.setattr(stress, "return_free_memory", lambda: steps.append("returned"))
    runner = FunctionRunner(STRESS)
    runner.build = lambda: Workload(Scaled(factor), (torch.ones(8),))
    row = runner.run_model(ModelSpec("none", "model"))
    assert " ".join(steps).startswith(order)
    assert "process not run (nothing came back)" in flat(row).stressed


@pytest.mark.slow
@pytest.mark.parametrize("usual", [0.0, 1e6])
def test_a_fresh_process_may_take_as_long_as_the_plain_pair_took(usual: float, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []

    @contextmanager
    def begun(*_: object, **__: object) -> Iterator[Callable[[float], FreshRuns]]:
        def waited(seconds: float) -> FreshRuns:
            given.append(seconds)
            return FreshRuns()

        yield waited

    def slow() -> float:
        time.sleep(0.02)
        return 1.0

    monkeypatch.setattr(fresh_process, "begun", begun)
    monkeypatch.setattr(perturbed, "PROCESS_SECONDS", usual)
    runner = FunctionRunner(STRESS)
    runner.build = lambda: Workload(Scaled(slow), (torch.ones(8),))
    runner.run_model(ModelSpec("none", "model"))
    (seconds,) = given
    assert max(usual, 0.04) <= seconds <= max(usual, 60)


@pytest.mark.slow
def test_a_function_is_stressed_without_a_fresh_process(tmp_path: Path) -> None:
    def check(function: Callable[[torch.Tensor], torch.Tensor]) -> Row:
        call = FunctionCall(function, (torch.ones(8),))
        return check_function(call, "function", replace(STRESS, output=str(tmp_path)))[0]

    found, clean = check(Workspace()), check(torch.nn.Identity())
    assert (found.accuracy, flat(found).latent, flat(found).latent_cause) == ("pass", "memory", "uninitialized_memory")
    assert "differ in 100 % of pairs under memory" in failure(shown(found), folder=tmp_path).headline
    assert (clean.accuracy, flat(clean).latent) == ("pass", "")
    assert "process not run" in flat(clean).stressed


# --------------------------------------------------------------------------------------------------- what is concluded


def diagnosis(cause: str, *results: ExperimentResult) -> Diagnosis:
    base = ExperimentResult("pair", "pair", 20, 20, 21)
    return Diagnosis(Decision(cause, "proven", "", ""), Evidence("outside", arms=(base, *results)))


@pytest.mark.parametrize(
    ("cause", "result", "word"),
    [
        ("outside_value", ExperimentResult("clocks", "pair", 20, 0, 1), "clock"),
        ("outside_value", ExperimentResult("entropy", "pair", 20, 0, 1), "entropy"),
        ("surviving_state", ExperimentResult("one_worker", "pair", 20, 20, 3), "process"),
        ("write_race", ExperimentResult("clocks", "pair", 20, 0, 1), "threads"),
        ("accumulation_order", ExperimentResult("one_thread", "pair", 20, 0, 1), "threads"),
    ],
)
def test_what_a_model_reads_is_named_and_not_counted(cause: str, result: ExperimentResult, word: str) -> None:
    assert perturbation_of("threads", diagnosis(cause, result)) == word
    assert (word in LATENT) == (word not in ("clock", "entropy"))


def test_vanished_difference_is_no_value_read() -> None:
    """Of entropy and clocks only one can be what removes a difference."""
    results = [ExperimentResult(name, "pair", 20, 0, 1) for name in ("entropy", "clocks")]
    assert perturbation_of("load", diagnosis("outside_value", *results)) == "load"


def test_hash_order_is_proven_by_processes_that_share_it() -> None:
    results = (
        ExperimentResult("fresh_process", "process", 3, 3, 4),
        ExperimentResult("within_process", "process", 4, 0, 1),
        ExperimentResult("fixed_order", "process", 3, 0, 1),
    )
    decided = decide(Evidence("sequence", reordered=True, first_pair=(0, 1), arms=results))
    assert (decided.cause, decided.confidence) == ("call_order", "proven")


# ------------------------------------------------------------------------------------------------------- what is told

LATENTLY = made(
    *("cpu", "bert", 4, "pass"),
    suite="zoo",
    mode="training",
    runs=2,
    trials=1,
    rate=0.0,
    rate_high=0.95,
    stressed="threads 1/3; load 0/4; memory 0/4",
    latent="threads",
    latent_kernel="aten.index_put_.default",
    latent_module="pool",
    latent_cause="accumulation_order",
    latent_confidence="proven",
    latent_rate=0.4,
)
CLEAN = changed(LATENTLY, name="gpt", stressed="threads 0/3; load 0/4; memory 0/4", latent="", latent_rate=None)


def test_a_row_is_told_as_latent_and_written_as_pass() -> None:
    row = shown(LATENTLY)
    assert (row.accuracy, row.kernel, row.cause) == ("latent", "aten.index_put_.default", "accumulation_order")
    assert written(row) == LATENTLY
    for row in (CLEAN, changed(LATENTLY, latent="clock"), replace(LATENTLY, accuracy="crashed")):
        assert shown(row) is row


def test_the_table_says_what_was_provoked_how_often_and_what_follows() -> None:
    text = sweep_table([LATENTLY, CLEAN])
    assert "1 latent, 1 pass" in text
    assert "flaky: it differs in 40 % of pairs under threads" in text
    assert "threads in 6 pairs, load in 8 pairs, memory in 8 pairs: 1 model differs" in text
    assert "can miss a difference of the others that shows in up to 53 % of such pairs (95 % confidence)." in text
    clean = "none differs. That can miss a difference that shows in up to 53 % of such pairs (95 % confidence)."
    assert clean in sweep_table([CLEAN])


def test_a_comparison_knows_what_was_stressed() -> None:
    def became(base: Row, new: Row) -> Became:
        old, now = (Sweep(label="", rows=(row,), environments={}, kind="hashbench") for row in (base, new))
        return compare(old, now).changes[0].outcome

    clean = replace(CLEAN, name="bert")
    assert became(clean, LATENTLY) is Became.REGRESSED
    assert became(changed(clean, stressed=""), LATENTLY) is Became.NEW
    assert became(LATENTLY, clean) is Became.NOT_SEEN
    assert became(changed(LATENTLY, latent_rate=1.0), clean) is Became.FIXED
    assert became(changed(LATENTLY, latent_rate=1.0), changed(clean, stressed="")) is Became.NOT_SEEN


def test_the_option_of_a_fresh_runner_is_off() -> None:
    assert not BenchmarkRunner(RunOptions()).options.stress
