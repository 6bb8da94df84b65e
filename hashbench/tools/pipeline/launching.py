"""Starting a run of a pipeline in a process that has run nothing before, and ending it with all that it started."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hashbench.errors import HashbenchError
from hashbench.processes import Child, describe_end, python_calling

ANSWER_FILE = "answer.json"


def run(config: Path, folder: Path, *, hash_seed: str, hash_seed_by: str, timeout: float, log: Path) -> None:
    """Run the pipeline once, in a new interpreter with this ``PYTHONHASHSEED``; its files are then in ``folder``.

    What it prints goes to ``log``. It and its workers are ended when the time is over, on Ctrl-C, and when this process
    dies.

    Raises:
        HashbenchError: it failed, died or took more than ``timeout`` seconds.
    """
    task = {
        "config": str(config.resolve()),
        "folder": str(folder),
        "hash_seed": hash_seed,
        "hash_seed_by": hash_seed_by,
        "path": sys.path,
    }
    command = python_calling("hashbench.tools.pipeline.running:main", addresses="random")
    variables = {"PYTHONHASHSEED": hash_seed}
    text = json.dumps(task) + "\n"
    with (
        log.open("ab") as printed,
        Child(command, task=text, stdout=printed, stderr=printed, environment=variables) as child,
    ):
        status = child.wait(timeout)
    if status is None:
        raise _failed(config, f"it took more than {timeout:g} s", log, "Give it more with --timeout.")
    _raise_what_it_says(_answer(folder), config, status, log)


def _answer(folder: Path) -> Mapping[str, Any] | None:
    path = folder / ANSWER_FILE
    try:
        found: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    path.unlink()
    return found


def _raise_what_it_says(answer: Mapping[str, Any] | None, config: Path, status: int, log: Path) -> None:
    if answer is None:
        raise _failed(config, describe_end(status), log, "")
    error = answer["error"]
    if error is not None:
        tip = error["tip"] or f"What it printed is in {log}."
        raise HashbenchError(error["what"], consequence=error["consequence"], tip=tip)


def _failed(config: Path, reason: str, log: Path, tip: str) -> HashbenchError:
    tip = f"{tip} What it printed is in {log}.".strip()
    return HashbenchError(f"the pipeline {config} did not end", consequence=f"{reason}; nothing was compared", tip=tip)
