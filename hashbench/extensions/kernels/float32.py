"""The same values in float32: what rounding to a lower dtype hides is then seen."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from hashbench.core.run.distance import unit_roundoff
from hashbench.core.run.rounding_judge import resolves
from hashbench.core.run.rounding_reference import ReferenceRuns
from hashbench.extensions.kernels.calls import Called, Caller
from hashbench.extensions.kernels.inputs import KernelInputs, meaning_of
from hashbench.extensions.kernels.variations import Varied

_STEP = 2.0**-14
"""Relative change of inputs that float32 resolves, and neither float16 nor bfloat16 does."""


def in_float32(inputs: KernelInputs, _: torch.Generator) -> Iterator[Varied]:
    """Yield the inputs in float32, where some are in a lower dtype."""
    leaves = [_raised(leaf) for leaf in inputs.leaves]
    if any(new is not leaf and isinstance(leaf, torch.Tensor) for new, leaf in zip(leaves, inputs.leaves, strict=True)):
        yield Varied(inputs.having(leaves), "the same values in float32")


def _raised(leaf: object) -> object:
    low = (torch.float16, torch.bfloat16)
    if isinstance(leaf, torch.Tensor) and leaf.dtype in low:
        return leaf.float()
    return torch.float32 if leaf in low else leaf


def resolves_float32(
    kernel: Caller, runs_of: Callable[[KernelInputs], ReferenceRuns], inputs: KernelInputs, called: Called
) -> bool:
    """Return whether a kernel answers to a small change of its inputs as the reference does.

    Args:
        kernel: of the inputs.
        runs_of: returns the runs of the reference for inputs.
        inputs: in float32.
        called: the kernel's call for them.
    """
    generator = torch.Generator().manual_seed(0)
    leaves = list(inputs.leaves)
    for number, tensor in inputs.tensors():
        if tensor.dtype is torch.float32 and not meaning_of(tensor).fixed:
            signs = torch.randint(0, 2, tensor.shape, generator=generator).to(tensor.device, tensor.dtype) * 2 - 1
            leaves[number] = tensor * (1 + _STEP * signs)
    changed = inputs.having(leaves)
    later = kernel(changed)
    if called.error is not None or later.error is not None or len(later.results) != len(called.results):
        return False
    results = zip(called.results, later.results, runs_of(inputs).own, runs_of(changed).own, strict=True)
    return all(
        resolves(*each) is not False and unit_roundoff(each[0].dtype) <= unit_roundoff(torch.float32)
        for each in results
        if each[0].dtype.is_floating_point
    )
