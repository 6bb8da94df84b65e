"""Replaces an object by another wherever it is referenced: modules, classes, instances, closures, defaults, lists.

``from time import perf_counter`` binds a name that a patched ``time`` module never reaches, and so do a default
argument and ``self.now = time.time``. The garbage collector knows all of these places.

Not reached: sets, the insides of iterators (``map``, ``iter(time.time, None)``), and local variables of functions that
are running already.
"""

from __future__ import annotations

import collections
import ctypes
import functools
import gc
import importlib
import sys
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

_Setter = Callable[[Any], object]
_HEAP_TYPE = 1 << 9
_DEPTH = 3
"""How many immutable objects may be around a reference: a tuple of defaults is one, a partial in it another."""


class Substitute:
    """A callable that stands for another while it is active, and is the other one afterwards, whoever still holds it.

    Not a function, so that as a class attribute it binds as little as the builtin that it stands for. A deep copy is
    itself, and so is what was pickled while it stood under the name of the original.

    Args:
        original: what it stands for.
        answer: what a call returns instead.
        is_spared: tells by the caller's frame whether the original is to answer.
    """

    __slots__ = ("__weakref__", "active", "answer", "is_spared", "original")

    def __init__(
        self,
        original: Callable[..., Any],
        answer: Callable[..., Any],
        *,
        is_spared: Callable[[FrameType], bool] | None = None,
    ) -> None:
        self.original, self.answer, self.is_spared = original, answer, is_spared
        self.active = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.active or (self.is_spared is not None and self.is_spared(sys._getframe(1))):
            return self.original(*args, **kwargs)
        return self.answer(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "original"), name)

    def __copy__(self) -> Substitute:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Substitute:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        found = self.original.__reduce__()
        return _find, (self.original.__module__, found) if isinstance(found, str) else found


@contextmanager
def substituted(substitutes: Sequence[Substitute], *, spared: Collection[str]) -> Iterator[None]:
    """Put each substitute wherever its original is held, except in modules and classes of the packages ``spared``.

    What came to hold a substitute inside gets the original, too, on leaving.
    """
    held = _reference_counts(substitutes)
    exchange = _Exchange(spared)
    try:
        exchange.make([one.original for one in substitutes], substitutes)
        yield
    finally:
        _deactivate(substitutes)
        exchange.undo()
        now = _reference_counts(substitutes)
        kept = [substitutes[index] for index in range(len(now)) if now[index] > held[index]]
        _Exchange(()).make(kept, [one.original for one in kept])


def _reference_counts(substitutes: Sequence[Substitute]) -> list[int]:
    return [sys.getrefcount(one) for one in substitutes]


def _deactivate(substitutes: Sequence[Substitute]) -> None:
    for one in substitutes:
        one.active = False


@contextmanager
def changed_type(owner: type, name: str, value: object) -> Iterator[None]:
    """An attribute of a class changed, also where the class is written in C and refuses it.

    Every reference to the class, and every instance, sees it: no other way reaches ``datetime.datetime.now``.
    """
    attributes = _own_attributes(owner)
    before = attributes[name]
    try:
        _set_own(owner, attributes, name, value)
        yield
    finally:
        _set_own(owner, attributes, name, before)


@contextmanager
def changed(owner: object, name: str, value: object) -> Iterator[None]:
    """An attribute of a module or class changed, and put back; taken away again where the class had inherited it."""
    own = name in vars(owner)
    before = getattr(owner, name)
    try:
        setattr(owner, name, value)
        yield
    finally:
        if own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


def _own_attributes(owner: type) -> dict[str, Any]:
    """The dict behind ``owner.__dict__``, which is only a view of it."""
    (found,) = gc.get_referents(owner.__dict__)
    assert isinstance(found, dict)
    return found


def _set_own(owner: type, attributes: dict[str, Any], name: str, value: object) -> None:
    attributes[name] = value
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(owner))  # the interpreter caches what it found on a class


def _find(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


class _Swap:
    """``new`` in the places of ``holder`` where ``old`` was."""

    __slots__ = ("holder", "new", "old")

    def __init__(self, holder: Any, old: Any, new: Any) -> None:
        self.holder, self.old, self.new = holder, old, new

    def make(self) -> None:
        _put(self.holder, self.old, self.new)

    def undo(self) -> None:
        """Put back what was there, except where something else has come since."""
        _put(self.holder, self.new, self.old)


class _Exchange:
    """Puts objects in the place of others, and back."""

    def __init__(self, spared: Collection[str]) -> None:
        self.spared = spared
        self.done: list[_Swap] = []

    def make(self, olds: Sequence[Any], news: Sequence[Any], *, depth: int = _DEPTH) -> None:
        """``news[i]`` wherever ``olds[i]`` is held; these two sequences themselves are left alone."""
        if not olds:
            return
        ours = {id(olds), id(news)}
        exchanged = {id(old): (old, new) for old, new in zip(olds, news, strict=True)}
        ours |= {id(pair) for pair in exchanged.values()}
        around: list[Any] = []
        rebuilt: list[Any] = []
        for holder in _holders(olds):
            if id(holder) in ours or isinstance(holder, (Substitute, _Swap)) or self._is_spared(holder):
                continue
            for old, new in _held_by(holder, exchanged):
                self._swap(holder, old, new)
                whole = _rebuilt(holder, old, new) if depth else None
                if whole is not None:
                    around.append(holder)
                    rebuilt.append(whole)
        self.make(around, rebuilt, depth=depth - 1)

    def undo(self) -> None:
        """Put back what was there, latest first."""
        while self.done:
            self.done.pop().undo()

    def _swap(self, holder: Any, old: Any, new: Any) -> None:
        self.done.append(_Swap(holder, old, new))
        self.done[-1].make()

    def _is_spared(self, holder: Any) -> bool:
        names = [holder.get("__name__"), holder.get("__module__")] if isinstance(holder, dict) else []
        return any(isinstance(name, str) and name.partition(".")[0] in self.spared for name in names)


def _holders(objects: Sequence[Any]) -> Iterator[Any]:
    """What refers to any of these objects: also modules that ``gc.freeze`` has hidden from the collector."""
    seen = set()
    for holder in [*gc.get_referrers(*objects), *(vars(module) for module in list(sys.modules.values()))]:
        if id(holder) not in seen:
            seen.add(id(holder))
            yield holder


def _held_by(holder: Any, exchanged: Mapping[int, tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    held = {id(one) for one in gc.get_referents(holder)}
    return [exchanged[number] for number in held & exchanged.keys()]


def _put(holder: Any, old: Any, new: Any) -> None:
    for put in _places(holder, old):
        with suppress(AttributeError, TypeError):  # read-only: the insides of some C type
            put(new)


def _places(holder: Any, value: Any) -> Iterator[_Setter]:
    """Setters of the places in ``holder`` that hold ``value``."""
    if isinstance(holder, dict):
        owner = _class_of(holder)
        for name in [name for name, found in list(holder.items()) if found is value]:
            yield functools.partial(dict.__setitem__, holder, name) if owner is None else _attribute(owner, name)
        if isinstance(holder, collections.defaultdict) and holder.default_factory is value:
            yield _attribute(holder, "default_factory")
    elif isinstance(holder, (list, collections.deque)):
        for index in [index for index, found in enumerate(holder) if found is value]:
            yield functools.partial(holder.__setitem__, index)
    elif isinstance(holder, types.CellType):
        yield _attribute(holder, "cell_contents")
    elif isinstance(holder, types.FunctionType):
        if holder.__defaults__ is value:
            yield _attribute(holder, "__defaults__")
    elif isinstance(holder, functools.partial):
        yield from _places_in_partial(holder, value)
    elif type(holder).__flags__ & _HEAP_TYPE and not isinstance(holder, type):
        yield from _places_in_instance(holder, value)


def _attribute(owner: Any, name: str) -> _Setter:
    return lambda value: setattr(owner, name, value)


def _places_in_partial(holder: functools.partial[Any], value: Any) -> Iterator[_Setter]:
    if holder.func is value:
        yield lambda new: holder.__setstate__((new, holder.args, holder.keywords, vars(holder)))  # type: ignore[attr-defined]
    if holder.args is value:
        yield lambda new: holder.__setstate__((holder.func, new, holder.keywords, vars(holder)))  # type: ignore[attr-defined]


def _places_in_instance(holder: Any, value: Any) -> Iterator[_Setter]:
    """Attributes, which the interpreter keeps inside the instance until somebody asks for its ``__dict__``."""
    attributes = getattr(holder, "__dict__", None)
    if isinstance(attributes, dict):
        for name in [name for name, found in list(attributes.items()) if found is value]:
            yield functools.partial(dict.__setitem__, attributes, name)
    for owner in type(holder).__mro__:
        for slot in [item for item in list(vars(owner).values()) if isinstance(item, types.MemberDescriptorType)]:
            with suppress(AttributeError):
                if slot.__get__(holder) is value:
                    yield functools.partial(slot.__set__, holder)


def _class_of(attributes: dict[Any, Any]) -> type | None:
    """The class whose attributes these are; to change them elsewhere would leave the interpreter's caches stale."""
    if "__module__" not in attributes or "__doc__" not in attributes:
        return None
    owners = [owner for owner in gc.get_referrers(attributes) if isinstance(owner, type)]
    return next((owner for owner in owners if gc.get_referents(owner.__dict__)[0] is attributes), None)


def _rebuilt(holder: Any, old: Any, new: Any) -> Any:
    """An immutable holder made anew; ``None`` for any other."""
    if isinstance(holder, tuple) and any(item is old for item in holder):
        items = [new if item is old else item for item in holder]
        return type(holder)(*items) if hasattr(holder, "_fields") else tuple(items)
    if isinstance(holder, types.MethodType) and holder.__func__ is old and callable(new):
        return types.MethodType(new, holder.__self__)
    if isinstance(holder, (staticmethod, classmethod)) and holder.__func__ is old:
        return type(holder)(new)
    return None
