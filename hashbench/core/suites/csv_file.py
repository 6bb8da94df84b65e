"""The data folder: the CSV that lists a bundled suite's models, read into :class:`ModelSpec` and checked."""

from __future__ import annotations

import csv
import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from hashbench.core.errors import HashbenchError
from hashbench.core.io import read_file, shipped_folder
from hashbench.core.records import DETERMINISTIC, ModelSpec

COLUMNS: tuple[str, ...] = tuple(
    field.name for field in dataclasses.fields(ModelSpec) if field.name not in ("suite", "source")
)
"""The columns of ``models/<suite>.csv``. Only ``name`` must be there; others are empty where they are absent."""

TRUTH_PREFIX = "truth_"
"""Columns that begin so say what a specimen must show. They are for its tests and reach no :class:`ModelSpec`."""

_Value = TypeVar("_Value")


def data_folder() -> Path:
    """Return the folder of bundled models. Raises as :func:`hashbench.core.io.shipped_folder`."""
    return shipped_folder("models", "*.csv")


def read_suite(path: Path, *, suite: str) -> tuple[ModelSpec, ...]:
    """Read the models of the CSV at ``path``, sorted by name, each with ``suite`` as its suite.

    Raises:
        HashbenchError: an unknown column, a duplicate name or a bad value; the message has the file and the line.
    """
    try:
        text = read_file(path).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise HashbenchError(f"cannot read {path}", consequence=str(error), tip="Check the file.") from error
    lines: dict[str, int] = {}
    specs = []
    for line, row in _rows(path, text):
        spec = _spec(row, suite=suite, where=f"{path} line {line}")
        if spec.name in lines:
            raise HashbenchError(
                f"{path} line {line} names {spec.name!r} again",
                consequence=f"it is on line {lines[spec.name]} already",
                tip="Remove one of the two.",
            )
        lines[spec.name] = line
        specs.append(spec)
    return tuple(sorted(specs, key=lambda spec: spec.name))


def _rows(path: Path, text: str) -> Iterator[tuple[int, dict[str, str]]]:
    reader = csv.DictReader(text.splitlines(keepends=True), restkey="", restval="", strict=True)
    try:
        _check_columns(f"{path} line 1", list(reader.fieldnames or ()))
        for row in reader:
            if "" in row:
                raise _bad(f"{path} line {reader.line_num}", "has more cells than the header", tip="Quote the commas.")
            yield reader.line_num, row
    except csv.Error as error:
        raise _bad(f"{path} line {reader.line_num}", f"is not CSV: {error}", tip="Check the quotes.") from error


def _check_columns(where: str, columns: list[str]) -> None:
    unknown = [column for column in columns if column not in COLUMNS and not column.startswith(TRUTH_PREFIX)]
    repeated = sorted({column for column in columns if columns.count(column) > 1})
    if unknown:
        raise _bad(where, f"has unknown columns: {', '.join(unknown)}", tip=f"Known: {', '.join(COLUMNS)}.")
    if repeated:
        raise _bad(where, f"has columns twice: {', '.join(repeated)}", tip="Remove one of each.")
    if "name" not in columns:
        raise _bad(where, "has no column 'name'", tip=f"Known columns: {', '.join(COLUMNS)}.")


def _bad(where: str, problem: str, *, tip: str) -> HashbenchError:
    return HashbenchError(f"{where} {problem}", consequence="the suite cannot be listed", tip=tip)


def _spec(row: Mapping[str, str], *, suite: str, where: str) -> ModelSpec:
    values: dict[str, Any] = {}
    for column in COLUMNS:
        text = (row.get(column) or "").strip()
        try:
            values[column] = _PARSERS.get(column, str)(text)
        except ValueError as error:
            raise _bad(where, f"has {column}={text!r}: {error}", tip="Correct that cell.") from error
    if not values["name"]:
        raise _bad(where, "has no name", tip="Give the model a name.")
    return ModelSpec(suite=suite, **values)


def task_of(spec: ModelSpec, tasks: Mapping[str, _Value]) -> _Value:
    """Return the value of ``tasks`` for the task of ``spec``.

    Raises:
        HashbenchError: it has none; the message names the known tasks.
    """
    if spec.task not in tasks:
        raise HashbenchError(
            f"{spec.name} has the unknown task {spec.task!r}",
            consequence="no inputs can be made for it",
            tip=f"Known tasks: {', '.join(tasks)}.",
        )
    return tasks[spec.task]


# ---------------------------------------------------------------------- cells; a ValueError becomes the user's message


def _count(text: str) -> int | None:
    if text and (not text.isascii() or not text.isdigit() or int(text) < 1):
        raise ValueError("not a positive integer")
    return int(text) if text else None


def _runs(text: str) -> int | None:
    count = _count(text)
    if count == 1:
        raise ValueError("one run has nothing to be compared with")
    return count


def _shape(text: str) -> tuple[int, ...]:
    sizes = text.split("x") if text else []
    if not all(size.isascii() and size.isdigit() for size in sizes):
        raise ValueError("not a shape such as 3x224x224")
    return tuple(map(int, sizes))


def _devices(text: str) -> tuple[str, ...]:
    kinds = tuple(text.split())
    if not all(kind.isascii() and kind.isalpha() and kind.islower() for kind in kinds):
        raise ValueError("not types of device such as: cuda xpu")
    return kinds


def _arguments(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error})") from error
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")  # noqa: TRY004
    return value


def _flag(text: str) -> bool:
    if text not in ("", "yes"):
        raise ValueError("neither 'yes' nor empty")
    return text == "yes"


def _deterministic(text: str) -> str:
    if text and text not in DETERMINISTIC:
        raise ValueError(f"not one of {', '.join(DETERMINISTIC)}")
    return text


_PARSERS: Mapping[str, Callable[[str], Any]] = {
    "batch_size": _count,
    "input_shape": _shape,
    "arguments": _arguments,
    "default": _flag,
    "devices": _devices,
    "deterministic": _deterministic,
    "iterations": _count,
    "runs": _runs,
    "world_size": _count,
    "parameters": _count,
}
