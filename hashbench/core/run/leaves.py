"""List the leaves of a model's output by name: comparable values, and a placeholder for each part that is not
comparable."""

from __future__ import annotations

import collections
import contextlib
import datetime
import decimal
import enum
import fractions
import pathlib
import sys
import types
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_flatten

from hashbench.core.trace.digest import digest, dtype_name, has_no_data, python_digest

_BASIC = (bool, int, float, complex, str, bytes)
_PLAIN = (
    *(*_BASIC, type(None), type(...), range, torch.Size, torch.dtype, torch.device, torch.layout, torch.memory_format),
    *(decimal.Decimal, fractions.Fraction, datetime.date, datetime.time, datetime.timedelta, pathlib.PurePath),
    uuid.UUID,
)
"""Types whose ``repr`` is complete and the same in every process."""

_SEQUENCES = (list, tuple, collections.deque, collections.UserList)
_VIEWS = (collections.abc.KeysView, collections.abc.ValuesView, collections.abc.ItemsView)
_OPEN = (types.SimpleNamespace, slice)
"""Standard library types whose attributes are their whole content; others hide some."""

_DEPTH, _OBJECTS = 100, 10_000
"""Limits on nesting, and on objects per output."""


class NotComparableError(Exception):
    """Results cannot be compared: an unknown type, or runs of different structure."""


@dataclass(frozen=True, slots=True, repr=False)
class LeftOut:
    """Placeholder for a part of an output that cannot be compared. Its presence and its ``why`` are, in both runs.

    Attributes:
        path: name of the part.
        why: the reason.
    """

    path: str
    why: str

    def __str__(self) -> str:
        return f"{self.path}: {self.why}"

    __repr__ = __str__


def flatten(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of ``value`` like :func:`leaves`, for outputs that must be comparable as a whole.

    Raises:
        NotComparableError: a part cannot be compared.
    """
    for path, leaf in leaves(value, name):
        if isinstance(leaf, LeftOut):
            raise NotComparableError(str(leaf))
        yield path, leaf


def leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a model's output with their names.

    A leaf is a tensor, a plain Python value, or a :class:`LeftOut` for a part that cannot be compared. Lists, tuples,
    mappings, sets, modules (parameters, buffers, own attributes), nodes registered with ``torch.utils._pytree``, and
    the attributes of other objects (dataclasses, namespaces, distributions, ``transformers`` caches) are traversed.
    Properties are not called, iterators not consumed. An empty container is a leaf: "found nothing" must differ from
    "not asked". NumPy arrays, storages and generator states become tensors; ``Enum`` members and classes are
    represented by name. Unordered parts are sorted by content. Call with dispatch modes disabled, or a trace records
    it.
    """
    yield from _Traversal().leaves(value, name)


def tensors_of(output: Any) -> list[torch.Tensor]:
    """Return all tensors among the leaves of a model's output, in order."""
    return [leaf for _, leaf in leaves(output, "output") if isinstance(leaf, torch.Tensor)]


class _Traversal:
    """State of one traversal: enclosing objects, and the number of objects seen."""

    def __init__(self) -> None:
        self._above: dict[int, str] = {}
        self._objects = 0

    def leaves(self, value: Any, name: str) -> Iterator[tuple[str, Any]]:
        """Yield the leaves of ``value``, prefixed with ``name``."""
        if id(value) in self._above:
            yield name, f"the same object as {self._above[id(value)]}"
            return
        try:
            leaf = _as_leaf(value, name)
            parts = self._parts(value) if leaf is _NO_LEAF else None
        except Exception as error:
            leaf, parts = LeftOut(name, f"listing its parts raised {type(error).__name__}"), None
        if leaf is not _NO_LEAF:
            yield name, leaf
        elif not parts:
            yield name, LeftOut(name, f"type {_name_of(type(value))} has no comparable content")
        elif len(self._above) >= _DEPTH or self._objects > _OBJECTS:
            yield name, LeftOut(name, f"it is beyond {_DEPTH} levels or {_OBJECTS} objects")
        else:
            self._above[id(value)] = name
            for key, part in parts:
                yield from self.leaves(part, f"{name}.{key}")
            del self._above[id(value)]

    def _parts(self, value: Any) -> list[tuple[str, Any]]:
        """Return the named parts of a container or object; empty if none are known."""
        if isinstance(value, Mapping):
            return [*_by_key(value), *_further_attributes(value)]
        if isinstance(value, (*_SEQUENCES, *_VIEWS)):
            return [*((str(index), item) for index, item in enumerate(value)), *_further_attributes(value)]
        if isinstance(value, (set, frozenset)):
            return [(str(index), item) for index, item in enumerate(sorted(value, key=self._sort_key))]
        if isinstance(value, np.ndarray):
            return _array_parts(value)
        self._objects += 1
        if isinstance(value, torch.nn.Module):
            return _module_parts(value)
        return _registered_parts(value) or _attributes(value)

    def _sort_key(self, value: Any) -> list[tuple[Any, ...]]:
        """Return the sort key of an unordered part: its leaves."""
        return [
            (path, *(digest(leaf) if isinstance(leaf, torch.Tensor) else python_digest(leaf)))
            for path, leaf in self.leaves(value, "")
        ]


# --------------------------------------------------------------------------------------------------- what is a leaf

_NO_LEAF = object()


def _as_leaf(value: Any, name: str) -> Any:
    """Return ``value`` as compared as a whole; ``_NO_LEAF`` if its parts are compared instead."""
    if isinstance(value, torch.Tensor):
        return value if (left_out := without_data(value, name)) is None else left_out
    if type(value) in _PLAIN:
        return value
    if isinstance(value, enum.Enum):
        return f"{_name_of(type(value))}.{value.name}"
    if isinstance(value, type):
        return f"class {_name_of(value)}"
    if isinstance(value, (np.ndarray, np.generic)):
        return _array_leaf(np.asanyarray(value))
    if isinstance(value, _PLAIN):
        basic = next((kind for kind in _BASIC if isinstance(value, kind)), None)
        return value if basic is None else f"{_name_of(type(value))} {basic.__repr__(value)}"
    if isinstance(value, (bytearray, memoryview)):
        return bytes(value)
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, (torch.UntypedStorage, torch.TypedStorage)):
        memory = value if isinstance(value, torch.UntypedStorage) else value.untyped()
        return torch.empty(0, dtype=torch.uint8, device=memory.device).set_(memory)
    if isinstance(value, (Mapping, *_SEQUENCES, *_VIEWS)) and not value:
        return f"empty {type(value).__name__}"
    if isinstance(value, (set, frozenset)) and all(isinstance(item, _PLAIN) for item in value):
        return repr(sorted(value, key=repr))
    return _NO_LEAF


def without_data(tensor: torch.Tensor, name: str) -> LeftOut | None:
    """Return the placeholder of a tensor on the meta device, a fake or a lazy one, with all that is known of it; else
    ``None``."""
    if is_lazy(tensor):  # its class raises for shape
        return LeftOut(name, "a tensor without data")
    if not (tensor.is_meta or has_no_data(type(tensor))):
        return None
    shape = "" if tensor.is_nested else f"[{','.join(map(str, tensor.shape))}]"
    layout = "" if tensor.layout is torch.strided else f" {tensor.layout}"
    return LeftOut(name, f"a tensor without data, {dtype_name(tensor.dtype)}{shape}{layout}")


def _array_leaf(array: np.ndarray[Any, Any]) -> Any:
    """Convert a NumPy array to a tensor, or to text if torch has no such dtype."""
    if isinstance(array, np.ma.MaskedArray) or array.dtype.hasobject or array.dtype.names:
        return _NO_LEAF
    array = np.array(array, order="C")
    try:
        return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=False))
    except TypeError:
        return f"{array.dtype} {array.shape} {', '.join(map(repr, array.ravel()))}"


def _array_parts(array: np.ndarray[Any, Any]) -> list[tuple[str, Any]]:
    if isinstance(array, np.ma.MaskedArray):
        return [("mask", np.ma.getmaskarray(array)), ("data", np.where(np.ma.getmaskarray(array), 0, array.data))]
    if array.dtype.names:
        return [(field, array[field]) for field in array.dtype.names]
    return [("shape", array.shape), *((str(index), item) for index, item in enumerate(array.ravel().tolist()))]


# ------------------------------------------------------------------------------------------ the parts of containers


def _by_key(value: Mapping[Any, Any]) -> Iterable[tuple[str, Any]]:
    """Yield the items of a mapping; a key that is no plain value is named by index and type, and is a part too."""
    for index, (key, item) in enumerate(value.items()):
        if _is_named_by(key):
            yield str(key), item
        else:
            place = f"{type(key).__name__}#{index}"
            yield from ((f"{place}.key", key), (place, item))


def _is_named_by(key: Any) -> bool:
    if isinstance(key, tuple):
        return all(map(_is_named_by, key))
    return isinstance(key, (*_PLAIN, enum.Enum, np.generic))


def _further_attributes(value: Any) -> list[tuple[str, Any]]:
    """Return the attributes of a user's container subclass, other than its items."""
    if _is_of_library(type(value)) or not isinstance(value, (dict, *_SEQUENCES)):
        return []
    keys = value.keys() if isinstance(value, dict) else ()
    inner = "data" if isinstance(value, collections.UserList) else ""
    return [(k, v) for k, v in _instance_dict(value).items() if k not in keys and v is not None and k != inner]


def _registered_parts(value: Any) -> list[tuple[str, Any]]:
    """Return the children and the context of a node registered with ``torch.utils._pytree``."""
    children, spec = tree_flatten(value, is_leaf=lambda part: part is not value)
    if spec.is_leaf():
        return []
    context = spec.context
    named = isinstance(context, (list, tuple)) and len(context) == len(children)
    names = context if named and all(isinstance(key, str) for key in context) else map(str, range(len(children)))
    return [*zip(names, children, strict=True), *([("context", context)] if context is not None else [])]


def _module_parts(module: torch.nn.Module) -> list[tuple[str, Any]]:
    """Return parameters, buffers and user-defined attributes of a module and its submodules."""
    torchs = vars(torch.nn.Module())
    found: list[tuple[str, Any]] = [(f"parameter.{name}", value.detach()) for name, value in module.named_parameters()]
    found += [(f"buffer.{name}", value) for name, value in module.named_buffers()]
    for path, part in module.named_modules():
        own = ((key, item) for key, item in _attributes(part) if key not in torchs)
        found += [(f"{path}.{key}".removeprefix("."), item) for key, item in own]
    return found


def _attributes(value: Any) -> list[tuple[str, Any]]:
    """Return the attributes in ``__dict__`` and slots; none for objects of the standard library."""
    if _is_of_library(type(value)):
        return []
    found = _instance_dict(value)
    for kind in type(value).__mro__:
        for name, member in vars(kind).items():
            if isinstance(member, types.MemberDescriptorType) and name not in found:
                with contextlib.suppress(AttributeError):  # a slot that is not set
                    found[name] = member.__get__(value)
    return [(name, item) for name, item in found.items() if not (name.startswith("__") and name.endswith("__"))]


def _instance_dict(value: Any) -> dict[str, Any]:
    try:
        return dict(object.__getattribute__(value, "__dict__"))
    except AttributeError:
        return {}


def _is_of_library(kind: type) -> bool:
    return kind not in _OPEN and kind.__module__.partition(".")[0] in sys.stdlib_module_names


def _name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
