"""A deterministic clock: it advances by calls instead of by time, so that two runs of a program read the same times."""

from __future__ import annotations

import datetime
import functools
import gc
import itertools
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

from hashbench.replay.controls.references import Substitute, changed, changed_type, substituted

STEP = 1_000_000
"""Nanoseconds by which every call advances: 1 ms, so that a loop that waits for a second ends after 1000 calls."""

_COUNTING = ("time", "monotonic", "perf_counter", "process_time", "thread_time")
_HANDING_ON = frozenset({"datetime", "_pydatetime", "email", "timeit", "uuid"})
"""Parts of the standard library whose callers get the time from them."""

_SPARED = (frozenset(sys.stdlib_module_names) | {"torch", "numpy", "hashbench"}) - _HANDING_ON
"""Packages that go by real time: they wait for threads, processes and sockets."""


@contextmanager
def ticking_clocks() -> Iterator[Callable[[], None]]:
    """Every clock that Python code can ask starts from the same time at each entry and advances by 1 ms a call. Gives a
    function that starts them anew, which is much quicker than another entry.

    Also where a clock is held under another name: see :mod:`hashbench.replay.controls.references`. ``time.sleep``
    sleeps, and advances these clocks by as much. Each thread has its own count. The standard library, torch, NumPy and
    hashbench itself go by real time. Not reached: clocks read by compiled code, such as ``numpy.datetime64("now")``,
    and times of files.
    """
    starts = itertools.count(1)
    current = [0]
    clock = _Clock(current)
    with ExitStack() as stack:
        substitutes = list(_substitutes(clock))
        for one in substitutes:
            if one.original is getattr(time, one.original.__name__, None):
                stack.enter_context(changed(time, one.original.__name__, one))
        stack.enter_context(substituted(substitutes, spared=_SPARED))
        for name, answer in (("now", clock.now), ("utcnow", clock.utcnow)):
            stack.enter_context(changed_type(datetime.datetime, name, _class_method(name, answer)))
        yield lambda: current.__setitem__(0, next(starts))


class _Clock(threading.local):
    """What time it is for the current thread, since the start whose number ``current`` holds."""

    def __init__(self, current: list[int]) -> None:
        self.current, self.start, self.elapsed = current, current[0], 0

    def tick(self) -> int:
        """Nanoseconds since the start, one step later than last time."""
        return self.advance(STEP)

    def advance(self, nanoseconds: int) -> int:
        if self.start != self.current[0]:
            self.start, self.elapsed = self.current[0], 0
        self.elapsed += nanoseconds
        return self.elapsed

    def wall(self) -> float:
        return (_starts()["time"] + self.tick()) / 1e9

    def seconds(self, name: str) -> float:
        return self.nanoseconds(name) / 1e9

    def nanoseconds(self, name: str) -> int:
        return _starts()[name] + self.tick()

    def sleep(self, seconds: float) -> None:
        _sleep(seconds)
        self.advance(int(seconds * 1e9))

    def now(self, cls: type[datetime.datetime], tz: datetime.tzinfo | None = None) -> datetime.datetime:
        return cls.fromtimestamp(self.wall(), tz)

    def utcnow(self, cls: type[datetime.datetime]) -> datetime.datetime:
        return cls.fromtimestamp(self.wall(), datetime.UTC).replace(tzinfo=None)


_sleep, _localtime, _gmtime, _ctime = time.sleep, time.localtime, time.gmtime, time.ctime
_asctime, _strftime = time.asctime, time.strftime


@functools.cache
def _starts() -> dict[str, int]:
    """Where each clock starts: at its time of the first entry in this process, since code may hold a deadline."""
    return {name: getattr(time, f"{name}_ns")() for name in _COUNTING if hasattr(time, f"{name}_ns")}


def _substitutes(clock: _Clock) -> Iterator[Substitute]:
    _starts()
    answers: dict[str, Callable[..., Any]] = {}
    for name in _COUNTING:
        answers[name] = functools.partial(clock.seconds, name)
        answers[f"{name}_ns"] = functools.partial(clock.nanoseconds, name)
    answers |= {
        "clock_gettime": lambda _which: clock.wall(),
        "clock_gettime_ns": lambda _which: clock.nanoseconds("time"),
        "sleep": clock.sleep,
        "localtime": lambda seconds=None: _localtime(clock.wall() if seconds is None else seconds),
        "gmtime": lambda seconds=None: _gmtime(clock.wall() if seconds is None else seconds),
        "ctime": lambda seconds=None: _ctime(clock.wall() if seconds is None else seconds),
        "asctime": lambda moment=None: _asctime(_localtime(clock.wall()) if moment is None else moment),
        "strftime": lambda form, moment=None: _strftime(form, _localtime(clock.wall()) if moment is None else moment),
    }
    for name, answer in answers.items():
        if hasattr(time, name):
            yield Substitute(getattr(time, name), answer, is_spared=_is_spared)
    for held in _held_methods():
        answer = functools.partial(getattr(clock, held.__name__), held.__self__)
        yield Substitute(held, answer, is_spared=_is_spared)


def _held_methods() -> list[Any]:
    """``datetime.now`` and ``datetime.utcnow`` as somebody has stored them: each access makes another object."""
    return [
        found
        for found in gc.get_referrers(datetime.datetime)
        if isinstance(found, types.BuiltinMethodType)
        and found.__self__ is datetime.datetime
        and found.__name__ in ("now", "utcnow")
    ]


def _class_method(name: str, answer: Callable[..., Any]) -> classmethod[Any, Any, Any]:
    original = datetime.datetime.__dict__[name]

    def ask(cls: type[datetime.datetime], *args: Any, **kwargs: Any) -> Any:
        if _is_spared(sys._getframe(1)):
            return original.__get__(None, cls)(*args, **kwargs)
        return answer(cls, *args, **kwargs)

    return classmethod(ask)


def _is_spared(frame: FrameType) -> bool:
    name = frame.f_globals.get("__name__")
    return isinstance(name, str) and name.partition(".")[0] in _SPARED
