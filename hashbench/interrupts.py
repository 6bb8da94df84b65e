"""Ctrl-C at places where it does no harm."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


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
