"""Calls of what ``torch.compile`` made, noticed as they begin and end: a trace steps aside for them, and a run that is
kept eager knows that it was.

torch announces such calls to nobody. Every one of them, whoever made it and when, asks ``torch._dynamo.eval_frame`` how
to run (``_callback_from_stance``) and ends by putting that back (``_maybe_set_eval_frame``); both are looked up in that
module at every call, and replaced there while somebody watches. ``torch._dynamo`` takes a second to import, which most
programs never do: until then there is nothing compiled, and its import is waited for.
"""

from __future__ import annotations

import functools
import importlib
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType, ModuleType
from typing import Any

import torch
from torch._C._dynamo import eval_frame as _eval_frame

from hashbench.imports import ImportWatch

_EVAL_FRAME = "torch._dynamo.eval_frame"


_OF_HOOKS = ("ignore", re.compile(r"Using `torch\.compile\(module\)` when there are global hooks"), Warning, None, 0)
"""Filters a warning of hooks, which a trace has: ``OptimizedModule`` is called before they are removed. Put among the
filters as they are, it leaves alone which warnings the program has had, and what it filters itself meanwhile."""

Begin = Callable[[str, Sequence[Any], Mapping[str, Any]], object]
"""Called with the name of what was compiled and the arguments of its call, which is about to be made."""

End = Callable[[Any], object]
"""Called with what that call returned; with ``None`` also where it raised."""


def _nothing(*_: Any) -> None:
    """What is done where nobody asked."""


class _Replaced:
    """Replaces functions of one module of torch's, from :meth:`start` on, or from its import on, until :meth:`stop`.
    What a trace does once should be little: an object of such a class, and none of its functions is made anew."""

    module = ""

    def __init__(self) -> None:
        self._waiting: ImportWatch | None = None
        self._before: dict[str, Any] = {}
        self._holder: Any = None

    def start(self) -> None:
        if self.module in sys.modules:
            self._replace()
        else:
            self._waiting = ImportWatch(self.module.__eq__, self._loaded)
            sys.meta_path.insert(0, self._waiting)

    def stop(self) -> None:
        if self._waiting is not None:
            self._waiting.remove()
        for name, function in self._before.items():
            setattr(self._holder, name, function)
        self._waiting, self._before, self._holder = None, {}, None

    def _loaded(self, _: ModuleType) -> None:
        if self._waiting is not None:
            self._waiting.remove()
        self._replace()

    def _replace(self) -> None:
        """Put functions in place of those of the module, which is there."""

    def _put(self, holder: ModuleType, **functions: Callable[..., Any]) -> None:
        self._holder, self._before = holder, {name: getattr(holder, name) for name in functions}
        for name, function in functions.items():
            setattr(holder, name, function)


class CompiledCalls(_Replaced):
    """Calls ``begin`` before and ``end`` after every outermost call of compiled code in this thread, and ``eager`` with
    the name of what runs eagerly in its place."""

    module = "torch._dynamo"

    def __init__(self, begin: Begin, end: End, eager: Callable[[str], object] = _nothing) -> None:
        super().__init__()
        self._begin, self._end, self._eager = begin, end, eager
        self._owner = 0
        self._running: list[FrameType] = []  # that of the outermost call, twice once it has begun

    def _replace(self) -> None:
        holder = sys.modules.get(_EVAL_FRAME) or importlib.import_module(_EVAL_FRAME)
        self._owner = threading.get_ident()
        self._choose, self._install = holder._callback_from_stance, holder._maybe_set_eval_frame
        self._put(holder, _callback_from_stance=self._callback_from_stance, _maybe_set_eval_frame=self._set_eval_frame)
        warnings.filters.insert(0, _OF_HOOKS)  # type: ignore[attr-defined]

    def stop(self) -> None:
        replaced, self._owner = bool(self._before), 0
        super().stop()
        self._running.clear()
        if replaced and _OF_HOOKS in warnings.filters:  # else the program has reset them
            warnings.filters.remove(_OF_HOOKS)  # type: ignore[attr-defined]
        self._begin = self._end = self._eager = _nothing

    def _callback_from_stance(self, callback: Any) -> Any:
        chosen = self._choose(callback)
        if callback is not None and not self._running and threading.get_ident() == self._owner:
            frame = _caller()
            values = frame.f_locals
            name = _name(values.get("fn"))
            if chosen is None:
                self._eager(name)
            else:
                self._begin(name, values.get("args", ()), values.get("kwargs", {}))
                self._running.append(frame)
        return chosen

    def _set_eval_frame(self, callback: Any) -> Any:
        running = self._running
        if running and _caller() is running[0]:
            running.append(running[0])
            if len(running) == 3:
                result = running[0].f_locals.get("result")
                running.clear()
                self._end(result)
        return self._install(callback)  # frames are evaluated by dynamo from here on: nothing of ours may follow


class Exports(_Replaced):
    """Calls ``begin`` before and ``end`` after every ``torch.export.export``."""

    module = "torch.export._trace"

    def __init__(self, begin: Callable[[], object], end: Callable[[], object]) -> None:
        super().__init__()
        self._begin, self._end = begin, end

    def _replace(self) -> None:
        holder = sys.modules[self.module]
        export, begin, end = holder._export, self._begin, self._end

        @functools.wraps(export)
        def watched(*args: Any, **kwargs: Any) -> Any:
            begin()
            try:
                return export(*args, **kwargs)
            finally:
                end()

        self._put(holder, _export=watched)

    def stop(self) -> None:
        super().stop()
        self._begin = self._end = _nothing


class _KeptEager(CompiledCalls):
    """Also runs what is compiled eagerly."""

    _stance: Any = None

    def _replace(self) -> None:
        self._stance = torch.compiler.set_stance("force_eager")
        self._stance.__enter__()
        super()._replace()

    def stop(self) -> None:
        super().stop()
        if self._stance is not None:
            self._stance.__exit__(None, None, None)
            self._stance = None


@contextmanager
def kept_eager() -> Iterator[Mapping[str, None]]:
    """Run what is compiled eagerly, by torch's own stance; gives the names of what did, in order."""
    names: dict[str, None] = {}
    watch = _KeptEager(_nothing, _nothing, lambda name: names.setdefault(name))
    try:
        watch.start()
        yield names
    finally:
        watch.stop()


def _caller() -> FrameType:
    """The frame of torch's that called the function which replaces one of torch's, or several of these in turn."""
    frame: FrameType = sys._getframe(2)
    while frame.f_code.co_filename == __file__ and frame.f_back is not None:
        frame = frame.f_back
    return frame


def compiled_in_place(model: torch.nn.Module) -> Iterator[str]:
    """The classes of the modules that ``Module.compile`` has compiled. A deep copy of such a module runs eagerly."""
    return (type(module).__name__ for module in model.modules() if module._compiled_call_impl is not None)


def is_compiled_backward(node: Any) -> bool:
    """Whether an autograd node is the backward of a graph that ``torch.compile`` made."""
    forward = getattr(node, "_forward_cls", None)
    return forward is not None and forward.__module__.startswith("torch._functorch._aot_autograd.")


def skip_frames(function: Callable[..., object]) -> None:
    """Let dynamo compile neither this function nor what it calls, which it may when a graph breaks; costs a call of it
    nothing."""
    _eval_frame.set_code_exec_strategy(
        function.__code__, _eval_frame._FrameExecStrategy(_eval_frame._FrameAction.SKIP, _eval_frame._FrameAction.SKIP)
    )


def _name(function: Any) -> str:
    """What was compiled: the class of a module, or the qualified name of a function."""
    function = getattr(function, "__wrapped__", function)
    owner = function if isinstance(function, torch.nn.Module) else getattr(function, "__self__", None)
    if isinstance(owner, torch.nn.Module):
        return type(owner).__name__
    return getattr(function, "__qualname__", type(function).__name__)
