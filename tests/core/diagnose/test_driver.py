"""Why runs differ, from the model to the row: which experiments are run and what is concluded, on small models."""

from __future__ import annotations

import errno
import json
import os
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hashbench.core.check.function import FunctionCall, check_function
from hashbench.core.check.model import BenchmarkRunner
from hashbench.core.diagnose import driver, fresh_process, replay
from hashbench.core.diagnose.calls.ops import Definition
from hashbench.core.diagnose.fresh_process import FreshRuns
from hashbench.core.finding.row import row_finding
from hashbench.core.processes import Budget
from hashbench.core.records import (
    NO_TIME,
    CallFacts,
    Decision,
    Diagnosis,
    Divergence,
    Evidence,
    ExperimentResult,
    Failure,
    ModelSpec,
    Row,
    RunOptions,
    Verdict,
)
from hashbench.core.run.outcome import Outcome
from hashbench.core.run.settings import settings
from hashbench.core.run.workload import Workload
from hashbench.core.suites import registry

OPTIONS = RunOptions(mode="inference", threads=8, replays=6, diagnose_budget=300.0)
"""Eight threads meet also on one busy core, where two hardly ever do; the time is what such a machine may need."""
NOISE = torch.Generator().manual_seed(0)
PRIVATE = np.random.default_rng(0)
STATE: list[int] = [0]
LARGE = 200_000
"""Rows that keep eight threads busy long enough to overlap: 29 of 29 repetitions differ, also while other processes
share the cores, and on a single one."""


@pytest.fixture(autouse=True)
def _fresh_state() -> None:
    STATE[0] = 0


class Computes(torch.nn.Module):
    """A linear layer, and ``then`` on its output."""

    def __init__(self, then: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
        self.then = then

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.then(self.linear(x))


def outcome_of(then: Callable[[torch.Tensor], torch.Tensor], options: RunOptions = OPTIONS, rows: int = 4) -> Outcome:
    torch.manual_seed(0)
    workload = Workload(Computes(then), inputs=(torch.randn(rows, 8),), iterations=1)
    return BenchmarkRunner(options).check_accuracy(workload, deterministic="off")


def diagnosis_of(
    then: Callable[[torch.Tensor], torch.Tensor], options: RunOptions = OPTIONS, rows: int = 4
) -> Diagnosis:
    found = outcome_of(then, options, rows).diagnosis
    assert found is not None
    return found


def arm(found: Diagnosis, name: str, on: str) -> ExperimentResult:
    return found.evidence.arm(name, on)


# -------------------------------------------------------------------------------------------------- the models


@torch.library.custom_op("diagnosis::jitter", mutates_args=())
def jitter(x: torch.Tensor) -> torch.Tensor:
    """Computes without torch, so that no tracer sees what happens inside."""
    return torch.from_numpy(x.numpy() + np.random.default_rng().random(dtype=np.float32))


@torch.library.custom_op("diagnosis::shift", mutates_args=())
def shift(x: torch.Tensor) -> torch.Tensor:
    """Computes with torch: the native tracer sees the addition."""
    return x + np.random.default_rng().random()


@torch.library.custom_op("diagnosis::opaque", mutates_args=())
def opaque(x: torch.Tensor) -> torch.Tensor:
    with Path("/dev/urandom").open("rb") as source:
        return torch.from_numpy(x.numpy() + np.float32(int.from_bytes(source.read(4), "little")))


def with_jitter(x: torch.Tensor) -> torch.Tensor:  # the op itself cannot be copied with a model
    return jitter(x)


def with_shift(x: torch.Tensor) -> torch.Tensor:
    return shift(x)


def with_opaque(x: torch.Tensor) -> torch.Tensor:
    return opaque(x)


def scattered(x: torch.Tensor) -> torch.Tensor:
    """Gradients or messages added to few targets, in any order."""
    targets = torch.arange(len(x)) * 7919 % 512
    return torch.zeros(512, 8).index_put((targets,), x, accumulate=True)


def drawn_by_threads(x: torch.Tensor, *, ordered: bool = False) -> torch.Tensor:
    """Eight threads draw from the generator that every run resets, in an order that nothing but one thread fixes."""
    with Path("/dev/urandom").open("rb") as source:
        ranks = sorted(range(8), key=dict(enumerate(source.read(8))).__getitem__)

    def draw(number: int) -> torch.Tensor:
        time.sleep(0.02 * ranks[number])
        return torch.rand(x.shape)

    with ThreadPoolExecutor(1 if ordered else 8) as pool:
        return x + sum(weight * drawn for weight, drawn in enumerate(pool.map(draw, range(8)), start=1))


def drawn_in_order(x: torch.Tensor) -> torch.Tensor:
    return drawn_by_threads(x, ordered=True)


def from_generator(x: torch.Tensor) -> torch.Tensor:
    return x + torch.rand(x.shape, generator=NOISE)


def from_numpy(x: torch.Tensor) -> torch.Tensor:
    return x * PRIVATE.random()


def from_entropy(x: torch.Tensor) -> torch.Tensor:
    return x * np.random.default_rng().random()


def from_clock(x: torch.Tensor) -> torch.Tensor:
    return x * (time.perf_counter() % 1)


def first_run_only(x: torch.Tensor) -> torch.Tensor:
    STATE[0] += 1
    return x * (2.0 if STATE[0] == 1 else 1.0)


def two_sources(x: torch.Tensor) -> torch.Tensor:
    return jitter(jitter(x).relu()) * np.random.default_rng().random()


# ------------------------------------------------------------------------------------------------------- causes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("then", "cause", "found"),
    [
        pytest.param(from_generator, "rng", "test_driver.NOISE", id="a generator of torch that no reset reaches"),
        pytest.param(from_numpy, "rng", "test_driver.PRIVATE", id="a private generator of NumPy"),
        pytest.param(from_entropy, "outside_value", "", id="entropy as a Python number"),
        pytest.param(from_clock, "outside_value", "", id="a clock as a Python number"),
        pytest.param(with_jitter, "outside_value", "", id="entropy inside a custom op"),
        pytest.param(with_shift, "outside_value", "", id="entropy inside a custom op that computes with torch"),
        pytest.param(with_opaque, "opaque_kernel", "", id="a custom op that no arm explains"),
    ],
)
def test_cause(then: Callable[[torch.Tensor], torch.Tensor], cause: str, found: str) -> None:
    diagnosis = diagnosis_of(then)
    assert diagnosis.decision.cause == cause, diagnosis.decision.because
    assert found in diagnosis.decision.because
    if then is not with_opaque:
        assert diagnosis.decision.confidence == "proven"


@pytest.mark.slow
def test_atomic_additions_with_price_and_documentation() -> None:
    found = diagnosis_of(scattered, rows=LARGE)
    assert (found.decision.cause, found.decision.confidence) == ("accumulation_order", "proven"), found.decision.because
    assert found.rate is not None
    assert (found.rate.of, found.rate.trials >= 6, found.rate.high) == ("replays", True, 1.0)
    assert "index_put" in found.deterministic_doc
    assert found.deterministic_here.startswith("identical")
    assert found.deterministic_price is not None
    assert found.deterministic_price > 0


@pytest.mark.slow
def test_first_run_alone_is_unreproduced_without_processes() -> None:
    found = diagnosis_of(first_run_only)
    assert (found.decision.cause, found.decision.confidence) == ("unreproduced", "open")
    assert arm(found, "fresh_process", "process").note == "only models of a suite can be built again"
    assert found.rate is not None
    assert (found.rate.of, found.rate.differing, found.rate.trials) == ("runs", 1, 1)


# ------------------------------------------------------------------------------------------------ what it costs


def test_clean_model_has_only_a_rate() -> None:
    outcome = outcome_of(torch.relu, replace(OPTIONS, runs=20))
    assert (outcome.accuracy, outcome.diagnosis) == ("pass", None)


@pytest.mark.slow
def test_threads_that_draw_are_not_told_to_reset_a_generator() -> None:
    found = diagnosis_of(drawn_by_threads)
    assert found.evidence.origin == "rng"
    assert arm(found, "generators", "pair").differing
    assert (found.decision.cause, found.decision.confidence) == ("call_order", "proven"), found.evidence
    assert found.decision.advice.startswith("Join the results of threads")
    assert outcome_of(drawn_in_order).accuracy == "pass"


def test_without_a_budget_no_experiment_is_made() -> None:
    outcome = outcome_of(from_entropy, replace(OPTIONS, diagnose_budget=0))
    assert (outcome.accuracy, outcome.diagnosis) == ("eager_two_runs_differ", None)


def test_what_the_budget_does_not_allow_is_named() -> None:
    found = diagnosis_of(from_entropy, replace(OPTIONS, diagnose_budget=0.001))
    notes = {arm.name: arm.note for arm in found.evidence.arms if not arm.ran}
    assert notes["clocks"] == "budget"
    assert "clocks" in "; ".join(arm.word() for arm in found.evidence.arms)
    assert "the time for experiments ended before these were complete: " in found.decision.because


def test_what_gives_a_function_more_time_is_a_setting_of_pytest() -> None:
    def check(budget: float) -> Row:
        options = replace(OPTIONS, diagnose_budget=budget, deterministic="off")
        return check_function(FunctionCall(from_entropy, (torch.ones(8),)), "drawn", options)[0]

    row = check(0.001)
    assert row.advice.startswith(
        "The time for experiments ended before the cause was certain: give them more (diagnose_budget). "
    )
    remedy = dict(row_finding(row, folder=Path()).facts)["to do"]
    assert "--diagnose-budget" not in remedy
    assert remedy.startswith("The time for experiments ended before the cause was certain: ")
    assert "ended" not in dict(row_finding(check(300.0), folder=Path()).facts)["to do"]


def test_further_sources_that_there_was_no_time_for_are_said() -> None:
    found = diagnosis_of(from_entropy, replace(OPTIONS, diagnose_budget=0.001, all_sources=True))
    assert found.other_sources == ("further ones were not looked for: the time for experiments ended",)


def test_differing_fixed_order_says_it_had_no_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known, made = case("sequence"), list[str]()
    known.spec = ModelSpec("suite", "model")

    def in_processes(_: driver.DiagnosisCase, name: str, *, runs: int) -> list[ExperimentResult]:
        made.append(f"{name} {runs}")
        return [
            ExperimentResult(name, "process", 3, 3, 4)
            if len(made) == 1
            else ExperimentResult(name, "process", note=NO_TIME)
        ]

    monkeypatch.setattr(driver, "_in_processes", in_processes)
    (arm,) = driver.start_processes_in_fixed_order(known, driver.Findings(Evidence("sequence"))).evidence.arms
    assert (arm.trials, arm.differing, arm.is_cut_short, len(made)) == (3, 3, True, 2)


def test_memory_that_there_was_no_time_to_fill_is_said() -> None:
    known = case("state")
    known.budget = Budget(0.0)
    arms = driver.try_memory_and_collector(known, driver.Findings(Evidence("state"))).evidence.arms
    assert {(arm.name, arm.note) for arm in arms} == {("no_collector", NO_TIME), ("poison", NO_TIME)}


@pytest.mark.slow
def test_call_above_the_limit_is_not_captured_and_says_so() -> None:
    found = diagnosis_of(scattered, replace(OPTIONS, capture_mib=1.0), rows=LARGE)
    assert found.evidence.call is not None
    assert "MiB" in found.evidence.call.limits
    assert found.decision.confidence != "proven"


def test_settings_clocks_entropy_and_generators_are_as_before() -> None:
    before, clock = settings(), time.perf_counter
    diagnosis_of(with_jitter)
    assert settings() == before
    assert time.perf_counter is clock
    assert np.random.default_rng().random() != np.random.default_rng().random()


def test_a_diagnosis_that_fails_leaves_the_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("no experiments today")

    monkeypatch.setattr(replay, "experiments", broken)
    outcome = outcome_of(with_jitter)
    assert (outcome.accuracy, outcome.verdict is not None) == ("eager_two_runs_differ", True)
    assert outcome.diagnosis is not None
    assert outcome.diagnosis.decision.because == "the diagnosis failed: RuntimeError: no experiments today"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EMFILE, errno.EFBIG])
def test_a_diagnosis_without_space_or_descriptors_leaves_the_verdict(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(replay, "experiments", full)
    outcome = outcome_of(with_jitter)
    assert (outcome.accuracy, outcome.verdict is not None) == ("eager_two_runs_differ", True)
    assert outcome.diagnosis is not None
    assert os.strerror(number) in outcome.diagnosis.decision.because


def test_no_more_is_captured_than_memory_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver.psutil, "virtual_memory", lambda: SimpleNamespace(available=600))
    found = diagnosis_of(with_jitter)
    assert found.evidence.call is not None
    assert "MiB" in found.evidence.call.limits


# --------------------------------------------------------------------------------------------------- all sources


def test_all_sources_are_named_one_behind_the_other() -> None:
    found = diagnosis_of(two_sources, replace(OPTIONS, all_sources=True))
    first, second = found.other_sources
    assert first.startswith("kernel: diagnosis.jitter.default")
    assert "outside_value" in first
    assert second.startswith("outside: aten.mul")
    assert second.endswith("outside_value, open")


def test_a_single_source_has_no_others() -> None:
    assert diagnosis_of(with_jitter, replace(OPTIONS, all_sources=True)).other_sources == ()


# -------------------------------------------------------------------------------------------------- from a zoo

ZOO = """
import gc
import weakref

import numpy as np
import torch

SEEN = []


class Entry:
    def __init__(self, cyclic):
        self.own = self if cyclic else None


class Counts(torch.nn.Module):
    def __init__(self, cyclic):
        super().__init__()
        self.cyclic = cyclic

    def forward(self, x):
        SEEN.append(1)
        alive = weakref.WeakSet()
        gc.collect()  # the count of new objects begins at 0, and the loop below after another number in each run
        kept = [[] for _ in range(90 * (len(SEEN) % 7))]
        for _ in range(911):  # the collector runs after 700 new objects, wherever that is in this loop
            alive.add(Entry(self.cyclic))
        return x * (1.0 + len(alive))


class Reads(torch.nn.Module):
    def __init__(self, cleared):
        super().__init__()
        self.cleared = cleared

    def forward(self, x):
        SEEN.append(1)
        memory = np.empty(4096, dtype=np.float32)
        memory[:] = len(SEEN)
        del memory
        memory = np.empty(4096, dtype=np.float32)  # the C library hands out what was given back just now
        if self.cleared:
            memory[:] = 0
        return x * (1.0 + float(memory[2048]))


class Toggles(torch.nn.Module):
    def forward(self, x):
        SEEN.append(1)
        return x * (1.0 + len(SEEN) % 2)


class Numbered(torch.nn.Module):
    COPIES = 0

    def __init__(self, generator):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.from_numpy(generator.random(8)))
        self.register_buffer("number", torch.tensor(0))

    def __deepcopy__(self, memo):
        Numbered.COPIES += 1
        copied = Numbered(np.random.default_rng(0))
        copied.weight = torch.nn.Parameter(self.weight.detach().clone())
        copied.number.fill_(Numbered.COPIES)
        return copied

    def forward(self, x):
        return x * self.weight + self.number


class Caches(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x):
        if not SEEN:
            SEEN.append(1)
            return self.linear(x).double().relu().float()
        return self.linear(x).relu() * 1.0001


class Orders(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(16))

    def forward(self, x):
        for layer in set(self.layers):
            x = torch.tanh(layer(x) + x)
        return x


class Scatters(torch.nn.Module):
    def forward(self, x):
        targets = torch.arange(len(x)) * 7919 % 512
        return torch.zeros(512, 8).index_put((targets,), x, accumulate=True)


def counted(count):
    from hashbench.core.run.workload import Workload

    def inputs():
        SEEN.append(1)
        return (torch.full((4, 8), 1.0 + count * len(SEEN)),)

    return Workload(torch.nn.Linear(8, 8), make_inputs=inputs)


MODELS = {
    "counted_inputs": lambda: counted(1),
    "counted_inputs_twin": lambda: counted(0),
    "caches": lambda: (Caches(), (torch.randn(4, 8),)),
    "counts": lambda: (Counts(True), (torch.randn(4, 8),)),
    "counts_twin": lambda: (Counts(False), (torch.randn(4, 8),)),
    "reads": lambda: (Reads(False), (torch.randn(4, 8),)),
    "reads_twin": lambda: (Reads(True), (torch.randn(4, 8),)),
    "numbered": lambda: (Numbered(np.random.default_rng(0)), (torch.randn(4, 8),)),
    "numbered_otherwise": lambda: (Numbered(np.random.default_rng()), (torch.randn(4, 8),)),
    "toggles": lambda: (Toggles(), (torch.randn(4, 8),)),
    "orders": lambda: (Orders(), (torch.randn(4, 8),)),
    "scatters": lambda: (Scatters(), (torch.randn(200_000, 8),)),
}
"""


def row_of(name: str, folder: Path, **options: object) -> Row:
    (folder / "zoo.py").write_text(ZOO)
    spec = next(spec for spec in registry.catalog(str(folder / "zoo.py")) if spec.name == name)
    made = replace(OPTIONS, output=str(folder / "out"), deterministic="off", **options)
    return BenchmarkRunner(made).run_model(spec)


@pytest.mark.slow
@pytest.mark.usefixtures("shared_servers")
@pytest.mark.parametrize(
    ("name", "cause"),
    [("caches", "surviving_state"), ("counted_inputs", "surviving_state"), ("orders", "call_order")],
    ids=["a cache", "a counter behind the inputs", "the order of a set"],
)
def test_what_only_fresh_processes_tell_apart(name: str, cause: str, tmp_path: Path) -> None:
    row = row_of(name, tmp_path)
    assert (row.cause, row.confidence) == (cause, "proven"), row.evidence.text
    assert "Seed" not in row.advice


@pytest.mark.slow
@pytest.mark.usefixtures("shared_servers")
@pytest.mark.parametrize(
    ("name", "cause", "arm"),
    [
        ("counts", "garbage_collection", "pair/no_collector 0/"),
        ("reads", "uninitialized_memory", "pair/poison 6/6"),
        ("toggles", "surviving_state", "pair/poison 0/"),
    ],
)
def test_collector_or_memory_is_no_surviving_state(name: str, cause: str, arm: str, tmp_path: Path) -> None:
    row = row_of(name, tmp_path, iterations=1)
    assert (row.accuracy, row.cause, row.confidence) == ("eager_two_runs_differ", cause, "proven"), row.evidence.text
    assert arm in row.evidence.text


@pytest.mark.slow
@pytest.mark.usefixtures("shared_servers")
@pytest.mark.parametrize(
    ("name", "decided", "arm"),
    [
        ("numbered", ("surviving_state", "proven"), "process/fresh_process 0/3"),
        (
            "numbered_otherwise",
            ("initial_state", "likely"),
            "process/fresh_process not run (its model has other weights)",
        ),
    ],
    ids=["weights of a seed", "weights of the system's entropy"],
)
def test_fresh_processes_with_other_weights_say_nothing_of_a_counter(
    name: str, decided: tuple[str, str], arm: str, tmp_path: Path
) -> None:
    row = row_of(name, tmp_path)
    assert (row.cause, row.confidence) == decided, row.evidence.text
    assert arm in row.evidence.text


@pytest.mark.slow
@pytest.mark.parametrize("name", ["counts_twin", "reads_twin", "counted_inputs_twin"])
def test_what_leaves_nothing_to_the_collector_or_to_memory_is_clean(name: str, tmp_path: Path) -> None:
    assert row_of(name, tmp_path).accuracy == "pass"


@pytest.mark.slow
def test_row_of_a_captured_kernel_has_a_repro_that_reproduces(tmp_path: Path) -> None:
    row = row_of("scatters", tmp_path)
    assert (row.cause, row.confidence) == ("accumulation_order", "proven"), row.evidence.text
    folder = tmp_path / "out" / row.repro
    assert {file.name for file in folder.iterdir()} >= {"repro.py", "tensors.pt", "call.json", "REPORT.md"}
    assert re.fullmatch(r"in a fresh process [1-9]\d* of \d+ calls differ", row.reproduced)
    assert json.loads((folder / "call.json").read_text())["op"] == "aten.index_put.default"


# ----------------------------------------------------------------------------------------------------------- the stages

ENVIRONMENT = ["repeat_pair", "control_environment"]
LAST = "try_memory_and_collector"
STAGES = {
    "settings": [],
    "input": [*ENVIRONMENT, "start_processes", LAST],
    "rng": [*ENVIRONMENT, "start_processes", LAST],
    "state": [*ENVIRONMENT, "start_processes", LAST],
    "outside": [*ENVIRONMENT, "start_processes", "start_processes_in_fixed_order", LAST],
    "sequence": [*ENVIRONMENT, "start_processes", "start_processes_in_fixed_order", LAST],
    "kernel": [
        *("capture_call", "replay_call", "poison_allocation"),
        *(*ENVIRONMENT, "start_processes", LAST),
    ],
}


def case(origin: str, accuracy: str = "eager_two_runs_differ") -> driver.DiagnosisCase:
    divergence = Divergence(origin, "x", "aten.mm.default", 1, "forward", 0, "", "", "")
    outcome = Outcome(accuracy, "on", verdict=Verdict(("output",), divergence, ()))
    return driver.DiagnosisCase(lambda **_: Failure("no run"), RunOptions(diagnose_budget=60.0), outcome)


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


@pytest.mark.parametrize("origin", ["kernel", "outside"])
def test_replay_comes_before_processes(origin: str) -> None:
    known = case(origin)
    known.outcome = replace(known.outcome, between_processes=True)
    in_processes = ["start_processes", "start_processes_in_fixed_order"]
    before = ["capture_call", "replay_call"] if origin == "kernel" else []
    assert [stage.__name__ for stage in driver.stages_of(known)] == [*before, *in_processes]


@pytest.mark.parametrize(("origin", "always"), [("state", True), ("outside", False), ("rng", False)])
def test_proven_causes_spare_fresh_processes(origin: str, *, always: bool) -> None:
    assert (PROVEN.proven, OPEN.proven) == (True, False)
    stage = next(stage for stage in driver.stages_of(case(origin)) if stage.__name__ == "start_processes")
    assert (stage(case(origin), PROVEN) is not PROVEN) == always
    assert [arm.name for arm in stage(case(origin), OPEN).evidence.arms] == ["pair", "fresh_process"]


@pytest.mark.parametrize("perturbation", ["collector", "load", ""])
def test_the_garbage_collector_is_held_still_where_it_was_provoked(perturbation: str) -> None:
    known = case("outside")
    provoked = driver.DiagnosisCase(known.attempt, known.options, replace(known.outcome, perturbation=perturbation))
    arms = driver.control_environment(provoked, driver.Findings(Evidence("outside"))).evidence.arms
    assert ("no_collector" in [arm.name for arm in arms]) == (perturbation == "collector")


@pytest.mark.parametrize(("traced_by", "asked"), [("python", "python"), ("", "auto")])
def test_fresh_processes_trace_by_the_tracer_of_the_runs(
    traced_by: str, asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []

    def fresh_traces(_: ModelSpec, options: RunOptions, **__: object) -> FreshRuns:
        told.append(options.tracer)
        return FreshRuns((), ("not run",))

    monkeypatch.setattr(driver.fresh_process, "fresh_traces", fresh_traces)
    without = case("state")
    outcome = replace(without.outcome, tracer=traced_by)
    spec = ModelSpec("suite", "model")
    driver.start_processes(driver.DiagnosisCase(without.attempt, without.options, outcome, spec=spec), OPEN)
    assert told == [asked]


@pytest.mark.parametrize(
    ("made", "counted"),
    [
        ([(3, 0)], (3, 0)),
        ([(3, 2), (3, 0)], (3, 0)),
        ([(3, 3), (3, 1), (3, 0)], (3, 0)),
        ([(3, 3), (3, 1), (3, 2)], (3, 2)),
        ([(3, 1), (0, 0)], (3, 1)),
    ],
    ids=["none differs", "none the second time", "none the third time", "each time", "no time for more"],
)
def test_differing_fixed_order_is_tried_in_another_python(
    made: list[tuple[int, int]], counted: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    left = [(ExperimentResult("fixed_order", "process", trials, number, 1 + number),) for trials, number in made]
    pools: list[str] = []

    def in_processes(*_: object, **__: object) -> tuple[ExperimentResult, ...]:
        pools.append(os.environ[fresh_process.POOL_VARIABLE])
        return left.pop(0)

    monkeypatch.setenv(fresh_process.POOL_VARIABLE, "pool")
    monkeypatch.setattr(driver, "_in_processes", in_processes)
    findings = driver.start_processes_in_fixed_order(case("sequence"), OPEN)
    arms = [(arm.trials, arm.differing) for arm in findings.evidence.arms if arm.name == "fixed_order"]
    assert (arms, left) == ([counted], [])
    assert pools == ["pool", "", ""][: len(made)]
    assert os.environ[fresh_process.POOL_VARIABLE] == "pool"


@pytest.mark.parametrize("allocation", [True, False])
def test_an_allocation_is_not_replayed_but_poisoned(*, allocation: bool) -> None:
    findings = driver.Findings(Evidence("kernel", call=CallFacts("aten.empty.default", allocation=allocation)))
    poisoned = driver.poison_allocation(case("kernel"), findings)
    assert [arm.name for arm in poisoned.evidence.arms] == (["pair", "poison"] if allocation else [])
    repeated = driver.repeat_pair(case("kernel"), findings)
    assert [arm.name for arm in repeated.evidence.arms] == ([] if allocation else ["pair"])


def test_a_call_that_cannot_be_captured_says_why_and_is_not_replayed() -> None:
    findings = driver.capture_call(case("kernel"), driver.Findings(Evidence("kernel")))
    assert findings.evidence.call is not None
    assert (findings.call, findings.evidence.call.limits) == (None, "the run failed: no run")
    assert driver.replay_call(case("kernel"), findings) is findings


@pytest.mark.parametrize(("func", "definition"), [("an op of torch", None), ("a custom op", "module")])
def test_a_repro_runs_in_a_fork_of_a_server(
    func: str, definition: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran_by = []
    monkeypatch.setattr(driver, "definition_of", {"a custom op": Definition("module")}.get)
    monkeypatch.setattr(driver.repro, "write_repro", lambda *_, **__: None)
    monkeypatch.setattr(
        *(driver.repro, "run_in_fresh_process"),
        lambda *_, by, definition, **__: ran_by.append((by, definition)),
    )
    wanted = SimpleNamespace(spec=ModelSpec("zoo", "model"), options=RunOptions(output=str(tmp_path)))
    findings = SimpleNamespace(call=SimpleNamespace(func=func), replays=None)
    driver._with_repro(wanted, findings, Diagnosis(Decision("unknown", "open", "", ""), Evidence(origin="")))
    assert ran_by == [(fresh_process.run_python, definition)]
