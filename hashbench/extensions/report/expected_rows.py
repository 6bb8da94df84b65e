"""Update CSVs of expected rows from a sweep, for ``hashbench expect``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from hashbench.core.catalog import kind_of
from hashbench.core.errors import HashbenchError
from hashbench.core.extensions import shown, written
from hashbench.core.io import write_file
from hashbench.core.records import ROW_SCHEMA, ExpectedRow, Row, extended, is_link
from hashbench.core.report.compare import Became, ModelChange, what_happened
from hashbench.core.results.load import Sweep, joined, load_sweep
from hashbench.core.results.rows import EXPECTED_ROWS, environments_text, row_key
from hashbench.core.text import join_limited, one_line, shorten
from hashbench.extensions.report.expectations import AS_BEFORE, changes_since

_LONGEST_REASON = 80


@dataclass(frozen=True, slots=True)
class Expected:
    """The content of one CSV of expected rows.

    Attributes:
        rows: all rows to expect.
        environments: key -> environment of the rows.
        what: counts of rows: ``new``, ``changed``, ``unchanged``, ``kept: not seen`` (it differs now and then, and did
            not tonight), ``kept: not in the sweep``, and where models were named, ``kept: not named``.
        taken: names of the models of the sweep that were named; empty where none was.
        left: names of the models of the sweep that were not.
        accepted: a line for each row whose status is another than before, or that is new and does not pass.
    """

    rows: tuple[ExpectedRow, ...]
    environments: Mapping[str, Mapping[str, Any]]
    what: Mapping[str, int]
    taken: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    accepted: tuple[str, ...] = ()


def expect(new: Sweep, *, known: Sweep | None, only: Collection[str] = (), link: str = "", today: str) -> Expected:
    """Return the rows to expect: those of ``new``, and those of ``known`` that ``new`` does not have.

    A row that shows what was expected keeps its ``since`` and ``link``. An expected difference that shows only now and
    then stays when ``new`` did not show it, unless ``only`` names the model.

    Args:
        new: a sweep, written by hashbench.
        known: the rows that are expected so far.
        only: names of the models to take from ``new``; empty: all.
        link: the issue that explains new or changed rows that do not pass.
        today: the date of ``new``, as ISO 8601.

    Raises:
        HashbenchError: ``new`` has no rows, ``link`` is not an address, a side is dynamo's, or a row is of another
            backend than the one that it would replace.
    """
    if new.kind != "hashbench" or (known is not None and known.kind != "hashbench"):
        raise HashbenchError(
            "files of dynamo cannot be a baseline",
            consequence="they have no suite and no kernel",
            tip="Name a folder that `hashbench sweep` wrote.",
        )
    if not new.rows:
        raise HashbenchError(f"{new.label} holds no rows", consequence="nothing was written", tip="Finish the sweep.")
    if not is_link(link):
        raise HashbenchError(
            f"{one_line(link)[:80]!r} is not an address",
            consequence="nothing was written",
            tip="Begin it with https://.",
        )
    # Folders of the sweep that the row came from do not lie beside a CSV of expected rows.
    taken = tuple(replace(row, repro="", traces="") for row in new.rows if not only or row.name in only)
    left = {row_key(row): row.name for row in new.rows if only and row.name not in only}
    known = known or Sweep("nothing", (), {}, kind="hashbench")
    changes = changes_since(known, replace(new, rows=taken, selections=(), parts=None))
    _refuse_other_backend(changes, known)
    updated = {change.key: _updated(change, only=only, left=left, link=link, today=today) for change in changes}
    rows = tuple(updated[key][0] for key in dict.fromkeys(row_key(row) for row in (*known.rows, *taken)))
    environments = {**known.environments, **new.environments}
    used = {row.env for row in rows}
    return Expected(
        rows=rows,
        environments={key: value for key, value in environments.items() if key in used},
        what=Counter(what for _, what in updated.values()),
        taken=tuple(dict.fromkeys(row.name for row in taken)) if only else (),
        left=tuple(dict.fromkeys(left.values())),
        accepted=tuple(filter(None, (_accepted(change, updated[change.key][1]) for change in changes))),
    )


def _refuse_other_backend(changes: Sequence[ModelChange], known: Sweep) -> None:
    """Raise if a row of a compiled model would replace one of an eager run, or of another backend."""
    for change in changes:
        base, new = change.base, change.new
        if base is not None and new is not None and base.backend != new.backend:
            before, now = (row.backend or "eager mode" for row in (base, new))
            raise HashbenchError(
                f"{known.label} expects {one_line(base.name)} of {before}, and the sweep has it of {now}",
                consequence="nothing was written",
                tip="Name another --output for each backend.",
            )


def _accepted(change: ModelChange, what: str) -> str:
    """Return ``NAME: pass -> model_fail_to_load (ValueError: …) is expected now``; empty where nothing is accepted."""
    before, new = change.base.accuracy if change.base else "new", change.new
    if new is None or what not in ("new", "changed") or (what == "new" and kind_of(new.accuracy).is_fine):
        return ""
    why = shorten(one_line(what_happened(new)), _LONGEST_REASON)
    return f"{one_line(new.name)}: {before} -> {new.accuracy}{f' ({why})' if why else ''} is expected now"


def _updated(
    change: ModelChange, *, only: Collection[str], left: Collection[tuple[str, ...]], link: str, today: str
) -> tuple[ExpectedRow, str]:
    """Return the row to expect, and what became of it."""
    base, new = (None if row is None else written(row) for row in (change.base, change.new))
    if base is not None and not isinstance(base, ExpectedRow):
        base = extended(ExpectedRow, base)
    if base is not None and (new is None or (change.outcome is Became.NOT_SEEN and new.name not in only)):
        if new is None:
            return base, "kept: not named" if change.key in left else "kept: not in the sweep"
        return base, "kept: not seen"
    if new is None:
        raise ValueError("a change has a row on one side at least")
    passes = kind_of(shown(new).accuracy).is_fine
    seen, link = ("", "") if passes else (today, link)  # nothing to look out for, and no issue explains it
    if base is not None and change.outcome in AS_BEFORE:
        return extended(ExpectedRow, new, since=base.since, link=base.link or link, seen=seen), "unchanged"
    return extended(ExpectedRow, new, since=today, link=link, seen=seen), "new" if base is None else "changed"


# -------------------------------------------------------------------------------------------------- on disk


def write_expected(path: Path, expected: Expected) -> None:
    """Replace the CSV at ``path`` and the environments beside it; each is written whole or not at all.

    Raises:
        HashbenchError: the folder cannot be written.
    """
    # How it was called is no part of what to expect, and has paths of somebody's machine in it.
    environments = [
        {name: value for name, value in environment.items() if name != "command_line"}
        for environment in expected.environments.values()
    ]
    if environments:
        text = environments_text([{**environments.pop(), "schema": ROW_SCHEMA}, *environments])
        write_file(path.with_suffix(".environment.json"), text, tip="Choose another --output.")
    write_file(path, EXPECTED_ROWS.text(expected.rows), tip="Choose another --output.")


def expect_from(
    results: Sequence[Path], *, output: Path, only: Collection[str] = (), link: str = "", today: str
) -> list[tuple[Path, Expected]]:
    """Update ``output`` from the sweeps at ``results``: a CSV, or a folder of one CSV for each suite, mode and device.
    Everything is read and decided before anything is written.

    Raises:
        HashbenchError: a model of ``only`` is not there; or see :func:`expect`, :func:`write_expected` and
            :func:`~hashbench.core.results.load.load_sweep`.
    """
    new = joined([load_sweep(path) for path in results], path=Path(", ".join(map(str, results))))
    names = sorted({row.name for row in new.rows})
    lost = sorted(set(only) - set(names))
    if lost:
        near = get_close_matches(lost[0], names, n=1)
        raise HashbenchError(
            f"{new.label} has no row of {', '.join(lost)}",
            consequence="nothing was written",
            tip=f"Did you mean {near[0]}?" if near else f"It has rows of: {join_limited(names)}.",
        )
    written = []
    for path, part in _split(new, output):
        named = [name for name in only if any(row.name == name for row in part.rows)]
        if not only or named:
            known = load_sweep(path) if path.exists() else None
            written.append((path, expect(part, known=known, only=named, link=link, today=today)))
    for path, expected in written:
        write_expected(path, expected)
    return written


def _split(new: Sweep, output: Path) -> list[tuple[Path, Sweep]]:
    if output.suffix == ".csv":
        return [(output, new)]
    rows: dict[str, list[Row]] = {}
    for row in new.rows:
        rows.setdefault(f"{Path(row.suite).stem}_{row.mode}_{row.dev}.csv", []).append(row)
    return [(output / name, replace(new, rows=tuple(part))) for name, part in rows.items()]
