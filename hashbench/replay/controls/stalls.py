"""Threads of the program stopped for a while before they begin, as a busy machine's scheduler stops them.

A thread that is stopped makes a program show that it joins what is ready by a deadline, or in order of arrival: steady
load delays all threads alike, and their order stays. Which ones are stopped follows from the variation alone, so that
it can be repeated.
"""

from __future__ import annotations

import functools
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from multiprocessing.pool import Pool, ThreadPool
from typing import Any

from hashbench.replay.controls.system import function_answering

SECONDS = (0.25, 0.0, 0.03, 0.0)
"""How long one thread after the other is stopped, again and again from a place that is the variation's. The longest is
some periods of a container's limit on processors, in which none of its threads runs."""
MOST_SECONDS = 1.0
"""Of one run: a program may start thousands of threads."""

_POOLS = ("concurrent.futures.thread", "multiprocessing.pool")
"""Modules whose threads do work that they are given: each piece of work is stopped by itself."""

_Function = Callable[..., Any]


class _Stalls:
    """Counts the threads, and pieces of work for pools, that the program begins."""

    def __init__(self, variation: int) -> None:
        place = (1 - variation) % len(SECONDS)
        self._seconds = itertools.cycle((*SECONDS[place:], *SECONDS[:place]))
        self._left = MOST_SECONDS
        self._lock = threading.Lock()

    def next(self) -> float:
        """Return how long the next thread is stopped."""
        with self._lock:
            seconds = min(next(self._seconds), self._left)
            self._left -= seconds
        return seconds

    def stalled(self, function: _Function) -> _Function:
        """Return ``function``, whose call begins when its thread was stopped for a while."""
        seconds = self.next()
        return functools.partial(_after, seconds, function) if seconds else function

    # ------------------------------------------------------------------------- what answers in place of a method

    def start(self, original: _Function, thread: threading.Thread, /) -> None:
        target = getattr(thread, "_target", None)
        if getattr(target, "__module__", "") not in _POOLS:
            seconds, run = self.next(), thread.run

            def delayed() -> None:
                del thread.run
                _after(seconds, run)

            if seconds:
                thread.run = delayed  # type: ignore[method-assign]
        original(thread)

    def submit(self, original: _Function, pool: Any, function: _Function, /, *args: Any, **kwargs: Any) -> Any:
        return original(pool, self.stalled(function), *args, **kwargs)

    def hand_over(self, original: _Function, pool: Any, function: _Function, /, *args: Any, **kwargs: Any) -> Any:
        """Any method of a ``Pool`` that takes work; a process gets it by name, and is left alone."""
        work = functools.partial(self._each, function) if isinstance(pool, ThreadPool) else function
        return original(pool, work, *args, **kwargs)

    def _each(self, function: _Function, /, *args: Any, **kwargs: Any) -> Any:
        return _after(self.next(), function, *args, **kwargs)


def _after(seconds: float, function: _Function, /, *args: Any, **kwargs: Any) -> Any:
    time.sleep(seconds)
    return function(*args, **kwargs)


@contextmanager
def stalled_threads(variation: int) -> Iterator[None]:
    """Some of the threads that the program starts by ``threading``, and of the work that it hands to a
    ``ThreadPoolExecutor`` or a ``ThreadPool``, begin late: other ones in each variation."""
    stalls = _Stalls(variation)
    answers: dict[Any, _Function] = {
        threading.Thread.start: stalls.start,
        ThreadPoolExecutor.submit: stalls.submit,
        **{getattr(Pool, name): stalls.hand_over for name in ("apply_async", "_map_async", "imap", "imap_unordered")},
    }
    with ExitStack() as stack:
        for method, answer in answers.items():
            stack.enter_context(function_answering(method, answer))
        yield
