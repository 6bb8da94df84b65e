"""Ten million rows within a minute: of an old night's CSV only what a history needs.

What a model's row says is the same night after night but for its last columns, the times. So lines are cut before
those, and beginnings that were met before are not parsed again. The fast way takes only what is plainly in order;
everything else goes to the exact reader (:mod:`hashbench.results.load`), which reads it too or says what is wrong with
it. Cells of columns that a history does not need are not looked at.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hashbench.catalog import STATUSES, Kind, kind_of
from hashbench.records import ROW_COLUMNS, ROW_KEY, Row
from hashbench.results.load import load_file
from hashbench.results.rows import EXPECTED_COLUMNS, check_schema, row_key, rows_of
from hashbench.results.table import CsvTable, restore

STATE = ("accuracy", "kernel", "cause")
"""The columns in which a night must equal the next one for both to belong to one spell."""

TIMES = "seconds"
"""The first of the columns that are never the same twice."""

Words = tuple[str, ...]

_KNOWN_COLUMNS = frozenset((*ROW_COLUMNS, *EXPECTED_COLUMNS))
_MOST_REMEMBERED = 200_000


@dataclass(slots=True)
class Memory:
    """What earlier files taught: by header, the beginnings of lines and what they say. Only of rows that pass, since
    the others have numbers that change."""

    beginnings: dict[Words, dict[bytes, tuple[Words, Words]]] = field(default_factory=dict)

    def of(self, header: Words) -> dict[bytes, tuple[Words, Words]]:
        """The beginnings of lines under this header; all are forgotten where they become too many."""
        found = self.beginnings.setdefault(header, {})
        if len(found) > _MOST_REMEMBERED:
            found.clear()
        return found


@dataclass(frozen=True, slots=True)
class NightRows:
    """The rows of one CSV in file order: their ``keys`` (as :data:`~hashbench.records.ROW_KEY`) and ``states`` (as
    :data:`STATE`). ``seconds`` is the sum of their times, and ``row`` makes the whole row of an index."""

    keys: Sequence[Words]
    states: Sequence[Words]
    seconds: float
    row: Callable[[int], Row]


def read_night_rows(path: Path, *, memory: Memory, wholly: bool = False) -> NightRows:
    """What a history needs of the CSV at ``path``; with ``wholly``, every cell of it is checked.

    Raises:
        HashbenchError: it is no CSV of accuracies; see :func:`~hashbench.results.load.load_sweep`.
    """
    check_schema(path)
    return (None if wholly else _fast(path, memory)) or _exact(path)


def _exact(path: Path) -> NightRows:
    rows = load_file(path).rows
    return NightRows(
        keys=[row_key(row) for row in rows],
        states=[tuple(getattr(row, column) for column in STATE) for row in rows],
        seconds=sum(row.seconds or 0.0 for row in rows),
        row=rows.__getitem__,
    )


def _fast(path: Path, memory: Memory) -> NightRows | None:
    """``None`` where anything about the file is unusual."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    lines = data.split(b"\n")
    header = tuple(lines[0].decode(errors="replace").split(","))
    if lines.pop() or b"\r" in data or b"\0" in data or not _is_ours(header):
        return None
    columns = _Columns(header)
    try:
        words, seconds = columns.read(lines[1:], memory.of(header))
    except (ValueError, csv.Error):  # also UnicodeDecodeError
        return None
    return NightRows(
        keys=[key for key, _ in words],
        states=[state for _, state in words],
        seconds=seconds,
        row=lambda index: rows_of(CsvTable(path, header, ((index + 2, _cells(lines[index + 1])),)))[0],
    )


def _is_ours(header: Words) -> bool:
    needed = {"dev", "name", "batch_size", "accuracy", "suite", TIMES}
    return needed <= set(header) <= _KNOWN_COLUMNS and len(set(header)) == len(header)


class _Columns:
    """Where things are in the lines of a file."""

    def __init__(self, header: Words) -> None:
        self._count = len(header)
        self._times = len(header) - header.index(TIMES)
        self._key = [_place(header, column) for column in ROW_KEY]
        self._state = [_place(header, column) for column in STATE]

    def read(
        self, lines: Sequence[bytes], known: dict[bytes, tuple[Words, Words]]
    ) -> tuple[list[tuple[Words, Words]], float]:
        """Key and state of each line, and the sum of the times; ValueError where a line is unusual."""
        parts = [line.rsplit(b",", self._times) for line in lines]
        found = [known.get(part[0]) for part in parts]
        times = [part[1] for part, words in zip(parts, found, strict=True) if words is not None]
        for index in [index for index, words in enumerate(found) if words is None]:
            cells = _cells(lines[index])
            words = found[index] = self._words(cells)
            times.append(cells[-self._times].encode())
            # Where a cell is quoted, the commas in it were taken for the ends of cells.
            if kind_of(words[1][0]) is Kind.PASS and b'"' not in lines[index]:
                known[parts[index][0]] = words
        return [words for words in found if words], sum(float(time) for time in times if time)

    def _words(self, cells: list[str]) -> tuple[Words, Words]:
        if len(cells) != self._count:
            raise ValueError("too many cells or too few")
        key = tuple(restore(cells[place]) if place >= 0 else "" for place in self._key)
        state = tuple(restore(cells[place]) if place >= 0 else "" for place in self._state)
        if not key[-1] or not key[-2] or state[0] not in STATUSES:
            raise ValueError("no device, name or status")
        return key, state


def _place(header: Words, column: str) -> int:
    return header.index(column) if column in header else -1


def _cells(line: bytes) -> list[str]:
    (cells,) = csv.reader([line.decode()], strict=True)
    return cells
