"""Optimizers whose steps are recorded: those that the program named, and all that step parameters of the model."""

from __future__ import annotations

import itertools
import operator
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hashbench.extensions.watch.tensors import ModelTensors


@dataclass(slots=True, eq=False)
class WatchedOptimizer:
    """An optimizer, as its groups were at its last step.

    Attributes:
        optimizer: itself.
        order: numbers of the model's parameters in each of its groups, in its order; others are left out.
        numbers: all of these.
    """

    optimizer: torch.optim.Optimizer
    order: list[list[int]]
    numbers: frozenset[int]
    tensors: list[torch.Tensor]
    looked_up: int


class WatchedOptimizers:
    """Optimizers by the parameters that they step. One that steps none of them any more is forgotten."""

    def __init__(self, given: Sequence[torch.optim.Optimizer]) -> None:
        self._given = list(map(_inner, given))
        self._known: dict[int, WatchedOptimizer] = {}
        self._owners: dict[int, torch.optim.Optimizer] = {}
        self._here = threading.local()

    def is_given(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return True if the program named this one."""
        return any(optimizer is one for one in self._given)

    @property
    def are_several(self) -> bool:
        """Whether more than one is known."""
        return len({id(one) for one in (*self._given, *self._owners.values())}) > 1

    @property
    def known(self) -> list[torch.optim.Optimizer]:
        """Those that the program named, and those that stepped."""
        found = [*self._given, *(one.optimizer for one in self._known.values())]
        return list({id(one): one for one in found}.values())

    def owner(self, number: int) -> torch.optim.Optimizer | None:
        """Return the optimizer that stepped a parameter last, or is going to; ``None``: none is known."""
        return self._owners.get(number)

    def expect(self, tensors: ModelTensors) -> None:
        """Look at those that the program named, before any of their steps."""
        for optimizer in self._given:
            self.meet(optimizer, tensors, now=False)

    def meet(
        self, optimizer: torch.optim.Optimizer, tensors: ModelTensors, *, now: bool = True
    ) -> tuple[WatchedOptimizer | None, bool]:
        """Return an optimizer as it is before a step, and whether it, or its groups, are others than at its last one.

        ``None`` where its steps are not recorded: it steps no parameter of the model, and nobody named it.
        """
        held = [*itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)]
        known = self._known.get(id(optimizer))
        if (
            known is not None
            and known.optimizer is optimizer
            and known.looked_up == tensors.looked_up
            and len(held) == len(known.tensors)
            and all(map(operator.is_, held, known.tensors))
        ):
            return known, False
        index = tensors.index
        order = [[index[id(one)] for one in group["params"] if id(one) in index] for group in optimizer.param_groups]
        numbers = frozenset(itertools.chain.from_iterable(order))
        if not numbers and not self.is_given(optimizer):
            return None, False
        found = WatchedOptimizer(optimizer, order, numbers, held, tensors.looked_up)
        self._owners |= dict.fromkeys(numbers, optimizer)
        if now:
            changed = known is None or known.optimizer is not optimizer or known.order != order
            owners = {id(one) for one in self._owners.values()} | {id(one) for one in self._given}
            self._known = {key: one for key, one in self._known.items() if key in owners}
            self._known[id(optimizer)] = found
            return found, changed
        return found, False

    # ------------------------------------------------------------------------------------- steps within other steps

    def begin_step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return True where an optimizer's step is none of another one's, whose step is going on in this thread: some
        wrap others (Lookahead, SAM). Of these, one that the program named counts, or else the outer one."""
        outer: torch.optim.Optimizer | None = getattr(self._here, "stepping", None)
        inside = outer is not None and outer is not optimizer and _is_in_a_step(outer)
        if inside and not self._precedes(optimizer, outer):
            return False
        self._here.stepping = optimizer
        return True

    def _precedes(self, inner: torch.optim.Optimizer, outer: torch.optim.Optimizer | None) -> bool:
        return self.is_given(inner) and (outer is None or not self.is_given(outer))

    def end_step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return True if this is the step that :meth:`begin_step` began."""
        if getattr(self._here, "stepping", None) is not optimizer:
            return False
        self._here.stepping = None
        return True


def _is_in_a_step(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if a step of this optimizer is under way in this thread: one that raised ended without its hook."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "wrapper" and frame.f_locals.get("self") is optimizer:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _inner(optimizer: Any) -> torch.optim.Optimizer:
    """Return the optimizer inside the wrapper of a trainer."""
    while True:
        inner = getattr(optimizer, "optimizer", None)
        if not isinstance(inner, torch.optim.Optimizer):
            return optimizer  # type: ignore[no-any-return]
        optimizer = inner
