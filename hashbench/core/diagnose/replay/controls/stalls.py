"""Stall threads of the program before they start, as the scheduler of a busy machine does.

A stalled thread exposes programs that join results by deadline or in order of arrival: uniform load delays all threads
alike, and their order stays. The variation determines which threads stall, so that a stall can be reproduced.
"""

from __future__ import annotations

import functools
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from multiprocessing.pool import Pool, ThreadPool, starmapstar  # type: ignore[attr-defined]
from typing import Any

from hashbench.core.diagnose.replay.controls.system import function_answering

SECONDS = (0.25, 0.0, 0.03, 0.0)
"""Stall of successive threads, cyclic, starting at a position given by the variation. The longest spans several CPU
quota periods of a container, in which none of its threads runs."""
MOST_SECONDS = 1.0
"""Total stall per run: a program may start thousands of threads."""

_POOLS = ("concurrent.futures.thread", "multiprocessing.pool")
"""Modules of worker threads: each work item is stalled on its own instead."""

_Function = Callable[..., Any]


class _Stalls:
    """Counts the threads and pool work items that the program starts."""

    def __init__(self, variation: int) -> None:
        place = (1 - variation) % len(SECONDS)
        self._seconds = itertools.cycle((*SECONDS[place:], *SECONDS[:place]))
        self._left = MOST_SECONDS
        self._lock = threading.Lock()

    def next(self) -> float:
        """Return the stall of the next thread, in seconds."""
        with self._lock:
            seconds = min(next(self._seconds), self._left)
            self._left -= seconds
        return seconds

    def stalled(self, function: _Function) -> _Function:
        """Return ``function``, delayed by the next stall."""
        seconds = self.next()
        return functools.partial(_call_after, seconds, function) if seconds else function

    # ------------------------------------------------------------------------- what answers in place of a method

    def start(self, original: _Function, thread: threading.Thread, /) -> None:
        target = getattr(thread, "_target", None)
        if getattr(target, "__module__", "") not in _POOLS:
            seconds, run = self.next(), thread.run

            def delayed() -> None:
                del thread.run
                _call_after(seconds, run)

            if seconds:
                thread.run = delayed  # type: ignore[method-assign]
        original(thread)

    def submit(self, original: _Function, pool: Any, function: _Function, /, *args: Any, **kwargs: Any) -> Any:
        return original(pool, self.stalled(function), *args, **kwargs)

    def apply(self, original: _Function, pool: Any, /, func: _Function, *args: Any, **kwargs: Any) -> Any:
        """Wrap the work given to a ``ThreadPool``; work for processes is pickled by name and stays as it is."""
        return original(pool, self.stalled(func) if isinstance(pool, ThreadPool) else func, *args, **kwargs)

    def map(
        self, original: _Function, pool: Any, /, func: _Function, iterable: Iterable[Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Give each item of a ``ThreadPool`` its stall now: which worker begins which item first is up to the
        scheduler. Items of an iterator get theirs when the pool fetches them, in their order as well."""
        if not isinstance(pool, ThreadPool):
            return original(pool, func, iterable, *args, **kwargs)
        given: Iterable[tuple[float, Any]] = ((self.next(), item) for item in iterable)
        if isinstance(iterable, Sized):
            given = list(given)
        work = functools.partial(_call_with_each if starmapstar in args else _call_with, func)
        return original(pool, work, given, *args, **kwargs)


def _call_after(seconds: float, function: _Function, /, *args: Any, **kwargs: Any) -> Any:
    time.sleep(seconds)
    return function(*args, **kwargs)


def _call_with(function: _Function, given: tuple[float, Any], /) -> Any:
    return _call_after(given[0], function, given[1])


def _call_with_each(function: _Function, seconds: float, item: Iterable[Any], /) -> Any:
    return _call_after(seconds, function, *item)


@contextmanager
def stalled_threads(variation: int) -> Iterator[None]:
    """Delay some threads started by ``threading``, and some work of ``ThreadPoolExecutor`` and ``ThreadPool``.

    Which ones depends on the variation.
    """
    stalls = _Stalls(variation)
    answers: dict[Any, _Function] = {
        threading.Thread.start: stalls.start,
        ThreadPoolExecutor.submit: stalls.submit,
        Pool.apply_async: stalls.apply,
        **{getattr(Pool, name): stalls.map for name in ("_map_async", "imap", "imap_unordered")},
    }
    with ExitStack() as stack:
        for method, answer in answers.items():
            stack.enter_context(function_answering(method, answer))
        yield
