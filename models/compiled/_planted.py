"""Faults of the compiler, planted in this process by patches of torch that can be undone.

A model's function calls :func:`plant`, :func:`undo` or :func:`plant_if` before it builds its module, so that a process
has at most one fault: that of the model built last. A fault gets a key of its own in the compiler's caches, which
otherwise would give the wrong code to its twin.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.compiler import config


@dataclass(slots=True)
class Patches:
    """Changes of torch in this process, undone last first by :meth:`undo`."""

    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def attribute(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute of a module, class or configuration; a class gets its own ``__dict__`` entry back."""
        own = vars(owner) if isinstance(owner, type) else {}
        before = own.get(name, getattr(owner, name))
        inherited = isinstance(owner, type) and name not in own
        self._stack.callback(*((delattr, owner, name) if inherited else (setattr, owner, name, before)))
        setattr(owner, name, value)

    def item(self, mapping: MutableMapping[Any, Any], key: Any, value: Any) -> None:
        """Set an entry that a mapping has."""
        self._stack.callback(mapping.__setitem__, key, mapping[key])
        mapping[key] = value

    def undo(self) -> None:
        """Restore all that was changed."""
        self._stack.close()


Fault = Callable[[Patches], None]
"""Patches torch so that it compiles wrongly."""


@dataclass(slots=True)
class _Process:
    """What is planted here: the name of the fault and its patches; empty and ``None`` where there is none."""

    fault: str = ""
    patches: Patches | None = None


_HERE = _Process()


def plant(fault: Fault) -> None:
    """Plant ``fault`` in place of any other; what was compiled so far is forgotten. Again: nothing changes."""
    name = f"{fault.__module__}.{fault.__qualname__}"  # a zoo file may be imported again, with functions of its own
    if _HERE.fault == name:
        return
    undo()
    patches = Patches()
    try:
        fault(patches)
        patches.attribute(config, "cache_key_tag", f"{config.cache_key_tag} planted {name}")
    except BaseException:
        patches.undo()
        raise
    _HERE.fault, _HERE.patches = name, patches
    torch._dynamo.reset()


def undo() -> None:
    """Restore torch; what was compiled so far is forgotten. Without a fault: nothing changes."""
    if _HERE.patches is not None:
        _HERE.patches.undo()
        _HERE.fault, _HERE.patches = "", None
        torch._dynamo.reset()


def plant_if(wrong: bool, fault: Fault) -> None:
    """Plant ``fault`` for a specimen, and nothing for its twin."""
    if wrong:
        plant(fault)
    else:
        undo()


def is_planted() -> bool:
    """Return True if this process compiles wrongly."""
    return _HERE.patches is not None


@contextlib.contextmanager
def planted(fault: Fault) -> Iterator[None]:
    """Plant ``fault`` until the end of the context."""
    plant(fault)
    try:
        yield
    finally:
        undo()
