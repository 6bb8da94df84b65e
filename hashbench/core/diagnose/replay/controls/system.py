"""Make what a program reads from the system reproducible: clocks that advance per call, a fixed entropy stream, and
thread pools that run their tasks one by one.

Patching the module ``time`` would miss ``from time import perf_counter``, default arguments and ``self.now =
time.time``. So the function object itself is changed: of a Python function its code; of a builtin, in its
``PyCFunctionObject``, the C function and the object it is bound to.
"""

from __future__ import annotations

import _random
import ctypes
import datetime
import functools
import gc
import hashlib
import itertools
import math
import os
import random
import sys
import threading
import time
import types
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from ctypes import c_void_p, py_object
from multiprocessing.pool import Pool, ThreadPool
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch

# -------------------------------------------------------------------------------- functions that answer differently

_Function = Callable[..., Any]

_VARARGS_AND_KEYWORDS = 0x1 | 0x2  # Include/methodobject.h
_FIELDS = c_void_p * 5
"""The last fields of a ``PyCFunctionObject``: method definition, self, module, weak references, vectorcall."""

_new_builtin = ctypes.PYFUNCTYPE(py_object, c_void_p, py_object, py_object, c_void_p)(
    ("PyCMethod_New", ctypes.pythonapi)
)


class _MethodDef(ctypes.Structure):
    _fields_ = (("name", c_void_p), ("function", c_void_p), ("flags", ctypes.c_int), ("doc", c_void_p))


class _PatchedSelf(types.ModuleType):
    """Temporary ``self`` of a patched builtin. A module: ``pickle`` and ``repr`` take anything else for a method."""

    def __init__(
        self, original: Callable[..., Any], answer: Callable[..., Any], is_spared: Callable[[FrameType], bool] | None
    ) -> None:
        super().__init__(original.__name__)
        self.original, self.answer, self.is_spared = original, answer, is_spared

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_spared is not None and self.is_spared(sys._getframe(1)):
            return self.original(*args, **kwargs)
        return self.answer(*args, **kwargs)


@contextmanager
def builtin_answering(
    builtin: Any, answer: Callable[..., Any], *, is_spared: Callable[[FrameType], bool] | None = None
) -> Iterator[None]:
    """Make calls of ``builtin`` (a C function or bound C method) return the result of ``answer``.

    Callers whose frame ``is_spared`` get the original.
    """
    offset = types.BuiltinFunctionType.__basicsize__ - ctypes.sizeof(_FIELDS)
    fields = _FIELDS.from_address(id(builtin) + offset)
    definition, bound_to, vectorcall = fields[0] or 0, fields[1], fields[4]
    known = _MethodDef.from_address(definition)
    original = _new_builtin(definition, builtin.__self__, builtin.__module__, None)
    bound = _PatchedSelf(original, answer, is_spared)
    # Called as function(bound, args, kwargs): that is the signature of PyObject_Call.
    call = ctypes.cast(ctypes.pythonapi.PyObject_Call, c_void_p).value
    asking = _MethodDef(known.name, call, _VARARGS_AND_KEYWORDS, known.doc)
    ctypes.pythonapi.Py_IncRef(py_object(bound))  # the garbage collector counts what a builtin is bound to
    # In one step, while this thread holds the interpreter lock: another one may be about to call it.
    fields[:] = [ctypes.addressof(asking), id(bound), fields[2], fields[3], None]
    try:
        yield
    finally:
        fields[:] = [definition, bound_to, fields[2], fields[3], vectorcall]
        ctypes.pythonapi.Py_DecRef(py_object(bound))


def _is_builtin(value: object) -> bool:
    """Return whether ``value`` is a C function; a model may have replaced it by a Python one."""
    return isinstance(value, types.BuiltinFunctionType)


@contextmanager
def function_answering(function: types.FunctionType, answer: Callable[..., Any]) -> Iterator[None]:
    """Make calls of a Python ``function`` without a closure return ``answer(original, …)`` of its arguments.

    ``original`` behaves like the unpatched function.
    """
    code, defaults, keyword_defaults = function.__code__, function.__defaults__, function.__kwdefaults__
    original = types.FunctionType(code, function.__globals__, function.__name__, defaults)
    original.__kwdefaults__ = keyword_defaults
    function.__kwdefaults__ = {"_answer": functools.partial(answer, original)}
    function.__code__ = _ask.__code__
    try:
        yield
    finally:
        function.__code__ = code
        function.__kwdefaults__ = keyword_defaults


def _ask(*args: Any, _answer: Callable[..., Any], **kwargs: Any) -> Any:
    return _answer(*args, **kwargs)


@contextmanager
def attribute_of_type(owner: type, name: str, value: object) -> Iterator[None]:
    """Set a class attribute, also of a class written in C, which refuses ``setattr``; seen by every reference."""
    (attributes,) = gc.get_referents(owner.__dict__)  # the dict, of which ``__dict__`` is only a view
    before = attributes[name]
    try:
        _set(owner, attributes, name, value)
        yield
    finally:
        _set(owner, attributes, name, before)


def _set(owner: type, attributes: dict[str, Any], name: str, value: object) -> None:
    attributes[name] = value
    ctypes.pythonapi.PyType_Modified(py_object(owner))  # the interpreter caches what it found on a class


# ---------------------------------------------------------------------------------------------------------- clocks

STEP = 1_000_000
"""Nanoseconds per call: 1 ms, so that a loop that waits for a second ends after 1000 calls."""

_COUNTING = ("time", "monotonic", "perf_counter", "process_time", "thread_time")
_TIME_WRAPPERS = frozenset({"datetime", "_pydatetime", "email", "logging", "timeit", "uuid"})
"""Standard library modules that read the time on behalf of their callers."""

_REAL_TIME_PACKAGES = (frozenset(sys.stdlib_module_names) | {"torch", "numpy", "hashbench"}) - _TIME_WRAPPERS
"""Packages that see real time: they wait for threads, processes and sockets."""


@contextmanager
def ticking_clocks(from_times: Mapping[str, int] | None = None) -> Iterator[Callable[[], None]]:
    """Replace all clocks that Python code can read: each starts at a fixed time on entry and advances by 1 ms per call.

    Args:
        from_times: nanoseconds at which clocks start, as of :func:`clock_starts`, in another process perhaps; default:
            those of the first entry in this process.

    Yields a function that restarts them, faster than another entry. ``time.sleep`` sleeps and advances the clocks by as
    much. Each thread counts on its own. The standard library, torch, NumPy and hashbench see real time. Not covered:
    clocks read by compiled code, such as ``numpy.datetime64("now")``, and file times.
    """
    starts = itertools.count(1)
    current = [0]
    clock = _Clock(current, clock_starts() if from_times is None else from_times)
    with ExitStack() as stack:
        for builtin, answer in clock.answers():
            if _is_builtin(builtin):
                stack.enter_context(builtin_answering(builtin, answer, is_spared=sees_real_time))
        for name in ("now", "utcnow"):
            stack.enter_context(attribute_of_type(datetime.datetime, name, clock.class_method(name)))
        yield lambda: current.__setitem__(0, next(starts))


class _Clock(threading.local):
    """Fake time of the current thread since restart ``current``. Reads the real clocks as all of hashbench."""

    def __init__(self, current: list[int], starts: Mapping[str, int]) -> None:
        self.current, self.start, self.elapsed, self._starts = current, current[0], 0, starts

    def answers(self) -> Iterator[tuple[Any, Callable[..., Any]]]:
        """Yield functions of ``time`` and stored methods of ``datetime`` with their replacements."""
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
        yield from ((getattr(time, name), answer) for name, answer in answers.items() if hasattr(time, name))
        for stored in gc.get_referrers(datetime.datetime):  # each access to such a method makes another object
            is_method = isinstance(stored, types.BuiltinMethodType) and stored.__self__ is datetime.datetime
            if is_method and stored.__name__ in ("now", "utcnow"):
                yield stored, functools.partial(getattr(self, stored.__name__), datetime.datetime)

    def advance(self, nanoseconds: int) -> int:
        """Advance by ``nanoseconds`` and return the nanoseconds since the start."""
        if self.start != self.current[0]:
            self.start, self.elapsed = self.current[0], 0
        self.elapsed += nanoseconds
        return self.elapsed

    def nanoseconds(self, name: str) -> int:
        return self._starts[name] + self.advance(STEP)

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
        """Return the replacement of ``now`` or ``utcnow`` on the class."""
        original, answer = datetime.datetime.__dict__[name], getattr(self, name)

        def ask(cls: type[datetime.datetime], *args: Any, **kwargs: Any) -> Any:
            if sees_real_time(sys._getframe(1)):
                return original.__get__(None, cls)(*args, **kwargs)
            return answer(cls, *args, **kwargs)

        return classmethod(ask)


@functools.cache
def clock_starts() -> dict[str, int]:
    """Return the start of each clock: its time at the first entry in this process, since code may hold a deadline."""
    return {name: getattr(time, f"{name}_ns")() for name in _COUNTING if hasattr(time, f"{name}_ns")}


def sees_real_time(frame: FrameType) -> bool:
    """Return True if code of this frame waits for threads, processes and sockets, and needs real clocks."""
    name = frame.f_globals.get("__name__")
    return isinstance(name, str) and name.partition(".")[0] in _REAL_TIME_PACKAGES


# --------------------------------------------------------------------------------------------------------- entropy


@contextmanager
def constant_entropy() -> Iterator[Callable[[], None]]:
    """Make every unseeded source of randomness return the same stream of values after each entry.

    Yields a function that restarts the stream, faster than another entry. Covered in Python: ``os.urandom``,
    ``os.getrandom``, ``secrets``, ``uuid1`` and ``uuid4``, ``random.seed()``, ``random.Random()``, ``SystemRandom``,
    ``ssl.RAND_bytes``. NumPy: ``default_rng()``, ``SeedSequence()``, unseeded bit generators, ``RandomState()``,
    ``numpy.random.seed()``. torch: ``torch.seed()``, ``Generator.seed()``. Successive values still differ. Not covered:
    ``/dev/urandom`` opened as a file, and C code that asks the system itself.
    """
    stream = _Stream()
    # All else that Python and NumPy draw by themselves comes from the first, through ``random.SystemRandom``.
    sources = [os.urandom, getattr(os, "getrandom", None), getattr(sys.modules.get("ssl"), "RAND_bytes", None)]
    with ExitStack() as stack:
        for source in filter(_is_builtin, sources):
            stack.enter_context(builtin_answering(source, stream.take))
        if _is_builtin(getattr(uuid, "_generate_time_safe", None)):
            stack.enter_context(builtin_answering(uuid._generate_time_safe, lambda: (stream.take(16), None)))  # type: ignore[attr-defined]
        stack.enter_context(attribute_of_type(_random.Random, "seed", _seed_python(stream)))
        stack.enter_context(attribute_of_type(torch._C.Generator, "seed", _seed_torch(stream)))
        yield stream.begin


class _Stream:
    """A stream of bytes without repetition, identical for every instance. Thread-safe."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Restart the stream."""
        self._numbers = itertools.count()

    def take(self, size: int, flags: int = 0) -> bytes:  # noqa: ARG002 – as os.getrandom has it
        return hashlib.shake_256(next(self._numbers).to_bytes(8, "little")).digest(size)

    def integer(self, size: int) -> int:
        return int.from_bytes(self.take(size), "little")


def _seed_python(stream: _Stream) -> Callable[..., None]:
    """Return the replacement of ``_random.Random.seed``, on which all seeding of ``random`` is built."""
    original: Any = _random.Random.__dict__["seed"]

    def seed(self: random.Random, value: Any = None, /) -> None:
        original(self, stream.integer(32) if value is None else value)

    return seed


def _seed_torch(stream: _Stream) -> Callable[..., int]:
    def seed(self: torch.Generator) -> int:
        self.manual_seed(stream.integer(7))
        return self.initial_seed()

    return seed


# ---------------------------------------------------------------------------------------------------- thread pools

PATIENCE = 5.0
THREAD_PATIENCE = 1.0
"""Seconds until a task (above) or thread is assumed to wait for another one, and runs concurrently."""


@contextmanager
def single_worker_pools() -> Iterator[None]:
    """Limit thread pools to one worker that finishes each task before the next is submitted.

    Applies to ``ThreadPoolExecutor`` and ``multiprocessing.pool.ThreadPool``, existing or new; ``ProcessPoolExecutor``
    and process pools also submit tasks one by one. ``as_completed`` and ``wait`` return futures in a fixed order, not
    that of their addresses. A pool whose task does not finish within 5 seconds gets its workers back: tasks that wait
    for each other would deadlock. Tasks still run in the pool's own threads, since torch keeps gradient mode, autocast
    and dispatch modes per thread. A thread started by the program itself finishes before ``start`` returns; once one
    runs for over a second (as one that waits for the program), it and all later ones run concurrently.
    """
    executors, pools = _Executors(), _Pools()
    answers: dict[Any, _Function] = {
        threading.Thread.start: _Threads().start,
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
    """A future that hashes by number instead of address."""

    number: int

    @classmethod
    def become(cls, future: Any, number: int) -> None:
        future.__class__, future.number = cls, number

    def __hash__(self) -> int:
        return self.number


class _Executors:
    """Submits the tasks of ``concurrent.futures`` one by one."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._widths: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._released: WeakSet[Any] = WeakSet()

    def submit(self, original: _Function, pool: Any, /, *args: Any, **kwargs: Any) -> Any:
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


class _Threads:
    """Runs the program's own threads one after another, in start order."""

    def __init__(self) -> None:
        self._released = False

    def start(self, original: _Function, thread: threading.Thread, /) -> None:
        spared = sees_real_time(_calling_frame())  # whoever called start, such as a pool
        original(thread)
        if not spared and not self._released:
            thread.join(THREAD_PATIENCE)
            self._released = thread.is_alive()


def _calling_frame() -> FrameType:
    """Return the frame that called a patched function, possibly through several controls."""
    frame = sys._getframe(1)
    while frame.f_back is not None and (frame.f_code is _ask.__code__ or _is_control(frame)):
        frame = frame.f_back
    return frame


def _is_control(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).startswith(__package__ or "")


class _Pools:
    """Redirects the tasks of each ``ThreadPool`` to a pool with one worker; waits for each task of other pools."""

    def __init__(self) -> None:
        self._stand_ins: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()

    def begin(self, original: _Function, pool: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Replace any method that submits tasks; they are finished when it returns."""
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

    def imap(self, original: _Function, pool: Any, /, *args: Any, **kwargs: Any) -> Any:
        if isinstance(pool, ThreadPool):
            return self.begin(original, pool, *args, **kwargs)
        return original(pool, *args, **kwargs)

    def imap_unordered(self, original: _Function, pool: Any, /, *args: Any, **kwargs: Any) -> Any:
        if isinstance(pool, ThreadPool):
            return self.begin(original, pool, *args, **kwargs)
        return pool.imap(*args, **kwargs)

    def join(self, original: _Function, pool: Any, /) -> None:
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
    """Return whether a pool finishes all its tasks within so many seconds."""
    deadline = time.monotonic() + within
    while pool._cache:
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.0002)
    return True
