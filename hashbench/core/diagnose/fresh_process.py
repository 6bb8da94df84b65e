"""Run a model in fresh processes: each builds the model anew, and no state survives between them.

Each is a fork of a fork server (:mod:`hashbench.core.workers`). A sweep starts one server for them (:func:`served`),
which has other string hashes and addresses than the workers. If it dies it is not restarted, and callers get a failure
at once. Repros run in forks of it, too (:func:`run_python`). Several processes of one experiment are forks of as many
servers, each with string hashes of its own, which start with the first experiment that needs them (:func:`pooled`);
those of a fixed order are forks of one more. Where there is none, a server is started for each.

A fork makes the runs and writes the traces to a temporary folder. Its output is discarded. All exit with the process
that asked.
"""

from __future__ import annotations

import functools
import gc
import importlib
import importlib.util
import json
import os
import sys
import tempfile
import types
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from pkgutil import resolve_name
from time import monotonic
from typing import Any, NoReturn

from hashbench.core.errors import HashbenchError, named_line
from hashbench.core.io import from_json, read_json, replace_file, to_json
from hashbench.core.processes import (
    NO_VARIABLES,
    Finished,
    available_memory_mib,
    describe_end,
    exit_at_once,
    import_or_call,
    new_python,
    peak_memory_mib,
    return_free_memory,
    uncollected,
    variables,
)
from hashbench.core.records import Failure, ModelSpec, RunOptions, Trace
from hashbench.core.trace import file
from hashbench.core.workers import LOST, START_SECONDS, Fork, ServerProcess, exit_status_of, request_for

PROCESSES = 4
"""Fresh processes of one experiment. That four pairs differ and their first runs agree has p = 0.03 by chance; that
with a fixed order three agree with a fourth, where three others did not, p = 0.05."""

AT_ONCE = 2
"""Processes that run concurrently if memory suffices: importing torch keeps a core busy for seconds."""

DEFAULT_TARGET = "hashbench.core.check.model:BenchmarkRunner"

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
_ELSEWHERE = b"a new Python has to run it"

_RANDOM = {"PYTHONHASHSEED": "random"}
# Without the second one, the C library would give threads memory of their own in the order in which they happen to ask;
# without the third one, the first fork would compile what the next ones find compiled, which takes other memory.
_FIXED = {"PYTHONHASHSEED": "0", "MALLOC_ARENA_MAX": "1", "PYTHONDONTWRITEBYTECODE": "1"}

_OUT_OF_TIME = "it was out of time"
_SERVER_ENDED = "the server of fresh processes has ended"


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
class _FreshRunsTask:
    """The task of a fork.

    Attributes:
        folders: one per fork, for its answer.
        at_once: how many forks run concurrently.
    """

    spec: ModelSpec
    options: RunOptions
    level: str
    runs: int
    target: str
    threads: int | None = None
    folders: tuple[str, ...] = ()
    at_once: int = AT_ONCE


@dataclass(frozen=True, slots=True)
class _Answer:
    """The answer of a process, in its folder: the names of its ``traces``, or a ``failure``; see :class:`FreshRuns`."""

    traces: tuple[str, ...] = ()
    failure: str = ""


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
            ordered; otherwise both are random (see :mod:`hashbench.core.run.addresses`).
        threads: of the runs; ``None``: those of the options, with which the model is built in any case.
        target: ``module:class``. A process makes ``class(options).traces_of(spec, level=level, runs=runs,
            threads=threads)``, a list of traces and failures.
    """
    at_once = _at_once() if processes > 1 else 1
    task = _FreshRunsTask(spec, options, level, runs, target, threads, at_once=at_once)
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
        addresses, environment = ([fixed] if fixed else [], _FIXED) if fixed_order else (pool, _RANDOM)
        several = processes > 1 or fixed_order
        if several or not is_served():
            known = addresses if several and len(groups) <= len(addresses) else []
            new = functools.partial(_server, target, (), order=environment)
            yield lambda seconds: _read(
                folders, _run_all(tasks, known, new, at_once=at_once, deadline=monotonic() + seconds)
            )
        else:
            ended = stack.enter_context(_asked_of(os.environ[SERVER_VARIABLE], tasks[groups[0]]))
            yield lambda seconds: _read(folders, {folders[0]: _in_words(ended(seconds))})


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
            answer = _Answer(failure=ended.get(folder, _OUT_OF_TIME))
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
        _server(target, preload, environment, at_once=at_once) as server,
        variables({SERVER_VARIABLE: server.address, LOADED_VARIABLE: " ".join((target, *preload))}),
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
        addresses = [
            stack.enter_context(_server(target, preload, environment, at_once=False, order=order)).address
            for order in orders
        ]
        stack.enter_context(variables({POOL_VARIABLE: os.pathsep.join(addresses)}))
        yield


def _server(
    target: str,
    preload: Sequence[str],
    environment: Mapping[str, str] = NO_VARIABLES,
    *,
    at_once: bool = True,
    order: Mapping[str, str] = _RANDOM,
) -> ServerProcess:
    """Start a server; ``order`` are its variables for string hashes and memory."""
    given = {name: value for name, value in environment.items() if name not in os.environ}
    names = (*_loaded_for(target), *preload)
    return ServerProcess(names, environment={**given, **order}, at_once=at_once)


def _loaded_for(target: str) -> tuple[str, ...]:
    """Return what a server imports and calls for ``target``."""
    return __name__, target.partition(":")[0], f"{__name__}:load_dynamo"


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
def _asked_of(address: str, task: str) -> Iterator[Callable[[float], int | None]]:
    """Send ``task`` to a server; yield a function that waits, and returns the exit status of its process as
    :meth:`Fork.wait`. It may have left an answer."""
    with ExitStack() as stack:
        fork = None
        with suppress(OSError):
            request = request_for(f"{__name__}:answer_task", task)
            fork = stack.enter_context(Fork(address, request, seconds=START_SECONDS))
        yield lambda seconds: LOST if fork is None else fork.wait(seconds)


def _in_words(status: int | None) -> str:
    return _OUT_OF_TIME if status is None else _SERVER_ENDED if status == LOST else describe_end(status)


def run_python(code: str, *arguments: str, seconds: float) -> Finished:
    """Run ``python -P -c CODE ARGUMENTS`` with an empty standard input, for at most ``seconds``.

    A fork of the server does it if there is one, which spares the import of torch; a new Python otherwise, or if the
    server dies before it reports the exit status. Both find the same modules at the same places.
    """
    if is_served():
        with (
            tempfile.TemporaryDirectory(prefix="hashbench-", ignore_cleanup_errors=True) as folder,
            suppress(OSError),
        ):
            request = request_for(f"{__name__}:run_program", code, arguments, folder, dict(os.environ), new_path=True)
            with Fork(os.environ[SERVER_VARIABLE], request, seconds=seconds) as fork:
                status, is_elsewhere = fork.wait(seconds), bool(fork.text())
            if status != LOST and not is_elsewhere:
                texts = (Path(folder, name) for name in _PRINTED)
                return Finished(status, *(text.read_text(errors="replace") if text.exists() else "" for text in texts))
    return new_python(code, *arguments, seconds=seconds)


def _run_all(
    tasks: Mapping[tuple[str, ...], str],
    addresses: Sequence[str],
    new: Callable[[], ServerProcess],
    *,
    at_once: int,
    deadline: float,
) -> dict[str, str]:
    """Send each group of folders to another server, ``at_once`` at a time; return by folder how that ended, in words.

    ``new`` starts servers where there are no addresses, or where those have died.
    """
    ended: dict[str, str] = {}
    lost: dict[tuple[str, ...], str] = {}
    groups = list(tasks)
    for start in range(0, len(groups), at_once):
        if monotonic() > deadline:
            break
        batch = range(start, min(start + at_once, len(groups)))
        with ExitStack() as stack:
            servers = [addresses[n] if addresses else stack.enter_context(new()).address for n in batch]
            asked = [
                (groups[n], stack.enter_context(_asked_of(server, tasks[groups[n]])))
                for n, server in zip(batch, servers, strict=True)
            ]
            for group, waited in asked:
                status = waited(max(0.001, deadline - monotonic()))
                ended |= dict.fromkeys(group, _in_words(status))
                if status == LOST and addresses:
                    lost[group] = tasks[group]
    return ended | _run_all(lost, (), new, at_once=at_once, deadline=deadline) if lost else ended


# -------------------------------------------------------------------------------------------------- in the child


def load_dynamo() -> None:
    """Import what the first run would, where torch is loaded."""
    if "torch" in sys.modules:
        importlib.import_module("torch._dynamo")


def answer_task(text: str, _report: int) -> NoReturn:
    """Run the task, in this process, or in one fork for each of several folders."""
    task = from_json(_FreshRunsTask, json.loads(text))
    if len(task.folders) == 1:
        _answer(task, Path(task.folders[0]))
    _answer_all(task)
    exit_at_once()


def _answer_all(task: _FreshRunsTask) -> None:
    """Import, then fork for each folder of ``task``, at most ``task.at_once`` at a time.

    The forks have the same string hashes and memory addresses as long as nothing is allocated between them. New
    interpreters do not, even with a fixed seed and without random addresses: Python lists the folders of ``sys.path``,
    so that a file written there meanwhile moves all later allocations.
    """
    with uncollected():
        import_or_call(_loaded_for(task.target))
    gc.freeze()
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


def _answer(task: _FreshRunsTask, folder: Path) -> NoReturn:
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
    exit_at_once()  # whatever the model has started must not keep the answer waiting


def _forgotten() -> set[str]:
    """Purge and return the packages that a fresh interpreter would resolve differently or not at all."""
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


def run_program(
    code: str, arguments: Sequence[str], folder: str, environment: Mapping[str, str], report: int
) -> NoReturn:
    """Run ``code`` as a new Python would; output and errors go to files in ``folder``. Where this process cannot, its
    report says so."""
    if environment.get("PYTHONPATH") != os.environ.get("PYTHONPATH") or "torch" in _forgotten():
        os.write(report, _ELSEWHERE)
        exit_at_once()
    for descriptor, name in enumerate(_PRINTED, start=1):
        file_descriptor = os.open(Path(folder, name), os.O_WRONLY | os.O_CREAT, 0o600)
        os.dup2(file_descriptor, descriptor)
        os.close(file_descriptor)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[:] = ["-c", *arguments]
    sys.modules["__main__"] = main_module = types.ModuleType("__main__")
    exit_at_once(exit_status_of(functools.partial(exec, code, main_module.__dict__)))


def _write(answer: _Answer, path: Path) -> None:
    replace_file(path, json.dumps(to_json(answer)))
