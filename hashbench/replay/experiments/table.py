"""The arms on a captured call as data: what each changes around a replay, and changed copies of the call itself."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from hashbench.replay import controls
from hashbench.replay.call import CapturedCall, Memory, TensorForm
from hashbench.replay.facts import written_slots
from hashbench.run.settings import applied, preserved

Change = Callable[[], AbstractContextManager[Callable[[], None] | None]]
"""A change around replays; one that gives a function wants that called before each of them."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """An experiment that changes what is around the call.

    ``each``: entered for every replay anew; else for a block of them. ``outside``: what
    it changes can reach only code that is not torch's own. ``inside``: it can reach only an op that calls others: a
    custom one, or one that torch composes of others. ``disturbs``: it adds a disturbance, so its outcomes are
    compared with those without. ``on_call``: the change wants to know the call's device, and the seconds that a replay
    takes.
    """

    change: Callable[..., AbstractContextManager[Callable[[], None] | None]]
    each: bool = False
    outside: bool = False
    inside: bool = False
    disturbs: bool = False
    on_call: bool = False

    def around(self, device: torch.device, *, seconds: float) -> Change:
        """The change for a call on this device whose replay takes so many seconds."""
        return functools.partial(self.change, device, seconds) if self.on_call else self.change


def _settings(**values: str) -> Change:
    return lambda: applied({name.replace("__", "."): text for name, text in values.items()})


@contextmanager
def attention_by(backend: SDPBackend) -> Iterator[None]:
    """One implementation of attention alone: torch raises where it cannot do the call."""
    with sdpa_kernel(backend):
        yield


def _attention(backend: SDPBackend) -> Change:
    return functools.partial(attention_by, backend)


# ----------------------------------------------------------------------------------------------- TensorFloat-32


@contextmanager
def tf32(*, on: bool) -> Iterator[None]:
    """TF32 in all matrix products, convolutions and recurrent layers of CUDA, or in none.

    torch 2.9 and later have two kinds of names for this, and raise where they contradict each other. The older ones set
    the newer ones, too, so they go first; what the newer ones inherit from ``torch.backends.fp32_precision`` has to
    be overruled by themselves.
    """
    with preserved(), getattr(torch.backends, "__allow_nonbracketed_mutation", nullcontext)():
        older = _older_names()
        try:
            _set_older_names(matmul=on, cudnn=on)
            _set_newer_names("tf32" if on else "ieee")
            yield
        finally:
            _set_older_names(**older)  # not by ``preserved``, which cannot read what contradicts the newer ones


def _older_names() -> dict[str, bool]:
    """What the older names say, also where they contradict the newer ones, which are all ``tf32`` afterwards: then
    torch raises on reading an older one that is not."""
    _set_newer_names("tf32")
    found = {}
    owners: dict[str, Any] = {"matmul": torch.backends.cuda.matmul, "cudnn": torch.backends.cudnn}
    for name, owner in owners.items():
        try:
            found[name] = bool(owner.allow_tf32)
        except RuntimeError:
            found[name] = False
    return found


def _set_older_names(*, matmul: bool, cudnn: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = matmul
    torch.backends.cudnn.allow_tf32 = cudnn


def _set_newer_names(precision: str) -> None:
    backends: Any = torch.backends  # torch declares neither ``conv`` nor ``rnn``
    for owner in (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn):
        owner.fp32_precision = precision


# ------------------------------------------------------------------------------------------------ a busy device

BUSY_SECONDS = 0.05
"""For so long the other stream is busy at least: several times the launch of any op, and longer than most kernels."""
MOST_BUSY_SECONDS = 1.0
_WIDTH = 2048
"""Rows of the matrices that are multiplied: enough blocks to fill a large GPU, 16 MiB each."""
_MOST_PRODUCTS = 20_000


@contextmanager
def busy_stream(device: torch.device, seconds: float) -> Iterator[None]:
    """Matrix products keep a second stream of ``device`` busy, from before the body begins and for twice the
    ``seconds`` that it takes, up to a second; waits for them on leaving."""
    wanted = min(MOST_BUSY_SECONDS, max(BUSY_SECONDS, 2 * seconds))
    count = min(_MOST_PRODUCTS, math.ceil(wanted / _seconds_of_a_product(device)))
    stream = torch.Stream(device)
    with stream:
        matrix, product = _matrices(device)
        _multiply(matrix, product, count=count)
    try:
        yield
    finally:
        stream.synchronize()


@functools.cache
def _seconds_of_a_product(device: torch.device) -> float:
    """The time of one, warm, measured by the device itself; it does not change while a process lives."""
    stream, begin, end = torch.Stream(device), *(torch.Event(device, enable_timing=True) for _ in range(2))
    with stream:
        matrix, product = _matrices(device)
        _multiply(matrix, product, count=5)  # loads the kernel, and the library's memory for this stream
        begin.record(stream)
        _multiply(matrix, product, count=10)
        end.record(stream)
    stream.synchronize()
    return max(begin.elapsed_time(end) / 10 / 1000, 1e-6)


def _matrices(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix that is its own square, and room for the product."""
    matrix = torch.full((_WIDTH, _WIDTH), 1 / _WIDTH, dtype=torch.float32, device=device)
    return matrix, torch.zeros_like(matrix)


def _multiply(matrix: torch.Tensor, product: torch.Tensor, *, count: int) -> None:
    for _ in range(count):
        torch.mm(matrix, matrix, out=product)


# ------------------------------------------------------------------------------------------------------ the list

SURROUNDINGS: Mapping[str, Surroundings] = {
    "one_thread": Surroundings(controls.one_thread),
    "deterministic": Surroundings(_settings(deterministic_algorithms="on", fill_uninitialized_memory="False")),
    "deterministic_fill": Surroundings(_settings(deterministic_algorithms="on", fill_uninitialized_memory="True")),
    "nondeterministic": Surroundings(_settings(deterministic_algorithms="off", fill_uninitialized_memory="False")),
    "entropy": Surroundings(controls.constant_entropy, outside=True),
    "clocks": Surroundings(controls.ticking_clocks, outside=True),
    "one_worker": Surroundings(controls.single_worker_pools, outside=True),
    "onednn_off": Surroundings(_settings(mkldnn__enabled="False")),
    "onednn_deterministic": Surroundings(_settings(mkldnn__deterministic="True")),
    "cudnn_off": Surroundings(_settings(cudnn__enabled="False")),
    "cudnn_benchmark": Surroundings(_settings(cudnn__benchmark="True", cudnn__deterministic="False")),
    "cudnn_deterministic": Surroundings(_settings(cudnn__benchmark="False", cudnn__deterministic="True")),
    "sdpa_math": Surroundings(_attention(SDPBackend.MATH), inside=True),
    "sdpa_flash": Surroundings(_attention(SDPBackend.FLASH_ATTENTION), inside=True),
    "sdpa_efficient": Surroundings(_attention(SDPBackend.EFFICIENT_ATTENTION), inside=True),
    "sdpa_cudnn": Surroundings(_attention(SDPBackend.CUDNN_ATTENTION), inside=True),
    "tf32_off": Surroundings(functools.partial(tf32, on=False)),
    "tf32_on": Surroundings(functools.partial(tf32, on=True)),
    "busy": Surroundings(controls.busy_threads, disturbs=True),
    "busy_stream": Surroundings(busy_stream, each=True, disturbs=True, on_call=True),
}
"""The experiments of ``catalog.EXPERIMENTS`` that change what is around a call, by their names there."""

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
