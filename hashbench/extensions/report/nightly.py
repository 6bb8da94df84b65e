"""One night: every suite swept in both modes, one after the other, and a report on what changed.

A night is the folder ``<root>/<label>``. Each suite and mode has a sweep folder ``<suite>_<mode>`` in it, which can be
resumed, and ``night.json`` says which of them there are to be and what went wrong with each, so that a night that was
killed never looks like a whole one. Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from hashbench.core.errors import HashbenchError
from hashbench.core.io import hold_lock, write_file
from hashbench.core.results.folder import ACCURACY_FILE, LOCK_FILE, NIGHT_FILE, refuse_links
from hashbench.extensions.report.expectations import JudgedNight, assess
from hashbench.extensions.report.exports import as_junit, as_markdown

if TYPE_CHECKING:
    from hashbench.core.sweep.request import SweepRequest

NIGHT_SCHEMA = 1
"""Version of ``night.json``."""

HTML_FILE, MARKDOWN_FILE, JUNIT_FILE = "report.html", "report.md", "junit.xml"

OTHER_FOLDER = "Choose another folder or file."

_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True, slots=True)
class Part:
    """One sweep of a night: of ``suite`` in ``mode``, of the models ``only`` (none: as the flags say), in ``folder``.
    ``error`` says what went wrong, and is empty where nothing did."""

    suite: str
    mode: str
    folder: Path
    only: tuple[str, ...] = ()
    error: str = ""

    @property
    def name(self) -> str:
        """What the rows of its sweep have as their suite: of a zoo file its name without folder and ending."""
        return Path(self.suite).stem if self.suite.endswith(".py") else self.suite


Sweeper = Callable[[Part], None]
"""Makes or resumes the sweep of a part; raises :class:`HashbenchError` where that cannot be."""


def night_folder(root: Path, label: str) -> Path:
    """Return the folder of the night ``label`` in ``root``.

    Raises:
        HashbenchError: the label is not a valid folder name.
    """
    if not _LABEL.fullmatch(label):
        raise HashbenchError(
            f"{label!r} is not a valid label", consequence="nothing was run", tip="Use letters, digits, dots, dashes."
        )
    return root / label


def plan(suites: Sequence[str], modes: Sequence[str], *, folder: Path) -> tuple[Part, ...]:
    """List the parts of a night, suite by suite; a zoo file is named by its stem.

    Raises:
        HashbenchError: two suites would have one folder.
    """
    parts = [Part(suite, mode, folder) for suite in suites for mode in modes]
    parts = [replace(part, folder=folder / f"{part.name}_{part.mode}") for part in parts]
    suite_of: dict[Path, str] = {}
    for part in parts:
        if suite_of.setdefault(part.folder, part.suite) != part.suite:
            raise HashbenchError(
                f"two suites are called {part.name}", consequence="nothing was run", tip="Rename one of the files."
            )
    return tuple(parts)


def request_of(part: Part, request: SweepRequest) -> SweepRequest:
    """Return the request of a part: ``request`` with the suite, models and folder of the part. It resumes an earlier
    sweep."""
    selection = replace(request.selection, suites=(part.suite,), only=part.only)
    return replace(request, selection=selection, output=part.folder, resume=True)


@contextlib.contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Create the folder of a night and hold it alone until the end of the context, or of the process.

    Raises:
        HashbenchError: it cannot be written, holds a symbolic link, or another process sweeps this night; nothing in
            it is touched then.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        refuse_links(folder.iterdir())
        lock = hold_lock(folder / LOCK_FILE)
    except BlockingIOError as error:
        raise HashbenchError(
            f"another process is sweeping the night {folder}",
            consequence="nothing was run, and nothing in it was touched",
            tip="Wait until it ends, or choose another --label.",
        ) from error
    except OSError as error:
        what = f"cannot write {folder / NIGHT_FILE}"
        raise HashbenchError(what, consequence=error.strerror or str(error), tip=OTHER_FOLDER) from error
    try:
        yield
    finally:
        os.close(lock)


def sweep_all(parts: Sequence[Part], *, folder: Path, sweep: Sweeper, command_line: Sequence[str] = ()) -> None:
    """Sweep one part after the other and record in ``night.json`` how each ended; a failed part does not stop the
    others.

    Raises:
        HashbenchError: the folder cannot be written.
        KeyboardInterrupt: as any exception that ends the process; ``night.json`` then names the parts that did not end.
    """
    began = datetime.now(UTC).isoformat(timespec="seconds")
    # A part that cannot be swept has its reason already.
    errors = [part.error or "its sweep did not end" for part in parts]

    def write() -> None:
        ended = [
            {"suite": part.name, "mode": part.mode, "folder": part.folder.name, "error": error}
            for part, error in zip(parts, errors, strict=True)
        ]
        content = {"schema": NIGHT_SCHEMA, "began": began, "command_line": list(command_line), "parts": ended}
        write_file(folder / NIGHT_FILE, json.dumps(content, indent=2) + "\n", tip=OTHER_FOLDER)

    write()
    for number, part in enumerate(parts):
        if not part.error:
            try:
                sweep(part)
                errors[number] = ""
            except HashbenchError as error:
                errors[number] = str(error)
            write()


def complete_since(parts: Sequence[Part]) -> datetime | None:
    """Return the local time of the last row of a night; ``None`` where no part has any."""
    files = [part.folder / ACCURACY_FILE for part in parts]
    times = [file.stat().st_mtime for file in files if file.is_file()]
    return datetime.fromtimestamp(max(times), UTC).astimezone() if times else None


# --------------------------------------------------------------------------------------------------- reports


def report(root: Path, *, folder: Path, expected: Path | None) -> JudgedNight:
    """Judge the night in ``folder`` against what is expected and the nights before it in ``root``, and write its
    reports beside its sweeps: HTML, Markdown and JUnit XML.

    Raises:
        HashbenchError: the folders cannot be read, or the reports not written.
    """
    judged = assess([root], expected=expected, until=folder)
    reports = {MARKDOWN_FILE: as_markdown(judged), JUNIT_FILE: junit_of(judged), HTML_FILE: html_of(judged)}
    for name, text in reports.items():
        write_file(folder / name, text, tip=OTHER_FOLDER)
    return judged


def html_of(judged: JudgedNight) -> str:
    """Render the HTML page, with the traces that its rows name."""
    from hashbench.extensions.report.diagnoses import read_excerpts, read_tracebacks
    from hashbench.extensions.report.page import render_html

    return render_html(
        judged,
        excerpts=read_excerpts(judged.history),
        tracebacks=read_tracebacks(judged.history),
        title=f"hashbench {judged.night.label}",
        now=datetime.now(UTC),
    )


def junit_of(judged: JudgedNight) -> str:
    """Render the JUnit XML, with the last tracebacks of the logs of its models."""
    from hashbench.extensions.report.diagnoses import read_tracebacks

    return as_junit(judged, tracebacks=read_tracebacks(judged.history))
