"""A captured call: one dispatched call of an op as data, and live copies of it that can be run again.

Tensors are forms over memories, so that arguments that shared memory share it again, holes and overlaps included.
Live copies are for use under :func:`in_force`, which disables dispatch modes and puts the captured settings in force.
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
"""Bytes. torch aligns its memory to as many, and no kernel asks for more; windows begin at a multiple of it."""

MIB = 2**20


@dataclass(frozen=True, slots=True)
class Slot:
    """Stands for ``tensors[index]`` among the arguments."""

    index: int


@dataclass(frozen=True, slots=True)
class GeneratorSlot:
    """Stands for a ``torch.Generator`` argument on ``device``, whose state is ``generators[index]``."""

    index: int
    device: str = "cpu"


@dataclass(frozen=True, slots=True)
class TensorForm:
    """A strided tensor over ``memories[storage]``. ``offset`` counts elements of ``dtype`` from the memory's start.

    ``requires_grad`` and ``parameter`` (a ``torch.nn.Parameter``) are as in the original. ``conj`` and ``neg`` mark
    views whose bytes are those of the tensor that they conjugate or negate.
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
        """First byte and the one after the last, from the memory's start; equal where there are no elements."""
        return byte_span(self.shape, self.stride, self.offset, self.dtype.itemsize)


@dataclass(frozen=True, slots=True, eq=False)
class Memory:
    """A window of a storage: its bytes (flat ``uint8`` on the call's device), and the address of its first byte
    modulo 4096 in the original."""

    content: torch.Tensor
    alignment: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class CapturedCall:
    """One call of an op with everything that it depends on.

    ``op`` is ``str(func)``. ``args`` and ``kwargs`` keep their containers; tensors in them are :class:`Slot`,
    generators :class:`GeneratorSlot`, everything else is as it was. ``tensors`` holds a form where there is plain
    memory and a clone where there is none. ``random_states`` are the states of the default generators, as
    ``run.rng`` reads them. ``settings`` are those of ``run.settings`` at the call. The last five fields
    say where the call stood in the model; the caller fills them in with ``dataclasses.replace``.
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
        """The first device of the call that is not the host; else the host."""
        return next(iter(self.accelerators), torch.device("cpu"))

    @property
    def accelerators(self) -> tuple[torch.device, ...]:
        """The devices of its tensors and arguments, without the host, each once and with its index."""
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
        """Bytes of everything that is held."""
        clones = (tensor for tensor in self.tensors if isinstance(tensor, torch.Tensor))
        return sum(memory.content.nbytes for memory in self.memories) + sum(map(held_bytes, clones))

    def materialise(self, moved: int = 0, *, only: int | None = None) -> Materialised:
        """A live copy. ``moved`` shifts its memories by so many bytes from the captured alignment, strides kept; with
        ``only``, that memory alone."""
        shifts = [moved if only in (None, index) else 0 for index in range(len(self.memories))]
        return Materialised(self, shifts)


@dataclass(frozen=True, slots=True)
class CallOutcome:
    """What a call left, as digests: ``written`` as a trace records it (fresh outputs, then written arguments in the
    schema's order), ``outputs`` all that it returned, ``arguments`` all tensors among its arguments afterwards, also
    those that the schema does not call written (with their holes), and the text of a returned ``scalar``."""

    written: tuple[TensorDigest, ...]
    outputs: tuple[TensorDigest, ...]
    arguments: tuple[TensorDigest, ...]
    scalar: str = ""


def wait_for(devices: Sequence[torch.device]) -> None:
    """Until all that these accelerators were told to do is done, on every stream."""
    for device in devices:
        torch.accelerator.synchronize(device)


def byte_span(shape: Sequence[int], stride: Sequence[int], offset: int, itemsize: int) -> tuple[int, int]:
    """The bytes that a strided tensor touches, first and one after the last, counted from where ``offset`` counts."""
    if 0 in shape:
        return 0, 0
    last = sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    return offset * itemsize, (offset + last + 1) * itemsize


def held_bytes(tensor: torch.Tensor) -> int:
    """Bytes of memory that hold a tensor of any kind."""
    try:
        return sum(part.untyped_storage().nbytes() for part in components(tensor))
    except (RuntimeError, NotImplementedError):
        return tensor.numel() * tensor.itemsize


# ----------------------------------------------------------------------------------------------------- live copies


class Materialised:
    """A live copy of a captured call.

    :meth:`reset` puts contents, sizes and generators back in place; the storages stay the same ones, except where a run
    gave them another size. :meth:`run` makes the call on them. ``tensors``, ``args`` and ``kwargs`` are those of the
    next run, ``content`` the digests of the tensors before it.

    Raises:
        ValueError: a memory on an accelerator is to lie where its elements do not.
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
        """As captured, in the same memory."""
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

    def found(self, arguments: Sequence[TensorDigest]) -> None:
        """Told by ``outcome_of`` what a run left in the tensors: memories whose tensors all have their content still
        need no reset, which is most of the cost of replaying a large call."""
        changed = {
            form.storage
            for form, before, after in zip(self.call.tensors, self.content, arguments, strict=True)
            if isinstance(form, TensorForm) and before != after
        }
        for place, base in enumerate(self._bases):
            base.touched = place in changed

    def run(self) -> Any:
        """Make the call, below autograd and autocast, as a dispatch mode makes it."""
        for base in self._bases:
            base.touched = True
        with torch._C._ExcludeDispatchKeyGuard(keys_below_a_mode()):
            return self.call.func(*self.args, **self.kwargs)

    def _argument(self, leaf: Any, generators: Mapping[int, torch.Generator]) -> Any:
        if isinstance(leaf, Slot):
            return self.tensors[leaf.index]
        return generators[leaf.index] if isinstance(leaf, GeneratorSlot) else leaf


class LiveMemory:
    """The live bytes of one memory, ``shift`` bytes from the alignment that it was captured at."""

    def __init__(self, memory: Memory, shift: int = 0) -> None:
        self.memory, self.shift = memory, shift
        self.touched = True
        self.tensor = self._allocate()

    def restore(self) -> None:
        """The captured bytes, in place; in new memory where a run resized the storage."""
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
    """Memory of the size of ``like`` at an address of ``wanted`` modulo 64. As torch allocates it where that will do:
    only then can the storage be given another size."""
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
    """The tensor that ``form`` describes over flat bytes, sharing them."""
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
    """The generators among nested arguments."""
    return [leaf for leaf in leaves(value) if isinstance(leaf, GeneratorSlot)]


@contextmanager
def in_force(call: CapturedCall) -> Iterator[None]:
    """As it was where the call was captured: its settings, no gradients, no dispatch mode active, and its device the
    current one, which kernels of custom ops may rely on. On leaving, settings, global generators and device are as
    before."""
    with ExitStack() as stack:
        stack.enter_context(torch.accelerator.device_index(call.device.index))
        stack.enter_context(unobserved())
        stack.enter_context(preserved_rng())
        stack.enter_context(applied(call.settings))
        stack.enter_context(torch.inference_mode(call.settings.get("inference_mode") == "True"))
        stack.enter_context(torch.no_grad())
        yield


class _Probe(TorchDispatchMode):
    """Sees which dispatch keys torch leaves out once a mode has seen a call."""

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
    """The dispatch keys above those of dispatch modes: autograd, autocast, conjugation and so on. A kernel that calls
    other ops inside takes other branches without them (the complex pseudo-inverse gives other values), so a replay must
    leave them out too."""
    with _Probe() as probe:  # type: ignore[no-untyped-call]
        torch.empty(0)
    return probe.excluded


# ------------------------------------------------------------------------------------------------------- outcomes


def outcome_of(output: Any, live: Materialised) -> CallOutcome:
    """What a run of ``live`` that returned ``output`` left."""
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
    """What a trace takes for written by a call: new outputs, then the arguments that the schema says it changes."""
    return plan_of(live.call.func).written_by(live.args, live.kwargs, output)


def _digest_in_place(tensor: torch.Tensor) -> TensorDigest:
    """The digest of an argument. One with holes in it is hashed with its holes: to pack 9 million elements of a strided
    transposed view takes ten times as long as most ops on them."""
    plain = tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_quantized) and tensor.is_cpu
    if not plain or not tensor.numel() or tensor.is_contiguous() or is_dense(tensor):
        return readable(raw_digest(tensor))
    start, end = byte_span(tensor.shape, tensor.stride(), 0, tensor.itemsize)
    value = hash_memory(tensor.data_ptr(), end - start)
    return readable((tensor.dtype, tuple(tensor.shape), tensor.stride(), value))
