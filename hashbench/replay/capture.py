"""Capture a dispatched call as a :class:`~hashbench.replay.call.CapturedCall`.

Only the window of a storage that the arguments touch is kept. Tensors without plain memory (sparse, quantized, nested,
wrapper subclasses) are cloned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from hashbench.errors import bounded
from hashbench.replay.call import (
    LINE,
    MIB,
    CapturedCall,
    GeneratorSlot,
    Memory,
    Slot,
    TensorForm,
    byte_span,
    held_bytes,
)
from hashbench.replay.ops import is_custom, why_refused
from hashbench.run.rng import random_states
from hashbench.run.settings import settings
from hashbench.trace.arguments import mapped
from hashbench.trace.digest import untraced
from hashbench.trace.op_schema import plan_of

_PAGE = 4096
_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


class CaptureError(Exception):
    """The call cannot be captured, or not within the size limit; the message is the reason."""


def capture(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], *, limit_bytes: int) -> CapturedCall:
    """Capture the call of ``func`` that is about to be made. Draws no random numbers and writes nothing.

    Raises:
        CaptureError: the op does not compute on tensors (:func:`~hashbench.replay.ops.why_refused`); its tensors take
            more than ``limit_bytes``; or an argument is a fake or meta tensor, or an object that cannot be rebuilt.
    """
    refused = why_refused(func) if isinstance(func, torch._ops.OpOverload) else ""
    if refused:
        raise CaptureError(f"{refused}, and only ops that compute on tensors are replayed")
    tensors: list[torch.Tensor] = []
    generators: list[torch.Generator] = []

    def slot(value: Any) -> Any:
        """Replace a tensor or generator by its slot; return a plain value unchanged."""
        if isinstance(value, torch.Tensor):
            refuse_shadows(value)
            tensors.append(value)
            return Slot(len(tensors) - 1)
        if isinstance(value, torch.Generator):
            known = next((at for at, one in enumerate(generators) if one is value), len(generators))
            generators.extend([value] if known == len(generators) else [])
            return GeneratorSlot(known, str(value.device))
        if type(value) not in _PLAIN:
            raise CaptureError(f"an argument is a {type(value).__module__}.{type(value).__qualname__}")
        return value

    in_force, grad_enabled = settings(), torch.is_grad_enabled()
    with untraced():
        new_args, new_kwargs = mapped(tuple(args), slot), mapped(dict(kwargs), slot)
        windows = Windows([tensor for tensor in tensors if is_plain(tensor)], whole=may_resize(func))
        needed = windows.nbytes + sum(held_bytes(tensor) for tensor in tensors if not is_plain(tensor))
        if needed > limit_bytes:
            sizes = f"{needed / MIB:.1f} MiB of inputs, more than the limit of {limit_bytes / MIB:.1f} MiB"
            raise CaptureError(f"{func} has {sizes}")
        call = CapturedCall(
            op=str(func),
            func=func,
            args=new_args,
            kwargs=new_kwargs,
            tensors=tuple(windows.form(tensor) if is_plain(tensor) else _cloned(tensor) for tensor in tensors),
            memories=windows.memories(),
            generators=tuple(generator.get_state().clone() for generator in generators),
            settings=in_force,
            grad_enabled=grad_enabled,
            threads=torch.get_num_threads(),
        )
        return replace(call, random_states=random_states(call.device, outside_torch=is_custom(func)))


def may_resize(func: Any) -> bool:
    """Return whether the op may resize an argument, so that it depends on the whole storage."""
    schema = getattr(func, "_schema", None)
    return plan_of(func).resizes or (schema is not None and any(item.is_out for item in schema.arguments))


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


def _cloned(tensor: torch.Tensor) -> torch.Tensor:
    try:
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)
    except (RuntimeError, NotImplementedError, TypeError) as error:
        raise CaptureError(
            f"an argument, a {type(tensor).__name__}, cannot be copied: {bounded(str(error))}"
        ) from error


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

    def form(self, tensor: torch.Tensor) -> TensorForm:
        """Return the tensor as a view of its window."""
        storage = tensor.untyped_storage()
        number = self._numbers[storage._cdata]
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

    def memory(self, number: int) -> Memory:
        """Copy the window with this ``storage`` index."""
        window = self._windows[number]
        content = torch.empty(window.end - window.start, dtype=torch.uint8, device=window.device)
        for storage in window.storages:
            begin = storage.data_ptr()
            start, end = max(begin, window.start), min(begin + storage.nbytes(), window.end)
            if end > start:
                part = torch.empty(0, dtype=torch.uint8, device=window.device)
                part.set_(storage, start - begin, (end - start,))  # type: ignore[call-overload]
                content[start - window.start : end - window.start] = part
        return Memory(content, window.start % _PAGE)
