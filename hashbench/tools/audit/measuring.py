"""One case run again and again under one setting of the flag: how many different outcomes has each pass?

A run starts from copied inputs and from the same state of the random generators. Its outcome is a fingerprint of what
the call returned and of what it left in its arguments, and another of the gradients for a fixed random cotangent.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from hashbench.check.function import FunctionCall, fresh_copy
from hashbench.errors import HashbenchError, named_line
from hashbench.replay import controls
from hashbench.run.outputs import NotComparableError, flatten
from hashbench.run.rng import reset_rng_state
from hashbench.run.settings import applied
from hashbench.tools.audit.cases import Case
from hashbench.tools.audit.stress import moved
from hashbench.tools.audit.verdict import DIFFERS, FOLLOWS, IDENTICAL, NOT_COMPARABLE, NOT_RUN, RAISES
from hashbench.trace.arguments import named_tensors
from hashbench.trace.digest import digest

FLAG = {
    "off": {"deterministic_algorithms": "off", "fill_uninitialized_memory": "True"},
    "on": {"deterministic_algorithms": "on", "fill_uninitialized_memory": "True"},
    "unfilled": {"deterministic_algorithms": "on", "fill_uninitialized_memory": "False"},
}
"""The three settings under which everything is measured."""

POISONED_RUNS = 2
"""Runs for each of two contents of memory that nobody wrote."""


@dataclass(slots=True)
class Tried:
    """The outcomes of one pass under one setting; the first error ends it."""

    outcomes: list[int] = field(default_factory=list)
    poisoned: dict[int, set[int]] = field(default_factory=dict)
    error: str = ""
    word: str = ""

    def failed(self, error: Exception) -> None:
        """Keep the first error."""
        if not self.error:
            self.error = named_line(error, limit=300)
            known = isinstance(error, (NotComparableError, HashbenchError))
            self.word = NOT_COMPARABLE if known else RAISES

    @property
    def distinct(self) -> int | None:
        """Different outcomes of runs in ordinary memory; ``None`` where one raised."""
        return None if self.error or not self.outcomes else len(set(self.outcomes))

    @property
    def measured(self) -> str:
        """One of ``verdict.MEASURED``."""
        if self.word:
            return self.word
        if not self.outcomes:
            return NOT_RUN
        if len(set(self.outcomes)) > 1:
            return DIFFERS
        return FOLLOWS if follows_poison(self.poisoned) else IDENTICAL


def follows_poison(poisoned: dict[int, set[int]]) -> bool:
    """Whether each content of unwritten memory gives one outcome of its own."""
    alone = [next(iter(found)) for found in poisoned.values() if len(found) == 1]
    return len(alone) == len(controls.POISONS) == len(set(alone))


class Measured:
    """What :func:`measure` found of one case: ``passes[setting][phase]``."""

    def __init__(self, case: Case) -> None:
        self.case = case
        phases = ("forward", "backward") if case.differentiable else ("forward",)
        self.passes = {name: {phase: Tried() for phase in phases} for name in FLAG}


def measure(cases: list[Case], *, runs: int, seed: int) -> list[Measured]:
    """Run every case ``runs`` times under each setting, then with two contents of unwritten memory."""
    found = [Measured(case) for case in cases]
    with quiet():
        for name, wanted in FLAG.items():
            with applied(wanted):
                for one in found:
                    for number in range(runs):
                        _add(one, name, number, seed=seed)
                for value in controls.POISONS:
                    # What the flag fills must stay filled: no mode may write over it.
                    with controls.poisoned_memory(value, through_mode=name != "on"):
                        for one in found:
                            for number in range(POISONED_RUNS):
                                _add(one, name, number, seed=seed, poison=value)
    return found


def _add(one: Measured, name: str, number: int, *, seed: int, poison: int | None = None) -> None:
    """One more run. What has raised, or differs anyway, is not run on other memory; a pass that raised is not run
    again."""
    passes = one.passes[name]
    if passes["forward"].error or (poison is not None and (one.case.moved or passes["forward"].measured == DIFFERS)):
        return
    try:
        call = copied(one.case, number)
        reset_rng_state(seed)
        value = call()
        outcome = fingerprint(value, call)
    except Exception as error:
        passes["forward"].failed(error)
        return
    _keep(passes["forward"], outcome, poison)
    backward = passes.get("backward")
    if backward is None or backward.error:
        return
    try:
        outcome = fingerprint(gradients(one.case, call, value, seed=seed), None)
    except Exception as error:
        backward.failed(error)
        return
    _keep(backward, outcome, poison)


def _keep(tried: Tried, outcome: int, poison: int | None) -> None:
    if poison is None:
        tried.outcomes.append(outcome)
    else:
        tried.poisoned.setdefault(poison, set()).add(outcome)


# ------------------------------------------------------------------------------------------------------ one run


def copied(case: Case, number: int) -> FunctionCall:
    """The arguments of run ``number``."""
    return moved(case.call, number) if case.moved else fresh_copy(case.call)


def fingerprint(value: Any, call: FunctionCall | None) -> int:
    """Equal for equal results, bit by bit; strides count.

    Raises:
        NotComparableError: a result of a kind that cannot be compared.
    """
    parts: list[object] = []
    with torch.no_grad():
        for name, item in flatten(value, "output"):
            parts.append((name, digest(item.detach()) if isinstance(item, torch.Tensor) else repr(item)))
        if call is not None:
            parts += [(name, digest(tensor.detach())) for name, tensor in named_tensors(call.named())]
    return hash(tuple(parts))


def gradients(case: Case, call: FunctionCall, value: Any, *, seed: int) -> dict[str, Any]:
    """Gradients of the arguments, by name, for a random cotangent that is the same in every run.

    Raises:
        NotComparableError: there is nothing to differentiate.
    """
    value = case.process(value) if case.process is not None else value
    outputs = [tensor for _, tensor in named_tensors(value) if tensor.requires_grad]
    inputs = {name: tensor for name, tensor in named_tensors(call.named()) if tensor.requires_grad and tensor.is_leaf}
    if not outputs or not inputs:
        raise NotDifferentiableError("no output depends on an input that asks for a gradient")
    generator = torch.Generator().manual_seed(seed)
    cotangents = [_cotangent(tensor, generator) for tensor in outputs]
    found = torch.autograd.grad(outputs, list(inputs.values()), cotangents, allow_unused=True)
    return dict(zip(inputs, found, strict=True))


class NotDifferentiableError(Exception):
    """A case without a backward pass: it has no row of one."""


def _cotangent(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    drawn = torch.randn(tensor.shape, generator=generator, dtype=torch.float32)
    if tensor.is_complex():
        drawn = torch.complex(drawn, torch.randn(tensor.shape, generator=generator))
    return drawn.to(tensor.dtype).to(tensor.device)


@contextmanager
def quiet() -> Iterator[None]:
    """Warnings of a thousand calls say nothing new."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
