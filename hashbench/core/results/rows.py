"""``accuracy.csv`` and its like: dataclasses as rows of a CSV, read back exactly, refused in one line where damaged.

A row is always one physical line, so that a file that was cut off shows it. An absent value is an empty cell, never a
zero. A cell that a spreadsheet would execute is defused on writing and restored on reading. Writing needs no pandas: a
sweep appends one line at a time.
"""

from __future__ import annotations

import csv
import dataclasses
import difflib
import functools
import io
import json
import operator
import re
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from hashbench.core.catalog import family_of
from hashbench.core.errors import HashbenchError
from hashbench.core.extensions import facts_kinds, missing_extensions
from hashbench.core.io import UnknownContentError, from_json, read_file, read_json_object, to_json
from hashbench.core.records import ROW_KEY, ROW_SCHEMA, Column, ExpectedRow, Facts, Row, value_of
from hashbench.core.results import versions
from hashbench.core.text import one_line

LONGEST_CELL = 1 << 24
"""Characters; the csv module stops at 131 072 by default, and the text of an error may be longer."""

T = TypeVar("T")

# -------------------------------------------------------------------------------------------- any CSV file


@dataclass(frozen=True, slots=True)
class CsvTable:
    """A CSV file as texts, without its blank lines.

    Attributes:
        path: the file.
        header: the names of its columns.
        lines: the number of each row's line; the header's is 1 where no blank line comes before it.
        rows: the cells of each row, as many as the header has; those missing at the end of a line are empty.
        short: the number of cells of each line that has fewer than the header, by line.
    """

    path: Path
    header: tuple[str, ...]
    lines: tuple[int, ...]
    rows: tuple[tuple[str, ...], ...]
    short: Mapping[int, int]

    def column(self, name: str) -> list[str]:
        """Return the cells of a column; none where the file lacks it."""
        if name not in self.header:
            return []
        index = self.header.index(name)
        return [row[index] for row in self.rows]


def read_table(path: Path) -> CsvTable:
    """Read ``path`` as CSV: UTF-8, comma-separated, one line per row; blank lines are skipped.

    Raises:
        HashbenchError: the file cannot be read, is not a CSV, is cut off, or has a row longer than its header.
    """
    text = _read_text(path)
    blank = len(text) - len(text.lstrip("\r\n"))
    first, *records = _parsed(path, text[blank:])
    header = tuple(first)
    repeated = list(dict.fromkeys(name for name in header if header.count(name) > 1))
    if repeated:
        raise HashbenchError(
            f"{path} names a column twice",
            consequence=f"{', '.join(repeated)} has no single meaning",
            tip=_MAKE_IT_AGAIN,
        )
    numbered = [(line, cells) for line, cells in enumerate(records, 2 + text[:blank].count("\n")) if cells]
    return CsvTable(
        path,
        header,
        lines=tuple(line for line, _ in numbered),
        rows=tuple((*cells, *[""] * (len(header) - len(cells))) for _, cells in numbered),
        short={line: len(cells) for line, cells in numbered if len(cells) < len(header)},
    )


_MAKE_IT_AGAIN = "Name the accuracy.csv of a sweep, or its folder."
_MEND = "The file is damaged or was cut off; regenerate it or fix that line."


def _read_text(path: Path) -> str:
    try:
        data = read_file(path)
    except OSError as error:
        raise HashbenchError(f"cannot read {path}", consequence=error.strerror or str(error), tip="") from error
    if not data.strip():
        raise HashbenchError(f"{path} is empty", consequence="it holds neither header nor rows", tip=_MAKE_IT_AGAIN)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise HashbenchError(f"{path} is not a CSV", consequence="it is not UTF-8 text", tip=_MAKE_IT_AGAIN) from error
    formats = {"{": "it looks like JSON", "[": "it looks like JSON", "<": "it looks like HTML or XML"}
    why = "it holds binary data" if "\0" in text else formats.get(text.lstrip()[:1], "")
    if why or not text.strip():
        raise HashbenchError(f"{path} is not a CSV", consequence=why or "it is blank", tip=_MAKE_IT_AGAIN)
    if not text.endswith(("\n", "\r")):
        raise HashbenchError(
            f"{path} is cut off",
            consequence="its last line has no end",
            tip="Make it again; if that line is complete, end it with a line break.",
        )
    return text


def _parsed(path: Path, text: str) -> list[list[str]]:
    """Split ``text`` into lines of cells; a blank line has none. The first one is the header."""
    for line, content in enumerate(text.split("\n") if '"' in text else (), start=1):
        if content.count('"') % 2:
            raise _damaged(path, line, "a quoted cell spreads over several lines")
    before = csv.field_size_limit(LONGEST_CELL)
    try:
        records = list(csv.reader(io.StringIO(text), strict=True))
    except csv.Error as error:
        raise HashbenchError(f"cannot read {path}", consequence=one_line(str(error)), tip=_MEND) from error
    finally:
        csv.field_size_limit(before)
    columns = len(records[0])
    for line, record in enumerate(records, start=1):
        if len(record) > columns:
            why = f"Expected {columns} fields in line {line}, saw {len(record)}"
            raise HashbenchError(f"cannot read {path}", consequence=why, tip=_MEND)
    return records


def _damaged(path: Path, line: int, why: str) -> HashbenchError:
    return HashbenchError(f"cannot read line {line} of {path}", consequence=why, tip=_MEND)


# ------------------------------------------------------------------------------- one dataclass as rows of a CSV

_WHOLE_NUMBER = re.compile(r"-?[0-9]{1,20}")
_NUMBER = re.compile(r"-?([0-9]+(\.[0-9]*)?(e[+-]?[0-9]+)?|inf|nan)", re.IGNORECASE)
"""Python's own ``int`` and ``float`` also take ``1_0``, spaces and other alphabets' digits."""

_NUMBERS = (int, float)

_LONGEST_NUMBER = 400
"""Digits: Python refuses to read whole numbers of more than 4300."""


class _Declared(NamedTuple):
    """A column of a format: the dataclass whose field it is, the type without ``None``, and what is declared of it."""

    holder: type
    kind: type
    column: Column


@dataclass(frozen=True)
class RowFormat(Generic[T]):
    """How a dataclass of texts and numbers lies in a CSV and in JSON: one column a field, in their order. A field of
    another type is made of its text and gives it as ``str``; JSON has all of it.

    ``what`` the file holds and which file is its ``example`` are for messages. ``required`` columns no file may lack;
    those ``filled`` may not be empty. ``key`` identifies a row, and ``label`` is a key in words. ``whole`` says which
    whole numbers there are, and what such a number is called. ``facts`` returns the kinds of facts that a row may have:
    their columns follow its own.
    """

    kind: type[T]
    what: str
    example: str
    key: tuple[str, ...]
    label: Callable[[Sequence[str]], str]
    required: tuple[str, ...]
    filled: tuple[str, ...]
    whole: tuple[re.Pattern[str], str] = (_WHOLE_NUMBER, "a whole number")
    facts: Callable[[], Sequence[type[Facts]]] = tuple

    @functools.cached_property
    def columns(self) -> Mapping[str, _Declared]:
        """All columns, those of facts last."""
        found = {}
        for holder in (self.kind, *self.facts()):
            hints = typing.get_type_hints(holder)
            for field in dataclasses.fields(typing.cast(Any, holder)):
                if field.name != "facts":
                    kind = (typing.get_args(hints[field.name]) or (hints[field.name],))[0]
                    found[field.name] = _Declared(holder, kind, field.metadata.get("column", Column()))
        return found

    @functools.cached_property
    def current_names(self) -> Mapping[str, str]:
        """Name of each column by the one that it has in older files."""
        return {column.formerly: name for name, (_, _, column) in self.columns.items() if column.formerly}

    @functools.cached_property
    def types(self) -> Mapping[str, type]:
        """Type of each column, without ``None``."""
        return {name: declared.kind for name, declared in self.columns.items()}

    @functools.cached_property
    def key_of(self) -> Callable[[T], tuple[str, ...]]:
        """Function from a row to its key."""
        return operator.attrgetter(*self.key)

    # ------------------------------------------------------------------------------------------- writing

    def written(self, rows: Iterable[T], *, asked: Iterable[type[Facts]] = ()) -> tuple[str, ...]:
        """Return the columns of a CSV of ``rows``: a rare one where a row has it, those of facts where a row has such
        facts or they are ``asked`` for."""
        rows = tuple(rows)
        kinds = {self.kind, *asked, *(type(each) for row in rows for each in getattr(row, "facts", ()))}
        return tuple(
            name
            for name, (holder, _, column) in self.columns.items()
            if holder in kinds and not (column.rare and all(is_absent(getattr(row, name)) for row in rows))
        )

    @property
    def header(self) -> str:
        """The first line of a file with all columns, with its line end."""
        return csv_line(self.columns)

    def line(self, row: T, columns: Iterable[str] = ()) -> str:
        """Format ``row`` as one line of these columns (none: all), with its line end. Texts lose their line breaks and
        control characters (see :func:`one_line`); everything else round-trips through :meth:`rows`."""
        return csv_line(self._cell(name, value_of(row, name)) for name in columns or self.columns)

    def text(self, rows: Iterable[T], *, asked: Iterable[type[Facts]] = ()) -> str:
        """Return the CSV of ``rows``, with the columns of :meth:`written`."""
        rows = tuple(rows)
        columns = self.written(rows, asked=asked)
        return csv_line(columns) + "".join(self.line(row, columns) for row in rows)

    def _cell(self, column: str, value: Any) -> str:
        """Format a cell. ``repr`` of a float is the shortest text that reads back as the same number."""
        if is_absent(value):
            return ""
        kind = self.types[column]
        if kind not in _NUMBERS:
            return defuse(one_line(str(value)))
        return repr(float(value)) if kind is float else str(operator.index(value))

    # ------------------------------------------------------------------------------------------- reading

    def rows(self, table: CsvTable) -> list[T]:
        """Parse the rows of ``table``, in its order, equal to those that were written. Missing columns read as absent.

        Raises:
            HashbenchError: a required column is missing, a column is unknown, a cell holds an unknown word or an
                invalid number, or two rows have the same key.
        """
        table = _in_current_words(self.columns, self.current_names, table)
        self._check_header(table)
        self._check_cells(table)
        kinds = self.facts()
        empty = {
            name: None if kind in _NUMBERS else kind()
            for name, (holder, kind, _) in self.columns.items()
            if holder is self.kind
        }
        columns = [(name, *self.columns[name][:2]) for name in table.header]
        rows = []
        for line, cells in zip(table.lines, table.rows, strict=True):
            values: dict[type, dict[str, Any]] = {self.kind: dict(empty), **{kind: {} for kind in kinds}}
            for (column, holder, kind), cell in zip(columns, cells, strict=True):
                if cell:
                    number = kind in _NUMBERS
                    value = self._number(table.path, line, column, cell) if number else kind(restore(cell))
                    values[holder][column] = value
            facts = tuple(kind(**values[kind]) for kind in kinds if values[kind])
            rows.append(self.kind(**values[self.kind], **({"facts": facts} if facts else {})))
        self.refuse_duplicates(str(table.path), rows, lines=table.lines)
        return rows

    def _check_cells(self, table: CsvTable) -> None:
        for line, count in table.short.items():
            raise _damaged(table.path, line, f"{count} cells where the header has {len(table.header)}")
        for column in self.filled:
            for line, cell in zip(table.lines, table.column(column), strict=True):
                if not cell:
                    raise HashbenchError(
                        f"line {line} of {table.path}: the required column {column!r} is empty",
                        consequence="its row cannot be read",
                        tip="Fill that cell, or delete the line.",
                    )
        for column, (_, _, declared) in self.columns.items():
            checked = declared.words or declared.check
            for line, cell in zip(table.lines, table.column(column) if checked else (), strict=False):
                if declared.words and family_of(cell) not in declared.words:
                    raise self._no_word(column, cell, f"line {line} of {table.path}")
                if declared.check is not None and not declared.check[0](text := restore(cell)):
                    where = f"line {line} of {table.path} has {one_line(text)[:80]!r} as {column}"
                    _, what, tip = declared.check
                    raise HashbenchError(where, consequence=f"that is not {what}", tip=tip)

    def _check_header(self, table: CsvTable) -> None:
        missing = [name for name in self.required if name not in table.header]
        if len(missing) == len(self.required):
            raise HashbenchError(
                f"{table.path} is not a CSV of {self.what}",
                consequence=f"its first line does not name the columns {', '.join(self.required)}",
                tip=f"Name {self.example}, or its folder.",
            )
        if missing:
            raise HashbenchError(
                f"{table.path} lacks the columns {', '.join(missing)}",
                consequence="its rows cannot be distinguished or judged",
                tip="Make it again.",
            )
        unknown = [one_line(name) or "(no name)" for name in table.header if name not in self.types]
        if unknown:
            environment = next(iter(environments_of(table.path)), {})
            lacking = "".join(f"Here hashbench has no folder of {name}. " for name in missing_extensions())
            raise HashbenchError(
                f"{table.path} has columns that this hashbench does not know: {', '.join(unknown)}",
                consequence=versions.both(environment, reads=ROW_SCHEMA)
                if environment
                else f"{versions.SOMEBODY_ELSE} wrote it",
                tip=f"{lacking}Read it with the hashbench that wrote it, or delete these columns in a copy.",
            )

    def _no_word(self, column: str, word: str, where: str) -> HashbenchError:
        declared = self.columns[column].column
        near = difflib.get_close_matches(word, declared.words, n=1)
        return HashbenchError(
            f"{where} has the {column} {one_line(word)[:80]!r}",
            consequence=f"hashbench knows no such {declared.noun}",
            tip=f"Did you mean {near[0]}?" if near else f"It is one of: {', '.join(declared.words)}.",
        )

    def _number(self, path: Path, line: int, column: str, cell: str) -> int | float:
        whole = self.types[column] is int
        pattern, description = self.whole if whole else (_NUMBER, "a number")
        if not pattern.fullmatch(cell) or len(cell) > _LONGEST_NUMBER:
            raise HashbenchError(
                f"line {line} of {path} has {one_line(cell)[:40]!r} as {column}",
                consequence=f"that is not {description}",
                tip="Mend that cell, or leave it empty if the value is not known.",
            )
        number = int(cell) if whole else float(cell)
        if outside := self._outside(column, number):
            raise HashbenchError(f"line {line} of {path} has {cell[:40]} as {column}", consequence=outside, tip=_MEND)
        return number

    def _outside(self, column: str, number: float) -> str:
        """Describe why a number is out of the range of its column; empty if it is not."""
        if (between := self.columns[column].column.between) is None or between[0] <= number <= between[1]:
            return ""
        return f"that is not from {between[0]:g} to {between[1]:g}"

    def refuse_duplicates(self, label: str, rows: Iterable[T], *, lines: Sequence[int] = ()) -> None:
        """Raise :class:`HashbenchError` when two of ``rows`` have the same key; ``lines`` are theirs in the file."""
        seen: dict[tuple[str, ...], int] = {}
        for index, key in enumerate(map(self.key_of, rows)):
            first = seen.setdefault(key, index)
            if first != index:
                where = f"lines {lines[first]} and {lines[index]}" if lines else "its two rows"
                raise HashbenchError(
                    f"{label} holds {self.label(key)} twice",
                    consequence=f"{where} cannot both be its result",
                    tip="Keep one of the two.",
                )

    # --------------------------------------------------------------------------------------------- JSON

    def from_json(self, value: Any) -> T:
        """Parse a row from the value that :func:`hashbench.core.io.to_json` returned.

        Raises:
            UnknownContentError: it has a field, or a word in a column of words, that this version does not know.
            ValueError: a field without a default is missing, or one has another type or an invalid number.
        """
        read, facts = from_json(Mapping[str, object], value, where="not a row: it"), []
        content = {self.current_names.get(name, name): value for name, value in read.items()}
        for name in content.keys() & self.columns.keys():
            former = self.columns[name].column.former_words
            content[name] = former.get(str(content[name]), content[name]) if former else content[name]
        for kind in self.facts():
            own = {field.name: content.pop(field.name) for field in dataclasses.fields(kind) if field.name in content}
            if (made := from_json(kind, own, where="not a row: it")) != kind():
                facts.append(made)
        if "facts" in content:
            raise UnknownContentError("not a row: it has unknown fields: facts")
        row = from_json(self.kind, content, where="not a row: it")
        row = replace(typing.cast(Any, row), facts=tuple(facts)) if facts else row
        for name, column in self.columns.items():
            if (found := value_of(row, name)) is not None:
                self._check_value(name, column, found)
        return row

    def _check_value(self, name: str, column: _Declared, found: Any) -> None:
        _, kind, declared = column
        if declared.words and family_of(found) not in declared.words:
            raise UnknownContentError(f"not a row: its {name} is {found!r:.80}")
        if declared.check is not None and not declared.check[0](text := str(found)):
            raise ValueError(f"not a row: {name} is {text!r:.80}, not {declared.check[1]}")
        if kind is int and not self.whole[0].fullmatch(str(found)):
            raise ValueError(f"not a row: {name} is {found}, not {self.whole[1]}")
        if kind in _NUMBERS and (outside := self._outside(name, found)):
            raise ValueError(f"not a row: {name} is {found}; {outside}")


def _in_current_words(columns: Mapping[str, _Declared], names: Mapping[str, str], table: CsvTable) -> CsvTable:
    """Return a table with the names and words that its columns have today; ``names``: by those of older files."""
    header = tuple(names.get(name, name) for name in table.header)
    former = [columns[name].column.former_words if name in columns else {} for name in header]
    rows = (zip(former, cells, strict=True) for cells in table.rows)
    current = tuple(tuple(words.get(cell, cell) for words, cell in row) for row in rows)
    return replace(table, header=header, rows=current)


def is_absent(value: object) -> bool:
    """Return True if a cell of this value is empty."""
    return value is None or str(value) == ""


def csv_line(cells: Iterable[str]) -> str:
    """Format one line of a CSV, with its line end."""
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow(cells)
    return line.getvalue()


def csv_text(header: Iterable[str], lines: Iterable[Iterable[object]]) -> str:
    """Return a CSV; ``None`` is an empty cell, other cells are texts on one line, defused."""
    texts = ((defuse(one_line("" if cell is None else str(cell))) for cell in cells) for cells in lines)
    return "".join(map(csv_line, (header, *texts)))


# ----------------------------------------------------------------------------------------------- one cell


_EXECUTABLE = re.compile(r"'*[=+\-@\t\r]")
"""What a spreadsheet takes for a formula when it opens a CSV (OWASP, "CSV Injection"), perhaps already defused."""


def defuse(text: str) -> str:
    """Return ``text`` with a leading apostrophe if a spreadsheet would execute it; :func:`restore` removes it."""
    return f"'{text}" if _EXECUTABLE.match(text) else text


def restore(text: str) -> str:
    """Return the text that :func:`defuse` was given."""
    return text[1:] if text.startswith("'") and _EXECUTABLE.match(text) else text


# ----------------------------------------------------------------------------------- the environments beside a CSV


def environments_of(path: Path) -> tuple[dict[str, Any], ...]:
    """Read the environments of a CSV's rows from ``<name>.environment.json`` or ``environment.json`` beside it: the
    newest, then the ``previous`` ones. Empty if there is no such file.

    Raises:
        HashbenchError: the file cannot be read, or is of another schema.
    """
    candidates = (path.with_name(f"{path.stem}.environment.json"), path.with_name("environment.json"))
    file = next((candidate for candidate in candidates if candidate.is_file()), None)
    if file is None:
        return ()
    content = read_json_object(file)
    versions.refuse_other_schema(
        path,
        content,
        reads=ROW_SCHEMA,
        consequence=f"its columns may mean something else ({file.name} says so)",
        tip="Read it with the hashbench that wrote it, or run the sweep again.",
    )
    previous = content.pop("previous", [])
    earlier = previous if isinstance(previous, list) else []
    return content, *(environment for environment in earlier if isinstance(environment, dict))


def environments_text(environments: Sequence[Mapping[str, Any]]) -> str:
    """Return the content of an ``environment.json``: the newest environment, then those of earlier parts as
    ``previous``."""
    newest, *previous = environments
    content = {**newest, "previous": previous} if previous else newest
    return json.dumps(content, indent=2, default=str) + "\n"


# ---------------------------------------------------------------------------------------------- accuracy.csv


def _label(key: Sequence[str]) -> str:
    *where, name = key
    scope = ", ".join(filter(None, where))
    return f"{name} ({scope})" if scope else name


ROWS = RowFormat(
    Row,
    what="accuracies",
    example="the accuracy.csv of a sweep",
    key=ROW_KEY,
    label=_label,
    required=("dev", "name", "batch_size", "accuracy"),  # dynamo's columns: no file without them is one of accuracies
    filled=("dev", "name", "accuracy"),  # a model that never loaded has no batch size
    facts=facts_kinds,
)
"""How a :class:`Row` is written and read."""


EXPECTED_ROWS = replace(ROWS, kind=ExpectedRow)
"""How an :class:`ExpectedRow` is written and read."""

row_key = ROWS.key_of
"""What identifies a row in a sweep, in the order of :data:`~hashbench.core.records.ROW_KEY`."""


def row_to_json(row: Row) -> dict[str, Any]:
    """Return the content of a row file: the fields of ``row``, its schema and the version of hashbench."""
    content = to_json(row)
    of_facts = content.pop("facts")
    return {
        **versions.stamp(ROW_SCHEMA),
        **content,
        **{name: value for fact in of_facts for name, value in fact.items()},
    }


def row_from_json(value: Any) -> Row:
    """Parse the content of a row file; the inverse of :func:`row_to_json`.

    Raises:
        UnknownContentError: another version wrote it, and this one does not know all of it; both are named.
        ValueError: it is not a row.
    """
    content = versions.split(from_json(Mapping[str, object], value, where="not a row: it"), reads=ROW_SCHEMA)
    try:
        return ROWS.from_json(content)
    except UnknownContentError as error:
        raise UnknownContentError(f"{error}; {versions.both(value, reads=ROW_SCHEMA)}") from error


def read_rows(path: Path) -> list[Row]:
    """Read the rows of an ``accuracy.csv`` in file order, equal to the rows that were written.

    Columns of :class:`Row` that the file lacks read as absent, except the required ones.

    Raises:
        HashbenchError: the file is not a CSV, is damaged or cut off, lacks a required column, has unknown columns,
            statuses or invalid numbers, or two rows of the same key; or the ``environment.json`` beside it is of a
            schema that this version does not read.
    """
    environments_of(path)
    return rows_of(read_table(path))


def rows_of(table: CsvTable) -> list[Row]:
    """Parse the rows of a CSV of hashbench, each an :class:`ExpectedRow` if the file has one of the columns that only
    these have; see :func:`read_rows`."""
    is_expected = not EXPECTED_ROWS.columns.keys().isdisjoint({*table.header} - ROWS.columns.keys())
    return list(EXPECTED_ROWS.rows(table)) if is_expected else ROWS.rows(table)
