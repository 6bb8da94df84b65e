"""What a right kernel may do with varied inputs beside rounding."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hashbench.core.run.distance import unit_roundoff
from hashbench.core.run.rounding import LIMIT
from hashbench.core.run.rounding_reference import ReferenceRuns
from hashbench.extensions.kernels.inputs import KernelInputs
from hashbench.extensions.kernels.judged import JudgedKernelCall
from hashbench.extensions.kernels.pair import KernelUnderTest
from hashbench.extensions.kernels.variations import finite_instead, flushed, rounding_inputs


def excused(
    name: str, pair: KernelUnderTest, inputs: KernelInputs, base: KernelInputs, judged: JudgedKernelCall
) -> JudgedKernelCall:
    """Judge a wrong call once more by what its variation leaves free.

    A right kernel may flush denormals to zero, round large inputs once more, not read what its result does not depend
    on, or round terms that cancel to zero.

    Args:
        name: of the variation.
        pair: kernel and reference.
        inputs: of the call.
        base: the inputs that were varied.
        judged: the call.
    """
    called = judged.called
    if judged.structure or called.error:
        return judged
    if name == "denormals":
        return pair.judge(called, pair.runs_of(flushed(inputs)))
    if name == "large":
        args, kwargs = inputs.arguments()
        return pair.judge(called, ReferenceRuns(rounding_inputs(pair.judged_by), args, kwargs, seed=pair.task.seed))
    if name in ("nan", "inf"):
        free = _independent([pair.runs_of(each) for each in finite_instead(inputs, base)], called.results)
    elif name == "sizes":
        free = _residues(called.results, pair.runs_of(inputs).exact, pair.runs.exact)
    else:
        return judged
    return pair.judge(called, pair.runs_of(inputs), excused=free) if any(bool(each.any()) for each in free) else judged


def _independent(runs: Sequence[ReferenceRuns], results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return which elements are equal in all runs of the reference, which have other inputs at some places."""
    first, *others = (each.exact for each in runs)
    same = []
    for number, result in enumerate(results):
        equal = torch.ones(result.shape, dtype=torch.bool, device=result.device)
        for other in others:
            equal &= (other[number] == first[number]) | (other[number].isnan() & first[number].isnan())
        same.append(equal)
    return same


def _residues(
    results: Sequence[torch.Tensor], exact: Sequence[torch.Tensor], usual: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Return which elements are what rounding leaves of terms that cancel: the reference is zero everywhere, as the
    gradient of a softmax of one element.

    Args:
        results: of the kernel.
        exact: of the reference in float64.
        usual: the same for other inputs, whose magnitude says how large the terms are.
    """
    found = []
    for got, wanted, other in zip(results, exact, usual, strict=True):
        if not got.dtype.is_floating_point or bool(wanted.any()) or not other.numel():
            found.append(torch.zeros(got.shape, dtype=torch.bool, device=got.device))
            continue
        largest = float(other.abs().nan_to_num(nan=0.0, posinf=0.0).max())
        found.append(got.double().abs() <= LIMIT * unit_roundoff(torch.float32) * largest)
    return found
