"""Round the result of every op of a model's forward and backward at random: what that changes, rounding explains.

Two right programs may differ by far more than an ulp where a result hangs on the sign of a rounding error (``round``,
``argmax``, a comparison of equal values), or where part of the model computes in a lower dtype. Both show here.
"""

from __future__ import annotations

from typing import Any

import torch

from hashbench.core.trace.arguments import mapped, tensors_in
from hashbench.core.trace.storage_writers import storage_key
from hashbench.extensions.compiled.aot import Backend, StepRunner, dynamo_backend
from hashbench.extensions.compiled.aot_graphs import NodeCall, visited

SEEDS = (1, 2, 3)
"""Of the runs with random roundings that a distance beyond the limit is held against."""

_COARSER = {
    torch.float64: torch.float32,
    torch.float32: torch.bfloat16,
    torch.bfloat16: torch.float8_e5m2,
    torch.float16: torch.float8_e5m2,
}
"""By dtype: one with so few digits that a number which it holds is likely exact."""


def rounding_backend(seed: int) -> Backend:
    """Return the backend of dynamo that multiplies every new floating-point result by 1 plus or minus an ulp of its
    dtype, and the gradient that flows through it.

    Not rounded: views, what is written in place, and elements with so few digits that they are likely exact (integers,
    halves, masks).
    """
    generator = torch.Generator().manual_seed(seed)

    def rounded(call: NodeCall) -> Any:
        result = call.run()
        if call.node.op in {"placeholder", "get_attr", "output"}:
            return result
        given = {storage_key(tensor) for tensor in tensors_in([call.args, call.kwargs])}
        return mapped(result, lambda leaf: _rounded(leaf, given, generator))

    return dynamo_backend(lambda graph, inputs: visited(graph, inputs, rounded))


def moved_by_rounding(run: StepRunner, name: str) -> float | None:
    """Return the largest change of a result if every op of dynamo's graphs rounds at random, in the model's own dtype;
    ``None`` if that cannot be run, or there is no such result."""
    try:
        captured = run("eager", None)[name]
        rounded = [run(rounding_backend(seed), None)[name] for seed in SEEDS]
        return max(float((each.double() - captured.double()).abs().max()) for each in rounded)
    except Exception:
        return None


def _rounded(leaf: Any, given: set[Any], generator: torch.Generator) -> Any:
    if not isinstance(leaf, torch.Tensor) or leaf.dtype not in _COARSER or storage_key(leaf) in given:
        return leaf
    signs = torch.randint(0, 2, leaf.shape, generator=generator).to(leaf.device, leaf.dtype) * 2 - 1
    detached = leaf.detach()
    exact = detached.to(_COARSER[leaf.dtype]).to(leaf.dtype) == detached
    factor = torch.where(exact, 1.0, 1.0 + signs * torch.finfo(leaf.dtype).eps)
    return leaf * factor.to(leaf.dtype)
