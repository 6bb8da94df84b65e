"""Lanes of a native trace: the threads, and tasks of pools, that a traced program starts."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hashbench.core.native.library import CALLS, RecorderCallbacks, is_recorded
from hashbench.core.trace.native.nodes import RecorderNodes
from hashbench.core.trace.threads import Starts


class ThreadLane:
    """Thread, or task of a pool, that a traced program starts. ``name`` is its part of record ids."""

    def __init__(self, threads: ThreadLanes, number: int, name: str, context: int) -> None:
        self.number, self.name, self.context = number, name, context
        self.started: dict[int, int] = defaultdict(int)
        self._threads = threads

    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        with self._threads.entered(self):
            return function(*args, **kwargs)


class ThreadLanes:
    """Lanes of one trace, which are begun from :meth:`install` until :meth:`remove`.

    Attributes:
        names: names of the lanes, by number.
        callbacks: numbers of the lanes of callbacks, which may run inside whatever this thread does.
    """

    def __init__(self, nodes: RecorderNodes, listener: RecorderCallbacks) -> None:
        self.names: dict[int, str] = {}
        self.callbacks: set[int] = set()
        self._nodes, self._library, self._listener = nodes, nodes.library, listener
        self._starts = Starts()
        self._started: dict[int, int] = defaultdict(int)
        self._entered, self._entering = 0, threading.Lock()

    def install(self) -> None:
        self._starts.install(self._begin)

    def remove(self) -> None:
        self._starts.remove()

    def _begin(self, *, callback: bool = False) -> ThreadLane | None:
        """Return a lane for what this thread starts; ``None`` if its own calls are not recorded."""
        if self._library.listener is not self._listener or not is_recorded():
            return None
        number = int(self._library.lane(self._nodes.recorder))
        if number < 0:
            return None
        parent, context = self._nodes.thread.lane, self._nodes.context
        started = self._started if parent is None else parent.started
        name = f"{'t' if parent is None else parent.name}{started[context]}."
        started[context] += 1
        self.names[number] = name
        if callback:
            self.callbacks.add(number)
        return ThreadLane(self, number, name, context)

    @contextmanager
    def entered(self, lane: ThreadLane) -> Iterator[None]:
        """Record this thread's calls in a lane, unless the trace is over."""
        with self._entering:
            active = self._library.listener is self._listener
            self._entered += active
        if not active:
            yield
            return
        thread = self._nodes.thread
        before, outer = thread.lane, thread.outer
        thread.lane, thread.outer = lane, None
        state = self._library.enter(self._nodes.recorder, lane.number)
        try:
            yield
        finally:
            self._library.leave(state)
            thread.lane, thread.outer = before, outer
            with self._entering:
                self._entered -= 1

    def release(self) -> None:
        """Delete the recorder unless a thread (even this one) is inside a lane or a call: that keeps it alive."""
        with self._entering:
            if not self._entered and not self._library.count(self._nodes.recorder, CALLS):
                self._nodes.release()
