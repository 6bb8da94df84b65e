"""What the kernel fingerprint of every model of a suite costs: seconds on the wall and bytes, each model in a worker of
its own, as ``hashbench fingerprint record`` runs it. ``python -m benchmarks.fingerprint_zoo`` runs it alone.

Loading the model is not counted; its stages stand beside one another.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.fingerprint import BYTES, SECONDS
from benchmarks.table import Table, against, machine
from hashbench.core.check.model import BenchmarkRunner
from hashbench.core.extensions import preload_to
from hashbench.core.records import ModelSpec, Row, RunOptions
from hashbench.core.suites import registry
from hashbench.core.sweep.executors import Task
from hashbench.core.sweep.executors.local import LocalExecutor, preload_for
from hashbench.extensions.fingerprint import check as fingerprint
from hashbench.extensions.fingerprint import document

LOADING, COLLECTING, RUNNING = "loading", "collecting", "running the kernels"


def measure(suite: str, mode: str, *, only: Sequence[str] = (), threads: int | None = None) -> list[Table]:
    """A row for each default model of a suite, or for each named one."""
    specs = [spec for spec in registry.catalog(suite) if (spec.name in only if only else spec.default)]
    specs = [spec for spec in specs if not spec.skip_reason(mode, device="cpu")]
    rows: list[tuple[object, ...]] = []
    seconds: list[float] = []
    sizes: list[float] = []
    with tempfile.TemporaryDirectory(prefix="hashbench-bench-") as folder:
        options = RunOptions(mode=mode, threads=threads, output=folder)
        executor = LocalExecutor(preload=(*preload_for("native", *preload_to("fingerprint")), __name__))
        executor.start(target=f"{__name__}:recorded")
        try:
            _one(executor, specs[0], options)  # files and pages that the first one reads
            for spec in specs:
                stages, kernels, nbytes, error = _one(executor, spec, options)
                if error:
                    rows.append((spec.name, *[""] * 8, error))
                    continue
                seconds.append(stages[COLLECTING] + stages[RUNNING])
                sizes.append(nbytes / 1000)
                cells = [f"{stages[name]:.2f}" for name in (LOADING, COLLECTING, RUNNING)]
                reached = against(seconds[-1], goal=SECONDS, unit=" s")
                rows.append((spec.name, kernels, *cells, *reached, f"{sizes[-1]:.0f}", ""))
        finally:
            executor.close()
    within = sum(value <= SECONDS for value in seconds)
    note = (
        f"Seconds on the wall: median {statistics.median(seconds):.2f}, largest {max(seconds):.1f}; {within} of "
        f"{len(rows)} models within {SECONDS:g} s. Files: at most {max(sizes):.0f} KB (goal: {BYTES // 1000})."
    )
    headers = ("model", "kernels", LOADING, COLLECTING, RUNNING, "both", "goal", "reached", "KB", "error")
    return [Table(f"Kernel fingerprints of {suite}, {mode}", headers, tuple(rows), (note,))]


def _one(executor: LocalExecutor, spec: ModelSpec, options: RunOptions) -> tuple[dict[str, float], int, int, str]:
    folder = Path(options.output)
    path, log = folder / "row.json", folder / "log"
    path.unlink(missing_ok=True)
    executor.submit(Task(spec.name, spec, options, f"{__name__}:recorded", str(path), str(log), 600, variables={}))
    (ended,) = executor.wait()
    if ended.exit_code:
        return {}, 0, 0, log.read_text()[-200:]
    told = json.loads((folder / "told.json").read_text())
    return told["stages"], told["kernels"], told["bytes"], told["error"]


def recorded(spec: ModelSpec, options: RunOptions) -> Row:
    """What a worker runs: :func:`~hashbench.extensions.fingerprint.check.record_model`, with its stages timed."""
    stages: Counter[str] = Counter()

    def timed(owner: Any, function: str, stage: str, less: str = "") -> Any:
        original = getattr(owner, function)

        def call(*args: Any, **kwargs: Any) -> Any:
            begin, before = time.perf_counter(), stages[less] if less else 0.0
            try:
                return original(*args, **kwargs)
            finally:
                stages[stage] += time.perf_counter() - begin - ((stages[less] if less else 0.0) - before)

        return mock.patch.object(owner, function, call)

    kept: list[document.Fingerprints] = []
    with (
        timed(BenchmarkRunner, "load_model", LOADING),
        timed(fingerprint, "_collected", COLLECTING, less=LOADING),
        timed(fingerprint, "measure", RUNNING),
        mock.patch.object(fingerprint.document, "write", lambda _, made: kept.append(made)),
    ):
        row = fingerprint.record_model(spec, options)
    told = {
        "stages": stages,
        "kernels": sum(len(model.kernels) for made in kept for model in made.models),
        "bytes": sum(len(gzip.compress(document.text_of(made).encode())) for made in kept),
        "error": row.error,
    }
    Path(options.output, "told.json").write_text(json.dumps(told), encoding="utf-8")
    return row


def main() -> None:
    """Print the table of each mode that is asked for."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, prog="python -m benchmarks.fingerprint_zoo", description=__doc__
    )
    parser.add_argument("--suite", default="torchvision")
    parser.add_argument("--modes", nargs="+", default=["training", "inference"], choices=["training", "inference"])
    parser.add_argument("--only", nargs="+", default=[], metavar="MODEL")
    parser.add_argument("--threads", type=int, metavar="N", help="of torch (default: its own choice)")
    parsed = parser.parse_args()
    print("\n".join(f"{name}: {value}" for name, value in machine().items()))
    for mode in parsed.modes:
        for table in measure(parsed.suite, mode, only=parsed.only, threads=parsed.threads):
            print("\n" + table.text(), flush=True)


if __name__ == "__main__":
    from benchmarks import fingerprint_zoo  # workers import it by this name

    fingerprint_zoo.main()
