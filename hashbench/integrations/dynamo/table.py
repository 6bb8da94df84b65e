"""The tables of a run of the harness: one row of ours for every model that the harness has a row for or has begun.

``accuracy.csv`` in the results folder is a sweep's, for ``compare`` and ``report``. ``hashbench.csv`` has the same
columns and one more, ``harness_accuracy``: the harness's own word, which a list of its own may have rewritten.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hashbench.catalog import STATUSES
from hashbench.integrations.dynamo.session import Note, Session, read_notes
from hashbench.io import replace_file
from hashbench.records import ModelSpec, Row
from hashbench.results.rows import ROWS

TABLE_FILE, EXTRA_COLUMN = "hashbench.csv", "harness_accuracy"

_EAGER_AGREED = ("fail_accuracy", "fail_to_run", "OOM", "not_bitwise_equivalent")
"""Words of the harness for what comes after two eager runs that agreed."""
_DIED = ("infra_error",)
"""What harnesses of 2023 wrote where the later ones write nothing."""


@dataclass(frozen=True, slots=True)
class HarnessRow:
    """One row of the harness's CSV, as far as it matters here."""

    device: str
    name: str
    accuracy: str
    batch_size: int | None = None


@dataclass(frozen=True, slots=True)
class Both:
    """A row of ours, and the harness's own word for it; empty where the harness has no row."""

    row: Row
    harness_accuracy: str


def collect(session: Session, *, ended: str = "", environment: str = "") -> list[Both]:
    """All rows so far, in the order of the harness's CSV, then those that it lacks.

    Args:
        ended: how the harness's process ended, in words; empty while it runs: a model without a row may still come.
        environment: the ``env`` of the rows.
    """
    notes = read_notes(session)
    theirs = [row for path in _csv_files(notes, session) for row in read_harness_rows(path)]
    known = {note.name: note for note in notes}
    names = list(dict.fromkeys([row.name for row in theirs] + [note.name for note in notes]))
    found = [_both(session, known.get(name, Note(name)), [row for row in theirs if row.name == name]) for name in names]
    rows = [both for both in found if both is not None]
    if ended:
        begun = {both.row.name for both in rows}
        rows += [_dead(session, note, ended) for note in notes if note.name not in begun]
    return [replace(both, row=replace(both.row, env=environment)) for both in rows]


def write(session: Session, rows: Sequence[Both]) -> Path:
    """Write both tables; returns the one with the harness's word. Raises ``OSError``."""
    session.results.rebuild_csv(both.row for both in rows)
    path = Path(session.folder) / TABLE_FILE
    header = f"{ROWS.header.rstrip()},{EXTRA_COLUMN}\n"
    replace_file(path, header + "".join(ROWS.line(both.row, both.harness_accuracy) for both in rows))
    return path


def read_harness_rows(path: Path) -> list[HarnessRow]:
    """What the harness's CSV says; nothing where there is none yet, or it is not one of accuracies."""
    try:
        with path.open(encoding="utf-8", errors="replace", newline="") as file:
            lines = list(csv.DictReader(file))
    except (OSError, csv.Error):
        return []
    found = (
        HarnessRow(line.get("dev") or "", line.get("name") or "", _word(line), _batch_size(line)) for line in lines
    )
    return [row for row in found if row.name and row.accuracy]


def _word(line: Mapping[str, str | None]) -> str:
    """The status. A row of a model that did not load is ``dev,name,0,status``, filled up with ``0`` where the header
    has more columns: with ``--tag``, the status stands there."""
    word = line.get("accuracy") or ""
    return (line.get("tag") or "") if word in ("", "0") else word


def _csv_files(notes: Iterable[Note], session: Session) -> list[Path]:
    named = [note.csv for note in notes if note.csv]
    return [Path(path) for path in dict.fromkeys([*named, *([session.csv] if session.csv else [])])]


def _batch_size(line: Mapping[str, str | None]) -> int | None:
    text = line.get("batch_size") or ""
    return int(text) or None if text.isdecimal() and len(text) < 10 else None  # 0 where the harness does not know it


def _both(session: Session, note: Note, theirs: Sequence[HarnessRow]) -> Both | None:
    """What there is of one model; ``None`` while there is nothing, neither here nor there."""
    words = list(dict.fromkeys([*([note.status] if note.status else []), *(row.accuracy for row in theirs)]))
    spec = ModelSpec(suite=session.suite, name=note.name)
    ours, draft = (
        read(note.key, spec, mode=note.mode) if note.key else None
        for read in (session.results.read_row, session.results.read_draft)
    )
    if ours is None and not words:
        return None
    if ours is None and draft is not None:
        ours = replace(draft, error="an experiment ended the process: no cause was found")
    if ours is None:
        ours = _guessed(session, note, theirs, words)
    elif note.problem:
        ours = replace(ours, error="; ".join(filter(None, (ours.error, f"a fault of hashbench: {note.problem}"))))
    return Both(ours, ", ".join(words))


def _guessed(session: Session, note: Note, theirs: Sequence[HarnessRow], words: Sequence[str]) -> Row:
    """A row for a model whose eager runs we did not see."""
    word = words[0]
    if word in STATUSES:
        status, why = word, ""
    elif word in _EAGER_AGREED:
        status, why = "pass", f"the harness wrote {word}: its eager runs agreed, hashbench did not see them"
    elif word in _DIED:
        status, why = "crashed", f"the harness wrote {word}"
    else:
        status, why = "pass_due_to_skip", f"the harness wrote {word}: hashbench saw no eager run"
    problem = f"a fault of hashbench: {note.problem}" if note.problem else ""
    return Row(
        dev=note.device or (theirs[0].device if theirs else "") or "cpu",
        name=note.name,
        batch_size=theirs[0].batch_size if theirs else None,
        accuracy=status,
        suite=session.suite,
        mode=note.mode or session.mode,
        nondeterministic_op=note.nondeterministic_op,
        error="; ".join(filter(None, (note.failure, why, problem))),
    )


def _dead(session: Session, note: Note, ended: str) -> Both:
    """A model that was begun, and whose process left nothing."""
    row = Row(
        dev=note.device or "cpu",
        name=note.name,
        batch_size=None,
        accuracy="crashed",
        suite=session.suite,
        mode=note.mode or session.mode,
        error="; ".join(filter(None, (ended, note.failure, note.problem))),
    )
    return Both(row, "")
