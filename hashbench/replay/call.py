"""A captured call: one dispatched op call as data, and live copies of it that can be rerun.

Tensors are views (:class:`TensorForm`) over memories, so that aliasing arguments alias again, holes and overlaps
included. Use live copies under :func:`in_force`, which disables dispatch modes and applies the captured settings.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hashbench.records import TensorDigest
from hashbench.run.rng import preserved_rng, restore_random_states
from hashbench.run.settings import applied
from hashbench.trace.arguments import argument_text, leaves, mapped, tensors_in
from hashbench.trace.digest import components, hash_memory, is_dense, raw_digest, readable, unobserved
from hashbench.trace.op_schema import plan_of

LINE = 64
"""Bytes. Alignment of torch's allocations, and the largest that any kernel requires; windows begin at a multiple of it.
"""

MIB = 2**20


@dataclass(frozen=True, slots=True)
class Slot:
    """Placeholder for ``tensors[index]`` among the arguments."""

    index: int


@dataclass(frozen=True, slots=True)
class GeneratorSlot:
    """Placeholder for a ``torch.Generator`` argument on ``device`` with the state ``generators[index]``."""

    index: int
    device: str = "cpu"


@dataclass(frozen=True, slots=True)
class TensorForm:
    """A strided tensor over ``memories[storage]``.

    Attributes:
        storage: index of the memory.
        dtype: as in the original, like ``shape`` (elements) and ``stride`` (elements).
        offset: elements of ``dtype`` from the start of the memory.
        requires_grad: as in the original.
        parameter: the original is a ``torch.nn.Parameter``.
        conj: the tensor is a conjugate view; the bytes are those of its base.
        neg: the tensor is a negative view; the bytes are those of its base.
    """

    storage: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int = 0
    requires_grad: bool = False
    parameter: bool = False
    conj: bool = False
    neg: bool = False

    def span(self) -> tuple[int, int]:
        """Return the byte range ``[first, end)`` within the memory; both are 0 if there are no elements."""
        return byte_span(self.shape, self.stride, self.offset, self.dtype.itemsize)


@dataclass(frozen=True, slots=True, eq=False)
class Memory:
    """A window of a storage.

    Attributes:
        content: its bytes, flat ``uint8`` on the device of the call.
        alignment: original address of the first byte modulo 4096.
    """

    content: torch.Tensor
    alignment: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class CapturedCall:
    """One op call with everything that it depends on.

    Attributes:
        op: ``str(func)``.
        func: the op overload.
        args: positional arguments; containers are kept, tensors are :class:`Slot`, generators :class:`GeneratorSlot`.
        kwargs: keyword arguments, likewise.
        tensors: a :class:`TensorForm` for plain strided memory, a clone for any other tensor.
        memories: the windows of storage that ``tensors`` index.
        generators: states of generator arguments.
        random_states: states of the default generators (:func:`hashbench.run.rng.random_states`).
        settings: torch settings at the call (:func:`hashbench.run.settings.settings`).
        grad_enabled: whether gradients were enabled.
        threads: ``torch.get_num_threads()`` at the call.
        node: id of its record. Like the fields below, filled in by the caller with ``dataclasses.replace``.
        phase: ``forward``, ``backward`` or ``optimizer``.
        module: path of the module.
        forward_op: id of the forward record of a backward op.
        source: source line.
    """

    op: str
    func: Any = field(repr=False)
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: tuple[TensorForm | torch.Tensor, ...] = field(repr=False)
    memories: tuple[Memory, ...] = field(repr=False)
    generators: tuple[torch.Tensor, ...] = field(default=(), repr=False)
    random_states: dict[str, torch.Tensor] = field(default_factory=dict, repr=False)
    settings: dict[str, str] = field(default_factory=dict, repr=False)
    grad_enabled: bool = False
    threads: int = 1
    node: str = ""
    phase: str = ""
    module: str = ""
    forward_op: str = ""
    source: str = ""

    @property
    def device(self) -> torch.device:
        """The first accelerator of the call, else the CPU."""
        return next(iter(self.accelerators), torch.device("cpu"))

    @property
    def accelerators(self) -> tuple[torch.device, ...]:
        """The distinct devices of tensors and arguments, with their index, without the CPU."""
        held = [memory.content for memory in self.memories]
        held += [tensor for tensor in self.tensors if isinstance(tensor, torch.Tensor)]
        given = [value for value in self.kwargs.values() if isinstance(value, torch.device)]
        named = [
            device for device in [*(tensor.device for tensor in held), *given] if device.type not in ("cpu", "meta")
        ]
        current = torch.accelerator.current_device_index
        return tuple(
            dict.fromkeys(torch.device(one.type, current() if one.index is None else one.index) for one in named)
        )

    @property
    def nbytes(self) -> int:
        """Total bytes of the captured tensors."""
        clones = (tensor for tensor in self.tensors if isinstance(tensor, torch.Tensor))
        return sum(memory.content.nbytes for memory in self.memories) + sum(map(held_bytes, clones))

    def materialise(self, moved: int = 0, *, only: int | None = None) -> Materialised:
        """Return a live copy whose memories are shifted by ``moved`` bytes from the captured alignment, strides kept.

        Args:
            moved: shift in bytes.
            only: index of the single memory to shift; by default all are.
        """
        shifts = [moved if only in (None, index) else 0 for index in range(len(self.memories))]
        return Materialised(self, shifts)


@dataclass(frozen=True, slots=True)
class CallOutcome:
    """Digests of what a call produced.

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


def wait_for(devices: Sequence[torch.device]) -> None:
    """Synchronise these accelerators, all streams."""
    for device in devices:
        torch.accelerator.synchronize(device)


def byte_span(shape: Sequence[int], stride: Sequence[int], offset: int, itemsize: int) -> tuple[int, int]:
    """Return the byte range ``[first, end)`` of a strided tensor, relative to the origin of ``offset`` (elements)."""
    if 0 in shape:
        return 0, 0
    last = sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    return offset * itemsize, (offset + last + 1) * itemsize


def held_bytes(tensor: torch.Tensor) -> int:
    """Return the storage bytes of a tensor of any layout."""
    try:
        return sum(part.untyped_storage().nbytes() for part in components(tensor))
    except (RuntimeError, NotImplementedError):
        return tensor.numel() * tensor.itemsize


# ----------------------------------------------------------------------------------------------------- live copies


class Materialised:
    """A live copy of a captured call.

    :meth:`reset` restores contents, sizes and generators in place; storages stay the same unless a run resized them.
    :meth:`run` makes the call on them.

    Attributes:
        tensors: argument tensors of the next run.
        args: positional arguments of the next run.
        kwargs: keyword arguments of the next run.
        content: digests of ``tensors`` before a run.

    Raises:
        ValueError: on an accelerator, a shifted memory is misaligned for the dtype of its elements.
    """

    def __init__(self, call: CapturedCall, shifts: Sequence[int]) -> None:
        self.call = call
        self._bases = [LiveMemory(memory, shift) for memory, shift in zip(call.memories, shifts, strict=True)]
        self.tensors: list[torch.Tensor] = []
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}
        self.reset()
        self.content = tuple(_digest_in_place(tensor) for tensor in self.tensors)

    def reset(self) -> None:
        """Restore the captured contents, sizes and generator states in the same memory."""
        for base in self._bases:
            base.restore()
        self.tensors = [
            laid_over(self._bases[held.storage].tensor, held)
            if isinstance(held, TensorForm)
            else held.detach().clone().requires_grad_(held.requires_grad)
            for held in self.call.tensors
        ]
        slots = generator_slots([self.call.args, self.call.kwargs])
        generators = [(torch.Generator(slot.device), slot) for slot in slots]
        made = {slot.index: generator.set_state(self.call.generators[slot.index]) for generator, slot in generators}
        argument = functools.partial(self._argument, generators=made)
        self.args, self.kwargs = mapped(self.call.args, argument), mapped(self.call.kwargs, argument)
        restore_random_states(self.call.random_states)

    def mark_unchanged(self, arguments: Sequence[TensorDigest]) -> None:
        """Skip the next restore of memories whose tensors are unchanged: most of the cost of replaying a large call.

        Args:
            arguments: digests of ``tensors`` after a run (:attr:`CallOutcome.arguments`).
        """
        changed = {
            form.storage
            for form, before, after in zip(self.call.tensors, self.content, arguments, strict=True)
            if isinstance(form, TensorForm) and before != after
        }
        for place, base in enumerate(self._bases):
            base.touched = place in changed

    def run(self) -> Any:
        """Make the call below autograd and autocast, as under a dispatch mode."""
        for base in self._bases:
            base.touched = True
        with torch._C._ExcludeDispatchKeyGuard(keys_below_a_mode()):
            return self.call.func(*self.args, **self.kwargs)

    def _argument(self, leaf: Any, generators: Mapping[int, torch.Generator]) -> Any:
        if isinstance(leaf, Slot):
            return self.tensors[leaf.index]
        return generators[leaf.index] if isinstance(leaf, GeneratorSlot) else leaf


class LiveMemory:
    """The live bytes of one memory, ``shift`` bytes off its captured alignment."""

    def __init__(self, memory: Memory, shift: int = 0) -> None:
        self.memory, self.shift = memory, shift
        self.touched = True
        self.tensor = self._allocate()

    def restore(self) -> None:
        """Restore the captured bytes: in place, or in new memory if a run resized the storage."""
        storage = self.tensor.untyped_storage()
        if (storage.data_ptr(), storage.nbytes()) != self._given:
            self.tensor, self.touched = self._allocate(), True
        if self.touched:
            self.tensor.copy_(self.memory.content)
            self.touched = False

    def _allocate(self) -> torch.Tensor:
        memory = _aligned(
            self.memory.content, (self.memory.alignment + self.shift) % LINE, exact=self.shift % LINE == 0
        )
        storage = memory.untyped_storage()
        self._given = (storage.data_ptr(), storage.nbytes())
        return memory


def _aligned(like: torch.Tensor, wanted: int, *, exact: bool) -> torch.Tensor:
    """Allocate memory of the size of ``like`` at an address congruent to ``wanted`` modulo 64.

    Uses a plain torch allocation where its alignment fits: only such a storage can be resized.
    """
    if exact or not like.nbytes:
        plain = torch.empty_like(like)
        if plain.data_ptr() % LINE == wanted or not like.nbytes:
            return plain
    room = torch.empty(like.nbytes + LINE, dtype=torch.uint8, device=like.device)
    start = (wanted - room.data_ptr()) % LINE
    if room.is_cpu:  # by way of NumPy the storage itself begins there, wherever that is
        return torch.from_numpy(room.numpy()[start : start + like.nbytes])
    return room[start : start + like.nbytes]


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


def generator_slots(value: Any) -> list[GeneratorSlot]:
    """Collect the generator slots among nested arguments."""
    return [leaf for leaf in leaves(value) if isinstance(leaf, GeneratorSlot)]


@contextmanager
def in_force(call: CapturedCall) -> Iterator[None]:
    """Restore the captured conditions: settings, no grad, no dispatch mode, and the call's device as the current
    device.

    Kernels of custom ops may rely on the current device. On exit, settings, global generators and device are restored.
    """
    with ExitStack() as stack:
        stack.enter_context(torch.accelerator.device_index(call.device.index))
        stack.enter_context(unobserved())
        stack.enter_context(preserved_rng())
        stack.enter_context(applied(call.settings))
        stack.enter_context(torch.inference_mode(call.settings.get("inference_mode") == "True"))
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


# ------------------------------------------------------------------------------------------------------- outcomes


def outcome_of(output: Any, live: Materialised) -> CallOutcome:
    """Digest the effects of a run of ``live`` that returned ``output``."""
    written, outputs = written_tensors(output, live), tensors_in(output)
    digests = {id(tensor): readable(raw_digest(tensor)) for tensor in [*written, *outputs]}
    scalars = [leaf for leaf in leaves(output) if not isinstance(leaf, torch.Tensor)]
    return CallOutcome(
        written=tuple(digests[id(tensor)] for tensor in written),
        outputs=tuple(digests[id(tensor)] for tensor in outputs),
        arguments=tuple(digests.get(id(tensor)) or _digest_in_place(tensor) for tensor in live.tensors),
        scalar="" if output is None else argument_text(scalars),
    )


def written_tensors(output: Any, live: Materialised) -> list[torch.Tensor]:
    """Return the tensors that a trace records as written: new outputs, then arguments that the schema declares as
    written."""
    return plan_of(live.call.func).written_by(live.args, live.kwargs, output)


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
