"""Captures the exact inputs of one dispatched call.

A captured call is data (see ``call``): tensors become forms over memories, so that arguments that shared memory share
it again, holes and overlaps included. Only the window of a storage that the arguments touch is kept. What has no plain
memory (sparse, quantized, nested, wrapper) is kept as a clone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from hashbench.replay.call import (
    LINE,
    PAGE,
    CapturedCall,
    GeneratorSlot,
    Memory,
    Slot,
    TensorForm,
    byte_span,
    held_bytes,
)
from hashbench.replay.op_owner import is_custom
from hashbench.run.rng import random_states
from hashbench.run.settings import settings
from hashbench.trace.arguments import mapped
from hashbench.trace.op_schema import plan_of

MIB = 2**20


class CaptureError(Exception):
    """A call that cannot be captured, or not within the limit; the text is the reason."""


# ------------------------------------------------------------------------------------------------------ capturing


def capture(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], *, limit_bytes: int) -> CapturedCall:
    """The call of ``func`` that is about to be made. Draws no random numbers and writes nothing.

    Raises:
        CaptureError: its tensors take more than ``limit_bytes``; or an argument is a fake or meta tensor, or an object
            that is no plain value, which cannot be made again.
    """
    in_force, grad_enabled = settings(), torch.is_grad_enabled()
    with _disable_current_modes(), torch.no_grad():
        call = _Capturer(whole=may_resize(func)).capture(func, args, kwargs, limit_bytes=limit_bytes)
        states = random_states(call.device, outside_torch=is_custom(func))
    return dataclasses.replace(call, settings=in_force, grad_enabled=grad_enabled, random_states=states)


_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


def may_resize(func: Any) -> bool:
    """Whether the op may give an argument another size, which then depends on the whole storage."""
    schema = getattr(func, "_schema", None)
    return plan_of(func).resizes or (schema is not None and any(item.is_out for item in schema.arguments))


class _Capturer:
    """Collects the tensors and generators of one call."""

    def __init__(self, *, whole: bool) -> None:
        self.whole = whole
        self.tensors: list[torch.Tensor] = []
        self.generators: list[torch.Generator] = []

    def capture(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], *, limit_bytes: int) -> CapturedCall:
        new_args, new_kwargs = mapped(tuple(args), self._slot), mapped(dict(kwargs), self._slot)
        windows = Windows([tensor for tensor in self.tensors if is_plain(tensor)], whole=self.whole)
        needed = windows.nbytes + sum(held_bytes(tensor) for tensor in self.tensors if not is_plain(tensor))
        if needed > limit_bytes:
            sizes = f"{needed / MIB:.1f} MiB of inputs, more than the limit of {limit_bytes / MIB:.1f} MiB"
            raise CaptureError(f"{func} has {sizes}")
        return CapturedCall(
            op=str(func),
            func=func,
            args=new_args,
            kwargs=new_kwargs,
            tensors=tuple(windows.form(tensor) if is_plain(tensor) else _cloned(tensor) for tensor in self.tensors),
            memories=windows.memories(),
            generators=tuple(generator.get_state().clone() for generator in self.generators),
            threads=torch.get_num_threads(),
        )

    def _slot(self, value: Any) -> Any:
        """A slot for a tensor or generator; a plain value as it is."""
        if isinstance(value, torch.Tensor):
            refuse_shadows(value)
            self.tensors.append(value)
            return Slot(len(self.tensors) - 1)
        if isinstance(value, torch.Generator):
            self.generators.append(value)
            return GeneratorSlot(len(self.generators) - 1, str(value.device))
        if type(value) in _PLAIN:
            return value
        raise CaptureError(f"an argument is a {type(value).__module__}.{type(value).__qualname__}")


def refuse_shadows(tensor: torch.Tensor) -> None:
    """Tensors without content of their own stand for others; to run an op on them proves nothing."""
    if isinstance(tensor, FakeTensor):
        raise CaptureError("an argument is a fake tensor")
    if tensor.is_meta:
        raise CaptureError("an argument is a meta tensor")
    if torch._is_functional_tensor(tensor) or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        raise CaptureError("an argument is a tensor of a transform (functionalisation, vmap, grad)")


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor is nothing but a form over a storage."""
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ or tensor.layout is not torch.strided:
        return False
    return not (tensor.is_nested or tensor.is_quantized or tensor._is_zerotensor())


def _cloned(tensor: torch.Tensor) -> torch.Tensor:
    try:
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)
    except (RuntimeError, NotImplementedError, TypeError) as error:
        raise CaptureError(f"an argument, a {type(tensor).__name__}, cannot be copied: {error}") from error


# -------------------------------------------------------------------------------------------------------- windows


@dataclass(slots=True)
class _Window:
    """A range of addresses on one device, and the storages that lie in it."""

    device: torch.device
    start: int
    end: int
    storages: list[torch.UntypedStorage]


class Windows:
    """The parts of memory that some tensors touch: one for each storage; storages that overlap in memory (two tensors
    made from one NumPy array) are one."""

    def __init__(self, tensors: Sequence[torch.Tensor], *, whole: bool) -> None:
        by_storage: dict[int, _Window] = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            start, end = (0, storage.nbytes()) if whole else _touched(tensor)
            begin = storage.data_ptr()
            window = by_storage.setdefault(
                storage._cdata, _Window(tensor.device, begin + start, begin + end, [storage])
            )
            if end > start and window.end > window.start:
                window.start, window.end = min(window.start, begin + start), max(window.end, begin + end)
            elif end > start:
                window.start, window.end = begin + start, begin + end
        self._windows: list[_Window] = []
        self._places: dict[int, int] = {}
        for key, window in sorted(by_storage.items(), key=lambda item: (str(item[1].device), item[1].start)):
            self._places[key] = self._placed(window)

    def _placed(self, window: _Window) -> int:
        last = self._windows[-1] if self._windows else None
        if last is not None and last.device == window.device and window.start < last.end and window.end > window.start:
            last.end = max(last.end, window.end)
            last.storages += window.storages
        else:
            self._windows.append(window)
        return len(self._windows) - 1

    @property
    def nbytes(self) -> int:
        """Bytes of all windows."""
        return sum(window.end - window.start for window in self._windows)

    def form(self, tensor: torch.Tensor) -> TensorForm:
        """The tensor as a form over its window."""
        storage = tensor.untyped_storage()
        place = self._places[storage._cdata]
        distance = storage.data_ptr() + tensor.storage_offset() * tensor.itemsize - self._windows[place].start
        if not tensor.numel():
            distance = 0
        if distance % tensor.itemsize:
            raise CaptureError("two arguments share memory at a distance that is no whole number of elements")
        return TensorForm(
            storage=place,
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
        """Copies of all windows."""
        return tuple(self.memory(place) for place in range(len(self._windows)))

    def memory(self, place: int) -> Memory:
        """A copy of the window that forms call ``storage=place``."""
        window = self._windows[place]
        return Memory(_content(window), window.start % PAGE)


def _touched(tensor: torch.Tensor) -> tuple[int, int]:
    """The bytes of its storage that a tensor touches, the first rounded down."""
    start, end = byte_span(tensor.shape, tensor.stride(), int(tensor.storage_offset()), tensor.itemsize)
    return start - start % LINE, end


def _content(window: _Window) -> torch.Tensor:
    content = torch.empty(window.end - window.start, dtype=torch.uint8, device=window.device)
    for storage in window.storages:
        begin = storage.data_ptr()
        start, end = max(begin, window.start), min(begin + storage.nbytes(), window.end)
        if end > start:
            part = torch.empty(0, dtype=torch.uint8, device=window.device).set_(storage, start - begin, (end - start,))  # type: ignore[call-overload]
            content[start - window.start : end - window.start] = part
    return content
