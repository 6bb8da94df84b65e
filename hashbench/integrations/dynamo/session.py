"""Share state between the processes of one ``hashbench dynamo``, and make its tables.

The harness starts itself again for every model, so its instructions travel in an environment variable, and what each
process found out is in ``notes/`` of the results folder, one file per model. A model whose process left no more than
its first note has died. ``hashbench.csv`` has the columns of ``accuracy.csv`` and ``harness_accuracy``, the harness's
own word, which one of its lists may have rewritten.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import functools
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hashbench.core.catalog import STATUSES, Status, status_of
from hashbench.core.io import from_json, open_file, read_json, replace_file
from hashbench.core.records import BATCH_INVARIANCE, HarnessRow, ModelSpec, Row, extended
from hashbench.core.results.folder import LOCK_FILE, ResultsFolder, file_key
from hashbench.core.results.load import dynamo_row
from hashbench.core.results.rows import ROWS
from hashbench.extensions.fingerprint.document import FOLDER

VARIABLE = "HASHBENCH_DYNAMO"
CANNOT_FOLLOW = "cannot follow this harness"
"""First words of every line that says why a run of the harness is not judged or not repeated."""
TABLE_FILE = "hashbench.csv"

_AGREED = (Status.PASS, ": its eager runs agreed, hashbench did not see them")
_MEANING = {
    "fail_to_run": _AGREED,
    "OOM": _AGREED,
    "not_bitwise_equivalent": _AGREED,
    "infra_error": (Status.CRASHED, ""),  # harnesses of 2023; later ones write nothing
}
"""Words of the harness that are not ours: our status of a model whose eager runs were not seen, and the reason."""


@dataclass(frozen=True, slots=True)
class Session:
    """One command ``hashbench dynamo``. Paths are absolute.

    Attributes:
        folder: of our results.
        script: the harness's file.
        arguments: its flags.
        trace: ``always``: trace the harness's own two eager runs; ``on-demand``: only further runs of models that
            differ.
        budget: seconds for the experiments on one model.
        csv: the harness's CSV, if its flags name it.
        mode: one of :data:`~hashbench.core.records.SWEEP_MODES`.
        run: distinguishes this command from others that write into the folder.
        tracer: as in :class:`~hashbench.core.records.RunOptions`.
        stress: likewise.
        fingerprints: record the kernel fingerprint of every model that is judged.
        anew: remove earlier rows once the harness has accepted its flags, as it removes its own CSV.
    """

    folder: str
    script: str
    arguments: tuple[str, ...] = ()
    trace: str = "always"
    budget: float = 120.0
    csv: str = ""
    mode: str = "inference"
    run: str = ""
    tracer: str = "auto"
    stress: bool = False
    fingerprints: bool = False
    anew: bool = False

    def environment(self) -> dict[str, str]:
        """Return the environment variable by which the harness's processes find this session."""
        return {VARIABLE: json.dumps(dataclasses.asdict(self))}

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Session | None:
        """Return the session of a process; ``None`` if it belongs to none."""
        try:
            return from_json(cls, json.loads(environment.get(VARIABLE, "")))
        except ValueError:
            return None

    @property
    def suite(self) -> str:
        """``huggingface`` for ``…/huggingface.py``."""
        return Path(self.script).stem

    @property
    def results(self) -> ResultsFolder:
        """The folder of our rows, traces and repros."""
        return ResultsFolder(Path(self.folder))

    @property
    def machine(self) -> Path:
        """The file in which a process of the harness describes the machine."""
        return Path(self.folder) / "machine.json"

    @property
    def notes(self) -> Path:
        """The folder with one file per model that was begun."""
        return Path(self.folder) / "notes"

    def prepare(self, *, anew: bool) -> None:
        """Make the folders.

        Args:
            anew: remove the rows of an earlier run, as the harness removes its own CSV.

        Raises:
            OSError: a folder cannot be written.
        """
        results = self.results
        for folder in (results.rows, results.traces, results.logs, self.notes):
            folder.mkdir(parents=True, exist_ok=True)
        leftovers = [*self.notes.glob("*.json"), *results.rows.glob("*.json"), *results.logs.glob("*.log")]
        leftovers += (results.path / FOLDER).glob("*.jsonl.gz")
        for leftover in [*(leftovers if anew else []), *results.rows.glob("*.draft")]:
            leftover.unlink()
        self.machine.unlink(missing_ok=True)

    def has_begun(self) -> bool:
        """Return True if a process of this command has noted a model."""
        return any(note.run == self.run for note in read_notes(self))

    def tidy(self) -> None:
        """Remove the leftovers of a command that ended early: the description of the machine, notes of models without
        an outcome, empty folders, and the results folder itself if it holds only its lock."""
        results = self.results
        self.machine.unlink(missing_ok=True)
        for note in read_notes(self):
            if note.run == self.run and not (note.status or note.key or note.ended):
                _note_path(self, note.name).unlink()
        for folder in (results.rows, results.traces, results.logs, self.notes):
            with contextlib.suppress(OSError):  # it is not empty, or not there
                folder.rmdir()
        if [path.name for path in results.path.iterdir()] == [LOCK_FILE]:
            (results.path / LOCK_FILE).unlink()
            results.path.rmdir()


@dataclass(frozen=True, slots=True)
class Note:
    """What a process of the harness recorded of one model.

    Attributes:
        name: of the model.
        status: the harness's word; empty until it is written.
        csv: the file it was written to.
        mode: ``training`` or ``inference``.
        failure: an exception that the harness swallowed.
        nondeterministic_op: the op that torch refused there.
        problem: a fault of ours, which never changes what the harness finds.
        key: the name of the file of our row.
        run: the command that began it.
        ended: how a process without a row ended.
    """

    name: str
    device: str = ""
    mode: str = ""
    status: str = ""
    csv: str = ""
    failure: str = ""
    nondeterministic_op: str = ""
    problem: str = ""
    key: str = ""
    run: str = ""
    ended: str = ""


def write_note(session: Session, note: Note) -> None:
    """Write the note of a model.

    Raises:
        OSError: the folder cannot be written.
    """
    replace_file(_note_path(session, note.name), json.dumps(dataclasses.asdict(note)))


def amend_note(session: Session, name: str, **changes: str) -> None:
    """Change fields of the note of a model.

    Raises:
        OSError: the folder cannot be written.
    """
    known = next((note for note in read_notes(session) if note.name == name), Note(name))
    write_note(session, replace(known, **changes))


def rename_note(session: Session, name: str, actual: str) -> None:
    """Move the note of the model ``name`` to the name that the harness has for it.

    Raises:
        OSError: the folder cannot be written.
    """
    known = next((note for note in read_notes(session) if note.name == name), None)
    if known is None or name == actual:
        return
    write_note(session, replace(known, name=actual))
    _note_path(session, name).unlink(missing_ok=True)


def _note_path(session: Session, name: str) -> Path:
    return session.notes / f"{file_key(suite=session.suite, mode='note', name=name)}.json"


def read_notes(session: Session) -> list[Note]:
    """Return the notes of all models begun, in the order of beginning; damaged notes are skipped."""
    notes = []
    for path in sorted(session.notes.glob("*.json"), key=lambda path: path.stat().st_mtime_ns):
        with contextlib.suppress(OSError, ValueError):
            notes.append(from_json(Note, read_json(path)))
    return notes


def chosen_model(arguments: Sequence[str]) -> str:
    """Return the model chosen by ``--only`` in the harness's flags (the last one counts), "" in a sweep."""
    chosen = ""
    for index, argument in enumerate(arguments):
        if argument.startswith("--only="):
            chosen = argument.removeprefix("--only=")
        elif argument == "--only" and index + 1 < len(arguments):
            chosen = arguments[index + 1]
    return chosen


def name_of(chosen: str) -> str:
    """Return the harness's name of the chosen model: for ``path:FILE,class:CLASS`` it is the class."""
    parts = dict(part.partition(":")[::2] for part in chosen.split(","))
    return parts["class"] if parts.keys() >= {"path", "class"} else chosen


def after_flags(names: dict[str, Any], action: Callable[[], object]) -> None:
    """Call ``action`` each time the harness has parsed its command line, before it builds a model.

    Without a ``parse_args`` it is called at once. A usage error ends the process without a call.

    Args:
        names: the globals of the harness's module.
        action: what to call.
    """
    parse = names.get("parse_args")
    if parse is None:
        action()
        return

    @functools.wraps(parse)
    def parse_args(*arguments: Any, **named: Any) -> Any:
        parsed = parse(*arguments, **named)
        action()
        return parsed

    names["parse_args"] = parse_args


def tell(message: str) -> None:
    """Print one line of ours among the harness's output."""
    print(f"hashbench: {' '.join(message.split())}", file=sys.stderr, flush=True)


# ---------------------------------------------------------------------------------------------------- both tables


def collect(session: Session, *, ended: str = "", environment: str = "") -> list[HarnessRow]:
    """Return all rows so far, in the order of the harness's CSV, then those that it lacks.

    Args:
        session: of this command.
        ended: how the harness's process ended, in words; empty while it runs: a missing row may still come.
        environment: the ``env`` of the rows.
    """
    notes = read_notes(session)
    files = dict.fromkeys(filter(None, [*(note.csv for note in notes), session.csv]))
    theirs = [row for file in files for row in read_harness_rows(Path(file))]
    known = {note.name: note for note in notes}
    names = list(dict.fromkeys([row.name for row in theirs] + [note.name for note in notes]))
    of_name = {name: [row for row in theirs if row.name == name] for name in names}
    each = (_row_of(session, known.get(name, Note(name)), of_name[name]) for name in names)
    rows = [row for row in each if row is not None]
    if ended:
        seen = {row.name for row in rows}
        dead = [_ended(session, note, ended) for note in notes if note.name not in seen]
        crashed = (_own_row(session, note, Status.CRASHED, note.ended, note.failure, note.problem) for note in dead)
        rows += [extended(HarnessRow, row) for row in crashed]
    return [replace(row, env=environment) for row in rows]


def _ended(session: Session, note: Note, ended: str) -> Note:
    """Write into the note of a model without a row how its process ended; a later command does not change it."""
    if note.ended:
        return note
    ended = (
        ended if note.run in ("", session.run) else "its process ended without a row, after hashbench itself had ended"
    )
    with contextlib.suppress(OSError):
        amend_note(session, note.name, ended=ended)
    return replace(note, ended=ended)


def write(session: Session, rows: Sequence[HarnessRow]) -> Path:
    """Write both tables and return the path of the one with the harness's word.

    Raises:
        OSError: the folder cannot be written.
    """
    session.results.rebuild_csv(rows)
    path = Path(session.folder) / TABLE_FILE
    replace_file(path, replace(ROWS, kind=HarnessRow).text(rows))
    return path


def read_harness_rows(path: Path) -> list[Row]:
    """Read the harness's CSV; empty if there is none yet, or it is not one of accuracies."""
    try:
        with os.fdopen(open_file(path), encoding="utf-8", errors="replace", newline="") as file:
            rows = [dynamo_row({key: cell or "" for key, cell in line.items()}) for line in csv.DictReader(file)]
    except (OSError, csv.Error):
        return []
    return [row for row in rows if row.name and row.accuracy not in ("", "0")]


def _row_of(session: Session, note: Note, theirs: Sequence[Row]) -> HarnessRow | None:
    """Merge our row and the harness's of one model; ``None`` while there is neither."""
    words = list(dict.fromkeys([*([note.status] if note.status else []), *(row.accuracy for row in theirs)]))
    spec = ModelSpec(suite=session.suite, name=note.name)
    ours, draft = (
        read(note.key, spec, mode=note.mode) if note.key else None
        for read in (session.results.read_row, session.results.read_draft)
    )
    if ours is None and not words:
        return None
    if ours is None and draft is not None:
        ours = replace(draft, error="the process ended before a cause was found")
    if ours is None:
        ours = _inferred_row(session, note, theirs, words)
    elif note.problem:
        ours = replace(ours, error="; ".join(filter(None, (ours.error, f"a fault of hashbench: {note.problem}"))))
    return extended(HarnessRow, ours, harness_accuracy=", ".join(words))


def _inferred_row(session: Session, note: Note, theirs: Sequence[Row], words: Sequence[str]) -> Row:
    """Return a row for a model whose eager runs were not seen."""
    if (note.mode or session.mode) == BATCH_INVARIANCE and status_of(words[0]) is not None:
        row = _own_row(
            session, note, words[0], note.failure, "as the harness says: hashbench has not run it", note.problem
        )
        return replace(row, dev=theirs[0].dev or row.dev, batch_size=theirs[0].batch_size) if theirs else row
    status, meaning = _MEANING.get(words[0], (Status.SKIPPED, ": hashbench saw no eager run"))
    why = f"the harness wrote {words[0]}{meaning}"
    if words[0] in STATUSES and words[0] not in _MEANING:
        status, why = STATUSES[words[0]], ""
    problem = f"a fault of hashbench: {note.problem}" if note.problem else ""
    row = _own_row(session, note, status, note.failure, why, problem)
    if theirs:
        row = replace(row, dev=note.device or theirs[0].dev or row.dev, batch_size=theirs[0].batch_size)
    return replace(row, nondeterministic_op=note.nondeterministic_op)


def _own_row(session: Session, note: Note, status: str, *errors: str) -> Row:
    """Return a row for a model that left none."""
    return Row(
        dev=note.device or "cpu",
        name=note.name,
        batch_size=None,
        accuracy=status,
        suite=session.suite,
        mode=note.mode or session.mode,
        error="; ".join(filter(None, errors)),
    )
