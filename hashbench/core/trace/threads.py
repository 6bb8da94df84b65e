"""Record each thread, each task of a thread pool, and each callback of a future of torch, that a traced program starts,
in its own lane.

New threads do not inherit torch's thread-local dispatch state, so a native trace would not see them.
"""

from __future__ import annotations

import _thread
import functools
import threading
from collections.abc import Callable, Iterable, Sized
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import pool
from multiprocessing.pool import ThreadPool
from typing import Any, Protocol

from torch._C import Future

_POOLS = ("concurrent.futures.thread", "multiprocessing.pool")
"""Modules with thread pools: which of their threads runs a task is up to the scheduler, so each task has its own lane.
"""


class Lane(Protocol):
    """Lane of a new thread or task."""

    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call ``function`` and return its result; its ops are recorded in this lane."""


class Begin(Protocol):
    """Function that begins lanes."""

    def __call__(self, *, callback: bool = False) -> Lane | None:
        """Return a lane for a thread or task of this thread, or for a callback; ``None`` if its own calls are not
        recorded."""


class Starts:
    """Patch of ``threading``, ``_thread``, ``ThreadPoolExecutor``, ``ThreadPool`` (existing pools included) and torch's
    ``Future`` that runs everything they start in a lane, from :meth:`install` until :meth:`remove`. ``imap`` is not
    patched: another thread consumes its iterable. A callback of a future runs in the thread of a process group's
    backend, or at once if the future is done: its lane is the same."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, bool, Any]] = []

    def install(self, begin: Begin) -> None:
        before = self._before
        for owner, name, wrapped in _PLACES:
            original = getattr(owner, name)
            before.append((owner, name, name in vars(owner), original))
            setattr(owner, name, wrapped(begin, original))

    def remove(self) -> None:
        while self._before:
            owner, name, own, original = self._before.pop()
            if own:
                setattr(owner, name, original)
            elif name in vars(owner):  # else an exception came just before it was set
                delattr(owner, name)


def _starting(begin: Begin, original: Callable[..., Any]) -> Callable[..., Any]:
    def start(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        target = getattr(getattr(function, "__self__", None), "_target", None)
        lane = None if getattr(target, "__module__", "") in _POOLS else begin()
        return original(function if lane is None else functools.partial(lane.run, function), *args, **kwargs)

    return start


def _submitting(begin: Begin, original: Callable[..., Any]) -> Callable[..., Any]:
    def submit(executor: Any, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        lane = begin()
        work = fn if lane is None else functools.partial(lane.run, fn)
        return original(executor, work, *args, **kwargs)

    return submit


def _calling_back(begin: Begin, original: Callable[..., Any]) -> Callable[..., Any]:
    return _submitting(functools.partial(begin, callback=True), original)


def _applying(begin: Begin, original: Callable[..., Any]) -> Callable[..., Any]:
    def apply_async(executor: Any, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        lane = begin()
        return original(executor, func if lane is None else functools.partial(lane.run, func), *args, **kwargs)

    return apply_async


def _mapping(begin: Begin, original: Callable[..., Any]) -> Callable[..., Any]:
    def mapped(executor: Any, func: Callable[..., Any], iterable: Iterable[Any], *args: Any, **kwargs: Any) -> Any:
        if not isinstance(iterable, Sized) and original.__name__ != "_map_async":
            return original(executor, func, iterable, *args, **kwargs)
        items = list(iterable)
        lanes = [begin() for _ in items]
        if None in lanes:
            return original(executor, func, items, *args, **kwargs)
        star = pool.starmapstar in args  # type: ignore[attr-defined]
        work = [functools.partial(lane.run, func) for lane in lanes if lane is not None]
        given = [(job, *item) if star else (job, item) for job, item in zip(work, items, strict=True)]
        return original(executor, _call if star else _call_one, given, *args, **kwargs)

    return mapped


def _call(work: Callable[..., Any], /, *args: Any) -> Any:
    return work(*args)


def _call_one(given: tuple[Callable[[Any], Any], Any]) -> Any:
    work, item = given
    return work(item)


_STARTS = ("_start_joinable_thread", "_start_new_thread")
"""Functions called by ``Thread.start``: the first since Python 3.13."""

_PLACES: tuple[tuple[Any, str, Callable[[Begin, Callable[..., Any]], Callable[..., Any]]], ...] = (
    *((threading, name, _starting) for name in _STARTS if hasattr(threading, name)),
    (_thread, "start_new_thread", _starting),
    (ThreadPoolExecutor, "submit", _submitting),
    (ThreadPool, "apply_async", _applying),
    *((ThreadPool, name, _mapping) for name in ("_map_async", "imap", "imap_unordered")),
    *((Future, name, _calling_back) for name in ("then", "add_done_callback")),
)
"""Functions that start a thread or submit a task, and their patches."""
