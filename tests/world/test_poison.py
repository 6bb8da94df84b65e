"""Memory that nobody wrote holds the poison: through the C library, and through a dispatch mode where that cannot."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, suppress

import numpy as np
import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from hashbench.tracing import HashDebugTrace
from hashbench.world import poison
from hashbench.world.poison import POISONS, poison_reach, poisoned_memory

HAS_GLIBC = platform.libc_ver()[0] == "glibc" and not os.environ.get("LD_PRELOAD")
needs_glibc = pytest.mark.skipif(not HAS_GLIBC, reason="malloc is not glibc's")


@pytest.fixture(params=["malloc", "mode"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways, wherever this runs."""
    if request.param == "mode":
        monkeypatch.setattr(poison, "_set_perturbation", lambda _: False)
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
@pytest.mark.usefixtures("way")
def test_what_was_allocated_and_not_written_holds_the_poison(name: str, value: int) -> None:
    with poisoned_memory(value):
        assert content(ALLOCATIONS[name]()) == {value}


@pytest.mark.usefixtures("way")
def test_what_was_written_does_not() -> None:
    with poisoned_memory(POISONS[0]):
        assert not torch.zeros(1000).any()
        assert torch.equal(torch.ones(3) + torch.arange(3), torch.tensor([1.0, 2.0, 3.0]))
        assert torch.empty(0).numel() == 0
        assert torch.empty(3, device="meta").shape == (3,)
        assert torch.empty(3, 3, layout=torch.sparse_coo).is_sparse


@pytest.mark.usefixtures("way")
def test_a_padding_that_leaves_elements_unwritten_follows_the_poison() -> None:
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
def test_memory_that_compiled_code_takes_for_itself_holds_the_poison() -> None:
    with poisoned_memory(POISONS[1]):
        assert set(np.empty(5000, np.uint8)) == {POISONS[1]}
        storage = torch.UntypedStorage(5000)
        assert set(ctypes.string_at(storage.data_ptr(), 5000)) == {POISONS[1]}
        grown = torch.ones(1).resize_(2000)
        assert set(ctypes.string_at(grown.data_ptr() + 4, 7996)) == {POISONS[1]}


@needs_glibc
@pytest.mark.parametrize("size", [64, 500, 1000, 2000])
def test_blocks_that_were_free_before_hold_the_poison_except_for_their_links(size: int) -> None:
    library = poison._c_library()
    with poisoned_memory(POISONS[0]):
        block = library.malloc(size)
        found = ctypes.string_at(block, size)
        library.free(block)
    assert set(found[16:]) == {POISONS[0]}


def trace_outside(trace: HashDebugTrace) -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
    return trace, poisoned_memory(POISONS[0])


def trace_inside(trace: HashDebugTrace) -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
    return poisoned_memory(POISONS[0]), trace


@pytest.mark.parametrize("order", [trace_outside, trace_inside])
@pytest.mark.usefixtures("way")
def test_a_trace_records_what_it_would_without(
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
def test_afterwards_memory_is_as_it_comes(error: bool) -> None:
    with suppress(ZeroDivisionError), poisoned_memory(POISONS[0]):
        if error:
            raise ZeroDivisionError
    assert not _get_current_dispatch_mode_stack()
    fresh = [content(torch.empty(1 << 22, dtype=torch.uint8)) for _ in range(2)]
    assert {POISONS[0]} not in fresh


@needs_glibc
def test_a_perturbation_that_the_user_asked_for_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    real = poison._set_perturbation
    monkeypatch.setattr(poison, "_set_perturbation", lambda value: asked.append(value) or real(value))
    monkeypatch.setenv("MALLOC_PERTURB_", "7")
    with poisoned_memory(POISONS[0]):
        pass
    real(0)
    assert asked[-1] == 7


@needs_glibc
def test_another_allocator_in_the_place_of_the_c_library_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(poison, "_probe", lambda: bytes(poison._PROBE_BYTES))
    assert poison_reach("cpu").startswith("what empty")
    with poisoned_memory(POISONS[0]):
        assert content(torch.empty(9)) == {POISONS[0]}


def test_the_reach_on_another_device_is_that_of_the_mode() -> None:
    assert poison_reach("cuda") == poison_reach("meta")
    assert "not memory that kernels take" in poison_reach("cuda")
    assert poison_reach("cpu").startswith("all memory of tensors") == HAS_GLIBC
