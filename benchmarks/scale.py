"""Many models, many rows: what the sweep and the comparison add when models cost nothing.

No model runs here. A stand-in executor takes the times that an earlier sweep recorded on a clock of its own, so that
ten thousand rows are scheduled, written and compared in seconds. ``python -m benchmarks.scale`` runs it alone.
"""

from __future__ import annotations

import heapq
import json
import random
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from benchmarks.table import Table, against
from hashbench.core.records import ModelSpec, Row, RowEvidence, RunOptions
from hashbench.core.report.compare import compare
from hashbench.core.report.text import as_text
from hashbench.core.results.load import load_sweep
from hashbench.core.results.rows import row_to_json
from hashbench.core.sweep.executors import Resources, Task, TaskResult
from hashbench.core.sweep.run import run_sweep
from hashbench.core.sweep.schedule import EarlierSweep, Job, Schedule, longest_first

ROWS = 10_000
GOAL_ROW_MS, GOAL_COMPARE_S = 1.0, 2.0
_WORKERS = 64
_BUDGET_MIB = 256 * 1024.0
_ENVIRONMENT = {"key": "0123456789ab", "schema": 1, "torch": "2.15", "cpu": "stand-in"}


class RecordedExecutor:
    """Ends each task after its recorded seconds, on a clock that jumps there. ``own`` and ``elapsed`` are the real
    seconds, of the processor and of the clock on the wall, that it took itself: a worker's, not the driver's."""

    def __init__(self, seconds: dict[str, float], *, differing: bool) -> None:
        self.capacity = _WORKERS
        self.resources = Resources(threads=1, memory_mib=_BUDGET_MIB)
        self.own = self.elapsed = 0.0
        self.clock = 0.0
        self._seconds = seconds
        self._differing = differing
        self._running: list[tuple[float, int, Task]] = []
        self._count = 0

    def start(self, *, target: str) -> None:
        """Nothing to get ready."""

    def submit(self, task: Task) -> None:
        """The task ends when its time has come."""
        self._count += 1
        heapq.heappush(self._running, (self.clock + self._seconds[task.spec.name], self._count, task))

    def wait(self) -> tuple[TaskResult, ...]:
        """The next task to end, with its row."""
        if not self._running:
            return ()
        own, elapsed = time.process_time(), time.perf_counter()
        self.clock, _, task = heapq.heappop(self._running)
        Path(task.row_path).write_text(json.dumps(row_to_json(self._row(task))), encoding="utf-8")
        self.own += time.process_time() - own
        self.elapsed += time.perf_counter() - elapsed
        return (TaskResult(task=task, wall_seconds=self._seconds[task.spec.name], exit_code=0),)

    def phase(self, key: str) -> str:  # noqa: ARG002
        """Nothing to tell."""
        return ""

    def close(self) -> None:
        """Nothing to end."""

    def _row(self, task: Task) -> Row:
        row = Row(
            dev="cpu",
            name=task.spec.name,
            batch_size=4,
            accuracy="pass",
            suite=task.spec.suite,
            mode="training",
            dtype="float32",
            iterations=2,
            runs=2,
            threads=1,
            deterministic="on",
            ops=1234,
            distinct=1,
            trials=1,
            rate=0.0,
            rate_of="runs",
            seconds=self._seconds[task.spec.name],
            peak_memory_mib=1234.5,
        )
        if not self._differing or self._count % 10:
            return row
        return _differing_row(row)


def _differing_row(row: Row) -> Row:
    """Every tenth row has a diagnosis, which is what makes a CSV large."""
    return replace(
        row,
        accuracy="eager_two_runs_differ",
        origin="kernel",
        kernel="aten.index_put.default",
        op_index=17,
        phase="backward",
        module="layers.3.attention",
        detail="the outputs differ: " + "0123456789abcdef " * 8,
        cause="accumulation_order",
        confidence="proven",
        because="In 20 of 20 repetitions with one thread the outcome is the same. " * 3,
        evidence=RowEvidence("; ".join(f"call/arm_{number} {number}/20" for number in range(20))),
        advice="Use torch.use_deterministic_algorithms(True), or sum in a fixed order. " * 2,
    )


def _models(generator: random.Random) -> tuple[list[ModelSpec], dict[str, float], EarlierSweep]:
    specs = [ModelSpec(suite="simulated", name=f"model_{number:05}", batch_size=4) for number in range(ROWS)]
    seconds = {spec.name: round(generator.lognormvariate(3.0, 1.0), 3) for spec in specs}
    memory = {(spec.suite, spec.name): generator.lognormvariate(7.5, 0.8) for spec in specs}
    known = {("simulated", name): value for name, value in seconds.items()}
    return specs, seconds, EarlierSweep("simulated", known, memory)


def _quick_place() -> str | None:
    """A folder in memory, where there is one."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def measure() -> list[Table]:
    """Ten thousand rows: the driver's time for each, the plan it makes, and the comparison of two such sweeps."""
    specs, seconds, earlier = _models(random.Random(0))
    with tempfile.TemporaryDirectory(prefix="hashbench-bench-", dir=_quick_place()) as folder:
        own, _ = _sweep(Path(folder) / "base", specs, earlier, RecordedExecutor(seconds, differing=True))
        _sweep(Path(folder) / "new", specs, earlier, RecordedExecutor(seconds, differing=False))
        compared = [_compared(Path(folder) / "base", Path(folder) / "new") for _ in range(3)]
    with tempfile.TemporaryDirectory(prefix="hashbench-bench-") as folder:
        executor = RecordedExecutor(seconds, differing=True)
        _, on_disk = _sweep(Path(folder) / "disk", specs[: ROWS // 20], earlier, executor)
    decided, makespan, by_name = _decisions(specs, earlier)
    least = max(sum(seconds.values()) / _WORKERS, max(seconds.values()))
    compare_own, compare_elapsed = (statistics.median(times) for times in zip(*compared, strict=True))
    return [
        Table(
            title=f"A sweep of {ROWS} models that cost nothing",
            headers=("what", "figure", "goal", "reached"),
            rows=(
                ("deciding who starts: processor time a row", *against(decided, goal=GOAL_ROW_MS, unit=" ms")),
                (
                    "all of the driver, files in memory: processor time a row",
                    *against(own, goal=GOAL_ROW_MS, unit=" ms"),
                ),
                ("all of the driver, each file synced to this disk: elapsed a row", f"{on_disk:.3g} ms", "", ""),
                ("`compare` of two: processor time", *against(compare_own, goal=GOAL_COMPARE_S, unit=" s")),
                ("`compare` of two: elapsed", f"{compare_elapsed:.3g} s", "", ""),
            ),
            notes=(
                f"Simulated: {_WORKERS} workers, {_BUDGET_MIB / 1024:.0f} GiB, lognormal times and peaks. All done "
                f"after {makespan / 3600:.2f} h longest first, {by_name / 3600:.2f} h by name; no order takes less "
                f"than {least / 3600:.2f} h. The driver writes each row, with its overhead and environment, to a file "
                "of its own and appends it to the CSV, both synced before the next: the third line is the disk's.",
            ),
        )
    ]


def _sweep(
    output: Path, specs: list[ModelSpec], earlier: EarlierSweep, executor: RecordedExecutor
) -> tuple[float, float]:
    """Milliseconds of the driver for each row: of its processor, and elapsed."""
    own, elapsed = time.process_time(), time.perf_counter()
    run_sweep(
        specs,
        RunOptions(mode="training"),
        output=output,
        environment=_ENVIRONMENT,
        executor=executor,
        earlier=earlier,
    )
    own, elapsed = time.process_time() - own, time.perf_counter() - elapsed
    return (own - executor.own) / len(specs) * 1000, (elapsed - executor.elapsed) / len(specs) * 1000


def _compared(base: Path, new: Path) -> tuple[float, float]:
    """Seconds for ``hashbench compare``, without the start of Python: of the processor, and elapsed."""
    own, elapsed = time.process_time(), time.perf_counter()
    as_text(compare(load_sweep(base), load_sweep(new)))
    return time.process_time() - own, time.perf_counter() - elapsed


def _decisions(specs: list[ModelSpec], earlier: EarlierSweep) -> tuple[float, float, float]:
    """Milliseconds of the schedule for each job, and the simulated seconds to the end: longest first, and by name."""
    jobs = [
        earlier.job(spec.name, (spec.suite, spec.name), parameters=None, mode="training", device="cpu")
        for spec in specs
    ]
    began = time.process_time()
    makespan = _simulated(longest_first(jobs))
    decided = (time.process_time() - began) / len(jobs) * 1000
    return decided, makespan, _simulated(jobs)


def _simulated(jobs: list[Job]) -> float:
    schedule = Schedule(jobs, memory_mib=_BUDGET_MIB, workers=_WORKERS)
    clock = 0.0
    running: list[tuple[float, str]] = []
    while schedule.unfinished:
        while (start := schedule.next(capacity=_WORKERS)) is not None:
            heapq.heappush(running, (clock + (start.job.seconds or 0.0), start.job.key))
        clock, key = heapq.heappop(running)
        schedule.end(key)
    return clock


if __name__ == "__main__":
    for table in measure():
        print(table.text())
