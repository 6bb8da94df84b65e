"""What a sweep adds to the models in it: processes, folders, files; everything but a model's own load and runs."""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

from benchmarks.table import Table, against
from hashbench.core.records import RunOptions
from hashbench.core.suites import registry
from hashbench.core.sweep.executors.local import LocalExecutor
from hashbench.core.sweep.run import run_sweep

GOAL = 1.5
_MODELS = ("resnet18", "mobilenet_v3_small", "squeezenet1_1", "shufflenet_v2_x0_5", "mnasnet0_5", "resnet34")


def measure() -> list[Table]:
    """The column ``overhead_seconds`` of a small sweep, and its whole time with the start of the fork server."""
    specs = [spec for spec in registry.catalog("torchvision") if spec.name in _MODELS]
    with tempfile.TemporaryDirectory(prefix="hashbench-bench-") as folder:
        begin = time.perf_counter()
        found = run_sweep(
            specs,
            RunOptions(mode="inference", batch_size=1),
            output=Path(folder) / "sweep",
            environment={},
            executor=LocalExecutor(),
        )
        whole = time.perf_counter() - begin
    overheads = [row.overhead_seconds for row in found.rows if row.overhead_seconds is not None]
    own = sum(row.seconds or 0.0 for row in found.rows)
    median, largest = statistics.median(overheads), max(overheads)
    return [
        Table(
            title="Overhead of a sweep, seconds a model",
            headers=("what", "figure", "goal", "reached"),
            rows=(
                ("process of a model, median", *against(median, goal=GOAL, unit=" s")),
                ("process of a model, largest (the first waits for the preload)", f"{largest:.3g} s", "", ""),
                ("whole sweep, everything included", *against((whole - own) / len(specs), goal=GOAL, unit=" s")),
            ),
            notes=(
                f"{len(found.rows)} models in inference, {whole:.1f} s, of which {own:.1f} s were their own. Statuses: "
                + ", ".join(sorted({row.accuracy for row in found.rows}))
                + ".",
            ),
        )
    ]
