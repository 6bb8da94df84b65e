"""`Workload`: a model with everything a run of it needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Workload:
    """What a zoo's function returns when ``(module, example_inputs)`` does not say enough.

    Only ``module`` and one of ``inputs`` and ``make_inputs`` are needed; the harness has its own default for the rest.

    Args:
        module: the model, on the CPU or already on its device. It is deep-copied for every run and never run itself.
        inputs: a tuple or list (positional arguments), a mapping (keyword arguments) or one tensor. Cloned for every
            run.
        make_inputs: called without arguments, afresh for every run and inside the reset random state, in place
            of ``inputs``.
        make_optimizer: called with the parameters of the copy that requires gradients; returns the optimizer of that
            run. Used in training only. Default: Adam with ``lr=0.01``, as ``benchmarks/dynamo`` uses.
        loss: called with the model's output; returns a scalar tensor with a gradient. Default: the average of the
            means of all floating-point tensors in the output (``reduce_to_scalar_loss`` of dynamo, or a fixed random
            projection with ``--cotangent random``).
        iterations: how many steps a run has. Default: ``--iterations``, else 2.
    """

    module: torch.nn.Module
    inputs: Any = None
    make_inputs: Callable[[], Any] | None = None
    make_optimizer: Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer] | None = None
    loss: Callable[[Any], torch.Tensor] | None = None
    iterations: int | None = None

    def __post_init__(self) -> None:
        if self.inputs is None and self.make_inputs is None:
            raise ValueError(
                "a Workload needs inputs or make_inputs: the model cannot be called. "
                "Pass inputs=(tensor,) or make_inputs=function."
            )
