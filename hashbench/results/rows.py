"""Rows into ``accuracy.csv`` and out of it again, exactly.

An absent value is an empty cell, never a zero. A row is always one physical line, so that a file that was cut off
shows it, and a cell that a spreadsheet would execute is defused on writing and restored on reading.
"""

from __future__ import annotations

import csv
import difflib
import io
import json
import operator
import re
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hashbench.catalog import STATUSES
from hashbench.errors import HashbenchError
from hashbench.io import replace_file
from hashbench.records import ROW_COLUMNS, ROW_KEY, ROW_SCHEMA, Row
from hashbench.results.table import CsvTable, defuse, one_line, read_table, restore

REQUIRED_COLUMNS = ("dev", "name", "batch_size", "accuracy")
"""Dynamo's columns: no file without them is a CSV of accuracies."""

EXPECTED_COLUMNS = ("since", "link", "seen")
"""What a CSV of expected rows has beside those of :class:`Row`: a date, an address, a date."""

_KINDS: dict[str, type] = {
    name: next(kind for kind in (typing.get_args(hint) or (hint,)) if kind is not type(None))
    for name, hint in typing.get_type_hints(Row).items()
}
"""Column → ``str``, ``int`` or ``float``, from the annotations of :class:`Row`."""

_key_of = operator.attrgetter(*ROW_KEY)

# ------------------------------------------------------------------------------------------------ writing


def header_line() -> str:
    """The first line of ``accuracy.csv``, with its line end."""
    return ",".join(ROW_COLUMNS) + "\n"


def row_line(row: Row) -> str:
    """``row`` as one line of ``accuracy.csv``, with its line end. Texts lose their line breaks and control
    characters (see :func:`one_line`); everything else survives :func:`read_rows` exactly."""
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow([_cell(name, getattr(row, name)) for name in ROW_COLUMNS])
    return line.getvalue()


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Replace ``path`` by a CSV of ``rows``: a temporary file beside it, synced to disk, then renamed, so that a
    crash leaves the old file or the new one.

    Raises:
        HashbenchError: two rows have the same key (:data:`~hashbench.records.ROW_KEY`); nothing is written.
        OSError: the folder cannot be written or the disk is full; ``path`` is as it was.
    """
    kept = tuple(rows)
    refuse_duplicates(str(path), kept)
    replace_file(path, header_line() + "".join(map(row_line, kept)))


def _cell(column: str, value: Any) -> str:
    """``repr`` of a float is the shortest text that reads back as the same number."""
    if value is None or value == "":
        return ""
    kind = _KINDS[column]
    if kind is str:
        return defuse(one_line(value))
    return repr(float(value)) if kind is float else str(operator.index(value))


# ------------------------------------------------------------------------------------------------ reading


def read_rows(path: Path) -> list[Row]:
    """The rows of an ``accuracy.csv`` in file order, equal to the rows that were written.

    Columns of :class:`Row` that the file lacks read as absent, except the required ones.

    Raises:
        HashbenchError: the file is not a CSV, is damaged or cut off, lacks a required column, has columns that this
            version does not know, a status that is none, a number that is none, or two rows of the same key; or the
            ``environment.json`` beside it is of a schema that this version does not read.
    """
    check_schema(path)
    return rows_of(read_table(path))


def rows_of(table: CsvTable) -> list[Row]:
    """The rows of a CSV in hashbench's own columns; see :func:`read_rows` for what is refused."""
    _check_header(table)
    columns = [(name, _KINDS.get(name)) for name in table.header]
    lines, rows = [], []
    for line, cells in table.rows():
        lines.append(line)
        rows.append(_row(table.path, line, columns, cells))
    refuse_duplicates(str(table.path), rows, lines=lines)
    return rows


def environment_file(path: Path) -> Path | None:
    """The environment that belongs to a CSV: ``<name>.environment.json`` or ``environment.json`` beside it."""
    candidates = (path.with_name(f"{path.stem}.environment.json"), path.with_name("environment.json"))
    return next((candidate for candidate in candidates if candidate.is_file()), None)


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``; :class:`HashbenchError` where there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise HashbenchError(f"cannot read {path}", consequence=error.strerror or str(error)) from error
    except (ValueError, RecursionError) as error:
        raise HashbenchError(f"cannot read {path}", consequence=f"it is not JSON ({error})") from error
    if not isinstance(content, dict):
        raise HashbenchError(f"cannot read {path}", consequence="it holds no JSON object")
    return content


def environments_of(path: Path) -> tuple[dict[str, Any], ...]:
    """The fingerprints of the machines that a CSV's rows were made on: the newest, then the ``previous`` ones. None
    where no environment lies beside it."""
    file = environment_file(path)
    if file is None:
        return ()
    content = read_json_object(file)
    previous = content.pop("previous", [])
    earlier = previous if isinstance(previous, list) else []
    return (content, *(one for one in earlier if isinstance(one, dict)))


def check_schema(path: Path) -> None:
    """Refuse a CSV whose environment file was written by a version with other columns."""
    environment = environment_file(path)
    if environment is None:
        return
    schema = read_json_object(environment).get("schema", ROW_SCHEMA)
    if schema != ROW_SCHEMA:
        raise HashbenchError(
            f"{path} has schema {schema!r} and this hashbench reads schema {ROW_SCHEMA}",
            consequence=f"its columns may mean something else ({environment.name} says so)",
            tip="Read it with the version that wrote it, or run the sweep again.",
        )


def refuse_duplicates(label: str, rows: Sequence[Row], *, lines: Sequence[int] = ()) -> None:
    """Raise :class:`HashbenchError` when two of ``rows`` have the same key; ``lines`` are their lines in the file."""
    seen: dict[tuple[str, ...], int] = {}
    for index, row in enumerate(rows):
        first = seen.setdefault(row_key(row), index)
        if first != index:
            where = f"lines {lines[first]} and {lines[index]}" if lines else "its two rows"
            raise HashbenchError(
                f"{label} holds {_key_text(row_key(row))} twice",
                consequence=f"{where} cannot both be its result",
                tip="Keep one of the two.",
            )


def row_key(row: Row) -> tuple[str, ...]:
    """What identifies ``row`` in a sweep, in the order of :data:`~hashbench.records.ROW_KEY`."""
    key: tuple[str, ...] = _key_of(row)
    return key


def _key_text(key: tuple[str, ...]) -> str:
    *where, name = key
    scope = ", ".join(filter(None, where))
    return f"{name} ({scope})" if scope else name


def _check_header(table: CsvTable) -> None:
    missing = [name for name in REQUIRED_COLUMNS if name not in table.header]
    if len(missing) == len(REQUIRED_COLUMNS):
        raise HashbenchError(
            f"{table.path} is not a CSV of accuracies",
            consequence=f"its first line does not name the columns {', '.join(REQUIRED_COLUMNS)}",
            tip="Name the accuracy.csv of a sweep, or its folder.",
        )
    if missing:
        raise HashbenchError(
            f"{table.path} lacks the columns {', '.join(missing)}",
            consequence="its rows cannot be told apart or judged",
            tip="Make it again with hashbench sweep.",
        )
    known = _KINDS.keys() | set(EXPECTED_COLUMNS)
    unknown = [one_line(name) or "(no name)" for name in table.header if name not in known]
    if unknown:
        raise HashbenchError(
            f"{table.path} has columns that this hashbench does not know: {', '.join(unknown)}",
            consequence="another version or another tool wrote it",
            tip="Read it with the version that wrote it, or delete these columns.",
        )


def _row(path: Path, line: int, columns: Sequence[tuple[str, type | None]], cells: Sequence[str]) -> Row:
    """The row of one line. ``columns`` have no kind where :class:`Row` has no such field. Sixty cells a row and ten
    thousand rows a file: nothing is looked up here that is the same for all rows."""
    # Required numbers may be empty, too: a model that never loaded has no batch size.
    values: dict[str, Any] = dict.fromkeys(("batch_size",))
    for (column, kind), cell in zip(columns, cells, strict=True):
        if not cell or kind is None:
            continue
        values[column] = restore(cell) if kind is str else _number(path, line, column, kind, cell)
    for column in ("dev", "name", "accuracy"):
        if column not in values:
            raise HashbenchError(f"line {line} of {path} has no {column}", consequence="the row says nothing")
    _check_accuracy(path, line, values["accuracy"])
    return Row(**values)


def _check_accuracy(path: Path, line: int, word: str) -> None:
    if word in STATUSES:
        return
    near = difflib.get_close_matches(word, STATUSES, n=1)
    raise HashbenchError(
        f"line {line} of {path} has the accuracy {one_line(word)!r}",
        consequence="hashbench knows no such status",
        tip=f"Did you mean {near[0]}?" if near else f"It is one of: {', '.join(STATUSES)}.",
    )


_WHOLE_NUMBER = re.compile(r"-?[0-9]+")
_NUMBER = re.compile(r"-?([0-9]+(\.[0-9]*)?(e[+-]?[0-9]+)?|inf|nan)", re.IGNORECASE)
"""Python's own ``int`` and ``float`` also take ``1_0``, spaces and other alphabets' digits."""

_PARSERS: dict[type, tuple[re.Pattern[str], Callable[[str], Any], str]] = {
    int: (_WHOLE_NUMBER, int, "a whole number"),
    float: (_NUMBER, float, "a number"),
}


def _number(path: Path, line: int, column: str, kind: type, cell: str) -> Any:
    pattern, parse, description = _PARSERS[kind]
    # Python refuses to read whole numbers of more than 4300 digits.
    if not pattern.fullmatch(cell) or len(cell) > 400:
        raise HashbenchError(
            f"line {line} of {path} has {one_line(cell)[:40]!r} as {column}",
            consequence=f"that is not {description}",
            tip="Mend that cell, or leave it empty if the value is not known.",
        )
    return parse(cell)


# --------------------------------------------------------------------------------------------------- JSON


def row_to_json(row: Row) -> dict[str, str | int | float | None]:
    """Every field of ``row``, for :func:`json.dumps`; :func:`row_from_json` gives back an equal row."""
    return {name: getattr(row, name) for name in ROW_COLUMNS}


def row_from_json(mapping: Mapping[str, Any]) -> Row:
    """The row that :func:`row_to_json` was called with.

    Raises:
        ValueError: a field is missing, unknown or of another type, or the accuracy is no status.
    """
    missing, unknown = _KINDS.keys() - mapping.keys(), mapping.keys() - _KINDS.keys()
    if missing or unknown:
        raise ValueError(f"not a row: missing fields {sorted(missing)}, unknown fields {sorted(map(str, unknown))}")
    values = {name: _typed(name, mapping[name]) for name in ROW_COLUMNS}
    if values["accuracy"] not in STATUSES:
        raise ValueError(f"not a row: accuracy {values['accuracy']!r} is no status")
    return Row(**values)


def _typed(column: str, value: Any) -> Any:
    kind = _KINDS[column]
    if value is None and kind is not str:
        return None
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise ValueError(f"not a row: {column} is {value!r} and should be {kind.__name__}")
    return value
