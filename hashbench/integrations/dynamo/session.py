"""What the processes of one ``hashbench dynamo`` share: a folder, and one environment variable that names it.

The harness starts itself again for every model, so what it is to do travels in the environment, and what each process
found out lies in ``notes/`` of the results folder, one file a model. A model whose process left no more than its first
note has died.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hashbench.io import from_json, replace_file
from hashbench.results.folder import ResultsFolder, file_key

VARIABLE = "HASHBENCH_DYNAMO"
TRACE_MODES = ("always", "on-demand")


@dataclass(frozen=True, slots=True)
class Session:
    """``folder`` takes our results, ``script`` is the harness's file and ``arguments`` are its flags (all absolute
    where they are paths). ``trace``: ``always`` traces the harness's own two eager runs, ``on-demand`` only further
    runs of models that differ. ``budget``: seconds for the experiments on one model. ``csv``: where the harness writes,
    where its flags say so. ``mode``: ``training`` or ``inference``."""

    folder: str
    script: str
    arguments: tuple[str, ...] = ()
    trace: str = "always"
    budget: float = 120.0
    csv: str = ""
    mode: str = "inference"

    def environment(self) -> dict[str, str]:
        """The variable by which the harness's processes find this session."""
        return {VARIABLE: json.dumps(dataclasses.asdict(self))}

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Session | None:
        """The session that a process belongs to; ``None`` where it belongs to none."""
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
        """Where our rows, traces and repros lie."""
        return ResultsFolder(Path(self.folder))

    @property
    def notes(self) -> Path:
        """One file for every model that was begun."""
        return Path(self.folder) / "notes"

    def prepare(self, *, anew: bool) -> None:
        """Make the folders. ``anew``: what an earlier run left is removed, as the harness removes its own CSV. Raises
        ``OSError``."""
        for folder in (self.results.rows, self.results.traces, self.notes):
            folder.mkdir(parents=True, exist_ok=True)
        leftovers = [*self.notes.glob("*.json"), *self.results.rows.glob("*.json")] if anew else []
        for leftover in [*leftovers, *self.results.rows.glob("*.draft")]:
            leftover.unlink()


@dataclass(frozen=True, slots=True)
class Note:
    """What a process of the harness said of one model. ``status`` is the word that the harness wrote, empty until then;
    ``csv`` the file it wrote it to; ``mode`` ``training`` or ``inference``; ``failure`` an exception that it swallowed,
    and ``nondeterministic_op`` the op that torch refused there; ``problem`` a fault of ours, which never changes what
    the harness finds; ``key`` names the file of our row."""

    name: str
    device: str = ""
    mode: str = ""
    status: str = ""
    csv: str = ""
    failure: str = ""
    nondeterministic_op: str = ""
    problem: str = ""
    key: str = ""


def write_note(session: Session, note: Note) -> None:
    """Make ``note`` what is known of its model. Raises ``OSError``."""
    replace_file(_note_path(session, note), json.dumps(dataclasses.asdict(note)))


def amend_note(session: Session, name: str, **changes: str) -> None:
    """Change some of what is known of a model. Raises ``OSError``."""
    known = next((note for note in read_notes(session) if note.name == name), Note(name))
    write_note(session, replace(known, **changes))


def read_notes(session: Session) -> list[Note]:
    """Every model that was begun, in the order of beginning; a damaged note is passed over."""
    found = []
    for path in sorted(session.notes.glob("*.json"), key=lambda path: path.stat().st_mtime_ns):
        with contextlib.suppress(OSError, ValueError):
            found.append(from_json(Note, json.loads(path.read_text(encoding="utf-8"))))
    return found


def _note_path(session: Session, note: Note) -> Path:
    return session.notes / f"{file_key(suite=session.suite, mode='note', name=note.name)}.json"


def chosen_model(arguments: Sequence[str]) -> str:
    """The model that the harness's flags choose with ``--only``, empty in a sweep; the last one counts."""
    chosen = ""
    for place, argument in enumerate(arguments):
        if argument.startswith("--only="):
            chosen = argument.removeprefix("--only=")
        elif argument == "--only" and place + 1 < len(arguments):
            chosen = arguments[place + 1]
    return chosen


def session_here() -> Session | None:
    """The session of this process."""
    return Session.of(os.environ)


def tell(message: str) -> None:
    """One line among what the harness prints."""
    print(f"hashbench: {' '.join(message.split())}", file=sys.stderr, flush=True)
