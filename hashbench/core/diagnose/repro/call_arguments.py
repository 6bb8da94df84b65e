"""Write a call's op and arguments as JSON, read them back, and check them against the op's schema."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Never

import torch

from hashbench.core.diagnose.calls.call import GeneratorSlot, Slot, TensorForm
from hashbench.core.diagnose.calls.ops import why_refused
from hashbench.core.errors import HashbenchError

LARGEST = 2**62
"""Upper limit of numbers in a file."""


class BadCallError(ValueError):
    """A call that cannot be written, or was read and is invalid."""


class RefusedOpError(BadCallError):
    """The call's op does something other than compute on tensors."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"{reason}, and only ops that compute on tensors are replayed")


def bad(what: str) -> Never:
    """Raise :class:`BadCallError` for this reason."""
    raise BadCallError(what)


def within(value: object, name: str, *, least: int = 0, most: int = LARGEST) -> int:
    if type(value) is not int or not least <= value <= most:
        bad(f"{name} is {str(value)[:40]}, which is not a whole number from {least} to {most}")
    return value


def find_op(name: str) -> Any:
    """Return the loaded op overload of this name (``aten.add.Tensor``), if it only computes on tensors.

    Raises:
        HashbenchError: its library is not loaded.
        BadCallError: it is not an op, or does something else (:func:`~hashbench.core.diagnose.calls.ops.why_refused`).
    """
    parts = name.split(".")
    if len(parts) != 3 or not all(re.fullmatch(r"[A-Za-z_]\w*", part, re.ASCII) for part in parts):
        bad(f"{name!r:.60} is not the name of an op")
    namespace = getattr(torch.ops, parts[0], None)
    packet = getattr(namespace, parts[1], None) if isinstance(namespace, torch._ops._OpNamespace) else None
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        raise HashbenchError(
            f"the op {name} does not exist",
            consequence="nothing was run",
            tip="If it is not torch's own, say with --import FILE which file defines it.",
        )
    overload = getattr(packet, parts[2], None) if parts[2] in packet.overloads() else None
    if not isinstance(overload, torch._ops.OpOverload):
        bad(f"{name} is not an overload of an op")
    refused = why_refused(overload)
    if refused:
        raise RefusedOpError(refused)
    return overload


_NAMED_KINDS = (torch.dtype, torch.layout, torch.memory_format, torch.qscheme)


def is_named(value: Any) -> bool:
    """Return True for an attribute of ``torch`` whose text is its name: a dtype, a layout, a memory format."""
    return isinstance(value, _NAMED_KINDS)


def encoded(value: Any) -> Any:
    """Encode an argument as JSON: plain values as they are, everything else as a mapping whose single key names its
    kind."""
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
    return {"torch": str(value)} if is_named(value) else bad(f"an argument is a {type(value).__name__}")


@dataclass(frozen=True, slots=True)
class Arguments:
    """Decodes arguments from JSON.

    Attributes:
        tensors, generators: how many there are to refer to.
        moved: devices to substitute, old to new.
    """

    tensors: int
    generators: int
    moved: Mapping[str, str]

    def decoded(self, value: Any) -> Any:
        """Decode what :func:`encoded` wrote; refuse anything else."""
        match value:
            case None | bool() | int() | float() | str():
                return value
            case list():
                return [self.decoded(item) for item in value]
            case {"tensor": index}:
                return Slot(within(index, "tensor", most=self.tensors - 1))
            case {"generator": index, "device": str(name)}:
                number = within(index, "generator", most=self.generators - 1)
                return GeneratorSlot(number, self.moved.get(name, name))
            case {"float": str(text)}:
                return _number(text)
            case {"complex": [str(real), str(imaginary)]}:
                return complex(_number(real), _number(imaginary))
            case {"device": str(name)}:
                return _device(self.moved.get(name, name))
            case {"torch": str(text)}:
                named = getattr(torch, text.removeprefix("torch."), None)
                return named if is_named(named) else bad(f"{text!r:.60} is not an argument")
            case {"tuple": [*items]}:
                return tuple(self.decoded(item) for item in items)
            case {"dict": {**entries}}:
                return {key: self.decoded(item) for key, item in entries.items()}
            case {**unknown} if unknown:
                return bad(f"an argument is of the unknown kind {next(iter(unknown))!r:.60}")
        return bad("an argument is neither a value nor a reference")


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        bad(f"{text!r:.60} is not a number")


def _device(text: str) -> torch.device:
    try:
        return torch.device(text)
    except RuntimeError:
        bad(f"{text!r:.60} is not a device")


def check_arguments(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise :class:`BadCallError` unless the op's schema takes these arguments."""
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
            bad(f"the argument {argument.name} of {func} is not a {argument.type}")


_POINTER = re.compile(r"[\w:<> ]+\*|\*\w+")
_SIZES = frozenset(
    {"const int64_t", "int64_t", "const double", "double", "const bool", "bool"}
    | {"i1", "i8", "i16", "i32", "i64", "u8", "u16", "u32", "u64", "fp16", "bf16", "fp32", "fp64", "constexpr"}
)
"""Types, in C++ and in Triton, of what is passed to generated kernels by value."""


def check_kernel_arguments(
    name: str, types: Sequence[str], args: Sequence[Any], tensors: Sequence[TensorForm | torch.Tensor]
) -> None:
    """Raise :class:`BadCallError` unless a generated kernel with arguments of these types takes these: strided
    tensors for pointers, numbers for the rest. Its code decides what it reads and writes."""
    if len(types) != len(args):
        bad(f"{name} takes {len(types)} arguments")
    for kind, value in zip(types, args, strict=True):
        if _POINTER.fullmatch(kind):
            fits_type = isinstance(value, Slot) and isinstance(tensors[value.index], TensorForm)
        else:
            fits_type = kind in _SIZES and isinstance(value, (bool, int, float))
        if not fits_type:
            bad(f"an argument of {name} is not a {kind}")


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
    """Return True if a schema argument of this type (``Optional[List[int]]``) takes the value."""
    if kind.startswith("Optional["):
        return value is None or fits(value, kind[len("Optional[") : -1])
    if kind.startswith("List["):
        inner = kind[len("List[") : -1]
        return isinstance(value, (list, tuple)) and all(fits(item, inner) for item in value)
    return isinstance(value, _KINDS.get(kind, ()))
