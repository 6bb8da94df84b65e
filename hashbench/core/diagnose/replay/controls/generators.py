"""Find all live random number generators of the process, name them, and track their states."""

from __future__ import annotations

import functools
import gc
import itertools
import random
import sys
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from hashbench.core.processes import uncollected
from hashbench.core.run.rng import GENERATORS, state_access, state_value

_NOT_USERS = frozenset(sys.stdlib_module_names) | {"hashbench"}


class Generators:
    """The generators alive at one moment, by name, with their states. Holds strong references."""

    def __init__(self, generators: Mapping[str, Any]) -> None:
        access = {name: state_access(generator) for name, generator in generators.items()}
        self._states = {name: (read, write, read()) for name, (read, write) in access.items()}

    @classmethod
    def alive(cls) -> Generators:
        """Find all generators of torch, NumPy and Python, the global ones included, and save their states.

        Names are those of the holder: ``module.NAME``, ``ClassName.attribute``, ``closure of function``. Searches all
        objects of the process, which takes about half a second. Excluded: ``SystemRandom``, which is stateless, and
        generators held by the standard library or by hashbench.
        """
        with uncollected():  # while it works, the collector forgets tuples and dicts that hold nothing it must know
            return cls(_name_generators(*_find_generators()))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._states)

    def changed(self) -> tuple[str, ...]:
        """Return the names of generators whose state has changed."""
        states = self._states.items()
        return tuple(name for name, (read, _, noted) in states if state_value(read()) != state_value(noted))

    def restored(self, *, only: str | None = None) -> None:
        """Restore the saved state of all generators, or only of the named one."""
        for name, (_, write, noted) in self._states.items():
            if only in (None, name):
                write(noted)


# ----------------------------------------------------------------------------------------------------- finding

_CHUNK = 50_000


def _find_generators() -> tuple[list[Any], list[Any]]:
    """Find the generators, and the containers untracked by the garbage collector that lead to one.

    ``torch.Generator`` is untracked, and so are dicts and tuples that hold nothing else; but tracked objects list what
    they refer to. Modules are searched explicitly: ``gc.freeze`` hides those imported before it.
    """
    kinds = frozenset(_with_subclasses(GENERATORS)) - frozenset(_with_subclasses([random.SystemRandom]))
    # In one step: a list that exists before would hold itself, and with it everything else for long.
    level: list[Any] = gc.get_objects()
    level += [vars(module) for module in list(sys.modules.values())]
    generators = {id(held): held for held in level if type(held) in kinds}
    hidden: dict[int, Any] = {}
    wanted = kinds | {dict, tuple}
    while level:
        referents: list[Any] = []  # as far as they are of these types: all of them would be millions
        for start in range(0, len(level), _CHUNK):
            referents += [
                referent for referent in gc.get_referents(*level[start : start + _CHUNK]) if type(referent) in wanted
            ]
        generators |= {id(referent): referent for referent in referents if type(referent) in kinds}
        new = {
            id(referent): referent
            for referent in referents
            if type(referent) not in kinds and not gc.is_tracked(referent)
        }
        level = [held for number, held in new.items() if number not in hidden]
        hidden |= new
    leading: dict[int, Any] = {}
    for number, container in reversed(hidden.items()):  # what one holds was found after it
        if any(type(referent) in kinds or id(referent) in leading for referent in gc.get_referents(container)):
            leading[number] = container
    return list(generators.values()), list(leading.values())


def _with_subclasses(roots: Iterable[type]) -> Iterator[type]:
    for root in roots:
        yield root
        yield from _with_subclasses(root.__subclasses__())


# ------------------------------------------------------------------------------------------------------ naming

_DEPTH = 4
_LARGEST = 1000
"""Entries of a container searched for a name; a larger one is likely an index of all objects."""

_ANONYMOUS_HOLDERS = (dict, list, tuple, types.CellType, types.BuiltinMethodType, types.MethodType, functools.partial)
"""Anonymous holders: a generator inside one is named by the holder of that."""

_NAMELESS_HOLDERS = (type, types.FrameType, types.GeneratorType, types.CoroutineType, types.ModuleType)
"""Holders that give no name: they are temporary, or their dict gives one."""

_ZOO = "hashbench_zoo_"
"""Prefix of :mod:`hashbench.core.suites.python_suites` for the module name of a zoo file."""


def _name_generators(generators: Sequence[Any], hidden: Sequence[Any]) -> dict[str, Any]:
    inner = {id(_bit_generator(generator)) for generator in generators} - {None}
    outer = [generator for generator in generators if id(generator) not in inner and _has_state(generator)]
    known = {
        id(torch.default_generator): "torch.default_generator",
        id(np.random.mtrand._rand): "numpy.random",
        id(random._inst): "random",
    }
    holders = _Referrers([held for held in outer if id(held) not in known], hidden)
    named: dict[str, Any] = {}
    for item in outer:
        name = known.get(id(item)) or holders.name(item)
        numbered = (name if number == 1 else f"{name} ({number})" for number in itertools.count(1))
        if name:
            named[next(text for text in numbered if text not in named)] = item
    return dict(sorted(named.items()))


def _bit_generator(generator: Any) -> Any:
    """Return the separate object behind a NumPy generator, with the same state; ``None`` for any other generator."""
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator
    return generator._bit_generator if isinstance(generator, np.random.RandomState) else None


def _has_state(generator: Any) -> bool:
    try:
        state_access(generator)[0]()
    except Exception:  # a subclass of the user's may do anything
        return False
    return True


class _ReferrerName(NamedTuple):
    """A candidate name. Lower ``rank`` is more specific; 3 is part of a function. ``package`` is the owner's module."""

    rank: int
    text: str
    package: str


class _Referrers:
    """The referrers of some objects, their referrers, and so on up to a named one."""

    def __init__(self, objects: Sequence[Any], hidden: Sequence[Any]) -> None:
        self._modules = {id(vars(module)): module.__name__ for module in list(sys.modules.values())}
        self._of: dict[int, list[Any]] = {}
        level = list(objects)
        for _ in range(_DEPTH):
            self._look_up(level, hidden)
            holders = [
                holder for held in level for holder in self._of[id(held)] if isinstance(holder, _ANONYMOUS_HOLDERS)
            ]
            level = [holder for holder in holders if id(holder) not in self._of and id(holder) not in self._modules]

    def _look_up(self, objects: Sequence[Any], hidden: Sequence[Any]) -> None:
        wanted = {id(held) for held in objects}
        self._of |= {number: [] for number in wanted}
        if not wanted:
            return
        modules = [vars(module) for module in list(sys.modules.values())]
        everything = {id(held): held for held in [*gc.get_referrers(*objects), *modules, *hidden]}
        ours = {id(objects), id(hidden), id(self._of), *map(id, self._of.values())}
        for number, holder in everything.items():
            if number in ours or (isinstance(holder, (list, tuple)) and len(holder) > _LARGEST):
                continue
            for held in wanted.intersection(map(id, gc.get_referents(holder))):
                self._of[held].append(holder)

    def name(self, generator: Any) -> str:
        """Return the best name; empty if only the standard library or hashbench hold the generator."""
        names = sorted(self._names(generator, depth=_DEPTH))
        if not names:
            return f"an unnamed {type(generator).__module__.partition('.')[0]} {type(generator).__name__}"
        return next((name.text for name in names if name.package.partition(".")[0] not in _NOT_USERS), "")

    def _names(self, held: Any, *, depth: int) -> Iterator[_ReferrerName]:
        for holder in self._of.get(id(held), ()) if depth else ():
            if isinstance(holder, dict):
                yield from self._names_in_dict(holder, held, depth=depth)
            elif isinstance(holder, (list, tuple)):
                positions = [position for position, value in enumerate(holder) if value is held]
                for name in self._names(holder, depth=depth - 1):
                    for position in positions:
                        yield name if name.rank == 3 else name._replace(text=f"{name.text}[{position}]")
            elif isinstance(holder, _ANONYMOUS_HOLDERS):
                yield from self._names(holder, depth=depth - 1)
            elif isinstance(holder, types.FunctionType):
                for part, word in (("closure", "closure"), ("defaults", "default"), ("kwdefaults", "default")):
                    if getattr(holder, f"__{part}__") is held:
                        yield _ReferrerName(3, f"{word} of {holder.__qualname__}", holder.__module__ or "")
            elif not isinstance(holder, _NAMELESS_HOLDERS):
                kind = type(holder)
                names = [name for name, value in _attributes(holder).items() if value is held]
                yield from (_ReferrerName(2, f"{kind.__qualname__}.{name}", kind.__module__) for name in names)

    def _names_in_dict(self, holder: dict[Any, Any], held: Any, *, depth: int) -> Iterator[_ReferrerName]:
        keys = [key for key, value in list(holder.items()) if value is held]
        module = self._modules.get(id(holder)) or _unlisted_module(holder)
        if module:
            yield from (_ReferrerName(0, f"{module.removeprefix(_ZOO)}.{key}", module) for key in keys)
            return
        for owner in self._of.get(id(holder), ()):
            of_class = isinstance(owner, type)
            if of_class or getattr(owner, "__dict__", None) is holder:
                kind = owner if of_class else type(owner)
                yield from (
                    _ReferrerName(1 if of_class else 2, f"{kind.__qualname__}.{key}", kind.__module__) for key in keys
                )
        for name in self._names(holder, depth=depth - 1):
            yield from (name._replace(text=f"{name.text}[{key!r}]") for key in keys)


def _unlisted_module(holder: dict[Any, Any]) -> str:
    """Return the file name of a module outside ``sys.modules`` whose globals are this dict; empty for any other dict.

    Such a module was executed from its spec, as benchmarks/dynamo does with the file of a model.
    """
    spec = dict.get(holder, "__spec__")
    if not isinstance(spec, ModuleSpec):
        return ""
    return Path(spec.origin).stem if spec.has_location and spec.origin else spec.name


def _attributes(owner: Any) -> dict[str, Any]:
    """Return instance attributes, inline values and slots included."""
    attributes = dict(getattr(owner, "__dict__", {}))
    for name, slot in [item for base in type(owner).__mro__ for item in list(vars(base).items())]:
        if isinstance(slot, types.MemberDescriptorType):
            with suppress(AttributeError):
                attributes[name] = slot.__get__(owner)
    return attributes
