"""From what a user names (a CSV, a results folder, a folder of expected CSVs) to a :class:`Sweep`.

Dynamo's own files are read too: its ``accuracy`` CSVs and the ``name,accuracy,graph_breaks`` files that its CI
expects. Their status words are kept as they are.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hashbench.records import HashbenchError, Row
from hashbench.report.csvfile import check_schema, environment_file, read_json_object, refuse_duplicates, rows_of
from hashbench.report.csvtext import CsvTable, one_line, read_table

ACCURACY_FILE = "accuracy.csv"
SELECTION_FILE = "sweep.json"

Kind = Literal["hashbench", "dynamo", "dynamo_expected"]


@dataclass(frozen=True, slots=True)
class Selection:
    """What one sweep was asked to run: ``models`` as ``(suite, name)``, in ``mode``, on ``device``, as ``dtype``
    (empty: as each model was built)."""

    models: frozenset[tuple[str, str]]
    mode: str
    device: str
    dtype: str = ""

    def covers(self, row: Row) -> bool:
        """Whether the sweep was asked for the model of ``row`` on its device and with its dtype."""
        return (
            (row.suite, row.name) in self.models
            and (row.mode, row.dev) == (self.mode, self.device)
            and self.dtype in ("", row.dtype)
        )

    def concerns(self, row: Row) -> bool:
        """Whether the sweep ran any model of the suite of ``row`` in its mode."""
        return row.mode == self.mode and any(suite == row.suite for suite, _ in self.models)


@dataclass(frozen=True, slots=True)
class Sweep:
    """What a comparison reads. ``label`` is the path as the user gave it; ``environments`` maps the ``env`` of a row
    to the fingerprint of its machine; ``selections`` is empty where no ``sweep.json`` says what was asked for."""

    label: str
    rows: tuple[Row, ...]
    environments: Mapping[str, Mapping[str, Any]]
    kind: Kind
    selections: tuple[Selection, ...] = ()


def load_sweep(path: Path | str) -> Sweep:
    """Read the sweep at ``path``: a CSV, a folder with ``accuracy.csv``, a folder whose direct subfolders hold one
    each (``training/``, ``inference/``), or a folder of CSVs such as ``results/expected``.

    Raises:
        HashbenchError: there is no such file, it is no CSV of accuracies (see
            :func:`~hashbench.report.csvfile.read_rows`), a model has two results, or the files are of several kinds.
    """
    parts = [_load_file(file) for file in _csv_files(Path(path))]
    kinds = {part.kind for part in parts}
    if len(kinds) > 1:
        raise HashbenchError(
            f"{path} mixes files of {' and '.join(sorted(kinds))}",
            consequence="they do not make one sweep",
            tip="Name one of its CSVs.",
        )
    rows = tuple(row for part in parts for row in part.rows)
    refuse_duplicates(str(path), rows)
    return Sweep(
        label=str(path),
        rows=rows,
        environments={key: value for part in parts for key, value in part.environments.items()},
        kind=kinds.pop(),
        selections=tuple(selection for part in parts for selection in part.selections),
    )


def _csv_files(path: Path) -> list[Path]:
    if not path.exists():
        raise HashbenchError(
            f"there is no {path}", consequence="no sweep can be read from it", tip="Name an accuracy.csv or its folder."
        )
    if not path.is_dir():
        return [path]
    for pattern in (ACCURACY_FILE, f"*/{ACCURACY_FILE}", "*.csv"):
        found = sorted(path.glob(pattern))
        if found:
            return found
    raise HashbenchError(
        f"{path} holds no {ACCURACY_FILE} and no other CSV",
        consequence="no sweep can be read from it",
        tip="Name the folder that a sweep wrote.",
    )


def _load_file(path: Path) -> Sweep:
    check_schema(path)
    table = read_table(path)
    kind = kind_of(table.header)
    rows = tuple(rows_of(table) if kind == "hashbench" else _dynamo_rows(table))
    return Sweep(
        label=str(path),
        rows=rows,
        environments=_environments(path),
        kind=kind,
        selections=_selections(path.with_name(SELECTION_FILE)) if path.name == ACCURACY_FILE else (),
    )


# ------------------------------------------------------------------------------------------------- dynamo


def kind_of(header: Collection[str]) -> Kind:
    """Who wrote a CSV with this header. Hashbench always writes the column ``suite`` and dynamo
    never does, so that a newer hashbench's file is not taken for dynamo's."""
    if "suite" in header or "accuracy" not in header or "name" not in header:
        return "hashbench"
    return "dynamo" if "dev" in header and "batch_size" in header else "dynamo_expected"


def _dynamo_rows(table: CsvTable) -> list[Row]:
    numbered = [(line, _dynamo_row(table, line, cells)) for line, cells in table.rows(pad=True)]
    refuse_duplicates(str(table.path), [row for _, row in numbered], lines=[line for line, _ in numbered])
    return [row for _, row in numbered]


_STATUS_WORD = re.compile(r"[A-Za-z]\w*")


def _dynamo_row(table: CsvTable, line: int, cells: list[str]) -> Row:
    values = dict(zip(table.header, map(one_line, cells), strict=True))
    accuracy = values["accuracy"]
    if accuracy in ("", "0"):
        # A row of a model that did not load is dev,name,0,status padded with "0": with --tag, the status lands there.
        accuracy = values.get("tag", accuracy)
    if not _STATUS_WORD.fullmatch(accuracy) or not values["name"]:
        raise HashbenchError(
            f"line {line} of {table.path} has {accuracy!r} as accuracy of {values['name']!r}",
            consequence="that is no result",
            tip="Is it a CSV of an --accuracy run?",
        )
    batch_size = values.get("batch_size", "")
    return Row(
        dev=values.get("dev", ""),
        name=values["name"],
        # Dynamo writes 0 where it does not know the batch size.
        batch_size=int(batch_size) if re.fullmatch("[0-9]{1,9}", batch_size) and int(batch_size) else None,
        accuracy=accuracy,
    )


# ------------------------------------------------------------------------------------- beside an accuracy.csv


def _environments(path: Path) -> dict[str, Mapping[str, Any]]:
    """``env`` of a row → fingerprint: the environment of the sweep and, after a resume, its ``previous`` ones. Each
    holds its own ``key``."""
    file = environment_file(path)
    if file is None:
        return {}
    content = read_json_object(file)
    previous = content.pop("previous", [])
    environments = [content, *(one for one in previous if isinstance(one, dict))]
    return {str(environment.get("key", "")): environment for environment in environments}


def _selections(path: Path) -> tuple[Selection, ...]:
    """What ``sweep.json`` says was selected; nothing where there is none."""
    if not path.is_file():
        return ()
    content = read_json_object(path)
    try:
        options, models = content["options"], frozenset((suite, name) for suite, name in content["models"])
        return (Selection(models, mode=options["mode"], device=options["device"], dtype=options["dtype"]),)
    except (KeyError, TypeError, ValueError) as error:
        raise HashbenchError(
            f"cannot read {path}",
            consequence="its models and options do not say what was selected",
            tip="It is damaged or of another version; to compare without it, copy the CSV elsewhere.",
        ) from error
