"""The folder of a check: written whole or not at all, read with suspicion. Imports no torch.

``check.json`` is written last and holds the digest of every other file, so a folder without it, or with a file that
does not fit it, is refused. What the files say is checked against :mod:`observed` field by field; nothing in them is
executed or unpickled, and no name in them is opened.
"""

from __future__ import annotations

import csv
import io
import json
import types
from collections.abc import Mapping
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
_LARGEST = 512 * 2**20
"""Bytes of a file that is still read: a trace of a large model has some ten."""


@dataclass(frozen=True, slots=True)
class Check:
    """A check as it was read: its name for people, what was seen, and what its own repetition found."""

    name: str
    seen: Observed
    repetition: Repetition | None


# ------------------------------------------------------------------------------------------------------ writing


def write_run(seen: Observed, folder: Path) -> None:
    """Write the files of one run into ``folder``, which is there. ``model_inspection.csv`` and ``trace.log`` are left
    out where the pipeline has no model."""
    for name, (part, _) in _DOCUMENTS.items():
        replace_file(folder / name, json.dumps(to_json(getattr(seen, part)), indent=1) + "\n")
    if seen.layers is not None:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([LAYER_COLUMNS, *seen.layers])
        replace_file(folder / LAYERS_FILE, text.getvalue())
    if seen.trace is not None:
        file.write(seen.trace, folder / TRACE_FILE)


def seal(folder: Path, repetition: Repetition | None) -> None:
    """Write ``check.json``, by which the folder is whole."""
    names = [name for name in (*_DOCUMENTS, LAYERS_FILE, TRACE_FILE) if (folder / name).exists()]
    content = {
        "schema": CHECK_SCHEMA,
        "files": {name: file_digest(folder / name) for name in names},
        "repetition": to_json(repetition),
    }
    replace_file(folder / CHECK_FILE, json.dumps(content, indent=1) + "\n")


# ------------------------------------------------------------------------------------------------------ reading


def read(folder: Path) -> Check:
    """Read the folder of a check.

    Raises:
        HashbenchError: it is missing, half written, damaged, or of another version.
    """
    manifest = _json(folder, CHECK_FILE)
    if not isinstance(manifest, dict):
        raise _unreadable(folder, f"{CHECK_FILE} is not one")
    if manifest.get("schema") != CHECK_SCHEMA:
        version = str(manifest.get("schema", "none"))[:20]
        raise _unreadable(folder, f"it has schema version {version}, this hashbench reads {CHECK_SCHEMA}")
    try:
        repetition = from_json(Repetition | None, manifest["repetition"], where="repetition")
        files = from_json(Mapping[str, str], manifest["files"], where="files")
    except (ValueError, KeyError, RecursionError) as error:
        raise _unreadable(folder, f"{CHECK_FILE} is damaged ({_short(error)})") from error
    for name in (*_DOCUMENTS, LAYERS_FILE, TRACE_FILE):
        _check_digest(folder, name, files)
    return Check(str(folder), _observed(folder, files), repetition)


def _check_digest(folder: Path, name: str, files: Mapping[str, str]) -> None:
    path = folder / name
    if name not in files:
        if name in _DOCUMENTS or path.exists():
            raise _unreadable(folder, f"{CHECK_FILE} says nothing of {name}")
        return
    _check_file(folder, path)
    if file_digest(path) != files[name]:
        raise _unreadable(folder, f"{name} is damaged (it is not what {CHECK_FILE} says)")


def _check_file(folder: Path, path: Path) -> None:
    if not path.is_file():
        what = f"it has no {path.name}" if folder.is_dir() else "there is no such folder"
        raise _unreadable(folder, what)
    if path.stat().st_size > _LARGEST:
        raise _unreadable(folder, f"{path.name} has more than {_LARGEST // 2**20} MiB")


def _observed(folder: Path, files: Mapping[str, str]) -> Observed:
    parts: dict[str, Any] = {}
    for name, (part, kind) in _DOCUMENTS.items():
        try:
            parts[part] = from_json(kind, _json(folder, name))
        except (ValueError, RecursionError) as error:
            raise _unreadable(folder, f"{name} is damaged ({_short(error)})") from error
    if LAYERS_FILE in files:
        parts["layers"] = _layers(folder)
    if TRACE_FILE in files:
        try:
            parts["trace"] = file.read(folder / TRACE_FILE)
        except RecursionError as error:
            raise _unreadable(folder, f"{TRACE_FILE} is damaged") from error
    return Observed(**parts)


def _layers(folder: Path) -> tuple[tuple[str, ...], ...]:
    try:
        rows = list(csv.reader(io.StringIO((folder / LAYERS_FILE).read_text(encoding="utf-8"), newline="")))
    except (OSError, ValueError, csv.Error) as error:
        raise _unreadable(folder, f"{LAYERS_FILE} is damaged ({_short(error)})") from error
    if not rows or tuple(rows[0]) != LAYER_COLUMNS or any(len(row) != len(LAYER_COLUMNS) for row in rows):
        raise _unreadable(folder, f"{LAYERS_FILE} has other columns")
    return tuple(map(tuple, rows[1:]))


def _json(folder: Path, name: str) -> Any:
    _check_file(folder, folder / name)
    try:
        return json.loads((folder / name).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise _unreadable(folder, f"{name} is damaged ({_short(error)})") from error


def _short(error: BaseException) -> str:
    return squeezed(str(error), 120) or type(error).__name__


def _unreadable(folder: Path, reason: str) -> HashbenchError:
    return HashbenchError(
        f"cannot read the check {folder}",
        consequence=f"{reason}, so nothing was compared",
        tip=f"Make it again with `hashbench pipeline check --output-dir {folder}`.",
    )
