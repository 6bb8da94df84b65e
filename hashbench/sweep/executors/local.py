"""Workers as processes of this machine, forked from a server that has torch loaded (about 1 s a worker, where a new
interpreter takes 8 s).

The server outlives the executor, so that a second sweep of the same process starts at once; it ends with that process.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import connection, forkserver, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import psutil

from hashbench.devices.visibility import DeviceAssignment
from hashbench.errors import HashbenchError
from hashbench.processes import end_family, variables
from hashbench.sweep import worker
from hashbench.sweep.executors import Resources, Task, TaskResult

DEFAULT_PRELOAD = ("torch", "torch._dynamo", "torchvision", "hashbench.check.model", "hashbench.suites.torchvision")
"""What the server imports once, so that no worker pays for it. Importing these starts no OpenMP threads, which would
not survive the fork; running an op there would."""

WORKER_VARIABLES: Mapping[str, str] = types.MappingProxyType({"OMP_WAIT_POLICY": "PASSIVE"})
"""What the server has in its environment unless the caller set it. OpenMP threads that wait sleep instead of spinning:
on a machine that also does something else that is several times faster. It does not change what is computed."""

SHARE_OF_MEMORY = 0.9
"""Of the memory that is available at the start: what workers may be expected to take together."""

LAST_WAIT = 10.0
"""Seconds that a killed process gets to vanish; only one stuck in the kernel needs longer."""

_MIB = 2**20
_CONTROL_GROUPS = (
    # (limit, use, what counts as used but is given back when asked for), of version 2 and of version 1
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current", "inactive_file"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        "total_inactive_file",
    ),
)
_preloaded: tuple[str, ...] | None = None
"""What the server that runs has imported."""


@dataclass(frozen=True, slots=True)
class _Running:
    task: Task
    process: ForkServerProcess
    reports: Connection
    started: float

    @property
    def deadline(self) -> float:
        return self.started + self.task.timeout


class LocalExecutor:
    """Runs up to ``jobs`` workers at once, each a process of its own with its own process group.

    ``preload`` names the modules that the fork server imports; one that it cannot import is left to the workers.
    ``devices`` are the accelerators that workers are given (:func:`hashbench.devices.visibility.assignments`). Neither
    this process nor the fork server ever asks for a device: a process that is forked from one in which CUDA has started
    cannot use it.
    """

    def __init__(
        self, *, jobs: int = 1, preload: Sequence[str] = DEFAULT_PRELOAD, devices: Sequence[DeviceAssignment] = ()
    ) -> None:
        self.capacity = jobs
        self._devices = tuple(devices)
        self._preload = tuple(preload)
        self._context = multiprocessing.get_context("forkserver")
        self._running: list[_Running] = []

    @property
    def resources(self) -> Resources:
        """Cores, memory and accelerators of this machine. One worker at a time gets all cores and memory there are, and
        torch chooses its threads."""
        if self.capacity == 1:
            return Resources(devices=self._devices)
        slots = divided(cores(), workers=self.capacity)
        memory = SHARE_OF_MEMORY * available_memory_mib()
        return Resources(threads=len(slots[0]), slots=slots, memory_mib=memory, devices=self._devices)

    def start(self, *, target: str) -> None:
        """Start the fork server, if it does not run yet, and let a first process import ``target``."""
        try:
            _start_server(self._preload)
            process, reports = self._spawn(worker.probe, target)
        except (OSError, EOFError) as error:
            raise _no_workers(error) from error
        try:
            connection.wait([reports, process.sentinel])
            problem = _last_report(reports)
            process.join()
        finally:
            process.kill()
        if problem or process.exitcode:
            raise HashbenchError(
                f"worker processes cannot import {target.partition(':')[0]}",
                consequence=f"{problem or f'exit code {process.exitcode}'}; no model was run",
                tip="Check that torch and torchvision are installed and fit each other.",
            )

    def submit(self, task: Task) -> None:
        """Fork a worker for ``task``."""
        started = time.monotonic()
        try:
            process, reports = self._spawn(worker.run, task)
        except (OSError, EOFError) as error:
            raise _no_workers(error) from error
        self._running.append(_Running(task=task, process=process, reports=reports, started=started))

    def wait(self) -> tuple[TaskResult, ...]:
        """Sleep until a worker ends or its time is up."""
        while self._running:
            nearest = min(running.deadline for running in self._running)
            ends = [running.process.sentinel for running in self._running]
            ready = connection.wait(ends, timeout=max(0.0, nearest - time.monotonic()))
            now = time.monotonic()
            over = [r for r in self._running if r.process.sentinel in ready or r.deadline <= now]
            if over:
                return tuple(self._reap(running, timed_out=running.process.sentinel not in ready) for running in over)
        return ()

    def close(self) -> None:
        """Kill what still runs."""
        while self._running:
            self._reap(self._running[-1], timed_out=False)

    def _spawn(self, function: Callable[..., Any], argument: object) -> tuple[ForkServerProcess, Connection]:
        receiver, sender = self._context.Pipe(duplex=False)
        # Not a daemon: those may not have children, and data loaders do.
        process = self._context.Process(target=function, args=(argument, sender), daemon=False)
        try:
            with _without_main_module():
                process.start()
        finally:
            sender.close()
        return process, receiver

    def _reap(self, running: _Running, *, timed_out: bool) -> TaskResult:
        process = running.process
        assert process.pid is not None
        end_family(process.pid, running=process.exitcode is None)
        if process.exitcode is None:
            process.kill()  # a worker killed in its first instants has no group of its own yet
            process.join(LAST_WAIT)
        self._running.remove(running)
        ended = TaskResult(
            task=running.task,
            wall_seconds=time.monotonic() - running.started,
            exit_code=-signal.SIGKILL if process.exitcode is None else process.exitcode,
            timed_out=timed_out,
            storage_error=_last_report(running.reports),
        )
        running.reports.close()
        return ended


def _no_workers(error: Exception) -> HashbenchError:
    return HashbenchError(
        "cannot start a worker process",
        consequence=f"its fork server failed ({type(error).__name__}: {error})",
        tip="See the messages above it; if memory is short, use fewer --jobs. Rows that are written can be resumed.",
    )


def _start_server(preload: tuple[str, ...]) -> None:
    global _preloaded
    server: Any = forkserver._forkserver
    if _preloaded != preload:
        server._stop()  # does nothing where none runs; a running one cannot preload anything more
    _preloaded = preload
    forkserver.set_forkserver_preload([worker.__name__])
    resource_tracker.ensure_running()  # first, because it unblocks SIGINT
    # OpenMP reads its variables once, when torch is loaded: the server must be born with them.
    kept = {**WORKER_VARIABLES, **_caller_path()}
    asked = {worker.PRELOAD_VARIABLE: " ".join(preload)}
    with _interrupt_blocked(), variables(kept, unless_set=True), variables(asked):
        forkserver.ensure_running()


@contextlib.contextmanager
def _interrupt_blocked() -> Iterator[None]:
    """What is started here inherits the mask: Ctrl-C during the preload is for the parent alone."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _caller_path() -> dict[str, str]:
    """What keeps the current folder out of the server's module path unless it is in the caller's: the server is a
    ``python -c``, which would import ``torch`` from a checkout of PyTorch that the user happens to stand in."""
    in_path = {"", ".", str(Path.cwd())} & set(sys.path)
    return {} if in_path else {"PYTHONSAFEPATH": worker.SAFE_PATH_MARK}


@contextlib.contextmanager
def _without_main_module() -> Iterator[None]:
    """Hide the caller's main module: multiprocessing would run that script again in every worker."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _last_report(reports: Connection) -> str:
    """What a worker sent before it ended; empty when it sent nothing."""
    try:
        return reports.recv_bytes().decode() if reports.poll() else ""
    except (EOFError, OSError):
        return ""


# ------------------------------------------------------------------------------------------- cores and memory


def cores() -> tuple[int, ...]:
    """The numbers of the logical cores that this process may use. Those that share a physical core, then those of one
    package, stand beside each other, so that a slice of them has as little as possible in common with the rest."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return tuple(sorted(allowed, key=_location))


def _location(core: int) -> tuple[int, int, int]:
    """Package, physical core, number; Linux alone tells the first two."""
    topology = Path(f"/sys/devices/system/cpu/cpu{core}/topology")
    try:
        package, physical = (int((topology / name).read_text()) for name in ("physical_package_id", "core_id"))
    except (OSError, ValueError):
        return 0, core, core
    return package, physical, core


def divided(cores: tuple[int, ...], *, workers: int) -> tuple[tuple[int, ...], ...]:
    """The cores of each of ``workers`` workers: as many for each, since the number of threads is a condition under
    which results are compared. What is left over stays free. With more workers than cores, they share."""
    size = len(cores) // workers
    if not size:
        return tuple((cores[worker % len(cores)],) for worker in range(workers))
    return tuple(cores[worker * size : (worker + 1) * size] for worker in range(workers))


def available_memory_mib() -> float:
    """Memory that new processes can take without making the system swap, in MiB: psutil's ``available``, or what the
    control group of a container leaves, if that is less."""
    left = [float(psutil.virtual_memory().available), *_left_in_groups()]
    return max(0.0, min(left)) / _MIB


def _left_in_groups() -> list[float]:
    left = []
    for limit_file, use_file, cached in _CONTROL_GROUPS:
        try:
            limit, use = int(Path(limit_file).read_text()), int(Path(use_file).read_text())  # "max": there is none
            statistics = dict(line.split() for line in Path(use_file).with_name("memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            continue
        left.append(float(limit - use + int(statistics.get(cached, 0))))
    return left
