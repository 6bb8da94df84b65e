"""What the tests of sweeps share: a sweep of stand-ins, here or in a process of its own, and looks at what it left."""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import sweep_targets
from sweep_targets import ran

from hashbench.core.records import RunOptions
from hashbench.core.results.rows import read_rows
from hashbench.core.sweep.executors.local import LocalExecutor
from hashbench.core.sweep.run import run_sweep

SCRIPT = Path(sweep_targets.__file__)


def sweep(specs, output, *, options=RunOptions(), environment=None, executor=None, **more):  # noqa: B008 – frozen
    """``run_sweep`` with the stand-ins and a fork server that starts at once."""
    workers = {name: more.pop(name) for name in ("jobs", "memory_mib") if name in more}
    return run_sweep(
        specs,
        options,
        output=output,
        environment={"key": "e1"} if environment is None else environment,
        executor=executor or LocalExecutor(preload=(), **workers),
        **{"target": "sweep_targets:run_model", **more},
    )


def names_in_csv(output: Path) -> list[str]:
    return [row.name for row in read_rows(output / "accuracy.csv")]


def wait_until(condition, *, seconds=120.0):
    """Return once ``condition()`` holds. The limit is for what never comes: a busy machine may take long."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    """Whether a process of this number is not over. A thread of another process may have got its number since."""
    try:
        return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def child_pids(output: Path) -> list[int]:
    return [int(pid) for pid in (output.parent / "children.txt").read_text().split()]


class OutOfTimeOnce(LocalExecutor):
    """The time of what runs is up as soon as ``condition()`` holds, however long that takes on this machine."""

    def __init__(self, condition, **arguments):
        super().__init__(preload=(), **arguments)
        self._condition = condition

    def wait(self):
        wait_until(self._condition)
        return tuple(self._reap(running, timed_out=True) for running in list(self._running))


class OwnTimes(LocalExecutor):
    """Models have the time limits that ``seconds`` says by name, so that those that are to end by themselves can."""

    def __init__(self, seconds, **arguments):
        super().__init__(preload=(), **arguments)
        self._seconds = seconds

    def submit(self, task):
        super().submit(replace(task, timeout=self._seconds.get(task.spec.name, task.timeout)))


class NoExecutor(LocalExecutor):
    def start(self, *, target):
        raise AssertionError(f"nothing has to run, yet workers for {target} were started")


def snapshot(folder: Path) -> dict[str, tuple[int, bytes]]:
    """All that lies in a folder but the bytecode that Python leaves beside what it imports."""
    return {
        str(path): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in sorted(folder.rglob("*"))
        if "__pycache__" not in path.parts
    }


@contextmanager
def sweep_process(*arguments: str | Path, script: Path = SCRIPT, stderr: int | None = subprocess.STDOUT):
    """A sweep in a process group of its own, as a shell would start it; by default its errors are part of what it
    prints."""
    process = subprocess.Popen(
        [sys.executable, script, *arguments], stdout=subprocess.PIPE, stderr=stderr, text=True, process_group=0
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def resume_process(output: Path, *arguments: str) -> None:
    done = subprocess.run([sys.executable, SCRIPT, output, "--resume", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def started(output: Path, count: int):
    """Whether ``count`` models have started."""
    return lambda: (output.parent / "ran.txt").exists() and len(ran(output)) >= count
