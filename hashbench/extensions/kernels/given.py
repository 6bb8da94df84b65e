"""Judge a kernel with its inputs as they are, and look at its calls."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from hashbench.core.errors import named_line
from hashbench.core.run.rounding_reference import NotJudgedError
from hashbench.extensions.kernels.calls import Called
from hashbench.extensions.kernels.hygiene import Habits, repeated, unwritten, written_inputs
from hashbench.extensions.kernels.inputs import KernelInputs
from hashbench.extensions.kernels.judged import JudgedKernelCall
from hashbench.extensions.kernels.pair import KernelUnderTest
from hashbench.extensions.kernels.variations import GIVEN, VARIATIONS, generator_of
from hashbench.extensions.kernels.verdict import Fault, JudgedOutput, TriedVariation, VariationOutcome

_LONGEST = 200
_CALLS = 6
"""Calls that are compared, at most."""


class NotKnownError(Exception):
    """Nothing can be said of a kernel; the message is the reason."""


@dataclass(slots=True)
class KernelFindings:
    """What was found, in the order in which it was.

    Attributes:
        outputs: of the inputs as they are given.
        faults: what is wrong.
        remarks: what is worth knowing, as sentences.
        tried: variations.
        shown: the inputs that show a fault, by variation and result.
    """

    outputs: tuple[JudgedOutput, ...] = ()
    faults: list[Fault] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    tried: list[TriedVariation] = field(default_factory=list)
    shown: dict[tuple[str, str], KernelInputs] = field(default_factory=dict)

    def add(self, habits: Habits) -> None:
        """Add what calls showed beside their results."""
        self.faults += habits.faults
        self.remarks += habits.remarks

    def add_faults(self, faults: list[Fault], inputs: KernelInputs) -> None:
        """Add faults that inputs show."""
        self.faults += faults
        for fault in faults:
            self.shown.setdefault((fault.variation, fault.output), inputs)


def judge_given(pair: KernelUnderTest, found: KernelFindings, *, deadline: float) -> JudgedKernelCall:
    """Judge the inputs as they are given.

    Args:
        pair: kernel and reference.
        found: takes what is found.
        deadline: of :func:`time.monotonic`, for repeated calls.

    Raises:
        NotKnownError: the reference cannot say what is right.
    """
    inputs = pair.task.inputs
    own = pair.reference(inputs)
    if own.error is not None:
        raise NotKnownError(f"the reference raises {named_line(own.error, limit=_LONGEST)}")
    if unwritten(pair.reference, inputs, GIVEN).faults:
        raise NotKnownError("the reference returns memory that it does not write")
    if own.written:
        pair.leave(own)
    called = pair.kernel(inputs)
    try:
        judged = pair.judge(called, pair.runs)
    except NotJudgedError as error:
        raise NotKnownError(str(error)) from error
    if not (judged.structure or called.error or called.results):
        raise NotKnownError("the reference returns no tensor: nothing can be judged")
    found.outputs = judged.outputs()
    if judged.usable:
        found.add(written_inputs(called, own, lambda number: _ignores(pair, number, own)))
        if not pair.task.gradients:
            found.add(_habits(pair, called, deadline))
    if not judged.right:
        found.add_faults(judged.faults(GIVEN, inputs), inputs)
    outcome = VariationOutcome.WITHIN_ROUNDING if judged.right else VariationOutcome.WRONG
    found.tried.append(TriedVariation(GIVEN, outcome, judged.ratio, meaning="the inputs as they are"))
    return judged


def _habits(pair: KernelUnderTest, called: Called, deadline: float) -> Habits:
    """Look for memory that is not written, and state that is kept."""
    inputs = pair.task.inputs
    if called.seconds * _CALLS > (deadline - time.monotonic()) / 2:
        return Habits(remarks=("one call takes so long that repeated calls were not compared",))
    habits = unwritten(pair.kernel, inputs, GIVEN)
    if habits.faults:
        return habits

    def right(later: Called, asked: KernelInputs) -> bool:
        return pair.judge(later, pair.runs if asked is inputs else pair.runs_of(asked)).right

    others = (each.inputs for each in VARIATIONS[0].vary(inputs, generator_of(pair.task.seed, "calls")))
    return repeated(pair.kernel, called, inputs, next(others, None), right)


def _ignores(pair: KernelUnderTest, number: int, own: Called) -> bool:
    """Return whether the results of the reference do not depend on an input."""
    leaves = list(pair.task.inputs.leaves)
    leaves[number] = leaves[number] * 0 + 1
    again = pair.reference(pair.task.inputs.having(leaves))
    return again.error is None and again.same_bits(own)
