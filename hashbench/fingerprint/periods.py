"""Map one period of numbers over and over, so that inputs of any size take the memory of one period, written once."""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import weakref
from typing import Any

import numpy as np

_FIRST, _AHEAD = 8, 2**30
"""Periods that are mapped at first, and bytes up to which twice what is needed is, for larger calls that may come. None
of it takes memory."""


class Periods:
    """Repetitions of one period of numbers, mapped as needed.

    Args:
        period: flat; its bytes fill whole pages.

    Raises:
        OSError: this system cannot map the same memory several times; check :func:`can_repeat` first.
    """

    def __init__(self, period: np.ndarray[Any, Any]) -> None:
        self._period = period
        self._file = os.memfd_create("hashbench numbers")
        weakref.finalize(self, os.close, self._file)  # what is mapped stays where it is until nobody has it
        os.truncate(self._file, period.nbytes)
        self._mapped = self._map(_FIRST * period.nbytes)
        self._mapped[: period.nbytes] = period.view(np.uint8)

    def room(self, size: int, *, begin: int) -> np.ndarray[Any, Any]:
        """Return ``size`` bytes from number ``begin`` of a period."""
        first = begin * self._period.itemsize
        if first + size > len(self._mapped):
            self._mapped = self._map(max(first + size, min(2 * (first + size), _AHEAD)))
        return self._mapped[first : first + size]

    def is_intact(self) -> bool:
        """Return whether the numbers are unchanged: a kernel may have written there."""
        return np.array_equal(self._mapped[: self._period.nbytes], self._period.view(np.uint8))

    def _map(self, size: int) -> np.ndarray[Any, Any]:
        """Map the file repeatedly over at least ``size`` bytes."""
        length = self._period.nbytes
        size = -(-size // length) * length
        place = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        numbers = np.frombuffer(place, np.uint8)  # which keeps the place, and with it all that is mapped there
        for begin in range(0, size, length):
            _map_over(numbers.ctypes.data + begin, length, self._file)
        return numbers


def can_repeat(page: int = mmap.PAGESIZE, *, numbers: int) -> bool:
    """Return whether memory can be mapped several times here (by trying), and so many numbers fill whole pages."""
    if not hasattr(os, "memfd_create") or numbers % page:
        return False
    try:
        Periods(np.zeros(page, np.uint8))
    except OSError:  # a sandbox need not allow it
        return False
    return True


def _map_over(address: int, length: int, file: int) -> None:
    """Map a file at an address, replacing the mapping there.

    Raises:
        OSError: the system refuses.
    """
    protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED
    if _mmap()(address, length, protection, flags, file, 0) != address:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


_MAP_FIXED = 0x10
"""Flag of ``mmap`` on Linux, on every processor except Alpha, HP PA and Xtensa. Python does not define it."""


@functools.cache
def _mmap() -> Any:
    function = ctypes.CDLL(None, use_errno=True).mmap
    function.restype = ctypes.c_void_p
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64)
    return function
