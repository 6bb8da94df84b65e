"""One case run again and again under one setting of the flag: how many different outcomes has each pass?

A run starts from copied inputs and from the same state of the random generators. Its outcome is a fingerprint of what
the call returned and of what it left in its arguments, and another of the gradients for a fixed random cotangent.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from hashbench.check.function import FunctionCall, fresh_copy
from hashbench.errors import HashbenchError, named_line
from hashbench.replay import controls
from hashbench.results.audit_table import Measured
from hashbench.run.outputs import NotComparableError, flatten
from hashbench.run.rng import reset_rng_state
from hashbench.run.settings import applied
from hashbench.tools.audit.cases import Case, at_offset
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
class Outcomes:
    """The fingerprints of one pass under one setting, those with ``poisoned`` memory by its content; the first error
    ends it."""

    plain: list[int] = field(default_factory=list)
    poisoned: dict[int, set[int]] = field(default_factory=dict)
    error: str = ""
    failure: Measured | None = None

    @property
    def distinct(self) -> int | None:
        """Different outcomes of runs in ordinary memory; ``None`` where one raised."""
        return None if self.error or not self.plain else len(set(self.plain))

    @property
    def measured(self) -> Measured:
        """What these outcomes show."""
        if self.failure is not None:
            return self.failure
        if not self.plain:
            return Measured.NOT_RUN
        if len(set(self.plain)) > 1:
            return Measured.DIFFERS
        return Measured.FOLLOWS if follows_poison(self.poisoned) else Measured.IDENTICAL


def follows_poison(poisoned: Mapping[int, set[int]]) -> bool:
    """Whether each content of unwritten memory gives one outcome of its own."""
    alone = [outcome for outcomes in poisoned.values() if len(outcomes) == 1 for outcome in outcomes]
    return len(alone) == len(controls.POISONS) == len(set(alone))


class Measurement:
    """The outcomes of one case: ``passes[setting][phase]``. What turns out to have nothing to differentiate has no
    backward pass."""

    def __init__(self, case: Case) -> None:
        self.case = case
        phases = ("forward", "backward") if case.differentiable else ("forward",)
        self.passes = {setting: {phase: Outcomes() for phase in phases} for setting in FLAG}

    def run(self, setting: str, number: int, *, seed: int, poison: int | None = None) -> None:
        """One more run. What has raised, or differs anyway, is not run on other memory; a pass that raised is not run
        again."""
        passes, case = self.passes[setting], self.case
        forward, backward = passes["forward"], passes.get("backward")
        if forward.error or (poison is not None and (case.moved or forward.measured is Measured.DIFFERS)):
            return
        with _noted(forward):
            call = at_offset(case.call, number) if case.moved else fresh_copy(case.call)
            reset_rng_state(seed)
            value = call()
            _keep(forward, fingerprint(value, call), poison)
        if forward.error or backward is None or backward.error:
            return
        try:
            with _noted(backward):
                _keep(backward, fingerprint(gradients(case, call, value, seed=seed)), poison)
        except NotDifferentiableError:
            for each in self.passes.values():
                each.pop("backward")


def measure(cases: Sequence[Case], *, runs: int, seed: int) -> list[Measurement]:
    """Run every case ``runs`` times under each setting, then with two contents of unwritten memory."""
    measurements = [Measurement(case) for case in cases]
    with quiet():
        for setting, wanted in FLAG.items():
            with applied(wanted):
                for measurement in measurements:
                    for number in range(runs):
                        measurement.run(setting, number, seed=seed)
                for poison in controls.POISONS:
                    # What the flag fills must stay filled: no mode may write over it.
                    with controls.poisoned_memory(poison, through_mode=setting != "on"):
                        for measurement in measurements:
                            for number in range(POISONED_RUNS):
                                measurement.run(setting, number, seed=seed, poison=poison)
    return measurements


@contextmanager
def _noted(outcomes: Outcomes) -> Iterator[None]:
    """Keep an exception as what ended these outcomes."""
    try:
        yield
    except NotDifferentiableError:
        raise
    except Exception as error:
        outcomes.error = named_line(error, limit=300)
        known = isinstance(error, (NotComparableError, HashbenchError))
        outcomes.failure = Measured.NOT_COMPARABLE if known else Measured.RAISES


def _keep(outcomes: Outcomes, outcome: int, poison: int | None) -> None:
    if poison is None:
        outcomes.plain.append(outcome)
    else:
        outcomes.poisoned.setdefault(poison, set()).add(outcome)


# ------------------------------------------------------------------------------------------------------ one run


def fingerprint(value: Any, call: FunctionCall | None = None) -> int:
    """Equal for equal results and, with ``call``, for equal arguments after it, bit by bit; strides count.

    Raises:
        NotComparableError: a result of a kind that cannot be compared.
    """
    parts = list(flatten(value, "output"))
    parts += named_tensors(call.named()) if call is not None else ()
    with torch.no_grad():
        return hash(
            tuple(
                (name, digest(item.detach()) if isinstance(item, torch.Tensor) else repr(item)) for name, item in parts
            )
        )


class NotDifferentiableError(Exception):
    """A case without a backward pass: it has no row of one."""


def gradients(case: Case, call: FunctionCall, value: Any, *, seed: int) -> dict[str, Any]:
    """Gradients of the arguments, by name, for a random cotangent that is the same in every run.

    Raises:
        NotDifferentiableError: no output depends on an input that asks for a gradient.
    """
    value = case.process(value) if case.process is not None else value
    outputs = [tensor for _, tensor in named_tensors(value) if tensor.requires_grad]
    inputs = {name: tensor for name, tensor in named_tensors(call.named()) if tensor.requires_grad and tensor.is_leaf}
    if not outputs or not inputs:
        raise NotDifferentiableError
    generator = torch.Generator().manual_seed(seed)
    cotangents = [_cotangent(tensor, generator) for tensor in outputs]
    values = torch.autograd.grad(outputs, list(inputs.values()), cotangents, allow_unused=True)
    return dict(zip(inputs, values, strict=True))


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
