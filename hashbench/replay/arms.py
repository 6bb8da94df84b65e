"""The arms on a captured call as data: what each changes around a replay, and changed copies of the call itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch

from hashbench import world
from hashbench.determinism import applied
from hashbench.replay.callfacts import written_slots
from hashbench.replay.calls import CapturedCall, Memory, TensorForm

Change = Callable[[], AbstractContextManager[Callable[[], None] | None]]
"""A change around replays; one that gives a function wants that called before each of them."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """An arm that changes what is around the call.

    ``each``: entered for every replay anew; else for a block of them. ``outside``: what
    it changes can reach only code that is not torch's own. ``disturbs``: it adds a disturbance, so its outcomes are
    compared with those without. ``device``: the only type of device that has it.
    """

    name: str
    change: Change
    each: bool = False
    outside: bool = False
    disturbs: bool = False
    device: str = ""


def _settings(**values: str) -> Change:
    return lambda: applied({name.replace("__", "."): text for name, text in values.items()})


@contextmanager
def busy_stream() -> Iterator[None]:
    """Matrix products keep a second stream of the accelerator busy; waits for them on leaving."""
    stream = torch.Stream()
    with stream:
        matrix = torch.ones(2048, 2048, device=stream.device) / 2048
        for _ in range(50):  # about 50 ms on a large GPU, longer than most kernels take
            matrix = matrix @ matrix
    try:
        yield
    finally:
        stream.synchronize()


SURROUNDINGS = (
    Surroundings("one_thread", world.one_thread, device="cpu"),
    Surroundings("deterministic", _settings(deterministic_algorithms="on", fill_uninitialized_memory="False")),
    Surroundings("deterministic_fill", _settings(deterministic_algorithms="on", fill_uninitialized_memory="True")),
    Surroundings("nondeterministic", _settings(deterministic_algorithms="off", fill_uninitialized_memory="False")),
    Surroundings("entropy", world.constant_entropy, outside=True),
    Surroundings("clocks", world.ticking_clocks, outside=True),
    Surroundings("one_worker", world.single_worker_pools, outside=True),
    Surroundings("onednn_off", _settings(mkldnn__enabled="False"), device="cpu"),
    Surroundings("cudnn_off", _settings(cudnn__enabled="False"), device="cuda"),
    Surroundings("cudnn_benchmark", _settings(cudnn__benchmark="True", cudnn__deterministic="False"), device="cuda"),
    Surroundings(
        "cudnn_deterministic", _settings(cudnn__benchmark="False", cudnn__deterministic="True"), device="cuda"
    ),
    Surroundings(
        "sdpa_math",
        _settings(sdp__math="True", sdp__flash="False", sdp__mem_efficient="False", sdp__cudnn="False"),
        device="cuda",
    ),
    Surroundings("tf32_off", _settings(cuda__matmul__allow_tf32="False", cudnn__allow_tf32="False"), device="cuda"),
    Surroundings("busy", world.busy_threads, disturbs=True),
    Surroundings("busy_stream", busy_stream, each=True, disturbs=True, device="cuda"),
)
UNCHANGED: Change = nullcontext

SHIFTS = (4, 8, 16, 32, 48, 64)
"""Bytes. The addresses that vector kernels tell apart; at 64 a whole cache line."""


# ------------------------------------------------------------------------------------------------ dirty memory


def dirty_freed_memory(sizes: Sequence[int], *, value: int, device: torch.device) -> None:
    """Fill and free blocks of these sizes in bytes, so that what is allocated next holds other bytes than before."""
    blocks = [torch.full((size,), value & 0xFF, dtype=torch.uint8, device=device) for size in sizes]
    del blocks


# ------------------------------------------------------------------------------------------- changed copies of a call


_SMALL, _TINY = 8, 1
"""Largest whole number that replaces an element: sums of 100 000 products stay exact in float32, and in 16 bits sums of
some hundreds of products do."""


def with_exact_values(call: CapturedCall) -> CapturedCall | None:
    """The call with small whole numbers for the content of every floating-point or complex tensor, so that sums are
    exact in any order; ``None`` where it has no such tensor. Indices, masks and tensors without plain memory stay."""
    generator = torch.Generator().manual_seed(20)
    contents = {place: memory.content.clone() for place, memory in enumerate(call.memories)}
    changed = False
    for form in call.tensors:
        if isinstance(form, TensorForm) and _can_hold_whole_numbers(form.dtype) and form.span()[1]:
            _fill(contents[form.storage], form, generator)
            changed = True
    memories = tuple(dataclasses.replace(memory, content=contents[place]) for place, memory in enumerate(call.memories))
    return dataclasses.replace(call, memories=memories) if changed else None


def _can_hold_whole_numbers(dtype: torch.dtype) -> bool:
    if not (dtype.is_floating_point or dtype.is_complex):
        return False
    try:
        return torch.tensor([-1.0, 0.0, 1.0], dtype=dtype).to(torch.float32).tolist() == [-1.0, 0.0, 1.0]
    except (RuntimeError, NotImplementedError):  # packed formats
        return False


def _fill(content: torch.Tensor, form: TensorForm, generator: torch.Generator) -> None:
    """Whole numbers in all elements from the form's first to its last, those in its holes included."""
    start, end = form.span()
    flat = content[start:end].view(form.dtype)
    numbers = torch.view_as_real(flat) if form.dtype.is_complex else flat
    most = _SMALL if numbers.itemsize > 2 else _TINY
    drawn = torch.randint(-most, most + 1, numbers.shape, generator=generator)
    numbers.copy_(drawn.to(torch.float32))


def with_copied_sources(call: CapturedCall) -> CapturedCall | None:
    """The call with memory of its own for every argument that is only read but shares memory with a written one;
    ``None`` where there is no such argument."""
    written = written_slots(call)
    targets = {form.storage for index in written if isinstance(form := call.tensors[index], TensorForm)}
    memories, tensors = list(call.memories), list(call.tensors)
    for index, form in enumerate(call.tensors):
        if isinstance(form, TensorForm) and form.storage in targets and index not in written:
            tensors[index] = dataclasses.replace(form, storage=len(memories))
            memory = call.memories[form.storage]
            memories.append(Memory(memory.content, memory.alignment))
    if len(memories) == len(call.memories):
        return None
    return dataclasses.replace(call, memories=tuple(memories), tensors=tuple(tensors))


def possible_shifts(call: CapturedCall, memory: int | None) -> tuple[int, ...]:
    """The shifts of one memory (``None``: of all together) at which elements still lie at multiples of their size."""
    sizes = {
        form.dtype.itemsize
        for form in call.tensors
        if isinstance(form, TensorForm) and memory in (None, form.storage) and form.span()[1]
    }
    return tuple(shift for shift in SHIFTS if sizes and all(shift % size == 0 for size in sizes))
