"""Capture a call that is about to be made as a :class:`~hashbench.core.diagnose.calls.call.CapturedCall`.

Only the window of a storage that the arguments touch is kept. Tensors without plain memory (sparse, quantized, nested,
wrapper subclasses) are cloned.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from hashbench.core.diagnose.calls.call import (
    LINE,
    MIB,
    CapturedCall,
    GeneratorSlot,
    Memory,
    Slot,
    TensorForm,
    byte_span,
    held_bytes,
    plan_for,
)
from hashbench.core.diagnose.calls.live import LiveCall, flat_memory, laid_over
from hashbench.core.diagnose.calls.ops import is_custom, why_refused
from hashbench.core.errors import bounded
from hashbench.core.run.rng import random_states
from hashbench.core.run.settings import settings
from hashbench.core.trace.arguments import leaves, mapped, tensors_in
from hashbench.core.trace.digest import components, unobserved, untraced
from hashbench.core.trace.storage_writers import storage_key

_PAGE = 4096
_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


class CaptureError(Exception):
    """The call cannot be captured, or not within the size limit; the message is the reason."""


def capture(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], *, limit_bytes: int) -> CapturedCall:
    """Capture the call of ``func`` that is about to be made, with settings and generators. Draws no random numbers and
    writes nothing.

    Raises:
        CaptureError: the op does not compute on tensors (:func:`~hashbench.core.diagnose.calls.ops.why_refused`); its
            tensors take more than ``limit_bytes``; or an argument is a fake or meta tensor, or an object that cannot be
            rebuilt.
    """
    refused = why_refused(func) if isinstance(func, torch._ops.OpOverload) else ""
    if refused:
        raise CaptureError(f"{refused}, and only ops that compute on tensors are replayed")
    for value in leaves([args, kwargs]):
        if not isinstance(value, (torch.Tensor, torch.Generator)) and type(value) not in _PLAIN:
            raise CaptureError(f"an argument is a {type(value).__module__}.{type(value).__qualname__}")
    in_force, grad_enabled = settings(), torch.is_grad_enabled()
    with untraced():
        call = capture_arguments(func, args, kwargs, limit_bytes=limit_bytes)
        return replace(
            call,
            settings=in_force,
            grad_enabled=grad_enabled,
            threads=torch.get_num_threads(),
            random_states=random_states(call.device, outside_torch=is_custom(func)),
        )


def capture_arguments(
    func: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    targets: Sequence[torch.Tensor] | None = None,
    limit_bytes: int | None = None,
) -> CapturedCall:
    """Capture a call without settings and default generators. Use it with dispatch modes disabled.

    Args:
        func: an op overload, a :class:`~hashbench.core.diagnose.calls.call.Callee` or a function.
        args: positional arguments.
        kwargs: keyword arguments.
        targets: copy these among the arguments, with all that shares memory with them, and pass on the others; by
            default copy all.
        limit_bytes: largest size of the copies.

    Raises:
        CaptureError: an argument has no data (fake, meta, of a transform) or cannot be copied; a tensor without plain
            memory shares that of a target; or the copies take more than ``limit_bytes``.
    """
    plan, everything, values = plan_for(func), targets is None, [*args, *kwargs.values()]
    given = tensors_in(values)
    for tensor in given:
        refuse_shadows(tensor)
    if not (everything or targets or any(isinstance(value, torch.Generator) for value in values)):
        return CapturedCall(plan.name, func, tuple(args), dict(kwargs), (), ())  # most calls write no argument
    wanted = {id(tensor) for tensor in targets or (plan.written_tensors(args, kwargs) if everything else ())}
    plain = [tensor for tensor in given if is_plain(tensor)] if everything or wanted else []
    windows = Windows(plain, whole=may_resize(func))
    touched = {windows.number(tensor) for tensor in plain if id(tensor) in wanted}
    sharing = wanted | {id(tensor) for tensor in plain if windows.number(tensor) in touched}
    for tensor in given if len(plain) < len(given) and wanted else ():
        if not is_plain(tensor):
            _refuse_shared(tensor, [each for each in plain if {id(each), id(tensor)} & sharing])
    if not everything:
        windows.keep(touched)
    slots = Slots(None if everything else sharing)
    new_args, new_kwargs = mapped(tuple(args), slots.slot), mapped(dict(kwargs), slots.slot)
    tensors = slots.tensors
    needed = windows.nbytes + sum(held_bytes(tensor) for tensor in tensors if not is_plain(tensor))
    if limit_bytes is not None and needed > limit_bytes:
        sizes = f"{needed / MIB:.1f} MiB of inputs, more than the limit of {limit_bytes / MIB:.1f} MiB"
        raise CaptureError(f"{plan.name} has {sizes}")
    clones = {id(tensor): _cloned(tensor) for tensor in tensors if not is_plain(tensor)}
    return CapturedCall(
        op=plan.name,
        func=func,
        args=new_args,
        kwargs=new_kwargs,
        tensors=tuple(clones[id(tensor)] if id(tensor) in clones else windows.form(tensor) for tensor in tensors),
        memories=windows.memories(),
        generators=tuple(generator.get_state().clone() for generator in slots.generators),
    )


class Slots:
    """Numbers the tensors (with these ids; by default all) and generators among arguments, a generator only once."""

    def __init__(self, ids: Collection[int] | None = None) -> None:
        self.tensors: list[torch.Tensor] = []
        self.generators: list[torch.Generator] = []
        self._ids = ids

    def slot(self, value: Any) -> Any:
        """Return the slot of a tensor or generator, and any other value unchanged."""
        if isinstance(value, torch.Tensor) and (self._ids is None or id(value) in self._ids):
            self.tensors.append(value)
            return Slot(len(self.tensors) - 1)
        if isinstance(value, torch.Generator):
            known = next(
                (at for at, generator in enumerate(self.generators) if generator is value), len(self.generators)
            )
            self.generators.extend([value] if known == len(self.generators) else [])
            return GeneratorSlot(known, str(value.device))
        return value


def _refuse_shared(odd: torch.Tensor, others: Sequence[torch.Tensor]) -> None:
    """Refuse a tensor without plain memory that shares memory with others: its copy would not share theirs."""
    keys = {storage_key(part) for part in components(odd)} - {None}
    if keys & {storage_key(tensor) for tensor in others}:
        raise CaptureError(f"it writes memory that a {_kind_of(odd)} tensor shares with another argument")


def may_resize(func: Any) -> bool:
    """Return whether the op may resize an argument, so that it depends on the whole storage."""
    is_op = isinstance(func, torch._ops.OpOverload)
    return plan_for(func).resizes or (is_op and any(item.is_out for item in func._schema.arguments))


def refuse_shadows(tensor: torch.Tensor) -> None:
    """Raise :class:`CaptureError` for fake, meta and functorch tensors: without data, a replay proves nothing."""
    if isinstance(tensor, FakeTensor):
        raise CaptureError("an argument is a fake tensor")
    if tensor.is_meta:
        raise CaptureError("an argument is a meta tensor")
    if torch._is_functional_tensor(tensor) or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        raise CaptureError("an argument is a tensor of a transform (functionalisation, vmap, grad)")


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether the tensor is an ordinary strided view of a storage."""
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ or tensor.layout is not torch.strided:
        return False
    return not (tensor.is_nested or tensor.is_quantized or tensor._is_zerotensor())


def own_copy(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> LiveCall:
    """Return a live copy of a call for one run: the memory that is copied is the one that it runs in. Tensors are
    detached."""
    detached = mapped(
        (tuple(args), dict(kwargs)), lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf
    )
    with unobserved():
        call = capture_arguments(func, *detached)
        return LiveCall(call, rooms=[memory.content for memory in call.memories])


def copied(tensor: torch.Tensor, *, address: int | None = None) -> torch.Tensor:
    """Return a detached copy with the same strides and the same address modulo 64, or with this ``address`` modulo 64.

    Raises:
        CaptureError: it cannot be copied.
    """
    tensor = tensor.detach()
    if not is_plain(tensor) or tensor.is_meta:
        return _cloned(tensor)
    windows = Windows([tensor], whole=False)
    memory = windows.memory(0, shift=0 if address is None else address - tensor.data_ptr())
    return laid_over(memory.content, windows.form(tensor))


def _cloned(tensor: torch.Tensor) -> torch.Tensor:
    try:
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)
    except (RuntimeError, NotImplementedError, TypeError) as error:
        words = f"an argument, a {_kind_of(tensor)} tensor, cannot be copied: {bounded(str(error))}"
        raise CaptureError(words) from error


def _kind_of(tensor: torch.Tensor) -> str:
    """Return ``sparse_coo``, ``quantized``, ``nested``, or the name of a class."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return type(tensor).__name__
    if tensor.is_nested or tensor.is_quantized:
        return "nested" if tensor.is_nested else "quantized"
    return str(tensor.layout).removeprefix("torch.")


@dataclass(slots=True)
class _Window:
    """An address range on one device, and the storages inside it."""

    device: torch.device
    start: int
    end: int
    storages: list[torch.UntypedStorage]


class Windows:
    """The address ranges that some tensors touch: one per storage, merged where storages overlap (one NumPy array, two
    tensors)."""

    def __init__(self, tensors: Sequence[torch.Tensor], *, whole: bool) -> None:
        by_storage: dict[int, _Window] = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            start, end = byte_span(tensor.shape, tensor.stride(), int(tensor.storage_offset()), tensor.itemsize)
            start, end = (0, storage.nbytes()) if whole else (start - start % LINE, end)
            begin = storage.data_ptr()
            touched = _Window(tensor.device, begin + start, begin + end, [storage])
            window = by_storage.setdefault(storage._cdata, touched)
            if window.start == window.end:
                by_storage[storage._cdata] = touched
            elif end > start:
                window.start, window.end = min(window.start, touched.start), max(window.end, touched.end)
        self._windows: list[_Window] = []
        self._numbers: dict[int, int] = {}
        for key, window in sorted(by_storage.items(), key=lambda item: (str(item[1].device), item[1].start)):
            last = self._windows[-1] if self._windows else None
            if last is None or last.device != window.device or not last.start <= window.start < last.end:
                self._windows.append(window)
            elif window.end > window.start:
                last.end = max(last.end, window.end)
                last.storages += window.storages
            else:
                self._windows.append(window)
            self._numbers[key] = len(self._windows) - 1

    @property
    def nbytes(self) -> int:
        """Total bytes of all windows."""
        return sum(window.end - window.start for window in self._windows)

    def number(self, tensor: torch.Tensor) -> int:
        """Return the index of the window that holds the tensor."""
        return self._numbers[tensor.untyped_storage()._cdata]

    def keep(self, numbers: Collection[int]) -> None:
        """Drop all windows but these; the indices of those behind move up."""
        kept = {number: place for place, number in enumerate(sorted(numbers))}
        self._windows = [self._windows[number] for number in kept]
        self._numbers = {key: kept[number] for key, number in self._numbers.items() if number in kept}

    def form(self, tensor: torch.Tensor) -> TensorForm:
        """Return the tensor as a view of its window."""
        storage, number = tensor.untyped_storage(), self.number(tensor)
        distance = storage.data_ptr() + tensor.storage_offset() * tensor.itemsize - self._windows[number].start
        if not tensor.numel():
            distance = 0
        if distance % tensor.itemsize:
            raise CaptureError("two arguments share memory at a distance that is not a whole number of elements")
        return TensorForm(
            storage=number,
            dtype=tensor.dtype,
            shape=tuple(tensor.shape),
            stride=tuple(tensor.stride()),
            offset=int(distance // tensor.itemsize),
            requires_grad=tensor.requires_grad,
            parameter=isinstance(tensor, torch.nn.Parameter),
            conj=tensor.is_conj(),
            neg=tensor.is_neg(),
        )

    def memories(self) -> tuple[Memory, ...]:
        """Copy all windows."""
        return tuple(map(self.memory, range(len(self._windows))))

    def memory(self, number: int, *, shift: int = 0) -> Memory:
        """Copy a window to its own address modulo 64, or ``shift`` bytes from there."""
        window = self._windows[number]
        content = flat_memory(window.end - window.start, window.device, address=window.start + shift)
        for storage in window.storages:
            begin = storage.data_ptr()
            start, end = max(begin, window.start), min(begin + storage.nbytes(), window.end)
            if end > start:
                part = torch.empty(0, dtype=torch.uint8, device=window.device)
                part.set_(storage, start - begin, (end - start,))  # type: ignore[call-overload]
                content[start - window.start : end - window.start] = part
        return Memory(content, window.start % _PAGE)
