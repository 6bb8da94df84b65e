"""Workers as processes of this machine, forked from a server that has torch loaded (about 1 s a worker, where a new
interpreter takes 8 s).

The server outlives the executor, so that a second sweep of the same process starts at once; it ends with that process.
A worker is disposable: it leads its own process group, leaves Ctrl-C to its parent, dies with it, even when that
is killed, and prints into its own log. Its row appears under its final name only when it is whole and on disk.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import json
import mmap
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing import connection
from pathlib import Path
from pkgutil import resolve_name
from typing import Never

import psutil

from hashbench.core.devices.visibility import WORKSPACE_VARIABLE, DeviceAssignment, workspace_config, workspace_conflict
from hashbench.core.diagnose.fresh_process import POOL_VARIABLE, SERVER_VARIABLE
from hashbench.core.errors import HashbenchError, bounded
from hashbench.core.io import open_file, replace_file
from hashbench.core.processes import (
    available_memory_mib,
    drafts_sent_to,
    end_family,
    exit_at_once,
    has_ended,
    phases_told_to,
    preserved_umask,
    wait_for_end,
    watched,
)
from hashbench.core.records import ModelSpec, Row, RunOptions
from hashbench.core.results.rows import row_to_json
from hashbench.core.sweep.executors import Resources, Task, TaskResult
from hashbench.core.workers import LOST, START_SECONDS, WORKERS, Fork, request_for

DEFAULT_PRELOAD = (
    "torch",
    "torch._dynamo",
    "torchvision",
    "hashbench.core.check.model",
    "hashbench.core.suites.torchvision",
    "hashbench.core.extensions:facts_kinds",  # of a row that a model without descriptors writes
)
"""What the server imports once, so that no worker pays for it. Importing these starts no OpenMP threads, which would
not survive the fork; running an op there would."""

NATIVE_PRELOAD = "hashbench.core.trace.native:load"
"""Loads the native tracer, which takes 0.2 s; last, when the ops of those modules are known."""

_SHARE_OF_MEMORY = 0.9
"""Of the memory that is available at the start: what workers may be expected to take together."""

_LAST_WAIT = 10.0
"""Seconds that a killed process gets to vanish; only one stuck in the kernel needs longer."""

_LOST_TEXT = "the fork server ended before it reported how the worker ended"

_ATTEMPTS = 3
"""How often a worker tries to import the target before it is believed that this is what ends the fork server."""

_POLL_SECONDS = 0.5
"""How often it is looked whether the server has forgotten a worker. A cancelled task of a cluster learns of it between
two system calls only."""

_REPORT_SECONDS = 10.0
"""How long the server may take to tell that a worker has ended."""


_PHASE_BYTES = 96

_TROUBLE_BYTES = 1024

_ROW_BYTES = 2**17
"""Twenty times what a long row has: its texts are cut."""


class _Shared(ctypes.Structure):
    """Memory that a worker and its parent share: nothing is left of it when both are gone, and neither ever waits.
    Writing to it takes no descriptor, and no limit on files applies: the model may have used up or changed these. All
    texts end in a null byte."""

    _fields_ = (
        ("phase", ctypes.c_char * _PHASE_BYTES),
        ("draft", ctypes.c_char * _ROW_BYTES),
        ("row", ctypes.c_char * _ROW_BYTES),
        ("trouble", ctypes.c_char * _TROUBLE_BYTES),
    )
    phase: bytes
    draft: bytes
    row: bytes
    trouble: bytes

    @classmethod
    def of(cls, report: int) -> _Shared:
        """Return the memory behind the descriptor."""
        return cls.from_buffer(mmap.mmap(report, ctypes.sizeof(cls)))


@dataclass(frozen=True, slots=True)
class _RunningWorker:
    task: Task
    fork: Fork
    watched: psutil.Process | None
    shared: _Shared
    started: float
    deadline: float


def preload_for(tracer: str, *others: str) -> tuple[str, ...]:
    """List what the server imports and calls for workers traced by ``tracer``; ``auto`` is native if available. What
    they do beside tracing needs ``others``."""
    native = () if tracer == "python" else (NATIVE_PRELOAD,)
    return (*DEFAULT_PRELOAD, *native, *others)


def _names(preload: Sequence[str]) -> tuple[str, ...]:
    """Return what the server of workers imports: this module, and what is asked for."""
    return __name__, *preload


def begin_server(preload: Sequence[str]) -> None:
    """Start the fork server without waiting for its imports."""
    WORKERS.begin(_names(preload))


def answer_of_a_fork(
    target: str, *arguments: str, environment: Mapping[str, str], preload: Sequence[str] = DEFAULT_PRELOAD
) -> str:
    """Call ``module:function`` in a fork of the server with this environment and return its text; empty if no server
    could fork, or the fork sent nothing. The fork may use a device, which the server never does."""
    request = request_for(f"{__name__}:_answer", target, arguments, dict(environment))
    with contextlib.suppress(HashbenchError), WORKERS.fork(request, preload=_names(preload)) as fork:
        fork.wait(START_SECONDS)
        return fork.text()
    return ""


class LocalExecutor:
    """Runs up to ``jobs`` workers at once, each a process of its own with its own process group.

    ``preload`` names the modules that the fork server imports, and functions (``module:function``) that it calls; what
    it cannot is left to the workers.
    ``devices`` are the accelerators that workers are given (:func:`hashbench.core.devices.visibility.assignments`).
    Neither this process nor the fork server ever asks for a device: a process that is forked from one in which CUDA has
    started cannot use it. ``memory_mib`` is what several workers may be expected to take together (by default most of
    what is free).
    """

    def __init__(
        self,
        *,
        jobs: int = 1,
        preload: Sequence[str] = DEFAULT_PRELOAD,
        devices: Sequence[DeviceAssignment] = (),
        memory_mib: float | None = None,
    ) -> None:
        self.capacity = jobs
        self._memory_mib = memory_mib
        self._devices = tuple(devices)
        self._preload = tuple(preload)
        self._running: list[_RunningWorker] = []
        self._silent_since: float | None = None

    @property
    def resources(self) -> Resources:
        """Cores, memory and accelerators of this machine. One worker at a time gets all cores and memory there are, and
        torch chooses its threads."""
        if self.capacity == 1:
            return Resources(devices=self._devices)
        slots = divided(cores(), workers=self.capacity)
        memory = _SHARE_OF_MEMORY * available_memory_mib() if self._memory_mib is None else self._memory_mib
        return Resources(threads=len(slots[0]), slots=slots, memory_mib=memory, devices=self._devices)

    def start(self, *, target: str) -> None:
        """Start the fork server, if it does not run yet, and let a first process import ``target``."""
        for _ in range(_ATTEMPTS):
            problem, is_lost = self._problem_with(target)
            if not is_lost:
                break
        if problem:
            raise HashbenchError(
                f"worker processes cannot import {target.partition(':')[0]}",
                consequence=f"{problem}; no model was run",
                tip="Check that torch and torchvision are installed and fit each other.",
            )

    def submit(self, task: Task) -> None:
        """Fork a worker for ``task``."""
        started = time.monotonic()
        asks = {name: os.environ[name] for name in (SERVER_VARIABLE, POOL_VARIABLE) if name in os.environ}
        request = request_for(f"{__name__}:_run_worker", task, asks)
        fork = WORKERS.fork(request, preload=_names(self._preload), report_bytes=ctypes.sizeof(_Shared))
        self._running.append(
            _RunningWorker(task, fork, watched(fork.pid), _Shared.of(fork.report), started, started + task.timeout)
        )

    def phase(self, key: str) -> str:
        """Return what the worker of a task has written into its shared memory."""
        phases = (running.shared.phase for running in tuple(self._running) if running.task.key == key)
        return next(phases, b"").decode(errors="replace")

    def wait(self) -> tuple[TaskResult, ...]:
        """Sleep until a worker ends or its time is up."""
        while self._running:
            nearest = min(running.deadline for running in self._running)
            forks = [running.fork.fileno() for running in self._running]
            seconds = min(_POLL_SECONDS, max(0.0, nearest - time.monotonic()))
            ready = connection.wait(forks, timeout=seconds)
            now = time.monotonic()
            self._replace_silent_server(heard=bool(ready), now=now)
            over = [r for r in self._running if r.fork.fileno() in ready or r.deadline <= now]
            if over:
                return tuple(self._reap(running, timed_out=running.fork.fileno() not in ready) for running in over)
        return ()

    def close(self) -> None:
        """Kill what still runs."""
        while self._running:
            self._reap(self._running[-1], timed_out=False)

    def _problem_with(self, target: str) -> tuple[str, bool]:
        """Return why a worker cannot import ``target`` (empty if it can), and whether the fork server was lost."""
        with WORKERS.fork(request_for(f"{__name__}:_probe", target), preload=_names(self._preload)) as fork:
            status = fork.wait(START_SECONDS)
            problem = fork.text()
        if status is None:
            return f"the import did not end within {START_SECONDS:g} s", False
        if status == LOST and not problem:
            return _LOST_TEXT, True
        return problem or (f"exit code {status}" if status else ""), False

    def _replace_silent_server(self, *, heard: bool, now: float) -> None:
        """Kill a server that has not told for a while that a worker ended: it is stopped, and nobody would ever know.
        The next worker gets another one."""
        if heard or not any(has_ended(running.watched) for running in self._running):
            self._silent_since = None
        elif self._silent_since is None:
            self._silent_since = now
        elif now - self._silent_since > _REPORT_SECONDS:
            WORKERS.end()

    def _reap(self, running: _RunningWorker, *, timed_out: bool) -> TaskResult:
        fork, shared = running.fork, running.shared
        timed_out = timed_out and not has_ended(running.watched)
        # What the server did not live to tell may still run.
        end_family(fork.pid, running=fork.wait(0.0) in (None, LOST) and not has_ended(running.watched))
        if fork.wait(0.0) is None and running.watched is not None:
            with contextlib.suppress(psutil.Error):
                running.watched.kill()  # a worker killed in its first instants has no group of its own yet
        if fork.wait(_LAST_WAIT) is None:
            WORKERS.end()
        if (status := fork.wait(_LAST_WAIT)) in (None, LOST):
            wait_for_end(running.watched, _LAST_WAIT)
        self._running.remove(running)
        ended = TaskResult(
            task=running.task,
            wall_seconds=time.monotonic() - running.started,
            exit_code=LOST if status is None else status,
            timed_out=timed_out,
            storage_error=shared.trouble.decode(errors="replace"),
            row=shared.row.decode(errors="replace"),
            draft=shared.draft.decode(errors="replace"),
            lost=_LOST_TEXT if status in (None, LOST) and not timed_out else "",
        )
        fork.close()
        return ended


# -------------------------------------------------------------------------------------------- in a worker


def _run_worker(task: Task, asks: Mapping[str, str], report: int) -> Never:
    """Run ``task`` in this process, a worker, and end it: with code 0 once its row is on disk or, where the model has
    left this process unable to write files, in the memory behind ``report``. ``asks`` names the servers of the fresh
    processes of this sweep: the fork server may be older than these.

    A log that cannot be written is told there as a text, and no model is run; an exception of the target ends up in the
    log, with exit code 1.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    share = functools.partial(_share, _Shared.of(report))
    try:
        _redirect_output(Path(task.log_path))
    except OSError as error:
        share("trouble", error.strerror or str(error))
        exit_at_once(1)
    for name in (SERVER_VARIABLE, POOL_VARIABLE):
        os.environ.pop(name, None)
    _set_variables({**task.variables, **asks})
    _keep_to(task.cpus)
    faulthandler.enable(file=2)
    # Shortly before the parent ends this process, the log gets the stack where it hangs.
    faulthandler.dump_traceback_later(max(0.9 * task.timeout, task.timeout - 2.0), file=2)
    phases, drafts = functools.partial(share, "phase"), functools.partial(share, "draft")
    with preserved_umask(), phases_told_to(phases), drafts_sent_to(drafts):
        row = load_target(task.target)(task.spec, task.options)
    try:
        replace_file(Path(task.row_path), json.dumps(row_to_json(row)), links=False)
    except OSError as error:
        unwritten = f"its worker could not write its row: {error.strerror or error}"
        row = replace(row, error="; ".join(filter(None, (row.error, unwritten))))
        share("row", json.dumps(row_to_json(row)))
    exit_at_once(0)


def _share(shared: _Shared, name: str, text: str) -> None:
    """Let the parent see a text; what is longer than its part of the memory is cut off."""
    setattr(shared, name, text.encode(errors="replace")[: getattr(_Shared, name).size - 1])


def _probe(target: str, report: int) -> Never:
    """Import ``target`` and report the error as a text, or an empty one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        load_target(target)
    except Exception as error:
        os.write(report, f"{type(error).__name__}: {bounded(str(error))}".encode(errors="replace"))
    exit_at_once()


def _answer(target: str, arguments: Sequence[str], environment: Mapping[str, str], report: int) -> Never:
    """Report what the target gives; what it and whatever it starts print goes nowhere."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for standard in (1, 2):
        os.dup2(nowhere, standard)
    os.environ.clear()
    os.environ.update(environment)
    with contextlib.suppress(Exception):  # who asks sees no answer
        os.write(report, resolve_name(target)(*arguments).encode())
    exit_at_once()


def load_target(target: str) -> Callable[[ModelSpec, RunOptions], Row]:
    """Import the function that ``module:function`` names. Raises whatever its import raises."""
    run_model: Callable[[ModelSpec, RunOptions], Row] = resolve_name(target)
    return run_model


def _redirect_output(log: Path) -> None:
    if log.is_file() and log.lstat().st_nlink > 1:  # another name of it, as in a backup by hard links
        log.unlink()
    descriptor = open_file(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    os.close(descriptor)
    # What was printed before a crash must not be lost in a buffer.
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def _set_variables(wanted: Mapping[str, str]) -> None:
    """Set what CUDA and cuBLAS read at start-up. The fork server has loaded torch, and started neither."""
    given = os.environ.get(WORKSPACE_VARIABLE)
    conflict = workspace_conflict(given)
    if conflict:
        print(f"hashbench: {conflict}")
    os.environ[WORKSPACE_VARIABLE] = workspace_config(given)
    os.environ.update(wanted)


def _keep_to(cpus: Sequence[int]) -> None:
    """Pin this process, its threads and children to ``cpus``. OpenMP and MKL counted the cores when the fork server
    loaded them and do not count again: the runner sets the number of threads."""
    if not cpus or not hasattr(os, "sched_setaffinity"):
        return
    try:
        os.sched_setaffinity(0, cpus)
    except OSError as error:  # taken away since the sweep looked
        print(f"hashbench: cannot keep to the cores {', '.join(map(str, cpus))} ({error.strerror})")


# ------------------------------------------------------------------------------------------------------ the cores


def cores() -> tuple[int, ...]:
    """List the logical cores that this process may use. Those that share a physical core, then those of one package,
    are adjacent, so that slices share as little as possible."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return tuple(sorted(allowed, key=_location))


def _location(core: int) -> tuple[int, int, int]:
    """Return package, physical core and number; only Linux knows the first two."""
    topology = Path(f"/sys/devices/system/cpu/cpu{core}/topology")
    try:
        package, physical = (int((topology / name).read_text()) for name in ("physical_package_id", "core_id"))
    except (OSError, ValueError):
        return 0, core, core
    return package, physical, core


def divided(cores: tuple[int, ...], *, workers: int) -> tuple[tuple[int, ...], ...]:
    """Split the cores among ``workers`` workers, the same number for each, since the number of threads is a condition
    of comparison. The remainder stays idle. With more workers than cores, workers share cores."""
    size = len(cores) // workers
    if not size:
        return tuple((cores[worker % len(cores)],) for worker in range(workers))
    return tuple(cores[worker * size : (worker + 1) * size] for worker in range(workers))
