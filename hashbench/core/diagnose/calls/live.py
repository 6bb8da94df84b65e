"""Live copies of a captured call: run them, restore them, digest what they leave."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hashbench.core.diagnose.calls.call import (
    LINE,
    CapturedCall,
    GeneratorSlot,
    Memory,
    Slot,
    TensorForm,
    byte_span,
    generator_slots,
    plan_for,
)
from hashbench.core.records import TensorDigest
from hashbench.core.run.rng import preserved_rng, random_states, restore_random_states
from hashbench.core.run.settings import applied
from hashbench.core.trace.arguments import argument_text, leaves, mapped, tensors_in
from hashbench.core.trace.digest import hash_memory, is_dense, raw_digest, readable, undefined, unobserved
from hashbench.core.trace.op_schema import OpPlan


def wait_for(devices: Sequence[torch.device]) -> None:
    """Synchronise these accelerators, all streams."""
    for device in devices:
        torch.accelerator.synchronize(device)


class LiveCall:
    """A live copy of a captured call, used in :func:`captured_environment`.

    :meth:`reset` restores contents, sizes and generators in place; storages stay the same unless a run resized them.

    Args:
        call: the call.
        shift: bytes by which memories are moved from their captured alignment.
        only: index of the single memory to move; by default all are.
        rooms: flat memory to use, one per memory of the call, in place of new memory. It may be that of the call
            itself, which a run then overwrites.

    Attributes:
        tensors: copied argument tensors of the next run.
        args: positional arguments of the next run.
        kwargs: keyword arguments of the next run.

    Raises:
        ValueError: on an accelerator, a moved memory is misaligned for the dtype of its elements.
    """

    def __init__(
        self,
        call: CapturedCall,
        shift: int = 0,
        *,
        only: int | None = None,
        rooms: Sequence[torch.Tensor] | None = None,
    ) -> None:
        self.call, self._plan, self._devices = call, plan_for(call.func), call.accelerators
        self._memories = [
            LiveMemory(memory, shift if only in (None, index) else 0, room=rooms[index] if rooms is not None else None)
            for index, memory in enumerate(call.memories)
        ]
        self.tensors: list[torch.Tensor] = []
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}
        self.reset()

    @functools.cached_property
    def content(self) -> tuple[TensorDigest, ...]:
        """Digests of ``tensors`` before a run, from the captured memory."""
        memories = [memory.content for memory in self.call.memories]
        return tuple(_digest_in_place(_tensor(held, memories)) for held in self.call.tensors)

    def reset(self) -> None:
        """Restore the captured contents, sizes and generator states in the same memory, and wait for that."""
        for memory in self._memories:
            memory.restore()
        memories, copies = [memory.tensor for memory in self._memories], dict[int, torch.Tensor]()
        self.tensors = [
            _tensor(held, memories) if isinstance(held, TensorForm) else copies.setdefault(id(held), _clone(held))
            for held in self.call.tensors
        ]
        self.args, self.kwargs = self.call.args, self.call.kwargs
        if self.tensors or self.call.generators:
            self._fill_slots()
        restore_random_states(self.call.random_states)
        wait_for(self._devices)

    def _fill_slots(self) -> None:
        slots = generator_slots([self.args, self.kwargs]) if self.call.generators else []
        generators = {
            slot.index: torch.Generator(slot.device).set_state(self.call.generators[slot.index]) for slot in slots
        }

        def argument(leaf: Any) -> Any:
            if isinstance(leaf, Slot):
                return self.tensors[leaf.index]
            return generators[leaf.index] if isinstance(leaf, GeneratorSlot) else leaf

        self.args, self.kwargs = mapped(self.args, argument), mapped(self.kwargs, argument)

    def run(self, *, clock: Callable[[], float] = perf_counter) -> CallOutcome:
        """Make the call, an op below autograd and autocast as under a dispatch mode, and wait for it.

        Args:
            clock: returns seconds.
        """
        for memory in self._memories:
            memory.touched = True
        is_op = isinstance(self.call.func, torch._ops.OperatorBase)
        with torch._C._ExcludeDispatchKeyGuard(keys_below_a_mode()) if is_op else nullcontext():
            start = clock()
            output = self.call.func(*self.args, **self.kwargs)
            wait_for(self._devices)
            seconds = max(0.0, clock() - start)  # a model may have stopped the clock or set it back
        return CallOutcome(self._plan, self.args, self.kwargs, output, self.tensors, seconds)

    def mark_unchanged(self, arguments: Sequence[TensorDigest]) -> None:
        """Skip the next restore of memories whose tensors are unchanged: most of the cost of replaying a large call.

        Args:
            arguments: digests of ``tensors`` after a run (:attr:`OutcomeDigests.arguments`).
        """
        changed = {
            form.storage
            for form, before, after in zip(self.call.tensors, self.content, arguments, strict=True)
            if isinstance(form, TensorForm) and before != after
        }
        for place, memory in enumerate(self._memories):
            memory.touched = place in changed


# --------------------------------------------------------------------------------------------------------- memory


class LiveMemory:
    """The live bytes of one memory, ``shift`` bytes off its captured alignment, or in the flat memory ``room``."""

    def __init__(self, memory: Memory, shift: int = 0, *, room: torch.Tensor | None = None) -> None:
        self._content, self._address = memory.content, memory.alignment + shift
        self.touched = room is not memory.content
        self._put(self._allocated() if room is None else room)

    def restore(self) -> None:
        """Restore the captured bytes: in place, or in new memory if a run resized the storage."""
        storage = self.tensor.untyped_storage()
        if (storage.data_ptr(), storage.nbytes()) != self._given:
            self._put(self._allocated())
            self.touched = True
        if self.touched:
            _copy_bytes(self.tensor, self._content)
            self.touched = False

    def _allocated(self) -> torch.Tensor:
        return flat_memory(self._content.nbytes, self._content.device, address=self._address)

    def _put(self, tensor: torch.Tensor) -> None:
        self.tensor, storage = tensor, tensor.untyped_storage()
        self._given = (storage.data_ptr(), storage.nbytes())


def _copy_bytes(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy flat bytes; on the host without a kernel of torch, which may be the one that is examined."""
    if target.is_cpu and source.is_cpu:
        ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)
    else:
        target.copy_(source)


def flat_memory(nbytes: int, device: torch.device, *, address: int) -> torch.Tensor:
    """Allocate ``nbytes`` bytes (``uint8``) at an address congruent to ``address`` modulo 64.

    Uses a plain torch allocation where its alignment fits: only such a storage can be resized.
    """
    wanted = address % LINE
    if not wanted or not nbytes:
        plain = torch.empty(nbytes, dtype=torch.uint8, device=device)
        if not nbytes or plain.data_ptr() % LINE == wanted:
            return plain
    room = torch.empty(nbytes + LINE, dtype=torch.uint8, device=device)
    start = (wanted - room.data_ptr()) % LINE
    if room.is_cpu:  # by way of NumPy the storage itself begins there, wherever that is
        return torch.from_numpy(room.numpy()[start : start + nbytes])
    return room[start : start + nbytes]


def laid_over(memory: torch.Tensor, form: TensorForm) -> torch.Tensor:
    """Return the tensor described by ``form`` as a view of flat bytes."""
    start = memory.storage_offset()
    if start % form.dtype.itemsize:
        raise ValueError(f"{form.dtype} cannot begin at byte {start}")
    tensor = torch.empty(0, dtype=form.dtype, device=memory.device)
    tensor.set_(memory.untyped_storage(), start // form.dtype.itemsize + form.offset, form.shape, form.stride)
    if form.conj:
        tensor = torch.conj(tensor)
    if form.neg:
        tensor = torch._neg_view(tensor)
    if form.parameter:
        return torch.nn.Parameter(tensor, requires_grad=form.requires_grad)
    return tensor.requires_grad_(form.requires_grad)


def _tensor(held: TensorForm | torch.Tensor, memories: Sequence[torch.Tensor]) -> torch.Tensor:
    return laid_over(memories[held.storage], held) if isinstance(held, TensorForm) else held


def _clone(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


# ---------------------------------------------------------------------------------------------------- environment


class HasEnvironment(Protocol):
    """What :func:`captured_environment` restores of a call: torch's settings, and the current device."""

    @property
    def settings(self) -> Mapping[str, str]: ...

    @property
    def device(self) -> torch.device: ...


@contextmanager
def captured_environment(call: HasEnvironment | None = None) -> Iterator[None]:
    """Restore the captured conditions: settings, no grad, no dispatch mode, and the call's device as the current
    device.

    Kernels of custom ops may rely on the current device. On exit, settings, global generators and device are restored.
    """
    settings, index = (call.settings, call.device.index) if call is not None else ({}, None)
    with ExitStack() as stack:
        stack.enter_context(torch.accelerator.device_index(index))
        stack.enter_context(unobserved())
        stack.enter_context(preserved_rng())
        stack.enter_context(applied(settings))
        stack.enter_context(torch.inference_mode(settings.get("inference_mode") == "True"))
        stack.enter_context(torch.no_grad())
        yield


class _Probe(TorchDispatchMode):
    """Reads the dispatch keys that torch excludes once a mode has intercepted a call."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the base class would import all of torch._dynamo, which takes seconds

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.excluded = torch._C._dispatch_tls_local_exclude_set()
        return func(*args, **(kwargs or {}))


@functools.cache
def keys_below_a_mode() -> Any:
    """Return the dispatch keys above those of dispatch modes: autograd, autocast, conjugation and others.

    A composite kernel takes other branches without them (the complex pseudo-inverse gives other values), so a replay
    must exclude them too. Not the key that saves the thread's keys for a mode: torch 2.11 asserts that it did.
    """
    with _Probe() as probe:  # type: ignore[no-untyped-call]
        torch.empty(0)
    return probe.excluded.remove(torch._C.DispatchKey.PythonTLSSnapshot)


def generator_states(
    args: Sequence[Any], kwargs: Mapping[str, Any], *, device: torch.device | None = None, outside_torch: bool
) -> dict[str, torch.Tensor]:
    """Return the states of all generators that a call may draw from, by name: those among its arguments (``argument
    0``, ``argument 1`` and so on), and the default ones (:func:`~hashbench.core.run.rng.random_states`)."""
    given = (leaf for leaf in leaves([*args, *kwargs.values()]) if isinstance(leaf, torch.Generator))
    named = {f"argument {number}": generator.get_state() for number, generator in enumerate(given)}
    return random_states(device, outside_torch=outside_torch) | named


# ------------------------------------------------------------------------------------------------------- outcomes


@dataclass(frozen=True, slots=True)
class OutcomeDigests:
    """Digests of what a call left; hashable.

    Attributes:
        written: as recorded by a trace: fresh outputs, then written arguments in schema order.
        outputs: all returned tensors.
        arguments: all argument tensors after the call, with their holes, also those that the schema does not declare
            as written.
        scalar: text of a returned Python scalar.
    """

    written: tuple[TensorDigest, ...]
    outputs: tuple[TensorDigest, ...]
    arguments: tuple[TensorDigest, ...]
    scalar: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class CallOutcome:
    """What one run of a call left, in its own memory: the next run in it overwrites that.

    Attributes:
        plan: what the callee declares.
        args: positional arguments after the run.
        kwargs: keyword arguments after the run.
        output: the returned value.
        tensors: the copied tensors among the arguments (:attr:`LiveCall.tensors`).
        seconds: time of the run.
    """

    plan: OpPlan
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    output: Any
    tensors: Sequence[torch.Tensor] = ()
    seconds: float = 0.0

    @property
    def written(self) -> list[torch.Tensor]:
        """What a trace records as written: new outputs, then arguments that are declared as written."""
        return self._defined(self.plan.written_by(self.args, self.kwargs, self.output))

    @property
    def left(self) -> list[torch.Tensor]:
        """All returned tensors, views included, then arguments that are declared as written and not returned."""
        returned, targets = tensors_in(self.output), self.plan.written_tensors(self.args, self.kwargs)
        known = {id(tensor) for tensor in returned}
        return self._defined([*returned, *(target for target in targets if id(target) not in known)])

    def _defined(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Put an empty tensor in place of each whose content is undefined (:meth:`OpPlan.unused_state`)."""
        unused = self.plan.unused_state(self.args, self.kwargs, self.output)
        return [tensor.new_empty(0) if id(tensor) in unused else tensor for tensor in tensors]

    def digests(self) -> OutcomeDigests:
        """Digest the outputs and the copied arguments."""
        written, outputs = self.plan.written_by(self.args, self.kwargs, self.output), tensors_in(self.output)
        unused = self.plan.unused_state(self.args, self.kwargs, self.output)
        known = {
            id(tensor): readable(undefined(tensor) if id(tensor) in unused else raw_digest(tensor))
            for tensor in [*written, *outputs]
        }
        scalars = [leaf for leaf in leaves(self.output) if not isinstance(leaf, torch.Tensor)]
        return OutcomeDigests(
            written=tuple(known[id(tensor)] for tensor in written),
            outputs=tuple(known[id(tensor)] for tensor in outputs),
            arguments=tuple(known.get(id(tensor)) or _digest_in_place(tensor) for tensor in self.tensors),
            scalar="" if self.output is None else argument_text(scalars),
        )


def _digest_in_place(tensor: torch.Tensor) -> TensorDigest:
    """Digest an argument; a tensor with holes is hashed with its holes.

    Packing 9 million elements of a strided transposed view takes ten times as long as most ops on them.
    """
    plain = tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_quantized) and tensor.is_cpu
    if not plain or not tensor.numel() or tensor.is_contiguous() or is_dense(tensor):
        return readable(raw_digest(tensor))
    start, end = byte_span(tensor.shape, tensor.stride(), 0, tensor.itemsize)
    value = hash_memory(tensor.data_ptr(), end - start)
    return readable((tensor.dtype, tuple(tensor.shape), tensor.stride(), value))
