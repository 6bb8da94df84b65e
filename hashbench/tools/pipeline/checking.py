"""A check: the pipeline run in a fresh process, and once more in another, to see whether it repeats. Imports no torch.

Where it does not, and the user did not fix ``PYTHONHASHSEED``, two more runs tell whether Python's hash seed is to
blame, by which sets are ordered: one with the first run's seed and one with the second's.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hashbench.errors import HashbenchError
from hashbench.tools.pipeline import checkfolder, launching
from hashbench.tools.pipeline.checkfolder import REPEAT_FOLDER, Check
from hashbench.tools.pipeline.comparing import Verdict, compare
from hashbench.tools.pipeline.config import check_path
from hashbench.tools.pipeline.observed import Repetition
from hashbench.tools.pipeline.stages import STAGES

LOG_FILE = "output.log"


@dataclass(frozen=True, slots=True)
class Checked:
    """What ``check`` made: the check as it is on disk, and the verdict on its two runs (``None``: it ran once)."""

    check: Check
    verdict: Verdict | None


def check(config: Path, output: Path, *, timeout: float, repeat: bool = True) -> Checked:
    """Run the pipeline of ``config``, repeat it, and leave the folder ``output``; it appears when it is whole.

    Args:
        config: a Python or YAML file.
        output: a folder that is not there yet, or empty.
        timeout: seconds for each run.
        repeat: whether to run it again.

    Raises:
        HashbenchError: the configuration or ``output`` cannot be used, or a run failed.
    """
    check_path(config)
    _check_output(output)
    partial = output.with_name(f".{output.name}.{os.getpid()}.partial")
    log = output.with_name(f"{output.name}.log")
    runs = _Runs(config, partial, timeout=timeout, log=log, hash_seeds=_hash_seeds(os.environ))
    try:
        partial.mkdir(parents=True)
        log.unlink(missing_ok=True)
        first = runs.run("", 0)
        verdict, repetition = _repeated(runs, first) if repeat else (None, None)
        checkfolder.seal(partial, repetition)
        log.replace(partial / LOG_FILE)
        with contextlib.suppress(FileNotFoundError):
            output.rmdir()
        partial.rename(output)
    except OSError as error:
        raise _cannot_write(output, error) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return Checked(Check(str(output), first.seen, repetition), verdict)


def _repeated(runs: _Runs, first: Check) -> tuple[Verdict, Repetition]:
    second = runs.run(REPEAT_FOLDER, 1)
    verdict = compare(first, second, hash_order=False if runs.seeds_are_fixed else None)
    hash_order, extra = None, 0
    if not verdict.repeats and not runs.seeds_are_fixed:
        hash_order, extra = _tried(runs, first, second, verdict.first)
        verdict = compare(first, second, hash_order=hash_order)
    return verdict, Repetition(verdict.repeats, verdict.first, hash_order, 2 + extra)


def _tried(runs: _Runs, first: Check, second: Check, stage: str) -> tuple[bool | None, int]:
    """Whether runs with the same hash seed agree up to this stage and beyond it, and how many runs that took."""
    with_first = runs.run("experiment0", 0)
    if not _agree(first, with_first, stage):
        return False, 1
    return (True, 2) if _agree(second, runs.run("experiment1", 1), stage) else (None, 2)


def _agree(one: Check, other: Check, stage: str) -> bool:
    found = compare(one, other).first
    return not found or STAGES.index(found) > STAGES.index(stage)


class _Runs:
    """Runs of one pipeline, each into a folder of its own in ``folder``."""

    def __init__(
        self, config: Path, folder: Path, *, timeout: float, log: Path, hash_seeds: tuple[str, str] | str
    ) -> None:
        self.config, self.folder, self.timeout, self.log = config, folder, timeout, log
        self.seeds_are_fixed = isinstance(hash_seeds, str)
        self.hash_seeds = (hash_seeds, hash_seeds) if isinstance(hash_seeds, str) else hash_seeds

    def run(self, name: str, number: int) -> Check:
        """One run with hash seed ``number``, read back from the folder ``name``; that of an experiment is removed."""
        place = self.folder / name
        place.mkdir(exist_ok=True)
        launching.run(
            self.config,
            place,
            hash_seed=self.hash_seeds[number],
            hash_seed_by="user" if self.seeds_are_fixed else "hashbench",
            timeout=self.timeout,
            log=self.log,
        )
        checkfolder.seal(place, None)
        found = checkfolder.read(place)
        if name not in ("", REPEAT_FOLDER):
            shutil.rmtree(place)
        return found


def _hash_seeds(environment: Mapping[str, str]) -> tuple[str, str] | str:
    """Python's hash seeds of the two runs: the user's where there is one, else two that differ."""
    given = environment.get("PYTHONHASHSEED", "")
    if given.isdigit():
        return given
    first = secrets.randbelow(2**31) + 1
    return str(first), str(first + 1 + secrets.randbelow(2**31))


def _check_output(output: Path) -> None:
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise HashbenchError(
            f"{output} is there already",
            consequence="nothing was run, so that nothing is lost",
            tip="Choose another folder with --output-dir.",
        )


def _cannot_write(output: Path, error: OSError) -> HashbenchError:
    return HashbenchError(
        f"cannot write the check {output}",
        consequence=f"{error.strerror or error}",
        tip="Choose another folder with --output-dir.",
    )
