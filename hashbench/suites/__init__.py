"""Suites: where models come from.

A bundled suite is a CSV in the data folder (:mod:`hashbench.suites.data`). Its models are built by the Python files in
the folder of the same name beside the CSV where there is one (``specimens``), else by the module of that name in
this package (``torchvision``). A user's suite is the path of a Python file with ``MODELS``
(:mod:`hashbench.suites.zoofile`).

Nothing here imports torch before :func:`load`.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING

from hashbench.records import MODES, HashbenchError, ModelSpec
from hashbench.suites import data, zoofile
from hashbench.suites.selection import select, unknown_name

if TYPE_CHECKING:
    from hashbench.workload import Workload

__all__ = ["SUITES", "catalog", "load", "select"]

SUITES: tuple[str, ...] = data.suite_names()
"""Names of the bundled suites."""


def catalog(suite: str) -> tuple[ModelSpec, ...]:
    """All models of a suite, sorted by name.

    Args:
        suite: a name in :data:`SUITES`, or the path of a Python file with ``MODELS``; that one is imported in a
            child process. The specs of a file have its absolute path as their suite and are all default.

    Raises:
        HashbenchError: there is no such suite, or its data are wrong.
    """
    if suite in SUITES:
        return data.read_suite(data.data_folder() / f"{suite}.csv", suite=suite)
    if not _is_path(suite):
        tip = f"Choose one of {', '.join(SUITES)}, or give the path of a Python file with MODELS."
        raise unknown_name("suite", suite, SUITES, tip=tip)
    path = Path(suite).absolute()
    return tuple(ModelSpec(suite=str(path), name=name, default=True) for name in zoofile.names(path))


def load(spec: ModelSpec, *, batch_size: int | None = None, mode: str) -> Workload:
    """Build one model, its inputs and its loss. Random values come from torch's global generator.

    Args:
        spec: from :func:`catalog`.
        batch_size: in place of the spec's own. A model from a Python file makes its own inputs and takes none.
        mode: ``training`` or ``inference``.

    Raises:
        HashbenchError: ``mode`` or ``batch_size`` does not apply, or the model's function returned something else.
        Exception: whatever building the model raises.
    """
    if mode not in MODES:
        raise HashbenchError(f"unknown mode {mode!r}", tip=f"Choose one of {', '.join(MODES)}.")
    files = _zoo_files(spec.suite)
    if files:
        _refuse_batch_size(spec, batch_size)
        return zoofile.build(files, spec.name)
    size = batch_size if batch_size is not None else spec.batch_size
    if size is None or size < 1:
        raise HashbenchError(f"cannot run {spec.name} with batch size {size}", tip="Give --batch-size 1 or more.")
    workload: Workload = importlib.import_module(f"hashbench.suites.{spec.suite}").load(
        spec, batch_size=size, mode=mode
    )
    return workload


def _is_path(suite: str) -> bool:
    return suite.endswith(".py") or len(Path(suite).parts) > 1 or Path(suite).is_file()


def _zoo_files(suite: str) -> list[Path]:
    """The Python files that build a suite's models; none for a suite that is a module of this package."""
    if suite not in SUITES:
        return [Path(suite)]
    return sorted((data.data_folder() / suite).glob("[!_]*.py"))


def _refuse_batch_size(spec: ModelSpec, batch_size: int | None) -> None:
    if batch_size is not None and batch_size != spec.batch_size:
        raise HashbenchError(
            f"--batch-size {batch_size} does not apply to {spec.name}",
            consequence="its Python file makes its own inputs",
            tip="Leave the flag out, or change the file.",
        )
