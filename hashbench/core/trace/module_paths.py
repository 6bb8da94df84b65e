"""Track the fully qualified name of the module being called, by module calls and global module hooks."""

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

from hashbench.core.trace.steps import StepClock

_MODULE_HOOKS: tuple[dict[int, Any], ...] = (
    _global_forward_pre_hooks,
    _global_forward_hooks,
    _global_forward_hooks_always_called,
)


class NamedState(NamedTuple):
    """Parameters and buffers of a model, numbered consecutively from ``first``. A tensor with several names has the
    first."""

    first: int
    tensors: list[torch.Tensor | None]

    def numbers(self) -> dict[int, int]:
        """Return the numbers by the ids of the tensors."""
        return dict(zip(map(id, reversed(self.tensors)), count(self.first + len(self.tensors) - 1, -1)))


class Contexts:
    """Numbers of call contexts: module, iteration, and whether an optimizer steps.

    Each step has one number per known module: ``start`` plus the module's index in ``modules``. The current step may
    grow; the next one starts after it.
    """

    __slots__ = ("modules", "start", "steps")

    def __init__(self) -> None:
        self.start = 0
        self.modules = [""]
        self.steps: list[tuple[int, int | None, bool]] = [(0, None, False)]

    def begin(self, iteration: int | None, *, optimizing: bool) -> None:
        """Start a context range: a new iteration, or the begin or end of an optimizer step."""
        self.start += len(self.modules)
        self.steps.append((self.start, iteration, optimizing))

    def __getitem__(self, number: int) -> tuple[str, int | None, bool]:
        """Return the module's path, the iteration, and whether an optimizer steps."""
        start, iteration, optimizing = self.steps[bisect_right(self.steps, number, key=itemgetter(0)) - 1]
        return self.modules[number - start], iteration, optimizing


NOT_FOLLOWED, ENTERED, UNKNOWN, TRACED = range(4)
"""Results of entering a module: called by an untracked thread; entered; the module has no index (yet, or any more);
``torch.jit.trace`` is active."""


class ModuleStack:
    """Stack of the modules that a thread is in, by their index in ``Contexts.modules``; index 0 is outside of all. The
    native recorder has its own stack in C++, which costs less."""

    def __init__(self) -> None:
        self.thread, self._get_ident = 0, threading.get_ident
        self._place = 0
        self._places: dict[int, int] = {}
        self._inside: list[tuple[int, int]] = []  # id of a module, index of the module before

    @property
    def place(self) -> int:
        """Index of the current module."""
        return self._place

    def begin(self, start: int) -> None:
        """Start the numbers of contexts at ``start`` from now on."""

    def know(self, modules: Sequence[int], first: int) -> None:
        """Assign indices from ``first`` on to modules, by their ids; id 0 is no module."""
        self._places.update(zip(modules, count(first)))

    def forget(self) -> None:
        """Drop the indices of all modules."""
        self._places.clear()

    def enter(self, module: torch.nn.Module) -> int:
        """Enter a module; return ``ENTERED``, ``NOT_FOLLOWED``, ``UNKNOWN``, or ``TRACED`` if torch's own code must
        call it."""
        return TRACED if torch._C._is_tracing() else self.enter_by_hook(module)

    def enter_by_hook(self, module: torch.nn.Module) -> int:
        """Enter a module that torch's own code calls; results as of :meth:`enter`."""
        if self._get_ident() != self.thread:
            return NOT_FOLLOWED
        place = self._places.get(id(module), 0)
        if not place:
            return UNKNOWN
        self._inside.append((id(module), self._place))
        self._place = place
        return ENTERED

    def leave(self, module: torch.nn.Module) -> None:
        """Leave a module, and all entered since. No effect if it was not entered."""
        if self._get_ident() != self.thread:
            return
        for depth in reversed(range(len(self._inside))):
            entered, before = self._inside[depth]
            if entered == id(module):
                self._place = before
                del self._inside[depth:]
                return

    def leave_all(self) -> bool:
        """Leave all modules; return whether there were any."""
        inside = bool(self._inside)
        self._inside.clear()
        self._place = 0
        return inside


class ModuleListener:
    """Callbacks while modules are followed; these do nothing."""

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Called after an optimizer stepped."""

    def changed(self) -> None:
        """Called when an optimizer step begins or ends."""

    def named(self, state: NamedState) -> None:
        """Called when a model becomes known."""


class ModulePaths:
    """Path of the current module, such as ``ResNet.layer1.0.conv1``; ``optimizing`` while an optimizer steps (except in
    its closure); ``clock`` of the steps; and ``contexts``, numbers for both.

    torch's own dispatch of global hooks is most of their cost, and many workloads call a module every 50 µs: if no
    other hook is active, modules are called by :func:`_call_impl` below, and our hooks are registered only when another
    hook appears. The code object of torch's function is swapped: replacing ``Module.__call__`` took 0.2 ms a trace,
    since it invalidates Python's caches of every module class.

    Per-trace setup runs with cold caches, ten times slower than measured in a loop: it touches and creates few objects.
    """

    def __init__(self) -> None:
        self.optimizing = False
        self.following = False
        self.hooks = 0
        """Number of our global hooks before and after each module: 1 or 0."""
        self.original: Any = None
        self.contexts = Contexts()
        self._known: list[Callable[[], torch.nn.Module | None]] = [lambda: None]  # weak references, by index
        self._died, self._dies = False, _death_callback(weakref.ref(self))
        self._attributes: list[str] = []  # names of parameters and buffers, by number
        self._ends: list[int] = []  # end of the parameters, and of the buffers, of each module in _attributes
        self._roots: dict[str, int] = {}
        self._listener = ModuleListener()
        self._counting: ModuleListener | None = None
        self.clock = StepClock()
        self.use(ModuleStack())

    def use(self, stack: ModuleStack) -> None:
        """Follow modules by this stack, which has no indices yet."""
        self.stack, self.enter, self.leave = stack, stack.enter, stack.leave

    @property
    def current(self) -> str:
        """Path of the current module; ``""`` outside of all."""
        return self.contexts.modules[self.stack.place]

    def register(self, root: torch.nn.Module) -> NamedState:
        """Name a model and its submodules after the root's class, each by its first path in ``named_modules``; a second
        root of one class gets ``@2``."""
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

    def known(self) -> Iterator[torch.nn.Module]:
        """Yield the living modules that were named so far."""
        return (module for known in self._known[:] if (module := known()) is not None)

    def roots(self) -> dict[str, torch.nn.Module]:
        """Return the living models that were named so far, by their names."""
        named = zip(self.contexts.modules, self._known, strict=False)
        return {path: module for path, known in named if "." not in path and (module := known()) is not None}

    def stand_in(self, path: str) -> torch.nn.Module:
        """Return a module without state that has this path, to be entered while its code runs elsewhere (compiled)."""
        module = torch.nn.Module()
        self.stack.know([id(module)], len(self.contexts.modules))
        self.contexts.modules.append(path)
        self._known.append(weakref.ref(module, self._dies))
        self._ends += [len(self._attributes)] * 2
        return module

    def state(self, number: int) -> tuple[str, str, str]:
        """Return ``"buffer"`` or ``"parameter"``, the path of its module, and its name there."""
        place, is_buffer = self._owner(number)
        return "buffer" if is_buffer else "parameter", self.contexts.modules[place], self._attributes[number]

    def is_state(self, number: int, tensor: torch.Tensor) -> bool:
        """Return True if a tensor still is that parameter or buffer: its module may be dead and its id reused."""
        module, attribute = self._known[self._owner(number)[0]](), self._attributes[number]
        return module is not None and (
            module._parameters.get(attribute) is tensor or module._buffers.get(attribute) is tensor
        )

    def _owner(self, number: int) -> tuple[int, int]:
        """Return the index of the module of a parameter or buffer, and 1 for a buffer."""
        before, is_buffer = divmod(bisect_right(self._ends, number), 2)
        return before + 1, is_buffer

    def begin(self, iteration: int | None) -> None:
        """Start a context range: a new iteration, or the begin or end of an optimizer step."""
        self.contexts.begin(iteration, optimizing=self.optimizing)
        self.stack.begin(self.contexts.start)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Follow this thread's module calls, and optimizer steps, within this context."""
        self.start(ModuleListener())
        try:
            yield
        finally:
            self.stop()

    def keep_counting(self, listener: ModuleListener) -> None:
        """Tell ``listener`` of every optimizer step until :meth:`stop_counting`, also while nothing is followed.

        A listener may then call :meth:`start` and :meth:`stop` when told: the hooks stay, over which torch iterates.
        """
        self.stack.thread = threading.get_ident()
        self._listener = self._counting = listener
        self.clock.install(self._begin_step, self._end_step)

    def stop_counting(self) -> None:
        """Undo :meth:`keep_counting`."""
        self._counting = None
        if not self.following:
            self._listener = ModuleListener()
            self.clock.remove()

    def start(self, listener: ModuleListener) -> None:
        """Follow this thread's module calls, and optimizer steps, until :meth:`stop`."""
        self.stack.thread, self._listener = threading.get_ident(), listener
        try:
            self.install_hooks()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stop following, and release the listener: whatever a trace keeps is freed with it."""
        self.remove_hooks()
        if self.stack.leave_all() or self.optimizing:  # the trace ended inside a module or step
            self.optimizing = False
            self._listener.changed()
        self._listener = self._counting or ModuleListener()
        if self._counting is not None:
            self.clock.install(self._begin_step, self._end_step)

    def install_hooks(self) -> None:
        """Install the fast module call (or global hooks, if there are others), and the optimizer hooks. Hooks are kept
        under negative ids, which torch never assigns."""
        if self.following:
            return
        self.following = True
        self.original = known_original(torch.nn.Module._call_impl)
        if not _put_fast_call(self) or _global_forward_hooks or _global_forward_pre_hooks:
            self._add_hooks()
        self.clock.install(self._begin_step, self._end_step)

    def remove_hooks(self) -> None:
        """Remove them: dynamo would compile hooks into the graph, cannot trace ours, and recompiles without them."""
        if not self.following:
            return
        self.following = False
        _take_fast_call_out(self)
        self.clock.remove()
        for hooks in _MODULE_HOOKS if self.hooks else ():
            hooks.pop(-id(self), None)
        self.hooks = 0

    def use_global_hooks(self) -> None:
        """Register our hooks, first in order, once another hook or torch's tracer is active: torch's own code then
        calls the modules."""
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
        """Pre-hook of every module that :func:`_call_impl` does not enter itself."""
        if self.stack.enter_by_hook(module) == UNKNOWN:
            self.meet(module)

    def _leave_by_hook(self, module: torch.nn.Module, _inputs: Any, _output: Any) -> None:
        """Post-hook of every module that :func:`_call_impl` does not leave itself."""
        self.leave(module)

    def meet(self, module: torch.nn.Module) -> None:
        """Register and enter a module that has no index (yet, or any more)."""
        state = UNKNOWN
        if self._died:  # ids are valid only for live modules
            self._died = False
            alive = [known() for known in self._known]
            self.stack.know([0 if module is None else id(module) for module in alive], 0)
            state = self.stack.enter_by_hook(module)
        if state == UNKNOWN:
            self._listener.named(self.register(module))
            self.stack.enter_by_hook(module)

    def forget(self) -> None:
        """Drop all indices after a module died, since another module may reuse its id."""
        if not self._died:
            self._died = True
            self.stack.forget()

    def _begin_step(
        self, _: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any], _counts: bool
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Called before every optimizer step; returns its arguments with the closure wrapped, if there is one."""
        if not self.following:
            return None
        self.set_optimizing(True)
        return _with_closure_outside(self, args, kwargs)

    def set_optimizing(self, optimizing: bool) -> None:
        """Begin or end the part of an optimizer step that is the optimizer's own."""
        self.optimizing = optimizing
        self._listener.changed()

    def _end_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Called after every optimizer step that is no part of another one."""
        if self.following:
            self.set_optimizing(False)
        if threading.get_ident() == self.stack.thread:
            self._listener.stepped(optimizer)


def _with_closure_outside(
    paths: ModulePaths, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return the arguments of an optimizer step with the closure wrapped; ``None`` if there is none."""
    if "closure" in kwargs and callable(kwargs["closure"]):
        return args, {**kwargs, "closure": _outside_step(paths, kwargs["closure"])}
    if len(args) > 1 and callable(args[1]):  # after the optimizer
        return (args[0], _outside_step(paths, args[1]), *args[2:]), kwargs
    return None


def _outside_step(paths: ModulePaths, closure: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a closure so that its calls do not count as part of the optimizer's step."""

    @functools.wraps(closure)
    def called(*args: Any, **kwargs: Any) -> Any:
        paths.set_optimizing(False)
        try:
            return closure(*args, **kwargs)
        finally:
            if paths.following:  # else the trace ended inside the closure
                paths.set_optimizing(True)

    return called


def _death_callback(paths: weakref.ref[ModulePaths]) -> Callable[[object], None]:
    """Return a weakref callback for dead modules, which does not keep the paths alive."""

    def dies(_module: object) -> None:
        followed = paths()
        if followed is not None:
            followed.forget()

    return dies


_KNOWN = frozenset(
    {
        "62587dee2896dff4e5585ac472ac5b15ba49fd64aaec8d79bc136fa95ee5ec3b",  # 2.11 to 2.14
        "3dd0447cad1ac3cb08f3d932c041652ec8ba8ccf48b53ad580494f514f48510f",  # 2.15
    }
)
"""SHA-256 of the known sources of ``Module._call_impl`` that :func:`_call_impl` may replace, with torch's releases."""


@functools.cache
def known_original(call: FunctionType) -> FunctionType | None:
    """Return a copy of the current ``Module._call_impl``; ``None`` unless it is known to be torch's own."""
    try:
        source = inspect.getsource(call.__code__)
    except (OSError, TypeError):  # torch without its sources
        return None
    if hashlib.sha256(source.encode()).hexdigest() not in _KNOWN:
        return None
    return FunctionType(call.__code__, call.__globals__, call.__name__, call.__defaults__, call.__closure__)


def _put_fast_call(paths: ModulePaths) -> bool:
    """Replace the code of torch's module call if it is torch's own; return whether it was."""
    call = torch.nn.Module._call_impl
    if paths.original is None or call.__code__ is not paths.original.__code__:
        return False
    call.__kwdefaults__ = {"_followed": paths}
    call.__code__ = _call_impl.__code__
    return True


def _take_fast_call_out(paths: ModulePaths) -> None:
    """Undo :func:`_put_fast_call`; no effect if another one is in force."""
    call = torch.nn.Module._call_impl
    if paths.original is not None and call.__kwdefaults__ == {"_followed": paths}:
        call.__code__ = paths.original.__code__
        call.__kwdefaults__ = None


def _call_impl(self: Any, *args: Any, _followed: ModulePaths, **kwargs: Any) -> Any:
    """Replace the code of ``torch.nn.Module._call_impl``: a short path without hooks, else torch's code. It runs as
    that function, so global names are those of torch's module."""
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
        _followed.use_global_hooks()
        return _followed.original(self, *args, **kwargs)
    state = _followed.enter(self)
    if state != 1:  # ENTERED
        if state == 3:  # TRACED
            _followed.use_global_hooks()
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
