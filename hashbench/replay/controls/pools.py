"""Single-worker thread pools: tasks run one after the other, so that their order of completion is fixed.

Tasks still run in the pool's own threads: torch keeps gradient mode, autocast and dispatch modes per thread, so a task
that ran in the caller's thread would compute something else.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from multiprocessing.pool import Pool, ThreadPool
from time import monotonic, sleep
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from hashbench.replay.controls.interpose import function_answering

PATIENCE = 5.0
"""Seconds that a task gets before its pool is taken to need several workers: a task may wait for another one."""

_Method = Callable[..., Any]


@contextmanager
def single_worker_pools() -> Iterator[None]:
    """Thread pools have one worker, which ends each task before the next one is handed over.

    That is so for ``ThreadPoolExecutor`` and ``multiprocessing.pool.ThreadPool``, whether made inside or before.
    ``ProcessPoolExecutor`` and process pools hand over tasks one by one, too. ``as_completed`` and ``wait`` give
    futures in an order that is the same at every entry, not that of their addresses. A pool whose task does not end
    within 5 seconds gets all of its workers back, since tasks that wait for each other would wait forever. Threads
    that a program starts by itself are left alone.
    """
    executors, pools = _Executors(), _Pools()
    answers: dict[Any, _Method] = {
        ThreadPoolExecutor.submit: executors.submit,
        ProcessPoolExecutor.submit: executors.submit,
        Pool.imap: pools.imap,
        Pool.imap_unordered: pools.imap_unordered,
        Pool.join: pools.join,
        **{getattr(Pool, name): pools.begin for name in ("apply_async", "_map_async")},
    }
    with ExitStack() as stack:
        stack.callback(executors.close)
        stack.callback(pools.close)
        for method, answer in answers.items():
            stack.enter_context(function_answering(method, answer))
        yield


class _NumberedFuture(Future[Any]):
    """A future that sets and dictionaries place by its number, not by its address."""

    number: int

    @classmethod
    def become(cls, future: Any, number: int) -> None:
        future.__class__, future.number = cls, number

    def __hash__(self) -> int:
        return self.number


class _Executors:
    """Hands over the tasks of ``concurrent.futures`` one by one."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._widths: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._released: WeakSet[Any] = WeakSet()

    def submit(self, original: _Method, pool: Any, /, *args: Any, **kwargs: Any) -> Any:
        narrow = pool not in self._released
        if narrow and isinstance(pool, ThreadPoolExecutor) and pool not in self._widths:
            # One worker: which thread takes a task must not vary either, since threads have values of their own.
            self._widths[pool] = pool._max_workers
            pool._max_workers = 1
        future = original(pool, *args, **kwargs)
        if type(future) is Future:
            _NumberedFuture.become(future, next(self._numbers))
        outside = threading.current_thread() not in getattr(pool, "_threads", ())
        if narrow and outside and wait([future], timeout=PATIENCE).not_done:
            self._released.add(pool)
            self._widen(pool)
        return future

    def _widen(self, pool: Any) -> None:
        width = self._widths.pop(pool, None)
        if width is not None:
            pool._max_workers = width

    def close(self) -> None:
        for pool in list(self._widths):
            self._widen(pool)


class _Pools:
    """Gives the tasks of each ``ThreadPool`` to another one of a single worker; waits for each task of other pools."""

    def __init__(self) -> None:
        self._stand_ins: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()

    def begin(self, original: _Method, pool: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Any method that hands over tasks; they have ended when it returns."""
        if not isinstance(pool, ThreadPool):
            result = original(pool, *args, **kwargs)
            result.wait(PATIENCE)
            return result
        stand_in: Any = self._stand_in(pool)
        result = original(stand_in, *args, **kwargs)
        if threading.current_thread() not in stand_in._pool and not _is_idle(stand_in, within=PATIENCE):
            stand_in._processes = pool._processes  # type: ignore[attr-defined]
            stand_in._repopulate_pool()
        return result

    def imap(self, original: _Method, pool: Any, /, *args: Any, **kwargs: Any) -> Any:
        if isinstance(pool, ThreadPool):
            return self.begin(original, pool, *args, **kwargs)
        return original(pool, *args, **kwargs)

    def imap_unordered(self, original: _Method, pool: Any, /, *args: Any, **kwargs: Any) -> Any:
        if isinstance(pool, ThreadPool):
            return self.begin(original, pool, *args, **kwargs)
        return pool.imap(*args, **kwargs)

    def join(self, original: _Method, pool: Any, /) -> None:
        stand_in = self._stand_ins.get(pool)
        if stand_in is not None:
            _is_idle(stand_in, within=math.inf)
        original(pool)

    def close(self) -> None:
        for stand_in in self._stand_ins.values():
            stand_in.close()
            if _is_idle(stand_in, within=0):
                stand_in.join()

    def _stand_in(self, pool: Any) -> Any:
        pool._check_running()
        if pool not in self._stand_ins:
            self._stand_ins[pool] = ThreadPool(1, pool._initializer, pool._initargs)
        return self._stand_ins[pool]


def _is_idle(pool: Any, *, within: float) -> bool:
    """Whether a pool has ended all its tasks before so many seconds have passed."""
    deadline = monotonic() + within
    while pool._cache:
        if monotonic() >= deadline:
            return False
        sleep(0.0002)
    return True
