"""Entry points of the native recorder, and its callbacks into Python.

A process loads one library. It records one trace at a time, which answers the callbacks as ``RecorderCallbacks``.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import BuiltinFunctionType, MethodDescriptorType
from typing import Any, Protocol

import psutil
import torch
import xxhash._xxhash

NATIVE_KEY = "Fake"
"""Dispatch key by which the recorder sees calls: the last before backend kernels. Newer torch has it and leaves it
unused."""


def is_free() -> bool:
    """Return True if this torch has the recorder's key, and does not use it."""
    try:
        key = torch._C._parse_dispatch_key(NATIVE_KEY)
    except RuntimeError:
        return False
    return key is not None and not torch._C._dispatch_has_backend_fallback(key)


@functools.cache
def _key() -> Any:
    """Return torch's object for the key (parsing its name takes five times as long); ``None`` if it does not exist."""
    try:
        return torch._C._parse_dispatch_key(NATIVE_KEY)
    except RuntimeError:
        return None


def sees_into_subclasses() -> bool:
    """Return True if the recorder sees calls within an op on a tensor subclass: in torch 2.11 its key lies before that
    of subclasses."""
    key, keys = _key(), torch._C.DispatchKey  # type: Any, Any
    return key is not None and int(key) < int(keys.Python)


def is_recorded() -> bool:
    """Return True if this thread's calls are being recorded."""
    key = _key()
    return key is not None and torch._C._dispatch_tls_is_dispatch_key_included(key)


@contextmanager
def unrecorded() -> Iterator[None]:
    """Suspend recording of this thread's calls. Garbage collection is disabled meanwhile if they would be recorded: ops
    of the program's finalizers are recorded afterwards."""
    if not is_recorded():
        yield
        return
    collects = gc.isenabled()
    gc.disable()
    torch._C._dispatch_tls_set_dispatch_key_included(NATIVE_KEY, False)
    try:
        yield
    finally:
        torch._C._dispatch_tls_set_dispatch_key_included(NATIVE_KEY, True)
        if collects:
            gc.enable()


PYTHON_KEY = "TESTING_ONLY_GenericMode"
"""Dispatch key, unused by torch, by which the recorder forwards a call to Python."""

RECORDS, READS, WRITES, LEAVES, OTHERS, METAS, LANES, CALLS = range(8)
"""Kinds of items of :meth:`Library.bytes_of` and :meth:`Library.texts`; ``CALLS`` (in progress) can only be counted."""

KNOWN = 1
"""Result of ``Library.node`` if the recorder knows a storage's writer, and Python has no further state."""


class CPlan(ctypes.Structure):
    """``Plan`` of ``ops.h``."""

    _fields_ = (
        ("written", ctypes.c_uint64),
        ("statistics", ctypes.c_uint64),
        ("training", ctypes.c_int32),
        ("traced", ctypes.c_uint8),
        ("decomposes", ctypes.c_uint8),
        ("python", ctypes.c_uint8),
        ("fresh", ctypes.c_uint8),
        ("blank", ctypes.c_uint8),
        ("seeded", ctypes.c_uint8),
        ("open", ctypes.c_uint8),
        ("originals", ctypes.c_uint8),
    )


class RecorderCallbacks(Protocol):
    """Callbacks of the recorder into its trace."""

    def name_of_leaf(self, tensor: torch.Tensor, number: int) -> int: ...

    def digest_odd(self, tensor: torch.Tensor, number: int, *, blank: bool) -> int: ...

    def handle(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any: ...


_PLAN = ctypes.PYFUNCTYPE(None, ctypes.c_int32, ctypes.c_char_p, ctypes.c_char_p, ctypes.POINTER(CPlan))
_HAS_DATA = ctypes.PYFUNCTYPE(ctypes.c_int32, ctypes.py_object)
_CLASSIFY = ctypes.PYFUNCTYPE(ctypes.c_int32, ctypes.py_object, ctypes.c_int32)
_ODD = ctypes.PYFUNCTYPE(ctypes.c_uint32, ctypes.py_object, ctypes.c_int32, ctypes.c_int32)
_POINTER, _INT, _I32, _I64, _U64 = ctypes.c_void_p, ctypes.c_int, ctypes.c_int32, ctypes.c_int64, ctypes.c_uint64
_ENTRY_POINTS: tuple[tuple[str, Any, tuple[Any, ...]], ...] = (
    ("register", _INT, ()),
    ("prepare", None, (_POINTER,) * 5),
    ("set_team", None, (_POINTER,) * 4),
    ("end_team", _INT, ()),
    ("let_construct", None, (_POINTER, _POINTER)),
    ("let_through", None, (ctypes.c_char_p, ctypes.c_char_p)),
    ("new", _POINTER, (_INT, _INT, _INT, _U64)),
    ("delete", None, (_POINTER,)),
    ("begin", _INT, (_POINTER,)),
    ("end", _I32, (_POINTER,)),
    ("thread", None, (_INT,)),
    ("lane", _I32, (_POINTER,)),
    ("enter", _POINTER, (_POINTER, _I32)),
    ("leave", None, (_POINTER,)),
    ("forked", None, ()),
    ("thread_mark", _I64, (_POINTER,)),
    ("context", ctypes.POINTER(ctypes.c_uint32), (_POINTER,)),
    ("contexts_from", None, (_POINTER, ctypes.c_uint32)),
    ("know_modules", None, (_POINTER, _POINTER, _I32, _I32)),
    ("forget_modules", None, (_POINTER,)),
    ("leave_modules", _INT, (_POINTER,)),
    ("place", _I32, (_POINTER,)),
    ("module_functions", _POINTER, ()),
    ("backward_in_python", None, (_POINTER, _INT)),
    ("name", None, (_POINTER, _POINTER, _I32, _I32)),
    ("node", _INT, (_POINTER, _POINTER, ctypes.POINTER(_I32))),
    ("set_node", None, (_POINTER, _POINTER, _I32, _INT)),
    ("take_record", _I32, (_POINTER,)),
    ("take_leaf", _I32, (_POINTER, _POINTER, _I32, _INT)),
    ("know_kernel", _I32, (_POINTER, _I32, _U64, _U64, _INT)),
    ("kernel", _POINTER, (_POINTER, _I32, _POINTER)),
    ("kernel_ended", None, (_POINTER, _INT)),
    ("allocated", _INT, (_POINTER, _I32, _I64)),
    ("origin", _POINTER, (_POINTER,)),
    ("name_of", _I32, (_POINTER, _POINTER)),
    ("open", _I64, ()),
    ("close", None, (_POINTER, _I64, _I32)),
    ("dtype", ctypes.c_char_p, (_INT,)),
    ("count", _I64, (_POINTER, _INT)),
    ("copy", None, (_POINTER, _INT, _I64, _POINTER)),
    ("text", _POINTER, (_POINTER, _INT, _I64, ctypes.POINTER(_I64))),
)


class Library:
    """The loaded library. Every entry point ``hb_<name>`` of ``recorder.cpp`` is an attribute ``<name>``, which holds
    the
    GIL: none blocks.

    Attributes:
        describe: return the plan of an op by its schema's names, called once per op.
        has_data: return whether a tensor of a subclass has data, or is a placeholder.
        listener: the active trace.
    """

    def __init__(
        self, path: Path, describe: Callable[[int, str, str], CPlan], has_data: Callable[[torch.Tensor], bool]
    ) -> None:
        self.listener: RecorderCallbacks | None = None
        self.errors: list[BaseException] = []
        self._describe, self._holds_data = describe, has_data
        self._library = ctypes.PyDLL(str(path))
        for name, result, arguments in _ENTRY_POINTS:
            function = getattr(self._library, f"hb_{name}")
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)
        self._kept = (
            _PLAN(self._plan),
            _CLASSIFY(self._classify),
            _HAS_DATA(self._has_data),
            _ODD(self._odd),
        )  # ctypes keeps no reference
        if not self.register():
            raise OSError(f"torch uses the dispatch key {NATIVE_KEY}")
        self.prepare(*(ctypes.cast(function, _POINTER) for function in (xxh3(), *self._kept)))
        self.set_team(*_openmp())
        self.let_construct(*_constructors())
        self.enter_module, self.enter_module_by_hook, self.leave_module = _functions(self.module_functions(), 3)
        self.make: Callable[[], Any] = torch.ops.hashbench.make.default._op
        self._hashes_alone_in_child = False
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(before=self._forks, after_in_child=self._forked)
        self._fallback = torch.library.Library("_", "IMPL")
        self._fallback.fallback(self._handle, PYTHON_KEY)
        for name, overload in _decomposing():
            self.let_through(name.encode(), overload.encode())
        _let_higher_order_ops_through()

    def __getattr__(self, name: str) -> Any:  # declares the entry points to mypy
        raise AttributeError(name)

    def bytes_of(self, recorder: int, what: int, size: int, *, first: int = 0) -> bytes:
        """Return the raw items ``what`` from number ``first`` on, each of ``size`` bytes."""
        count = self.count(recorder, what)
        buffer = ctypes.create_string_buffer(max(1, count * size))
        self.copy(recorder, what, count, buffer)
        return ctypes.string_at(ctypes.addressof(buffer) + first * size, (count - first) * size)

    def texts(self, recorder: int, what: int, *, first: int = 0) -> list[bytes]:
        """Return the interned byte strings ``what``, by number, from number ``first`` on."""
        size = ctypes.c_int64()
        found = []
        for number in range(first, self.count(recorder, what)):
            address = self.text(recorder, what, number, ctypes.byref(size))
            found.append(ctypes.string_at(address, size.value))
        return found

    @functools.cached_property
    def dtypes(self) -> dict[int, torch.dtype]:
        """Torch's dtypes by their C++ number."""
        names = ((number, self.dtype(number)) for number in range(64))
        found = ((number, getattr(torch, name.decode(), None)) for number, name in names if name)
        return {number: dtype for number, dtype in found if isinstance(dtype, torch.dtype)}

    # ---------------------------------------------------------------------------------------- what the recorder asks

    def _forks(self) -> None:
        """End OpenMP's threads that a digest started before a fork: a child would wait for them for ever. If others may
        belong to torch, the child's digests use no threads."""
        self._hashes_alone_in_child = not self.end_team() and psutil.Process().num_threads() > 1

    def _forked(self) -> None:
        """Drop the active trace in a forked child."""
        self.forked()
        self.listener = None
        if self._hashes_alone_in_child:
            self.set_team(*_NO_TEAM)

    def _plan(self, number: int, name: bytes, overload: bytes, out: Any) -> None:
        try:
            out[0] = self._describe(number, name.decode(), overload.decode())
        except BaseException as error:  # ctypes would print and ignore it
            self.errors.append(error)
            out[0] = CPlan(python=1, traced=1)

    def _classify(self, tensor: torch.Tensor, number: int) -> int:
        try:
            return -1 if self.listener is None else self.listener.name_of_leaf(tensor, number)
        except BaseException as error:  # Ctrl-C
            self.errors.append(error)
            return -1

    def _has_data(self, tensor: torch.Tensor) -> int:
        try:
            return int(self._holds_data(tensor))
        except BaseException as error:
            self.errors.append(error)
            return 0

    def _odd(self, tensor: torch.Tensor, number: int, blank: int) -> int:
        try:
            assert self.listener is not None
            return self.listener.digest_odd(tensor, number, blank=bool(blank))
        except BaseException as error:
            self.errors.append(error)
            return 0

    def _handle(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        if self.listener is not None:
            return self.listener.handle(func, args, kwargs)
        return self.make()  # the trace has ended in between


class _PyMethodDef(ctypes.Structure):
    """``PyMethodDef`` of Python's C API."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("method", _POINTER),
        ("flags", _INT),
        ("doc", ctypes.c_char_p),
    )


def _functions(address: int, count: int) -> list[Any]:
    """Build Python functions from consecutive ``MethodDef``s of the recorder: the cheapest kind to call."""
    make = ctypes.pythonapi.PyCFunction_NewEx
    make.restype, make.argtypes = ctypes.py_object, (_POINTER, _POINTER, _POINTER)
    return [make(address + i * ctypes.sizeof(_PyMethodDef), None, None) for i in range(count)]


def _constructors() -> list[int]:
    """Return the addresses of CPython's method entries by which torch makes a tensor of a subclass.

    They are patched in place, not replaced: each change of ``torch.Tensor`` invalidates Python's inline caches of every
    line that uses a tensor, and newer Pythons stop caching a class that has changed often.

    Raises:
        OSError: they are not where expected.
    """
    head, pointer = object.__basicsize__, ctypes.sizeof(_POINTER)
    of_class = vars(torch._C.TensorBase)
    places = (
        ("_make_subclass", getattr(of_class.get("_make_subclass"), "__func__", None), BuiltinFunctionType, head),
        ("as_subclass", of_class.get("as_subclass"), MethodDescriptorType, head + 3 * pointer),
    )
    found = []
    for name, method, kind, offset in places:
        address = _POINTER.from_address(id(method) + offset).value if type(method) is kind else None
        keywords = 3  # METH_VARARGS | METH_KEYWORDS
        if (
            address is None
            or (made := _PyMethodDef.from_address(address)).name != name.encode()
            or made.flags & 15 != keywords
        ):
            raise OSError(f"torch.Tensor.{name} is not the method that is known")
        found.append(address)
    return found


_NO_TEAM = (None,) * 4


def _openmp() -> tuple[Any, ...]:
    """Return the functions that ``set_team`` needs to use torch's own OpenMP threads, from the library that torch's
    kernels call; ``()`` if torch was built without OpenMP, or its library has no such entry point."""
    kernels = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        library = ctypes.CDLL(str(kernels))
        found = [getattr(library, name) for name in _OPENMP]
    except (OSError, AttributeError):
        return _NO_TEAM
    return tuple(ctypes.cast(function, _POINTER) for function in found)


_OPENMP = (
    "GOMP_parallel",
    "omp_get_thread_num",
    "omp_get_num_threads",
    "omp_pause_resource_all",
)


def xxh3() -> Any:
    """Return the XXH3 function of the ``xxhash`` wheel, vectorized for this processor if the wheel dispatches at run
    time (on x86; twice as fast with AVX-512). Digests do not depend on it."""
    functions = ctypes.CDLL(xxhash._xxhash.__file__)
    function = getattr(functions, "XXH3_64bits_dispatch", functions.XXH3_64bits)
    function.restype, function.argtypes = _U64, (_POINTER, ctypes.c_size_t)
    return function


_BACKENDS = ("CPU", "CUDA", "HIP", "XPU", "MPS", "MTIA", "HPU", "XLA", "PrivateUse1")
"""Dispatch keys of dense tensors on each device."""


def _decomposing() -> Iterator[tuple[str, str]]:
    """Yield the ops that always decompose into others, on every device: name with namespace, and overload."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    for full in torch._C._dispatch_get_all_op_names():
        if not has_kernel(full, "CompositeImplicitAutograd") or has_kernel(full, NATIVE_KEY):
            continue
        if not any(has_kernel(full, backend) for backend in _BACKENDS):
            name, _, overload = full.partition(".")
            yield name, overload


def _let_higher_order_ops_through() -> None:
    """Register a fallthrough for higher-order operators, which look for a kernel of every active key themselves."""
    key = torch._C._parse_dispatch_key(NATIVE_KEY)
    assert key is not None
    torch._ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS.append(key)
    for operator in torch._ops._higher_order_ops.values():
        operator.fallthrough(key)


@functools.cache
def decomposes(name: str, overload: str) -> bool:
    """Return True if an op always decomposes into others when its backend has no kernel for it."""
    full = f"{name}.{overload}" if overload else name
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(full, "CompositeImplicitAutograd"))
