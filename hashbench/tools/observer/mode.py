"""``HashMode``: a trace that reports each record to an observer, and can be disabled anywhere in the stack of dispatch
modes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.utils import _python_dispatch as modes
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from hashbench.errors import HashbenchError
from hashbench.records import OpRecord
from hashbench.trace.api import HashDebugTrace
from hashbench.trace.callbacks import TraceCallback
from hashbench.trace.op_schema import Pattern, plan_of


class Listener(Protocol):
    """Who is told of the ops under a hash mode: an observer."""

    def op_wrote(self, node: str, tensors: Sequence[torch.Tensor]) -> None:
        """The op whose record will have the id ``node`` left these tensors, which are not hashed yet."""

    def op_recorded(self, record: OpRecord) -> None:
        """Its record is made."""


class HashMode(HashDebugTrace):
    """Hashes what every dispatched op writes, and reports each to the observer that is registered.

    It is a :class:`~hashbench.trace.api.HashDebugTrace` and sees what that sees. ``enabled`` says whether it is on.
    """

    def __init__(self) -> None:
        self.enabled = False
        self.observer: Listener | None = None
        self._below: tuple[TorchDispatchMode, ...] = ()
        super().__init__(source_lines=True, watcher=_Relay(self))

    def register_observer(self, observer: Listener | None) -> None:
        """From now on this observer is told of every op."""
        self.observer = observer

    def enable(self) -> None:
        """Put the mode on top of the stack of dispatch modes; does nothing where it is on.

        Raises:
            HashbenchError: another trace is active in this thread.
        """
        if not self.enabled:
            self._below = tuple(_get_current_dispatch_mode_stack())
            self.__enter__()
            self.enabled = True

    def disable(self) -> None:
        """Take the mode off the stack, also from below modes that were entered later and stay in force; does nothing
        where it is off.

        Raises:
            HashbenchError: a mode that was entered before this one was left while it was on, by which torch took this
                one off the stack. That other mode is taken off now.
        """
        if not self.enabled:
            return
        self.enabled = False
        below, self._below = self._below, ()
        assert isinstance(self._tracer, TorchDispatchMode)
        if _leave(self._tracer):
            return
        stale = [mode for mode in _get_current_dispatch_mode_stack() if any(mode is other for other in below)]
        if stale:
            _take_off(stale[-1])
        raise HashbenchError(
            "the hash mode was taken off the stack of dispatch modes",
            consequence="ops since then were not observed: a mode entered before it was left while it was on",
            tip="Disable the hash mode first, then leave modes that were entered before it was enabled.",
        )


class _Relay(TraceCallback):
    """Tells the mode's observer what the trace tells."""

    wants_records = True

    def __init__(self, mode: HashMode) -> None:
        self._mode = mode

    def after(self, node: str, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any) -> None:
        if self._mode.observer is None:
            return
        plan = plan_of(func)
        computes = plan.pattern is not Pattern.VIEW and not plan.blank
        written = plan.written_by(args, kwargs, output) if computes else []
        self._mode.observer.op_wrote(node, list({id(tensor): tensor for tensor in written}.values()))

    def recorded(self, record: OpRecord) -> None:
        if self._mode.observer is not None:
            self._mode.observer.op_recorded(record)


def _leave(mode: TorchDispatchMode) -> bool:
    """Take ``mode`` off the stack of dispatch modes as if those above it had been entered without it.

    A mode remembers, for when it is left, torch's flags from before it was entered (``_is_in_torch_dispatch_mode`` and
    its like, by which torch.compile decides). So those above are left and entered again, in the base class alone: what
    they do of their own when entered or left is not repeated.

    Returns whether it was on the stack. It is not where a mode below it was left first: torch then takes the uppermost
    away in the place of that one.
    """
    stack = _get_current_dispatch_mode_stack()
    place = next((number for number, other in enumerate(stack) if other is mode), None)
    if place is None:
        _leave_in_absence(mode)
        return False
    above = [other for other in stack[place + 1 :] if "_mode_key" not in other.__dict__]
    by_hand = [_lifted(other) for other in reversed(above)][::-1]
    mode.__exit__(None, None, None)
    for other, pushed in zip(above, by_hand, strict=True):
        if pushed:
            torch._C._push_on_torch_dispatch_stack(other)
        else:
            TorchDispatchMode.__enter__(other)
    return True


def _lifted(mode: TorchDispatchMode) -> bool:
    """Take the uppermost mode off; returns whether it was pushed by hand, without flags, as some libraries do."""
    if not mode.old_dispatch_mode_flags:
        torch._C._pop_torch_dispatch_stack(None)
        return True
    TorchDispatchMode.__exit__(mode, None, None, None)
    return False


def _leave_in_absence(mode: TorchDispatchMode) -> None:
    """Undo what entering ``mode`` did beside the stack; the flags stay as whoever took its place left them."""
    mode.old_dispatch_mode_flags[-1] = modes._is_in_torch_dispatch_mode
    mode.old_non_infra_dispatch_mode_flags[-1] = modes._is_in_non_infra_torch_dispatch_mode
    mode.old_without_ignore_compile_internals_dispatch_mode_flags[-1] = (
        modes._is_in_any_mode_without_ignore_compile_internals
    )
    torch._C._push_on_torch_dispatch_stack(mode)
    mode.__exit__(None, None, None)


def _take_off(mode: TorchDispatchMode) -> None:
    """A mode off the stack that has been left already: the flags are as they should be."""
    above = []
    while (top := torch._C._pop_torch_dispatch_stack(None)) is not mode:
        above.append(top)
    for other in reversed(above):
        torch._C._push_on_torch_dispatch_stack(other)
