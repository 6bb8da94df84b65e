"""Memory that nobody wrote holds the poison: through the C library, and through a dispatch mode where that cannot."""

from __future__ import annotations

import copy
import ctypes
import gc
import os
import platform
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from hashbench.core.diagnose.replay.controls import memory
from hashbench.core.diagnose.replay.controls.memory import POISONS, poison_reach, poisoned_memory
from hashbench.core.trace.api import HashDebugTrace

HAS_GLIBC = platform.libc_ver()[0] == "glibc" and not os.environ.get("LD_PRELOAD")
needs_glibc = pytest.mark.skipif(not HAS_GLIBC, reason="malloc is not glibc's")


@pytest.fixture(params=["malloc", "mode"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways, wherever this runs."""
    if request.param == "mode":
        monkeypatch.setattr(memory, "_set_perturbation", lambda _: False)
    elif not HAS_GLIBC:
        pytest.skip("malloc is not glibc's")
    return str(request.param)


def content(tensor: torch.Tensor) -> set[int]:
    storage = tensor.untyped_storage()
    return set(ctypes.string_at(storage.data_ptr(), storage.nbytes()))


ALLOCATIONS: dict[str, Callable[[], torch.Tensor]] = {
    "empty": lambda: torch.empty(1000),
    "empty of one element": lambda: torch.empty(1, dtype=torch.float64),
    "empty of bool": lambda: torch.empty(100, dtype=torch.bool),
    "empty of ten million bytes": lambda: torch.empty(10_000_000, dtype=torch.uint8),
    "empty_strided": lambda: torch.empty_strided((10, 10), (20, 2)),
    "empty_like": lambda: torch.empty_like(torch.ones(300)),
    "new_empty": lambda: torch.ones(2).new_empty(300),
    "channels last": lambda: torch.empty(2, 3, 8, 8, memory_format=torch.channels_last),
    "in inference mode": torch.inference_mode()(lambda: torch.empty(300)),
    "after one of that size was freed": lambda: (torch.ones(64), torch.empty(64))[1],
}


@pytest.mark.parametrize("name", ALLOCATIONS)
@pytest.mark.parametrize("value", POISONS)
def test_unwritten_memory_holds_the_poison(name: str, value: int, way: str) -> None:
    with poisoned_memory(value):
        made = [ALLOCATIONS[name]() for _ in range(3)]
        filled = sum(content(tensor) == {value} for tensor in made)
    # glibc hands out a free block of the very size as it was where that is not sorted yet: 22 of 12 000 small tensors.
    assert filled >= (3 if way == "mode" else 2)


@pytest.mark.usefixtures("way")
def test_written_memory_holds_no_poison() -> None:
    with poisoned_memory(POISONS[0]):
        assert not torch.zeros(1000).any()
        assert not copy.deepcopy(torch.zeros(1000)).any(), "its storage is copied first, and then given to a tensor"
        assert torch.equal(torch.ones(3) + torch.arange(3), torch.tensor([1.0, 2.0, 3.0]))
        assert torch.empty(0).numel() == 0
        assert torch.empty(3, device="meta").shape == (3,)
        assert torch.empty(3, 3, layout=torch.sparse_coo).is_sparse


@pytest.mark.usefixtures("way")
def test_unwritten_padding_follows_the_poison() -> None:
    """pytorch#176254: this call never writes 32 of its 96 elements."""
    source = torch.rand(4, 2, 1, 2, 2, dtype=torch.float64)
    outcomes = []
    for value in (*POISONS, *POISONS):
        with poisoned_memory(value):
            outcomes.append(functional.pad(source, [2, 0, -1, 2, 0, 0], "circular"))
    assert int((outcomes[0] != outcomes[1]).sum()) == 32
    assert torch.equal(outcomes[0], outcomes[2])
    assert torch.equal(outcomes[1], outcomes[3])


@needs_glibc
def test_workspace_of_compiled_code_is_poisoned() -> None:
    with poisoned_memory(POISONS[1]):
        assert set(np.empty(5000, np.uint8)) == {POISONS[1]}
        storage = torch.UntypedStorage(5000)
        assert set(ctypes.string_at(storage.data_ptr(), 5000)) == {POISONS[1]}
        grown = torch.ones(1).resize_(2000)
        assert set(ctypes.string_at(grown.data_ptr() + 4, 7996)) == {POISONS[1]}


@needs_glibc
@pytest.mark.parametrize("size", [64, 500, 1000])
@pytest.mark.parametrize("several", [24, 1000])
def test_blocks_from_bins_are_poisoned(size: int, several: int) -> None:
    """Of several blocks glibc moves some from a bin into its cache, from which they come without poison."""
    library = memory._c_library()
    for again in range(8):  # the last block that was taken may be the last one of the cache
        taken = [(library.malloc(size), library.malloc(24)) for _ in range(several + again)]
        for block, _ in taken:
            ctypes.memset(block, 7, size)
            library.free(block)  # the block after it stays in use: nothing is joined
        with poisoned_memory(POISONS[0]):
            block = library.malloc(size)
            found = ctypes.string_at(block + 16, size - 16) != bytes([POISONS[0]]) * (size - 16)
            library.free(block)
        for _, between in taken:
            library.free(between)
        assert not found


@needs_glibc
@pytest.mark.parametrize("size", [64, 500, 1000, 2000])
def test_free_blocks_are_poisoned_except_links(size: int) -> None:
    library = memory._c_library()
    gc.collect()  # what earlier tests left would be freed between here and there, and come first
    gc.disable()
    try:
        with poisoned_memory(POISONS[0]):
            block = library.malloc(size)
            found = ctypes.string_at(block, size)
            library.free(block)
    finally:
        gc.enable()
    assert set(found[16:]) == {POISONS[0]}


def trace_outside(trace: HashDebugTrace) -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
    return trace, poisoned_memory(POISONS[0])


def trace_inside(trace: HashDebugTrace) -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
    return poisoned_memory(POISONS[0]), trace


@pytest.mark.parametrize("order", [trace_outside, trace_inside])
@pytest.mark.usefixtures("way")
def test_trace_is_unchanged_by_poison(
    order: Callable[[HashDebugTrace], Iterator[AbstractContextManager[object]]],
) -> None:
    plain, poisoned = HashDebugTrace(), HashDebugTrace()

    def run() -> torch.Tensor:
        made = torch.empty(50)
        assert content(made) == {POISONS[0]} or not poisoned.is_active()
        return made.fill_(2.0) * torch.ones(50).new_empty(50).zero_()

    with plain:
        run()
    with ExitStack() as stack:
        for context in order(poisoned):
            stack.enter_context(context)
        run()
    assert poisoned.finish().records == plain.finish().records


@pytest.mark.parametrize("error", [False, True], ids=["at the end", "on error"])
@pytest.mark.usefixtures("way")
def test_memory_is_unpoisoned_afterwards(error: bool) -> None:
    with suppress(ZeroDivisionError), poisoned_memory(POISONS[0]):
        if error:
            raise ZeroDivisionError
    assert not _get_current_dispatch_mode_stack()
    former = [torch.full((4096,), 7, dtype=torch.uint8) for _ in range(64)]
    places = {one.data_ptr() for one in former}
    del former
    fresh = [torch.empty(4096, dtype=torch.uint8) for _ in range(64)]
    again = [one for one in fresh if one.data_ptr() in places]
    assert again, "none of 64 blocks is handed out again"
    # The C library keeps its links at the begin and the end of a free block. Smaller things may have lain inside of it
    # since, with any bytes; what is poisoned holds one byte throughout.
    contents = [set(one[64:-64].tolist()) for one in again]
    assert {7} in contents
    assert {POISONS[0]} not in contents


@needs_glibc
def test_users_malloc_perturb_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    real = memory._set_perturbation
    monkeypatch.setattr(memory, "_set_perturbation", lambda value: asked.append(value) or real(value))
    monkeypatch.setenv("MALLOC_PERTURB_", "7")
    with poisoned_memory(POISONS[0]):
        pass
    real(0)
    assert asked[-1] == 7


@needs_glibc
def test_replaced_malloc_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    block = ctypes.create_string_buffer(memory._PROBE_BYTES)
    other = SimpleNamespace(malloc=lambda _: ctypes.addressof(block), free=lambda _: None)
    monkeypatch.setattr(memory, "_c_library", lambda: other)
    assert poison_reach("cpu").startswith("what empty")
    with poisoned_memory(POISONS[0]):
        assert content(torch.empty(9)) == {POISONS[0]}


# --------------------------------------------------------------------------------------- torch's caching allocator


def segment(
    kind: str, *blocks: tuple[str, int], device: int = 0, stream: int = 0, pool: tuple[int, int] = (0, 0)
) -> Any:
    found = [{"state": state, "size": size} for state, size in blocks]
    return {"segment_type": kind, "device": device, "stream": stream, "segment_pool_id": pool, "blocks": found}


FREE, USED = "inactive", "active_allocated"
MIB = 2**20
USUAL = memory.USUAL_RESERVE


REQUESTS: dict[str, tuple[list[Any], memory.Reserve, list[int]]] = {
    "nothing is there: a reserve": ([], USUAL, [64 * MIB, MIB, MIB]),
    "a large block serves as reserve": ([segment("large", (FREE, 96 * MIB))], USUAL, [96 * MIB, MIB, MIB]),
    "what is in use is left alone": (
        [segment("large", (USED, 96 * MIB), (FREE, 10 * MIB))],
        *(USUAL, [64 * MIB, 10 * MIB, MIB, MIB]),
    ),
    "the largest first": (
        [segment("large", (FREE, 8 * MIB), (FREE, 96 * MIB)), segment("small", (FREE, 512))],
        *(USUAL, [96 * MIB, 8 * MIB, MIB, MIB, 512]),
    ),
    "a small segment is taken in pieces that are asked of it": (
        [segment("small", (FREE, 2 * MIB)), segment("small", (USED, 512), (FREE, 2 * MIB - 512))],
        *(USUAL, [64 * MIB, MIB, MIB, MIB, MIB - 512]),
    ),
    "scraps that nobody can be given": ([segment("large", (FREE, MIB), (FREE, 512))], USUAL, [64 * MIB, MIB, MIB]),
    "another device": ([segment("small", (FREE, 512), device=1)], USUAL, [64 * MIB, MIB, MIB]),
    "another stream": ([segment("small", (FREE, 512), stream=7)], USUAL, [64 * MIB, MIB, MIB]),
    "the pool of a graph": ([segment("small", (FREE, 512), pool=(0, 3))], USUAL, [64 * MIB, MIB, MIB]),
    "another stream has yet to let it go": (
        [segment("small", ("active_awaiting_free", 512))],
        USUAL,
        [64 * MIB, MIB, MIB],
    ),
    "a larger reserve: one block": ([], memory.Reserve(300 * MIB, 0), [300 * MIB]),
    "a reserve of small segments": ([], memory.Reserve(64 * MIB, 2 * MIB + 1), [64 * MIB, MIB, MIB, MIB]),
    "a reserve in which what is free counts": (
        [segment("large", (FREE, 96 * MIB)), segment("small", (FREE, MIB), (FREE, 512))],
        *(memory.Reserve(90 * MIB, 2 * MIB), [96 * MIB, MIB, MIB, 512]),
    ),
}


@pytest.mark.parametrize(("segments", "reserve", "expected"), REQUESTS.values(), ids=REQUESTS)
def test_requests_take_every_free_block(segments: list[Any], reserve: memory.Reserve, expected: list[int]) -> None:
    assert memory.requests(segments, device=0, stream=0, reserve=reserve) == expected


def test_reserve_is_peak_minus_current(monkeypatch: pytest.MonkeyPatch) -> None:
    assert memory.reserve_for_a_run(torch.device("cpu")) == USUAL
    stats = {
        **{f"allocated_bytes.large_pool.{name}": size * MIB for name, size in {"peak": 900, "current": 200}.items()},
        **{f"allocated_bytes.small_pool.{name}": size * MIB for name, size in {"peak": 5, "current": 2}.items()},
    }
    monkeypatch.setattr(memory, "_free_memory", lambda _: [])
    for known, reserve in ((stats, memory.Reserve(700 * MIB, 3 * MIB)), ({}, USUAL)):
        monkeypatch.setattr(torch.accelerator, "memory_stats", lambda _, known=known: known)
        assert memory.reserve_for_a_run(torch.device("cuda")) == reserve


def test_without_stream_handle_all_streams_count() -> None:
    assert memory.requests([segment("small", (FREE, 512), stream=7)], device=0, stream=None)[-1] == 512


def test_free_blocks_are_filled_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Held together until all are filled: one after the other would be the same block again."""
    monkeypatch.setattr(memory, "_free_memory", lambda _: [segment("small", (FREE, 512), (FREE, 1024))])
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    made: list[tuple[int, int, int]] = []
    real, held = torch.full, []

    def full(size: tuple[int], value: int, **options: Any) -> torch.Tensor:
        tensor = real(size, value, **options)
        held.append(weakref.ref(tensor))
        made.append((size[0], value, sum(found() is not None for found in held)))
        return tensor

    monkeypatch.setattr(torch, "full", full)
    with poisoned_memory(POISONS[1], device=torch.device("cpu")):
        assert [(size, value, alive) for size, value, alive in made if size < MIB] == [
            (1024, POISONS[1], 4),
            (512, POISONS[1], 5),
        ]
        assert [found() for found in held] == [None] * 5


def test_reach_with_free_blocks_names_exceptions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_free_memory", lambda _: [])
    assert "free blocks of torch's allocator" in poison_reach("cuda")
    assert "not what a library keeps" in poison_reach("cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
def test_kernel_workspace_on_gpu_is_poisoned() -> None:
    """Taken past the dispatcher, as a kernel does."""
    device = torch.device("cuda", torch.cuda.current_device())
    torch.zeros(3_000_000, device=device)
    for size in (700, 5000, 600_000, 3_000_000, 40_000_000):
        for value in POISONS:
            with poisoned_memory(value, device=device):
                address = torch.cuda.caching_allocator_alloc(size, device)
            found = content_at(address, size, device)
            torch.cuda.caching_allocator_delete(address)
            assert found == {value}


def content_at(address: int, size: int, device: torch.device) -> set[int]:
    """The bytes at an address of a GPU."""
    about = {"data": (address, False), "shape": (size,), "typestr": "|u1", "version": 2}
    return set(torch.as_tensor(SimpleNamespace(__cuda_array_interface__=about), device=device).unique().tolist())


def test_reach_without_snapshot_is_the_mode() -> None:
    assert poison_reach("cuda") == poison_reach("meta")
    assert "not memory that kernels take" in poison_reach("cuda")
    assert poison_reach("cpu").startswith("all memory of tensors") == HAS_GLIBC
