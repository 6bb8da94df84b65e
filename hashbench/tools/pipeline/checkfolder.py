"""The folder of a check: written whole or not at all, read with suspicion. Imports no torch.

``check.json`` is written last and holds the digest of every other file, so a folder without it, or with a file that
does not fit it, is refused. What the files say is checked against :mod:`observed` field by field; nothing in them is
executed or unpickled, and no name in them is opened.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hashbench.errors import HashbenchError
from hashbench.io import file_digest, from_json, replace_file, to_json
from hashbench.text import squeezed
from hashbench.tools.pipeline.observed import (
    CHECK_SCHEMA,
    Batches,
    Loader,
    Observed,
    Outputs,
    RandomState,
    Repetition,
    Surroundings,
    Weights,
)
from hashbench.trace import file

CHECK_FILE = "check.json"
LAYERS_FILE, TRACE_FILE = "model_inspection.csv", "trace.log"
REPEAT_FOLDER = "repeat"
LAYER_COLUMNS = ("layer", "type", "call", "output", "shape", "dtype", "mean", "std", "min", "max", "digest")

_DOCUMENTS: Mapping[str, tuple[str, type]] = types.MappingProxyType(
    {
        "environment.json": ("surroundings", Surroundings),
        "rng.json": ("random_state", RandomState),
        "loader.json": ("loader", Loader),
        "batch_info.json": ("batches", Batches),
        "model_weights.json": ("weights", Weights),
        "predictions.json": ("outputs", Outputs),
    }
)
_FILES = (*_DOCUMENTS, LAYERS_FILE, TRACE_FILE)
_LARGEST = 512 * 2**20
"""Bytes of a file that is still read: a trace of a large model has some ten."""


@dataclass(frozen=True, slots=True)
class Check:
    """A check as it was read: its name for people, what was seen, and what its own repetition found."""

    name: str
    seen: Observed
    repetition: Repetition | None


@dataclass(frozen=True, slots=True)
class _Manifest:
    """The content of ``check.json``; ``files`` are digests by name."""

    schema: int
    files: Mapping[str, str]
    repetition: Repetition | None


# ------------------------------------------------------------------------------------------------------ writing


def write_run(seen: Observed, folder: Path) -> None:
    """Write the files of one run into ``folder``, which is there. ``model_inspection.csv`` and ``trace.log`` are left
    out where the pipeline has no model."""
    for name, (part, _) in _DOCUMENTS.items():
        _write(folder / name, getattr(seen, part))
    if seen.layers is not None:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([LAYER_COLUMNS, *seen.layers])
        replace_file(folder / LAYERS_FILE, text.getvalue())
    if seen.trace is not None:
        file.write(seen.trace, folder / TRACE_FILE)


def seal(folder: Path, repetition: Repetition | None) -> None:
    """Write ``check.json``, by which the folder is whole."""
    digests = {name: file_digest(folder / name) for name in _FILES if (folder / name).exists()}
    _write(folder / CHECK_FILE, _Manifest(CHECK_SCHEMA, digests, repetition))


def _write(path: Path, value: object) -> None:
    replace_file(path, json.dumps(to_json(value), indent=1) + "\n")


# ------------------------------------------------------------------------------------------------------ reading


def read(folder: Path) -> Check:
    """Read the folder of a check.

    Raises:
        HashbenchError: it is missing, half written, damaged, or of another version.
    """
    document = _json(folder, CHECK_FILE)
    if not isinstance(document, dict):
        raise _unreadable(folder, f"{CHECK_FILE} is not one")
    if document.get("schema") != CHECK_SCHEMA:
        version = str(document.get("schema", "none"))[:20]
        raise _unreadable(folder, f"it has schema version {version}, this hashbench reads {CHECK_SCHEMA}")
    with _damage_refused(folder, CHECK_FILE):
        manifest = from_json(_Manifest, document, where=CHECK_FILE)
    for name in _FILES:
        _check_digest(folder, name, manifest.files)
    parts: dict[str, Any] = {}
    for name, (part, kind) in _DOCUMENTS.items():
        with _damage_refused(folder, name):
            parts[part] = from_json(kind, _json(folder, name))
    if LAYERS_FILE in manifest.files:
        parts["layers"] = _layers(folder)
    if TRACE_FILE in manifest.files:
        with _damage_refused(folder, TRACE_FILE):
            parts["trace"] = file.read(folder / TRACE_FILE)
    return Check(str(folder), Observed(**parts), manifest.repetition)


def _check_digest(folder: Path, name: str, files: Mapping[str, str]) -> None:
    if name in files:
        _check_file(folder, name)
        if file_digest(folder / name) != files[name]:
            raise _unreadable(folder, f"{name} is damaged (it is not what {CHECK_FILE} says)")
    elif name in _DOCUMENTS or (folder / name).exists():
        raise _unreadable(folder, f"{CHECK_FILE} says nothing of {name}")


def _check_file(folder: Path, name: str) -> None:
    path = folder / name
    if not path.is_file():
        raise _unreadable(folder, f"it has no {name}" if folder.is_dir() else "there is no such folder")
    if path.stat().st_size > _LARGEST:
        raise _unreadable(folder, f"{name} has more than {_LARGEST // 2**20} MiB")


def _layers(folder: Path) -> tuple[tuple[str, ...], ...]:
    with _damage_refused(folder, LAYERS_FILE):
        text = (folder / LAYERS_FILE).read_text(encoding="utf-8")
        header, *rows = list(csv.reader(io.StringIO(text, newline=""))) or [[]]
    if any(len(row) != len(LAYER_COLUMNS) for row in rows) or tuple(header) != LAYER_COLUMNS:
        raise _unreadable(folder, f"{LAYERS_FILE} has other columns")
    return tuple(map(tuple, rows))


def _json(folder: Path, name: str) -> Any:
    _check_file(folder, name)
    with _damage_refused(folder, name):
        return json.loads((folder / name).read_text(encoding="utf-8"))


@contextlib.contextmanager
def _damage_refused(folder: Path, name: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, RecursionError, csv.Error) as error:
        reason = squeezed(str(error), 120) or type(error).__name__
        raise _unreadable(folder, f"{name} is damaged ({reason})") from error


def _unreadable(folder: Path, reason: str) -> HashbenchError:
    return HashbenchError(
        f"cannot read the check {folder}",
        consequence=f"{reason}, so nothing was compared",
        tip=f"Make it again with `hashbench pipeline check --output-dir {folder}`.",
    )
