"""All random number generators that are alive in the process: their names, their states, and which of these changed."""

from __future__ import annotations

import functools
import gc
import itertools
import random
import sys
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hashbench.run.rng import GENERATORS, state_access, state_value

_NOT_USERS = frozenset(sys.stdlib_module_names) | {"hashbench"}


class Generators:
    """The generators that were alive at one moment, and their states then. Keeps them alive."""

    def __init__(self, states: Mapping[str, _State]) -> None:
        self._states = states

    @classmethod
    def alive(cls) -> Generators:
        """Find them all and note their states: torch's, NumPy's and Python's, the global ones among them.

        Named by where they are held: ``module.NAME``, ``ClassName.attribute``, ``closure of function``. Searches all
        objects of the process, which takes about half a second. Left out: ``SystemRandom``, which has no state, and
        what the standard library and hashbench hold.
        """
        with _collector_paused():
            found = _named(*_living())
        return cls({name: _State.of(generator) for name, generator in found.items()})

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._states)

    def changed(self) -> tuple[str, ...]:
        """The names of those whose state is another now."""
        return tuple(name for name, state in self._states.items() if state.moved())

    def restored(self, *, only: str | None = None) -> None:
        """Put the noted states back: of all, or of the one of that name."""
        for name, state in self._states.items():
            if only is None or name == only:
                state.put_back()


@dataclass(frozen=True, slots=True)
class _State:
    """How to read and write the state of one generator, and what it was."""

    read: Callable[[], Any]
    write: Callable[[Any], object]
    noted: Any

    @classmethod
    def of(cls, generator: Any) -> _State:
        read, write = state_access(generator)
        return cls(read, write, read())

    def moved(self) -> bool:
        return bool(state_value(self.read()) != state_value(self.noted))

    def put_back(self) -> None:
        self.write(self.noted)


# ----------------------------------------------------------------------------------------------------- finding


@contextmanager
def _collector_paused() -> Iterator[None]:
    """While it works, the collector forgets tuples and dicts that hold nothing it must know."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


_CHUNK = 50_000


def _living() -> tuple[list[Any], list[Any]]:
    """The generators, and the containers that the garbage collector does not know.

    It does not know ``torch.Generator`` either, nor a dict or tuple that holds nothing else; but everything it knows
    can say what it refers to. Modules are looked at in any case: ``gc.freeze`` hides those that were there before.
    """
    kinds = frozenset(_with_subclasses(GENERATORS)) - frozenset(_with_subclasses([random.SystemRandom]))
    # In one step: a list that exists before would hold itself, and with it everything else for long.
    level: list[Any] = gc.get_objects()
    level += [vars(module) for module in list(sys.modules.values())]
    found = {id(one): one for one in level if type(one) in kinds}
    hidden: dict[int, Any] = {}
    wanted = kinds | {dict, tuple}
    while level:
        referents, level = _referents(level, kinds=wanted), []
        for one in referents:
            if type(one) in kinds:
                found[id(one)] = one
            elif not gc.is_tracked(one) and id(one) not in hidden:
                hidden[id(one)] = one
                level.append(one)
    return list(found.values()), _leading_to(kinds, hidden)


def _leading_to(kinds: Collection[type], hidden: Mapping[int, Any]) -> list[Any]:
    """Those of the hidden containers that hold a generator, or one of their kind that does."""
    leading: dict[int, Any] = {}
    for number, container in reversed(list(hidden.items())):  # what one holds was found after it
        if any(type(one) in kinds or id(one) in leading for one in gc.get_referents(container)):
            leading[number] = container
    return list(leading.values())


def _referents(objects: Sequence[Any], *, kinds: Collection[type]) -> list[Any]:
    """What these objects refer to, as far as it is of these types. Without repeating, that is millions of objects."""
    found: list[Any] = []
    for start in range(0, len(objects), _CHUNK):
        found += [one for one in gc.get_referents(*objects[start : start + _CHUNK]) if type(one) in kinds]
    return found


def _with_subclasses(roots: Iterable[type]) -> Iterator[type]:
    for root in roots:
        yield root
        yield from _with_subclasses(root.__subclasses__())


# ------------------------------------------------------------------------------------------------------ naming

_DEPTH = 4
_LARGEST = 1000
"""Entries of a container through which a name is looked for; a larger one is somebody's index of everything."""

_THROUGH = (dict, list, tuple, types.CellType, types.BuiltinMethodType, types.MethodType, functools.partial)
"""What has no name of its own: a generator in it goes by the name of what holds it."""


def _named(generators: Sequence[Any], hidden: Sequence[Any]) -> dict[str, Any]:
    inner = {id(_bit_generator(one)) for one in generators} - {None}
    outer = [one for one in generators if id(one) not in inner and _has_state(one)]
    known = {
        id(torch.default_generator): "torch.default_generator",
        id(np.random.mtrand._rand): "numpy.random",
        id(random._inst): "random",
    }
    holders = _Holders([one for one in outer if id(one) not in known], hidden)
    found: dict[str, Any] = {}
    for one in outer:
        name = known.get(id(one)) or holders.name(one)
        if name:
            found[_unused(name, found)] = one
    return dict(sorted(found.items()))


def _bit_generator(generator: Any) -> Any:
    """What a NumPy generator draws from: an object of its own, with the same state. ``None`` for any other."""
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator
    return generator._bit_generator if isinstance(generator, np.random.RandomState) else None


def _has_state(generator: Any) -> bool:
    try:
        _State.of(generator)
    except Exception:  # a subclass of the user's may do anything
        return False
    return True


def _unused(name: str, names: Mapping[str, Any]) -> str:
    numbered = (name if number == 1 else f"{name} ({number})" for number in itertools.count(1))
    return next(one for one in numbered if one not in names)


@dataclass(frozen=True, slots=True, order=True)
class _Name:
    """``rank``: the lower, the more a name tells. ``package``: whose it is."""

    rank: int
    text: str
    package: str

    def inside(self, place: str) -> _Name:
        return _Name(self.rank, f"{self.text}{place}", self.package)


class _Holders:
    """What holds some objects, what holds that, and so on up to something that has a name."""

    def __init__(self, objects: Sequence[Any], hidden: Sequence[Any]) -> None:
        self._modules = {id(vars(module)): module.__name__ for module in list(sys.modules.values())}
        self._of: dict[int, list[Any]] = {}
        self._hidden = hidden
        level = list(objects)
        for _ in range(_DEPTH):
            self._look_up(level)
            level = [holder for one in level for holder in self._of[id(one)] if self._is_passed(holder)]

    def name(self, generator: Any) -> str:
        """The best name; empty where only the standard library or hashbench hold it."""
        names = sorted(self._names(generator, depth=_DEPTH))
        if not names:
            return f"an unnamed {type(generator).__module__.partition('.')[0]} {type(generator).__name__}"
        return next((one.text for one in names if one.package.partition(".")[0] not in _NOT_USERS), "")

    def _look_up(self, objects: Sequence[Any]) -> None:
        wanted = {id(one) for one in objects}
        self._of |= {number: [] for number in wanted}
        if not wanted:
            return
        modules = [vars(module) for module in list(sys.modules.values())]
        everything = {id(one): one for one in [*gc.get_referrers(*objects), *modules, *self._hidden]}
        ours = {id(objects), id(self._hidden), id(self._of), *map(id, self._of.values())}
        for holder in [one for number, one in everything.items() if number not in ours and not _is_large(one)]:
            for number in wanted.intersection(map(id, gc.get_referents(holder))):
                self._of[number].append(holder)

    def _is_passed(self, holder: Any) -> bool:
        return isinstance(holder, _THROUGH) and id(holder) not in self._of and id(holder) not in self._modules

    def _names(self, one: Any, *, depth: int) -> Iterator[_Name]:
        for holder in self._of.get(id(one), ()) if depth else ():
            if isinstance(holder, dict):
                yield from self._names_in_dict(holder, one, depth=depth)
            elif isinstance(holder, (list, tuple)):
                yield from self._names_in_sequence(holder, one, depth=depth)
            elif isinstance(holder, _THROUGH):
                yield from self._names(holder, depth=depth - 1)
            elif isinstance(holder, types.FunctionType):
                yield from _names_of_part(holder, one)
            elif not isinstance(holder, (type, *_PASSING)):
                yield from _names_in_instance(holder, one)

    def _names_in_dict(self, holder: dict[Any, Any], one: Any, *, depth: int) -> Iterator[_Name]:
        keys = [key for key, value in list(holder.items()) if value is one]
        module = self._modules.get(id(holder))
        if module is not None:
            yield from (_Name(0, f"{module.removeprefix(_ZOO)}.{key}", module) for key in keys)
            return
        for owner in self._of.get(id(holder), ()):
            if isinstance(owner, type):
                yield from (_Name(1, f"{owner.__qualname__}.{key}", owner.__module__) for key in keys)
            elif getattr(owner, "__dict__", None) is holder:
                kind = type(owner)
                yield from (_Name(2, f"{kind.__qualname__}.{key}", kind.__module__) for key in keys)
        for name in self._names(holder, depth=depth - 1):
            yield from (name.inside(f"[{key!r}]") for key in keys)

    def _names_in_sequence(self, holder: Sequence[Any], one: Any, *, depth: int) -> Iterator[_Name]:
        places = [place for place, value in enumerate(holder) if value is one]
        for name in self._names(holder, depth=depth - 1):
            yield from (name if name.rank == _PARTS else name.inside(f"[{place}]") for place in places)


def _is_large(holder: Any) -> bool:
    return isinstance(holder, (list, tuple)) and len(holder) > _LARGEST


_PARTS = 3
_PASSING = (types.FrameType, types.GeneratorType, types.CoroutineType, types.ModuleType)
_ZOO = "hashbench_zoo_"
"""What :mod:`hashbench.suites.python_suites` puts before the name of a file."""


def _names_of_part(function: types.FunctionType, part: Any) -> Iterator[_Name]:
    """Names of a function's closure or defaults."""
    for what in ("closure", "defaults", "kwdefaults"):
        if getattr(function, f"__{what}__") is part:
            word = "closure" if what == "closure" else "default"
            yield _Name(_PARTS, f"{word} of {function.__qualname__}", function.__module__ or "")


def _names_in_instance(owner: Any, value: Any) -> Iterator[_Name]:
    """Attributes that live inside the instance, as the interpreter keeps them at first, and slots."""
    kind = type(owner)
    attributes = dict(getattr(owner, "__dict__", {}))
    for name, slot in [item for base in kind.__mro__ for item in list(vars(base).items())]:
        if isinstance(slot, types.MemberDescriptorType):
            with suppress(AttributeError):
                attributes[name] = slot.__get__(owner)
    for name in [name for name, held in attributes.items() if held is value]:
        yield _Name(2, f"{kind.__qualname__}.{name}", kind.__module__)
