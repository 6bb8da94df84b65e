"""Count the steps of a training loop: one clock for traces, for recordings of ranks, and for ``watch``.

A *step* is one call of an optimizer's ``step`` that returns. Calls of ``step`` within it are part of it: those of other
optimizers (ZeRO, Lookahead, SAM), and that of its own class by a subclass. Steps are numbered from 0.

Several optimizers that take turns are the one case in which two numbers are needed, by the parameter ``each``:

* Traces and recordings of ranks count the steps of the most frequently stepped optimizer (``each=False``). The number
  is in every record's id, by which ranks and runs are aligned: an optimizer that a rank steps alone, or less often (a
  critic, one for each parameter), must not shift it.
* ``watch`` counts the steps of each optimizer of its model (``each=True``). Each has a batch, a loss and gradients of
  its own: a line for several of them would have the last one's, and a difference in the others' would have no place.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

Optimizer = torch.optim.Optimizer

Before = Callable[[Optimizer, tuple[Any, ...], dict[str, Any], bool], Any]
"""Called before a step with the optimizer, its arguments, and whether the step counts, or else is part of another; it
may return other arguments, as a hook of torch."""

After = Callable[[Optimizer, tuple[Any, ...], dict[str, Any]], None]
"""Called after a step that counts."""


class StepClock:
    """Number of steps so far, and hooks on all optimizers.

    Args:
        each: count the steps of each optimizer; else those of the most frequently stepped one.
        number: of the first step.
        precedes: returns whether the step of an optimizer counts in place of that of another one around it.

    Attributes:
        number: of the next step to end.
        is_compiled: a step was compiled, of which nothing is seen.
    """

    def __init__(
        self, *, each: bool = False, number: int = 0, precedes: Callable[[Optimizer, Optimizer], bool] | None = None
    ) -> None:
        self.number, self.is_compiled = number, False
        self._counts: weakref.WeakKeyDictionary[Optimizer, int] | None = None if each else weakref.WeakKeyDictionary()
        self._precedes = precedes
        self._here = threading.local()  # each thread has steps of its own

    def count(self, optimizer: Optimizer) -> int:
        """Count a step that ended; return the number of steps so far."""
        counts = self._counts
        if counts is None:
            self.number += 1
        else:
            counts[optimizer] = counts.get(optimizer, 0) + 1
            self.number = max(self.number, counts[optimizer])
        return self.number

    def install(self, before: Before, after: After) -> None:
        """Call these before and after each step, in any thread, until :meth:`remove`."""
        key = -id(self)  # torch assigns no negative one
        _global_optimizer_pre_hooks[key] = functools.partial(self._begin, before)
        _global_optimizer_post_hooks[key] = functools.partial(self._end, after)

    def remove(self) -> None:
        """Remove the hooks; no effect within a call of ``after``, while torch iterates over them."""
        if not getattr(self._here, "telling", False):
            _global_optimizer_pre_hooks.pop(-id(self), None)
            _global_optimizer_post_hooks.pop(-id(self), None)

    def _begin(self, before: Before, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.compiler.is_compiling():
            self.is_compiled = True  # no more than that can be done in a compiled step
            return None
        here = self._here
        outer: Optimizer | None = getattr(here, "of", _none)()
        is_within = outer is not None and _is_stepping(outer)
        counts = outer is None or not is_within or self._comes_first(optimizer, outer)
        if counts:
            here.of, here.again = weakref.ref(optimizer), False
        elif outer is optimizer:
            here.again = True
        return before(optimizer, args, kwargs, counts)

    def _comes_first(self, inner: Optimizer, outer: Optimizer) -> bool:
        return inner is not outer and self._precedes is not None and self._precedes(inner, outer)

    def _end(self, after: After, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        here = self._here
        if torch.compiler.is_compiling() or getattr(here, "of", _none)() is not optimizer:
            return
        if here.again and _is_stepping(optimizer):
            return
        here.of, here.telling = _none, True
        try:
            after(optimizer, args, kwargs)
        finally:
            here.telling = False


def _none() -> None:
    """Stand for the reference to an optimizer where none steps."""


def _is_stepping(optimizer: Optimizer) -> bool:
    """Return True if a step of this optimizer is under way around the one whose hook calls this: torch tells no hook of
    a step that raised."""
    frame = sys._getframe(2).f_back  # _begin or _end, then torch's wrapper of the step
    while frame is not None:
        if frame.f_code.co_name == "wrapper" and frame.f_locals.get("self") is optimizer:
            return True
        frame = frame.f_back
    return False
