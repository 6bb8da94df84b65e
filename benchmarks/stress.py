"""What ``--stress`` adds to a row of a sweep: its seconds over those of the plain row, and where they go.

Each row is made by a worker of its own, forked from a server that has torch loaded, as in a sweep; the fresh processes
are forks of one Python. Models and arms take turns. Beside seconds on the wall, which other processes disturb, stands
CPU time of all processes; the perturbation ``load`` keeps every core busy, which counts there in full.
``python -m benchmarks.stress`` runs it.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import psutil

from benchmarks.table import Table, against
from hashbench.core.check import model, pair
from hashbench.core.diagnose import fresh_process
from hashbench.core.records import ModelSpec, Row, RunOptions
from hashbench.core.suites import registry
from hashbench.core.sweep.executors import Task
from hashbench.core.sweep.executors.local import LocalExecutor, preload_for
from hashbench.core.workers import WORKER_VARIABLES
from hashbench.extensions.stress import perturbed

GOAL = 2.5
ROUNDS = 3
MODELS: Mapping[str, Sequence[str]] = {
    "torchvision": ("resnet18", "mobilenet_v3_small", "squeezenet1_1", "googlenet"),
    "huggingface_tiny": ("BertForMaskedLM", "DistillGPT2", "T5Small"),
}
"""Those of one run, by suite."""

_STAGES = "stress_stages.json"


@dataclass(frozen=True, slots=True)
class Measured:
    """One row: its seconds on the wall, CPU seconds of all processes, its seconds by stage, and what it says."""

    wall: float
    cpu: float
    stages: Mapping[str, float]
    row: Mapping[str, Any]


def measure(models: Mapping[str, Sequence[str]], *, modes: Sequence[str], rounds: int, threads: int) -> list[Table]:
    """The tables of each mode."""
    specs = [spec for suite, names in models.items() for spec in registry.catalog(suite) if spec.name in names]
    preload = (*preload_for("native"), __name__)
    tables = []
    with (
        tempfile.TemporaryDirectory(prefix="hashbench-bench-") as folder,
        fresh_process.served(preload=preload, environment=WORKER_VARIABLES),
    ):
        Path(folder, "rows").mkdir()
        executor = LocalExecutor(preload=preload)
        executor.start(target=f"{__name__}:measured_row")
        try:
            for mode in modes:
                options = RunOptions(mode=mode, threads=threads or None, output=folder)
                found: dict[str, list[tuple[Measured, Measured]]] = defaultdict(list)
                _row(executor, specs[0], replace(options, stress=True))  # files that the first worker reads
                for _, spec in itertools.product(range(rounds), specs):
                    plain, stressed = (
                        _row(executor, spec, replace(options, stress=stress)) for stress in (False, True)
                    )
                    found[spec.name].append((plain, stressed))
                tables += [_ratios(found, mode, rounds), _stages(found, mode)]
        finally:
            executor.close()
    return tables


def _row(executor: LocalExecutor, spec: ModelSpec, options: RunOptions) -> Measured:
    folder = Path(options.output)
    path, log, stages = folder / "rows" / "row.json", folder / "log", folder / _STAGES
    path.unlink(missing_ok=True)
    before = _cpu_seconds()
    executor.submit(Task(spec.name, spec, options, f"{__name__}:measured_row", str(path), str(log), 600))
    (ended,) = executor.wait()
    if ended.exit_code:
        raise RuntimeError(f"{spec.name}: exit code {ended.exit_code}\n{log.read_text()}")
    row = json.loads(path.read_text())
    return Measured(row["seconds"], _cpu_seconds() - before, json.loads(stages.read_text()), row)


def _cpu_seconds() -> float:
    children = psutil.Process().children(recursive=True)
    return sum(sum(child.cpu_times()[:4]) for child in children)


# ------------------------------------------------------------------------------------------------------- the tables


def _ratios(found: Mapping[str, Sequence[tuple[Measured, Measured]]], mode: str, rounds: int) -> Table:
    rows: list[tuple[object, ...]] = []
    ratios: list[tuple[float, float]] = []
    for name, pairs in found.items():
        wall = statistics.median(stressed.wall / plain.wall for plain, stressed in pairs)
        cpu = statistics.median(stressed.cpu / plain.cpu for plain, stressed in pairs)
        ratios.append((wall, cpu))
        plain_wall = statistics.median(plain.wall for plain, _ in pairs)
        last = pairs[-1][1].row
        said = f"{last.get('latent') or last['accuracy']}: {last.get('stressed', '')}"
        rows.append((name, f"{plain_wall:.2f} s", f"{wall:.2f}", f"{cpu:.2f}", said))
    walls, cpus = zip(*ratios, strict=True)
    rows.append(("median", "", f"{statistics.median(walls):.2f}", f"{statistics.median(cpus):.2f}", ""))
    goal = ", ".join(against(statistics.median(walls), goal=GOAL))
    return Table(
        title=f"A row under --stress over the plain row, {mode}",
        headers=("model", "plain", "wall", "CPU", "the stressed row"),
        rows=tuple(rows),
        notes=(f"Medians of {rounds} rounds. Wall, median of the models: {goal}.",),
    )


def _stages(found: Mapping[str, Sequence[tuple[Measured, Measured]]], mode: str) -> Table:
    """Where the seconds of stressed rows go, as multiples of the plain row: medians of each model, then of all."""
    names = list(dict.fromkeys(name for pairs in found.values() for _, stressed in pairs for name in stressed.stages))

    def share(pairs: Sequence[tuple[Measured, Measured]], name: str) -> float:
        return statistics.median(stressed.stages.get(name, 0.0) / plain.wall for plain, stressed in pairs)

    rows = [
        (name, f"{statistics.median(of):.2f}", f"{max(of):.2f}")
        for name in names
        for of in [[share(pairs, name) for pairs in found.values()]]
    ]
    return Table(
        title=f"Where the seconds of stressed rows go, {mode}: multiples of the plain row",
        headers=("stage", "median", "largest"),
        rows=tuple(rows),
    )


# -------------------------------------------------------------------------------------------------- in the workers


def measured_row(spec: ModelSpec, options: RunOptions) -> Row:
    """The row of a sweep; its stages are written beside it."""
    seconds: dict[str, float] = defaultdict(float)

    def timed(owner: Any, function: str, name: str) -> Any:
        original = getattr(owner, function)

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                took = time.perf_counter() - begin
                seconds[name(args[0]) if callable(name) else name] += took

        return mock.patch.object(owner, function, call)

    def provoked(run: perturbed.StressedAttempt) -> str:
        return f"run of {', '.join(run.names)}; variation {(run.variations[0])}"

    with (
        timed(registry, "load", "load"),
        timed(pair.PairCheck, "repeat", "plain pair"),
        timed(perturbed.StressedAttempt, "__call__", provoked),
        timed(perturbed.StressedRuns, "_waited", "waiting for the fresh process"),
        timed(perturbed, "differ", "compare"),
    ):
        row = model.run_model(spec, options)
    Path(options.output, _STAGES).write_text(json.dumps(seconds))
    return row


def main() -> None:
    """Print the tables of a measurement of this size."""
    parser = argparse.ArgumentParser(allow_abbrev=False, prog="python -m benchmarks.stress", description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS, metavar="N", help=f"of each model (default {ROUNDS})")
    parser.add_argument("--modes", nargs="+", default=["training", "inference"], choices=["training", "inference"])
    parser.add_argument("--threads", type=int, default=0, metavar="N", help="of torch (default: torch's own)")
    parser.add_argument("--only", nargs="+", default=(), metavar="M", help="of the models")
    parsed = parser.parse_args()
    models = {suite: [name for name in names if name in (parsed.only or names)] for suite, names in MODELS.items()}
    for table in measure(models, modes=parsed.modes, rounds=parsed.rounds, threads=parsed.threads):
        print("\n" + table.text(), flush=True)


if __name__ == "__main__":
    from benchmarks import stress as this

    this.main()
