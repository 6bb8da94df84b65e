"""Implement the experiments of ``catalog.EXPERIMENTS`` on a captured call: changed context, memory, or call."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from math import comb
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from hashbench.core.diagnose.calls.call import (
    CapturedCall,
    CompiledKernel,
    TensorForm,
    compiled_kernel,
    filled_slots,
    held_bytes,
    plan_for,
)
from hashbench.core.diagnose.calls.live import LiveCall
from hashbench.core.diagnose.calls.ops import calls_others
from hashbench.core.diagnose.replay import controls
from hashbench.core.diagnose.replay.facts import have_same_form, snapshot_bits, written_slots
from hashbench.core.diagnose.replay.replayer import Context, InapplicableError, Replayer, Tally
from hashbench.core.processes import Budget
from hashbench.core.records import NO_TIME, ExperimentResult
from hashbench.core.run.settings import applied, preserved

Method = Callable[[str, Replayer, Budget], ExperimentResult]
"""Runs the named experiment on a call within a time budget."""


@dataclass(frozen=True, slots=True)
class ReplayChange:
    """An experiment that repeats a subject under one change: a captured call, the items of a batch, a pair of calls.

    Attributes:
        around: makes the context of the runs.
        call: replaces the call; raises :class:`InapplicableError` if there is nothing to replace.
        each: enter the context for every replay, not once per block of replays.
        outside: the change only reaches code outside torch, so it applies to custom ops only.
        inside: the change only reaches ops that call other ops: custom ones and composites.
        disturbs: the change adds a disturbance; outcomes are compared with the undisturbed one.
        compiled: makes the context of the runs of a compiled kernel, which ``around`` does not reach.
    """

    around: Context = nullcontext
    call: Callable[[Any], Any] = lambda call: call
    each: bool = False
    outside: bool = False
    inside: bool = False
    disturbs: bool = False
    compiled: Callable[[CompiledKernel], Context] | None = None

    def __call__(self, name: str, replayer: Replayer, left: Budget) -> ExperimentResult:
        if self.outside and not replayer.custom:
            raise InapplicableError(f"{_of_torch(replayer)} kernels read nothing from outside torch")
        if self.inside and not (replayer.custom or calls_others(replayer.call.func)):
            raise InapplicableError("this kernel calls no other op, so there is nothing to choose")
        tally = replayer.against_in_place() if self.disturbs else Tally()
        if name == "nondeterministic" and replayer.call.settings.get("deterministic_algorithms") == "off":
            return replayer.repeated.result(name, note="as it was captured")
        around, changed = self._around(replayer.call.func), self.call(replayer.call)
        live = LiveCall(changed) if changed is not replayer.call else None
        result = replayer.compared(name, left, live=live, change=around, each=self.each, tally=tally)
        if self.disturbs:
            replayer.keep(tally)
        return result

    def _around(self, func: Any) -> Context:
        kernel = compiled_kernel(func)
        if kernel is None or self.compiled is None:
            return self.around
        try:
            change = self.compiled(kernel)
            change()
        except LookupError as error:
            raise InapplicableError(str(error.args[0])) from None
        return change


def _of_torch(replayer: Replayer) -> str:
    return "torch's own" if compiled_kernel(replayer.call.func) is None else "compiled"


# ------------------------------------------------------------------------------------------ settings and libraries


def _settings(**values: str) -> ReplayChange:
    return ReplayChange(lambda: applied({name.replace("__", "."): text for name, text in values.items()}))


def _attention(backend: SDPBackend) -> ReplayChange:
    """Force one attention implementation; torch raises if it does not support the call."""
    return ReplayChange(functools.partial(sdpa_kernel, backend), inside=True)


@contextmanager
def tf32(*, on: bool) -> Iterator[None]:
    """Enable or disable TF32 in all CUDA matrix products, convolutions and recurrent layers.

    torch 2.9 and later have two sets of names for this, and raise if they contradict each other. The older names also
    set the newer ones, so they are set first; the newer names that inherit from ``torch.backends.fp32_precision`` have
    to be overridden individually.
    """
    backends: Any = torch.backends  # torch declares neither ``conv`` nor ``rnn``
    older = (backends.cuda.matmul, backends.cudnn)
    newer = (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn)

    def put(precision: str, *flags: bool) -> None:
        for owner, flag in zip(older, flags, strict=False):
            owner.allow_tf32 = flag
        for owner in newer:
            owner.fp32_precision = precision

    with preserved(), getattr(torch.backends, "__allow_nonbracketed_mutation", nullcontext)():
        put("tf32")  # torch raises on reading an older name that is off beside newer ones that are on
        before = [_is_tf32_on(owner) for owner in older]
        try:
            put("tf32" if on else "ieee", on, on)
            yield
        finally:
            for owner, flag in zip(older, before, strict=True):  # ``preserved`` cannot read what contradicts
                owner.allow_tf32 = flag


def _is_tf32_on(owner: Any) -> bool:
    try:
        return bool(owner.allow_tf32)
    except RuntimeError:
        return False


# ------------------------------------------------------------------------------------------------ a busy device


def busy_stream(name: str, replayer: Replayer, left: Budget) -> ExperimentResult:
    """Replay the call next to a second stream of its device that stays busy for longer."""
    change = functools.partial(controls.second_stream, replayer.call.device, replayer.cost)
    return ReplayChange(change, each=True, disturbs=True)(name, replayer, left)


# --------------------------------------------------------------------------------------------------- other content

_SMALL, _TINY = 8, 1
"""Largest integer used as an element: sums of 100,000 products stay exact in float32, of some hundreds in 16 bits."""

_LARGE, _LARGE_OF_16_BITS = 1024, 16
"""Integers at which activations are whole: ``gelu``, ``silu`` and ``softplus`` give 0 or the number, ``tanh`` and
``sigmoid`` -1, 0 or 1, since ``exp(-1024)`` is 0. Their sums stay exact, as they are multiples."""


def exact_values(name: str, replayer: Replayer, left: Budget) -> ExperimentResult:
    """Replace all contents by small integers: sums become exact, so their order no longer matters.

    A compiled kernel may add what other ops, fused with the sum, made of them; where it still differs, it is tried with
    integers at which activations are whole.
    """
    forms = replayer.call.tensors
    if forms and all(isinstance(form, TensorForm) and not _is_inexact(form.dtype) for form in forms):
        return replayer.repeated.result(name, note="all inputs are whole numbers as they are")
    result = ReplayChange(call=with_exact_values)(name, replayer, left)
    if not result.differing or compiled_kernel(replayer.call.func) is None:
        return result
    large = with_exact_values(replayer.call, large=True)
    if not _vary(LiveCall(large).run().written):
        return result
    whole = ReplayChange(call=lambda _: large)(name, replayer, left)
    return result if whole.differing or not whole.ran else replace(whole, found=f"multiples of {_LARGE}")


def _vary(snapshot: Sequence[torch.Tensor]) -> bool:
    """Return whether floating-point outputs are finite and hold several values, so that a race would still show."""
    inexact = [tensor for tensor in snapshot if _is_inexact(tensor.dtype) and tensor.numel()]
    finite = all(bool(tensor.isfinite().all()) for tensor in inexact)
    return finite and any(bool((tensor != tensor.flatten()[0]).any()) for tensor in inexact)


def with_exact_values(call: CapturedCall, *, large: bool = False) -> CapturedCall:
    """Return the call with small integers in every floating-point or complex tensor, so that sums are exact in any
    order; with ``large`` ones, multiples of 1024 (of 16 in 16 bits) but 0.

    Indices, masks and tensors without plain memory are kept.

    Raises:
        InapplicableError: there is no such tensor.
    """
    generator = torch.Generator().manual_seed(20)
    contents = [memory.content.clone() for memory in call.memories]
    changed = False
    for form in call.tensors:
        if isinstance(form, TensorForm) and _can_hold_whole_numbers(form.dtype) and form.span()[1]:
            start, end = form.span()  # holes included
            _fill_with_whole_numbers(contents[form.storage][start:end].view(form.dtype), generator, large=large)
            changed = True
    if not changed:
        raise InapplicableError("no floating-point input in plain memory")
    memories = tuple(replace(memory, content=new) for memory, new in zip(call.memories, contents, strict=True))
    return replace(call, memories=memories)


def _fill_with_whole_numbers(tensor: torch.Tensor, generator: torch.Generator, *, large: bool) -> None:
    numbers = torch.view_as_real(tensor) if tensor.dtype.is_complex else tensor
    if large:
        step = _LARGE if numbers.itemsize > 2 else _LARGE_OF_16_BITS
        choices = torch.tensor([-2.0, -1.0, 1.0, 2.0]) * step
        numbers.copy_(choices[torch.randint(0, 4, numbers.shape, generator=generator)])
        return
    most = _SMALL if numbers.itemsize > 2 else _TINY
    numbers.copy_(torch.randint(-most, most + 1, numbers.shape, generator=generator).to(torch.float32))


def _is_inexact(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _can_hold_whole_numbers(dtype: torch.dtype) -> bool:
    try:
        return _is_inexact(dtype) and torch.tensor([-1.0, 0, 1], dtype=dtype).to(torch.float32).tolist() == [-1, 0, 1]
    except (RuntimeError, NotImplementedError):  # packed formats
        return False


def with_copied_sources(call: CapturedCall) -> CapturedCall:
    """Return the call with separate memory for every read-only argument that aliases a written one.

    Raises:
        InapplicableError: there is none.
    """
    written = written_slots(call)
    targets = {form.storage for index in written if isinstance(form := call.tensors[index], TensorForm)}
    memories, tensors = list(call.memories), list(call.tensors)
    for index, form in enumerate(call.tensors):
        if isinstance(form, TensorForm) and form.storage in targets and index not in written:
            tensors[index] = replace(form, storage=len(memories))
            memories.append(dataclasses.replace(call.memories[form.storage]))
    if len(memories) == len(call.memories):
        raise InapplicableError("nothing that is written shares memory with what is read")
    return replace(call, memories=tuple(memories), tensors=tuple(tensors))


# ------------------------------------------------------------------------------------------------ at other addresses

SHIFTS = (4, 8, 16, 32, 48, 64)
"""Bytes. The alignments that vector kernels distinguish; 64 is a whole cache line."""

MOST_MEMORIES = 8
"""Number of memories that are also moved individually; a fused optimizer has hundreds."""


def fresh_memory(name: str, replayer: Replayer, left: Budget) -> ExperimentResult:
    """Allocate new inputs for each replay, with other bytes in the memory that was freed before."""
    tally, call = replayer.against_in_place(), replayer.call
    sizes = [memory.content.nbytes for memory in call.memories]
    sizes += [held_bytes(tensor) for copy in replayer.repeated.copies[:1] for tensor in copy]
    held: list[LiveCall] = []

    def block(count: int) -> None:
        for _ in range(count):
            byte = (37 * len(tally.seconds) + 1) & 0xFF
            freed = [torch.full((size,), byte, dtype=torch.uint8, device=call.device) for size in sizes]
            del freed  # what is allocated next holds other bytes than before
            held.append(LiveCall(call))
            replayer.replay(tally, live=held[-1])
            del held[:-1]  # not before: the next memory must be another

    result = replayer.controlled(name, tally, left, block=block)
    replayer.keep(tally)
    return result


def possible_shifts(call: CapturedCall, memory: int | None) -> tuple[int, ...]:
    """Return the shifts of one memory (``None``: of all together) that keep elements aligned to their size."""
    sizes = {
        form.dtype.itemsize
        for form in call.tensors
        if isinstance(form, TensorForm) and memory in (None, form.storage) and form.span()[1]
    }
    return tuple(shift for shift in SHIFTS if sizes and all(shift % size == 0 for size in sizes))


def moved(name: str, replayer: Replayer, left: Budget) -> ExperimentResult:
    """Move inputs to other addresses, all together and each memory alone; compare with the single outcome in place."""
    tally, call = replayer.against_in_place(), replayer.call
    alone = range(min(len(call.memories), MOST_MEMORIES)) if len(call.memories) > 1 else ()
    moves = [(memory, shift) for memory in (None, *alone) for shift in possible_shifts(call, memory)]
    if not moves:
        raise InapplicableError("no plain memory to move")
    times = max(3, -(-replayer.replays // len(moves)))
    differing: list[tuple[int | None, int]] = []
    unsteady = tried = 0
    for memory, shift in moves:
        if tried and left.left() <= 0:
            break
        tried += 1
        there, live = Tally(), LiveCall(call, shift, only=memory)
        for _ in range(times):
            replayer.replay(there, live=live)
        if there.differing:  # then it is not the address alone that decides
            unsteady += 1
            continue
        for seconds in there.seconds:
            tally.add(there.outcomes[0], seconds=seconds, copy=lambda copies=there.copies: copies[0])  # type: ignore[misc]
        replayer.elsewhere += there.outcomes[:1]
        if there.reference != replayer.in_place:
            differing.append((memory, shift))
    note = f"{unsteady} shifts give several outcomes" if unsteady else ""
    note = NO_TIME if tried < len(moves) else note
    replayer.keep(tally)
    result = tally.result(name, found=_shifts_text(differing), note=note)
    return replace(result, moves=tuple(differing))


def _shifts_text(differing: Sequence[tuple[int | None, int]]) -> str:
    """Format the differing shifts: ``all by 4, 8 bytes; memory 0 by 4 bytes``."""
    by_memory: dict[int | None, list[str]] = {}
    for memory, shift in differing:
        by_memory.setdefault(memory, []).append(str(shift))
    named = {"all" if memory is None else f"memory {memory}": shifts for memory, shifts in by_memory.items()}
    return "; ".join(f"{name} by {', '.join(shifts)} bytes" for name, shifts in named.items())


# ------------------------------------------------------------------------------------------------------ generators

GUILTY_REPLAYS = 5


def generators(name: str, replayer: Replayer, left: Budget) -> ExperimentResult:
    """Restore every live generator object before each replay; name those that remove the difference on their own."""
    if not replayer.custom:
        raise InapplicableError(f"{_of_torch(replayer)} kernels draw from generators that are restored anyway")
    noted, tally = controls.Generators.alive(), Tally()

    def replay(count: int, *, into: Tally = tally, only: str | None = None) -> None:
        for _ in range(count):
            noted.restored(only=only)
            replayer.replay(into)

    def agrees(generator: str) -> bool:
        alone = Tally()
        noted.restored()
        replay(GUILTY_REPLAYS, into=alone, only=generator)
        return not alone.differing

    try:
        result = replayer.controlled(name, tally, left, block=replay)
        removed = replayer.repeated.differing and result.ran and not result.differing
        drawn_from = noted.changed() if removed else ()
        return replace(result, found=", ".join(list(filter(agrees, drawn_from)) or drawn_from))
    finally:
        noted.restored()


# ---------------------------------------------------------------------------------------------- uninitialised memory

POISON_WANTED, POISON_FEWEST = 12, 6
"""Replays per value. With 12, one in 1.4 million randomly varying elements seems to follow the value; with 6, one in
460, so that no element may vary."""

OF_FILLED = "the memory that the kernel is given to fill"
"""What is poisoned for a generated kernel."""

POISON_LUCK = 0.01
"""Largest accepted chance that a randomly varying element seems to follow the value. An element with two outcomes
splits into the two halves of N replays each with chance 2 / C(2N, N): one in 10**10 for N = 20."""


@dataclass(slots=True)
class _StableBits:
    """Bits that stayed the same in all replays under one value."""

    bits: list[torch.Tensor] = field(default_factory=list)
    stable: list[torch.Tensor] = field(default_factory=list)
    replays: int = 0

    def add(self, bits: list[torch.Tensor]) -> None:
        self.replays += 1
        if self.replays == 1:
            self.bits = bits
            self.stable = [torch.ones(len(part), dtype=torch.bool, device=part.device) for part in bits]
        _require_same_form(self.bits, bits)
        for stable, old, new in zip(self.stable, self.bits, bits, strict=True):
            stable &= (old == new).all(dim=1)


def _require_same_form(first: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> None:
    if not have_same_form(first, other):
        raise InapplicableError("replays give outputs of other sizes")


def poison(name: str, replayer: Replayer, left: Budget) -> ExperimentResult:
    """Fill fresh memory with two values, in a balanced order, and count the elements that follow the value.

    A generated kernel takes no memory for itself: what it is given to fill holds the value.

    An element follows if it has one value in all replays under the first fill and another in all replays under the
    second. Trials are the replays under the second fill; all of them differ, or none.
    """
    call, live = replayer.call, replayer.live
    if plan_for(call.func).blank:
        raise InapplicableError("the op hands out memory for others to write")
    sides = (_StableBits(), _StableBits())
    for number in range(2 * max(replayer.replays, POISON_WANTED)):
        if number % 4 == 0 and number and left.left() <= 0:
            break
        which = (0, 1, 1, 0)[number % 4]
        live.reset()
        with controls.poisoned_memory(controls.POISONS[which], device=call.device):
            for index in filled_slots(call):
                controls.fill_bytes(live.tensors[index], controls.POISONS[which])
            outcome = live.run()
        sides[which].add(snapshot_bits(replayer.snapshot(live, outcome, outcome.digests())))
    first, second = sides
    if second.replays < POISON_FEWEST:
        raise InapplicableError(NO_TIME)
    _require_same_form(first.bits, second.bits)
    following = varying = 0
    for tensor, other, stable, also in zip(first.bits, second.bits, first.stable, second.stable, strict=True):
        following += int((stable & also & (tensor != other).any(dim=1)).sum())
        varying += int((~(stable & also)).sum())
    trials = second.replays
    if following and varying and (varying + following) * 2 / comb(2 * trials, trials) > POISON_LUCK:
        raise InapplicableError(NO_TIME)
    counts = (trials, trials, 2) if following else (trials, 0, 1)
    found = f"{following} of {sum(map(len, first.bits))} elements" if following else ""
    reach = OF_FILLED if filled_slots(call) else controls.poison_reach(call.device.type)
    return ExperimentResult(name, "call", *counts, found=found, note=reach)


# -------------------------------------------------------------------------------------------------------- the table

METHODS: Mapping[str, Method] = {
    "one_thread": ReplayChange(controls.one_thread, compiled=lambda kernel: kernel.single_thread),
    "exact_values": exact_values,
    "copied_sources": ReplayChange(call=with_copied_sources),
    "poison": poison,
    "generators": generators,
    "entropy": ReplayChange(controls.constant_entropy, outside=True),
    "clocks": ReplayChange(controls.ticking_clocks, outside=True),
    "one_worker": ReplayChange(controls.single_worker_pools, outside=True),
    "moved": moved,
    "busy": ReplayChange(controls.busy_threads, disturbs=True),
    "busy_stream": busy_stream,
    "fresh_memory": fresh_memory,
    "deterministic": _settings(deterministic_algorithms="on", fill_uninitialized_memory="False"),
    "deterministic_fill": _settings(deterministic_algorithms="on", fill_uninitialized_memory="True"),
    "nondeterministic": _settings(deterministic_algorithms="off", fill_uninitialized_memory="False"),
    "cudnn_deterministic": _settings(cudnn__benchmark="False", cudnn__deterministic="True"),
    "onednn_deterministic": _settings(mkldnn__deterministic="True"),
    "onednn_off": _settings(mkldnn__enabled="False"),
    "cudnn_off": _settings(cudnn__enabled="False"),
    "cudnn_benchmark": _settings(cudnn__benchmark="True", cudnn__deterministic="False"),
    "sdpa_math": _attention(SDPBackend.MATH),
    "sdpa_flash": _attention(SDPBackend.FLASH_ATTENTION),
    "sdpa_efficient": _attention(SDPBackend.EFFICIENT_ATTENTION),
    "sdpa_cudnn": _attention(SDPBackend.CUDNN_ATTENTION),
    "tf32_off": ReplayChange(functools.partial(tf32, on=False)),
    "tf32_on": ReplayChange(functools.partial(tf32, on=True)),
}
"""Implementation of each call experiment of ``catalog.EXPERIMENTS``, in the same order."""
