"""Runs of a model in fresh processes: each builds the model anew, and no state survives between them.

The life of one process: a launcher of a few lines switches address randomisation off where that is asked for, and
becomes, by ``exec``, a Python that reads what to run from its standard input, runs it, and leaves traces in a temporary
folder. What it prints goes nowhere. It ends with its parent: it dies when its standard input ends.
"""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import importlib
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import Any, Literal, NoReturn

from hashbench.errors import HashbenchError, named_line
from hashbench.io import replace_file
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
    task = _task(spec, options, level=level, runs=runs, target=target)
    if task is None:
        return FreshRuns(failures=("the model's arguments cannot be written as JSON",) * processes)
    with tempfile.TemporaryDirectory(prefix="hashbench-") as folder:
        places = [Path(folder, f"process-{number:04}") for number in range(processes)]
        for place in places:
            place.mkdir()
        ended = _run_all(task, places, fixed_order=fixed_order, deadline=monotonic() + timeout)
        answers = [_Answer.read(place, how) for place, how in zip(places, ended, strict=True)]
    notes = sorted({answer.note for answer in answers} - {""})
    return FreshRuns(
        processes=tuple(answer.traces for answer in answers if not answer.failure),
        failures=tuple(answer.failure for answer in answers if answer.failure),
        note="; ".join(notes),
    )


def _task(spec: ModelSpec, options: RunOptions, *, level: str, runs: int, target: str) -> str | None:
    """What a process is to do, on one line; ``None`` where JSON cannot say it."""
    fields = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
    content = {
        "spec": {**fields, "arguments": dict(spec.arguments)},
        "options": dataclasses.asdict(options),
        "level": level,
        "runs": runs,
        "target": target,
        "path": sys.path,
    }
    try:
        return json.dumps(content)
    except (TypeError, ValueError):
        return None


# ------------------------------------------------------------------------------------------------- in the parent


def _run_all(task: str, places: Sequence[Path], *, fixed_order: bool, deadline: float) -> list[str]:
    """Run one process in each folder; how each ended, in words."""
    ended: dict[Path, str] = {}
    running: dict[Path, Child] = {}
    waiting = list(places)
    try:
        while waiting or running:
            if monotonic() > deadline:
                ended |= dict.fromkeys([*running, *waiting], "it was out of time")
                break
            while waiting and len(running) < AT_ONCE:
                place = waiting.pop(0)
                running[place] = _start(task, place, fixed_order=fixed_order)
            for place, child in list(running.items()):
                if (status := child.status()) is not None:
                    ended[place] = describe_end(status)
                    running.pop(place).end()
            sleep(_POLL_SECONDS)
    finally:
        for child in running.values():
            child.end()
    return [ended[place] for place in places]


def _start(task: str, place: Path, *, fixed_order: bool) -> Child:
    order: Literal["fixed", "random"] = "fixed" if fixed_order else "random"
    return Child(
        python_calling("hashbench.diagnose.fresh_process:main", addresses=order),
        task=f"{json.dumps([order, str(place)])}\n{task}\n",
        environment=_FIXED if fixed_order else _RANDOM,
    )


@dataclass(frozen=True, slots=True)
class _Answer:
    traces: tuple[Trace, ...] = ()
    failure: str = ""
    note: str = ""

    @classmethod
    def read(cls, place: Path, ended: str) -> _Answer:
        """What a process left in its folder."""
        try:
            content = json.loads((place / _ANSWER).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return cls(failure=ended)
        if content["failure"]:
            return cls(failure=content["failure"], note=content["note"])
        try:
            traces = tuple(file.read(place / name) for name in content["traces"])
        except HashbenchError as error:
            return cls(failure=str(error), note=content["note"])
        return cls(traces, note=content["note"])


# -------------------------------------------------------------------------------------------------- in the child


def main() -> NoReturn:
    """What a fresh process does: two lines from its standard input, then runs, then traces in its folder."""
    lines = sys.stdin.readline, sys.stdin.readline
    (order, folder), task = (json.loads(read()) for read in lines)
    end_with_input()
    folder_of_answer = Path(folder)
    try:
        sys.path[:] = task["path"]
        runs = _run(task)
        answer = _written(runs, folder_of_answer)
    except BaseException as error:
        answer = {"traces": [], "failure": named_line(error)}
    answer["note"] = "" if order == "random" or _addresses_are_fixed() else "memory addresses could not be fixed"
    replace_file(folder_of_answer / _ANSWER, json.dumps(answer))
    exit_at_once()  # whatever the model has started must not keep the answer waiting


def _run(task: Mapping[str, Any]) -> list[Trace | Failure]:
    content = task["spec"]
    spec = ModelSpec(**{**content, "input_shape": tuple(content["input_shape"])})
    module, _, name = task["target"].partition(":")
    with uncollected():
        target = importlib.import_module(module)
        if "torch" in sys.modules:
            importlib.import_module("torch._dynamo")  # which the first run would
    gc.freeze()
    runner = getattr(target, name)(RunOptions(**task["options"]))
    traces: list[Trace | Failure] = runner.traces_of(spec, level=task["level"], runs=task["runs"])
    return traces


def _written(runs: Sequence[Trace | Failure], folder: Path) -> dict[str, Any]:
    failures = [run.error for run in runs if isinstance(run, Failure)]
    names = []
    for number, trace in enumerate(run for run in runs if isinstance(run, Trace)):
        names.append(f"{number}.trace")
        file.write(trace, folder / names[-1])
    return {"traces": names, "failure": failures[0] if failures else ""}


def _addresses_are_fixed() -> bool:
    try:
        return bool(ctypes.CDLL(None).personality(_READ_PERSONALITY) & _NO_RANDOM_ADDRESSES)
    except (AttributeError, OSError):
        return False
