"""The folder of a check: written whole or not at all, read with suspicion. Imports no torch.

``check.json`` is written last and holds the digest of every other file, so a folder without it, or with a file that
does not fit it, is refused. What the files say is checked against :mod:`observed` field by field; nothing in them is
executed or unpickled, and no name in them is opened.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import io
import json
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hashbench.errors import HashbenchError
from hashbench.io import file_digest, replace_file
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
        replace_file(folder / name, json.dumps(dataclasses.asdict(getattr(seen, part)), indent=1) + "\n")
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
        "repetition": None if repetition is None else dataclasses.asdict(repetition),
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
        repetition = _decoded(Repetition | None, manifest["repetition"])
        files = _decoded(Mapping[str, str], manifest["files"])
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
            parts[part] = _decoded(kind, _json(folder, name))
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
    return " ".join(str(error).split())[:120] or type(error).__name__


def _unreadable(folder: Path, reason: str) -> HashbenchError:
    return HashbenchError(
        f"cannot read the check {folder}",
        consequence=f"{reason}, so nothing was compared",
        tip=f"Make it again with `hashbench pipeline check --output-dir {folder}`.",
    )


# ---------------------------------------------------------------------------------- JSON to values, field by field


def _decoded(kind: Any, value: Any) -> Any:
    """``value`` as ``kind``: a frozen dataclass, ``tuple[X, ...]``, ``Mapping[str, X]``, ``X | None``, or a plain type.

    Raises:
        ValueError: it is something else.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        inner = next(one for one in arguments if one is not type(None))
        return None if value is None else _decoded(inner, value)
    if origin is tuple:
        return tuple(_decoded(arguments[0], item) for item in _of_type(list, value))
    if origin is not None:
        return {key: _decoded(arguments[1], item) for key, item in _of_type(dict, value).items()}
    if dataclasses.is_dataclass(kind):
        return _decoded_dataclass(kind, value)
    return value if kind is object else _of_type(kind, value)


def _decoded_dataclass(kind: Any, value: Any) -> Any:
    hints = _hints(kind)
    if _of_type(dict, value).keys() != hints.keys():
        names = sorted(value.keys() ^ hints.keys())
        raise ValueError(f"{kind.__name__} has other fields: {', '.join(names)}")
    return kind(**{name: _decoded(hint, value[name]) for name, hint in hints.items()})


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _of_type(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise ValueError(f"{str(value)[:40]!r} is no {kind.__name__}")
    return value
