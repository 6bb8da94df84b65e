"""A check: the pipeline run in a fresh process, and once more in another, to see whether it repeats. Imports no torch.

Where it does not, and the user did not fix ``PYTHONHASHSEED``, two more runs tell whether Python's hash seed is to
blame, by which sets are ordered: one with the first run's seed and one with the second's.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from hashbench.errors import HashbenchError
from hashbench.processes import Child, describe_end, python_calling
from hashbench.tools.pipeline import observed
from hashbench.tools.pipeline.comparing import STAGES, Verdict, compare
from hashbench.tools.pipeline.config import check_path
from hashbench.tools.pipeline.observed import REPEAT_FOLDER, Check, Repetition

ANSWER_FILE, LOG_FILE = "answer.json", "output.log"


def check(config: Path, output: Path, *, timeout: float, repeat: bool = True) -> Verdict | None:
    """Run the pipeline of ``config``, repeat it, and leave the folder ``output``; it appears when it is whole.

    Args:
        config: a Python or YAML file.
        output: a folder that is not there yet, or empty.
        timeout: seconds for each run.
        repeat: whether to run it again.

    Returns:
        The verdict on the two runs; ``None`` where it ran once.

    Raises:
        HashbenchError: the configuration or ``output`` cannot be used, or a run failed.
    """
    check_path(config)
    tip = "Choose another folder with --output-dir."
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        consequence = "nothing was run, so that nothing is lost"
        raise HashbenchError(f"{output} already exists", consequence=consequence, tip=tip)
    partial = output.with_name(f".{output.name}.{os.getpid()}.partial")
    log = output.with_name(f"{output.name}.log")
    given = os.environ.get("PYTHONHASHSEED", "")
    is_fixed = given.isdigit()
    hash_seeds = (given, given) if is_fixed else _two_hash_seeds()
    by = "user" if is_fixed else "hashbench"

    def run(name: str, number: int) -> Check:
        """One run with hash seed ``number``, read back from the folder ``name``; that of an experiment is removed."""
        folder = partial / name
        folder.mkdir(exist_ok=True)
        run_once(config, folder, hash_seed=hash_seeds[number], hash_seed_by=by, timeout=timeout, log=log)
        observed.seal(folder, None)
        check = observed.read(folder)
        if name not in ("", REPEAT_FOLDER):
            shutil.rmtree(folder)
        return check

    try:
        partial.mkdir(parents=True)
        log.unlink(missing_ok=True)
        first = run("", 0)
        verdict, repetition = _repeated(run, first, is_fixed=is_fixed) if repeat else (None, None)
        observed.seal(partial, repetition)
        log.replace(partial / LOG_FILE)
        with contextlib.suppress(FileNotFoundError):
            output.rmdir()
        partial.rename(output)
    except OSError as error:
        consequence = str(error.strerror or error)
        raise HashbenchError(f"cannot write the check {output}", consequence=consequence, tip=tip) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return verdict


def _two_hash_seeds() -> tuple[str, str]:
    """Python's hash seeds of the two runs where the user gave none."""
    first = secrets.randbelow(2**31) + 1
    return str(first), str(first + 1 + secrets.randbelow(2**31))


def _repeated(run: Callable[[str, int], Check], first: Check, *, is_fixed: bool) -> tuple[Verdict, Repetition]:
    second = run(REPEAT_FOLDER, 1)
    verdict = compare(first, second, hash_order=False if is_fixed else None)
    hash_order, runs = None, 2
    if not verdict.repeats and not is_fixed:  # do runs with the same hash seed agree up to this stage and beyond it?
        hash_order, runs = False, 3
        if _agree(first, run("experiment0", 0), verdict.first):
            hash_order, runs = _agree(second, run("experiment1", 1), verdict.first) or None, 4
        verdict = compare(first, second, hash_order=hash_order)
    return verdict, Repetition(verdict.repeats, verdict.first, hash_order, runs)


def _agree(check: Check, other: Check, stage: str) -> bool:
    first = compare(check, other).first
    return not first or STAGES.index(first) > STAGES.index(stage)


def run_once(config: Path, folder: Path, *, hash_seed: str, hash_seed_by: str, timeout: float, log: Path) -> None:
    """Run the pipeline once, in a new interpreter with this ``PYTHONHASHSEED``; its files are then in ``folder``.

    What it prints goes to ``log``. It and its workers are ended when the time is over, on Ctrl-C, and when this process
    dies.

    Raises:
        HashbenchError: it failed, died or took more than ``timeout`` seconds.
    """
    task = {"config": str(config.resolve()), "folder": str(folder), "path": sys.path}
    task |= {"hash_seed": hash_seed, "hash_seed_by": hash_seed_by}
    command = python_calling("hashbench.tools.pipeline.running:main", addresses="random")
    variables = {"PYTHONHASHSEED": hash_seed}
    text = json.dumps(task) + "\n"
    with (
        log.open("ab") as printed,
        Child(command, task=text, stdout=printed, stderr=printed, environment=variables) as child,
    ):
        status = child.wait(timeout)
    tip = f"What it printed is in {log}."
    if status is None:
        raise _unfinished(config, f"it took more than {timeout:g} s", f"Give it more with --timeout. {tip}")
    try:
        error = json.loads((folder / ANSWER_FILE).read_text(encoding="utf-8"))["error"]
    except (OSError, ValueError):
        raise _unfinished(config, describe_end(status), tip) from None
    (folder / ANSWER_FILE).unlink()
    if error is not None:
        raise HashbenchError(error["what"], consequence=error["consequence"], tip=error["tip"] or tip)


def _unfinished(config: Path, reason: str, tip: str) -> HashbenchError:
    return HashbenchError(f"the pipeline {config} did not end", consequence=f"{reason}; nothing was compared", tip=tip)
