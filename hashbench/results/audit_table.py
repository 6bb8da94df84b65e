"""``audit.csv``: its rows, written and read exactly, and refused in one line where the file holds something else.

One row says what one op, in one dtype and on one sample of inputs, did in one pass; ``docs/audit.md`` explains every
column. An absent value is an empty cell, never a zero.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hashbench.errors import HashbenchError
from hashbench.results.environments import check_schema, environments_of, read_json_object
from hashbench.results.table import RowFormat, read_table

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


KEY = ("dev", "source", "op", "dtype", "sample", "phase")
"""What identifies a row: two audits are compared by it."""

_REQUIRED = ("dev", "source", "op", "phase", "verdict")

AUDIT_ROWS = RowFormat(
    AuditRow,
    what="an audit",
    example="an audit.csv",
    key=KEY,
    label=" ".join,
    required=_REQUIRED,
    filled=_REQUIRED,
    words={"verdict": ("verdict", VERDICTS), "source": ("source", SOURCES), "phase": ("pass", PASSES)},
    whole=(re.compile("[0-9]{1,9}"), "a count"),
)
"""How an :class:`AuditRow` is written and read."""


@dataclass(frozen=True, slots=True)
class Audit:
    """What a comparison reads: ``label`` is the path as the user gave it, ``environments`` the fingerprints of the
    machines, ``asked`` what the ``audit.json`` beside it says was asked for (empty: nothing says)."""

    label: str
    rows: tuple[AuditRow, ...]
    environments: tuple[Mapping[str, Any], ...] = ()
    asked: Mapping[str, Any] = dataclasses.field(default_factory=dict)


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
    rows = tuple(AUDIT_ROWS.rows(read_table(file)))
    manifest = file.with_name(MANIFEST_FILE)
    asked = read_json_object(manifest) if file.name == AUDIT_FILE and manifest.is_file() else {}
    return Audit(str(path), rows, environments_of(file), asked)
