"""Apply perturbations: runtime conditions that must not change what a run computes.

Variation 0 leaves the run alone; every other number perturbs it in its own way. All restore what they changed.
"""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from types import MappingProxyType

import torch

from hashbench.core.catalog import Perturbation
from hashbench.core.diagnose.replay.controls.load import second_stream, uneven_load
from hashbench.core.diagnose.replay.controls.memory import POISONS, poisoned_memory, reserve_for_a_run
from hashbench.core.diagnose.replay.controls.stalls import stalled_threads
from hashbench.core.run.addresses import scattered_addresses
from hashbench.core.run.settings import applied

ALIGNMENT = 16
"""Bytes. Alignment of ``malloc``; torch's own memory is aligned to 64 regardless."""

FEWEST_THREADS = 4
"""Minimum threads of an oversubscribed run. Eight double the time of small kernels on two cores."""


def oversubscribed() -> int:
    """Return the thread count of the perturbation ``threads``: twice the number of cores, and at least the current
    count."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(FEWEST_THREADS, 2 * cores, torch.get_num_threads())


@contextmanager
def provoked(names: Sequence[str], variation: int, *, device: torch.device) -> Iterator[None]:
    """Apply the named perturbations in one variation."""
    with ExitStack() as stack:
        for name, condition in CONDITIONS.items():
            if name in names and (variation or condition.always):
                stack.enter_context(condition.change(variation, device))
        yield


# ---------------------------------------------------------------------------------------------------- one by one


def _threads(_variation: int, _device: torch.device) -> AbstractContextManager[None]:
    return applied({"num_threads": str(oversubscribed())})


@contextmanager
def _collector(variation: int, _device: torch.device) -> Iterator[None]:
    """Collect cycles after every ten new objects, or never."""
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
    """Disable the garbage collector; ``gc.enable``, ``collect`` and ``set_threshold`` do nothing meanwhile."""
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
    """Shift the addresses that ``malloc`` returns by 16 bytes per variation, and scatter new Python objects.

    Multiples of 64 are skipped; only memory from the end of the heap moves.
    """
    with ExitStack() as stack:
        scattered = scattered_addresses()  # first: its lists leave holes
        if (library := _heap()) is not None:
            for block in (*_fill_holes(library), *_padding(library, ALIGNMENT * variation)):
                stack.callback(library.free, block)
        yield
        del scattered


def _memory(variation: int, device: torch.device) -> AbstractContextManager[None]:
    """Poison fresh memory; on the CPU by ``malloc`` only, since torch would run other ops under a dispatch mode."""
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


@dataclass(frozen=True, slots=True)
class RunCondition:
    """How a perturbation is provoked within a run.

    Attributes:
        change: returns the context of a run, by variation (from 1) and device.
        sides: pairs of variations that always differ if the perturbation matters, in which it is tried alone; empty:
            the same variation may have another effect each time.
        always: variation 0 is perturbed, too: runs with different thread counts may sum in different order.
    """

    change: Callable[[int, torch.device], AbstractContextManager[None]]
    sides: tuple[tuple[int, int], ...] = ()
    always: bool = False

    @property
    def by_chance(self) -> bool:
        """True if each further run needs another variation: two runs of one may agree."""
        return not self.sides and not self.always


CONDITIONS: Mapping[str, RunCondition] = MappingProxyType(
    {
        Perturbation.THREADS: RunCondition(_threads, always=True),
        # Left alone, the collector runs when it happens to, and foreign memory lies where it happens to. Objects, whose
        # order is random in each variation of ``address``, lie alike in runs that are left alone.
        Perturbation.COLLECTOR: RunCondition(_collector, sides=((2, 1),)),
        Perturbation.ADDRESS: RunCondition(_address, sides=((0, 1), (1, 2))),
        # After what allocates, which would be filled too. An earlier run may have left what memory was filled with.
        Perturbation.MEMORY: RunCondition(_memory, sides=((1, 2),)),
        Perturbation.LOAD: RunCondition(_load),
    }
)
"""Perturbations within a run, in the order in which they are applied; a fresh process is none of them."""

WITHIN_A_RUN: tuple[str, ...] = tuple(CONDITIONS)

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
    """Return the C library if it reports free heap memory (glibc 2.33 or newer)."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallinfo2"):
        return None
    library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    library.free.restype, library.free.argtypes = None, [ctypes.c_void_p]
    library.mallinfo2.restype = _Statistics
    return library


def _padding(library: ctypes.CDLL, wanted: int) -> list[int]:
    """Allocate blocks at the end of the heap so that the next one begins at ``wanted`` modulo 64."""
    probe = library.malloc(_CHUNK - _HEADER)  # the next block begins as far behind it as it takes with its header
    further = _CHUNK + (wanted - probe - _CHUNK) % 64
    return [probe, library.malloc(further - _HEADER)]


def _fill_holes(library: ctypes.CDLL) -> list[int]:
    """Allocate the free gaps of the heap, so that further blocks come from its end."""
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
