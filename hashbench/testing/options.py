"""How a check makes its runs, where it keeps files, and how it fails. No torch."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hashbench.core.finding import Finding

SEED, REPLAYS, BUDGET = 1337, 20, 30.0
"""Defaults: of the generators, of repetitions of an experiment, and of seconds for all experiments."""
TRACERS = ("auto", "native", "python")


class CheckFailedError(AssertionError):
    """A check found a difference, could not compare, or was asked for something wrong; its text says which.

    Attributes:
        findings: the reports in its text, which have more (``hashbench.core.finding``: JSON, a page); empty if nothing
            was compared.
    """

    __module__ = "hashbench.testing"  # whence users import it, as tracebacks name it

    def __init__(self, text: str, *findings: Finding) -> None:
        super().__init__(text)
        self.findings = findings


@dataclass(frozen=True, slots=True)
class Options:
    """How one function is run; what the marker takes.

    Args:
        runs: how often; all runs are compared with the first. ``None``: 5 where the first run takes less than 50 ms,
            else 2.
        seed: torch's, NumPy's and Python's global generators are set to it before every run.
        deterministic: ``on``, ``warn`` or ``off`` puts the settings of a sweep in force
            (``torch.use_deterministic_algorithms``, library flags); ``None``: those that the caller has.
        diagnose: look for the cause of a difference, which runs the function many more times.
        ops: compare what every op left, not results alone. ``None``: the marker does, ``assert_runs_equal`` does not.
        allow_empty: a function that returns nothing and runs no op passes.
        tracer: ``auto``, ``native`` or ``python`` records the ops.
        stress: runs that agree are made again under perturbations that must not matter (more threads than cores, load,
            different content in fresh memory, other addresses, the garbage collector at other moments), which must
            agree, too. A function is not run in a fresh process.
        replays: least repetitions of an experiment on a difference.
        diagnose_budget: seconds for the experiments on one difference; 0: none.
        output: folder for traces and repros of a difference, which is made then. An existing one is kept, and ``-2``
            added to the name. ``None``: a new temporary folder.
    """

    runs: int | None = None
    seed: int = SEED
    deterministic: str | None = None
    diagnose: bool = True
    ops: bool | None = None
    allow_empty: bool = False
    tracer: str = "auto"
    stress: bool = False
    replays: int = REPLAYS
    diagnose_budget: float = BUDGET
    output: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        for name in ("runs", "replays"):
            number = getattr(self, name)
            if number is not None and (type(number) is not int or number < 2):
                raise CheckFailedError(f"{name} must be an int >= 2, got {number!r}")
        if self.deterministic not in (None, "on", "warn", "off"):
            raise CheckFailedError(f"deterministic must be 'on', 'warn', 'off' or None, got {self.deterministic!r}")
        if self.tracer not in TRACERS:
            raise CheckFailedError(f"tracer must be {', '.join(map(repr, TRACERS))} or None, got {self.tracer!r}")
        if type(self.seed) is not int or not 0 <= self.seed < 2**32:
            raise CheckFailedError(f"seed must be an int from 0 to 2**32 - 1, got {self.seed!r}")
        budget = self.diagnose_budget
        if type(budget) not in (int, float) or not 0 <= budget < float("inf"):
            raise CheckFailedError(f"diagnose_budget must be a number >= 0, got {budget!r}")
        if self.output is not None and (wrong := why_no_folder(Path(self.output))):
            raise CheckFailedError(f"output: {wrong}")


EVERY = ("seed", "deterministic", "diagnose", "tracer", "replays", "diagnose_budget", "output")
"""Options of checks that look for a cause."""
NAMES = tuple(field.name for field in dataclasses.fields(Options))
"""Options of :meth:`~hashbench.testing.asserts.Asserts.assert_runs_equal`."""


def options_of(
    asked: Mapping[str, Any], defaults: Mapping[str, Any], *, of: str, names: Sequence[str] = NAMES, own: str = ""
) -> Options:
    """Return the options of a check; ``None`` is as good as not set.

    Args:
        asked: by the call.
        defaults: where the call sets nothing.
        of: name of the check.
        names: options that it has.
        own: names of its other parameters, joined by commas.

    Raises:
        CheckFailedError: an unknown option, or a wrong value.
    """
    if unknown := sorted(asked.keys() - set(names)):
        raise CheckFailedError(f"{of} has no option {unknown[0]}; it has {', '.join(filter(None, (own, *names)))}")
    given = {name: value for name, value in asked.items() if value is not None}
    return Options(**{**defaults, **given})


def why_no_folder(path: Path) -> str:
    """Return why no folder can be made at a path; empty if one can, or is there."""
    existing = next(each for each in (path, *path.absolute().parents) if each.exists())
    return "" if existing.is_dir() else f"{existing} is not a folder"


@contextlib.contextmanager
def folder_of(options: Options) -> Iterator[Path]:
    """Yield the folder for the files of one check: one that is not there yet, or a new temporary one, which is removed
    if it stays empty."""
    if options.output is not None:
        path = Path(options.output)
        numbered = (path.with_name(f"{path.name}-{number}") for number in itertools.count(2))
        yield next(folder for folder in itertools.chain((path,), numbered) if not folder.exists())
        return
    folder = Path(tempfile.mkdtemp(prefix="hashbench-"))
    try:
        yield folder
    finally:
        with contextlib.suppress(OSError):  # it has files
            folder.rmdir()
