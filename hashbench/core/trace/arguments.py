"""Arguments of a call: nested values, the tensors in them, the text of all others, its generator, its caller.

torch's pytree descends only into registered types. Example inputs and outputs also come in unregistered mappings and
dataclasses (``BatchEncoding``), and mapping the four arguments of an op takes pytree 80 µs instead of 5, which every
replay of a call would pay.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from hashbench.core.owners import is_users, torch_folder
from hashbench.core.trace.digest import hash_memory

_AUTOGRAD = torch.autograd.graph.__file__
"""Calls the engine of autograd."""
_REPRESENTED = (bool, int, float, complex, str, bytes, type(None))


# ---------------------------------------------------------------------------------------------------- nested values


def items_of(value: Any) -> Iterable[tuple[Any, Any]] | None:
    """Return the items of a mapping by key, or of a list or tuple by index; ``None`` for any other value."""
    if isinstance(value, Mapping):
        return value.items()
    return enumerate(value) if isinstance(value, (list, tuple)) else None


def fields_of(value: Any) -> Iterable[tuple[str, Any]] | None:
    """Return the fields of a dataclass by name; ``None`` for any other value."""
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return None
    return ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))


def leaves(value: Any) -> Iterator[Any]:
    """Yield the leaves of nested lists, tuples and mappings, in order."""
    items = items_of(value)
    if items is None:
        yield value
        return
    for _, item in items:
        yield from leaves(item)


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Copy nested lists, tuples and mappings, each with its own type, replacing every leaf by ``change(leaf)``."""
    if isinstance(value, MutableMapping):
        copied = {} if type(value) is dict else copy.copy(value)  # a subclass may define its own constructor
        copied.update({key: mapped(item, change) for key, item in value.items()})
        return copied
    if isinstance(value, (list, tuple)):
        items = [mapped(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return change(value)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return all tensors in nested lists, tuples and mappings, in order."""
    if type(value) is torch.Tensor:
        return [value]
    if type(value) in (list, tuple) and all(type(item) is torch.Tensor for item in value):
        return list(value)
    return [tensor for _, tensor in named_tensors(value)]


def named_tensors(value: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield all tensors in nested lists, tuples, mappings and dataclass-like outputs, with their path (``0.boxes``)."""
    if isinstance(value, torch.Tensor):
        yield path, value
        return
    for name, item in items_of(value) or fields_of(value) or ():
        yield from named_tensors(item, f"{path}.{name}" if path else str(name))


def named_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors among a call's arguments, by position (``0``, ``1.2``) or name."""
    yield from named_tensors(list(args))
    yield from named_tensors(kwargs)


# ---------------------------------------------------------------------------------------------------------- one call


def argument_text(values: Sequence[Any]) -> str:
    """Format an op's non-tensor arguments: equal text for equal values in any process, never an address.

    Arguments are separated by commas, keyword ones as ``name=value``. A keyword argument is passed as a pair
    ``(name, value)``. Numbers are exact (``repr``); an object that is not a plain value is written as its type's name,
    since its ``repr`` may contain an address. Memory that other processes may write, as the workers of a ``DataLoader``
    do, is ``<shared UntypedStorage>``.
    """
    return ", ".join(map(_text, values))


def _text(value: Any) -> str:
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str):
        return f"{value[0]}={_text(value[1])}"
    if isinstance(value, _REPRESENTED):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_text, value))}]"
    module = type(value).__module__
    if module == "torch" and type(value).__name__ in ("dtype", "device", "layout", "memory_format"):
        return str(value)
    if type(value).__name__ in ("SymInt", "SymFloat", "SymBool"):
        return str(value)
    shared = isinstance(value, torch.UntypedStorage) and value.device.type == "cpu" and value.is_shared()
    return f"<{'shared ' * shared}{type(value).__name__}>"


def generator_digest(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Hash the state of the generator that a seeded op is about to draw from, without drawing.

    This is the generator among its arguments, else the default generator of the device of its tensors (or of its
    ``device`` argument).
    """
    given = next((value for value in (*args, *kwargs.values()) if isinstance(value, torch.Generator)), None)
    state = (given or _default_generator(args, kwargs)).get_state()
    return hash_memory(state.data_ptr(), state.nbytes)


def _default_generator(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Generator:
    if not kwargs and args and type(args[0]) is torch.Tensor and args[0].is_cpu:
        return torch.default_generator  # fast path for in-place dropout, the most common: 3 µs, not 30
    device = kwargs.get("device") or next((tensor.device for tensor in tensors_in([*args])), torch.device("cpu"))
    if device.type == "cpu":
        return torch.default_generator
    generators = getattr(getattr(torch, device.type, None), "default_generators", ())
    if not generators:  # meta, and devices without their own generators
        return torch.default_generator
    index = device.index if device.index is not None else torch.accelerator.current_device_index()
    return generators[index] if index < len(generators) else torch.default_generator


def caller_line(frame: FrameType | None) -> str:
    """Return ``file:line function`` of the nearest caller outside torch, hashbench and the standard library; ``""`` if
    there is none, as in autograd's threads."""
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return ""


def raising_line(error: BaseException) -> str:
    """Return ``file:line function`` of the innermost line outside torch, hashbench and the standard library that raised
    ``error`` or called what did; ``""`` if there is none."""
    found, traceback = "", error.__traceback__
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if is_users(code.co_filename):
            found = f"{Path(code.co_filename).name}:{traceback.tb_lineno} {code.co_name}"
        traceback = traceback.tb_next
    return found


def in_own_backward(frame: FrameType | None) -> bool:
    """Return True if the nearest caller outside torch, hashbench and the standard library is a backward or a hook of
    the user's own, which autograd called."""
    while frame is not None and not is_users(frame.f_code.co_filename):
        if frame.f_code.co_filename == _AUTOGRAD:
            return False
        frame = frame.f_back
    return frame is not None


def in_torch(frame: FrameType | None) -> bool:
    """Return True if the nearest caller outside torch, hashbench and the standard library has called torch."""
    while frame is not None and not is_users(frame.f_code.co_filename):
        if frame.f_code.co_filename.startswith(torch_folder()):
            return True
        frame = frame.f_back
    return False
