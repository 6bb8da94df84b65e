"""From what a user names (a CSV, a results folder, a folder of expected CSVs) to a :class:`Sweep`. Dynamo's own files
are read too: its ``accuracy`` CSVs and those that its CI expects. Their status words are kept as they are."""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from hashbench.core.errors import HashbenchError
from hashbench.core.extensions import is_owned
from hashbench.core.io import read_json_object
from hashbench.core.records import Row
from hashbench.core.results.folder import (
    ACCURACY_FILE,
    NIGHT_FILE,
    SELECTION_FILE,
    checked_manifest,
    schema_difference,
    with_evidence,
)
from hashbench.core.results.rows import ROWS, CsvTable, environments_of, read_table, row_key, rows_of
from hashbench.core.text import one_line

Kind = Literal["hashbench", "dynamo", "dynamo_expected"]


@dataclass(frozen=True)
class Requested:
    """What one sweep was asked to run: ``models`` as ``(suite, name)``, in ``mode``, on ``device``, as ``dtype``
    (empty: as each model was built). ``digests`` of the files of suites, by suite; none where ``sweep.json`` has none,
    as for the suite of a package."""

    models: frozenset[tuple[str, str]]
    mode: str
    device: str
    dtype: str = ""
    digests: Mapping[str, str] = field(default_factory=dict, hash=False)

    @functools.cached_property
    def suites(self) -> frozenset[str]:
        """The suites of its models."""
        return frozenset(suite for suite, _ in self.models)

    def covers(self, row: Row) -> bool:
        """Return True if the sweep was asked for the model of ``row`` on its device and with its dtype."""
        return (
            (row.suite, row.name) in self.models
            and (row.mode, row.dev) == (self.mode, self.device)
            and self.dtype in ("", row.dtype)
        )

    def concerns(self, row: Row) -> bool:
        """Return True if the sweep ran any model of the suite of ``row`` in its mode."""
        return row.mode == self.mode and row.suite in self.suites


@dataclass(frozen=True, slots=True)
class Sweep:
    """What a comparison reads. ``label`` is the path as the user gave it; ``environments`` maps the ``env`` of a row
    to the environment of its machine; ``selections`` is empty where no ``sweep.json`` says what was asked for.
    ``parts`` are the ``(suite, mode)`` that a night, or one sweep, was asked for (``None``: nothing says).
    ``folders`` maps the key of a row to the folder of its sweep."""

    label: str
    rows: tuple[Row, ...]
    environments: Mapping[str, Mapping[str, Any]]
    kind: Kind
    selections: tuple[Requested, ...] = ()
    parts: frozenset[tuple[str, str]] | None = None
    folders: Mapping[tuple[str, ...], Path] = field(default_factory=dict)

    def digest_of(self, row: Row) -> str:
        """Return the digest of the files of a row's suite; empty where that is not known."""
        asked = (selection for selection in self.selections if selection.covers(row))
        return next((found for selection in asked if (found := selection.digests.get(row.suite, ""))), "")


def load_sweep(path: Path | str) -> Sweep:
    """Read the sweep at ``path``: a CSV, a folder with ``accuracy.csv``, a folder whose direct subfolders hold one
    each (``training/``, ``inference/``), or a folder of CSVs such as ``results/expected``.

    Raises:
        HashbenchError: it does not exist, is not a CSV of accuracies (see
            :func:`~hashbench.core.results.rows.read_rows`), a model has two results, or the files are of several kinds.
    """
    return load_files(csv_files(Path(path)), path=Path(path))


def load_files(files: Iterable[Path], *, path: Path, damaged_night: bool = False) -> Sweep:
    """Read the sweep of these CSVs in the folder ``path``, with the results of experiments beside them; without files
    if it is a night's. With ``damaged_night``, an unreadable ``night.json`` is ignored, so that all models count as
    asked for. Raises as :func:`load_sweep`."""
    parts = [(load_file(file), file.parent) for file in files]
    whole = [replace(part, rows=tuple(with_evidence(row, folder) for row in part.rows)) for part, folder in parts]
    folders = {row_key(row): folder for part, folder in parts for row in part.rows}
    return replace(joined(whole, path=path, damaged_night=damaged_night), folders=folders)


def joined(parts: Collection[Sweep], *, path: Path, damaged_night: bool = False) -> Sweep:
    """Join several parts in the folder ``path`` into one sweep; see :func:`load_files`."""
    refuse_mixed(path, parts)
    rows = tuple(row for part in parts for row in part.rows)
    ROWS.refuse_duplicates(str(path), rows)
    selections = tuple(selection for part in parts for selection in part.selections)
    return Sweep(
        label=str(path),
        rows=rows,
        environments={key: value for part in parts for key, value in part.environments.items()},
        kind=next((part.kind for part in parts), "hashbench"),
        selections=selections,
        parts=_parts(path, selections, damaged_night=damaged_night),
    )


def refuse_mixed(path: Path, parts: Iterable[Sweep]) -> None:
    """Raise :class:`HashbenchError` when the files in ``path`` are of several kinds."""
    kinds = {part.kind for part in parts}
    if len(kinds) > 1:
        raise HashbenchError(
            f"{path} mixes files of {' and '.join(sorted(kinds))}",
            consequence="they do not make one sweep",
            tip="Name one of its CSVs.",
        )


def csv_files(path: Path) -> list[Path]:
    """Return the CSVs of the sweep at ``path``, sorted; see :func:`load_sweep`."""
    if not path.exists():
        raise HashbenchError(f"{path} does not exist", tip="Name an accuracy.csv or its folder.")
    if not path.is_dir():
        return [path]
    for pattern in (ACCURACY_FILE, f"*/{ACCURACY_FILE}", "*.csv"):
        files = [file for file in sorted(path.glob(pattern)) if not is_owned(file)]  # which may lie beside
        if files:
            return files
    raise HashbenchError(
        f"{path} holds no {ACCURACY_FILE} and no other CSV",
        consequence="no sweep can be read from it",
        tip="Name the folder that a sweep wrote.",
    )


def load_file(path: Path) -> Sweep:
    """Read the sweep of one CSV; see :func:`load_sweep`."""
    environments = environments_of(path)
    table = read_table(path)
    kind = kind_of_csv(table.header)
    return Sweep(
        label=str(path),
        rows=tuple(rows_of(table) if kind == "hashbench" else _dynamo_rows(table)),
        environments={str(environment.get("key", "")): environment for environment in environments},
        kind=kind,
        selections=_selections_beside(path),
    )


# ------------------------------------------------------------------------------------------------- dynamo


def kind_of_csv(header: Collection[str]) -> Kind:
    """Return the tool that wrote a CSV with this header. Hashbench always writes the column ``suite`` and dynamo never
    does, so that the file of a newer hashbench is not taken for dynamo's."""
    if "suite" in header or "accuracy" not in header or "name" not in header:
        return "hashbench"
    return "dynamo" if "dev" in header and "batch_size" in header else "dynamo_expected"


_DYNAMO_COLUMNS = ("dev", "name", "batch_size", "accuracy", "tag")
_STATUS_WORD = re.compile(r"[A-Za-z]\w*")


def _dynamo_rows(table: CsvTable) -> list[Row]:
    rows = [dynamo_row(dict(zip(table.header, map(one_line, cells), strict=True))) for cells in table.rows]
    for line, row in zip(table.lines, rows, strict=True):
        if not _STATUS_WORD.fullmatch(row.accuracy) or not row.name:
            raise HashbenchError(
                f"line {line} of {table.path} has {row.accuracy!r} as accuracy of {row.name!r}",
                consequence="that is not a result",
                tip="Is it a CSV of an --accuracy run?",
            )
    ROWS.refuse_duplicates(str(table.path), rows, lines=table.lines)
    return rows


def dynamo_row(cells: Mapping[Any, str]) -> Row:
    """Convert a line of dynamo's CSV, given by its columns. For a model that failed to load, dynamo writes
    ``dev,name,0,status`` padded with ``0``: with ``--tag``, the status is in the column ``tag``. Batch size 0 means
    unknown."""
    dev, name, batch_size, accuracy, tag = (cells.get(key, "") for key in _DYNAMO_COLUMNS)
    known = re.fullmatch("[0-9]{1,9}", batch_size) and int(batch_size)
    return Row(dev, name, known or None, tag if tag and accuracy in ("", "0") else accuracy)


# ------------------------------------------------------------------------------------- beside an accuracy.csv


def _selections_beside(file: Path) -> tuple[Requested, ...]:
    """Read the selection from the ``sweep.json`` beside an ``accuracy.csv``; empty if there is none."""
    path = file.with_name(SELECTION_FILE)
    if file.name != ACCURACY_FILE or not path.is_file():
        return ()
    content = read_json_object(path)
    if other := schema_difference(content):
        raise HashbenchError(f"cannot read {path}", consequence=other, tip="Read it with the hashbench that wrote it.")
    try:
        content = checked_manifest(content)
        options, models = content["options"], frozenset((suite, name) for suite, name in content["models"])
        how = {"mode": options["mode"], "device": options["device"], "dtype": options["dtype"]}
        return (Requested(models, **how, digests=content.get("digests", {})),)
    except (KeyError, ValueError) as error:
        raise HashbenchError(
            f"cannot read {path}",
            consequence="its models and options do not say what was selected",
            tip="It is damaged or of another version; to compare without it, copy the CSV elsewhere.",
        ) from error


def night_problems(folder: Path, *, named: bool = False) -> tuple[str, ...]:
    """Return one sentence per sweep of a night that failed or did not end, from its ``night.json``.

    Raises:
        HashbenchError: the user ``named`` this night and its ``night.json`` cannot be read.
    """
    try:
        asked = _asked_parts(folder / NIGHT_FILE)
    except HashbenchError as error:
        if named:
            raise
        return (str(error),)
    return tuple(f"{suite} in {mode}: {error}" for suite, mode, error in asked or () if error)


def _asked_parts(path: Path) -> list[tuple[str, str, str]] | None:
    """Read suite, mode and error of each sweep of a night; ``None`` if there is no such file."""
    if not path.is_file():
        return None
    try:
        return [(str(part["suite"]), str(part["mode"]), str(part["error"])) for part in read_json_object(path)["parts"]]
    except (KeyError, TypeError) as error:
        raise HashbenchError(
            f"cannot read {path}",
            consequence="it does not say which suites and modes were asked for",
            tip="It is damaged or of another version; run `hashbench nightly` again to make it anew.",
        ) from error


def _parts(path: Path, selections: Collection[Requested], *, damaged_night: bool) -> frozenset[tuple[str, str]] | None:
    """Return the suites and modes that were asked for at ``path``: those of one sweep, or of a night those of its
    sweeps and of its ``night.json``, which also names sweeps that failed to start or were deleted. A folder of several
    sweeps without ``night.json`` cannot tell whether one is missing: ``None``."""
    swept = frozenset((suite, selection.mode) for selection in selections for suite in selection.suites)
    if path.name == ACCURACY_FILE or (path / ACCURACY_FILE).is_file():
        return swept or None
    try:
        asked = _asked_parts(path / NIGHT_FILE)
    except HashbenchError:
        if not damaged_night:
            raise
        return None
    return None if asked is None else swept.union((suite, mode) for suite, mode, _ in asked)
