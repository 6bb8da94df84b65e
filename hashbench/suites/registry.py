"""Suites: where models come from.

* A bundled suite is a CSV in the data folder (:mod:`hashbench.suites.csv_file`). Its models are built by the Python
  files in the folder of the same name beside the CSV where there is one (``specimens``), else by the module of that
  name in this package (``torchvision``). ``<suite>_tiny`` is its small variant, built by the same module.
* A package's suite is an entry point of the group ``hashbench.suites`` (:mod:`hashbench.suites.plugins`).
* A user's suite is the path of a Python file (:mod:`hashbench.suites.zoo_file`).

Nothing here imports torch before :func:`load`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hashbench.errors import HashbenchError
from hashbench.records import MODES, ModelSpec
from hashbench.suites import catalog as bundled
from hashbench.suites import plugins, zoo_file
from hashbench.suites.catalog import Chosen, Suite, how_to_install, require
from hashbench.suites.selection import select, unknown_name

if TYPE_CHECKING:
    from hashbench.run.workload import Workload

__all__ = [
    "SUITES",
    "Chosen",
    "Suite",
    "catalog",
    "choose",
    "find",
    "how_to_install",
    "load",
    "names",
    "require",
    "select",
]

SUITES: tuple[str, ...] = tuple(bundled.BUNDLED)
"""Names of the bundled suites."""


def names() -> tuple[str, ...]:
    """Names of all suites that there are, without the small variants: the bundled ones, then those of packages."""
    return (*(suite.name for suite in bundled.BUNDLED.values() if not suite.variant_of), *plugins.suite_names())


def choose(wanted: Sequence[str], *, tiny: bool = False) -> Chosen:
    """What names on a command line stand for: ``all`` are the bundled suites that can be swept here.

    Raises:
        HashbenchError: two zoo files have one name.
    """
    chosen = bundled.choose(wanted, tiny=tiny)
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
    return find(suite).catalog()


def find(suite: str) -> Suite:
    """The suite of a name, or of the path of a Python file.

    Raises:
        HashbenchError: there is no such suite, or two have this name.
    """
    if suite in SUITES:
        if suite in plugins.suite_names():
            raise HashbenchError(
                f"an installed package brings a suite {suite!r}",
                consequence="hashbench has one of that name",
                tip="Rename the package's entry point, or uninstall it.",
            )
        return bundled.BUNDLED[suite]
    if _is_file(suite):
        _refuse_taken_name(f"the zoo file {suite}", Path(suite).stem, tip="Rename the file.")
        return zoo_file.FileSuite(Path(suite).absolute())
    if suite in plugins.suite_names():
        return plugins.PackageSuite(suite)
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
    return _suite_of(spec).load(spec, batch_size=size, mode=mode)


def _suite_of(spec: ModelSpec) -> Suite:
    if spec.source:
        return zoo_file.FileSuite(Path(spec.source))
    return bundled.BUNDLED[spec.suite] if spec.suite in SUITES else plugins.PackageSuite(spec.suite)


def _is_file(suite: str) -> bool:
    if suite.endswith(".py") or len(Path(suite).parts) > 1:
        return True
    return suite not in (bundled.ALL, *SUITES, *plugins.suite_names()) and Path(suite).is_file()


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
    suite = _suite_of(spec)
    if batch_size is not None and (not isinstance(suite, bundled.BundledSuite) or suite.files):
        raise HashbenchError(
            f"--batch-size {batch_size} does not apply to {spec.name}",
            consequence="its own function makes its inputs",
            tip="Leave the flag out, or change the function.",
        )
