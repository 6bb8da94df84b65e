"""From folders to a judged night: the one place where history, expectations and the night before come together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hashbench.errors import HashbenchError
from hashbench.report.expectations import Judged, judge
from hashbench.report.history import History, Night, load_history
from hashbench.results.load import Sweep, csv_files, joined, load_file, load_sweep


@dataclass(frozen=True, slots=True)
class Assessment:
    """The last night of ``history``, ``judged``."""

    history: History
    judged: Judged


def assess(folders: Sequence[Path | str], *, expected: Path | None = None, until: Path | None = None) -> Assessment:
    """Judge the last night at ``folders``.

    Args:
        folders: as :func:`~hashbench.report.history.load_history` takes them.
        expected: a CSV of expected rows, or a folder of such.
        until: the folder of the night that is to be the last; later ones are left out.

    Raises:
        HashbenchError: a folder or file cannot be read, or ``expected`` is no CSV of hashbench's.
    """
    wanted = _expected(expected) if expected is not None else None
    history = load_history(folders, until=until)
    new = _sweep_of(history.nights[-1])
    before = next((index for index in range(len(history.nights) - 2, -1, -1) if history.nights[index].counts), None)
    last = _sweep_of(history.nights[before]) if before is not None else None
    return Assessment(history=history, judged=judge(history, new, expected=wanted, last=last, before=before))


def _expected(path: Path) -> Sweep:
    sweep = load_sweep(path)
    if sweep.kind != "hashbench":
        raise HashbenchError(
            f"{path} is dynamo's",
            consequence="it names no suites, modes and kernels, so it does not say what to expect of a night",
            tip="Compare with it by `hashbench compare`, or make one by `hashbench expect`.",
        )
    return sweep


def _sweep_of(night: Night) -> Sweep:
    """The whole rows of a night; files that are among its problems are left out."""
    try:
        return load_sweep(night.folder)
    except HashbenchError:
        if not night.problems:
            raise
    parts: list[Sweep] = []
    for file in csv_files(night.folder) if night.counts else []:
        try:
            part = load_file(file)
            joined([*parts, part], path=night.folder, damaged_night=True)
        except HashbenchError:
            continue  # it is one of the problems
        parts.append(part)
    return joined(parts, path=night.folder, damaged_night=True)
