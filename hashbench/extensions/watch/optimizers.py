"""Optimizers whose steps are recorded: those that the program named, and all that step parameters of the model."""

from __future__ import annotations

import itertools
import operator
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

    def is_given(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return True if the program named this one."""
        return any(optimizer is each for each in self._given)

    def precedes(self, inner: torch.optim.Optimizer, outer: torch.optim.Optimizer) -> bool:
        """Return True if, of two that step one within the other, the program named the inner one alone."""
        return self.is_given(inner) and not self.is_given(outer)

    @property
    def are_several(self) -> bool:
        """Whether more than one is known."""
        return len({id(optimizer) for optimizer in (*self._given, *self._owners.values())}) > 1

    @property
    def known(self) -> list[torch.optim.Optimizer]:
        """Those that the program named, and those that stepped."""
        found = [*self._given, *(owned.optimizer for owned in self._known.values())]
        return list({id(optimizer): optimizer for optimizer in found}.values())

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
        order = [[index[id(each)] for each in group["params"] if id(each) in index] for group in optimizer.param_groups]
        numbers = frozenset(itertools.chain.from_iterable(order))
        if not numbers and not self.is_given(optimizer):
            return None, False
        found = WatchedOptimizer(optimizer, order, numbers, held, tensors.looked_up)
        self._owners |= dict.fromkeys(numbers, optimizer)
        if now:
            changed = known is None or known.optimizer is not optimizer or known.order != order
            owners = {id(optimizer) for optimizer in self._owners.values()} | {id(each) for each in self._given}
            self._known = {key: known for key, known in self._known.items() if key in owners}
            self._known[id(optimizer)] = found
            return found, changed
        return found, False


def _inner(optimizer: Any) -> torch.optim.Optimizer:
    """Return the optimizer inside the wrapper of a trainer."""
    while True:
        inner = getattr(optimizer, "optimizer", None)
        if not isinstance(inner, torch.optim.Optimizer):
            return optimizer  # type: ignore[no-any-return]
        optimizer = inner
