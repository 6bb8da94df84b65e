"""Calls of what ``torch.compile`` made, noticed as they begin and end: a trace steps aside for them, and a run that is
kept eager knows that it was.

torch announces such calls to nobody. Every one of them, whoever made it and when, asks ``torch._dynamo.eval_frame`` how
to run (``_callback_from_stance``) and ends by putting that back (``_maybe_set_eval_frame``); both are looked up in that
module at every call, and replaced there while somebody watches. ``torch._dynamo`` takes a second to import, which most
programs never do: until then there is nothing compiled, and its import is waited for.
"""

from __future__ import annotations

import functools
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import FrameType, ModuleType
from typing import Any

import torch
from torch._C._dynamo import eval_frame as _eval_frame

from hashbench.imports import ImportWatch

_DYNAMO, _EXPORT = "torch._dynamo", "torch.export._trace"


_OF_HOOKS = ("ignore", re.compile(r"Using `torch\.compile\(module\)` when there are global hooks"), Warning, None, 0)
"""Filters a warning of hooks, which a trace has: ``OptimizedModule`` is called before they are removed. Put among the
filters as they are, it leaves alone which warnings the program has had, and what it filters itself meanwhile."""

Begin = Callable[[str, Sequence[Any], Mapping[str, Any]], object]
"""Called with the name of what was compiled and the arguments of its call, which is about to be made."""

End = Callable[[Any], object]
"""Called with what that call returned; with ``None`` also where it raised."""


@contextmanager
def compiled_calls(begin: Begin, end: End) -> Iterator[None]:
    """Call ``begin`` before and ``end`` after every outermost call of compiled code in this thread."""
    with _imported(_DYNAMO, lambda: _patched(begin, end, _nothing)):
        yield


@contextmanager
def exports(begin: Callable[[], object], end: Callable[[], object]) -> Iterator[None]:
    """Call ``begin`` before and ``end`` after every ``torch.export.export``."""

    @contextmanager
    def patched() -> Iterator[None]:
        module = sys.modules[_EXPORT]
        export = module._export

        @functools.wraps(export)
        def watched(*args: Any, **kwargs: Any) -> Any:
            begin()
            try:
                return export(*args, **kwargs)
            finally:
                end()

        module._export = watched  # type: ignore[attr-defined]
        try:
            yield
        finally:
            module._export = export  # type: ignore[attr-defined]

    with _imported(_EXPORT, patched):
        yield


@contextmanager
def kept_eager() -> Iterator[Mapping[str, None]]:
    """Run what is compiled eagerly, by torch's own stance; gives the names of what did, in order."""
    names: dict[str, None] = {}

    def eager() -> ExitStack:
        with ExitStack() as stack:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(_patched(_nothing, _nothing, lambda name: names.setdefault(name)))
            return stack.pop_all()

    with _imported(_DYNAMO, eager):
        yield names


def _nothing(*_: Any) -> None:
    """What is done where nobody asked."""


@contextmanager
def _imported(name: str, then: Callable[[], Any]) -> Iterator[None]:
    """Be inside the context that ``then`` gives from now on, or from the import of a module on."""
    with ExitStack() as stack:
        if name in sys.modules:
            stack.enter_context(then())
        else:

            def loaded(_: ModuleType) -> None:
                watch.remove()
                stack.enter_context(then())

            watch = ImportWatch(lambda module: module == name, loaded)
            sys.meta_path.insert(0, watch)
            stack.callback(watch.remove)
        yield


@contextmanager
def _patched(begin: Begin, end: End, eager: Callable[[str], object]) -> Iterator[None]:
    from torch._dynamo import eval_frame

    owner, choose, install = threading.get_ident(), eval_frame._callback_from_stance, eval_frame._maybe_set_eval_frame
    running: list[FrameType] = []  # that of the outermost call, twice once it has begun

    @functools.wraps(choose)
    def callback_from_stance(callback: Any) -> Any:
        chosen = choose(callback)
        if callback is not None and not running and watching and threading.get_ident() == owner:
            frame = _caller()
            values = frame.f_locals
            name = _name(values.get("fn"))
            if chosen is None:
                eager(name)
            else:
                begin(name, values.get("args", ()), values.get("kwargs", {}))
                running.append(frame)
        return chosen

    @functools.wraps(install)
    def maybe_set_eval_frame(callback: Any) -> Any:
        if running and _caller() is running[0]:
            running.append(running[0])
            if len(running) == 3:
                result = running[0].f_locals.get("result")
                running.clear()
                end(result)
        return install(callback)  # frames are evaluated by dynamo from here on: nothing of ours may follow

    watching = True
    filters: list[Any] = warnings.filters  # type: ignore[assignment]
    filters.insert(0, _OF_HOOKS)
    eval_frame._callback_from_stance, eval_frame._maybe_set_eval_frame = callback_from_stance, maybe_set_eval_frame
    try:
        yield
    finally:
        watching = False
        running.clear()
        eval_frame._callback_from_stance, eval_frame._maybe_set_eval_frame = choose, install
        if _OF_HOOKS in filters:  # else the program has reset them
            filters.remove(_OF_HOOKS)


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
