"""Any CSV file as a header and numbered lines of cells, refused with one line where it is none.

Knows nothing of hashbench's columns: :mod:`hashbench.results.rows` and :mod:`hashbench.results.load` build on it.
"""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hashbench.errors import HashbenchError
from hashbench.text import one_line as one_line

LONGEST_CELL = 1 << 24
"""Characters; the csv module stops at 131 072 by default, and the text of an error may be longer."""


@dataclass(frozen=True, slots=True)
class CsvTable:
    """A CSV file: its column names, and for every row the number of its line (the header's is 1) and its cells."""

    path: Path
    header: tuple[str, ...]
    lines: tuple[tuple[int, list[str]], ...]

    def rows(self, *, pad: bool = False) -> Iterator[tuple[int, list[str]]]:
        """Line number and as many cells as the header has. ``pad`` fills short rows with empty cells; without it, and
        for rows that are too long, :class:`HashbenchError` names the line."""
        for line, cells in self.lines:
            missing = len(self.header) - len(cells)
            if missing < 0 or (missing and not pad):
                raise _damaged(self.path, line, f"{len(cells)} cells where the header has {len(self.header)}")
            yield line, cells + [""] * missing


def read_table(path: Path) -> CsvTable:
    """Read ``path`` as CSV: UTF-8, comma-separated, one line per row; blank lines are passed over.

    Raises:
        HashbenchError: the file cannot be read, is not a CSV, or is cut off.
    """
    text = _read_text(path)
    _refuse_other_formats(path, text)
    if not text.endswith(("\n", "\r")):
        raise HashbenchError(
            f"{path} is cut off",
            consequence="its last line has no end",
            tip="Make it again; if that line is complete, end it with a line break.",
        )
    records = _parse(path, text)
    if not records:
        raise HashbenchError(f"{path} holds only blank lines", consequence="there is no header", tip=_MAKE_IT_AGAIN)
    header = tuple(records[0][1])
    _refuse_repeated_columns(path, header)
    return CsvTable(path=path, header=header, lines=tuple(records[1:]))


_MAKE_IT_AGAIN = "Name the accuracy.csv of a sweep, or its folder."


def _read_text(path: Path) -> str:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise HashbenchError(f"cannot read {path}", consequence=error.strerror or str(error), tip="") from error
    if not data.strip():
        raise HashbenchError(f"{path} is empty", consequence="it holds neither header nor rows", tip=_MAKE_IT_AGAIN)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise HashbenchError(f"{path} is not a CSV", consequence="it is not UTF-8 text", tip=_MAKE_IT_AGAIN) from error
    if "\0" in text:
        raise HashbenchError(f"{path} is not a CSV", consequence="it holds binary data", tip=_MAKE_IT_AGAIN)
    return text


def _refuse_other_formats(path: Path, text: str) -> None:
    formats = {"{": "JSON", "[": "JSON", "<": "HTML or XML"}
    found = formats.get(text.lstrip()[0])
    if found:
        raise HashbenchError(f"{path} is not a CSV", consequence=f"it looks like {found}", tip=_MAKE_IT_AGAIN)


@contextmanager
def _long_cells() -> Iterator[None]:
    before = csv.field_size_limit(LONGEST_CELL)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _parse(path: Path, text: str) -> list[tuple[int, list[str]]]:
    """Every line that is not blank, with its number; a row that spreads over several lines is refused."""
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    records: list[tuple[int, list[str]]] = []
    line = 0
    try:
        with _long_cells():
            for cells in reader:
                if reader.line_num != line + 1:
                    raise _damaged(path, line + 1, "a quoted cell spreads over several lines")
                line = reader.line_num
                if cells:
                    records.append((line, cells))
    except csv.Error as error:
        raise _damaged(path, line + 1, str(error)) from error
    return records


def _refuse_repeated_columns(path: Path, header: tuple[str, ...]) -> None:
    repeated = [name for name, count in Counter(header).items() if count > 1]
    if repeated:
        raise HashbenchError(
            f"{path} names a column twice",
            consequence=f"{', '.join(repeated)} has no single meaning",
            tip=_MAKE_IT_AGAIN,
        )


def _damaged(path: Path, line: int, why: str) -> HashbenchError:
    return HashbenchError(
        f"cannot read line {line} of {path}",
        consequence=why,
        tip="The file is damaged or was cut off; make it again or mend that line.",
    )


_EXECUTABLE = re.compile(r"'*[=+\-@\t\r]")
"""What a spreadsheet takes for a formula when it opens a CSV (OWASP, "CSV Injection"), perhaps already defused."""


def defuse(text: str) -> str:
    """``text`` with a leading apostrophe where a spreadsheet would execute it; :func:`restore` takes it away."""
    return f"'{text}" if _EXECUTABLE.match(text) else text


def restore(text: str) -> str:
    """The text that :func:`defuse` was given."""
    return text[1:] if text.startswith("'") and _EXECUTABLE.match(text) else text
