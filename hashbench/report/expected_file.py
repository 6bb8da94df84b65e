"""CSVs of expected rows: made from a sweep, and brought up to date without losing since when a row is expected.

The columns are those of ``accuracy.csv``, then ``since``, ``link`` and ``seen``. Beside the CSV lies
``<name>.environment.json`` with the machines on which the rows were made.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hashbench.catalog import kind_of
from hashbench.errors import HashbenchError
from hashbench.io import replace_file
from hashbench.records import ROW_SCHEMA, Row
from hashbench.report.compare import Change, ModelChange, Outcome, compare
from hashbench.results.load import Provenance, Sweep, is_date, is_link, joined, load_sweep
from hashbench.results.rows import EXPECTED_COLUMNS, ROWS, row_key
from hashbench.text import one_line

_SAME = frozenset({Outcome.UNCHANGED, Outcome.STILL_DIFFERS, Outcome.STILL_FAILS, Outcome.STILL_SKIPPED})


@dataclass(frozen=True, slots=True)
class Expected:
    """The content of one CSV of expected rows. ``what`` counts what became of its rows: ``new``, ``changed``,
    ``unchanged``, ``kept: not seen`` (it differs now and then, and did not tonight), ``kept: not in the sweep``."""

    rows: tuple[tuple[Row, Provenance], ...]
    environments: Mapping[str, Mapping[str, Any]]
    what: Mapping[str, int]


def expect(new: Sweep, *, known: Sweep | None, only: Collection[str] = (), link: str = "", today: str) -> Expected:
    """What to expect from now on: the rows of ``new``, and those of ``known`` that ``new`` does not have.

    A row that shows what was expected keeps its ``since`` and ``link``. An expected difference that shows only now and
    then stays when it was not seen in ``new``, unless ``only`` names the model.

    Args:
        new: a sweep, written by hashbench.
        known: what is expected so far.
        only: names of the models to take from ``new``; none: all.
        link: the issue that explains the rows that are new or changed.
        today: the date of ``new``, as ISO 8601.

    Raises:
        HashbenchError: ``new`` has none of the models of ``only``, ``link`` is no address, or a side is dynamo's.
    """
    _check(new, known, only=only, link=link, today=today)
    # Folders of the sweep that the row came from do not lie beside a CSV of expected rows.
    taken = tuple(replace(row, repro="", traces="") for row in new.rows if not only or row.name in only)
    changes = {change.key: change for change in _changes(known, replace(new, rows=taken, selections=(), parts=None))}
    told = known.provenance if known else {}
    found = {
        key: _expectation(change, told.get(key, Provenance()), named=key[-1] in only, link=link, today=today)
        for key, change in changes.items()
    }
    order = [row_key(row) for row in (*(known.rows if known else ()), *taken)]
    rows = tuple(found[key][:2] for key in dict.fromkeys(order))
    environments = {**(known.environments if known else {}), **new.environments}
    used = {row.env for row, _ in rows}
    return Expected(
        rows=rows,
        environments={key: value for key, value in environments.items() if key in used},
        what=Counter(what for _, _, what in found.values()),
    )


def _check(new: Sweep, known: Sweep | None, *, only: Collection[str], link: str, today: str) -> None:
    if new.kind != "hashbench" or (known is not None and known.kind != "hashbench"):
        raise HashbenchError(
            "dynamo's files do not say what to expect",
            consequence="they name neither suite nor kernel",
            tip="Name a folder that `hashbench sweep` wrote.",
        )
    lost = sorted(set(only) - {row.name for row in new.rows})
    if lost:
        raise HashbenchError(
            f"{new.label} has no row of {', '.join(lost)}", consequence="nothing was written", tip="Check the names."
        )
    if not new.rows:
        raise HashbenchError(f"{new.label} holds no rows", consequence="nothing was written", tip="Finish the sweep.")
    if not is_link(link):
        raise HashbenchError(
            f"{one_line(link)[:80]!r} is no address", consequence="nothing was written", tip="Begin it with https://."
        )
    if not is_date(today):
        raise HashbenchError(
            f"invalid date {today!r} (expected YYYY-MM-DD)",
            consequence="nothing was written",
            tip="Write it as 2026-11-20.",
        )


def _changes(known: Sweep | None, new: Sweep) -> Iterable[ModelChange]:
    """What became of each row; an expectation holds for its device and dtype alone."""
    if known is None or not known.rows:
        return [Change(row_key(row), Outcome.NEW, None, row) for row in new.rows]
    return compare(known, new, scoped=True).changes


def _expectation(
    change: ModelChange, told: Provenance, *, named: bool, link: str, today: str
) -> tuple[Row, Provenance, str]:
    base, new = change.base, change.new
    if base is None and new is not None:
        return new, Provenance(since=today, link=link, seen=_seen(new, today)), "new"
    if base is not None and new is None:
        return base, told, "kept: not in the sweep"
    if base is None or new is None:
        raise ValueError("a change has a row on one side at least")
    if change.outcome is Outcome.NOT_SEEN and not named:
        return base, told, "kept: not seen"
    if change.outcome in _SAME:
        return new, Provenance(since=told.since, link=told.link or link, seen=_seen(new, today)), "unchanged"
    return new, Provenance(since=today, link=link, seen=_seen(new, today)), "changed"


def _seen(row: Row, today: str) -> str:
    """A pass is nothing that one has to look out for."""
    return "" if kind_of(row.accuracy).is_fine else today


# -------------------------------------------------------------------------------------------------- on disk


def read_expected(path: Path) -> Sweep | None:
    """What is in the CSV at ``path``; ``None`` where there is none yet."""
    return load_sweep(path) if path.exists() else None


def expected_text(expected: Expected) -> str:
    """The CSV."""
    header = f"{ROWS.header.rstrip()},{','.join(EXPECTED_COLUMNS)}\n"
    return header + "".join(ROWS.line(row, told.since, told.link, told.seen) for row, told in expected.rows)


def write_expected(path: Path, expected: Expected) -> None:
    """Replace the CSV at ``path`` and the environments beside it; each is written whole or not at all.

    Raises:
        HashbenchError: two rows have the same key, or the folder cannot be written.
    """
    ROWS.refuse_duplicates(str(path), [row for row, _ in expected.rows])
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if expected.environments:
            replace_file(path.with_suffix(".environment.json"), _environment_text(list(expected.environments.values())))
        replace_file(path, expected_text(expected))
    except OSError as error:
        raise HashbenchError(
            f"cannot write {path}", consequence=error.strerror or str(error), tip="Choose another --output."
        ) from error


def _environment_text(environments: Sequence[Mapping[str, Any]]) -> str:
    # How it was called is no part of what to expect, and has paths of somebody's machine in it.
    *previous, newest = [
        {name: value for name, value in environment.items() if name != "command_line"} for environment in environments
    ]
    content = {**newest, "schema": ROW_SCHEMA, **({"previous": previous} if previous else {})}
    return json.dumps(content, indent=2) + "\n"


def expect_from(
    results: Sequence[Path], *, output: Path, only: Collection[str] = (), link: str = "", today: str
) -> list[tuple[Path, Expected]]:
    """Bring ``output`` up to date with the sweeps at ``results``: a CSV, or a folder that gets one for each suite, mode
    and device. Everything is read and decided before anything is written.

    Raises:
        HashbenchError: see :func:`expect`, :func:`write_expected` and :func:`~hashbench.results.load.load_sweep`.
    """
    sweeps = [load_sweep(path) for path in results]
    new = joined(sweeps, path=Path(", ".join(map(str, results))))
    if only and not any(row.name in only for row in new.rows):
        _check(new, None, only=only, link=link, today=today)
    found = []
    for path, part in _split(new, output):
        names = [name for name in only if any(row.name == name for row in part.rows)]
        if not only or names:
            found.append((path, expect(part, known=read_expected(path), only=names, link=link, today=today)))
    for path, expected in found:
        write_expected(path, expected)
    return found


def _split(new: Sweep, output: Path) -> list[tuple[Path, Sweep]]:
    if output.suffix == ".csv":
        return [(output, new)]
    lots: dict[str, list[Row]] = {}
    for row in new.rows:
        lots.setdefault(f"{Path(row.suite).stem}_{row.mode}_{row.dev}.csv", []).append(row)
    return [(output / name, replace(new, rows=tuple(rows))) for name, rows in lots.items()]
