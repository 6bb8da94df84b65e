"""Start a run of a program in a fresh process, with the same standard input as all others, and wait for it."""

from __future__ import annotations

import json
import os
import select
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from hashbench.core.errors import HashbenchError, last_line
from hashbench.core.io import from_json, read_file, read_json, to_json
from hashbench.core.processes import Child, describe_end, python_calling, tell_phase
from hashbench.core.text import duration
from hashbench.extensions.watch.program.task import END, STDERR, STDOUT, TASK, ProgramEnd, ProgramTask

_TELL_SECONDS = 0.5
_TERMINATION_SECONDS = 10.0
_PIECE = 1 << 16
_MOST_ERRORS = 1 << 24


@dataclass(frozen=True, slots=True)
class ProgramRun:
    """A run that has ended.

    Attributes:
        folder: of its recording.
        status: exit code; negative: of a signal.
        end: what it left; ``None``: nothing, since it did not end by itself.
        last_words: last line of its standard error.
        timed_out: it was ended because its time was over.
        files: content of the files to be compared, by name; ``None``: there is none.
    """

    folder: Path
    status: int
    end: ProgramEnd | None
    last_words: str
    timed_out: bool
    files: tuple[tuple[str, bytes | None], ...] = ()

    def ended(self) -> str:
        """Return how it ended, in words; empty: by itself, with exit code 0."""
        if self.timed_out:
            return "stopped at the time limit"
        if self.status < 0:
            return describe_end(self.status)
        if self.end is not None and self.end.ended:
            return self.end.ended
        return f"exit code {self.status}" if self.status else ""


def run_once(
    task: ProgramTask, words: str, *, source: StandardInput, seconds: float | None, files: tuple[str, ...] = ()
) -> ProgramRun:
    """Run a program as ``task`` says, and wait for its end.

    Args:
        task: what to do; its folder is made.
        words: which run it is, for the terminal.
        source: of its standard input.
        seconds: after which it is ended; ``None``: never.
        files: whose content is kept when it has ended.

    Raises:
        HashbenchError: it cannot be started.
    """
    folder = Path(task.folder)
    folder.mkdir(parents=True)
    (folder / TASK).write_text(json.dumps(to_json(task)))
    environment = {}
    if task.clocks:
        temporary = folder.parent / "tmp"  # the same path in all of them
        temporary.mkdir(exist_ok=True)
        environment["TMPDIR"] = str(temporary)
    command = python_calling("hashbench.extensions.watch.program.child:run", str(folder), safe_path=False)
    began = monotonic()
    with (folder / STDOUT).open("wb") as stdout, (folder / STDERR).open("wb") as stderr, source.fed() as stdin:
        try:
            child = Child(command, stdin=stdin, stdout=stdout, stderr=stderr, environment=environment, guarded=True)
        except OSError as error:
            raise HashbenchError("cannot start the program", consequence=error.strerror or str(error)) from error
        with child:
            status = _waited(child, words, began, seconds)
            timed_out = status is None
            if status is None:
                child.interrupt(signal.SIGTERM)
                status = child.wait(_TERMINATION_SECONDS) or -signal.SIGTERM
    end = from_json(ProgramEnd, read_json(folder / END)) if (folder / END).exists() else None
    errors = read_file(folder / STDERR, most=_MOST_ERRORS) if _size(folder / STDERR) < _MOST_ERRORS else b""
    return ProgramRun(
        folder,
        status,
        end,
        last_line(errors.decode(errors="replace")),
        timed_out,
        tuple((name, _content(Path(name))) for name in files),
    )


def _size(path: Path) -> int:
    return path.stat().st_size


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None


def _waited(child: Child, words: str, began: float, seconds: float | None) -> int | None:
    while True:
        passed = monotonic() - began
        if seconds is not None and passed >= seconds:
            return None
        status = child.wait(_TELL_SECONDS if seconds is None else min(_TELL_SECONDS, seconds - passed))
        if status is not None:
            return status
        tell_phase(f"{words}, {duration(monotonic() - began)}")


class StandardInput:
    """Standard input of this process, given to each run from its beginning. What a run reads is kept for the next."""

    def __init__(self) -> None:
        self._descriptor = _descriptor()
        self._kept = tempfile.TemporaryFile()  # noqa: SIM115 – as long as this object lives
        self._is_file = self._descriptor >= 0 and stat.S_ISREG(os.fstat(self._descriptor).st_mode)
        self._start = os.lseek(self._descriptor, 0, os.SEEK_CUR) if self._is_file else 0
        self._at_end = False

    @contextmanager
    def fed(self) -> Iterator[int]:
        """Yield a descriptor with the whole input; that of a terminal itself."""
        if self._descriptor < 0:
            yield subprocess.DEVNULL
        elif self._is_file:
            os.lseek(self._descriptor, self._start, os.SEEK_SET)
            yield self._descriptor
        elif os.isatty(self._descriptor):
            yield self._descriptor
        else:
            with self._piped() as end:
                yield end

    @contextmanager
    def _piped(self) -> Iterator[int]:
        reading, writing = os.pipe()
        done = threading.Event()
        feeder = threading.Thread(target=self._feed, args=(writing, done), daemon=True)
        feeder.start()
        try:
            yield reading
        finally:
            done.set()
            os.close(reading)  # a feeder that waits for a reader ends
            feeder.join()

    def _feed(self, writing: int, done: threading.Event) -> None:
        at = 0
        with suppress(BrokenPipeError):
            while not done.is_set():
                piece = os.pread(self._kept.fileno(), _PIECE, at) or self._read(done)
                if not piece:
                    break
                os.write(writing, piece)
                at += len(piece)
        os.close(writing)

    def _read(self, done: threading.Event) -> bytes:
        """Return new input, and keep it; empty at its end."""
        while not (self._at_end or done.is_set()):
            if select.select([self._descriptor], [], [], 0.1)[0]:
                piece = os.read(self._descriptor, _PIECE)
                self._at_end = not piece
                os.pwrite(self._kept.fileno(), piece, os.fstat(self._kept.fileno()).st_size)
                return piece
        return b""


def _descriptor() -> int:
    try:
        return os.dup(sys.stdin.fileno())
    except (AttributeError, OSError, ValueError):
        return -1
