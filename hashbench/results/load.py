"""From what a user names (a CSV, a results folder, a folder of expected CSVs) to a :class:`Sweep`.

Dynamo's own files are read too: its ``accuracy`` CSVs and the ``name,accuracy,graph_breaks`` files that its CI
expects. Their status words are kept as they are.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any, Literal

from hashbench.errors import HashbenchError
from hashbench.records import SWEEP_SCHEMA, Row
from hashbench.results.audit_table import is_audit
from hashbench.results.environments import check_schema, environments_by_key, read_json_object
from hashbench.results.folder import with_evidence
from hashbench.results.rows import EXPECTED_COLUMNS, ROWS, row_key
from hashbench.results.table import Table, read_table, restore
from hashbench.text import one_line

ACCURACY_FILE = "accuracy.csv"
SELECTION_FILE = "sweep.json"
NIGHT_FILE = "night.json"

Kind = Literal["hashbench", "dynamo", "dynamo_expected"]


@dataclass(frozen=True, slots=True)
class Selection:
    """What one sweep was asked to run: ``models`` as ``(suite, name)``, in ``mode``, on ``device``, as ``dtype``
    (empty: as each model was built)."""

    models: frozenset[tuple[str, str]]
    mode: str
    device: str
    dtype: str = ""
    suites: frozenset[str] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "suites", frozenset(suite for suite, _ in self.models))

    def covers(self, row: Row) -> bool:
        """Whether the sweep was asked for the model of ``row`` on its device and with its dtype."""
        return (
            (row.suite, row.name) in self.models
            and (row.mode, row.dev) == (self.mode, self.device)
            and self.dtype in ("", row.dtype)
        )

    def concerns(self, row: Row) -> bool:
        """Whether the sweep ran any model of the suite of ``row`` in its mode."""
        return row.mode == self.mode and row.suite in self.suites


@dataclass(frozen=True, slots=True)
class Provenance:
    """What a CSV of expected rows says of one: since when it is expected and when it was seen last (dates as ISO 8601),
    and the address of the issue that tells more. Empty where it says nothing."""

    since: str = ""
    link: str = ""
    seen: str = ""


@dataclass(frozen=True, slots=True)
class Sweep:
    """What a comparison reads. ``label`` is the path as the user gave it; ``environments`` maps the ``env`` of a row
    to the fingerprint of its machine; ``selections`` is empty where no ``sweep.json`` says what was asked for.
    ``parts`` are the ``(suite, mode)`` that a night, or one sweep, was asked for (``None``: nothing says).
    ``provenance`` has those rows of a CSV of expected rows that say something, by their keys."""

    label: str
    rows: tuple[Row, ...]
    environments: Mapping[str, Mapping[str, Any]]
    kind: Kind
    selections: tuple[Selection, ...] = ()
    parts: frozenset[tuple[str, str]] | None = None
    provenance: Mapping[tuple[str, ...], Provenance] = field(default_factory=dict)


def load_sweep(path: Path | str) -> Sweep:
    """Read the sweep at ``path``: a CSV, a folder with ``accuracy.csv``, a folder whose direct subfolders hold one
    each (``training/``, ``inference/``), or a folder of CSVs such as ``results/expected``.

    Raises:
        HashbenchError: there is no such file, it is no CSV of accuracies (see
            :func:`~hashbench.results.rows.read_rows`), a model has two results, or the files are of several kinds.
    """
    return joined([_with_evidence(load_file(file), file.parent) for file in csv_files(Path(path))], path=Path(path))


def _with_evidence(sweep: Sweep, folder: Path) -> Sweep:
    return replace(sweep, rows=tuple(with_evidence(row, folder) for row in sweep.rows))


def joined(parts: Collection[Sweep], *, path: Path, damaged_night: bool = False) -> Sweep:
    """One sweep of several parts, all of them in the folder ``path``; ``parts`` may be empty where it is a night's.
    With ``damaged_night``, a ``night.json`` that cannot be read counts as none, so that all models count as asked for.

    Raises:
        HashbenchError: a model has two results, or the files are of several kinds.
    """
    kinds = {part.kind for part in parts}
    if len(kinds) > 1:
        raise HashbenchError(
            f"{path} mixes files of {' and '.join(sorted(kinds))}",
            consequence="they do not make one sweep",
            tip="Name one of its CSVs.",
        )
    rows = tuple(row for part in parts for row in part.rows)
    ROWS.refuse_duplicates(str(path), rows)
    return Sweep(
        label=str(path),
        rows=rows,
        environments={key: value for part in parts for key, value in part.environments.items()},
        kind=kinds.pop() if kinds else "hashbench",
        selections=(selections := tuple(selection for part in parts for selection in part.selections)),
        parts=_parts(path, selections, damaged_night=damaged_night),
        provenance={key: value for part in parts for key, value in part.provenance.items()},
    )


def csv_files(path: Path) -> list[Path]:
    """The CSVs that make up the sweep at ``path``, sorted; see :func:`load_sweep`."""
    if not path.exists():
        raise HashbenchError(f"{path} does not exist", tip="Name an accuracy.csv or its folder.")
    if not path.is_dir():
        return [path]
    for pattern in (ACCURACY_FILE, f"*/{ACCURACY_FILE}", "*.csv"):
        found = [file for file in sorted(path.glob(pattern)) if not is_audit(file)]  # which may lie beside
        if found:
            return found
    raise HashbenchError(
        f"{path} holds no {ACCURACY_FILE} and no other CSV",
        consequence="no sweep can be read from it",
        tip="Name the folder that a sweep wrote.",
    )


def load_file(path: Path) -> Sweep:
    """The sweep of one CSV; see :func:`load_sweep`."""
    check_schema(path)
    table = read_table(path)
    kind = kind_of(table.header)
    rows = tuple(ROWS.rows(table) if kind == "hashbench" else _dynamo_rows(table))
    return Sweep(
        label=str(path),
        rows=rows,
        environments=environments_by_key(path),
        kind=kind,
        selections=selections_beside(path),
        provenance=_provenance(table, rows) if kind == "hashbench" else {},
    )


# ----------------------------------------------------------------------------------------------- what is expected


def _provenance(table: Table, rows: Collection[Row]) -> dict[tuple[str, ...], Provenance]:
    if not set(EXPECTED_COLUMNS) & set(table.header):
        return {}
    cells = table.cells.reindex(columns=list(EXPECTED_COLUMNS), fill_value="").map(restore)
    found = {}
    for row, line, values in zip(rows, cells.index, cells.to_numpy().tolist(), strict=True):
        if any(values):
            found[row_key(row)] = provenance = Provenance(*values)
            _check_provenance(provenance, place=f"line {line} of {table.path}")
    return found


def _check_provenance(values: Provenance, *, place: str) -> None:
    for column, day in (("since", values.since), ("seen", values.seen)):
        if not is_date(day):
            raise HashbenchError(
                f"{place} has {one_line(day)[:40]!r} as {column}",
                consequence="that is no date",
                tip="Write it as 2026-11-20, or leave it empty.",
            )
    if not is_link(values.link):
        raise HashbenchError(
            f"{place} has {one_line(values.link)[:80]!r} as link",
            consequence="that is no address",
            tip="It begins with https:// and holds no spaces or quotes.",
        )


def is_date(text: str) -> bool:
    """Whether ``text`` is a date such as ``2026-11-20``, or empty."""
    try:
        return not text or date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


_LINK = re.compile(r"https?://[^\s<>()\[\]\"'`\\|]+")
"""Only what needs no escaping in HTML attributes and Markdown, and never ``javascript:``."""


def is_link(text: str) -> bool:
    """Whether ``text`` is an address that may become a link, or empty."""
    return not text or _LINK.fullmatch(text) is not None


# ------------------------------------------------------------------------------------------------- dynamo


def kind_of(header: Collection[str]) -> Kind:
    """Who wrote a CSV with this header. Hashbench always writes the column ``suite`` and dynamo
    never does, so that a newer hashbench's file is not taken for dynamo's."""
    if "suite" in header or "accuracy" not in header or "name" not in header:
        return "hashbench"
    return "dynamo" if "dev" in header and "batch_size" in header else "dynamo_expected"


_STATUS_WORD = re.compile(r"[A-Za-z]\w*")


def _dynamo_rows(table: Table) -> list[Row]:
    columns = ["dev", "name", "batch_size", "accuracy", "tag"]
    cells = table.cells.reindex(columns=columns, fill_value="").map(one_line)
    # A row of a model that did not load is dev,name,0,status padded with "0": with --tag, the status lands there.
    padded = cells["accuracy"].isin(["", "0"]) & (cells["tag"] != "")
    cells["accuracy"] = cells["accuracy"].mask(padded, cells["tag"])
    rows = []
    for line, (dev, name, batch_size, accuracy, _) in zip(cells.index, cells.to_numpy().tolist(), strict=True):
        if not _STATUS_WORD.fullmatch(accuracy) or not name:
            raise HashbenchError(
                f"line {line} of {table.path} has {accuracy!r} as accuracy of {name!r}",
                consequence="that is no result",
                tip="Is it a CSV of an --accuracy run?",
            )
        # Dynamo writes 0 where it does not know the batch size.
        known = re.fullmatch("[0-9]{1,9}", batch_size) and int(batch_size)
        rows.append(Row(dev, name, known or None, accuracy))
    ROWS.refuse_duplicates(str(table.path), rows, lines=list(cells.index))
    return rows


# ------------------------------------------------------------------------------------- beside an accuracy.csv


def selections_beside(file: Path) -> tuple[Selection, ...]:
    """What the ``sweep.json`` beside an ``accuracy.csv`` says was selected; nothing where there is none.

    Raises:
        HashbenchError: it is damaged or of another version.
    """
    path = file.with_name(SELECTION_FILE)
    if file.name != ACCURACY_FILE or not path.is_file():
        return ()
    content = read_json_object(path)
    schema = content.get("schema", SWEEP_SCHEMA)
    if schema != SWEEP_SCHEMA:
        raise HashbenchError(
            f"{path} has schema {schema!r} and this hashbench reads schema {SWEEP_SCHEMA}",
            consequence="what it says of the selection may mean something else",
            tip="Read it with the version that wrote it.",
        )
    try:
        options, models = content["options"], frozenset((suite, name) for suite, name in content["models"])
        return (Selection(models, mode=options["mode"], device=options["device"], dtype=options["dtype"]),)
    except (KeyError, TypeError, ValueError) as error:
        raise HashbenchError(
            f"cannot read {path}",
            consequence="its models and options do not say what was selected",
            tip="It is damaged or of another version; to compare without it, copy the CSV elsewhere.",
        ) from error


def night_problems(folder: Path, *, named: bool = False) -> tuple[str, ...]:
    """A sentence for each sweep that a night was to have and that did not end well, as its ``night.json`` says.

    Raises:
        HashbenchError: the user ``named`` this night and its ``night.json`` cannot be read.
    """
    path = folder / NIGHT_FILE
    if not path.is_file():
        return ()
    try:
        return tuple(f"{suite} in {mode}: {error}" for suite, mode, error in _asked_parts(path) if error)
    except HashbenchError as error:
        if named:
            raise
        return (str(error),)


def _asked_parts(path: Path) -> list[tuple[str, str, str]]:
    try:
        return [(str(one["suite"]), str(one["mode"]), str(one["error"])) for one in read_json_object(path)["parts"]]
    except (KeyError, TypeError) as error:
        raise HashbenchError(
            f"cannot read {path}",
            consequence="it does not say which suites and modes were asked for",
            tip="It is damaged or of another version; run `hashbench nightly` again to make it anew.",
        ) from error


def _parts(path: Path, selections: Collection[Selection], *, damaged_night: bool) -> frozenset[tuple[str, str]] | None:
    """The suites and modes of what lies at ``path``: of a night, or of one sweep, which has one mode. A folder of
    several sweeps does not say whether another one is gone."""
    if path.name == ACCURACY_FILE or (path / ACCURACY_FILE).is_file():
        return frozenset(_suites_in_modes(selections)) or None
    return _night_parts(path / NIGHT_FILE, selections, damaged=damaged_night)


def _suites_in_modes(selections: Collection[Selection]) -> set[tuple[str, str]]:
    return {(suite, one.mode) for one in selections for suite in one.suites}


def _night_parts(path: Path, selections: Collection[Selection], *, damaged: bool) -> frozenset[tuple[str, str]] | None:
    """The suites and modes of a night: as its sweeps say, and of those that could not begin or are gone, as
    ``night.json`` does."""
    if not path.is_file():
        return None
    try:
        asked = {(suite, mode) for suite, mode, _ in _asked_parts(path)}
    except HashbenchError:
        if not damaged:
            raise
        return None
    return frozenset(asked | _suites_in_modes(selections))
