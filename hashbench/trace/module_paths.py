"""Fully qualified name of the module being called, kept by calls of modules and by global module hooks."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import inspect
import threading
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import itemgetter
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch.nn.modules.module import (
    _global_backward_hooks,
    _global_backward_pre_hooks,
    _global_forward_hooks,
    _global_forward_hooks_always_called,
    _global_forward_pre_hooks,
)
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

_STEP_HOOKS: tuple[dict[int, Any], ...] = (_global_optimizer_pre_hooks, _global_optimizer_post_hooks)
_HOOKS: tuple[dict[int, Any], ...] = (
    *_STEP_HOOKS,
    _global_forward_pre_hooks,
    _global_forward_hooks,
    _global_forward_hooks_always_called,
)


class NamedState(NamedTuple):
    """Parameters and buffers of a model, in the order of their numbers, the first of which is ``first``. A tensor that
    has several names is called by the last of its numbers."""

    first: int
    tensors: list[torch.Tensor]


_Known = tuple[Callable[[], torch.nn.Module | None], str, int]
"""A module: a weak reference, its path, and its place in ``Contexts.modules``."""

_NOWHERE: _Known = lambda: None, "", 0


class Contexts:
    """Numbers for where calls are made; each stands for a module, an iteration, and whether an optimizer steps.

    ``cell`` holds the one of now. A step has a number for each module that is known, from ``start`` on, by the module's
    place in ``modules``. The step of now may get more; the next begins behind them.
    """

    __slots__ = ("cell", "modules", "start", "steps")

    def __init__(self) -> None:
        self.cell = ctypes.c_uint32()
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


class Listener:
    """Is told what happens while modules are followed; this one does nothing."""

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has made a step."""

    def changed(self) -> None:
        """A step of an optimizer begins or ends."""

    def named(self, state: NamedState) -> None:
        """A model becomes known."""


class ModulePaths:
    """Where in which model we are: paths such as ``ResNet.layer1.0.conv1``; ``optimizing`` while an optimizer steps;
    and ``contexts``, numbers for both.

    torch's own way to call global hooks is most of their cost, and many workloads call a module every 50 µs: where no
    hook but these is in force, a call is made by :func:`_call_impl` below, and the hooks are registered once another
    one is. The code of torch's function is exchanged: replacing ``Module.__call__`` was measured at 0.2 ms a trace,
    since it invalidates Python's caches of every module class.

    What a trace does once is done in caches that are cold, ten times slower than measured in a loop: few objects are
    touched, and few made.
    """

    def __init__(self) -> None:
        self.optimizing = False
        self.following = False
        self.hooks = 0
        """How many global hooks of ours are in force before and after each module: 1 or 0."""
        self.original: Any = None
        self.contexts = Contexts()
        self.get_ident, self.thread = threading.get_ident, 0
        self.calls = [_NOWHERE]
        """The modules that we are in."""
        self._paths: dict[int, _Known] = {}
        self.known_path = self._paths.get
        self._known = [_NOWHERE]  # by place
        self._attributes: list[str] = []  # of the state, by number
        self._owners: list[int] = []  # the place of its module; less than 0 (~place) where it is a buffer
        self._roots: dict[str, int] = {}
        self._listener = Listener()

    @property
    def current(self) -> str:
        """The path of the module that we are in; empty outside of all."""
        return self.calls[-1][1]

    def register(self, root: torch.nn.Module) -> NamedState:
        """Name a model and all modules in it after the class of the root; a second root of one class gets ``@2``."""
        name = type(root).__name__
        self._roots[name] = count = self._roots.get(name, 0) + 1
        modules: dict[torch.nn.Module, str] = {}
        _walk(root, name if count == 1 else f"{name}@{count}", modules)
        attributes, owners, places = self._attributes, self._owners, self.contexts.modules
        found = NamedState(len(owners), [])
        for module, path in reversed(modules.items()):  # of tied tensors the first name stays
            place = len(places)
            places.append(path)
            self._paths[id(module)] = known = weakref.ref(module), path, place
            self._known.append(known)
            for attribute, tensor in module._parameters.items():
                if tensor is not None:
                    found.tensors.append(tensor)
                    attributes.append(attribute)
                    owners.append(place)
            for attribute, buffer in module._buffers.items():
                if buffer is not None:
                    found.tensors.append(buffer)
                    attributes.append(attribute)
                    owners.append(~place)
        return found

    def state(self, number: int) -> tuple[str, str, str]:
        """Of a parameter or buffer: which of the two it was, the path of its module, and its name there."""
        owner = self._owners[number]
        place = owner if owner >= 0 else ~owner
        return "parameter" if owner >= 0 else "buffer", self.contexts.modules[place], self._attributes[number]

    def is_state(self, number: int, tensor: torch.Tensor) -> bool:
        """Whether a tensor is that parameter or buffer still: its module may have died, and another one got its id."""
        owner = self._owners[number]
        module, attribute = self._known[owner if owner >= 0 else ~owner][0](), self._attributes[number]
        return module is not None and (
            module._parameters.get(attribute) is tensor or module._buffers.get(attribute) is tensor
        )

    def begin(self, iteration: int | None) -> None:
        """Another iteration, or a step of an optimizer, begins or ends."""
        self.contexts.begin(iteration, optimizing=self.optimizing)
        self.contexts.cell.value = self.contexts.start + self.calls[-1][2]

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Follow the module calls of this thread, and optimizers' steps."""
        self.start(Listener())
        try:
            yield
        finally:
            self.stop()

    def start(self, listener: Listener) -> None:
        """Follow the module calls of this thread, and optimizers' steps, until :meth:`stop`."""
        self.thread, self._listener = threading.get_ident(), listener
        try:
            self.follow()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Follow them no longer, and refer to nobody who listened: what a trace keeps is released with it."""
        self.rest()
        if self.optimizing or len(self.calls) > 1:  # left inside
            self.calls[:] = [_NOWHERE]
            self.optimizing = False
            self._listener.changed()
        self._listener = Listener()

    def follow(self) -> None:
        """Have modules called with less ado, where there are no hooks, else by torch's own code with its global hooks;
        and register hooks of optimizers. Hooks are kept by numbers that torch gives to none."""
        if self.following:
            return
        self.following = True
        call = torch.nn.Module._call_impl
        self.original = known_original(call)
        if self.original is not None and call.__code__ is self.original.__code__:
            call.__kwdefaults__ = {"_followed": self}
            call.__code__ = _call_impl.__code__
            if _global_forward_hooks or _global_forward_pre_hooks:
                self._add_hooks()
        else:
            self._add_hooks()
        _global_optimizer_pre_hooks[-id(self)] = self._begin_step
        _global_optimizer_post_hooks[-id(self)] = self._end_step

    def rest(self) -> None:
        """Undo that: dynamo compiles what hooks do into a graph, cannot follow ours, and compiles anew without."""
        if not self.following:
            return
        self.following = False
        call = torch.nn.Module._call_impl
        if self.original is not None and call.__kwdefaults__ == {"_followed": self}:
            call.__code__ = self.original.__code__
            call.__kwdefaults__ = None
        for hooks in _HOOKS if self.hooks else _STEP_HOOKS:
            hooks.pop(-id(self), None)
        self.hooks = 0

    def others(self) -> None:
        """Another hook is in force, or torch's tracer is on, so that modules are called by torch's own code: ours run
        before those hooks, which were registered later."""
        if not self.hooks and self.following:
            self._add_hooks()
            for hooks in (_global_forward_pre_hooks, _global_forward_hooks):
                hooks.move_to_end(-id(self), last=False)  # type: ignore[attr-defined]

    def _add_hooks(self) -> None:
        self.hooks = 1
        _global_forward_pre_hooks[-id(self)] = self.enter
        _global_forward_hooks[-id(self)] = self.leave
        _global_forward_hooks_always_called[-id(self)] = True

    def enter(self, module: torch.nn.Module, _inputs: Any) -> None:
        """Is called before every module, where :func:`_call_impl` does not do this itself."""
        if self.get_ident() == self.thread:
            known = self.known_path(id(module))
            if known is None or known[0]() is not module:
                known = self.new(module)
            self.calls.append(known)
            self.contexts.cell.value = self.contexts.start + known[2]

    def leave(self, _module: torch.nn.Module, _inputs: Any, _output: Any) -> None:
        """Is called after every module, where :func:`_call_impl` does not do this itself."""
        if len(self.calls) > 1 and self.get_ident() == self.thread:
            self.calls.pop()
            self.contexts.cell.value = self.contexts.start + self.calls[-1][2]

    def new(self, module: torch.nn.Module) -> _Known:
        """Name a module that is no part of a known model."""
        self._listener.named(self.register(module))
        return self._paths[id(module)]

    def _begin_step(self, *_: Any) -> None:
        self.optimizing = True
        self._listener.changed()

    def _end_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.optimizing = False
        self._listener.changed()
        if threading.get_ident() == self.thread:
            self._listener.stepped(optimizer)


def _walk(module: torch.nn.Module, path: str, found: dict[torch.nn.Module, str]) -> None:
    """Put a module and all in it into ``found``, each with its first path, as ``named_modules`` does in thrice the
    time."""
    if module not in found:
        found[module] = path
        for name, child in module._modules.items():
            if child is not None:
                _walk(child, f"{path}.{name}", found)


_KNOWN = frozenset(
    {
        "62587dee2896dff4e5585ac472ac5b15ba49fd64aaec8d79bc136fa95ee5ec3b",  # 2.11 to 2.14
        "3dd0447cad1ac3cb08f3d932c041652ec8ba8ccf48b53ad580494f514f48510f",  # 2.15
    }
)
"""SHA-256 of the sources of ``Module._call_impl`` that :func:`_call_impl` may stand for, by torch's release."""


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
    """What ``torch.nn.Module._call_impl`` returns: in fewer steps where nobody has hooks, else by torch's code. This
    one is run as that function's: global names are those of torch's module. What hooks of ours would do is done in
    place, since each call of a function costs more here than all that it does."""
    if (
        self._backward_hooks
        or self._backward_pre_hooks
        or self._forward_hooks
        or self._forward_pre_hooks
        or _global_backward_pre_hooks
        or _global_backward_hooks
        or _global_forward_hooks
        or _global_forward_pre_hooks
        or torch._C._is_tracing()
    ):
        _followed.others()
        return _followed.original(self, *args, **kwargs)
    if _followed.get_ident() != _followed.thread:
        return self.forward(*args, **kwargs)
    forward = self.forward
    calls, contexts, known = _followed.calls, _followed.contexts, _followed.known_path(id(self))
    if known is None or known[0]() is not self:
        known = _followed.new(self)
    calls.append(known)
    contexts.cell.value = contexts.start + known[2]
    try:
        result = forward(*args, **kwargs)
    except BaseException:
        if _followed.following:
            _followed.leave(self, args, None)
        raise
    if _followed.following and len(calls) > 1:  # a trace may end inside a module, or step aside there
        calls.pop()
        contexts.cell.value = contexts.start + calls[-1][2]
    return result
