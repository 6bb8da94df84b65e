"""What tracing adds to a row of a sweep: seconds of a row, over those of the same two runs untraced in the same kind of
process; and where the seconds go.

Each arm of each model is a worker of its own, as in a sweep: forked from the server that has torch loaded, it builds
the model from the seed, makes two runs and leaves a row. What is counted is CPU time, of all threads of the worker and
of the server that forks it and waits for it; other processes disturb that less than the clock on the wall, which stands
beside it. The arms of a model take turns. ``python -m benchmarks.rows`` runs it alone.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import psutil

from benchmarks.pieces import without_digests
from benchmarks.table import Table, against
from hashbench.core.check import model, pair
from hashbench.core.native.build import Unavailable
from hashbench.core.records import Failure, ModelSpec, Row, RunOptions
from hashbench.core.run import outcome
from hashbench.core.run.settings import deterministic_settings
from hashbench.core.suites import registry
from hashbench.core.sweep.executors import Task
from hashbench.core.sweep.executors.local import LocalExecutor, preload_for
from hashbench.core.trace import native
from hashbench.core.trace.api import HashDebugTrace
from hashbench.core.trace.module_paths import ModulePaths
from hashbench.core.trace.native.tracer import NativeTracer
from hashbench.core.trace.raw import RawTrace

GOAL = 1.15
ROUNDS = 3
UNTRACED, NATIVE, PYTHON, NO_DIGESTS = "untraced", "native", "python", "native, no digests"
TRACED = (NATIVE, NO_DIGESTS, PYTHON)

CONSTRUCT, PREPARE, RUN_1, RUN_2 = "construct", "copies, inputs, optimizer", "run 1", "run 2"
PROCESS, COLLECT, SETTINGS = "process: fork, files, exit", "garbage collection", "settings, random state"
NAMES, INITIAL, RESULTS = "names of modules and state", "digests of state and inputs at the start", "results"
ENTER, FINISH, COMPARE, FACTS, ROW = "enter and leave", "finish", "compare", "columns of the first trace", "row"
REST = "everything else"
STAGES = (
    PROCESS,
    CONSTRUCT,
    PREPARE,
    SETTINGS,
    NAMES,
    INITIAL,
    ENTER,
    RUN_1,
    RUN_2,
    RESULTS,
    FINISH,
    COMPARE,
    FACTS,
    ROW,
    COLLECT,
    REST,
)


@dataclass(frozen=True, slots=True)
class Measured:
    """One row: its CPU and wall seconds, the CPU seconds of its stages, its status and the ops of a run."""

    cpu: float
    wall: float
    stages: Mapping[str, float]
    accuracy: str
    ops: int | None


def measure(
    *,
    modes: Sequence[str] = ("training", "inference"),
    traced: Sequence[str] = TRACED,
    rounds: int = ROUNDS,
    threads: int = 1,
    every: int = 1,
) -> list[Table]:
    """The tables of each mode, over the default models of torchvision, or each ``every``-th of them; ``traced`` are the
    arms beside the untraced one."""
    specs = [spec for spec in registry.catalog("torchvision") if spec.default]
    return list(
        itertools.chain.from_iterable(
            _measured(specs[::every], mode, (UNTRACED, *traced), rounds, threads) for mode in modes
        )
    )


def _measured(specs: Sequence[ModelSpec], mode: str, arms: Sequence[str], rounds: int, threads: int) -> Iterator[Table]:
    specs = [spec for spec in specs if not spec.skip_reason(mode, device="cpu")]
    found: dict[str, dict[str, list[Measured]]] = defaultdict(lambda: defaultdict(list))
    with tempfile.TemporaryDirectory(prefix="hashbench-bench-") as folder:
        executor = LocalExecutor(preload=(*preload_for(NATIVE), __name__))
        executor.start(target=f"{__name__}:measured_row")
        options = RunOptions(mode=mode, threads=threads)
        rows = Rows(executor, Path(folder), options)
        try:
            rows.one(specs[0], NATIVE)  # pages and files that the first worker reads
            for _, spec in itertools.product(range(rounds), specs):
                for arm in random.sample(arms, len(arms)):
                    found[spec.name][arm].append(rows.one(spec, arm))
        finally:
            executor.close()
    yield _ratios(found, mode, arms[1:], rounds, threads)
    yield _stages(found, mode, arms)


class Rows:
    """Makes rows, each in a worker of ``executor``, with their files in ``folder``."""

    def __init__(self, executor: LocalExecutor, folder: Path, options: RunOptions) -> None:
        self._executor, self._folder, self._options = executor, folder, options
        (folder / "rows").mkdir()

    def one(self, spec: ModelSpec, arm: str) -> Measured:
        """The row of a model by one arm."""
        tracer = {UNTRACED: "python", NO_DIGESTS: "native"}.get(arm, arm)
        options = replace(self._options, tracer=tracer, output=str(self._folder))
        path, log = self._folder / "rows" / "row.json", self._folder / "log"
        path.unlink(missing_ok=True)
        own, server = time.process_time(), _server_seconds()
        target = f"{__name__}:{'untraced_row' if arm == UNTRACED else 'measured_row'}"
        variables = {_DIGESTS: "0" if arm == NO_DIGESTS else "1"}
        self._executor.submit(Task(spec.name, spec, options, target, str(path), str(log), 600, variables=variables))
        (ended,) = self._executor.wait()
        cpu = time.process_time() - own + _server_seconds() - server
        if ended.exit_code:
            raise RuntimeError(f"{spec.name}, {arm}: exit code {ended.exit_code}\n{log.read_text()}")
        row = json.loads(path.read_text())
        stages = json.loads((self._folder / _STAGES).read_text())
        stages[PROCESS] += max(0.0, cpu - sum(stages.values()))
        return Measured(cpu, ended.wall_seconds, stages, row["accuracy"], row.get("ops"))


def _server_seconds() -> float:
    """CPU seconds of the fork server, of one of fresh processes, and of all that they started and that has ended. Linux
    counts them in hundredths."""
    return float(sum(sum(child.cpu_times()[:4]) for child in psutil.Process().children(recursive=True)))


# ------------------------------------------------------------------------------------------------------- the tables


def _ratios(
    found: Mapping[str, Mapping[str, list[Measured]]], mode: str, traced: Sequence[str], rounds: int, threads: int
) -> Table:
    def ratio(arms: Mapping[str, list[Measured]], arm: str, value: Callable[[Measured], float]) -> float:
        pairs = zip(arms[arm], arms[UNTRACED], strict=True)
        return statistics.median(value(one) / value(untraced) for one, untraced in pairs)

    def ratios(arms: Mapping[str, list[Measured]]) -> list[float]:
        return [ratio(arms, arm, lambda row: row.cpu) for arm in traced] + [
            ratio(arms, traced[0], lambda row: row.wall)
        ]

    rows: list[tuple[object, ...]] = []
    for name, arms in found.items():
        cpu = statistics.median(row.cpu for row in arms[UNTRACED])
        row = arms[traced[0]][0]
        rows.append((name, row.ops, f"{cpu:.2f} s", *(f"{value:.2f}" for value in ratios(arms)), row.accuracy))
    medians = [statistics.median(column) for column in zip(*map(ratios, found.values()), strict=True)]
    rows.append(("median", "", "", *(f"{value:.3f}" for value in medians), ""))
    goal = ", ".join(against(medians[0], goal=GOAL))
    return Table(
        title=f"A row of the default torchvision sweep, {mode}: CPU time over that of the same two runs untraced",
        headers=("model", "ops", "untraced", *traced, f"{traced[0]}, wall", "status"),
        rows=tuple(rows),
        notes=(f"Medians of {rounds} rounds, {threads} thread(s). {traced[0]}, median of the models: {goal}.",),
    )


def _stages(found: Mapping[str, Mapping[str, list[Measured]]], mode: str, arms: Sequence[str]) -> Table:
    """Where seconds go: the median row of each model, added up, as shares of the untraced rows."""
    sums: dict[str, dict[str, float]] = {arm: dict.fromkeys(STAGES, 0.0) for arm in arms}
    for rows_of in found.values():
        for arm, measured in rows_of.items():
            for stage in STAGES:
                sums[arm][stage] += statistics.median(row.stages.get(stage, 0.0) for row in measured)
    whole = sum(sums[UNTRACED].values())

    def cells(stage: str) -> list[str]:
        return [f"{sums[arm][stage]:.2f} ({100 * sums[arm][stage] / whole:.1f} %)" for arm in arms]

    rows = [(stage, *cells(stage)) for stage in STAGES]
    rows.append(("sum", *[f"{sum(sums[arm].values()):.2f} ({sum(sums[arm].values()) / whole:.3f})" for arm in arms]))
    return Table(
        title=f"Where the seconds of these rows go, {mode}: CPU seconds of all models together (% of those untraced)",
        headers=("stage", *arms),
        rows=tuple(rows),
    )


# ------------------------------------------------------------------------------------------------- in the workers

_DIGESTS = "HASHBENCH_BENCHMARK_DIGESTS"
_STAGES = "stages.json"


class Stages:
    """CPU seconds of this process by stage; a stage inside another is not counted for the outer one."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.seconds[PROCESS] = time.process_time()
        self._open = [REST]
        self._since = time.process_time()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count what is inside for ``name``."""
        self._switch()
        self._open.append(name)
        try:
            yield
        finally:
            self._switch()
            self._open.pop()

    def _switch(self) -> None:
        now = time.process_time()
        self.seconds[self._open[-1]] += now - self._since
        self._since = now

    def count(self, owner: Any, function: str, name: str) -> mock._patch[Any]:
        """A patch of a function that counts its calls for stage ``name``."""
        original = getattr(owner, function)

        @functools.wraps(original)
        def counted(*args: Any, **kwargs: Any) -> Any:
            with self.stage(name):
                return original(*args, **kwargs)

        return mock.patch.object(owner, function, counted)

    def write(self, folder: Path) -> None:
        """Leave the seconds for whoever measures."""
        self._switch()
        (folder / _STAGES).write_text(json.dumps(self.seconds))


def _counted(stages: Stages) -> list[mock._patch[Any]]:
    runs = iter((RUN_1, RUN_2))
    run = model.BenchmarkRunner.run_n_iterations

    def run_n_iterations(*args: Any) -> Any:
        with stages.stage(next(runs, RUN_2)):  # a third one where the first was refused
            return run(*args)

    runner = model.BenchmarkRunner
    return [
        mock.patch.object(runner, "run_n_iterations", run_n_iterations),
        stages.count(registry, "load", CONSTRUCT),
        *(stages.count(runner, name, PREPARE) for name in ("deepcopy_model", "init_optimizer", "fresh_inputs")),
        *(stages.count(outcome, name, SETTINGS) for name in ("settings", "reset_rng_state")),
        stages.count(HashDebugTrace, "mark", SETTINGS),
        stages.count(ModulePaths, "register", NAMES),
        *(stages.count(RawTrace, name, INITIAL) for name in ("register_model", "register_inputs")),
        *(
            stages.count(kind, name, ENTER)
            for kind in (NativeTracer, HashDebugTrace)
            for name in ("__enter__", "__exit__")
        ),
        stages.count(model, "add_result", RESULTS),
        stages.count(HashDebugTrace, "finish", FINISH),
        stages.count(NativeTracer, "content", COMPARE),
        *(stages.count(pair, name, COMPARE) for name in ("compared", "fingerprint")),
        stages.count(pair, "with_facts", FACTS),
        stages.count(model, "row_of", ROW),
        *(stages.count(module, "release_memory", COLLECT) for module in (model, outcome)),
    ]


@contextmanager
def _stages_written(options: RunOptions) -> Iterator[None]:
    stages = Stages()
    patches = _counted(stages)
    for patch in patches:
        patch.start()
    yield
    stages.write(Path(options.output))


def measured_row(spec: ModelSpec, options: RunOptions) -> Row:
    """The row of a sweep, with its stages counted."""
    with _stages_written(options):
        if os.environ[_DIGESTS] == "1":
            return model.run_model(spec, options)
        loaded = native.load()
        assert not isinstance(loaded, Unavailable)
        with without_digests(loaded[0]):
            return model.run_model(spec, options)


@dataclass(frozen=True, slots=True)
class Untraced:
    """Runs made without a trace at a deterministic level, and why one failed."""

    failure: Failure | None
    deterministic: str


def untraced_row(spec: ModelSpec, options: RunOptions) -> Row:
    """The model built, and the same two runs made without a trace; nothing is compared. Where torch refuses an op at
    level ``on``, the runs once more at level ``warn``, as for the row of a sweep."""
    with _stages_written(options):
        runner = model.BenchmarkRunner(options)
        level = spec.deterministic or "on"
        with deterministic_settings(level, threads=options.threads), runner.pick_grad():
            workload = runner.prepare(runner.load_model(spec))
            prepare = functools.partial(model.prepared_run, runner, workload, spec.optimizer)
            made, _ = pair.again_with_warnings(functools.partial(_two_runs, prepare, options), level)
        del prepare, workload
        outcome.release_memory(runner.device)
    status = "fail" if made.failure else "pass"
    return Row("cpu", spec.name, spec.batch_size, status, spec.suite, options.mode, "float32")


def _two_runs(prepare: Callable[[], outcome.Prepared], options: RunOptions, level: str) -> Untraced:
    with deterministic_settings(level, threads=options.threads):
        first = outcome.attempt(prepare, options, traced=False)
        second = first if isinstance(first, Failure) else outcome.attempt(prepare, options, traced=False)
    return Untraced(second if isinstance(second, Failure) else None, level)


def main() -> None:
    """Print the tables of a measurement of this size."""
    parser = argparse.ArgumentParser(allow_abbrev=False, prog="python -m benchmarks.rows", description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS, metavar="N", help=f"of each arm (default {ROUNDS})")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="take each N-th model (default 1: all)")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="of torch (default 1: steadier)")
    parser.add_argument("--modes", nargs="+", default=["training", "inference"], choices=["training", "inference"])
    parser.add_argument("--arms", nargs="+", default=TRACED, choices=TRACED, help="beside the untraced one")
    parsed = parser.parse_args()
    tables = measure(
        modes=parsed.modes, traced=parsed.arms, rounds=parsed.rounds, threads=parsed.threads, every=parsed.every
    )
    for table in tables:
        print("\n" + table.text(), flush=True)


if __name__ == "__main__":
    from benchmarks import rows

    rows.main()
