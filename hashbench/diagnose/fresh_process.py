"""Runs of a model in fresh processes: each builds the model anew, and no state survives between them.

The life of one process: a launcher of a few lines switches address randomisation off where that is asked for, and
becomes, by ``exec``, a Python that reads what to run from its standard input, runs it, and leaves traces in a temporary
folder. What it prints goes nowhere. It ends with its parent: it dies when its standard input ends.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic, sleep
from typing import Literal, NoReturn

from hashbench.errors import HashbenchError, named_line
from hashbench.io import from_json, replace_file, to_json
from hashbench.processes import Child, describe_end, end_with_input, exit_at_once, python_calling, uncollected
from hashbench.records import Failure, ModelSpec, RunOptions, Trace
from hashbench.trace import file

AT_ONCE = 2
"""Processes that run at the same time: importing torch keeps a core busy for seconds."""

DEFAULT_TARGET = "hashbench.check.model:BenchmarkRunner"

_ANSWER = "answer.json"
_POLL_SECONDS = 0.02
_RANDOM = {"PYTHONHASHSEED": "random"}
# Without the second one, the C library would give threads memory of their own in the order in which they happen to ask;
# without the third one, the first processes would compile what the next ones find compiled, which takes other memory.
_FIXED = {"PYTHONHASHSEED": "0", "MALLOC_ARENA_MAX": "1", "PYTHONDONTWRITEBYTECODE": "1"}
_NO_RANDOM_ADDRESSES = 0x0040000
_READ_PERSONALITY = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class FreshRuns:
    """``processes``: the traces of each process in which every run succeeded. ``failures``: what happened to each of
    the others, in words. ``note``: what could not be done as asked; else empty."""

    processes: tuple[tuple[Trace, ...], ...] = ()
    failures: tuple[str, ...] = ()
    note: str = ""


@dataclass(frozen=True, slots=True)
class _Task:
    """What a process is to do, and where it answers. ``path`` is ``sys.path``."""

    spec: ModelSpec
    options: RunOptions
    level: str
    runs: int
    target: str
    path: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Answer:
    """What a process leaves in its folder: the names of its ``traces``, or a ``failure``; see :class:`FreshRuns`."""

    traces: tuple[str, ...] = ()
    failure: str = ""
    note: str = ""


def fresh_traces(
    spec: ModelSpec,
    options: RunOptions,
    *,
    level: str,
    processes: int,
    runs: int,
    fixed_order: bool,
    timeout: float,
    target: str = DEFAULT_TARGET,
) -> FreshRuns:
    """Run a model ``runs`` times in each of so many fresh processes, two of which run at a time.

    Args:
        spec: the model, which each process builds from nothing.
        options: as in a sweep.
        level: ``on``, ``warn`` or ``off``: the deterministic settings.
        processes: how many.
        runs: traced runs in each.
        fixed_order: with string hashes and memory addresses the same in every process, by which sets and dictionaries
            of objects are ordered; otherwise both are random.
        timeout: seconds for all of them together; what has not ended then is a failure.
        target: ``module:class``. A process makes ``class(options).traces_of(spec, level=level, runs=runs)``, a list of
            traces and failures.
    """
    try:
        task = json.dumps(to_json(_Task(spec, options, level, runs, target, tuple(sys.path))))
    except (TypeError, ValueError):
        return FreshRuns(failures=("the model's arguments cannot be written as JSON",) * processes)
    traces, failures, notes = [], [], set()
    with tempfile.TemporaryDirectory(prefix="hashbench-") as parent:
        folders = [Path(parent, f"process-{number:04}") for number in range(processes)]
        for folder in folders:
            folder.mkdir()
        ended = _run_all(task, folders, fixed_order=fixed_order, deadline=monotonic() + timeout)
        for folder in folders:
            try:
                answer = from_json(_Answer, json.loads((folder / _ANSWER).read_text(encoding="utf-8")))
            except (OSError, ValueError):
                answer = _Answer(failure=ended[folder])
            notes |= {answer.note} - {""}
            try:
                read = tuple(file.read(folder / name) for name in answer.traces)
            except HashbenchError as error:
                answer = replace(answer, failure=answer.failure or str(error))
            if answer.failure:
                failures.append(answer.failure)
            else:
                traces.append(read)
    return FreshRuns(tuple(traces), tuple(failures), "; ".join(sorted(notes)))


# ------------------------------------------------------------------------------------------------- in the parent


def _run_all(task: str, folders: Sequence[Path], *, fixed_order: bool, deadline: float) -> dict[Path, str]:
    """Run one process in each folder; how each ended, in words."""
    order: Literal["fixed", "random"] = "fixed" if fixed_order else "random"
    ended: dict[Path, str] = {}
    running: dict[Path, Child] = {}
    waiting = list(folders)
    try:
        while waiting or running:
            if monotonic() > deadline:
                return ended | dict.fromkeys([*running, *waiting], "it was out of time")
            while waiting and len(running) < AT_ONCE:
                folder = waiting.pop(0)
                running[folder] = Child(
                    python_calling("hashbench.diagnose.fresh_process:main", addresses=order),
                    task=f"{json.dumps([order, str(folder)])}\n{task}\n",
                    environment=_FIXED if fixed_order else _RANDOM,
                )
            for folder, child in list(running.items()):
                if (status := child.status()) is not None:
                    ended[folder] = describe_end(status)
                    running.pop(folder).end()
            sleep(_POLL_SECONDS)
        return ended
    finally:
        for child in running.values():
            child.end()


# -------------------------------------------------------------------------------------------------- in the child


def main() -> NoReturn:
    """What a fresh process does: two lines from its standard input, then runs, then traces in its folder."""
    (order, folder), content = (json.loads(read()) for read in (sys.stdin.readline, sys.stdin.readline))
    end_with_input()
    try:
        sys.path[:] = content["path"]
        answer = _answer(from_json(_Task, content), Path(folder))
    except BaseException as error:
        answer = _Answer(failure=named_line(error))
    if order == "fixed" and not _addresses_are_fixed():
        answer = replace(answer, note="memory addresses could not be fixed")
    replace_file(Path(folder, _ANSWER), json.dumps(to_json(answer)))
    exit_at_once()  # whatever the model has started must not keep the answer waiting


def _answer(task: _Task, folder: Path) -> _Answer:
    module, _, name = task.target.partition(":")
    with uncollected():
        target = importlib.import_module(module)
        if "torch" in sys.modules:
            importlib.import_module("torch._dynamo")  # which the first run would
    gc.freeze()
    runner = getattr(target, name)(task.options)
    runs: list[Trace | Failure] = runner.traces_of(task.spec, level=task.level, runs=task.runs)
    failures = [run.error for run in runs if isinstance(run, Failure)]
    traces = {f"{number}.trace": run for number, run in enumerate(runs) if isinstance(run, Trace)}
    for file_name, trace in traces.items():
        file.write(trace, folder / file_name)
    return _Answer(tuple(traces), failures[0] if failures else "")


def _addresses_are_fixed() -> bool:
    try:
        return bool(ctypes.CDLL(None).personality(_READ_PERSONALITY) & _NO_RANDOM_ADDRESSES)
    except (AttributeError, OSError):
        return False
