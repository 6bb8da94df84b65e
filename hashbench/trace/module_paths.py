"""Fully qualified name of the module being called, kept by calls of modules and by global module hooks."""

from __future__ import annotations

import functools
import hashlib
import inspect
import threading
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
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
    has several names is called by the first of its numbers."""

    first: int
    tensors: list[torch.Tensor | None]


class Contexts:
    """Numbers for where calls are made; each stands for a module, an iteration, and whether an optimizer steps.

    A step has a number for each module that is known, from ``start`` on, by the module's place in ``modules``. The step
    of now may get more; the next begins behind them.
    """

    __slots__ = ("modules", "start", "steps")

    def __init__(self) -> None:
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


NOT_FOLLOWED, ENTERED, UNKNOWN, TRACED = range(4)
"""What entering a module comes to: it is called by a thread that is not followed; it counts from now on; it has no
place yet, or none any more; ``torch.jit.trace`` is at work."""


class ModuleStack:
    """The modules that a thread is in, each by its place in ``Contexts.modules``; place 0 is outside of all. The native
    recorder has such a stack of its own, in C, where it costs less."""

    def __init__(self) -> None:
        self.thread, self._get_ident = 0, threading.get_ident
        self._place = 0
        self._places: dict[int, int] = {}
        self._inside: list[tuple[int, int]] = []  # id of a module, and the place before

    @property
    def place(self) -> int:
        """That of the module that the thread is in."""
        return self._place

    def begin(self, start: int) -> None:
        """The numbers of contexts begin at ``start`` from now on."""

    def know(self, modules: Sequence[int], first: int) -> None:
        """Give places from ``first`` on to modules, by their ids; 0 is none."""
        self._places.update(zip(modules, count(first)))

    def forget(self) -> None:
        """No module has a place any more."""
        self._places.clear()

    def enter(self, module: torch.nn.Module) -> int:
        """``ENTERED``, ``NOT_FOLLOWED`` or ``UNKNOWN``; ``TRACED`` where torch's own code is to call the module."""
        return TRACED if torch._C._is_tracing() else self.enter_by_hook(module)

    def enter_by_hook(self, module: torch.nn.Module) -> int:
        """The same where torch's own code calls the module."""
        if self._get_ident() != self.thread:
            return NOT_FOLLOWED
        place = self._places.get(id(module), 0)
        if not place:
            return UNKNOWN
        self._inside.append((id(module), self._place))
        self._place = place
        return ENTERED

    def leave(self, module: torch.nn.Module) -> None:
        """Leave a module, and all that were entered since. Does nothing where it was not entered."""
        if self._get_ident() != self.thread:
            return
        for depth in reversed(range(len(self._inside))):
            entered, before = self._inside[depth]
            if entered == id(module):
                self._place = before
                del self._inside[depth:]
                return

    def leave_all(self) -> bool:
        """Leave all modules; whether there were any."""
        inside = bool(self._inside)
        self._inside.clear()
        self._place = 0
        return inside


class Listener:
    """Is told what happens while modules are followed; this one does nothing."""

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has made a step."""

    def changed(self) -> None:
        """A step of an optimizer begins or ends."""

    def named(self, state: NamedState) -> None:
        """A model becomes known."""


class ModulePaths:
    """Where in which model we are: paths such as ``ResNet.layer1.0.conv1``; ``optimizing`` while an optimizer steps,
    but for the calls of its closure; and ``contexts``, numbers for both.

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
        self._known: list[Callable[[], torch.nn.Module | None]] = [lambda: None]  # weak references, by place
        self._died, self._dies = False, _dies(weakref.ref(self))
        self._attributes: list[str] = []  # of the state, by number
        self._ends: list[int] = []  # how many of them there are behind the parameters of each place, and its buffers
        self._roots: dict[str, int] = {}
        self._listener = Listener()
        self.use(ModuleStack())

    def use(self, stack: ModuleStack) -> None:
        """Follow the modules by this stack, which knows none yet."""
        self.stack, self.enter, self.leave = stack, stack.enter, stack.leave

    @property
    def current(self) -> str:
        """The path of the module that we are in; empty outside of all."""
        return self.contexts.modules[self.stack.place]

    def register(self, root: torch.nn.Module) -> NamedState:
        """Name a model and all modules in it after the class of the root, each by its first path as ``named_modules``
        has it; a second root of one class gets ``@2``."""
        name = type(root).__name__
        self._roots[name] = number = self._roots.get(name, 0) + 1
        places, known, attributes, ends = self.contexts.modules, self._known, self._attributes, self._ends
        found, first, dies = NamedState(len(attributes), []), len(places), self._dies
        tensors, modules = found.tensors, dict[int, None]()

        def walk(module: torch.nn.Module, path: str) -> None:
            modules[id(module)] = None
            places.append(path)
            known.append(weakref.ref(module, dies))
            if parameters := module._parameters:
                attributes.extend(parameters.keys())
                tensors.extend(parameters.values())
            ends.append(len(attributes))
            if buffers := module._buffers:
                attributes.extend(buffers.keys())
                tensors.extend(buffers.values())
            ends.append(len(attributes))
            if children := module._modules:
                for name, child in children.items():
                    if child is not None and id(child) not in modules:
                        walk(child, f"{path}.{name}")

        walk(root, name if number == 1 else f"{name}@{number}")
        self.stack.know(list(modules), first)
        return found

    def state(self, number: int) -> tuple[str, str, str]:
        """Of a parameter or buffer: which of the two it was, the path of its module, and its name there."""
        place, is_buffer = self._owner(number)
        return "buffer" if is_buffer else "parameter", self.contexts.modules[place], self._attributes[number]

    def is_state(self, number: int, tensor: torch.Tensor) -> bool:
        """Whether a tensor is that parameter or buffer still: its module may have died, and another one got its id."""
        module, attribute = self._known[self._owner(number)[0]](), self._attributes[number]
        return module is not None and (
            module._parameters.get(attribute) is tensor or module._buffers.get(attribute) is tensor
        )

    def _owner(self, number: int) -> tuple[int, int]:
        """The place of the module of a parameter or buffer, and 1 where it is a buffer."""
        before, is_buffer = divmod(bisect_right(self._ends, number), 2)
        return before + 1, is_buffer

    def begin(self, iteration: int | None) -> None:
        """Another iteration, or a step of an optimizer, begins or ends."""
        self.contexts.begin(iteration, optimizing=self.optimizing)
        self.stack.begin(self.contexts.start)

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
        self.stack.thread, self._listener = threading.get_ident(), listener
        try:
            self.follow()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Follow them no longer, and refer to nobody who listened: what a trace keeps is released with it."""
        self.rest()
        if self.stack.leave_all() or self.optimizing:  # left inside
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
        _global_forward_pre_hooks[-id(self)] = self._enter_by_hook
        _global_forward_hooks[-id(self)] = self._leave_by_hook
        _global_forward_hooks_always_called[-id(self)] = True

    def _enter_by_hook(self, module: torch.nn.Module, _inputs: Any) -> None:
        """Is called before every module, where :func:`_call_impl` does not do this itself."""
        if self.stack.enter_by_hook(module) == UNKNOWN:
            self.meet(module)

    def _leave_by_hook(self, module: torch.nn.Module, _inputs: Any, _output: Any) -> None:
        """Is called after every module, where :func:`_call_impl` does not do this itself."""
        self.leave(module)

    def meet(self, module: torch.nn.Module) -> None:
        """Enter a module that has no place yet, or none any more."""
        state = UNKNOWN
        if self._died:  # which is known only of those that are alive
            self._died = False
            alive = [known() for known in self._known]
            self.stack.know([0 if one is None else id(one) for one in alive], 0)
            state = self.stack.enter_by_hook(module)
        if state == UNKNOWN:
            self._listener.named(self.register(module))
            self.stack.enter_by_hook(module)

    def forget(self) -> None:
        """A module has died, and another one may get its id."""
        if not self._died:
            self._died = True
            self.stack.forget()

    def _begin_step(
        self, _: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Pre-hook of every step: also returns its arguments with the closure replaced, where there is one."""
        self._set_optimizing(True)
        if "closure" in kwargs and callable(kwargs["closure"]):
            return args, {**kwargs, "closure": self._outside_step(kwargs["closure"])}
        if len(args) > 1 and callable(args[1]):  # behind the optimizer
            return (args[0], self._outside_step(args[1]), *args[2:]), kwargs
        return None

    def _outside_step(self, closure: Callable[..., Any]) -> Callable[..., Any]:
        """Return a closure whose calls are no part of the optimizer's step that makes them."""

        @functools.wraps(closure)
        def called(*args: Any, **kwargs: Any) -> Any:
            self._set_optimizing(False)
            try:
                return closure(*args, **kwargs)
            finally:
                if self.following:  # else the trace was left inside
                    self._set_optimizing(True)

        return called

    def _set_optimizing(self, optimizing: bool) -> None:
        self.optimizing = optimizing
        self._listener.changed()

    def _end_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._set_optimizing(False)
        if threading.get_ident() == self.stack.thread:
            self._listener.stepped(optimizer)


def _dies(paths: weakref.ref[ModulePaths]) -> Callable[[object], None]:
    """What is called when a module dies. It does not keep the paths."""

    def dies(_module: object) -> None:
        told = paths()
        if told is not None:
            told.forget()

    return dies


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
    one is run as that function's: global names are those of torch's module."""
    if (
        self._backward_hooks
        or self._backward_pre_hooks
        or self._forward_hooks
        or self._forward_pre_hooks
        or _global_backward_pre_hooks
        or _global_backward_hooks
        or _global_forward_hooks
        or _global_forward_pre_hooks
    ):
        _followed.others()
        return _followed.original(self, *args, **kwargs)
    state = _followed.enter(self)
    if state != 1:  # ENTERED
        if state == 3:  # TRACED
            _followed.others()
            return _followed.original(self, *args, **kwargs)
        if state == 0:  # NOT_FOLLOWED
            return self.forward(*args, **kwargs)
        _followed.meet(self)
    try:
        result = self.forward(*args, **kwargs)
    except BaseException:
        _followed.leave(self)
        raise
    _followed.leave(self)
    return result
