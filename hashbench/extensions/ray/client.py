"""A child process that talks to a Ray cluster for this one, which asks it and waits no longer than it says.

Ray's library ends the process that has loaded it, with a page of C++, when the head of the cluster has been gone for a
minute; it prints what other machines say of themselves, and has waits without a limit. All of that stays in the child,
whose output goes nowhere: what comes back is an answer, or one sentence.
"""

from __future__ import annotations

import _thread
import contextlib
import functools
import importlib.util
import itertools
import json
import logging
import os
import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pkgutil import resolve_name
from time import monotonic
from typing import Any, Never

from hashbench.core.errors import HashbenchError, last_line, named_line
from hashbench.core.processes import (
    Budget,
    Child,
    describe_end,
    exit_at_once,
    has_ended,
    python_calling,
    variables,
    watched,
)
from hashbench.core.text import squeezed
from hashbench.extensions.ray.phase_board import BoardOfSweep

CONNECT_SECONDS = 60.0
"""How long a cluster may take to answer; one of this kind takes 1 s, and importing Ray on a busy machine many."""

SILENCE_SECONDS = 30.0
"""How long the head of a cluster that was joined may be silent. Ray itself gives up after 60 s, and its process too."""

FETCH_SECONDS = 300.0
"""How long what a model left may take to get here."""

_CANCEL_SECONDS = 5.0
_LEAVE_SECONDS = 20.0
_KNOCK_SECONDS = 5.0
_RAYLET_SECONDS = 1.0
_OWN = "local"
_VARIABLES = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray's announced default; the present one hides accelerators from tasks that ask for none, with a warning each.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
_SERVE = "hashbench.extensions.ray.client:serve"


@dataclass(frozen=True, slots=True)
class Lost:
    """There is no answer to a task: what Ray says in ``reason``, its last line, of the other machine, in ``detail``."""

    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class _Failed:
    """Ray raised something that is not about a task."""

    reason: str


class RayClient:
    """A Ray cluster, joined at ``address`` (``HOST:PORT``, or ``auto`` for the one that runs here); where that is
    empty, the one that ``RAY_ADDRESS`` names, else one of this machine, which is started and ends with :meth:`close`.

    Methods raise :class:`HashbenchError` when the cluster has not answered for :data:`SILENCE_SECONDS`.

    Raises:
        HashbenchError: there is no such cluster within :data:`CONNECT_SECONDS`, it is of another version, or Ray is not
            installed.
    """

    def __init__(self, address: str) -> None:
        self.address = address or os.environ.get("RAY_ADDRESS", "") or _OWN
        if importlib.util.find_spec("ray") is None:
            raise HashbenchError(
                "cannot run models on Ray",
                consequence="the package ray is not installed",
                tip="Install it with: pip install 'hashbench[ray]'",
            )
        if self.address != _OWN:
            _knock(self.address)
        self._numbers = itertools.count()
        ours, theirs = socket.socketpair()
        with theirs, variables(_VARIABLES, unless_set=True):  # a cluster that is started there inherits them
            self._child = Child(python_calling(_SERVE, self.address, dies_with_us=True), stdin=theirs.fileno())
        # Half a message, of or to a process that is stopped, is not waited for for ever either.
        limit = struct.pack("ll", int(SILENCE_SECONDS), 0)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            ours.setsockopt(socket.SOL_SOCKET, option, limit)
        self._connection = Connection(ours.detach())
        with contextlib.ExitStack() as otherwise:
            otherwise.callback(self._end)
            if problem := self._connect():
                raise _unreachable(self.address, problem)
            otherwise.pop_all()

    def nodes(self) -> list[dict[str, Any]]:
        """Return Ray's description of each machine."""
        nodes: list[dict[str, Any]] = self._ask("nodes")
        return nodes

    def submit(self, function: str, request: str, **options: Any) -> int:
        """Call ``module:function`` with a text on some machine, or on the ``node`` that is named; ``options`` are those
        of Ray. Under ``phase_key`` it tells what it is doing. Returns a number for the task."""
        task: int = self._ask("submit", function, request, options)
        return task

    def ended(self, tasks: Sequence[int], *, seconds: float, count: int | None = None) -> list[int]:
        """Return all tasks that have ended: after ``seconds``, or when ``count`` of them have (by default all)."""
        if not tasks:
            return []
        ended: list[int] = self._ask("ended", list(tasks), seconds, count or len(tasks), extra=seconds)
        return ended

    def running(self) -> dict[int, float]:
        """Return the seconds since the start of each running task that is known to have begun."""
        running: dict[int, float] = self._ask("running")
        return running

    def answer(self, task: int) -> dict[str, Any] | Lost:
        """Return the result of a task that has ended."""
        answer: dict[str, Any] | Lost = self._ask("answer", task, extra=FETCH_SECONDS)
        return answer

    def phases(self) -> dict[str, str]:
        """Return recent phases of tasks, by their ``phase_key``."""
        phases: dict[str, str] = self._ask("phases")
        return phases

    def cancel(self, tasks: Sequence[int]) -> None:
        """End these tasks: first by an exception, so that what a model has started is ended too; then by force."""
        if tasks and not self._connection.closed:
            self._ask("cancel", list(tasks), extra=2 * _CANCEL_SECONDS)

    def abandon(self, tasks: Sequence[int]) -> None:
        """Wait for these tasks no longer. Ray cannot end what is stopped as long as it is asked to: when we leave, it
        does."""
        if tasks:
            self._ask("abandon", list(tasks))

    def close(self) -> None:
        """Leave the cluster; one that was started here ends. Can be called more than once."""
        if not self._connection.closed:
            with contextlib.suppress(HashbenchError, OSError, EOFError):
                self._exchange("leave", (), _LEAVE_SECONDS)
        self._end()

    def _connect(self) -> str:
        try:
            answer = self._exchange("connect", (), CONNECT_SECONDS)
        except (OSError, EOFError):
            return f"the attempt {self._how_the_child_ended()}"
        return f"it did not answer as Ray within {CONNECT_SECONDS:.0f} s" if answer is None else str(answer)

    def _ask(self, method: str, *arguments: Any, extra: float = 0.0) -> Any:
        seconds = SILENCE_SECONDS + extra
        try:
            answer = self._exchange(method, arguments, seconds)
            if not (answer is None or isinstance(answer, _Failed)):
                return answer
            reason = f"it has not answered for {seconds:g} s" if answer is None else answer.reason
        except (OSError, EOFError):
            reason = f"the process that talks to it {self._how_the_child_ended()}"
        self._end()
        raise HashbenchError(
            f"lost the Ray cluster {'of this machine' if self.address == _OWN else f'at {self.address}'}",
            consequence=f"{reason}; rows that are written are safe",
            tip="See that it runs (Ray's logs are in /tmp/ray), then run the same command with --resume.",
        )

    def _exchange(self, method: str, arguments: tuple[Any, ...], seconds: float) -> Any:
        """Send a request to the child and return its answer; ``None`` (never an answer itself) if it came too late."""
        number, budget = next(self._numbers), Budget(seconds)
        self._connection.send((number, method, arguments))
        while self._connection.poll(max(0.0, budget.left())):
            asked, answer = self._connection.recv()
            if asked == number:  # else a question that Ctrl-C cut short
                return answer
        return None

    def _how_the_child_ended(self) -> str:
        status = self._child.wait(_CANCEL_SECONDS)
        return "does not answer" if status is None else describe_end(status)

    def _end(self) -> None:
        self._connection.close()
        self._child.end()


def _knock(address: str) -> None:
    """Check that something listens at ``address``, which fails at once if nothing does."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdecimal() or int(port) > 65535:
        tip = "Give HOST:PORT as `ray start` prints it, or auto; run the sweep on a machine of the cluster."
        raise HashbenchError(f"{address!r} is not the address of a Ray cluster", consequence="nothing was run", tip=tip)
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_KNOCK_SECONDS).close()
    except OSError as error:
        raise _unreachable(address, error.strerror or str(error)) from error


def _unreachable(address: str, reason: str) -> HashbenchError:
    if address == _OWN:
        tip = "Ray's logs are in /tmp/ray; or run without --executor ray."
        return HashbenchError("cannot start Ray on this machine", consequence=reason[:400], tip=tip)
    tip = (
        "Check that it runs, that --address is HOST:PORT as `ray start` prints it, and that this machine belongs to it."
    )
    return HashbenchError(f"cannot join the Ray cluster at {address}", consequence=reason[:400], tip=tip)


# ------------------------------------------------------------------------------------------------------ in the child


def serve(address: str) -> Never:
    """Run in the child: answer requests from the socket at standard input until it is closed."""
    connection = Connection(os.dup(0))
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    driver = _Driver(address)
    with contextlib.suppress(EOFError, OSError):
        while True:
            number, method, arguments = connection.recv()
            try:
                answer = getattr(driver, method)(*arguments)
            except Exception as error:
                answer = _Failed(named_line(error, limit=300))
            connection.send((number, answer))
    exit_at_once()


class _Driver:
    """What Ray calls the driver. No method returns ``None``."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._ray: Any = None
        self._function: Any = None
        self._board: BoardOfSweep | None = None
        self._streams: dict[int, Any] = {}
        self._began: dict[int, float] = {}
        self._answers: dict[int, Any] = {}
        self._numbers = itertools.count()

    def connect(self) -> str:
        own: dict[str, Any] = {"include_dashboard": False} if self._address == _OWN else {}
        try:
            import ray

            ray.init(address=self._address, log_to_driver=False, logging_level=logging.ERROR, **own)
        except BaseException as error:
            return squeezed(f"{type(error).__name__}: {error}")
        self._ray, self._function = ray, ray.remote(call_on_node)
        return ""

    def nodes(self) -> list[dict[str, Any]]:
        return list(self._ray.nodes())

    def submit(self, function: str, request: str, options: dict[str, Any]) -> int:
        if node := options.pop("node", ""):
            from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node, soft=False)
        number, key, board = next(self._numbers), options.pop("phase_key", ""), None
        if key:
            self._board = self._board or BoardOfSweep(self._ray)
            board = self._board.handle
        # Ray's own retries would hide a lost machine from the row.
        options |= {"max_retries": 0, "num_returns": "streaming"}
        self._streams[number] = self._function.options(**options).remote(function, request, board, key)
        return number

    def phases(self) -> dict[str, str]:
        return dict(self._board.read()) if self._board is not None else {}

    def ended(self, tasks: list[int], seconds: float, count: int) -> list[int]:
        budget = Budget(seconds)
        while True:
            waiting = {self._streams[task]: task for task in tasks if task not in self._answers}
            seconds = 0.0 if len(tasks) - len(waiting) >= count else max(0.0, budget.left())
            ready = self._ray.wait(list(waiting), num_returns=1, timeout=seconds)[0] if waiting else []
            if not ready:
                return [task for task in tasks if task in self._answers]
            self._go_on(waiting[ready[0]])

    def _go_on(self, task: int) -> None:
        """Take what has come of a task: that it begins, its answer, or an error."""
        reference = next(self._streams[task], None)
        if reference is not None and task not in self._began:
            with contextlib.suppress(self._ray.exceptions.RayError):
                self._ray.get(reference, timeout=FETCH_SECONDS)
                self._began[task] = monotonic()
                return
        self._answers[task] = reference

    def running(self) -> dict[int, float]:
        return {task: monotonic() - began for task, began in self._began.items() if task not in self._answers}

    def answer(self, task: int) -> dict[str, Any] | Lost:
        reference = self._answers[task]
        self.abandon([task])
        if reference is None:
            return Lost("it ended without an answer", "it ended without an answer")
        try:
            answer: dict[str, Any] = self._ray.get(reference, timeout=FETCH_SECONDS)
        except self._ray.exceptions.RayError as error:
            final = last_line(str(error))[:300] or type(error).__name__
            first_sentence = squeezed(str(error)).partition(". ")[0][:200]
            return Lost(f"{type(error).__name__}: {final if hasattr(error, 'cause') else first_sentence}", final)
        return answer

    def cancel(self, tasks: list[int]) -> bool:
        left = tasks
        for force in (False, True):
            done = self.ended(left, 0.0, len(left))
            left = [task for task in left if task not in done]
            for task in left:
                with contextlib.suppress(self._ray.exceptions.RayError, ValueError):
                    self._ray.cancel(self._streams[task], force=force)
            self.ended(left, _CANCEL_SECONDS, len(left))
        return self.abandon(tasks)

    def abandon(self, tasks: list[int]) -> bool:
        for kept in (self._streams, self._began, self._answers):
            for task in tasks:
                kept.pop(task, None)
        return True

    def leave(self) -> bool:
        self._ray.shutdown()
        return True


def call_on_node(function: str, request: str, board: Any = None, key: str = "") -> Iterator[dict[str, Any]]:
    """Run the task on a machine: report its start, call ``module:function``, report where that was, and post its phases
    to the ``board``."""
    import ray

    here = ray.get_runtime_context().get_node_id()
    yield {}
    more = {} if board is None else {"tell": functools.partial(board.write.remote, key)}
    with _ended_with_raylet():
        answer: dict[str, Any] = resolve_name(function)(json.dumps({**json.loads(request), "node": here}), **more)
    yield {**answer, "node": here}


@contextlib.contextmanager
def _ended_with_raylet() -> Iterator[None]:
    """End this process, one of Ray's, when the raylet of its machine ends: first the model, with its temporary folder.
    Ray watches the raylet too, but not a dead one that is never reaped, as in a container whose first process does not
    reap."""
    raylet, over = watched(int(os.environ.get("RAY_RAYLET_PID", "0")) or None), threading.Event()

    def watch() -> None:
        while not over.wait(_RAYLET_SECONDS):
            if has_ended(raylet):
                _thread.interrupt_main()  # as Ray cancels a task
                over.wait(_LEAVE_SECONDS)
                exit_at_once(1)

    if raylet is not None:
        threading.Thread(target=watch, name="hashbench raylet", daemon=True).start()
    try:
        yield
    finally:
        over.set()
