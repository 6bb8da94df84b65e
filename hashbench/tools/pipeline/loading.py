"""Inspect a user's loader: its settings, the parts of its dataset, the files and folders that it lists."""

from __future__ import annotations

import ast
import contextlib
import functools
import os
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from hashbench.core.io import read_file
from hashbench.core.run.rng import is_generator, is_global, state_digest
from hashbench.core.text import squeezed
from hashbench.core.trace.arguments import items_of
from hashbench.tools.pipeline.observed import BatchRecords, Folder, Listing, Loader, Transform

_SHUFFLING = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
_MOST_ENTRIES = 1_000_000
NOT_LOADER = "the loader is not a torch.utils.data.DataLoader, so only its batches are seen"
"""Entry ``loader`` of :attr:`Loader.absent` for any other iterable."""

_MOST_OBJECTS = 10_000
_DEEPEST = 10
_LONGEST_LIST = 256
"""A longer list holds samples, not parts."""


def facts_of(
    loader: Any, *, seed: int, batches: BatchRecords, given: dict[str, str], listed: Sequence[str]
) -> tuple[Loader, str]:
    """Return the description of the loader, and the root folder of its files (empty without files).

    Args:
        given: :func:`given_generators`, taken before the first batch.
        listed: :func:`listed_folders`, recorded while the loader was made.
    """
    is_torchs = isinstance(loader, DataLoader)
    dataset = getattr(loader, "dataset", None)
    anatomy = Anatomy() if dataset is None else dissect(dataset)
    transforms, listing = _transforms(anatomy, batches), _listing_of(anatomy)
    order = _order_of(loader) if is_torchs else None
    shuffles, draws_by_default = None, None
    if isinstance(order, _SHUFFLING):
        shuffles, draws_by_default = True, order.generator is None
    elif isinstance(order, SequentialSampler):
        shuffles, draws_by_default = False, False
    files = [file for sample in batches.samples for file in sample.files or ()]
    root = listing.root if listing is not None else _common_folder(files)
    absent = {} if is_torchs else {"loader": NOT_LOADER}
    if listing is None:
        absent["listing"] = "the dataset holds no list of files as long as it is itself"
    if not transforms:
        absent["transforms"] = "no transform was found in the dataset"
    facts = Loader(
        kind=_kind(loader),
        dataset=_kind(dataset),
        length=_length_of(dataset),
        batch_size=loader.batch_size if is_torchs else None,
        num_workers=loader.num_workers if is_torchs else 0,
        shuffle=shuffles,
        sampler=_kind(getattr(loader, "sampler", None)),
        batch_sampler=_kind(getattr(loader, "batch_sampler", None)),
        draws_by_default=draws_by_default,
        generators=given,
        seed=seed,
        worker_init_fn=_kind(getattr(loader, "worker_init_fn", None)) or None,
        collate_fn=_kind(getattr(loader, "collate_fn", None)) or None,
        start_method=_start_method(loader) if is_torchs else None,
        persistent_workers=bool(getattr(loader, "persistent_workers", False)),
        drop_last=bool(getattr(loader, "drop_last", False)),
        pin_memory=bool(getattr(loader, "pin_memory", False)),
        transforms=transforms or None,
        random_transforms=tuple(item.name for item in transforms if item.drew) if transforms else None,
        listing=listing,
        folders=_folders_in(listed, root),
        absent=absent,
    )
    return facts, root


def given_generators(loader: Any) -> dict[str, str]:
    """Return the states of the generators that the loader and its samplers hold, by name."""
    owners = {"loader": loader}
    owners |= {name: getattr(loader, name, None) for name in ("sampler", "batch_sampler")}
    return {
        f"{name}.{attribute}": state_digest(value)
        for name, owner in owners.items()
        for attribute, value in list(getattr(owner, "__dict__", {}).items())
        if is_generator(value)
    }


def _transforms(anatomy: Anatomy, batches: BatchRecords) -> tuple[Transform, ...]:
    """List the transforms that ran, in the order in which the dataset holds them."""
    steps = [step for sample in batches.samples for step in sample.steps or ()]
    transforms = []
    for name in dict.fromkeys([*anatomy.texts, *(step.transform for step in steps)]):
        drew = [step.drew for step in steps if step.transform == name]
        if drew:
            generators = sorted({generator for names in drew for generator in names})
            transforms.append(Transform(name, anatomy.texts.get(name, name), len(drew), tuple(generators)))
    return tuple(transforms)


def _order_of(loader: DataLoader[Any]) -> Any:
    """Return the object that decides the order: with a custom batch sampler, ``loader.sampler`` exists but is never
    used."""
    batch_sampler = loader.batch_sampler
    if batch_sampler is None:
        return loader.sampler
    return batch_sampler.sampler if type(batch_sampler) is BatchSampler else batch_sampler


def _start_method(loader: DataLoader[Any]) -> str | None:
    if not loader.num_workers:
        return None
    context = loader.multiprocessing_context or torch.multiprocessing.get_context()
    return str(context.get_start_method())


def _kind(value: Any) -> str:
    """Return the qualified name of a function, or of an object's class."""
    if value is None:
        return ""
    for named in (value, type(value)):
        names = [getattr(named, name, None) for name in ("__module__", "__qualname__")]
        if all(isinstance(name, str) for name in names):
            break
    return ".".join(map(str, names))


# ------------------------------------------------------------------------------------------- the parts of a dataset


@dataclass
class Anatomy:
    """The parts found in a dataset, by name: the attribute path, such as ``dataset.transform.transforms.1``.

    Attributes:
        datasets: names of datasets, by id.
        transforms: names of callable objects, by id.
        functions: names of plain functions, by their code.
        generators: random generators, by name.
        texts: descriptions of transforms and functions, by name.
        objects: every visited object by id, which keeps it alive.
    """

    datasets: dict[int, str] = field(default_factory=dict)
    transforms: dict[int, str] = field(default_factory=dict)
    functions: dict[types.CodeType, str] = field(default_factory=dict)
    generators: dict[str, Any] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    objects: dict[int, Any] = field(default_factory=dict)


def dissect(dataset: Any, modules: Mapping[str, types.ModuleType] | None = None, *, called: str = "dataset") -> Anatomy:
    """Walk ``dataset``, whose parts get names that begin with ``called``, and the globals of the user's ``modules`` for
    generators."""
    anatomy = Anatomy()
    waiting: list[tuple[str, Any, int]] = [(called, dataset, 0)]
    while waiting and len(anatomy.objects) < _MOST_OBJECTS:
        name, value, depth = waiting.pop(0)
        if id(value) in anatomy.objects or depth > _DEEPEST:
            continue
        anatomy.objects[id(value)] = value
        if is_generator(value):
            anatomy.generators |= {} if is_global(value) else {name: value}
        else:
            _note(anatomy, name, value, is_root=depth == 0)
            waiting += [(f"{name}.{part}", inner, depth + 1) for part, inner in _parts(value)]
    for module_name, module in (modules or {}).items():
        for key, value in list(vars(module).items()):
            if is_generator(value) and not any(value is generator for generator in anatomy.generators.values()):
                anatomy.generators |= {} if is_global(value) else {f"{module_name}.{key}": value}
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
    elif isinstance(value, types.GeneratorType):
        yield from list(value.gi_frame.f_locals.items()) if value.gi_frame is not None else ()
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
    kinds = (list, tuple, dict, Dataset, types.GeneratorType)
    return callable(value) or isinstance(value, kinds) or is_generator(value)


# ----------------------------------------------------------------------------------------------- files and folders


def hash_calls(modules: Sequence[str]) -> tuple[str, ...]:
    """Return the lines of these modules that call ``hash``, as ``training.py:21``; none of those in ``__hash__``."""
    found: list[str] = []
    for name in modules:
        file = getattr(sys.modules.get(name), "__file__", None)
        try:
            tree = ast.parse(read_file(file)) if isinstance(file, str) else ast.Module([], [])
        except (OSError, ValueError, SyntaxError, RecursionError):
            continue
        lines = sorted(set(_lines_that_hash(tree)))
        found += [f"{os.path.basename(str(file))}:{line}" for line in lines]  # noqa: PTH119
    return tuple(dict.fromkeys(found))


def _lines_that_hash(tree: ast.AST) -> Iterator[int]:
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef) and node.name == "__hash__":
            continue
        if isinstance(node, ast.Name) and node.id == "hash" and isinstance(node.ctx, ast.Load):  # also `key=hash`
            yield node.lineno
        waiting += ast.iter_child_nodes(node)


def _listing_of(anatomy: Anatomy) -> Listing | None:
    """Find the dataset's list of files; ``None`` without one.

    It is the first attribute that is a list as long as the dataset whose items are, or begin with, paths of existing
    files.
    """
    for key, name in anatomy.datasets.items():
        dataset = anatomy.objects[key]
        for attribute, value in _attributes(dataset):
            files = _files(value)
            if files and len(files) == _length_of(dataset):
                root = _common_folder(files)
                return Listing(f"{name}.{attribute}", root, tuple(os.path.relpath(file, root) for file in files))
    return None


def _files(value: Any) -> list[str]:
    """Return the absolute paths in a list of paths, or of tuples that begin with one; else an empty list."""
    if not isinstance(value, (list, tuple)) or not value:
        return []
    heads = [item[0] if isinstance(item, (list, tuple)) and item else item for item in value]
    if not all(isinstance(head, (str, Path)) for head in heads):
        return []
    if not all(os.path.isfile(head) for head in (heads[0], heads[-1], heads[len(heads) // 2])):  # noqa: PTH113
        return []
    return [os.path.abspath(head) for head in heads]  # noqa: PTH100


def _common_folder(files: list[str]) -> str:
    """Return the deepest folder that holds all of these files; empty without files."""
    return os.path.commonpath([os.path.dirname(file) for file in files]) if files else ""  # noqa: PTH120


def _length_of(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


@contextlib.contextmanager
def listed_folders() -> Iterator[list[str]]:
    """Record the absolute paths of the folders that are listed meanwhile, except by Python's import system."""
    paths: list[str] = []
    is_on = True

    def audited(event: str, arguments: tuple[Any, ...]) -> None:
        if not is_on or event not in ("os.listdir", "os.scandir"):
            return
        caller = sys._getframe(1).f_code.co_filename
        path = arguments[0] if arguments else None
        if not caller.startswith("<frozen importlib") and (path is None or isinstance(path, (str, bytes))):
            paths.append(os.path.abspath(os.fsdecode(path or ".")))  # noqa: PTH100

    sys.addaudithook(audited)  # cannot be taken away
    try:
        yield paths
    finally:
        is_on = False


def _folders_in(paths: Sequence[str], root: str) -> tuple[Folder, ...]:
    """List the folders at or below ``root``, each named by its path relative to it, with digests of their entries."""
    folders = []
    for path in dict.fromkeys(paths):
        name = os.path.relpath(path, root) if root else path
        try:
            names = [] if root and name.startswith("..") else os.listdir(path)  # noqa: PTH208 – in the system's order
        except OSError:
            continue
        if names and len(names) <= _MOST_ENTRIES:
            folders.append(Folder(name, len(names), _names_digest(names), _names_digest(sorted(names))))
    return tuple(folders)


def _names_digest(names: list[str]) -> str:
    return xxhash.xxh3_64_hexdigest("\0".join(names).encode(errors="surrogateescape"))
