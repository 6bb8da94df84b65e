"""The files of an audit: ``audit.csv``, what ``audit.json`` says was asked for, and a file for each op.

One row of ``audit.csv`` says what one op, in one dtype and on one sample of inputs, did in one pass; ``docs/audit.md``
explains every column. An absent value is an empty cell, never a zero.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from hashbench.core.errors import HashbenchError
from hashbench.core.extensions import audits
from hashbench.core.io import UnknownContentError, from_json, read_json, read_json_object, replace_file, to_json
from hashbench.core.records import column, declared
from hashbench.core.report.audits import SOURCES, AuditKind, Op
from hashbench.core.results import versions
from hashbench.core.results.folder import file_key
from hashbench.core.results.rows import RowFormat, environments_of, read_table

AUDIT_FILE, MANIFEST_FILE = "audit.csv", "audit.json"
CATALOG_FILE = "catalog.json"
"""Which ops there are."""

AUDIT_SCHEMA = 1
"""Version of ``audit.json`` and of the files of ops; another one is refused."""

T = TypeVar("T")


class AuditVerdict(StrEnum):
    """What the comparison of documented and measured gives; :func:`hashbench.tools.audit.rows.verdict` is the rule."""

    AS_DOCUMENTED = "as documented"
    UNDOCUMENTED = "undocumented nondeterminism"
    UNDER_THE_FLAG = "differs under the flag"
    RAISES = "raises"
    DOES_NOT_RAISE = "does not raise"
    NEVER_SEEN = "documented but never seen here"
    FAILS = "fails"
    NOT_COMPARABLE = "not comparable"
    TIMEOUT = "timeout"
    CRASHED = "crashed"


UNMEASURED = (AuditVerdict.FAILS, AuditVerdict.NOT_COMPARABLE, AuditVerdict.TIMEOUT, AuditVerdict.CRASHED)


class Shown(StrEnum):
    """What was seen of one sample under one setting of the flag. ``FOLLOWS``: runs agree, but results differ
    where memory that nobody wrote holds other bytes."""

    IDENTICAL = "identical"
    DIFFERS = "differs"
    FOLLOWS = "follows memory"
    RAISES = "raises"
    NOT_COMPARABLE = "not comparable"
    NOT_RUN = "not run"


VARYING = (Shown.DIFFERS, Shown.FOLLOWS)
_SHOWN: Mapping[str, Any] = {"noun": "measurement", "words": ("", *Shown)}


@dataclass(frozen=True, slots=True)
class AuditRow:
    """One line of ``audit.csv``. The counts are of different outcomes, ``None`` where nothing was measured."""

    dev: str
    source: str = field(metadata=declared(noun="source", words=SOURCES))
    op: str
    dtype: str
    sample: str
    phase: str = field(metadata=declared(noun="pass", words=("forward", "backward")))
    verdict: str = field(metadata=declared(noun="verdict", words=tuple(AuditVerdict)))
    documented: str = ""
    off: str = column(**_SHOWN)
    on: str = column(**_SHOWN)
    unfilled: str = column(**_SHOWN)
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
    whole=(re.compile("[0-9]{1,9}"), "a count"),
)
"""How an :class:`AuditRow` is written and read."""


DETERMINISM = AuditKind(
    "an audit without --rows",
    AUDIT_FILE,
    AUDIT_ROWS,
    report="hashbench.tools.audit.report",
    no_sample={"phase": "forward"},
    marks=("off", "on"),
    races=True,
)
"""The audit of what torch documents of each op."""


def kinds() -> tuple[AuditKind, ...]:
    """Return the kinds of audits: our own, and those of extensions."""
    return (DETERMINISM, *audits())


def audit_kind(path: Path) -> AuditKind | None:
    """Return the kind of audit at ``path``, a folder or a CSV; ``None`` if it is no audit."""
    return next((kind for kind in kinds() if kind.lies_at(path)), None)


@dataclass(frozen=True, slots=True)
class AuditOptions:
    """How every op is run. ``runs`` under each setting of the flag; ``budget``: seconds for the causes of one op;
    ``replays`` of each experiment; ``threads`` of torch, ``None``: its own choice; ``tracer`` that of
    :class:`~hashbench.core.records.RunOptions`. ``of_rows``: batch invariance is measured."""

    device: str = "cpu"
    dtypes: tuple[str, ...] = ()
    samples: int = 3
    runs: int = 20
    seed: int = 1337
    budget: float = 10.0
    replays: int = 20
    threads: int | None = None
    tracer: str = "auto"
    of_rows: bool = False


@dataclass(frozen=True, slots=True)
class AuditManifest:
    """What an audit was asked for, as ``audit.json`` holds it; ``sweeps``: rows of sweeps belong to it."""

    options: AuditOptions
    ops: tuple[Op, ...]
    sweeps: bool

    def covers(self, row: Any) -> bool:
        """Return True if the audit was asked for the op, dtype and device of ``row``."""
        if row.source == "sweep":
            return self.sweeps
        of_dtype = not row.dtype or row.dtype in self.options.dtypes
        return of_dtype and self.options.device == row.dev and (row.source, row.op) in self.ops


@dataclass(frozen=True, slots=True)
class Audit:
    """What a comparison reads: ``label`` is the path as the user gave it, ``environments`` the fingerprints of the
    machines, ``asked`` what was asked for (``None``: nothing says)."""

    label: str
    rows: tuple[Any, ...]
    environments: tuple[Mapping[str, Any], ...] = ()
    asked: AuditManifest | None = None


def read(path: Path, kind: AuditKind = DETERMINISM) -> Audit:
    """Read the audit of this kind at ``path``, a folder or a CSV.

    Raises:
        HashbenchError: the file is missing or damaged, or its columns or words are not those of this version.
    """
    file = path / kind.file if path.is_dir() else path
    if not file.exists():
        tip = f"Name {kind.rows.example} or its folder."
        raise HashbenchError(f"{file} does not exist", consequence="no audit can be read from it", tip=tip)
    environments = environments_of(file)
    rows = tuple(kind.rows.rows(read_table(file)))
    manifest = file.with_name(MANIFEST_FILE)
    asked = read_manifest(manifest) if file.name == kind.file and manifest.is_file() else None
    return Audit(str(path), rows, environments, asked)


def read_manifest(path: Path) -> AuditManifest:
    """Read an ``audit.json``; raise :class:`HashbenchError` if it is damaged or of another version."""
    content = read_json_object(path)
    try:
        return from_json(AuditManifest, versions.split(content, reads=AUDIT_SCHEMA), where="it")
    except ValueError as error:
        raise _refused(path, content, error) from error


def _refused(path: Path, content: Mapping[str, Any], error: ValueError) -> HashbenchError:
    """Return the refusal of a document of another version, both of which are named, or of a damaged one."""
    if not isinstance(error, UnknownContentError):
        return HashbenchError(f"cannot read {path}", consequence=str(error))
    both = versions.both(content, reads=AUDIT_SCHEMA)
    why = str(error) if both in str(error) else f"{error}; {both}"
    return HashbenchError(f"cannot read {path}", consequence=why, tip=versions.USE_THE_WRITER)


def manifest_text(manifest: AuditManifest) -> str:
    """Return the content of ``audit.json``."""
    return json.dumps({**versions.stamp(AUDIT_SCHEMA), **to_json(manifest)}, indent=1) + "\n"


# ----------------------------------------------------------------------------------------- while an audit runs


def op_file(folder: Path, op: Op) -> Path:
    """Return the path of an op's rows. The file is written atomically."""
    source, name = op
    return folder / "ops" / f"{file_key(suite=source, mode='op', name=name)}.json"


def write_op(folder: Path, op: Op, rows: Iterable[Any]) -> None:
    """Keep the rows of an op, of which there may be none: the dtypes that were asked for are not its own."""
    replace_file(op_file(folder, op), json.dumps({**versions.stamp(AUDIT_SCHEMA), "rows": list(map(to_json, rows))}))


def read_op(folder: Path, op: Op, rows: RowFormat[T] = AUDIT_ROWS) -> tuple[T, ...] | None:  # type: ignore[assignment]
    """Read the rows of an op; ``None`` if its file is missing or damaged.

    Raises:
        HashbenchError: the file is of another version.
    """
    path = op_file(folder, op)
    content: Mapping[str, Any] = {}
    try:
        content = from_json(Mapping[str, object], read_json(path), where="it")
        found = versions.split(content, reads=AUDIT_SCHEMA)
        return tuple(map(rows.from_json, from_json(tuple[object, ...], found.pop("rows", None), where="rows")))
    except UnknownContentError as error:
        raise _refused(path, content, error) from error
    except (OSError, ValueError):
        return None
