"""The ops of torch's own op database: their IR, evaluated by torch, against the FX graph that was lowered.

``python -m tests.extensions.compiled.op_database_lowered float64 1 2`` runs two samples of every op. A process of its
own, since importing the database changes torch's global flags for good.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from typing import Any

import torch
from torch._inductor import ir
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from hashbench.core.inductor.internals import last_writer
from hashbench.extensions.compiled.lowered import NotComputed, evaluate
from tests.extensions.compiled.lowering import Lowering, lower

LARGEST = 20_000
"""Maximum number of elements of the inputs of a sample."""


def _samples(op: Any, dtype: torch.dtype, number: int) -> list[Any]:
    """Return some of the first forty samples, none with an empty tensor: Inductor's ``var_mean`` of nothing is 0."""
    torch.manual_seed(0)
    found = []
    for sample in islice(op.sample_inputs("cpu", dtype), 40):
        sizes = [leaf.numel() for leaf in _leaves(sample) if isinstance(leaf, torch.Tensor)]
        if sizes and min(sizes) > 0 and sum(sizes) <= LARGEST:
            found.append(sample)
    return found[:: max(1, len(found) // number)][:number]


def _leaves(sample: Any) -> list[Any]:
    return tree_leaves((sample.input, sample.args, sample.kwargs))


def _lowered(op: Any, sample: Any) -> Lowering | None:
    """Return the lowering of a call; None if it cannot be traced, or makes no loop."""
    leaves, spec = tree_flatten((sample.input, sample.args, sample.kwargs))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

    def call(*tensors: torch.Tensor) -> list[torch.Tensor]:
        filled = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            filled[place] = tensor
        first, args, kwargs = tree_unflatten(filled, spec)
        return [leaf for leaf in tree_leaves(op.op(first, *args, **kwargs)) if isinstance(leaf, torch.Tensor)]

    try:
        return lower(call, [leaves[place].detach() for place in places])
    except Exception:  # dynamic output shapes, sparse tensors, jiterator, nothing to compile
        return None


def _defined(lowered: Lowering, buffer: ir.Buffer) -> torch.Tensor | None:
    """Return what FX computes for a buffer; None if it has no node, or its content is not defined."""
    node = buffer.get_origin_node()
    value = lowered.nodes.get(node) if node is not None and node.op == "call_function" else None
    return value if isinstance(value, torch.Tensor) and "empty" not in str(node.target) else None


def _outcome(lowered: Lowering) -> str:
    """Return ``agrees``, ``disagrees``, or why a buffer is not evaluated."""
    values = lowered.values()
    for buffer in lowered.computed():
        writer = last_writer(buffer, lowered.graph)
        if not isinstance(writer, ir.ComputedBuffer | ir.ConcatKernel):
            continue  # an extern kernel mutates it
        try:
            value = evaluate(writer, values, graph=lowered.graph)
        except NotComputed as reason:
            return str(reason)
        wanted = _defined(lowered, buffer)
        if wanted is not None and not _close(value, wanted):
            return "disagrees"
    return "agrees"


def _close(value: torch.Tensor, wanted: torch.Tensor) -> bool:
    near = 1e-7 if wanted.dtype == torch.float64 else 1e-4
    shaped = value.reshape(wanted.shape).to(wanted.dtype)
    return torch.allclose(shaped, wanted, rtol=near, atol=near / 10, equal_nan=True)


def _outcomes(ops: Sequence[Any], dtype: torch.dtype, number: int) -> Counter[tuple[str, str]]:
    counts: Counter[tuple[str, str]] = Counter()
    for op in ops:
        for sample in _samples(op, dtype, number) if dtype in op.dtypes else ():
            lowered = _lowered(op, sample)
            if lowered is not None and lowered.computed():
                outcome = _outcome(lowered)
                counts[outcome, "" if outcome == "agrees" else op.name] += 1
    return counts


def _judge(counts: Counter[tuple[str, str]]) -> None:
    print(sum(counts.values()), "calls with loops:", dict(counts))
    assert not [op for outcome, op in counts if outcome == "disagrees"]
    assert counts["agrees", ""] >= 0.9 * sum(counts.values())


def main(dtype: str, every: str, number: str) -> None:
    counts = _outcomes(op_db[:: int(every)], getattr(torch, dtype), int(number))
    _judge(counts)


if __name__ == "__main__":
    main(*sys.argv[1:])
