"""Fully qualified name of the module being called, kept by global module hooks."""

from __future__ import annotations

import functools
import hashlib
import inspect
import threading
import weakref
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, MutableSequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import itemgetter
from types import FunctionType
from typing import Any

import torch
from torch.nn.modules.module import (
    _global_backward_hooks,
    _global_backward_pre_hooks,
    _global_forward_hooks,
    _global_forward_pre_hooks,
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle


def _nobody(*_: Any) -> None:
    """Is told where nobody listens."""


NamedState = list[tuple[torch.Tensor, str, str, str]]
"""Parameters and buffers of a model: the tensor, its kind, the path of its module, and its name there."""


_Known = tuple[Callable[[], torch.nn.Module | None], str, int]
"""A module: a weak reference, its path, and its place in ``Contexts.modules``."""

_NOWHERE: _Known = lambda: None, "", 0


class Contexts:
    """Numbers for where calls are made; each stands for a module, an iteration, and whether an optimizer steps.

    ``cell[0]`` is the one of now. A step has a number for each module that is known, from ``start`` on, by the module's
    place in ``modules``. The step of now may get more; the next begins behind them.
    """

    __slots__ = ("cell", "modules", "start", "steps")

    def __init__(self) -> None:
        self.cell: MutableSequence[int] | memoryview = [0]
        self.start = 0
        self.modules = [""]
        self.steps: list[tuple[int, int | None, bool]] = [(0, None, False)]

    def begin(self, iteration: int | None, *, optimizing: bool) -> None:
        """Another iteration, or a step of an optimizer, begins or ends."""
        self.start += len(self.modules)
        self.steps.append((self.start, iteration, optimizing))

    def __getitem__(self, number: int) -> tuple[str, int | None, bool]:
        """Path of the module, iteration, and whether an optimizer steps."""
        start, iteration, optimizing = self.steps[bisect_right(self.steps, number, key=itemgetter(0)) - 1]
        return self.modules[number - start], iteration, optimizing


@dataclass(frozen=True, slots=True)
class Listener:
    """Who is told what while modules are followed.

    Attributes:
        stepped: called with an optimizer that has made a step.
        changed: called when a step begins or ends.
        named: called with the state of a model that becomes known.
    """

    stepped: Callable[[torch.optim.Optimizer], object] = _nobody
    changed: Callable[[], object] = _nobody
    named: Callable[[NamedState], object] = _nobody


class ModulePaths:
    """Where in which model we are: paths such as ``ResNet.layer1.0.conv1``; ``optimizing`` while an optimizer steps;
    and ``contexts``, numbers for both.

    torch's own way to call global hooks is most of their cost, and many workloads call a module every 50 µs: where no
    other hook is in force, a call is made by :func:`_call_impl` below. The code of torch's function is exchanged:
    replacing ``Module.__call__`` was measured at 0.2 ms a trace, since it invalidates Python's caches of every module
    class.
    """

    def __init__(self) -> None:
        self.current = ""
        self.optimizing = False
        self.contexts = Contexts()
        self._paths: dict[int, _Known] = {}
        self._state: dict[int, tuple[weakref.ref[torch.nn.Module], str, str]] = {}
        self._roots: Counter[str] = Counter()
        self._hooks: list[RemovableHandle] = []
        self._thread, self._calls = 0, [_NOWHERE]  # the modules that we are in
        self._listener = Listener()
        self.original: Any = None

    def register(self, root: torch.nn.Module) -> NamedState:
        """Name a model and all modules in it after the class of the root; a second root of one class gets ``@2``."""
        name = type(root).__name__
        self._roots[name] += 1
        prefix = name if self._roots[name] == 1 else f"{name}@{self._roots[name]}"
        modules: dict[torch.nn.Module, str] = {}
        _walk(root, prefix, modules)
        found: NamedState = []
        places = self.contexts.modules
        for module, path in reversed(modules.items()):  # of tied tensors the first name stays
            reference = weakref.ref(module)
            self._paths[id(module)] = reference, path, len(places)
            places.append(path)
            for kind, tensors in (("parameter", module._parameters), ("buffer", module._buffers)):
                for attribute, tensor in tensors.items():
                    if tensor is not None:
                        self._state[id(tensor)] = reference, path, attribute
                        found.append((tensor, kind, path, attribute))
        return found

    def state_name(self, tensor: torch.Tensor) -> tuple[str, str]:
        """``("parameter" | "buffer", path)`` of a tensor that belongs to a known module, else two empty texts."""
        reference, path, attribute = self._state.get(id(tensor), (None, "", ""))
        module = reference() if reference is not None else None
        if module is not None and module._parameters.get(attribute) is tensor:
            return "parameter", f"{path}.{attribute}"
        if module is not None and module._buffers.get(attribute) is tensor:
            return "buffer", f"{path}.{attribute}"
        return "", ""  # also where the module's tensor died, and another one got its id

    def begin(self, iteration: int | None) -> None:
        """Another iteration, or a step of an optimizer, begins or ends."""
        self.contexts.begin(iteration, optimizing=self.optimizing)
        self.contexts.cell[0] = self.contexts.start + self._calls[-1][2]

    @contextmanager
    def watched(self, listener: Listener | None = None) -> Iterator[None]:
        """Follow the module calls of this thread, and optimizers' steps."""
        self._thread = threading.get_ident()
        self._calls[:] = [_NOWHERE]
        self._listener = listener or Listener()
        self.follow()
        try:
            yield
        finally:
            self.rest()
            self._calls[:] = [_NOWHERE]
            self.current, self.optimizing = "", False
            self._listener.changed()
            self._listener = Listener()  # nothing refers to who listened: what a trace keeps is released with it

    def follow(self) -> None:
        """Register torch's global hooks, and have modules called with less ado where there are no others."""
        if self._hooks:
            return
        self.enter, self.leave = self._module_hooks()
        self._hooks += (
            register_module_forward_pre_hook(self.enter),
            register_module_forward_hook(self.leave, always_call=True),
            register_optimizer_step_pre_hook(self._begin_step),
            register_optimizer_step_post_hook(self._end_step),
        )
        call = torch.nn.Module._call_impl
        self.original = known_original(call)
        if self.original is not None and call.__code__ is self.original.__code__:
            call.__kwdefaults__ = {"_followed": self}
            call.__code__ = _call_impl.__code__

    def rest(self) -> None:
        """Remove them: dynamo compiles what hooks do into a graph, cannot follow ours, and compiles anew without."""
        call = torch.nn.Module._call_impl
        if self.original is not None and call.__kwdefaults__ == {"_followed": self}:
            call.__code__ = self.original.__code__
            call.__kwdefaults__ = None
        while self._hooks:
            self._hooks.pop().remove()

    def _module_hooks(self) -> tuple[Callable[..., None], Callable[..., None]]:
        """What is called before and after every module; all that they need are variables of this function."""
        get_ident, thread, calls = threading.get_ident, self._thread, self._calls
        known_path, contexts = self._paths.get, self.contexts

        def enter(module: torch.nn.Module, _inputs: Any) -> None:
            if get_ident() == thread:
                known = known_path(id(module))
                if known is None or known[0]() is not module:
                    known = self._new(module)
                calls.append(known)
                self.current = known[1]
                contexts.cell[0] = contexts.start + known[2]

        def leave(_module: torch.nn.Module, _inputs: Any, _output: Any) -> None:
            if len(calls) > 1 and get_ident() == thread:
                del calls[-1]
                outer = calls[-1]
                self.current = outer[1]
                contexts.cell[0] = contexts.start + outer[2]

        return enter, leave

    def _new(self, module: torch.nn.Module) -> _Known:
        """A module that is no part of a known model."""
        self._listener.named(self.register(module))
        return self._paths[id(module)]

    def _begin_step(self, *_: Any) -> None:
        self.optimizing = True
        self._listener.changed()

    def _end_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.optimizing = False
        self._listener.changed()
        if threading.get_ident() == self._thread:
            self._listener.stepped(optimizer)


def _walk(module: torch.nn.Module, path: str, found: dict[torch.nn.Module, str]) -> None:
    """Put a module and all in it into ``found``, each with its first path, as ``named_modules`` does in thrice the
    time."""
    if module not in found:
        found[module] = path
        for name, child in module._modules.items():
            if child is not None:
                _walk(child, f"{path}.{name}", found)


_KNOWN = frozenset({"3dd0447cad1ac3cb08f3d932c041652ec8ba8ccf48b53ad580494f514f48510f"})
"""SHA-256 of the sources of ``Module._call_impl`` that :func:`_call_impl` may stand for: torch 2.15's."""


@functools.cache
def known_original(call: FunctionType) -> FunctionType | None:
    """A function that keeps what ``Module._call_impl`` does now; ``None`` where it is not known to be torch's own."""
    try:
        source = inspect.getsource(call.__code__)
    except (OSError, TypeError):  # torch without its sources
        return None
    if hashlib.sha256(source.encode()).hexdigest() not in _KNOWN:
        return None
    return FunctionType(call.__code__, call.__globals__, call.__name__, call.__defaults__, call.__closure__)


def _call_impl(self: Any, *args: Any, _followed: ModulePaths, **kwargs: Any) -> Any:
    """What ``torch.nn.Module._call_impl`` returns: in fewer steps where no hooks but the two of a ``ModulePaths`` are
    in force, else by torch's code. This one is run as that function's: global names are those of torch's module."""
    if (
        self._backward_hooks
        or self._backward_pre_hooks
        or self._forward_hooks
        or self._forward_pre_hooks
        or _global_backward_pre_hooks
        or _global_backward_hooks
        or len(_global_forward_hooks) != 1
        or len(_global_forward_pre_hooks) != 1
        or torch._C._is_tracing()
    ):
        return _followed.original(self, *args, **kwargs)
    forward = self.forward
    _followed.enter(self, args)
    try:
        result = forward(*args, **kwargs)
    except Exception:
        if _followed._hooks:
            _followed.leave(self, args, None)
        raise
    if _followed._hooks:  # a trace may end inside a module, or step aside there
        _followed.leave(self, args, result)
    return result
