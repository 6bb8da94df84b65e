"""Judge a kernel with its inputs as they are given, and with each variation of them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch

from hashbench.core.diagnose.replay.controls.memory import POISONS
from hashbench.core.errors import named_line
from hashbench.core.run.rounding_reference import NotJudgedError
from hashbench.extensions.kernels.excuses import excused
from hashbench.extensions.kernels.float32 import in_float32, resolves_float32
from hashbench.extensions.kernels.given import KernelFindings, judge_given
from hashbench.extensions.kernels.hygiene import unwritten
from hashbench.extensions.kernels.inputs import KernelInputs
from hashbench.extensions.kernels.judged import JudgedKernelCall
from hashbench.extensions.kernels.pair import KernelTask, KernelUnderTest, threads_for
from hashbench.extensions.kernels.variations import (
    FLOAT32,
    GIVEN,
    VARIATIONS,
    Variation,
    Varied,
    generator_of,
    reductions,
)
from hashbench.extensions.kernels.verdict import Fault, TriedVariation, VariationOutcome

_OTHER_VALUES = ("seeds", "large", "tiny", "spikes", "integers")
"""Variations that change all values: a result of other inputs is then left over from an earlier call."""

_SPECIAL = ("nan", "inf")

_WHOLE = ("spikes", "integers")
"""Variations of the inputs as they are given, too, where others have smaller ones."""

_DESCRIBED = 2
"""Faults of a result that variations show whose kind and places are looked for."""

_EXCHANGED = "the kernel has NaN where the reference has an infinity, or the other way"

_LONGEST = 200
_IN_FLOAT32 = Variation(FLOAT32, in_float32, "no input is in a lower dtype than float32", shapes=True)


@dataclass(slots=True)
class _VariationTally:
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


class VariationTrials:
    """Judges one task with all variations.

    Args:
        task: what is judged.
        without: names of variations that are left out.
        deadline: of :func:`time.monotonic`; what would begin later is out of time.
        progress: called with the name of each variation before it begins.

    Attributes:
        pair: of the task.
        found: what was found.
    """

    def __init__(
        self, task: KernelTask, *, without: Collection[str], deadline: float, progress: Callable[[str], None]
    ) -> None:
        self._task, self._without, self._deadline, self._progress = task, without, deadline, progress
        self.pair, self.found = KernelUnderTest(task), KernelFindings()
        self._base, self._base_runs = task.inputs, self.pair.runs
        self._earlier: list[torch.Tensor] = []

    def run(self) -> None:
        """Judge the inputs as they are, and each variation.

        Raises:
            NotKnownError: the reference cannot say what is right of the inputs as they are.
        """
        self._progress(GIVEN)
        judged = judge_given(self.pair, self.found, deadline=self._deadline)
        self._base_runs = self.pair.runs
        if judged.right:
            self._earlier += judged.called.results
        if judged.usable and "sizes" not in self._without:
            self._reduce(wrong=not judged.right)
        for variation in VARIATIONS:
            if variation.backward or not self._task.gradients:
                self._vary(variation, judged.usable)
        if not self._task.gradients:
            self._vary(_IN_FLOAT32, judged.usable)

    def _reduce(self, *, wrong: bool) -> None:
        """Choose smaller inputs for variations that do not need the size: both functions take them, and the kernel is
        not wrong there, unless it is for those that are given."""
        for candidate in reductions(self._task.inputs):
            if candidate is self._task.inputs or time.monotonic() > self._deadline:
                return
            runs = self.pair.runs_of(candidate)
            try:
                with threads_for(candidate):
                    runs.own  # noqa: B018  # before the kernel may read outside of what it is given
                judged = self.pair.judge(self.pair.kernel(candidate, poison=POISONS[0]), runs)
            except Exception:  # the reference does not take these sizes
                continue
            if judged.right or (wrong and judged.usable):
                self._base, self._base_runs = candidate, runs
                self._earlier += judged.called.results if judged.right else ()
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
        tally = _VariationTally()
        for base in self._bases(name):
            for varied in variation.vary(base, generator_of(self._task.seed, name)):
                if time.monotonic() > self._deadline:
                    tally.late = True
                    break
                self._try(variation, varied, base, tally)
        outcome = tally.outcome()
        reasons = dict.fromkeys([*tally.refused, *tally.undefined])
        reason = variation.idle if outcome is VariationOutcome.NOT_APPLICABLE else "; ".join(list(reasons)[:2])
        ratio = max(tally.ratios, default=None)
        meaning = ", ".join(dict.fromkeys(tally.meanings))
        self.found.tried.append(TriedVariation(name, outcome, ratio, reason, meaning))

    def _bases(self, name: str) -> Sequence[KernelInputs]:
        """Return the inputs that are varied."""
        if name == "sizes":
            return (self._task.inputs,)
        if name in _WHOLE and self._base is not self._task.inputs and not self.found.faults:
            return self._base, self._task.inputs
        return (self._base,)

    def _try(self, variation: Variation, varied: Varied, base: KernelInputs, tally: _VariationTally) -> None:
        """Judge varied inputs; where the reference refuses them, the other ones."""
        undefined = ""
        for candidate in (varied.inputs, *varied.follows):
            runs = self._base_runs if varied.layout else self.pair.runs_of(candidate)
            try:
                with threads_for(candidate):
                    runs.own  # noqa: B018  # before the kernel may read outside of what it is given
            except Exception as error:
                undefined = named_line(error, limit=_LONGEST)
                continue
            called = self.pair.kernel(candidate, poison=POISONS[0])
            if called.error and (_is_refusal(called.error, variation) or not _all_finite(runs.own)):
                tally.refused.append(f"{varied.meaning}: {named_line(called.error, limit=_LONGEST)}")
                return
            try:
                judged = self.pair.judge(called, runs)
                if not judged.right:
                    with threads_for(candidate):
                        judged = excused(variation.name, self.pair, candidate, base, judged)
            except NotJudgedError as error:
                undefined = str(error)
                break
            self._take(variation, varied, candidate, judged, tally)
            return
        tally.undefined.append(f"{varied.meaning}: {undefined}")

    def _take(
        self,
        variation: Variation,
        varied: Varied,
        inputs: KernelInputs,
        judged: JudgedKernelCall,
        tally: _VariationTally,
    ) -> None:
        """Count what inputs showed."""
        wrong = not judged.right
        if wrong and variation.name == FLOAT32:
            with threads_for(inputs):
                resolved = resolves_float32(self.pair.kernel, self.pair.runs_of, inputs, judged.called)
            if not resolved:
                tally.refused.append("the kernel computes in a lower dtype inside")
                return
        tally.meanings.append(varied.meaning)
        if judged.exchanged:
            self.found.remarks.append(_EXCHANGED)
        if judged.ratio is not None:
            tally.ratios.append(judged.ratio)
        if wrong:
            tally.wrong = True
            self.found.add_faults(self._faults(variation.name, inputs, judged), inputs)

    def _faults(self, name: str, inputs: KernelInputs, judged: JudgedKernelCall) -> list[Fault]:
        """Return what is wrong; memory that was not written before wrong values."""
        habits = unwritten(self.pair.kernel, inputs, name)
        if habits.faults:
            return list(habits.faults)
        special = name in _SPECIAL
        times = Counter(fault.output for fault in self.found.faults if special == (fault.variation in _SPECIAL))
        given = {fault.output for fault in self.found.faults if fault.variation == GIVEN and not special}
        known = given | {output for output, count in times.items() if count >= _DESCRIBED}
        return judged.faults(name, inputs, self._earlier if name in _OTHER_VALUES else (), known)


def _all_finite(results: Sequence[torch.Tensor]) -> bool:
    return all(bool(result.double().isfinite().all()) for result in results if result.dtype.is_floating_point)


def _is_refusal(error: Exception, variation: Variation) -> bool:
    """Return whether an exception says that a kernel does not take such inputs: of sizes and layouts any does."""
    return variation.shapes or isinstance(error, (AssertionError, ValueError, NotImplementedError))
