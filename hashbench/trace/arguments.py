"""The arguments of a call: nested values, the tensors in them, the text of all others, its generator, its caller.

torch's pytree would walk the types that are registered with it. Example inputs and outputs also come in mappings and
dataclasses that nobody registers (``BatchEncoding``), and to map the four arguments of an op takes it 80 µs instead of
5, which every replay of a call would pay.
"""

from __future__ import annotations

import copy
import dataclasses
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from hashbench.trace.digest import hash_memory

_HERE = str(Path(__file__).parents[1])
_TORCH = str(Path(torch.__file__).parent)
_ZOO = str(Path(_HERE) / "models")
_REPRESENTED = (bool, int, float, complex, str, bytes, type(None))
_STANDARD = sysconfig.get_path("stdlib")
_INSTALLED = sysconfig.get_path("purelib")


# ---------------------------------------------------------------------------------------------------- nested values


def items_of(value: Any) -> Iterable[tuple[Any, Any]] | None:
    """The parts of a mapping by key, those of a list or tuple by index; ``None`` for any other value."""
    if isinstance(value, Mapping):
        return value.items()
    return enumerate(value) if isinstance(value, (list, tuple)) else None


def fields_of(value: Any) -> Iterable[tuple[str, Any]] | None:
    """The fields of a dataclass by name; ``None`` for any other value."""
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return None
    return ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))


def leaves(value: Any) -> Iterator[Any]:
    """Whatever in nested lists, tuples and mappings is none of these, in order."""
    items = items_of(value)
    if items is None:
        yield value
        return
    for _, item in items:
        yield from leaves(item)


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """A copy of nested lists, tuples and mappings, each of its own type, with ``change(leaf)`` for every leaf."""
    if isinstance(value, MutableMapping):
        copied = {} if type(value) is dict else copy.copy(value)  # a subclass may have a constructor of its own
        copied.update({key: mapped(item, change) for key, item in value.items()})
        return copied
    if isinstance(value, (list, tuple)):
        items = [mapped(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return change(value)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """All tensors in nested lists, tuples and mappings, in order."""
    if type(value) is torch.Tensor:
        return [value]
    if type(value) in (list, tuple) and all(type(item) is torch.Tensor for item in value):
        return list(value)
    return [tensor for _, tensor in named_tensors(value)]


def named_tensors(value: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors in nested lists, tuples, mappings and dataclass-like outputs, with their place (``0.boxes``)."""
    if isinstance(value, torch.Tensor):
        yield path, value
        return
    for name, item in items_of(value) or fields_of(value) or ():
        yield from named_tensors(item, f"{path}.{name}" if path else str(name))


def named_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors among a call's arguments, by position (``0``, ``1.2``) or name."""
    yield from named_tensors(list(args))
    yield from named_tensors(kwargs)


# ---------------------------------------------------------------------------------------------------------- one call


def argument_text(values: Sequence[Any]) -> str:
    """The text of an op's non-tensor arguments: equal for equal values in any process, never an address.

    Arguments are separated by commas, positional ones as they are and keyword ones as ``name=value``. A keyword
    argument is given as a pair ``(name, value)``. Numbers are exact (``repr``); an object of a type that is not a plain
    value is written as the name of its type, since its ``repr`` may hold an address.
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
    return f"<{type(value).__name__}>"


def generator_digest(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """A digest of the state of the generator that a seeded op is about to draw from.

    That is the generator among its arguments, else the default one of the device that its tensors (or its ``device``
    argument) are on. Reading the state draws nothing.
    """
    given = next((value for value in (*args, *kwargs.values()) if isinstance(value, torch.Generator)), None)
    state = (given or _default_generator(args, kwargs)).get_state()
    return hash_memory(state.data_ptr(), state.nbytes)


def _default_generator(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Generator:
    if not kwargs and args and type(args[0]) is torch.Tensor and args[0].is_cpu:
        return torch.default_generator  # dropout in place, the commonest: 3 µs, not 30
    device = kwargs.get("device") or next((tensor.device for tensor in tensors_in([*args])), torch.device("cpu"))
    if device.type == "cpu":
        return torch.default_generator
    generators = getattr(getattr(torch, device.type, None), "default_generators", ())
    if not generators:  # meta, and devices without random numbers of their own
        return torch.default_generator
    index = device.index if device.index is not None else torch.accelerator.current_device_index()
    return generators[index] if index < len(generators) else torch.default_generator


def caller_line(frame: FrameType | None) -> str:
    """``file:line function`` of the nearest caller outside torch, hashbench and Python's own library; empty where
    there is none, as in autograd's threads."""
    while frame is not None:
        if _is_users(frame.f_code.co_filename):
            return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return ""


def _is_users(file: str) -> bool:
    if file.startswith((_INSTALLED, _HERE)):  # torchvision's code is the model's, and so is an installed zoo
        return file.startswith(_ZOO) or not file.startswith((_TORCH, _HERE))
    return not file.startswith((_STANDARD, _TORCH, "<"))
