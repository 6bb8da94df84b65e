"""See the calls of a module without a hook on it: what hangs on a module is copied, pickled and saved with it.

The function stands in the module's class while a recording is open, and tells the calls of that one object. A copy, a
pickle or a replica of the module is therefore a module as any other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Self

import torch
from torch.fx._symbolic_trace import is_fx_symbolic_tracing

OnCall = Callable[[torch.nn.Module, tuple[Any, ...], dict[str, Any]], None]
"""Called with the module, and the arguments and keyword arguments that it is called with."""

_CALL, _MARK, _OWN = "__call__", "_hashbench_listeners", "_hashbench_own"


class _Listeners:
    """Whom to tell of which modules. A pickle of it, made with a class of the program's script, has none."""

    def __init__(self) -> None:
        self.all: tuple[SeenCalls, ...] = ()

    def __reduce__(self) -> tuple[type[Self], tuple[()]]:
        return type(self), ()

    def call(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Tell those that listen to this module."""
        for each in self.all:
            if each.module is module:
                each.on_call(module, args, kwargs)


class SeenCalls:
    """Tell the calls of a module, from now on until :meth:`remove`.

    Attributes:
        module: whose calls are told.
        told: called before each of them, but not while the module is compiled or traced to a graph.
    """

    def __init__(self, module: torch.nn.Module, on_call: OnCall) -> None:
        self.module, self.on_call = module, on_call
        self._class = type(module)
        standing = getattr(vars(self._class).get(_CALL), _MARK, None)
        self._listeners: _Listeners = _put_into(self._class) if standing is None else standing
        self._listeners.all += (self,)

    def remove(self) -> None:
        """Tell no further call; the class becomes what it was once nobody listens."""
        listeners = self._listeners
        listeners.all = tuple(each for each in listeners.all if each is not self)
        standing = vars(self._class).get(_CALL)
        if listeners.all or getattr(standing, _MARK, None) is not listeners:
            return  # others listen, or the program put a function of its own there, which may call ours
        own = getattr(standing, _OWN)
        if own is None:
            delattr(self._class, _CALL)
        else:
            setattr(self._class, _CALL, own)


def _put_into(owner: type[torch.nn.Module]) -> _Listeners:
    """Put a function that tells calls into a class, above its own or the inherited one, and return whom it tells."""
    own, listeners = vars(owner).get(_CALL), _Listeners()

    def __call__(module: Any, /, *args: Any, **kwargs: Any) -> Any:  # noqa: N807 – stands in its place
        if not (torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None or is_fx_symbolic_tracing()):
            listeners.call(module, args, kwargs)
        if own is not None:
            return own(module, *args, **kwargs)
        return super(owner, module).__call__(*args, **kwargs)

    functools.update_wrapper(__call__, getattr(owner, _CALL))
    setattr(__call__, _MARK, listeners)
    setattr(__call__, _OWN, own)
    setattr(owner, _CALL, __call__)
    return listeners
