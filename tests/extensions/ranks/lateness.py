"""Peers that come late, by an event and not by the clock."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

_ASLEEP_TIMES, _PAUSE = 8, 0.005
_LIMIT = 5.0


def _state(thread: int) -> str:
    """The state of a thread of this process in a letter: ``R`` where it runs or could, ``S`` where it waits."""
    return Path(f"/proc/self/task/{thread}/stat").read_text().rpartition(")")[2].split()[0]


@contextlib.contextmanager
def told_once_blocked(tell: Callable[[], object]) -> Iterator[None]:
    """Call ``tell`` when this thread, inside the context, waits for something, and at the latest at its end.

    A read of data that have not come returns at once; under a trace it waits for them, and they are to come only then.
    """
    ours = threading.get_native_id()
    told, ended = threading.Lock(), threading.Event()

    def tell_once() -> None:
        if told.acquire(blocking=False):
            tell()

    def watch() -> None:
        asleep, until = 0, time.monotonic() + _LIMIT
        while not ended.wait(_PAUSE):
            try:
                asleep = asleep + 1 if _state(ours) == "S" else 0
            except OSError:  # no /proc here
                asleep = 0
            if asleep == _ASLEEP_TIMES or time.monotonic() > until:
                tell_once()
                return

    watcher = threading.Thread(target=watch, name=f"watches {os.getpid()}", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        tell_once()
        ended.set()
        watcher.join()
