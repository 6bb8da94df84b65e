"""Suites: where models come from.

* A bundled suite is a CSV in the data folder (:mod:`hashbench.suites.csv_file`). Its models are built by the Python
  files in the folder of the same name beside the CSV where there is one (``specimens``), else by the module of that
  name in this package (``torchvision``). ``<suite>_tiny`` is its small variant, built by the same module.
* A package's suite is an entry point of the group ``hashbench.suites`` (:mod:`hashbench.suites.plugins`).
* A user's suite is the path of a Python file (:mod:`hashbench.suites.zoo_file`).

Nothing here imports torch before :func:`load`.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hashbench.errors import HashbenchError
from hashbench.records import MODES, ModelSpec
from hashbench.suites import catalog as bundled
from hashbench.suites import csv_file, plugins, torchbench, zoo_file
from hashbench.suites.catalog import Chosen, how_to_install, require
from hashbench.suites.selection import select, unknown_name

if TYPE_CHECKING:
    from hashbench.run.workload import Workload

__all__ = ["SUITES", "Chosen", "catalog", "choose", "how_to_install", "load", "names", "require", "select"]

SUITES: tuple[str, ...] = csv_file.suite_names()
"""Names of the bundled suites."""


def names() -> tuple[str, ...]:
    """Names of all suites that there are, without the small variants: the bundled ones, then those of packages."""
    return (*(name for name in SUITES if not name.endswith(bundled.TINY)), *plugins.suite_names())


def choose(wanted: Sequence[str], *, tiny: bool = False) -> Chosen:
    """What names on a command line stand for: ``all`` are the bundled suites that can be swept here.

    Raises:
        HashbenchError: two zoo files have one name.
    """
    chosen = bundled.choose(wanted, known=SUITES, tiny=tiny)
    _refuse_same_names([Path(suite).absolute() for suite in chosen.suites if _is_file(suite)])
    return chosen


def catalog(suite: str) -> tuple[ModelSpec, ...]:
    """All models of a suite, sorted by name.

    Args:
        suite: a name in :func:`names` or :data:`SUITES`, or the path of a Python file with functions that build models;
            that one, like a package's, is imported in a child process.

    Raises:
        HashbenchError: there is no such suite, two have this name, or it is wrong.
    """
    if suite in SUITES:
        return _bundled(suite)
    if _is_file(suite):
        _refuse_taken_name(f"the zoo file {suite}", Path(suite).stem, tip="Rename the file.")
        return zoo_file.catalog(Path(suite).absolute())
    if suite in plugins.suite_names():
        return plugins.catalog(suite)
    tip = f"Choose one of {', '.join(names())}, or give the path of a Python file."
    raise unknown_name("suite", suite, [*SUITES, *names(), bundled.ALL], tip=tip)


def load(spec: ModelSpec, *, batch_size: int | None = None, mode: str) -> Workload:
    """Build one model, its inputs and its loss. Random values come from torch's global generator.

    Args:
        spec: from :func:`catalog`.
        batch_size: in place of the spec's own. A function that takes none makes its own inputs.
        mode: ``training`` or ``inference``.

    Raises:
        HashbenchError: ``mode`` or ``batch_size`` does not apply, or the model's function returned something else.
        Exception: whatever building the model raises.
    """
    if mode not in MODES:
        raise HashbenchError(f"unknown mode {mode!r}", tip=f"Choose one of {', '.join(MODES)}.")
    if spec.batch_size is None:
        _refuse_batch_size(spec, batch_size)
    size = batch_size if batch_size is not None else spec.batch_size
    files = _zoo_files(spec)
    if files:
        return zoo_file.build(files, spec.name, batch_size=size)
    if spec.suite not in SUITES:
        return plugins.build(spec.suite, spec.name, batch_size=size)
    if size is None or size < 1:
        raise HashbenchError(f"cannot run {spec.name} with batch size {size}", tip="Give --batch-size 1 or more.")
    module = importlib.import_module(f"hashbench.suites.{bundled.module_name(spec.suite)}")
    workload: Workload = module.load(spec, batch_size=size, mode=mode)
    return workload


def _bundled(suite: str) -> tuple[ModelSpec, ...]:
    if suite in plugins.suite_names():
        raise HashbenchError(
            f"an installed package brings a suite {suite!r}",
            consequence="hashbench has one of that name",
            tip="Rename the package's entry point, or uninstall it.",
        )
    known = csv_file.read_suite(csv_file.data_folder() / f"{suite}.csv", suite=suite)
    return torchbench.catalog(known) if suite == "torchbench" and not how_to_install(suite) else known


def _is_file(suite: str) -> bool:
    if suite.endswith(".py") or len(Path(suite).parts) > 1:
        return True
    return suite not in (bundled.ALL, *SUITES, *plugins.suite_names()) and Path(suite).is_file()


def _zoo_files(spec: ModelSpec) -> list[Path]:
    """The Python files that build a suite's models; none for a suite that is a module of this package or another."""
    if spec.source:
        return [Path(spec.source)]
    return sorted((csv_file.data_folder() / spec.suite).glob("[!_]*.py")) if spec.suite in SUITES else []


def _refuse_same_names(files: Iterable[Path]) -> None:
    first: dict[str, Path] = {}
    for path in dict.fromkeys(files):
        if path.stem in first:
            raise HashbenchError(
                f"{first[path.stem]} and {path} have one name",
                consequence="rows tell suites apart by it, so nothing was run",
                tip="Rename one of the files, or sweep them apart.",
            )
        first[path.stem] = path


def _refuse_taken_name(what: str, name: str, *, tip: str) -> None:
    if name in SUITES or name in plugins.suite_names() or name == bundled.ALL:
        raise HashbenchError(
            f"{what} has the name of the suite {name!r}",
            consequence="rows tell suites apart by it, so nothing was run",
            tip=tip,
        )


def _refuse_batch_size(spec: ModelSpec, batch_size: int | None) -> None:
    if batch_size is not None and (spec.source or _zoo_files(spec) or spec.suite not in SUITES):
        raise HashbenchError(
            f"--batch-size {batch_size} does not apply to {spec.name}",
            consequence="its own function makes its inputs",
            tip="Leave the flag out, or change the function.",
        )
