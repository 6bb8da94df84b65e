"""Detect calls of ``torch.compile`` output: a trace is suspended during them, and eager runs list them.

torch offers no hook for such calls. Each one asks ``torch._dynamo.eval_frame`` how to run (``_callback_from_stance``)
and ends by restoring the callback (``_maybe_set_eval_frame``); both are looked up in that module at every call, and are
patched there while needed. Importing ``torch._dynamo`` takes a second, which most programs never do: until then nothing
is compiled, and the patch waits for the import.
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
from types import FrameType
from typing import Any

import torch
from torch._C._dynamo import eval_frame as _eval_frame

from hashbench.core.imports import ModulePatch
from hashbench.core.inductor.internals import backend_of

_EVAL_FRAME = "torch._dynamo.eval_frame"


_HOOK_WARNING = (
    "ignore",
    re.compile(r"Using `torch\.compile\(module\)` when there are global hooks"),
    Warning,
    None,
    0,
)
"""Filter for a warning about module hooks, which a trace installs: ``OptimizedModule`` is called before they are
removed. Inserted directly into the filter list, so that the program's own warning state does not change."""

Begin = Callable[[str, Sequence[Any], Mapping[str, Any], str], object]
"""Called with the name of the compiled function, the arguments of its call, and the name of its backend if it has one,
before the call."""

End = Callable[[Any], object]
"""Called with the return value of that call; with ``None`` also if it raised."""


def _no_op(*_: Any) -> None: ...


class CompiledCalls(ModulePatch):
    """Call ``begin`` before and ``end`` after every outermost call of compiled code in this thread, and ``eager`` with
    the name of each function that runs eagerly instead."""

    module = "torch._dynamo"

    def __init__(self, begin: Begin, end: End, eager: Callable[[str], object] = _no_op) -> None:
        super().__init__()
        self._begin, self._end, self._eager = begin, end, eager
        self._owner = 0
        self._running: list[FrameType] = []  # frame of the outermost call, twice once it has begun

    def _replace(self) -> None:
        holder = sys.modules.get(_EVAL_FRAME) or importlib.import_module(_EVAL_FRAME)
        self._owner = threading.get_ident()
        self._choose, self._install = holder._callback_from_stance, holder._maybe_set_eval_frame
        self._put(holder, _callback_from_stance=self._callback_from_stance, _maybe_set_eval_frame=self._set_eval_frame)
        warnings.filters.insert(0, _HOOK_WARNING)  # type: ignore[attr-defined]

    def stop(self) -> None:
        replaced, self._owner = bool(self._before), 0
        super().stop()
        self._running.clear()
        if replaced and _HOOK_WARNING in warnings.filters:  # else the program has reset the filters
            warnings.filters.remove(_HOOK_WARNING)  # type: ignore[attr-defined]
        self._begin = self._end = self._eager = _no_op

    def _callback_from_stance(self, callback: Any) -> Any:
        chosen = self._choose(callback)
        if callback is not None and not self._running and threading.get_ident() == self._owner:
            frame = _caller()
            values = frame.f_locals
            name = _name(values.get("fn"))
            if chosen is None:
                self._eager(name)
            else:
                self._begin(name, values.get("args", ()), values.get("kwargs", {}), backend_of(chosen))
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
        return self._install(callback)  # dynamo evaluates frames from here on: no code of ours may follow


class Exports(ModulePatch):
    """Call ``begin`` before and ``end`` after every ``torch.export.export``."""

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
        self._begin = self._end = _no_op


class _EagerCalls(CompiledCalls):
    """As :class:`CompiledCalls`, and run compiled code eagerly."""

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
    """Run compiled code eagerly, by torch's own stance; yield the names of the affected functions, in order."""
    names: dict[str, None] = {}
    watch = _EagerCalls(_no_op, _no_op, lambda name: names.setdefault(name))
    try:
        watch.start()
        yield names
    finally:
        watch.stop()


def _caller() -> FrameType:
    """Return torch's frame that called the patched function, past any nested patches."""
    frame: FrameType = sys._getframe(2)
    while frame.f_code.co_filename == __file__ and frame.f_back is not None:
        frame = frame.f_back
    return frame


def compiled_in_place(model: torch.nn.Module) -> Iterator[str]:
    """Yield the classes of modules compiled by ``Module.compile``. A deep copy of such a module runs eagerly."""
    return (type(module).__name__ for module in model.modules() if module._compiled_call_impl is not None)


def is_compiled_backward(node: Any) -> bool:
    """Return True if an autograd node is the backward of a ``torch.compile`` graph."""
    forward = getattr(node, "_forward_cls", None)
    return forward is not None and forward.__module__.startswith("torch._functorch._aot_autograd.")


def skip_frames(function: Callable[..., object]) -> None:
    """Exclude this function and its callees from dynamo (which may compile them after a graph break), at no cost per
    call."""
    _eval_frame.set_code_exec_strategy(
        function.__code__, _eval_frame._FrameExecStrategy(_eval_frame._FrameAction.SKIP, _eval_frame._FrameAction.SKIP)
    )


def _name(function: Any) -> str:
    """Return the class name of a compiled module, or the qualified name of a compiled function."""
    function = getattr(function, "__wrapped__", function)
    owner = function if isinstance(function, torch.nn.Module) else getattr(function, "__self__", None)
    if isinstance(owner, torch.nn.Module):
        return type(owner).__name__
    return getattr(function, "__qualname__", type(function).__name__)
