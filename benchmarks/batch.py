"""What ``sweep --batch-invariant`` costs: seconds of a row beside those of a plain row of the same model and batch, and
of the forward passes in it.

Each row is made by a worker of its own, as in a sweep. What is counted is CPU time, of
all threads. ``python -m benchmarks.batch`` runs it alone. A row whose model differs has a repro, which is run once
in a fork of a Python that has loaded torch for all rows; the fork is in the row, too.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path

from benchmarks.rows import CONSTRUCT, NATIVE, PROCESS, RUN_1, RUN_2, UNTRACED, Measured, Rows
from benchmarks.table import Table, against
from hashbench.core.diagnose.fresh_process import TORCH_ALONE, served
from hashbench.core.records import BATCH_INVARIANCE, ModelSpec, RunOptions
from hashbench.core.suites import registry
from hashbench.core.sweep.executors.local import LocalExecutor, preload_for
from hashbench.core.workers import WORKER_VARIABLES

GOAL, ROUNDS = 3.0, 3
MODELS = {
    "torchvision": ("vit_b_16", "regnet_y_400mf", "mobilenet_v3_small", "shufflenet_v2_x1_0", "resnet18"),
    "huggingface_tiny": ("BertForMaskedLM", "T5ForConditionalGeneration", "DetrForObjectDetection"),
}


def measure(*, rounds: int = ROUNDS, threads: int = 1) -> Table:
    """The rows of each of ``MODELS`` in both modes, and the untraced runs of a plain one."""
    chosen = [
        (spec, suite) for suite, names in MODELS.items() for spec in registry.catalog(suite) if spec.name in names
    ]
    rows: list[tuple[object, ...]] = []
    ratios = []
    with (
        tempfile.TemporaryDirectory(prefix="hashbench-bench-") as folder,
        served(TORCH_ALONE, environment=WORKER_VARIABLES, at_once=False),
    ):
        executor = LocalExecutor(preload=(*preload_for(NATIVE), "benchmarks.rows"))
        executor.start(target="benchmarks.rows:measured_row")
        try:
            for spec, suite in chosen:
                forward, plain, batch, row = _measured(executor, Path(folder, suite, spec.name), spec, rounds, threads)
                ratios.append(batch / plain)
                cells = (f"{forward:.2f} s", f"{plain:.2f} s", f"{batch:.2f} s", f"{batch / plain:.2f}")
                own = row.cpu - row.stages[PROCESS] - row.stages[CONSTRUCT]
                rows.append((spec.name, row.ops, *cells, f"{own / forward:.2f}", row.accuracy))
        finally:
            executor.close()
    goal = ", ".join(against(statistics.median(ratios), goal=GOAL))
    return Table(
        title="A row of batch invariance: CPU time over that of a plain row of the same batch",
        headers=("model", "ops", "two forwards", "plain row", "batch row", "ratio", "checks / forwards", "status"),
        rows=tuple(rows),
        notes=(
            f"Medians of {rounds} rounds, {threads} thread(s). Median ratio, and goal: {goal}.",
            "checks / forwards: the batch row without its process and the building of its model.",
        ),
    )


def _measured(
    executor: LocalExecutor, folder: Path, spec: ModelSpec, rounds: int, threads: int
) -> tuple[float, float, float, Measured]:
    batched = RunOptions(mode=BATCH_INVARIANCE, threads=threads)
    alike = replace(batched, mode="inference", batch_size=batched.batch_size_of(spec))
    folders = (folder / "plain", folder / "batch")
    for one in folders:
        one.mkdir(parents=True)
    of_pair, of_batches = (Rows(executor, at, mode) for at, mode in zip(folders, (alike, batched), strict=True))
    of_batches.one(spec, NATIVE)  # files that the first worker reads
    untraced, plain, batch = (
        [rows.one(spec, arm) for _ in range(rounds)]
        for rows, arm in ((of_pair, UNTRACED), (of_pair, NATIVE), (of_batches, NATIVE))
    )
    forward = statistics.median(one.stages[RUN_1] + one.stages[RUN_2] for one in untraced)
    middle = sorted(batch, key=lambda one: one.cpu)[rounds // 2]
    return forward, statistics.median(one.cpu for one in plain), middle.cpu, middle


def main() -> None:
    """Print the table of a measurement of this size."""
    parser = argparse.ArgumentParser(allow_abbrev=False, prog="python -m benchmarks.batch", description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS, metavar="N", help=f"of each row (default {ROUNDS})")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="of torch (default 1: steadier)")
    parsed = parser.parse_args()
    print(measure(rounds=parsed.rounds, threads=parsed.threads).text())


if __name__ == "__main__":
    main()
