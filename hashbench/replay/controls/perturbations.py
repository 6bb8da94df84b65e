"""Perturbations that must not matter to a run, each provoked on purpose: the same computation, other surroundings.

Variation 0 of a perturbation leaves the run alone, each other number provokes it in its own way; all put back what they
changed.
"""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import MappingProxyType

import torch

from hashbench.catalog import Perturbation
from hashbench.replay.controls.load import second_stream, uneven_load
from hashbench.replay.controls.memory import POISONS, poisoned_memory, reserve_for_a_run
from hashbench.replay.controls.stalls import stalled_threads
from hashbench.run.addresses import scattered_addresses
from hashbench.run.settings import applied

ALIGNMENT = 16
"""Bytes: what ``malloc`` aligns to. Memory of torch's own begins at a multiple of 64 all the same."""

FEWEST_THREADS = 4
"""Threads of an oversubscribed run at least. Eight take small kernels on two cores twice as long."""


def oversubscribed() -> int:
    """The threads of a kernel on the CPU under the perturbation ``threads``: twice as many as there are cores, and no
    fewer than now."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(FEWEST_THREADS, 2 * cores, torch.get_num_threads())


@contextmanager
def provoked(names: Sequence[str], variation: int, *, device: torch.device) -> Iterator[None]:
    """The perturbations of these ``names`` in one of their variations. ``threads`` holds in every one, since runs with
    other numbers of threads may compute another sum."""
    with ExitStack() as stack:
        for name, change in _CHANGES.items():  # memory is filled last: whatever is allocated before would be filled too
            if name in names and (variation or name == Perturbation.THREADS):
                stack.enter_context(change(variation, device))
        yield


# ---------------------------------------------------------------------------------------------------- one by one


def _threads(_variation: int, _device: torch.device) -> AbstractContextManager[None]:
    return applied({"num_threads": str(oversubscribed())})


@contextmanager
def _collector(variation: int, _device: torch.device) -> Iterator[None]:
    """Garbage in cycles is collected after every ten new objects, or not at all."""
    enabled, thresholds = gc.isenabled(), gc.get_threshold()
    try:
        if variation % 2:
            gc.enable()
            gc.set_threshold(10, *thresholds[1:])
        else:
            gc.disable()
        yield
    finally:
        gc.set_threshold(*thresholds)
        (gc.enable if enabled else gc.disable)()


@contextmanager
def no_collector() -> Iterator[None]:
    """Garbage in cycles stays: the collector is off, and nobody turns it on or has it run."""
    enabled = gc.isenabled()
    replaced = {name: getattr(gc, name) for name in ("enable", "collect", "set_threshold")}
    gc.disable()
    try:
        for name in replaced:
            setattr(gc, name, lambda *_, **__: 0)
        yield
    finally:
        for name, function in replaced.items():
            setattr(gc, name, function)
        (gc.enable if enabled else gc.disable)()


@contextmanager
def _address(variation: int, _device: torch.device) -> Iterator[None]:
    """What ``malloc`` returns lies at other addresses, 16 bytes further in each variation but for multiples of 64, as
    far as the C library takes it from the end of its heap; new Python objects lie in random order."""
    with ExitStack() as stack:
        scattered = scattered_addresses()  # first: its lists leave holes
        if (library := _heap()) is not None:
            for block in (*_holes(library), *_padding(library, ALIGNMENT * variation)):
                stack.callback(library.free, block)
        yield
        del scattered


def _memory(variation: int, device: torch.device) -> AbstractContextManager[None]:
    """Only ``malloc`` fills on the CPU: with a dispatch mode, torch would run other ops."""
    accelerator = None if device.type == "cpu" else device
    return poisoned_memory(
        POISONS[variation % 2],
        through_mode=False,
        device=accelerator,
        reserve=reserve_for_a_run(device),
    )


@contextmanager
def _load(variation: int, device: torch.device) -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(uneven_load(variation))  # first: its own threads are not stopped
        stack.enter_context(stalled_threads(variation))
        if device.type in ("cuda", "xpu"):
            stack.enter_context(second_stream(device, _BUSY_STREAM_SECONDS))
        yield


_BUSY_STREAM_SECONDS = 0.5

_CHANGES: Mapping[str, Callable[[int, torch.device], AbstractContextManager[None]]] = MappingProxyType(
    {
        Perturbation.THREADS: _threads,
        Perturbation.COLLECTOR: _collector,
        Perturbation.ADDRESS: _address,
        Perturbation.MEMORY: _memory,
        Perturbation.LOAD: _load,
    }
)
"""Those of a run; a fresh process is no context."""

WITHIN_A_RUN: tuple[str, ...] = tuple(_CHANGES)

# ------------------------------------------------------------------------------------------------ the heap of malloc

_LARGEST, _SMALLEST, _MOST_BLOCKS = 2**24, 2**10, 4000
_CHUNK, _HEADER = 2**12, 8


class _Statistics(ctypes.Structure):
    """``struct mallinfo2`` of glibc."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def _heap() -> ctypes.CDLL | None:
    """The C library where it can say what of its heap is free (glibc 2.33 or newer)."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallinfo2"):
        return None
    library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    library.free.restype, library.free.argtypes = None, [ctypes.c_void_p]
    library.mallinfo2.restype = _Statistics
    return library


def _padding(library: ctypes.CDLL, wanted: int) -> list[int]:
    """Blocks at the end of the heap behind which the next one begins at ``wanted``, but for multiples of 64 bytes."""
    probe = library.malloc(_CHUNK - _HEADER)  # the next block begins as far behind it as it takes with its header
    further = _CHUNK + (wanted - probe - _CHUNK) % 64
    return [probe, library.malloc(further - _HEADER)]


def _holes(library: ctypes.CDLL) -> list[int]:
    """Blocks that take what is free between others, so that the next ones come from the end of the heap."""
    held: list[int] = []
    size = _LARGEST
    while size >= _SMALLEST and len(held) < _MOST_BLOCKS:
        before = library.mallinfo2()
        block = library.malloc(size)
        after = library.mallinfo2()
        if (before.keepcost, before.hblks, before.arena) == (after.keepcost, after.hblks, after.arena):
            held.append(block)
        else:  # from the end of the heap, or from the system
            library.free(block)
            size //= 2
    return held
