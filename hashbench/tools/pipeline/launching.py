"""Starting a run of a pipeline in a process that has run nothing before, and ending it with all that it started."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hashbench.diagnose.fresh_process import LAUNCHER, end_with_children, how_it_ended
from hashbench.errors import HashbenchError
from hashbench.io import PACKAGE_PARENT

ANSWER_FILE = "answer.json"
_CHILD = """
import sys
sys.path.append(sys.argv[1])
from hashbench.tools.pipeline.running import main
main()
"""


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
    with log.open("ab") as printed:
        child = subprocess.Popen(
            [sys.executable, "-P", "-c", LAUNCHER, "random", _CHILD, PACKAGE_PARENT],
            stdin=subprocess.PIPE,
            stdout=printed,
            stderr=printed,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            text=True,
            start_new_session=True,
        )
        try:
            assert child.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it died at once, which its exit code tells
                child.stdin.write(json.dumps(task) + "\n")
                child.stdin.flush()
            status = child.wait(timeout)
        except subprocess.TimeoutExpired:
            raise _failed(config, f"it took more than {timeout:g} s", log, "Give it more with --timeout.") from None
        finally:
            end_with_children(child)
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
        raise _failed(config, how_it_ended(status) or "it left no answer", log, "")
    error = answer["error"]
    if error is not None:
        tip = error["tip"] or f"What it printed is in {log}."
        raise HashbenchError(error["what"], consequence=error["consequence"], tip=tip)


def _failed(config: Path, reason: str, log: Path, tip: str) -> HashbenchError:
    tip = f"{tip} What it printed is in {log}.".strip()
    return HashbenchError(f"the pipeline {config} did not end", consequence=f"{reason}; nothing was compared", tip=tip)
