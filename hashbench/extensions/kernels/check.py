"""The verdict on a kernel and its reference: :func:`within_rounding`."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from hashbench.core.diagnose.replay.controls.memory import POISONS
from hashbench.core.errors import HashbenchError, named_line
from hashbench.core.run.rng import preserved_rng
from hashbench.core.run.rounding_judge import JudgedResult
from hashbench.core.run.rounding_reference import NotJudgedError
from hashbench.core.run.settings import preserved
from hashbench.core.trace.digest import dtype_name
from hashbench.extensions.kernels.example import example_of
from hashbench.extensions.kernels.excuses import excused
from hashbench.extensions.kernels.given import KernelFindings, NotKnownError
from hashbench.extensions.kernels.gradients import NoGradientError, gradients_of
from hashbench.extensions.kernels.inputs import KernelInputs
from hashbench.extensions.kernels.merge import merged, together
from hashbench.extensions.kernels.pair import KernelTask, KernelUnderTest, threads_for
from hashbench.extensions.kernels.trials import VariationTrials
from hashbench.extensions.kernels.variations import GIVEN, NAMES, chosen
from hashbench.extensions.kernels.verdict import (
    Fault,
    FaultKind,
    KernelOutcome,
    RoundingVerdict,
    TriedVariation,
    VariationOutcome,
)

Function = Callable[..., Any]

_LOOKING = 3.0
"""Seconds to look for the smallest inputs that show a fault."""


def within_rounding(
    kernel: Function,
    reference: Function,
    *inputs: Any,
    kwargs: Mapping[str, Any] | None = None,
    backward: bool = False,
    approximate: float | None = None,
    without: Collection[str] = (),
    seed: int = 1337,
    seconds: float = 30.0,
    progress: Callable[[str], None] | None = None,
) -> RoundingVerdict:
    """Judge whether a kernel differs from its reference by rounding alone.

    Both are called on copies of the inputs, from the same random state. Settings and random states are restored.

    Args:
        kernel: any callable: torch ops, an ``autograd.Function``, a compiled function, a C++ extension, the function
            that launches a Triton kernel, a function of NumPy arrays.
        reference: plain torch, evaluated in float64.
        inputs: tensors of any shape and dtype, numbers, ``None``, nested tuples, lists and dicts. The kernel gets
            arrays of NumPy as arrays, the reference as tensors.
        kwargs: arguments by name, for both.
        backward: judge the gradient of each floating-point or complex input, too.
        approximate: largest error that the kernel claims, relative to the largest magnitude of a result; ``None``: it
            claims to be as good as its dtypes.
        without: names of variations that are left out (:data:`~hashbench.extensions.kernels.variations.NAMES`).
        seed: of variations, cotangents and random rounding.
        seconds: after which no further variation begins; the inputs as they are given are always judged.
        progress: called with the name of each variation before it begins.

    Raises:
        HashbenchError: there is no variation of such a name, or no kernel that can be called.
    """
    begin = time.monotonic()
    out = chosen(without, NAMES)
    kernel, reference = _callable(kernel, "kernel"), _callable(reference, "reference")
    given = KernelInputs.of(inputs, kwargs or {})
    run = _CheckRun(kernel, reference, given, seed, approximate, out, begin + seconds, progress or _ignore)
    with preserved(), preserved_rng():
        reason = run.outputs()
        if backward and not reason:
            reason = run.gradients()
        faults = run.faults()
    return run.verdict(reason, faults, time.monotonic() - begin)


def _ignore(_: str) -> None:
    """Tell nobody."""


def _callable(function: Any, what: str) -> Function:
    if isinstance(function, type) and issubclass(function, torch.autograd.Function):
        return function.apply  # type: ignore[no-any-return]
    if type(function).__module__.startswith("triton."):
        raise HashbenchError(
            f"the {what} is a Triton kernel itself",
            consequence="only its launch has a grid and results",
            tip="Give the function that launches it and returns what it wrote.",
        )
    if not callable(function):
        raise HashbenchError(
            f"the {what} is a {type(function).__name__}",
            consequence="it cannot be called",
            tip="Give a function, and its arguments after the reference.",
        )
    return function  # type: ignore[no-any-return]


class _CheckRun:
    """One verdict in the making."""

    def __init__(
        self,
        kernel: Function,
        reference: Function,
        inputs: KernelInputs,
        seed: int,
        approximate: float | None,
        without: Collection[str],
        deadline: float,
        progress: Callable[[str], None],
    ) -> None:
        self._kernel, self._reference, self._inputs = kernel, reference, inputs
        self._seed, self._approximate, self._without = seed, approximate, without
        self._deadline, self._progress = deadline, progress
        self._found: list[KernelFindings] = []
        self._pairs: list[KernelUnderTest] = []

    def outputs(self) -> str:
        """Judge the results; return why nothing can be said, empty where something can."""
        return self._judge(KernelTask(self._kernel, self._reference, self._inputs, (), self._seed, self._approximate))

    def gradients(self) -> str:
        """Judge the gradients; return why nothing can be said of them, empty where something can."""
        before = self._found[-1]
        if any(fault.kind in (FaultKind.RAISED, FaultKind.STRUCTURE) for fault in before.faults):
            before.remarks.append("gradients were not judged: the kernel has no results to take them of")
            return ""
        try:
            pair = gradients_of(self._kernel, self._reference, self._inputs, seed=self._seed)
        except NoGradientError as error:
            if str(error).startswith("the reference"):
                return str(error)
            self._found.append(_raised(str(error)))
            return ""
        except Exception as error:
            self._found.append(_raised(named_line(error, limit=300)))
            return ""
        before.remarks += pair.remarks
        functions = pair.of(self._kernel), pair.of(self._reference)
        return self._judge(KernelTask(*functions, pair.inputs, pair.names, self._seed, self._approximate))

    def _judge(self, task: KernelTask) -> str:
        trials = VariationTrials(task, without=self._without, deadline=self._deadline, progress=self._progress)
        self._found.append(trials.found)
        self._pairs.append(trials.pair)
        try:
            trials.run()
        except (NotKnownError, NotJudgedError) as error:
            return str(error)
        return ""

    def examples(self, faults: tuple[Fault, ...]) -> tuple[Fault, ...]:
        """Return the faults, the one that leads with the smallest inputs that show it."""
        seconds = min(_LOOKING, self._deadline - time.monotonic())
        for pair, found in zip(self._pairs, self._found, strict=False) if faults and seconds > 0 else ():
            inputs = found.shown.get((faults[0].variation, faults[0].output))
            if inputs is not None:
                with threads_for(inputs):
                    example = example_of(inputs.leaves, _judge_of(pair, inputs, faults[0]), seconds=seconds)
                return (replace(faults[0], example=example), *faults[1:])
        return faults

    def faults(self) -> tuple[Fault, ...]:
        """Return what is wrong, the one that leads first."""
        return self.examples(merged(fault for found in self._found for fault in found.faults))

    def verdict(self, reason: str, faults: tuple[Fault, ...], seconds: float) -> RoundingVerdict:
        """Return what was found as a verdict."""
        outcome = KernelOutcome.WITHIN_ROUNDING
        if faults:
            outcome = KernelOutcome.WRONG
        elif reason:
            outcome = KernelOutcome.NOT_KNOWN
        outputs = tuple(output for found in self._found for output in found.outputs)
        remarks = dict.fromkeys(remark for found in self._found for remark in found.remarks)
        return RoundingVerdict(
            outcome,
            "" if faults else reason,
            outputs,
            faults,
            _tried(self._found, self._without),
            tuple(remarks),
            self._dtype(),
            str(self._inputs.device()),
            self._approximate,
            self._seed,
            seconds,
        )

    def _dtype(self) -> str:
        floating = [tensor.dtype for _, tensor in self._inputs.tensors() if tensor.dtype.is_floating_point]
        others = [output.dtype for found in self._found for output in found.outputs]
        return dtype_name(floating[0]) if floating else next(iter(others), "")


def _judge_of(pair: KernelUnderTest, inputs: KernelInputs, fault: Fault) -> Callable[[tuple[Any, ...]], Any]:
    """Return a function that judges the result that has a fault for other leaves; ``None``: they are refused."""

    def judge(leaves: tuple[Any, ...]) -> tuple[torch.Tensor, JudgedResult] | None:
        changed = inputs.having(leaves)
        runs = pair.runs_of(changed)
        runs.own  # noqa: B018  # before the kernel may read outside of what it is given
        called = pair.kernel(changed, poison=POISONS[0])
        judged = pair.judge(called, runs)
        if not judged.usable or fault.output not in called.names:
            return None
        if not judged.right and fault.variation not in ("nan", "inf"):
            judged = excused(fault.variation, pair, changed, changed, judged)
        number = called.names.index(fault.output)
        return called.results[number], judged.results[number]

    return judge


def _raised(detail: str) -> KernelFindings:
    return KernelFindings(faults=[Fault(FaultKind.RAISED, output="gradient", detail=detail)])


def _tried(found: Sequence[KernelFindings], without: Collection[str]) -> tuple[TriedVariation, ...]:
    """Return each variation once, in order."""
    tried: dict[str, TriedVariation] = {}
    for each in found:
        for one in each.tried:
            tried[one.name] = together(tried[one.name], one) if one.name in tried else one
    for name in NAMES:
        off = VariationOutcome.OFF if name in without else VariationOutcome.NOT_APPLICABLE
        reason = "" if name in without else "nothing could be judged"
        tried.setdefault(name, TriedVariation(name, off, reason=reason if name != GIVEN else ""))
    return tuple(tried[name] for name in NAMES)
