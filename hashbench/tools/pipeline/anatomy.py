"""Looking into a dataset: which objects in it are datasets, transforms, generators, and its own list of files.

They are found by what they are and hold, wherever the user keeps them; attributes' names only tell people where.
"""

from __future__ import annotations

import functools
import os
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from hashbench.run.rng import is_generator
from hashbench.tools.pipeline.observed import Listing

_MOST_OBJECTS = 10_000
_DEEPEST = 10
_LONGEST_LIST = 256
"""A longer list holds samples, not parts."""


@dataclass
class Anatomy:
    """What was found in a dataset, by name: the place where it is held, such as ``dataset.transform.transforms.1``.

    ``transforms`` and ``functions`` (plain ones, by their code) are what is called on samples.
    """

    datasets: dict[int, str] = field(default_factory=dict)
    transforms: dict[int, str] = field(default_factory=dict)
    functions: dict[types.CodeType, str] = field(default_factory=dict)
    generators: dict[str, Any] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    kept: list[Any] = field(default_factory=list)
    """Keeps what is known by its id alive."""


def dissect(dataset: Any, modules: dict[str, types.ModuleType] | None = None) -> Anatomy:
    """Look into ``dataset``, and into the globals of the user's own ``modules`` for generators."""
    found = Anatomy()
    seen: set[int] = set()
    waiting: list[tuple[str, Any, int]] = [("dataset", dataset, 0)]
    while waiting and len(seen) < _MOST_OBJECTS:
        name, value, depth = waiting.pop(0)
        if id(value) in seen or depth > _DEEPEST:
            continue
        seen.add(id(value))
        found.kept.append(value)
        if _note(found, name, value, is_root=depth == 0):
            waiting += [(f"{name}.{part}", inner, depth + 1) for part, inner in _parts(value)]
    for module_name, module in (modules or {}).items():
        for key, value in list(vars(module).items()):
            if is_generator(value) and not any(value is one for one in found.generators.values()):
                found.generators[f"{module_name}.{key}"] = value
    return found


def _note(found: Anatomy, name: str, value: Any, *, is_root: bool) -> bool:
    """Note ``value`` for what it is; whether to look into it."""
    if is_generator(value):
        found.generators[name] = value
        return False
    if is_root or isinstance(value, Dataset):
        found.datasets[id(value)] = name
    elif isinstance(value, (types.FunctionType, types.MethodType)):
        function = value.__func__ if isinstance(value, types.MethodType) else value
        called = f"{name} {function.__qualname__}"
        found.functions[function.__code__] = called
        found.texts[called] = function.__qualname__
    elif isinstance(value, functools.partial):
        return True
    elif callable(value) and not isinstance(value, type):
        called = f"{name} {type(value).__qualname__}"
        found.transforms[id(value)] = called
        found.texts[called] = " ".join(str(value).split())[:500]
    return True


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (list, tuple)):
        if len(value) <= _LONGEST_LIST:
            yield from ((str(place), item) for place, item in enumerate(value) if _may_hold_parts(item))
        return
    if isinstance(value, dict):
        if len(value) <= _LONGEST_LIST:
            yield from ((str(key), item) for key, item in value.items() if _may_hold_parts(item))
        return
    if isinstance(value, functools.partial):
        yield "func", value.func
        yield from _parts([*value.args, *value.keywords.values()])
        return
    if isinstance(value, types.MethodType):
        yield "self", value.__self__
        return
    if isinstance(value, types.FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                yield name, cell.cell_contents
            except ValueError:  # not assigned yet
                continue
        return
    if isinstance(value, torch.nn.Module):
        yield from value.named_children()
    yield from ((name, item) for name, item in list(getattr(value, "__dict__", {}).items()) if _may_hold_parts(item))


def _may_hold_parts(value: Any) -> bool:
    if isinstance(value, (str, bytes, int, float, type, torch.Tensor, types.ModuleType, Path, type(None))):
        return False
    return callable(value) or isinstance(value, (list, tuple, dict, Dataset)) or is_generator(value)


# -------------------------------------------------------------------------------------------------- the listing


def listing_of(dataset: Any) -> Listing | None:
    """The list of files that the dataset, or one inside it, holds: the first attribute that is a list as long as the
    dataset whose items are, or begin with, names of files that are there. ``None`` where no attribute is."""
    for name, owner in _datasets(dataset):
        for attribute, value in list(getattr(owner, "__dict__", {}).items()):
            files = _files(value)
            if files and len(files) == _length(owner):
                root = os.path.commonpath([os.path.dirname(file) for file in files])  # noqa: PTH120
                names = tuple(os.path.relpath(file, root) for file in files)
                return Listing(f"{name}.{attribute}", root, names)
    return None


def _datasets(dataset: Any) -> Iterator[tuple[str, Any]]:
    found = dissect(dataset)
    by_id = {id(value): value for value in found.kept}
    yield from ((name, by_id[key]) for key, name in found.datasets.items())


def _files(value: Any) -> list[str]:
    """The absolute paths in a list of names of files, or of tuples that begin with one; else nothing."""
    if not isinstance(value, (list, tuple)) or not value:
        return []
    heads = [item[0] if isinstance(item, (list, tuple)) and item else item for item in value]
    if not all(isinstance(head, (str, Path)) for head in heads):
        return []
    if not all(os.path.isfile(head) for head in (heads[0], heads[-1], heads[len(heads) // 2])):  # noqa: PTH113
        return []
    return [os.path.abspath(head) for head in heads]  # noqa: PTH100


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None
