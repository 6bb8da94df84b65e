"""Runs of a model in processes that have run nothing before: each builds the model anew, and nothing survives between
them.

The life of one process: a launcher of a few lines switches address randomisation off where that is asked for, and
becomes, by ``exec``, a Python that reads what to run from its standard input, runs it, and leaves traces in a temporary
folder. What it prints goes nowhere. It ends with its parent: it dies when its standard input ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import fcntl
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import Any, NoReturn

from hashbench.errors import HashbenchError
from hashbench.io import PACKAGE_PARENT
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
# Both with -P, so that a folder called torch where the user happens to stand is not taken for torch.
LAUNCHER = """
import ctypes, os, signal, sys
try:
    library = ctypes.CDLL(None)
    library.prctl(1, signal.SIGKILL)  # the parent may end at any moment, and an extension may hold the interpreter lock
    if sys.argv[1] == "fixed":
        library.personality(library.personality(0xFFFFFFFF) | 0x0040000)
except (AttributeError, OSError):
    pass  # no Linux: the child finds out, and says so
os.execv(sys.executable, [sys.executable, "-P", "-c", sys.argv[2], *sys.argv[3:]])
"""
_CHILD = """
import sys
sys.path.append(sys.argv[1])
from hashbench.diagnose.fresh_process import main
main()
"""


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
    """Run one process in each folder; how each ended, in words, empty where it ended well."""
    ended: dict[Path, str] = {}
    running: dict[Path, subprocess.Popen[str]] = {}
    waiting = list(places)
    try:
        while waiting or running:
            if monotonic() > deadline:
                ended |= dict.fromkeys([*running, *waiting], "it was out of time")
                break
            while waiting and len(running) < AT_ONCE:
                place = waiting.pop(0)
                running[place] = _start(task, place, fixed_order=fixed_order)
            for place in [place for place, child in running.items() if child.poll() is not None]:
                ended[place] = how_it_ended(running[place].returncode)
                end_with_children(running.pop(place))
            sleep(_POLL_SECONDS)
    finally:
        for child in running.values():
            end_with_children(child)
    return [ended[place] for place in places]


def _start(task: str, place: Path, *, fixed_order: bool) -> subprocess.Popen[str]:
    order = "fixed" if fixed_order else "random"
    child = subprocess.Popen(
        [sys.executable, "-P", "-c", LAUNCHER, order, _CHILD, PACKAGE_PARENT],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **(_FIXED if fixed_order else _RANDOM)},
        text=True,
        start_new_session=True,
    )
    assert child.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it died at once, which its exit code tells
        child.stdin.write(f"{json.dumps([order, str(place)])}\n{task}\n")
        child.stdin.flush()
    return child


def end_with_children(child: subprocess.Popen[str]) -> None:
    """End a process and whatever it has started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    if child.stdin is not None:
        with contextlib.suppress(BrokenPipeError):
            child.stdin.close()


def how_it_ended(status: int) -> str:
    if status < 0:
        return f"it was ended by signal {-status} ({signal.strsignal(-status)})"
    return f"it ended with exit code {status}" if status else ""


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
            return cls(failure=ended or "it left no answer")
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
    die_with_input()
    place = Path(folder)
    try:
        sys.path[:] = task["path"]
        found = _run(task)
        answer = _written(found, place)
    except BaseException as error:
        answer = {"traces": [], "failure": sentence(error)}
    answer["note"] = "" if order == "random" or _addresses_are_fixed() else "memory addresses could not be fixed"
    partial = place / f"{_ANSWER}.partial"
    partial.write_text(json.dumps(answer), encoding="utf-8")
    partial.rename(place / _ANSWER)
    os._exit(0)  # whatever the model has started must not keep the answer waiting


def _run(task: Mapping[str, Any]) -> list[Trace | Failure]:
    content = task["spec"]
    spec = ModelSpec(**{**content, "input_shape": tuple(content["input_shape"])})
    module, _, name = task["target"].partition(":")
    runner = getattr(importlib.import_module(module), name)(RunOptions(**task["options"]))
    found: list[Trace | Failure] = runner.traces_of(spec, level=task["level"], runs=task["runs"])
    return found


def _written(found: Sequence[Trace | Failure], place: Path) -> dict[str, Any]:
    failures = [run.error for run in found if isinstance(run, Failure)]
    names = []
    for number, trace in enumerate(run for run in found if isinstance(run, Trace)):
        names.append(f"{number}.trace")
        file.write(trace, place / names[-1])
    return {"traces": names, "failure": failures[0] if failures else ""}


def sentence(error: BaseException) -> str:
    text = str(error).strip() or "no message"
    return f"{type(error).__name__}: {text.splitlines()[0]}"


def _addresses_are_fixed() -> bool:
    try:
        return bool(ctypes.CDLL(None).personality(_READ_PERSONALITY) & _NO_RANDOM_ADDRESSES)
    except (AttributeError, OSError):
        return False


def die_with_input() -> None:
    """Give the model an empty standard input, and end this process group when the real one ends."""
    lifeline = os.dup(0)
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    if hasattr(fcntl, "F_SETSIG"):  # by the kernel: a thread would make memory addresses depend on its timing
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
        if not select.select([lifeline], [], [], 0)[0]:
            return
    threading.Thread(target=_wait_for_the_end, args=(lifeline,), name="hashbench lifeline", daemon=True).start()


def _wait_for_the_end(lifeline: int) -> None:
    while os.read(lifeline, 4096):
        pass
    os.killpg(0, signal.SIGKILL)
