"""Fork servers: Pythons that have imported what every worker needs, and fork a process for each request.

A server listens at a socket that only this user can open. A request names a function and brings two descriptors: the
read end of a pipe, whose end kills the process group of the fork, and a file without a name for what the function has
to report. The server tells the requester the pid of the fork, and its exit status when it has ended.

    {"call": "hashbench.core.sweep.executors.local:_run_worker", ...}   ->   pid 4711   ->   status -9

Sweeps share one server of their process (:data:`WORKERS`), which is replaced when it is dead or stopped. Fresh
processes and repros have servers of their own (:mod:`hashbench.core.diagnose.fresh_process`).
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import multiprocessing.connection
import os
import pickle
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from time import monotonic
from types import MappingProxyType
from typing import Any, NoReturn

import psutil

from hashbench.core.errors import HashbenchError, named_line
from hashbench.core.processes import (
    Child,
    end_with,
    end_with_input,
    exit_at_once,
    import_or_call,
    python_calling,
    uncollected,
)

LOST = 1 << 16
"""Instead of the exit status of a process whose server ended first; no process ends with such a status."""

START_SECONDS = 600.0
"""How long a new server may import what it is to have, or a worker its target."""

FORK_SECONDS = 60.0
"""How long a server that has answered before may take to fork."""

_ATTEMPTS = 3
"""Servers that are started, one after the other, until one forks."""

_LAST_WAIT = 1.0
"""Seconds for what a server has started, to end by itself once the server is gone."""

_NUMBER = struct.Struct("=q")
"""Length of a request; pid and exit status."""

WORKER_VARIABLES: Mapping[str, str] = MappingProxyType({"OMP_WAIT_POLICY": "PASSIVE"})
"""What the server has in its environment unless the caller set it. OpenMP threads that wait sleep instead of spinning:
on a machine that also does something else that is several times faster. It does not change what is computed."""


@dataclass(frozen=True, slots=True)
class ForkRequest:
    """A request for one process.

    Attributes:
        call: ``module:function``, called with ``arguments`` and the descriptor of the report.
        arguments: pickled.
        path: ``sys.path``; ``None``: that of a new Python.
        folder: working directory; empty: that of the server.
        argv: ``sys.argv``.
        cpus: CPU affinity; empty: any.
    """

    call: str
    arguments: bytes
    path: tuple[str, ...] | None
    folder: str
    argv: tuple[str, ...]
    cpus: tuple[int, ...]


def request_for(call: str, *arguments: object, new_path: bool = False) -> ForkRequest:
    """Return a request for a process that calls ``module:function`` where this one is: same ``sys.path``, folder and
    processors. With ``new_path``, modules are resolved as by a new Python."""
    try:
        folder = str(Path.cwd())
    except OSError:  # it is deleted
        folder = ""
    cpus = tuple(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else ()
    path = None if new_path else tuple(sys.path)
    return ForkRequest(call, pickle.dumps(arguments), path, folder, tuple(sys.argv), cpus)


class Fork:
    """A process that the server at ``address`` forks for ``request``. :meth:`close` kills it and its process group.

    Attributes:
        pid: once :meth:`start` has returned.
        report: descriptor of the file without a name, of ``report_bytes``, that the process shares.

    Raises:
        OSError: there is no such server, or it does not take the request within ``seconds``.
    """

    def __init__(self, address: str, request: ForkRequest, *, report_bytes: int = 0, seconds: float) -> None:
        self.pid = 0
        self._received = b""
        self._over = False
        self._connection = socket.socket(socket.AF_UNIX)
        theirs, self._lifeline = os.pipe()
        self.report = _unnamed_file(report_bytes)
        try:
            content = pickle.dumps(request)
            self._connection.settimeout(seconds)
            self._connection.connect(address)
            socket.send_fds(self._connection, [_NUMBER.pack(len(content))], [theirs, self.report])
            self._connection.sendall(content)
        except BaseException:
            self.close()
            raise
        finally:
            os.close(theirs)

    def __enter__(self) -> Fork:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fileno(self) -> int:
        """Return the descriptor that is readable once the process, or its server, has ended."""
        return self._connection.fileno()

    def start(self, seconds: float) -> None:
        """Wait until the server has forked.

        Raises:
            OSError: it has ended, or did not within ``seconds``.
        """
        self._listen(1, seconds)
        if len(self._received) < _NUMBER.size:
            raise ConnectionResetError("it ended") if self._over else TimeoutError(f"silent for {seconds:g} s")
        (self.pid,) = _NUMBER.unpack_from(self._received)

    def wait(self, seconds: float) -> int | None:
        """Return the exit status, negative for a signal, or :data:`LOST`; ``None`` if neither is known in time."""
        self._listen(2, seconds)
        if len(self._received) >= 2 * _NUMBER.size:
            status: int = _NUMBER.unpack_from(self._received, _NUMBER.size)[0]
            return status
        return LOST if self._over else None

    def text(self) -> str:
        """Return what the process has written to its report."""
        return os.pread(self.report, os.fstat(self.report).st_size, 0).decode(errors="replace")

    def close(self) -> None:
        """Kill the process group, unless it has ended."""
        os.close(self._lifeline)
        os.close(self.report)
        self._connection.close()

    def _listen(self, numbers: int, seconds: float) -> None:
        deadline = monotonic() + seconds
        while len(self._received) < numbers * _NUMBER.size and not self._over:
            if not multiprocessing.connection.wait([self._connection], max(0.0, deadline - monotonic())):
                return
            try:
                heard = self._connection.recv(numbers * _NUMBER.size - len(self._received))
            except OSError:
                heard = b""
            self._received += heard
            self._over = not heard


def _unnamed_file(size: int) -> int:
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("hashbench")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.truncate(descriptor, size)
    return descriptor


class ServerProcess:
    """A fork server that ends with this process.

    Args:
        preload: modules that it imports, and functions (``module:function``) that it calls, as far as it can.
        environment: additional variables.
        at_once: otherwise it starts with the first request.
        output: destination of its output and errors; ``None``: ours.

    Attributes:
        address: path of its socket.
        child: the process.
    """

    def __init__(
        self,
        preload: Sequence[str],
        *,
        environment: Mapping[str, str],
        at_once: bool = True,
        output: int | None = subprocess.DEVNULL,
    ) -> None:
        self._folder = tempfile.mkdtemp(prefix="hashbench-")
        self.address = str(Path(self._folder, "fork"))
        with socket.socket(socket.AF_UNIX) as listener:  # of the server alone from then on: it ends with that
            listener.bind(self.address)
            listener.listen(128)
            command = python_calling(
                "hashbench.core.workers:serve",
                *(str(listener.fileno()), *preload),
                dies_with_us=not at_once,
                asked=-1 if at_once else listener.fileno(),
            )
            task, handed = f"{json.dumps(sys.path)}\n", (listener.fileno(),)
            self.child = Child(command, task=task, stdout=output, stderr=output, environment=environment, handed=handed)

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Kill it with all that it has forked."""
        self.child.end()
        shutil.rmtree(self._folder, ignore_errors=True)


class SharedServer:
    """The fork server of this process: started with the first request, replaced when it is dead, stopped or has
    preloaded something else."""

    def __init__(self) -> None:
        self._server: ServerProcess | None = None
        self._preload: tuple[str, ...] = ()
        self._has_forked = False
        self._owner = 0

    @property
    def pid(self) -> int:
        """Its process; 0 if there is none."""
        return 0 if self._server is None else self._server.child.pid

    def begin(self, preload: Sequence[str]) -> None:
        """Start it without waiting for its imports; a failure is left to :meth:`fork`."""
        with contextlib.suppress(OSError):
            self._ensured(tuple(preload))

    def fork(self, request: ForkRequest, *, preload: Sequence[str], report_bytes: int = 0) -> Fork:
        """Fork a process from a server that has imported ``preload``.

        Raises:
            HashbenchError: no server could fork it.
        """
        for attempt in range(_ATTEMPTS):
            try:
                return self._forked(request, tuple(preload), report_bytes)
            except OSError as error:
                self.end()
                if attempt + 1 == _ATTEMPTS:
                    raise HashbenchError(
                        "cannot start a worker process",
                        consequence=f"its fork server failed ({named_line(error)}), {_ATTEMPTS} times",
                        tip="See the messages above it; if memory is short, use fewer --jobs. "
                        "Rows that are written can be resumed.",
                    ) from error
        raise AssertionError("the last attempt returns or raises")

    def end(self) -> None:
        """End it, also if it is stopped. Its workers are :data:`LOST`."""
        server, self._server, self._has_forked = self._server, None, False
        if server is None or self._owner != os.getpid():
            return
        with contextlib.suppress(psutil.Error):
            started = psutil.Process(server.child.pid).children()
            server.child.interrupt(signal.SIGKILL)
            # multiprocessing's resource tracker removes what killed models left in shared memory, and ends unless a
            # process that a model has forked and left behind holds its pipe.
            for process in psutil.wait_procs(started, timeout=_LAST_WAIT)[1]:
                process.kill()
        server.end()

    def _forked(self, request: ForkRequest, preload: tuple[str, ...], report_bytes: int) -> Fork:
        server = self._ensured(preload)
        seconds = FORK_SECONDS if self._has_forked else START_SECONDS
        fork = Fork(server.address, request, report_bytes=report_bytes, seconds=seconds)
        try:
            fork.start(seconds)
        except BaseException:
            fork.close()
            raise
        self._has_forked = True
        return fork

    def _ensured(self, preload: tuple[str, ...]) -> ServerProcess:
        if self._server is not None and (self._preload != preload or self._server.child.status() is not None):
            self.end()
        if self._server is None:
            if self._owner != os.getpid():
                atexit.register(self.end)
            self._owner, self._preload = os.getpid(), preload
            names = ("multiprocessing.resource_tracker:ensure_running", *preload)
            environment = {name: value for name, value in WORKER_VARIABLES.items() if name not in os.environ}
            self._server = ServerProcess(names, environment=environment, output=None)
        return self._server


WORKERS = SharedServer()


# ------------------------------------------------------------------------------------------------- in the server


def serve(descriptor: str, *preload: str) -> NoReturn:
    """Entry point of a server: import, then fork for each request at the socket with that descriptor."""
    plain = sys.path[:-1]  # without what the command line has added for the import of this module
    path = sys.stdin.readline()
    if not path:  # our parent has ended
        exit_at_once()
    sys.path[:] = json.loads(path)
    end_with_input(group=False)
    with uncollected():
        import_or_call(preload)
    # The 500 000 objects of these modules live as long as the forks do. Frozen, they are neither searched by the
    # collector (0.2 s a time) nor copied with the pages that it would touch in every fork.
    gc.collect()
    gc.freeze()
    waking, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    requesters: dict[int, socket.socket] = {}
    with socket.socket(fileno=int(descriptor)) as listener:
        while True:
            ready = multiprocessing.connection.wait([listener, waking])
            if waking in ready:
                os.read(waking, 4096)
                _tell_ends(requesters)
            if listener in ready:
                requester, _ = listener.accept()
                try:
                    pid = os.fork()
                except OSError:  # no memory for another process: the requester sees no pid
                    requester.close()
                    continue
                if not pid:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    for ours in (listener, *requesters.values()):
                        ours.close()
                    for end in (waking, wake):
                        os.close(end)
                    _answer(requester, plain)
                requesters[pid] = requester
                _tell(requester, pid)


def _tell_ends(requesters: dict[int, socket.socket]) -> None:
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if (requester := requesters.pop(ended[0], None)) is not None:
                _tell(requester, os.waitstatus_to_exitcode(ended[1]))
                requester.close()


def _tell(requester: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # it is gone
        requester.sendall(_NUMBER.pack(number))


def _answer(requester: socket.socket, plain: Sequence[str]) -> NoReturn:
    """Do what is asked, in this process, a fork of the server."""
    status = 1
    try:
        os.setsid()
        with requester:
            length, descriptors, *_ = socket.recv_fds(requester, _NUMBER.size, 2)
            with requester.makefile("rb") as content:
                request = content.read(*_NUMBER.unpack(length))
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
        lifeline, report = descriptors
        end_with(lifeline)
        function, arguments = _prepared(pickle.loads(request), plain)  # of this user
        status = exit_status_of(lambda: function(*arguments, report))
    finally:
        exit_at_once(status)


def _prepared(request: ForkRequest, plain: Sequence[str]) -> tuple[Callable[..., object], tuple[Any, ...]]:
    """Return function and arguments, in a process that is where the requester is."""
    sys.argv[:] = request.argv
    if request.path is not None:
        sys.path[:] = request.path
    function, arguments = resolve_name(request.call), pickle.loads(request.arguments)
    if request.path is None:
        sys.path[:] = plain
    with contextlib.suppress(OSError):
        os.chdir(request.folder or ".")
        if request.cpus:
            os.sched_setaffinity(0, request.cpus)
    return function, arguments


def exit_status_of(call: Callable[[], object]) -> int:
    """Call, and return the exit status of a Python that did; print what it raises as that would."""
    try:
        call()
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return ended.code or 0
        print(ended.code, file=sys.stderr)
        return 1
    except BaseException as error:
        of_program = error.__traceback__ and error.__traceback__.tb_next  # without this function's frame
        traceback.print_exception(error.with_traceback(of_program))
        return 1
    return 0
