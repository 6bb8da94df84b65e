"""Poison memory: fill uninitialised memory with one of two values; results that follow the value have read it.

glibc can fill every block that ``malloc`` returns, also inside kernels. Elsewhere a dispatch mode fills what allocation
ops return. Kernels on an accelerator allocate workspaces from torch's caching allocator: its free blocks are taken,
filled and released.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hashbench.core.trace.arguments import tensors_in
from hashbench.core.trace.digest import unobserved
from hashbench.core.trace.op_schema import plan_of
from hashbench.core.trace.storage_writers import whole_storage

POISONS = (0x3F, 0x40)
"""Two bytes. Repeated, they are ordinary numbers in every floating-point type (float32: 0.747 and 3.004), neither tiny
nor NaN, which could vanish in a sum or be replaced; as integers they are large."""

_M_PERTURB = -6
_PROBE_BYTES = 4096

_MARK = 0x6B
"""A byte distinct from the poisons that ``malloc`` fills with while free small blocks are collected."""

_MOST_SMALL_BLOCKS = 2**16


@dataclass(frozen=True, slots=True)
class Reserve:
    """Minimum of filled memory in a caching allocator; beyond it, unfilled memory comes from the driver.

    Attributes:
        large: bytes in one block.
        small: bytes in segments for requests up to :data:`SMALL`; by default one segment of ``kSmallBuffer``
            (c10/core/AllocatorConfig.h), so that the first small request is not served by the driver.
    """

    large: int = 2**26
    small: int = 2**21


USUAL_RESERVE = Reserve()


@contextmanager
def poisoned_memory(
    value: int, *, through_mode: bool = True, device: torch.device | None = None, reserve: Reserve = USUAL_RESERVE
) -> Iterator[None]:
    """Fill memory that is allocated inside with the byte ``value``; :func:`poison_reach` says which memory that is.

    On entry, the free blocks in the caching allocator of ``device``, and ``reserve``, are filled. With deterministic
    algorithms, ``torch.utils.deterministic.fill_uninitialized_memory`` would overwrite the poison. Contexts do not
    nest: the exit of the inner one ends both. With ``through_mode=False`` only ``malloc`` fills, so that torch's own
    fill remains.
    """
    filling = _fill_malloc(value)
    try:
        if device is not None:
            _fill_free_blocks(value, device, reserve)
        covered = filling and _reaches_small_tensors(value) and not torch.accelerator.is_available()
        if filling:
            _fill_small_blocks(value)  # last: the question before leaves a block of its own
        with nullcontext() if covered or not through_mode else _FillingMode(value):
            yield
    finally:
        if filling:
            _set_perturbation(_usual_perturbation())


def fill_bytes(tensor: torch.Tensor, value: int) -> None:
    """Fill each byte of a tensor's elements, not what lies between them; a bool stays, which has but two values."""
    if tensor.dtype is torch.bool or not tensor.numel():
        return
    filler = torch.full((tensor.numel() * tensor.itemsize,), value, dtype=torch.uint8, device=tensor.device)
    tensor.copy_(filler.view(tensor.dtype).reshape(tensor.shape))


def poison_reach(device: str) -> str:
    """Describe the memory that :func:`poisoned_memory` fills on a device."""
    if torch.device(device).type == "cpu" and _fill_malloc(POISONS[0]):
        _set_perturbation(_usual_perturbation())
        return (
            "all memory of tensors, and of more than 1 KiB that kernels take for themselves; of what is smaller, the "
            "blocks that were free before"
        )
    if _free_memory(torch.device(device)) is not None:
        return (
            "what empty and its relatives return, and the free blocks of torch's allocator, from which kernels take "
            "memory for themselves; not what a library keeps (workspaces of cuBLAS) or takes from the driver"
        )
    return "what empty and its relatives return; not memory that kernels take for themselves"


# -------------------------------------------------------------------------------------- in torch's caching allocator

SMALL = 2**20
"""Bytes. Requests up to this size are served from small segments, larger ones from large segments (``kSmallSize`` in
c10/core/AllocatorConfig.h)."""

Segments = Sequence[Mapping[str, Any]]


def reserve_for_a_run(device: torch.device) -> Reserve:
    """Return the reserve for a run whose memory is released to the driver afterwards: peak minus current usage."""
    if _free_memory(device) is None:
        return USUAL_RESERVE
    stats = torch.accelerator.memory_stats(device)

    def returned(pool: str) -> int:
        peak, current = (stats.get(f"allocated_bytes.{pool}.{name}", 0) for name in ("peak", "current"))
        return int(peak - current)

    return Reserve(max(USUAL_RESERVE.large, returned("large_pool")), max(USUAL_RESERVE.small, returned("small_pool")))


def _fill_free_blocks(value: int, device: torch.device, reserve: Reserve) -> None:
    """Allocate all free blocks of the current stream, fill them and release them, on that stream."""
    segments = _free_memory(device)
    if segments is None:
        return
    index = device.index if device.index is not None else torch.accelerator.current_device_index()
    stream = getattr(torch.get_device_module(device).current_stream(device), "cuda_stream", None)
    blocks: list[torch.Tensor] = []  # all together: one after the other would be the same block again and again
    with suppress(torch.OutOfMemoryError), unobserved():
        sizes = requests(segments, device=index, stream=stream, reserve=reserve)
        blocks.extend(torch.full((size,), value & 0xFF, dtype=torch.uint8, device=device) for size in sizes)


def _free_memory(device: torch.device) -> Segments | None:
    """Return the segments of the caching allocator of a device type; ``None`` if it has none or cannot list them."""
    if device.type in ("cpu", "meta") or not torch.accelerator.is_available():
        return None
    current = torch.accelerator.current_accelerator()
    look = getattr(torch.get_device_module(device.type), "memory_snapshot", None)
    if look is None or current is None or current.type != device.type:
        return None
    if os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING"):
        return None
    try:
        segments: Segments = look(include_traces=False) if device.type == "cuda" else look()
    except RuntimeError:  # another allocator has taken its place, such as cudaMallocAsync
        return None
    return segments


def requests(segments: Segments, *, device: int, stream: int | None, reserve: Reserve = USUAL_RESERVE) -> list[int]:
    """Return request sizes in bytes, largest first, that together take every free block and top them up to ``reserve``.

    A free block goes to the best-fitting request, so a request of its exact size takes it. Graph pools are skipped, and
    so are fragments of large segments that no request fits.

    Args:
        segments: snapshot of the caching allocator.
        device: index of the device.
        stream: handle of the stream that makes the requests; ``None``: any stream.
        reserve: minimum of free memory afterwards.
    """
    small, large = [], []
    for segment in segments:
        if segment["device"] != device or stream not in (None, segment["stream"]):
            continue
        if tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0):
            continue
        free = [block["size"] for block in segment["blocks"] if block["state"] == "inactive"]
        if segment["segment_type"] == "small":  # requests that it serves, and that take so many bytes together
            small += [piece for size in free for piece in [SMALL] * (size // SMALL) + [size % SMALL] if piece]
        else:
            large += [size for size in free if size > SMALL]
    block = [reserve.large] if max(large, default=0) < reserve.large else []
    pieces = [SMALL] * -(-max(0, reserve.small - sum(small)) // SMALL)
    return sorted([*small, *large, *block, *pieces], reverse=True)


# ------------------------------------------------------------------------------------------------- through malloc


def _fill_malloc(value: int) -> bool:
    """Make ``malloc`` fill with ``value``; return false if another allocator has replaced it."""
    if not _set_perturbation(value ^ 0xFF):  # glibc fills with the complement
        return False
    library = _c_library()
    block = library.malloc(_PROBE_BYTES)
    filled = ctypes.string_at(block, _PROBE_BYTES) == bytes([value]) * _PROBE_BYTES
    library.free(block)
    if not filled:
        _set_perturbation(_usual_perturbation())
    return filled


def _reaches_small_tensors(value: int) -> bool:
    """Return whether just-freed memory from a cache is filled too: torch requests aligned blocks, which glibc did not
    cache up to 2.36."""
    with unobserved():
        torch.zeros(64, dtype=torch.uint8)  # freed at once
        again = torch.empty(64, dtype=torch.uint8)
        return ctypes.string_at(again.data_ptr(), again.nbytes) == bytes([value]) * again.nbytes


def set_malloc_option(option: int, value: int) -> bool:
    """Set an option of glibc's ``mallopt`` by number; return false if the C library has none."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        return bool(ctypes.CDLL(None).mallopt(option, value))
    except (AttributeError, OSError):  # another C library
        return False


def _set_perturbation(value: int) -> bool:
    return set_malloc_option(_M_PERTURB, value)


def _usual_perturbation() -> int:
    """Return the user's ``MALLOC_PERTURB_``, else 0."""
    asked = os.environ.get("MALLOC_PERTURB_", "")
    return int(asked) if asked.isdigit() else 0


def _fill_small_blocks(value: int) -> None:
    """Fill small free blocks, which glibc reuses unfilled from per-thread caches.

    glibc also moves further blocks of the size from its bins into the cache on each lookup.
    """
    library = _c_library()
    taken = [0] * _MOST_SMALL_BLOCKS  # of full length: a list that grows would free blocks of these sizes
    count = 0
    try:
        _set_perturbation(_MARK ^ 0xFF)
        for size in range(24, 1033, 16):
            mark, new = bytes([_MARK]) * size, 0
            # One new block says that the cache was empty; a second one, that no block was moved there with the first.
            while new < 2 and count < _MOST_SMALL_BLOCKS:
                block = taken[count] = library.malloc(size)
                new = 0 if library.memcmp(block, mark, size) else new + 1
                library.memset(block, value, size)
                count += 1
    finally:
        _set_perturbation(value ^ 0xFF)
        for block in taken[:count]:
            library.free(block)


def _c_library() -> Any:
    library = ctypes.CDLL(None)
    library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    library.free.restype, library.free.argtypes = None, [ctypes.c_void_p]
    library.memcmp.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t]
    library.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
    return library


# ------------------------------------------------------------------------------------------- through a dispatch mode


class _FillingMode(TorchDispatchMode):
    """Fills what allocation ops return. Inside or around a trace it changes no record.

    A storage that a tensor is given is not filled: it may be new or in use, as in ``copy.deepcopy``.
    """

    supports_higher_order_operators = True

    def __init__(self, value: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.value = value

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        output, plan = func(*args, **(kwargs or {})), plan_of(func)
        for tensor in tensors_in(output) if plan.blank and not plan.resizes else ():
            with suppress(NotImplementedError, RuntimeError), unobserved():  # no memory: meta, sparse
                whole_storage(tensor).fill_(self.value)
        return output
