"""Threads, and work for pools of threads, that a traced program starts: each is run in a lane of its own.

torch does not hand down to a new thread what is in force in the old one, so that a native trace would not see it.
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

_POOLS = ("concurrent.futures.thread", "multiprocessing.pool")
"""Modules whose threads do work that they are given: which of them does what is chance, so each piece counts alone."""


class Lane(Protocol):
    """What a new thread or piece of work is recorded in."""

    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """What ``function`` returns, whose calls are recorded in this lane."""


Begin = Callable[[], Lane | None]
"""Called by the thread that starts another or hands over work; ``None`` where its own calls are not recorded."""


class Starts:
    """Runs in a lane what is started by ``threading`` or ``_thread``, or handed to a ``ThreadPoolExecutor`` or a
    ``ThreadPool``, also to an older one, from :meth:`follow` until :meth:`rest`. ``imap`` of an iterator is left alone:
    another thread asks for its items."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, bool, Any]] = []

    def follow(self, begin: Begin) -> None:
        before = self._before
        for owner, name, wrapped in _PLACES:
            original = getattr(owner, name)
            before.append((owner, name, name in vars(owner), original))
            setattr(owner, name, wrapped(begin, original))

    def rest(self) -> None:
        while self._before:
            owner, name, own, original = self._before.pop()
            if own:
                setattr(owner, name, original)
            elif name in vars(owner):  # else an exception came just before
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
        given = [(one, *item) if star else (one, item) for one, item in zip(work, items, strict=True)]
        return original(executor, _call if star else _call_one, given, *args, **kwargs)

    return mapped


def _call(work: Callable[..., Any], /, *args: Any) -> Any:
    return work(*args)


def _call_one(given: tuple[Callable[[Any], Any], Any]) -> Any:
    work, item = given
    return work(item)


_STARTS = ("_start_joinable_thread", "_start_new_thread")
"""What ``Thread.start`` calls: the first since Python 3.13."""

_PLACES: tuple[tuple[Any, str, Callable[[Begin, Callable[..., Any]], Callable[..., Any]]], ...] = (
    *((threading, name, _starting) for name in _STARTS if hasattr(threading, name)),
    (_thread, "start_new_thread", _starting),
    (ThreadPoolExecutor, "submit", _submitting),
    (ThreadPool, "apply_async", _applying),
    *((ThreadPool, name, _mapping) for name in ("_map_async", "imap", "imap_unordered")),
)
"""What starts a thread or takes work for a pool, and what is put in its place."""
