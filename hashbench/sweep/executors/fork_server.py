"""The fork server of this process: started, asked for workers within a time limit, and replaced when it is dead or
stopped.

It is multiprocessing's own, whose waits have no limit: whoever waits for a server that is killed gets an exception, so
one that does not answer is killed. How a worker ended is known only from its parent, which is the server: where that
ended first, the exit code of the worker is :data:`LOST`.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import connection, forkserver, popen_forkserver, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from multiprocessing.process import BaseProcess
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import psutil

from hashbench.errors import HashbenchError, named_line
from hashbench.processes import variables

LOST = 1 << 16
"""Instead of the exit code of a worker whose end the server did not live to tell; no process ends with such a code."""

START_SECONDS = 600.0
"""How long a new server may import what it is to have, or a worker its target."""

FORK_SECONDS = 60.0
"""How long a server that has answered before may take to fork."""

_ATTEMPTS = 3
"""Servers that are started, one after the other, until one forks."""

_POLL_SECONDS = 0.01
_LAST_WAIT = 10.0

WORKER_VARIABLES: Mapping[str, str] = types.MappingProxyType({"OMP_WAIT_POLICY": "PASSIVE"})
"""What the server has in its environment unless the caller set it. OpenMP threads that wait sleep instead of spinning:
on a machine that also does something else that is several times faster. It does not change what is computed."""

SAFE_PATH_MARK = "hashbench"
"""Value of ``PYTHONSAFEPATH`` in a fork server whose parent had not set it; the worker removes it again."""

PRELOAD_VARIABLE = "HASHBENCH_PRELOAD"
"""Names in the environment of a new fork server what it imports; neither its parent nor its workers have it."""

_WORKERS = "hashbench.sweep.executors.local"
"""What the server imports first, and what then imports the rest."""

_preloaded: tuple[str, ...] | None = None
"""What the server that runs has imported."""

_answered: int | None = None
"""The process id of the last server that has forked a worker."""


class _Popen(popen_forkserver.Popen):
    def poll(self, flag: int = os.WNOHANG) -> int | None:
        """Override: :data:`LOST` instead of 255, which a worker may return, if the server is gone."""
        if self.returncode is None and connection.wait([self.sentinel], 0 if flag == os.WNOHANG else None):
            try:
                self.returncode = forkserver.read_signed(self.sentinel)
            except (OSError, EOFError):
                self.returncode = LOST
        return self.returncode


class Worker(ForkServerProcess):
    """A process that the server forks."""

    @staticmethod
    def _Popen(process_obj: BaseProcess) -> popen_forkserver.Popen:  # noqa: N802 – multiprocessing's name
        return _Popen(process_obj)


def spawn(function: Callable[..., Any], *arguments: object, preload: Sequence[str]) -> tuple[Worker, Connection]:
    """Fork a worker that calls ``function(*arguments, reports)``; return it, and the receiving end of its reports. The
    server has imported ``preload``, as far as possible.

    Raises:
        HashbenchError: no server could fork it.
    """
    for attempt in range(_ATTEMPTS):
        receiver, sender = multiprocessing.get_context("forkserver").Pipe(duplex=False)
        # Not a daemon: those may not have children, and data loaders do.
        process = Worker(target=function, args=(*arguments, sender), daemon=False)
        try:
            _start(process, tuple(preload))
        except (OSError, EOFError) as error:
            receiver.close()
            end()
            if attempt + 1 == _ATTEMPTS:
                raise HashbenchError(
                    "cannot start a worker process",
                    consequence=f"its fork server failed ({named_line(error)}), {_ATTEMPTS} times",
                    tip="See the messages above it; if memory is short, use fewer --jobs. "
                    "Rows that are written can be resumed.",
                ) from error
        else:
            return process, receiver
        finally:
            sender.close()
    raise AssertionError("the last attempt returns or raises")


def begin(preload: Sequence[str]) -> None:
    """Start the server without waiting for its imports; a failure is left to :func:`spawn`."""
    with contextlib.suppress(OSError, EOFError), _environment(tuple(preload)):
        _ensure_server(tuple(preload))


def _start(process: Worker, preload: tuple[str, ...]) -> None:
    global _answered
    with _environment(preload):
        _ensure_server(preload)
        server = _server()
        seconds = FORK_SECONDS if server is not None and server.pid == _answered else START_SECONDS
        with _killed_after(server, seconds), _without_main_module():
            process.start()
    _answered = None if server is None else server.pid


def end() -> None:
    """End the server, also one that is stopped. Its workers go on; they are :data:`LOST`."""
    server: Any = forkserver._forkserver
    running = _server()
    if running is None:
        return
    with contextlib.suppress(psutil.Error):
        running.kill()
    if wait_for_end(running, _LAST_WAIT):
        server._stop()


def detach_worker() -> None:
    """Let go, in a worker, of the pipes whose end tells the server and multiprocessing's resource tracker that nobody
    needs them any more: a process that a model leaves behind would inherit them and keep both running.

    The server's pipe is closed. The tracker's stays, since it removes what models that are killed leave in shared
    memory; no program that the model starts inherits it.
    """
    server: Any = forkserver._forkserver
    tracker: Any = resource_tracker._resource_tracker
    os.close(server._forkserver_alive_fd)
    server._forkserver_alive_fd = None
    os.set_inheritable(tracker._fd, False)


def _end_tracker_held_by_others(owner: int) -> None:
    """End the resource tracker of the process ``owner``, as that exits, where a process that a model has forked and
    left behind still holds its pipe (Linux); elsewhere the end of the pipe ends it."""
    tracker: Any = resource_tracker._resource_tracker
    if tracker._fd is None or tracker._pid is None or os.getpid() != owner:
        return
    with contextlib.suppress(OSError):
        pipe = f"pipe:[{os.fstat(tracker._fd).st_ino}]"
        if any(_holds(pid, pipe) for pid in psutil.pids() if pid not in (owner, tracker._pid)):
            os.kill(tracker._pid, signal.SIGKILL)


def _holds(pid: int, pipe: str) -> bool:
    for descriptor in Path(f"/proc/{pid}/fd").glob("*"):
        with contextlib.suppress(OSError):  # it is closed by now, or another user's
            if str(descriptor.readlink()) == pipe:
                return True
    return False


atexit.register(_end_tracker_held_by_others, os.getpid())


def watched(pid: int | None) -> psutil.Process | None:
    """Return the process, safe against reuse of its number; ``None`` if it is gone already."""
    try:
        return None if pid is None else psutil.Process(pid)
    except psutil.NoSuchProcess:
        return None


def has_ended(process: psutil.Process | None) -> bool:
    """Return True if it is gone or a zombie."""
    ended = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    try:
        return process is None or not process.is_running() or process.status() in ended
    except psutil.NoSuchProcess:
        return True


def wait_for_end(process: psutil.Process | None, seconds: float) -> bool:
    """Wait for a killed process, of any parent, to end; return False if it is still there after ``seconds``."""
    deadline = monotonic() + seconds
    while not has_ended(process) and monotonic() < deadline:
        sleep(_POLL_SECONDS)
    return has_ended(process)


def _server() -> psutil.Process | None:
    server: Any = forkserver._forkserver
    return watched(server._forkserver_pid)


def _ensure_server(preload: tuple[str, ...]) -> None:
    global _preloaded
    if _preloaded != preload:
        end()  # a running one cannot preload anything more
    _preloaded = preload
    forkserver.set_forkserver_preload([_WORKERS])
    resource_tracker.ensure_running()  # first, because it unblocks SIGINT
    # The server inherits the mask: Ctrl-C during the preload is for the parent alone.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _environment(preload: tuple[str, ...]) -> Iterator[None]:
    """Set the environment of a new server. OpenMP reads its variables once, when torch is loaded."""
    kept = {**WORKER_VARIABLES, **_caller_path()}
    with variables(kept, unless_set=True), variables({PRELOAD_VARIABLE: " ".join(preload)}):
        yield


def _caller_path() -> dict[str, str]:
    """Return the variable that keeps the current folder out of the server's module path unless the caller has it: the
    server is a ``python -c``, which would import ``torch`` from a checkout of PyTorch in the current folder."""
    in_path = {"", ".", str(Path.cwd())} & set(sys.path)
    return {} if in_path else {"PYTHONSAFEPATH": SAFE_PATH_MARK}


@contextlib.contextmanager
def _killed_after(server: psutil.Process | None, seconds: float) -> Iterator[None]:
    """Kill ``server`` if what is inside waits for it longer, which ends the wait with an exception."""

    def kill() -> None:
        with contextlib.suppress(psutil.Error):
            if server is not None:
                server.kill()

    timer = threading.Timer(seconds, kill)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextlib.contextmanager
def _without_main_module() -> Iterator[None]:
    """Hide the caller's main module: multiprocessing would run that script again in every worker."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
