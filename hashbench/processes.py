"""Child processes: environment variables set for a while, how a process ended, and Ctrl-C deferred to safe points."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType


@contextlib.contextmanager
def variables(wanted: Mapping[str, str], *, unless_set: bool = False) -> Iterator[None]:
    """Environment variables as ``wanted``, put back at the end. With ``unless_set``, those that the caller's
    environment has stay as they are."""
    changed = {name: value for name, value in wanted.items() if not (unless_set and name in os.environ)}
    before = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def describe_end(exit_code: int) -> str:
    """An exit code in words; negative for a signal, as :mod:`multiprocessing` gives it."""
    if exit_code == -signal.SIGKILL:
        return "killed by SIGKILL, which hashbench did not send: most likely the kernel was out of memory"
    if exit_code < 0:
        try:
            return f"killed by {signal.Signals(-exit_code).name}"
        except ValueError:
            return f"killed by signal {-exit_code}"
    return f"ended with exit code {exit_code} and no result"


def last_words(log: Path, *, lines: int = 4, most: int = 65536) -> list[str]:
    """The last lines that a dead worker printed, or the first of its fatal error if Python printed one."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - most))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    words = [line.strip() for line in text.splitlines() if line.strip()]
    fatal = next((index for index, line in enumerate(words) if line.startswith("Fatal Python error")), None)
    return words[-lines:] if fatal is None else words[fatal : fatal + lines]


class Interrupts:
    """A context in which Ctrl-C raises ``KeyboardInterrupt`` only inside :meth:`allowed`.

    Elsewhere it is remembered until the next :meth:`allowed`, so that neither a file nor a child process is left half
    made. Outside the main thread, and where the process ignores SIGINT, it changes nothing.
    """

    def __init__(self) -> None:
        self._waiting = False
        self._pending = False
        self._installed = False

    def __enter__(self) -> Interrupts:
        in_main_thread = threading.current_thread() is threading.main_thread()
        self._before = signal.getsignal(signal.SIGINT)
        if in_main_thread and callable(self._before):
            signal.signal(signal.SIGINT, self._note)
            self._installed = True
        return self

    def __exit__(self, *_: object) -> None:
        if self._installed:
            signal.signal(signal.SIGINT, self._before)

    @contextlib.contextmanager
    def allowed(self) -> Iterator[None]:
        """Raise ``KeyboardInterrupt`` when Ctrl-C was or is pressed."""
        self._waiting = True
        try:
            if self._pending:
                raise KeyboardInterrupt
            yield
        finally:
            self._waiting = False

    def _note(self, _signal: int, _frame: FrameType | None) -> None:
        self._pending = True
        if self._waiting:
            raise KeyboardInterrupt
