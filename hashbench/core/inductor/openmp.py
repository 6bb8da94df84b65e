"""Let OpenMP regions of a loaded library run on one thread, whatever number they ask for.

``torch.set_num_threads`` does not reach ``#pragma omp parallel num_threads(2)`` of a generated kernel, and compiles
models anew. OpenMP's own limit of nested active regions does: with none allowed, each region has one thread.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import ModuleType
from typing import Any

_GET, _SET = "omp_get_max_active_levels", "omp_set_max_active_levels"
"""Functions of the OpenMP standard, version 3.0."""


def library_of(function: Any) -> str:
    """Return the file of the extension module that a built-in function belongs to; empty for any other function."""
    module = getattr(function, "__self__", None)
    return getattr(module, "__file__", None) or "" if isinstance(module, ModuleType) else ""


def one_thread_in(path: str) -> AbstractContextManager[None]:
    """Return a context in which OpenMP regions of a loaded library that this thread enters have one thread.

    The limit of nested regions is restored afterwards.

    Args:
        path: file of the library.

    Raises:
        LookupError: neither the library nor the process has an OpenMP runtime.
    """
    runtimes = _runtimes(path)
    if not runtimes:
        raise LookupError("no OpenMP runtime is loaded whose threads could be limited")
    return _limited(runtimes)


@contextmanager
def _limited(runtimes: list[ctypes.CDLL]) -> Iterator[None]:
    with ExitStack() as stack:
        for runtime in runtimes:
            put = getattr(runtime, _SET)
            stack.callback(put, getattr(runtime, _GET)())
            put(0)
        yield


def _runtimes(path: str) -> list[ctypes.CDLL]:
    """Return libraries through which each OpenMP runtime that the kernel may call is found, once: that of the library's
    own dependencies, and the first that the process loaded, which takes precedence when symbols are bound."""
    found: dict[int, ctypes.CDLL] = {}
    for name in dict.fromkeys((path or None, None)):
        try:
            library = ctypes.CDLL(name)
            address = ctypes.cast(getattr(library, _SET), ctypes.c_void_p).value
            getattr(library, _GET)
        except (OSError, AttributeError):
            continue
        found.setdefault(address or 0, library)
    return list(found.values())
