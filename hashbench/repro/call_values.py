"""The arguments of a captured call as JSON, back again, and whether an op takes them; every value is checked."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Never

import torch

from hashbench.replay.call import GeneratorSlot, Slot

LARGEST = 2**62

_NAMED_KINDS = (torch.dtype, torch.layout, torch.memory_format, torch.qscheme)
"""Arguments that are attributes of ``torch`` and whose text is their name: ``torch.float32``."""


class BadCallError(Exception):
    """What is wrong with a call that is to be written or was read."""


def bad(what: str) -> Never:
    """Refuse, for this reason."""
    raise BadCallError(what)


def encoded(value: Any) -> Any:
    """An argument as JSON: plain values as they are, everything else as a mapping with one key that says what it is."""
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else {"float": repr(value)}
        case complex():
            return {"complex": [repr(value.real), repr(value.imag)]}
        case Slot():
            return {"tensor": value.index}
        case GeneratorSlot():
            return {"generator": value.index, "device": value.device}
        case torch.device():
            return {"device": str(value)}
        case list():
            return [encoded(item) for item in value]
        case tuple():
            return {"tuple": [encoded(item) for item in value]}
        case dict() if all(isinstance(key, str) for key in value):
            return {"dict": {key: encoded(item) for key, item in value.items()}}
    if is_named(value):
        return {"torch": str(value)}
    return bad(f"an argument is a {type(value).__name__}")


def is_named(value: Any) -> bool:
    """Whether this is an attribute of ``torch`` whose text is its name: a dtype, a layout, a memory format."""
    return isinstance(value, _NAMED_KINDS)


class Arguments:
    """Makes arguments from JSON; there are so many tensors and generators to refer to. A device that ``moved`` names is
    replaced by the one that it names."""

    def __init__(self, *, tensors: int, generators: int, moved: Mapping[str, str] | None = None) -> None:
        self.tensors, self.generators = tensors, generators
        self.moved = moved or {}

    def decoded(self, value: Any) -> Any:
        """The argument that :func:`encoded` wrote; refuses anything else."""
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, list):
            return [self.decoded(item) for item in value]
        if not isinstance(value, dict) or not value:
            bad("an argument is neither a value nor a reference")
        return self._tagged(next(iter(value)), value)

    def _tagged(self, kind: str, value: dict[str, Any]) -> Any:
        match kind, value[kind]:
            case "tensor", _:
                return Slot(integer_at(value, "tensor", most=self.tensors - 1))
            case "generator", _:
                name = text_at(value, "device")
                index = integer_at(value, "generator", most=self.generators - 1)
                return GeneratorSlot(index, self.moved.get(name, name))
            case "float", str(text):
                return _number(text)
            case "complex", [str(real), str(imaginary)]:
                return complex(_number(real), _number(imaginary))
            case "device", str(text):
                return _device(self.moved.get(text, text))
            case "torch", str(text):
                found = getattr(torch, text.removeprefix("torch."), None)
                return found if isinstance(found, _NAMED_KINDS) else bad(f"{text!r} is no argument")
            case "tuple", [*items]:
                return tuple(self.decoded(item) for item in items)
            case "dict", dict(items):
                return {key: self.decoded(item) for key, item in items.items()}
        return bad(f"an argument is of the unknown kind {kind!r}")


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        bad(f"{text!r} is no number")


def _device(text: str) -> torch.device:
    try:
        return torch.device(text)
    except RuntimeError:
        bad(f"{text!r} is no device")


def check_arguments(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Whether the op's schema takes these arguments."""
    schema = func._schema.arguments
    positional = [argument for argument in schema if not argument.kwarg_only]
    if len(args) > len(positional):
        bad(f"{func} takes at most {len(positional)} arguments by position")
    given = {argument.name: value for argument, value in zip(positional, args, strict=False)}
    if set(given) & set(kwargs) or set(kwargs) - {argument.name for argument in schema}:
        bad(f"{func} has no such arguments")
    given.update(kwargs)
    for argument in schema:
        if argument.name not in given and not argument.has_default_value():
            bad(f"{func} needs the argument {argument.name}")
        if argument.name in given and not fits(given[argument.name], str(argument.type)):
            bad(f"the argument {argument.name} of {func} is no {argument.type}")


_KINDS: Mapping[str, tuple[type, ...]] = {
    "Tensor": (Slot, int, float, complex),  # a dispatch mode sees the 2 of ``x * 2`` as a number
    "int": (int, *_NAMED_KINDS),  # so are dtypes and layouts called in a schema
    "float": (int, float),
    "number": (int, float, complex),
    "complex": (int, float, complex),
    "bool": (bool,),
    "str": (str,),
    "Device": (torch.device,),
    "Generator": (GeneratorSlot,),
}


def fits(value: Any, kind: str) -> bool:
    """Whether a schema's argument of this type (``Optional[List[int]]``) takes the value."""
    if kind.startswith("Optional["):
        return value is None or fits(value, kind[len("Optional[") : -1])
    if kind.startswith("List["):
        inner = kind[len("List[") : -1]
        return isinstance(value, (list, tuple)) and all(fits(item, inner) for item in value)
    return isinstance(value, _KINDS.get(kind, ()))


# ------------------------------------------------------------------------------------------------- checked access


def value_at(found: Any, name: str) -> Any:
    """What the mapping has under this name; refuses where it is missing."""
    if not isinstance(found, dict) or name not in found:
        bad(f"{name} is missing")
    return found[name]


def text_at(found: Any, name: str) -> str:
    """The text of this name."""
    value = value_at(found, name)
    return value if isinstance(value, str) else bad(f"{name} is no text")


def flag_at(found: Any, name: str) -> bool:
    """The truth value of this name."""
    value = value_at(found, name)
    return value if isinstance(value, bool) else bad(f"{name} is neither true nor false")


def integer_at(found: Any, name: str, *, least: int = 0, most: int = LARGEST) -> int:
    """The whole number of this name, if it is within these bounds."""
    value = value_at(found, name)
    if type(value) is not int or not least <= value <= most:
        bad(f"{name} is no whole number from {least} to {most}")
    return value


def sizes_at(found: Any, name: str) -> tuple[int, ...]:
    """The sizes of this name."""
    values = value_at(found, name)
    if not isinstance(values, list) or any(type(value) is not int or not 0 <= value <= LARGEST for value in values):
        bad(f"{name} is no list of sizes")
    return tuple(values)


def mapping_at(found: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The mapping of this name."""
    value = value_at(found, name)
    return value if isinstance(value, dict) else bad(f"{name} is no mapping")


def list_at(found: Mapping[str, Any], name: str) -> list[Any]:
    """The list of this name."""
    value = value_at(found, name)
    return value if isinstance(value, list) else bad(f"{name} is no list")
