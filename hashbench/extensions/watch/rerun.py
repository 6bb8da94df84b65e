"""Run a training script uninterrupted, and stopped and resumed, and judge the recordings."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from hashbench.core.errors import HashbenchError, last_line
from hashbench.core.processes import Child, describe_end, tell_phase
from hashbench.extensions.watch import file
from hashbench.extensions.watch.resume import ResumeVerdict, began_anew, judge_folders, restored_at
from hashbench.extensions.watch.text import headline
from hashbench.extensions.watch.traced import compare_folders

RUN = "{run}"
"""Stands in an argument of the script for the folder of a run."""

STEPS = 8
"""Steps compared after the resumption, where nobody asks for more."""


def resume(script: Path, arguments: Sequence[str], *, at: int, output: Path, steps: int = STEPS) -> ResumeVerdict:
    """Run ``script`` three times: up to some steps behind ``at``, up to ``at``, and from there on.

    Each run has a folder of its own, the last two the same one: the working directory, or where an argument says
    ``{run}``. The script must save a checkpoint in it and go on from one that is there.

    Args:
        script: Python file, which uses ``hashbench.watch`` or a callback of it.
        arguments: of the script.
        at: step before which the second run is stopped.
        output: new folder for runs, recordings and what the script prints.
        steps: number of steps to compare after it.

    Raises:
        HashbenchError: the folder exists, a run failed or recorded nothing, the runs differ before ``at``, or the third
            one began anew.
    """
    if not script.is_file():
        problem = f"cannot run {script}"
        raise HashbenchError(problem, consequence="there is no such file", tip="Check the path.")
    try:
        output.mkdir(parents=True)
    except OSError as error:
        problem = f"cannot make the folder {output}"
        raise HashbenchError(problem, consequence=error.strerror or str(error), tip="Choose another one.") from error
    stages = (
        ("uninterrupted", "uninterrupted", at + steps),
        ("stopped", "resumed", at),
        ("resumed", "resumed", at + steps),
    )
    for name, run, stop in stages:
        tell_phase(f"{name} run of {script.name}")
        _run(script, arguments, recording=output / f"{name}.watch", run=output / run, stop=stop)
    whole, stopped, resumed = (output / f"{name}.watch" for name, *_ in stages)
    before = compare_folders(whole, stopped)
    if before.first is not None:
        raise HashbenchError(
            f"the runs differ before step {at}, where nothing was resumed yet ({headline(before)})",
            consequence="what a resumption loses is not known",
            tip=f"See `hashbench watch diff {whole} {stopped}`.",
        )
    return judge_folders(whole, resumed, at=_begins_at(whole, resumed, stopped=at))


def _run(script: Path, arguments: Sequence[str], *, recording: Path, run: Path, stop: int) -> None:
    run.mkdir(exist_ok=True)
    placed = any(RUN in argument for argument in arguments)
    words = [argument.replace(RUN, str(run.absolute())) for argument in arguments]
    environment = {
        "HASHBENCH_WATCH": str(recording.absolute()),
        "HASHBENCH_WATCH_EVERY": "1",
        "HASHBENCH_STOP_AT": str(stop),
    }
    log = recording.with_suffix(".log")
    command, where = [sys.executable, str(script.absolute()), *words], None if placed else run
    with (
        log.open("wb") as said,
        Child(
            command,
            stdin=None,
            stdout=said,
            stderr=said,
            environment=environment,
            cwd=where,
            own_session=False,
            guarded=True,
        ) as child,
    ):
        status = child.wait()
    words_of_run = last_line(log.read_text(encoding="utf-8", errors="replace"))
    if status:
        raise HashbenchError(
            f"{script} failed in its {recording.stem} run",
            consequence=f"{describe_end(status)} ({words_of_run})",
            tip=f"What it printed is in {log}.",
        )
    if not recording.is_dir():
        raise HashbenchError(
            f"{script} recorded nothing in its {recording.stem} run",
            consequence="nothing was compared",
            tip="Put hashbench.watch, or a WatchCallback, around its training.",
        )


def _begins_at(whole: Path, resumed: Path, *, stopped: int) -> int | None:
    """Return the step with which the resumed run begins; ``None`` where it tells itself."""
    first, second = (file.read(next(iter(file.ranks(folder).values()))) for folder in (whole, resumed))
    if began_anew(first, second):
        raise HashbenchError(
            "the resumed run began anew, with the state of the uninterrupted run's first step",
            consequence="it found no checkpoint; nothing was compared",
            tip="The script must save one in its working directory (or where {run} says), and go on from it.",
        )
    if second.header.start != 0:
        return None if second.header.start else stopped
    found = restored_at(first, second)
    if found is None:
        raise HashbenchError(
            "the resumed run counts its steps from 0, and the uninterrupted run never had the parameters it began with",
            consequence="it is not known where it goes on; nothing was compared",
        )
    return found
