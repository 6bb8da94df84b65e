"""Judge a kernel with its inputs as they are, and with each variation of them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hashbench.core.diagnose.replay.controls.memory import POISONS
from hashbench.core.errors import named_line
from hashbench.core.run.rounding_judge import JudgedResult
from hashbench.core.run.rounding_reference import NotJudgedError, ReferenceRuns
from hashbench.extensions.kernels.calls import Called, Caller, Function, leaving
from hashbench.extensions.kernels.example import example_of
from hashbench.extensions.kernels.float32 import in_float32, resolves_float32
from hashbench.extensions.kernels.hygiene import Habits, repeated, unwritten, written_inputs
from hashbench.extensions.kernels.inputs import Inputs
from hashbench.extensions.kernels.judged import Judged, independent, judge, residues
from hashbench.extensions.kernels.variations import (
    FLOAT32,
    GIVEN,
    VARIATIONS,
    Variation,
    Varied,
    finite_instead,
    flushed,
    generator_of,
    reductions,
    rounding_inputs,
)
from hashbench.extensions.kernels.verdict import Example, Fault, JudgedOutput, TriedVariation, VariationOutcome

_OTHER_VALUES = ("seeds", "large", "tiny", "spikes", "integers")
"""Variations that change all values: a result of other inputs is then left over from an earlier call."""

_EXCHANGED = "the kernel has NaN where the reference has an infinity, or the other way"

_DESCRIBED = 2
"""Faults of a result that variations show whose kind and places are looked for."""

_LONGEST = 200
_IN_FLOAT32 = Variation(FLOAT32, in_float32, "no input is in a lower dtype than float32", shapes=True)


class NotKnownError(Exception):
    """Nothing can be said of a kernel; the message is the reason."""


@dataclass(frozen=True, slots=True)
class Task:
    """What is judged: the results of a kernel, or their gradients.

    Attributes:
        kernel: of the inputs.
        reference: of the inputs, plain torch.
        inputs: as they are given.
        names: of the results; empty: they are called by their place.
    """

    kernel: Function
    reference: Function
    inputs: Inputs
    names: tuple[str, ...] = ()

    @property
    def gradients(self) -> bool:
        """Whether gradients are judged."""
        return bool(self.names)


@dataclass(slots=True)
class Findings:
    """What was found, in the order in which it was."""

    outputs: tuple[JudgedOutput, ...] = ()
    faults: list[Fault] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    tried: list[TriedVariation] = field(default_factory=list)

    def add(self, habits: Habits) -> None:
        """Add what calls showed beside their results."""
        self.faults += habits.faults
        self.remarks += habits.remarks


@dataclass(slots=True)
class _Tally:
    """What the inputs of one variation showed."""

    ratios: list[float] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    undefined: list[str] = field(default_factory=list)
    meanings: list[str] = field(default_factory=list)
    wrong: bool = False
    late: bool = False

    def outcome(self) -> VariationOutcome:
        if self.wrong:
            return VariationOutcome.WRONG
        if self.ratios:
            return VariationOutcome.WITHIN_ROUNDING
        if self.late:
            return VariationOutcome.OUT_OF_TIME
        if self.refused:
            return VariationOutcome.REFUSED
        return VariationOutcome.NOT_DEFINED if self.undefined else VariationOutcome.NOT_APPLICABLE


class Trials:
    """Judges one task with all variations.

    Args:
        task: what is judged.
        seed: of variations and of random rounding.
        approximate: what the kernel claims.
        without: names of variations that are left out.
        deadline: of :func:`time.monotonic`; what would begin later is out of time.
        progress: called with the name of each variation before it begins.
    """

    def __init__(
        self,
        task: Task,
        *,
        seed: int,
        approximate: float | None,
        without: Collection[str],
        deadline: float,
        progress: Callable[[str], None],
    ) -> None:
        self._task, self._seed, self._approximate = task, seed, approximate
        self._without, self._deadline, self._progress = without, deadline, progress
        self._kernel = self._caller(task.kernel)
        self._reference = self._caller(task.reference, tensors=True)
        self._to_judge = task.reference
        self._base, self._base_runs = task.inputs, self._runs(task.inputs)
        self._earlier: list[torch.Tensor] = []
        self._shown: dict[tuple[str, str], Inputs] = {}
        self.found = Findings()

    def run(self) -> Findings:
        """Judge the inputs as they are, and each variation.

        Raises:
            NotKnownError: the reference cannot say what is right of the inputs as they are.
        """
        self._progress(GIVEN)
        whole = self._given()
        if whole and "sizes" not in self._without:
            self._reduce()
        for variation in VARIATIONS:
            if variation.backward or not self._task.gradients:
                self._vary(variation, whole)
        if not self._task.gradients:
            self._vary(_IN_FLOAT32, whole)
        return self.found

    # ------------------------------------------------------------------------------------------- the inputs as they are

    def _given(self) -> bool:
        """Judge the inputs as they are; return whether variations make sense."""
        inputs = self._task.inputs
        own = self._reference(inputs)
        if own.error is not None:
            raise NotKnownError(f"the reference raises {named_line(own.error, limit=_LONGEST)}")
        if own.written:
            self._leave(own)
        try:
            called = self._kernel(inputs)
            judged = self._judge(called, self._base_runs)
            if not (judged.structure or called.error or called.results):
                raise NotKnownError("the reference returns no tensor: nothing can be judged")
        except NotJudgedError as error:
            raise NotKnownError(str(error)) from error
        self.found.outputs = judged.outputs()
        usable = not (judged.structure or called.error)
        if usable:
            self._look_at_calls(called, own)
        if judged.right:
            self._earlier += called.results
        if not judged.right:
            self.found.faults += self._noted(judged.faults(GIVEN, inputs), inputs)
        outcome = VariationOutcome.WITHIN_ROUNDING if judged.right else VariationOutcome.WRONG
        self.found.tried.append(TriedVariation(GIVEN, outcome, judged.ratio, meaning="the inputs as they are"))
        return usable

    def _leave(self, own: Called) -> None:
        """Judge what the reference leaves in its inputs, too."""
        inputs, written = self._task.inputs, sorted(own.written)
        first = self._kernel(inputs)
        returns = bool(first.results) and bool(own.results)
        afterwards = tuple(f"{inputs.names()[number]} afterwards" for number in written)

        def names(count: int) -> tuple[str, ...]:
            plain = count - len(afterwards)
            return (*(["output"] if plain == 1 else [f"output.{k}" for k in range(plain)]), *afterwards)

        self._to_judge = leaving(self._task.reference, written, returns=returns)
        kernel = leaving(self._task.kernel, written, returns=returns)
        self._kernel = Caller(kernel, seed=self._seed, gradients=self._task.gradients, names=names)
        self._base_runs = self._runs(inputs)

    def _look_at_calls(self, called: Called, own: Called) -> None:
        """Look for inputs that are written, memory that is not, and state that is kept."""
        inputs = self._task.inputs
        self.found.add(written_inputs(called, own, lambda number: self._ignores(number, own)))
        if self._task.gradients:
            return
        if called.seconds * 6 > (self._deadline - time.monotonic()) / 2:
            self.found.remarks.append("one call takes so long that repeated calls were not compared")
            return
        poisoned = [self._kernel(inputs, poison=poison) for poison in POISONS]
        habits = Habits() if poisoned[0].same_bits(poisoned[1]) else unwritten(self._kernel, inputs, GIVEN)
        self.found.add(habits)
        if habits.faults:
            return
        others = (each.inputs for each in VARIATIONS[0].vary(inputs, generator_of(self._seed, "calls")))
        self.found.add(repeated(self._kernel, called, inputs, next(others, None), self._right))

    def _right(self, called: Called, inputs: Inputs) -> bool:
        runs = self._base_runs if inputs is self._task.inputs else self._runs(inputs)
        return self._judge(called, runs).right

    def _ignores(self, number: int, own: Called) -> bool:
        """Return whether the results of the reference do not depend on an input."""
        leaves = list(self._task.inputs.leaves)
        leaves[number] = leaves[number] * 0 + 1
        again = self._reference(self._task.inputs.having(leaves))
        return again.error is None and again.same_bits(own)

    # ------------------------------------------------------------------------------------------------------- variations

    def _reduce(self) -> None:
        """Choose smaller inputs for variations that do not need the size: both functions take them."""
        for candidate in reductions(self._task.inputs):
            if candidate is self._task.inputs or time.monotonic() > self._deadline:
                return
            runs = self._runs(candidate)
            try:
                judged = self._judge(self._kernel(candidate, poison=POISONS[0]), runs)
            except Exception:  # the reference does not take these sizes
                continue
            if judged.right:
                self._base, self._base_runs = candidate, runs
                self._earlier += judged.called.results
                return

    def _vary(self, variation: Variation, usable: bool) -> None:
        name = variation.name
        if name in self._without:
            self.found.tried.append(TriedVariation(name, VariationOutcome.OFF))
            return
        if not usable:
            reason = "the kernel has no results for the inputs as they are"
            self.found.tried.append(TriedVariation(name, VariationOutcome.NOT_APPLICABLE, reason=reason))
            return
        self._progress(name)
        tally = _Tally()
        base = self._task.inputs if name == "sizes" else self._base
        for varied in variation.vary(base, generator_of(self._seed, name)):
            if time.monotonic() > self._deadline:
                tally.late = True
                break
            self._try(variation, varied, tally)
        outcome = tally.outcome()
        reasons = dict.fromkeys([*tally.refused, *tally.undefined])
        reason = variation.idle if outcome is VariationOutcome.NOT_APPLICABLE else "; ".join(list(reasons)[:2])
        ratio = max(tally.ratios, default=None)
        meaning = ", ".join(dict.fromkeys(tally.meanings))
        self.found.tried.append(TriedVariation(name, outcome, ratio, reason, meaning))

    def _try(self, variation: Variation, varied: Varied, tally: _Tally) -> None:
        """Judge varied inputs; where the reference refuses them, the other ones."""
        for candidate in (varied.inputs, *varied.follows):
            runs = self._base_runs if varied.layout else self._runs(candidate)
            try:
                runs.own  # noqa: B018  # evaluated before the kernel may read outside of what it is given
            except Exception as error:
                undefined = named_line(error, limit=_LONGEST)
                continue
            called = self._kernel(candidate, poison=POISONS[0])
            if called.error and (_is_refusal(called.error, variation) or not _all_finite(runs.own)):
                tally.refused.append(f"{varied.meaning}: {named_line(called.error, limit=_LONGEST)}")
                return
            self._take(variation, varied, candidate, called, runs, tally)
            return
        tally.undefined.append(f"{varied.meaning}: {undefined}")

    def _take(
        self,
        variation: Variation,
        varied: Varied,
        inputs: Inputs,
        called: Called,
        runs: ReferenceRuns,
        tally: _Tally,
    ) -> None:
        try:
            judged = self._judge(called, runs)
            right = judged.right or self._excused(variation, inputs, judged)
        except NotJudgedError as error:
            tally.undefined.append(f"{varied.meaning}: {error}")
            return
        tally.meanings.append(varied.meaning)
        if judged.exchanged:
            self.found.remarks.append(_EXCHANGED)
        if right:
            tally.ratios.append(judged.ratio or 0.0)
            return
        if variation.name == FLOAT32 and not resolves_float32(self._kernel, self._runs, inputs, called):
            tally.meanings.pop()
            tally.refused.append("the kernel computes in a lower dtype inside")
            return
        tally.wrong = True
        if judged.ratio is not None:
            tally.ratios.append(judged.ratio)
        self.found.faults += self._faults(variation.name, inputs, judged)

    def _excused(self, variation: Variation, inputs: Inputs, judged: Judged) -> bool:
        """Return whether a kernel is right that flushes denormals to zero, rounds large inputs once more, does not read
        what its result does not depend on, or rounds what cancels to zero."""
        called = judged.called
        if judged.structure or called.error:
            return False
        if variation.name == "denormals":
            return self._judge(called, self._runs(flushed(inputs))).right
        if variation.name == "large":
            args, kwargs = inputs.arguments()
            return self._judge(
                called, ReferenceRuns(rounding_inputs(self._to_judge), args, kwargs, seed=self._seed)
            ).right
        if variation.name in ("nan", "inf"):
            excused = independent([self._runs(each) for each in finite_instead(inputs, self._base)], called.results)
            return judge(called, self._runs(inputs), approximate=self._approximate, excused=excused).right
        if variation.name == "sizes":
            excused = residues(called.results, self._runs(inputs).exact, self._base_runs.exact)
            return judge(called, self._runs(inputs), approximate=self._approximate, excused=excused).right
        return False

    def _faults(self, name: str, inputs: Inputs, judged: Judged) -> Sequence[Fault]:
        """Return what is wrong; memory that was not written before wrong values."""
        called = judged.called
        if called.error is None and not self._kernel(inputs, poison=POISONS[1]).same_bits(called):
            habits = unwritten(self._kernel, inputs, name)
            if habits.faults:
                return habits.faults
        special = name in ("nan", "inf")
        times = Counter(fault.output for fault in self.found.faults if special == (fault.variation in ("nan", "inf")))
        given = {fault.output for fault in self.found.faults if fault.variation == GIVEN and not special}
        known = given | {output for output, count in times.items() if count >= _DESCRIBED}
        earlier = self._earlier if name in _OTHER_VALUES else ()
        return self._noted(judged.faults(name, inputs, earlier, known), inputs)

    # ------------------------------------------------------------------------------------------------------ examples

    def _noted(self, faults: Sequence[Fault], inputs: Inputs) -> Sequence[Fault]:
        """Note which inputs showed faults."""
        for fault in faults:
            self._shown.setdefault((fault.variation, fault.output), inputs)
        return faults

    def example(self, fault: Fault, *, seconds: float) -> Example | None:
        """Return the smallest inputs that show a fault; ``None`` if this task did not find it, or no element is wrong.

        Args:
            fault: one of those found.
            seconds: how long to look.
        """
        inputs = self._shown.get((fault.variation, fault.output))
        variation = next((each for each in VARIATIONS if each.name == fault.variation), None)
        if inputs is None:
            return None

        def judge(leaves: tuple[Any, ...]) -> tuple[torch.Tensor, JudgedResult] | None:
            tried = inputs.having(leaves)
            called = self._kernel(tried)
            judged = self._judge(called, self._runs(tried))
            if called.error or judged.structure or fault.output not in called.names:
                return None
            if variation is not None and self._excused(variation, tried, judged):
                return None
            number = called.names.index(fault.output)
            return called.results[number], judged.results[number]

        return example_of(inputs.leaves, judge, seconds=seconds)

    # ------------------------------------------------------------------------------------------------------ helpers

    def _caller(self, function: Function, *, tensors: bool = False) -> Caller:
        names = self._task.names
        return Caller(
            function,
            seed=self._seed,
            gradients=self._task.gradients,
            names=(lambda count: names[:count]) if names else None,
            tensors=tensors,
        )

    def _runs(self, inputs: Inputs) -> ReferenceRuns:
        args, kwargs = inputs.arguments()
        return ReferenceRuns(self._to_judge, args, kwargs, seed=self._seed)

    def _judge(self, called: Called, runs: ReferenceRuns) -> Judged:
        return judge(called, runs, approximate=self._approximate)


def _all_finite(results: Sequence[torch.Tensor]) -> bool:
    return all(bool(result.double().isfinite().all()) for result in results if result.dtype.is_floating_point)


def _is_refusal(error: Exception, variation: Variation) -> bool:
    """Return whether an exception says that a kernel does not take such inputs: of sizes and layouts any does."""
    return variation.shapes or isinstance(error, (AssertionError, ValueError, NotImplementedError))
