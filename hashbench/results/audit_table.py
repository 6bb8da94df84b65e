"""``audit.csv``: its rows, written and read exactly, and refused in one line where the file holds something else.

One row says what one op, in one dtype and on one sample of inputs, did in one pass; ``docs/audit.md`` explains every
column. An absent value is an empty cell, never a zero.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hashbench.errors import HashbenchError
from hashbench.io import replace_file
from hashbench.results.rows import check_schema, environments_of, read_json_object
from hashbench.results.table import CsvTable, defuse, one_line, read_table, restore

AUDIT_FILE = "audit.csv"
MANIFEST_FILE = "audit.json"

SOURCES = ("op_db", "stress", "sweep")
PASSES = ("forward", "backward")

VERDICTS = (
    "as documented",
    "undocumented nondeterminism",
    "differs under the flag",
    "raises",
    "does not raise",
    "documented but never seen here",
    "fails",
    "not comparable",
    "timeout",
    "crashed",
)
"""What the comparison of documented and measured gives; ``tools/audit/verdict.py`` is the rule."""


@dataclass(frozen=True, slots=True)
class AuditRow:
    """One line of ``audit.csv``. The counts are of different outcomes, ``None`` where nothing was measured."""

    dev: str
    source: str
    op: str
    dtype: str
    sample: str
    phase: str
    verdict: str
    documented: str = ""
    off: str = ""
    on: str = ""
    unfilled: str = ""
    runs: int | None = None
    off_distinct: int | None = None
    on_distinct: int | None = None
    unfilled_distinct: int | None = None
    kernel: str = ""
    cause: str = ""
    confidence: str = ""
    because: str = ""
    inputs: str = ""
    threads: int | None = None
    error: str = ""


COLUMNS = tuple(field.name for field in dataclasses.fields(AuditRow))
KEY = ("dev", "source", "op", "dtype", "sample", "phase")
"""What identifies a row: two audits are compared by it."""

_NUMBERS = frozenset({"runs", "off_distinct", "on_distinct", "unfilled_distinct", "threads"})
_REQUIRED = ("dev", "source", "op", "phase", "verdict")
_COUNT = re.compile("[0-9]{1,9}")


@dataclass(frozen=True, slots=True)
class Audit:
    """What a comparison reads: ``label`` is the path as the user gave it, ``environments`` the fingerprints of the
    machines, ``asked`` what the ``audit.json`` beside it says was asked for (empty: nothing says)."""

    label: str
    rows: tuple[AuditRow, ...]
    environments: tuple[Mapping[str, Any], ...] = ()
    asked: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def key_of(row: AuditRow) -> tuple[str, ...]:
    """What identifies ``row``, in the order of :data:`KEY`."""
    return tuple(str(getattr(row, name)) for name in KEY)


# ------------------------------------------------------------------------------------------------ writing


def as_csv(rows: Iterable[AuditRow]) -> str:
    """The rows as the text of an ``audit.csv``. Texts lose their line breaks; all else survives :func:`read`."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows([_cell(getattr(row, name)) for name in COLUMNS] for row in rows)
    return text.getvalue()


def write(path: Path, rows: Iterable[AuditRow]) -> None:
    """Replace ``path`` by a CSV of ``rows``. Raises ``OSError``; ``path`` is then as it was."""
    replace_file(path, as_csv(rows))


def _cell(value: str | int | None) -> str:
    return "" if value is None else defuse(one_line(value)) if isinstance(value, str) else str(value)


def to_json(row: AuditRow) -> dict[str, str | int | None]:
    """Every field of ``row``, for ``json.dumps``."""
    return dataclasses.asdict(row)


def from_json(value: Any) -> AuditRow:
    """The row that :func:`to_json` was called with. Raises ``ValueError`` for anything else."""
    if not isinstance(value, dict) or set(value) != set(COLUMNS):
        raise ValueError("not a row of an audit")
    for name, item in value.items():
        whole = isinstance(item, int) and not isinstance(item, bool) and item >= 0
        if not (item is None or whole if name in _NUMBERS else isinstance(item, str)):
            raise ValueError(f"not a row of an audit: {name} is {item!r}")
    return _checked(AuditRow(**value))


def _checked(row: AuditRow) -> AuditRow:
    if row.verdict not in VERDICTS or row.source not in SOURCES or row.phase not in PASSES:
        raise ValueError(f"{row.verdict!r}, {row.source!r} or {row.phase!r} is no word of an audit")
    return row


# ------------------------------------------------------------------------------------------------ reading


def is_audit(path: Path) -> bool:
    """Whether an audit lies at ``path``: a folder with ``audit.csv``, or a CSV with the columns of one."""
    if path.is_dir():
        return (path / AUDIT_FILE).is_file() and not (path / "accuracy.csv").exists()
    try:
        with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
            header = file.readline(4096).rstrip("\r\n").split(",")
    except OSError:
        return False
    return {"op", "verdict", "off", "on"} <= set(header)


def read(path: Path) -> Audit:
    """The audit at ``path``, a folder or a CSV.

    Raises:
        HashbenchError: there is none, it is damaged, or its columns or words are not those of this version.
    """
    file = path / AUDIT_FILE if path.is_dir() else path
    if not file.exists():
        raise HashbenchError(
            f"there is no {file}", consequence="no audit can be read from it", tip="Name an audit.csv or its folder."
        )
    check_schema(file)
    rows = tuple(_rows(read_table(file)))
    manifest = file.with_name(MANIFEST_FILE)
    asked = read_json_object(manifest) if file.name == AUDIT_FILE and manifest.is_file() else {}
    return Audit(str(path), rows, environments_of(file), asked)


def _rows(table: CsvTable) -> Iterable[AuditRow]:
    unknown = [one_line(name) or "(no name)" for name in table.header if name not in COLUMNS]
    missing = [name for name in _REQUIRED if name not in table.header]
    if unknown or missing:
        said = "has columns that this hashbench does not know" if unknown else "lacks the columns"
        raise HashbenchError(
            f"{table.path} {said}: {', '.join(unknown or missing)}",
            consequence="it is no audit of this version",
            tip="Read it with the version that wrote it, or make it again with hashbench audit.",
        )
    seen: dict[tuple[str, ...], int] = {}
    for line, cells in table.rows():
        row = _row(table, line, cells)
        first = seen.setdefault(key_of(row), line)
        if first != line:
            raise HashbenchError(
                f"{table.path} holds {' '.join(key_of(row))} twice",
                consequence=f"lines {first} and {line} cannot both be its result",
                tip="Keep one of the two.",
            )
        yield row


def _row(table: CsvTable, line: int, cells: list[str]) -> AuditRow:
    values: dict[str, Any] = dict.fromkeys(("dtype", "sample"), "")
    for name, cell in zip(table.header, cells, strict=True):
        if name in _NUMBERS and cell:
            if not _COUNT.fullmatch(cell):
                raise _damaged(table, line, f"{one_line(cell)[:40]!r} as {name} is no count")
            values[name] = int(cell)
        elif name not in _NUMBERS:
            values[name] = restore(cell)
    empty = next((name for name in _REQUIRED if not values[name]), "")
    if empty:
        raise _damaged(table, line, f"it has no {empty}")
    try:
        return _checked(AuditRow(**values))
    except ValueError as error:
        raise _damaged(table, line, one_line(str(error))[:200]) from None


def _damaged(table: CsvTable, line: int, why: str) -> HashbenchError:
    return HashbenchError(
        f"cannot read line {line} of {table.path}", consequence=why, tip="Mend that line, or make the audit again."
    )
