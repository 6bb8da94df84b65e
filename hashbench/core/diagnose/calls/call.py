"""A captured call as data: its callee, its arguments as views over windows of memory, and its surroundings."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from hashbench.core.trace.arguments import leaves
from hashbench.core.trace.digest import components
from hashbench.core.trace.op_schema import OpPlan, plan_of

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

    def is_injective(self) -> bool:
        """Return whether each dimension steps over the reach of the smaller ones; if not, elements may still differ."""
        reach = 1
        for step, size in sorted((step, size) for step, size in zip(self.stride, self.shape, strict=True) if size > 1):
            if step < reach:
                return False
            reach += step * (size - 1)
        return True


@dataclass(frozen=True, slots=True, eq=False)
class Memory:
    """A window of a storage.

    Attributes:
        content: its bytes, flat ``uint8`` on the device of the call.
        alignment: original address of the first byte modulo 4096.
    """

    content: torch.Tensor
    alignment: int = 0


class Callee(Protocol):
    """Something else than an op or a function that can be called: a compiled kernel, a collective.

    A call must wait for other processes and streams before it returns; kernels of the current stream may be pending.

    Attributes:
        plan: its name, and the arguments that it writes.
    """

    plan: OpPlan

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


class CompiledKernel(Callee, Protocol):
    """A :class:`Callee` whose choices are in its machine code: no setting of torch's reaches it.

    Attributes:
        types: types of its arguments, in C++ (``const float*``) or as Triton has them (``*fp32``).
        source: the C++ or Triton that it was compiled from; empty if that is gone.
        config: configuration of a Triton kernel, as Python; empty for one in C++, and if it is unknown.
    """

    types: tuple[str, ...]

    @property
    def source(self) -> str: ...

    @property
    def config(self) -> str: ...

    def single_thread(self) -> AbstractContextManager[None]:
        """Return a context in which it runs on one thread; raise ``LookupError`` if there is no way."""


def is_triton(types: Sequence[str]) -> bool:
    """Return whether these are types of the arguments of a Triton kernel."""
    return any(kind.startswith("*") for kind in types)


def compiled_kernel(func: Any) -> CompiledKernel | None:
    """Return a callee that is a :class:`CompiledKernel`; ``None`` for anything else."""
    return func if isinstance(getattr(func, "plan", None), OpPlan) and hasattr(func, "single_thread") else None


def plan_for(func: Any) -> OpPlan:
    """Return the plan of a :class:`Callee`, of an op, or of a function, which is taken to write no argument."""
    plan = getattr(func, "plan", None)
    if isinstance(plan, OpPlan):
        return plan
    if isinstance(func, torch._ops.OperatorBase):
        return plan_of(func)
    return OpPlan(getattr(func, "__name__", type(func).__name__), call=func)


@dataclass(frozen=True, slots=True, eq=False)
class CapturedCall:
    """One call with everything that it depends on.

    Attributes:
        op: name of the callee; of an op overload ``str(func)``.
        func: an op overload, a :class:`Callee` or a function.
        args: positional arguments; containers are kept, copied tensors are :class:`Slot`, generators
            :class:`GeneratorSlot`. Everything else is passed on.
        kwargs: keyword arguments, likewise.
        tensors: a :class:`TensorForm` for plain strided memory, a clone for any other tensor.
        memories: the windows of storage that ``tensors`` index.
        generators: states of generator arguments.
        random_states: states of the default generators (:func:`hashbench.core.run.rng.random_states`).
        settings: torch settings at the call (:func:`hashbench.core.run.settings.settings`).
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
        """The distinct devices of copied tensors and ``torch.device`` arguments, with index, without the CPU."""
        held = [memory.content for memory in self.memories]
        held += [each for each in self.tensors if isinstance(each, torch.Tensor)]
        given = [value for value in self.kwargs.values() if isinstance(value, torch.device)]
        named = [
            device for device in [*(tensor.device for tensor in held), *given] if device.type not in ("cpu", "meta")
        ]
        current = torch.accelerator.current_device_index
        return tuple(
            dict.fromkeys(
                torch.device(device.type, current() if device.index is None else device.index) for device in named
            )
        )

    @property
    def nbytes(self) -> int:
        """Total bytes of the captured tensors."""
        clones = (tensor for tensor in self.tensors if isinstance(tensor, torch.Tensor))
        return sum(memory.content.nbytes for memory in self.memories) + sum(map(held_bytes, clones))


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


def generator_slots(value: Any) -> list[GeneratorSlot]:
    """Collect the generator slots among nested arguments."""
    return [leaf for leaf in leaves(value) if isinstance(leaf, GeneratorSlot)]


def filled_slots(call: CapturedCall) -> tuple[int, ...]:
    """Return the indices of the tensors that a generated kernel fills: what they hold before is nothing's result."""
    values = (call.args[at] for at in plan_for(call.func).filled if at < len(call.args))
    return tuple(value.index for value in values if isinstance(value, Slot))
