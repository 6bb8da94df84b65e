"""Looking into a dataset: which objects in it are datasets, transforms, generators, and its own list of files.

They are found by what they are and hold, wherever the user keeps them; attributes' names only tell people where.
"""

from __future__ import annotations

import functools
import os
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from hashbench.run.rng import is_generator
from hashbench.text import squeezed
from hashbench.tools.pipeline.observed import Listing
from hashbench.trace.arguments import items_of

_MOST_OBJECTS = 10_000
_DEEPEST = 10
_LONGEST_LIST = 256
"""A longer list holds samples, not parts."""

_NO_MODULES: Mapping[str, types.ModuleType] = types.MappingProxyType({})


@dataclass
class Anatomy:
    """What was found in a dataset, by name: where it is held, such as ``dataset.transform.transforms.1``.

    ``transforms`` and ``functions`` (plain ones, by their code) are what is called on samples; ``texts`` are theirs.
    ``objects`` keeps whatever is known by its id alive.
    """

    datasets: dict[int, str] = field(default_factory=dict)
    transforms: dict[int, str] = field(default_factory=dict)
    functions: dict[types.CodeType, str] = field(default_factory=dict)
    generators: dict[str, Any] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    objects: dict[int, Any] = field(default_factory=dict)


def dissect(dataset: Any, modules: Mapping[str, types.ModuleType] = _NO_MODULES) -> Anatomy:
    """Look into ``dataset``, and into the globals of the user's own ``modules`` for generators."""
    anatomy = Anatomy()
    waiting: list[tuple[str, Any, int]] = [("dataset", dataset, 0)]
    while waiting and len(anatomy.objects) < _MOST_OBJECTS:
        name, value, depth = waiting.pop(0)
        if id(value) in anatomy.objects or depth > _DEEPEST:
            continue
        anatomy.objects[id(value)] = value
        if is_generator(value):
            anatomy.generators[name] = value
        else:
            _note(anatomy, name, value, is_root=depth == 0)
            waiting += [(f"{name}.{part}", inner, depth + 1) for part, inner in _parts(value)]
    for module_name, module in modules.items():
        for key, value in list(vars(module).items()):
            if is_generator(value) and not any(value is known for known in anatomy.generators.values()):
                anatomy.generators[f"{module_name}.{key}"] = value
    return anatomy


def _note(anatomy: Anatomy, name: str, value: Any, *, is_root: bool) -> None:
    if is_root or isinstance(value, Dataset):
        anatomy.datasets[id(value)] = name
    elif isinstance(value, (types.FunctionType, types.MethodType)):
        function = value.__func__ if isinstance(value, types.MethodType) else value
        anatomy.functions[function.__code__] = called = f"{name} {function.__qualname__}"
        anatomy.texts[called] = function.__qualname__
    elif callable(value) and not isinstance(value, (type, functools.partial)):
        anatomy.transforms[id(value)] = called = f"{name} {type(value).__qualname__}"
        anatomy.texts[called] = squeezed(str(value), 500)


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (list, tuple, dict)):
        if len(value) <= _LONGEST_LIST:
            yield from ((str(key), item) for key, item in items_of(value) or () if _may_hold_parts(item))
    elif isinstance(value, functools.partial):
        yield "func", value.func
        yield from _parts([*value.args, *value.keywords.values()])
    elif isinstance(value, types.MethodType):
        yield "self", value.__self__
    elif isinstance(value, types.FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                yield name, cell.cell_contents
            except ValueError:  # not assigned yet
                continue
    else:
        if isinstance(value, torch.nn.Module):
            yield from value.named_children()
        yield from ((name, item) for name, item in _attributes(value) if _may_hold_parts(item))


def _attributes(value: Any) -> list[tuple[str, Any]]:
    return list(getattr(value, "__dict__", {}).items())


def _may_hold_parts(value: Any) -> bool:
    if isinstance(value, (str, bytes, int, float, type, torch.Tensor, types.ModuleType, Path, type(None))):
        return False
    return callable(value) or isinstance(value, (list, tuple, dict, Dataset)) or is_generator(value)


# -------------------------------------------------------------------------------------------------- the listing


def listing_of(anatomy: Anatomy) -> Listing | None:
    """The list of files that a dataset holds: the first attribute that is a list as long as the dataset whose items
    are, or begin with, names of files that are there. ``None`` where no attribute is."""
    for key, name in anatomy.datasets.items():
        dataset = anatomy.objects[key]
        for attribute, value in _attributes(dataset):
            files = _files(value)
            if files and len(files) == length_of(dataset):
                root = common_folder(files)
                return Listing(f"{name}.{attribute}", root, tuple(os.path.relpath(file, root) for file in files))
    return None


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


def common_folder(files: list[str]) -> str:
    """The deepest folder that holds all of these files; empty without files."""
    return os.path.commonpath([os.path.dirname(file) for file in files]) if files else ""  # noqa: PTH120


def length_of(dataset: Any) -> int | None:
    """The length of a dataset that has one."""
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None
