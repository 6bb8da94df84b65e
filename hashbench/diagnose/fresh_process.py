"""Run a model in fresh processes: each builds the model anew, and no state survives between them.

A sweep starts one server for them (:func:`served`): a Python that has imported what every run needs, of which each
fresh process is a fork. It has other string hashes and addresses than the workers. If it dies it is not restarted, and
callers get a failure at once. Repros run in forks of it, too (:func:`run_python`). Several processes of one experiment
are forks of as many servers, each with string hashes of its own, which start with the first experiment that needs them
(:func:`pooled`); those of a fixed order are forks of one more.

Without a server, a new Python reads its task from standard input, imports what every run needs, and forks. The fork
makes the runs and writes the traces to a temporary folder. For a fixed order all processes are forks of
one Python. Their output is discarded. All exit with their parent: they die when their standard input ends.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import json
import os
import socket
import sys
import tempfile
import traceback
import types
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from pkgutil import resolve_name
from time import monotonic, sleep
from typing import Any, NoReturn

from hashbench.errors import HashbenchError, named_line
from hashbench.io import from_json, read_json, replace_file, to_json
from hashbench.processes import (
    NO_VARIABLES,
    Child,
    Finished,
    available_memory_mib,
    describe_end,
    end_with,
    end_with_input,
    exit_at_once,
    import_or_call,
    new_python,
    peak_memory_mib,
    python_calling,
    return_free_memory,
    uncollected,
    variables,
)
from hashbench.records import Failure, ModelSpec, RunOptions, Trace
from hashbench.trace import file

PROCESSES = 4
"""Fresh processes of one experiment. That four pairs differ and their first runs agree has p = 0.03 by chance; that
with a fixed order three agree with a fourth, where three others did not, p = 0.05."""

AT_ONCE = 2
"""Processes that run concurrently if memory suffices: importing torch keeps a core busy for seconds."""

DEFAULT_TARGET = "hashbench.check.model:BenchmarkRunner"

TORCH_ALONE = "torch._inductor.config"
"""Preload of a server of repros: torch, and what ``torch.use_deterministic_algorithms`` imports, which takes longer."""

SERVER_VARIABLE = "HASHBENCH_FRESH_SERVER"
"""Environment variable with the socket of a sweep's server, for its workers."""

LOADED_VARIABLE = "HASHBENCH_FRESH_LOADED"
"""Environment variable with what that server preloads, for callers that may share it."""

POOL_VARIABLE = "HASHBENCH_FRESH_POOL"
"""Environment variable with the sockets of the pool, separated as in ``PATH``; the last one is that of a fixed order.
"""

_ANSWER = "answer.json"
_PRINTED = ("stdout", "stderr")
_POLL_SECONDS = 0.02
_DONE = b"."
"""Sent by a server's process once its answer is written."""

_RANDOM = {"PYTHONHASHSEED": "random"}
# Without the second one, the C library would give threads memory of their own in the order in which they happen to ask;
# without the third one, the first fork would compile what the next ones find compiled, which takes other memory.
_FIXED = {"PYTHONHASHSEED": "0", "MALLOC_ARENA_MAX": "1", "PYTHONDONTWRITEBYTECODE": "1"}


class _End(StrEnum):
    """How a process of a server ended without an answer."""

    SILENT = "it left no answer"
    EARLY = "it ended before it had an answer"
    OUT_OF_TIME = "it was out of time"
    WITH_SERVER = "the server of fresh processes has ended"


@dataclass(frozen=True, slots=True)
class FreshRuns:
    """The outcome of fresh processes.

    Attributes:
        processes: the traces of each process in which every run succeeded.
        failures: one sentence for each other process.
    """

    processes: tuple[tuple[Trace, ...], ...] = ()
    failures: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _ForkRequest:
    """The task of a new Python.

    Attributes:
        path: ``sys.path``.
        cpus: the CPU affinity of the requester.
        folders: one per fork, for its answer.
        at_once: how many forks run concurrently.
    """

    spec: ModelSpec
    options: RunOptions
    level: str
    runs: int
    target: str
    path: tuple[str, ...]
    threads: int | None = None
    cpus: tuple[int, ...] = ()
    folders: tuple[str, ...] = ()
    at_once: int = AT_ONCE


@dataclass(frozen=True, slots=True)
class _Answer:
    """The answer of a process, in its folder: the names of its ``traces``, or a ``failure``; see :class:`FreshRuns`."""

    traces: tuple[str, ...] = ()
    failure: str = ""


@dataclass(frozen=True, slots=True)
class _Program:
    """A program that a fork of the server runs as a new Python would.

    Attributes:
        folder: where standard output and error are written.
        cwd, environment, cpus: those of the requester.
    """

    code: str
    arguments: tuple[str, ...]
    folder: str
    cwd: str
    environment: Mapping[str, str]
    cpus: tuple[int, ...] = ()


def fresh_traces(spec: ModelSpec, options: RunOptions, *, timeout: float, **wanted: Any) -> FreshRuns:
    """Start fresh processes as :func:`begun` does, wait at most ``timeout`` seconds, and return their runs."""
    with begun(spec, options, **wanted) as waited:
        return waited(timeout)


@contextmanager
def begun(
    spec: ModelSpec,
    options: RunOptions,
    *,
    level: str,
    processes: int,
    runs: int,
    fixed_order: bool,
    threads: int | None = None,
    target: str = DEFAULT_TARGET,
) -> Iterator[Callable[[float], FreshRuns]]:
    """Start the processes; yield ``wait(seconds) -> FreshRuns``.

    Each fresh process runs the model ``runs`` times. ``wait`` takes at most that many seconds for all together: a
    process that has not ended then is a failure, and is killed when the context exits.

    A single process of a server runs while the body does something else. All others start when they are waited for,
    two at a time (one where twice the peak memory of this process is not free): forks of the servers of a pool, each of
    another one, if there are enough, else of new Pythons. With a fixed order, all are forks of one.

    Args:
        spec: the model, which each process builds anew.
        options: as in a sweep.
        level: ``on``, ``warn`` or ``off``: the deterministic settings.
        processes: number of processes.
        runs: traced runs in each.
        fixed_order: with equal string hashes and object addresses in every process, by which sets are
            ordered; otherwise both are random (see :mod:`hashbench.run.addresses`).
        threads: of the runs; ``None``: those of the options, with which the model is built in any case.
        target: ``module:class``. A process makes ``class(options).traces_of(spec, level=level, runs=runs,
            threads=threads)``, a list of traces and failures.
    """
    at_once = _at_once() if processes > 1 else 1
    task = _ForkRequest(spec, options, level, runs, target, tuple(sys.path), threads, _cpus(), at_once=at_once)
    with ExitStack() as stack:
        parent = stack.enter_context(tempfile.TemporaryDirectory(prefix="hashbench-"))
        folders = tuple(str(Path(parent, f"process-{number:04}")) for number in range(processes))
        for folder in folders:
            Path(folder).mkdir()
        groups = [folders] if fixed_order else [(folder,) for folder in folders]
        try:
            tasks = {group: json.dumps(to_json(replace(task, folders=group))) for group in groups}
        except (TypeError, ValueError):
            failed = FreshRuns(failures=("the model's arguments cannot be written as JSON",) * processes)
            yield lambda _: failed
            return
        *pool, fixed = os.environ.get(POOL_VARIABLE, "").split(os.pathsep)
        servers, environment = ([fixed] if fixed else [], _FIXED) if fixed_order else (pool, _RANDOM)
        if (processes > 1 or fixed_order) and len(groups) <= len(servers):
            yield lambda seconds: _read(
                folders, _run_in_pool(tasks, servers, environment, at_once=at_once, deadline=monotonic() + seconds)
            )
        elif processes > 1 or fixed_order or not is_served():
            yield lambda seconds: _read(
                folders, _run_all(tasks, environment, at_once=at_once, deadline=monotonic() + seconds)
            )
        else:
            ended = stack.enter_context(_asked_of(os.environ[SERVER_VARIABLE], tasks[groups[0]]))
            yield lambda seconds: _read(folders, {folders[0]: ended(seconds)})


def _at_once() -> int:
    """Return how many processes fit in memory, each at the peak memory of this one."""
    needed = AT_ONCE * peak_memory_mib()
    if needed > available_memory_mib():
        return_free_memory()
    return AT_ONCE if needed <= available_memory_mib() else 1


def _read(folders: Sequence[str], ended: Mapping[str, str]) -> FreshRuns:
    """Read the answers of these folders; ``ended`` says how a process without an answer ended."""
    traces, failures = [], []
    for folder in folders:
        try:
            answer = from_json(_Answer, read_json(Path(folder, _ANSWER)))
            read = tuple(file.read(Path(folder, name)) for name in answer.traces)
        except HashbenchError as error:
            answer = replace(answer, failure=answer.failure or str(error))
        except (OSError, ValueError):
            answer = _Answer(failure=ended.get(folder, _End.OUT_OF_TIME))
        if answer.failure:
            failures.append(answer.failure)
        else:
            traces.append(read)
    return FreshRuns(tuple(traces), tuple(failures))


@contextmanager
def served(
    target: str = DEFAULT_TARGET,
    *,
    preload: Sequence[str] = (),
    environment: Mapping[str, str] = NO_VARIABLES,
    at_once: bool = True,
) -> Iterator[None]:
    """Serve single fresh processes from one preloaded Python with other string hashes, for this process and its
    children.

    It has imported ``target`` (a class or a module) and ``preload``, and has those variables of ``environment`` that
    the caller has not set, as a sweep's fork server. With ``at_once=False`` it starts on the first request: a sweep
    without any pays for a bare Python.
    """
    with (
        _server(target, preload, environment, at_once=at_once) as address,
        variables({SERVER_VARIABLE: address, LOADED_VARIABLE: " ".join((target, *preload))}),
    ):
        yield


@contextmanager
def pooled(
    target: str = DEFAULT_TARGET, *, preload: Sequence[str] = (), environment: Mapping[str, str] = NO_VARIABLES
) -> Iterator[None]:
    """Serve up to :data:`PROCESSES` fresh processes with string hashes of their own from one server each, as
    :func:`served`.

    The servers start on the first request; processes with a fixed order are all forks of one more.
    """
    orders = [*[_RANDOM] * PROCESSES, _FIXED]
    with ExitStack() as stack:
        servers = [_server(target, preload, environment, at_once=False, order=order) for order in orders]
        addresses = [stack.enter_context(server) for server in servers]
        stack.enter_context(variables({POOL_VARIABLE: os.pathsep.join(addresses)}))
        yield


@contextmanager
def _server(
    target: str,
    preload: Sequence[str],
    environment: Mapping[str, str],
    *,
    at_once: bool,
    order: Mapping[str, str] = _RANDOM,
) -> Iterator[str]:
    """Start a server and yield its socket's path; ``order`` are its variables for string hashes and memory."""
    given = {name: value for name, value in environment.items() if name not in os.environ}
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="hashbench-", ignore_cleanup_errors=True))
        address = str(Path(folder, "fresh"))
        with socket.socket(socket.AF_UNIX) as listener:  # of the server alone from then on: it ends with that
            listener.bind(address)
            listener.listen(128)
            command = python_calling(
                "hashbench.diagnose.fresh_process:serve",
                *(str(listener.fileno()), target, *preload),
                dies_with_us=True,
                asked=-1 if at_once else listener.fileno(),
            )
            task = f"{json.dumps(sys.path)}\n"
            handed = (listener.fileno(),)
            stack.enter_context(Child(command, task=task, environment={**given, **order}, handed=handed))
        yield address


def unpooled() -> AbstractContextManager[None]:
    """Start fresh processes from new Pythons inside this context, even if there is a pool."""
    return variables({POOL_VARIABLE: ""})


def is_served(*loaded: str) -> bool:
    """Return True inside a context of :func:`served` whose server has preloaded all of ``loaded``."""
    return bool(os.environ.get(SERVER_VARIABLE)) and {*loaded} <= {*os.environ.get(LOADED_VARIABLE, "").split()}


def is_pooled() -> bool:
    """Return True inside a context of :func:`pooled`."""
    return bool(os.environ.get(POOL_VARIABLE))


@contextmanager
def _asked_of(server: str, task: str) -> Iterator[Callable[[float], _End]]:
    """Send ``task`` (one process) to a server; yield a function that waits and says how the process ended.

    It may have left an answer.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        with suppress(OSError):  # which the end tells
            connection.connect(server)
            connection.sendall(f"{task}\n".encode())

        def ended(seconds: float) -> _End:
            connection.settimeout(seconds)
            try:
                return _End.SILENT if connection.recv(1) else _End.EARLY
            except TimeoutError:
                return _End.OUT_OF_TIME
            except OSError:
                return _End.WITH_SERVER

        yield ended


def run_python(code: str, *arguments: str, seconds: float) -> Finished:
    """Run ``python -P -c CODE ARGUMENTS`` with an empty standard input, for at most ``seconds``.

    A fork of the server does it if there is one, which spares the import of torch; a new Python otherwise, or if the
    server dies before it reports the exit status. Both find the same modules at the same places.
    """
    if is_served():
        with (
            tempfile.TemporaryDirectory(prefix="hashbench-", ignore_cleanup_errors=True) as folder,
            suppress(OSError, ValueError),
        ):
            program = _Program(code, arguments, folder, str(Path.cwd()), dict(os.environ), _cpus())
            return _run_by_the_server(program, seconds=seconds)
    return new_python(code, *arguments, seconds=seconds)


def _cpus() -> tuple[int, ...]:
    """Return the CPU affinity of this process; empty if the platform does not report it."""
    return tuple(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else ()


def _run_by_the_server(program: _Program, *, seconds: float) -> Finished:
    """Run a program in a fork of the server.

    Raises ``OSError`` or ``ValueError`` if the server has died, or its fork reported no exit status.
    """
    status = None
    with socket.socket(socket.AF_UNIX) as connection, suppress(TimeoutError):
        connection.settimeout(seconds)
        connection.connect(os.environ[SERVER_VARIABLE])
        connection.sendall(f"{json.dumps(to_json(program))}\n".encode())
        with connection.makefile() as lines:
            status = int(lines.readline())
    texts = (Path(program.folder, name) for name in _PRINTED)
    return Finished(status, *(text.read_text(errors="replace") if text.exists() else "" for text in texts))


def _run_in_pool(
    tasks: Mapping[tuple[str, ...], str],
    pool: Sequence[str],
    environment: Mapping[str, str],
    *,
    at_once: int,
    deadline: float,
) -> dict[str, str]:
    """Send each group of folders to another server, ``at_once`` at a time; return by folder how that ended, in words.

    Tasks of a server that has died go to a new Python with these variables.
    """
    ended: dict[str, str] = {}
    asked = list(zip(tasks, pool, strict=False))
    while asked and monotonic() <= deadline:
        with ExitStack() as stack:
            begun_now = [
                (group, stack.enter_context(_asked_of(server, tasks[group]))) for group, server in asked[:at_once]
            ]
            for group, waited in begun_now:
                ended |= dict.fromkeys(group, waited(max(0.001, deadline - monotonic())))
        del asked[:at_once]
    lost = {group: task for group, task in tasks.items() if ended.get(group[0]) is _End.WITH_SERVER}
    return ended | _run_all(lost, environment, at_once=at_once, deadline=deadline)


def _run_all(
    tasks: Mapping[tuple[str, ...], str], environment: Mapping[str, str], *, at_once: int, deadline: float
) -> dict[str, str]:
    """Start a Python for each group of folders; return by folder how it ended, in words."""
    ended: dict[str, str] = {}
    running: dict[tuple[str, ...], Child] = {}
    waiting = list(tasks)
    try:
        while (waiting or running) and monotonic() <= deadline:
            while waiting and len(running) < at_once:
                group = waiting.pop(0)
                command = python_calling("hashbench.diagnose.fresh_process:main", dies_with_us=True)
                running[group] = Child(command, task=f"{tasks[group]}\n", environment=environment)
            for group, child in list(running.items()):
                if (status := child.status()) is not None:
                    ended |= dict.fromkeys(group, describe_end(status))
                    running.pop(group).end()
            sleep(_POLL_SECONDS)
        return ended
    finally:
        for child in running.values():
            child.end()


# -------------------------------------------------------------------------------------------------- in the child


def main() -> NoReturn:
    """Entry point of a new Python: read the task from standard input, import, fork for each folder."""
    content = json.loads(sys.stdin.readline())
    end_with_input()
    sys.path[:] = content["path"]
    _answer_all(from_json(_ForkRequest, content))
    exit_at_once()


def _answer_all(task: _ForkRequest) -> None:
    """Import, then fork for each folder of ``task``, at most ``task.at_once`` at a time.

    The forks have the same string hashes and memory addresses as long as nothing is allocated between them. New
    interpreters do not, even with a fixed seed and without random addresses: Python lists the folders of ``sys.path``,
    so that a file written there meanwhile moves all later allocations.
    """
    _prepare(task.target)
    my_turn, turns = os.pipe()
    forks = array("i", bytes(4 * len(task.folders)))  # no object for each number
    for number in range(len(forks)):
        forks[number] = os.fork()
        if not forks[number]:
            os.close(turns)
            os.read(my_turn, 1)
            _answer(task, Path(task.folders[number]))
    os.write(turns, bytes(task.at_once))
    folders = dict(zip(forks, task.folders, strict=True))
    for _ in forks:
        process, status = os.wait()
        os.write(turns, bytes(1))
        answer = Path(folders[process], _ANSWER)
        if not answer.exists():
            _write(_Answer(failure=describe_end(os.waitstatus_to_exitcode(status))), answer)


def _prepare(target: str, preload: Sequence[str] = ()) -> None:
    """Import, before the first fork, what every run needs."""
    with suppress(Exception), uncollected():  # each fork fails in the same way, and says so
        resolve_name(target)
        if "torch" in sys.modules:
            importlib.import_module("torch._dynamo")  # which the first run would
        import_or_call(preload)
    gc.freeze()


def serve(descriptor: str, target: str, *preload: str) -> NoReturn:
    """Entry point of a server: import, then fork for each task that arrives at the socket with that descriptor."""
    plain = sys.path[:-1]  # without what the command line has added for the import of this module
    with socket.socket(fileno=int(descriptor)) as listener:
        sys.path[:] = json.loads(sys.stdin.readline())
        end_with_input()
        _prepare(target, preload)
        while True:
            connection, _ = listener.accept()
            with suppress(OSError):  # no memory for another process: whoever asked sees no answer
                if not os.fork():
                    listener.close()
                    _answer_one(connection, plain)
            connection.close()
            with suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass


def _answer_one(connection: socket.socket, plain: Sequence[str]) -> NoReturn:
    """Run the task that arrives through ``connection``, in this process, or in one fork for each of several folders.

    Closing the connection kills these processes; its end tells the requester that they are done. ``plain`` is the
    ``sys.path`` of a new Python.
    """
    try:
        os.setpgid(0, 0)
        with connection.makefile() as lines:
            content = json.loads(lines.readline())
        end_with(connection.fileno())
        if "code" in content:
            program = from_json(_Program, content)
            same_path = program.environment.get("PYTHONPATH") == os.environ.get("PYTHONPATH")
            if same_path and "torch" not in _forgotten(plain):
                _run_program(program, told=connection)
            exit_at_once()  # a new Python runs it
        sys.path[:] = content["path"]
        task = from_json(_ForkRequest, content)
        if task.cpus:
            os.sched_setaffinity(0, task.cpus)
        if len(task.folders) == 1:
            _answer(task, Path(task.folders[0]), told=connection)
        _answer_all(task)
        connection.sendall(_DONE)
    finally:
        exit_at_once()


def _answer(task: _ForkRequest, folder: Path, *, told: socket.socket | None = None) -> NoReturn:
    try:
        runner = resolve_name(task.target)(task.options)
        runs: list[Trace | Failure] = runner.traces_of(
            task.spec, level=task.level, runs=task.runs, threads=task.threads
        )
        failures = [run.error for run in runs if isinstance(run, Failure)]
        traces = {f"{number}.trace": run for number, run in enumerate(runs) if isinstance(run, Trace)}
        for file_name, trace in traces.items():
            file.write(trace, folder / file_name)
        answer = _Answer(tuple(traces), failures[0] if failures else "")
    except BaseException as error:
        answer = _Answer(failure=named_line(error))
    _write(answer, folder / _ANSWER)
    if told is not None:
        told.sendall(_DONE)
    exit_at_once()  # whatever the model has started must not keep the answer waiting


def _forgotten(plain: Sequence[str]) -> set[str]:
    """Purge and return the packages that a fresh interpreter would resolve differently or not at all.

    From now on modules are resolved as by a new Python, whose ``sys.path`` is ``plain``.
    """
    sys.path[:] = plain
    importlib.invalidate_caches()
    elsewhere = set()
    for name, module in [(name, module) for name, module in sys.modules.items() if "." not in name]:
        if (here := getattr(module, "__spec__", None)) is not None and here.has_location:
            del sys.modules[name]  # else it would be what is found
            found = importlib.util.find_spec(name)
            if found is not None and found.origin == here.origin:
                sys.modules[name] = module
            else:
                elsewhere.add(name)
    for name in [name for name in sys.modules if name.partition(".")[0] in elsewhere]:
        del sys.modules[name]
    return elsewhere


def _run_program(program: _Program, *, told: socket.socket) -> NoReturn:
    """Run the program in a fork and send its exit status, negative for a signal."""
    process = os.fork()
    if not process:
        told.close()
        _become(program)
    _, status = os.waitpid(process, 0)
    told.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
    exit_at_once()


def _become(program: _Program) -> NoReturn:
    status: Any = 0
    try:
        for descriptor, name in enumerate(_PRINTED, start=1):
            file_descriptor = os.open(Path(program.folder, name), os.O_WRONLY | os.O_CREAT, 0o600)
            os.dup2(file_descriptor, descriptor)
            os.close(file_descriptor)
        os.environ.clear()
        os.environ.update(program.environment)
        os.chdir(program.cwd)
        if program.cpus:
            os.sched_setaffinity(0, program.cpus)
        sys.argv[:] = ["-c", *program.arguments]
        sys.modules["__main__"] = main_module = types.ModuleType("__main__")
        exec(program.code, main_module.__dict__)
    except SystemExit as ended:
        status = ended.code or 0
        if not isinstance(status, int):
            print(status, file=sys.stderr)
            status = 1
    except BaseException as error:
        of_program = error.__traceback__.tb_next if error.__traceback__ is not None else None
        traceback.print_exception(error.with_traceback(of_program))  # without this function's frame
        status = 1
    exit_at_once(status)


def _write(answer: _Answer, path: Path) -> None:
    replace_file(path, json.dumps(to_json(answer)))
