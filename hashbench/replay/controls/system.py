"""What a program reads from the system, made the same at every entry: clocks that advance by calls instead of by time,
and entropy that is one fixed stream."""

from __future__ import annotations

import _random
import datetime
import functools
import gc
import hashlib
import itertools
import os
import random
import sys
import threading
import time
import types
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

import torch

from hashbench.replay.controls.interpose import attribute_of_type, builtin_answering

# ---------------------------------------------------------------------------------------------------------- clocks

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
    function that starts them anew, which is quicker than another entry.

    ``time.sleep`` sleeps, and advances these clocks by as much. Each thread has its own count. The standard library,
    torch, NumPy and hashbench itself go by real time. Not reached: clocks read by compiled code, such as
    ``numpy.datetime64("now")``, and times of files.
    """
    starts = itertools.count(1)
    current = [0]
    clock = _Clock(current)
    with ExitStack() as stack:
        for builtin, answer in clock.answers():
            stack.enter_context(builtin_answering(builtin, answer, is_spared=_is_spared))
        for name in ("now", "utcnow"):
            stack.enter_context(attribute_of_type(datetime.datetime, name, clock.class_method(name)))
        yield lambda: current.__setitem__(0, next(starts))


class _Clock(threading.local):
    """What time it is for the current thread, since the start whose number ``current`` holds. Asks the real clocks,
    as all of hashbench does."""

    def __init__(self, current: list[int]) -> None:
        self.current, self.start, self.elapsed = current, current[0], 0

    def answers(self) -> Iterator[tuple[Any, Callable[..., Any]]]:
        """Functions of the module ``time`` and stored methods of ``datetime``, with what answers instead."""
        answers: dict[str, Callable[..., Any]] = {
            "clock_gettime": lambda _which: self.wall(),
            "clock_gettime_ns": lambda _which: self.nanoseconds("time"),
            "sleep": self.sleep,
            "asctime": lambda moment=None: time.asctime(time.localtime(self.wall()) if moment is None else moment),
            "strftime": lambda form, moment=None: time.strftime(
                form, time.localtime(self.wall()) if moment is None else moment
            ),
        }
        for name in _COUNTING:
            answers[name] = functools.partial(self.seconds, name)
            answers[f"{name}_ns"] = functools.partial(self.nanoseconds, name)
        for name in ("localtime", "gmtime", "ctime"):
            answers[name] = functools.partial(self.calendar, getattr(time, name))
        _starts()
        yield from ((getattr(time, name), answer) for name, answer in answers.items() if hasattr(time, name))
        for stored in gc.get_referrers(datetime.datetime):  # each access to such a method makes another object
            is_method = isinstance(stored, types.BuiltinMethodType) and stored.__self__ is datetime.datetime
            if is_method and stored.__name__ in ("now", "utcnow"):
                yield stored, functools.partial(getattr(self, stored.__name__), datetime.datetime)

    def advance(self, nanoseconds: int) -> int:
        """Nanoseconds since the start, so many later than last time."""
        if self.start != self.current[0]:
            self.start, self.elapsed = self.current[0], 0
        self.elapsed += nanoseconds
        return self.elapsed

    def nanoseconds(self, name: str) -> int:
        return _starts()[name] + self.advance(STEP)

    def seconds(self, name: str) -> float:
        return self.nanoseconds(name) / 1e9

    def wall(self) -> float:
        return self.seconds("time")

    def calendar(self, show: Callable[[float], Any], seconds: float | None = None) -> Any:
        return show(self.wall() if seconds is None else seconds)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)
        self.advance(int(seconds * 1e9))

    def now(self, cls: type[datetime.datetime], tz: datetime.tzinfo | None = None) -> datetime.datetime:
        return cls.fromtimestamp(self.wall(), tz)

    def utcnow(self, cls: type[datetime.datetime]) -> datetime.datetime:
        return cls.fromtimestamp(self.wall(), datetime.UTC).replace(tzinfo=None)

    def class_method(self, name: str) -> classmethod[Any, Any, Any]:
        """``now`` or ``utcnow`` for the class itself."""
        original, answer = datetime.datetime.__dict__[name], getattr(self, name)

        def ask(cls: type[datetime.datetime], *args: Any, **kwargs: Any) -> Any:
            if _is_spared(sys._getframe(1)):
                return original.__get__(None, cls)(*args, **kwargs)
            return answer(cls, *args, **kwargs)

        return classmethod(ask)


@functools.cache
def _starts() -> dict[str, int]:
    """Where each clock starts: at its time of the first entry in this process, since code may hold a deadline."""
    return {name: getattr(time, f"{name}_ns")() for name in _COUNTING if hasattr(time, f"{name}_ns")}


def _is_spared(frame: FrameType) -> bool:
    name = frame.f_globals.get("__name__")
    return isinstance(name, str) and name.partition(".")[0] in _SPARED


# --------------------------------------------------------------------------------------------------------- entropy


@contextmanager
def constant_entropy() -> Iterator[Callable[[], None]]:
    """Every unseeded source of randomness gives the same stream of values after each entry. Gives a function that
    begins the stream anew, which is quicker than another entry.

    Python's: ``os.urandom``, ``os.getrandom``, ``secrets``, ``uuid1`` and ``uuid4``, ``random.seed()``,
    ``random.Random()``, ``SystemRandom``, ``ssl.RAND_bytes``. NumPy's: ``default_rng()``, ``SeedSequence()``, unseeded
    bit generators, ``RandomState()``, ``numpy.random.seed()``. torch's: ``torch.seed()``, ``Generator.seed()``. Two
    values drawn one after the other still differ. Not reached: ``/dev/urandom`` opened as a file, and C code that asks
    the system itself.
    """
    stream = _Stream()
    # All else that Python and NumPy draw by themselves comes from the first, through ``random.SystemRandom``.
    sources = [os.urandom, getattr(os, "getrandom", None), getattr(sys.modules.get("ssl"), "RAND_bytes", None)]
    with ExitStack() as stack:
        for source in filter(None, sources):
            stack.enter_context(builtin_answering(source, stream.take))
        if getattr(uuid, "_generate_time_safe", None) is not None:
            stack.enter_context(builtin_answering(uuid._generate_time_safe, lambda: (stream.take(16), None)))  # type: ignore[attr-defined]
        stack.enter_context(attribute_of_type(_random.Random, "seed", _seed_python(stream)))
        stack.enter_context(attribute_of_type(torch._C.Generator, "seed", _seed_torch(stream)))
        yield stream.begin


class _Stream:
    """Bytes that never repeat within one stream and are those of any other stream. Safe for threads."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Again from its first byte."""
        self._numbers = itertools.count()

    def take(self, size: int, flags: int = 0) -> bytes:  # noqa: ARG002 – as os.getrandom has it
        return hashlib.shake_256(next(self._numbers).to_bytes(8, "little")).digest(size)

    def integer(self, size: int) -> int:
        return int.from_bytes(self.take(size), "little")


def _seed_python(stream: _Stream) -> Callable[..., None]:
    """Where ``random.Random``, its instances and the module's functions all end up."""
    original: Any = _random.Random.__dict__["seed"]

    def seed(self: random.Random, value: Any = None, /) -> None:
        original(self, stream.integer(32) if value is None else value)

    return seed


def _seed_torch(stream: _Stream) -> Callable[..., int]:
    def seed(self: torch.Generator) -> int:
        self.manual_seed(stream.integer(7))
        return self.initial_seed()

    return seed
