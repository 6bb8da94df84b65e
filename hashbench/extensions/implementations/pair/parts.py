"""Narrow a region of ops beside one fused op, by what torch's own decomposition of that op computes on the way."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch._decomp import decomposition_table
from torch.utils._python_dispatch import TorchDispatchMode

from hashbench.core.divergence.content import ContentGraph, ContentNode, Kind, Parting
from hashbench.core.divergence.content_align import align_contents
from hashbench.core.divergence.content_walk import find_partings
from hashbench.core.trace.arguments import tensors_in
from hashbench.core.trace.digest import untraced
from hashbench.core.trace.op_schema import Pattern, plan_of
from hashbench.extensions.implementations.pair.moments import measure
from hashbench.extensions.implementations.pair.record import KeptCall

MOST_ELEMENTS = 1 << 26
"""Elements of the arguments of a call that is decomposed."""


def has_parts(op: Any) -> bool:
    """Return whether torch has a decomposition of an op that computes something and declares no write."""
    plan = plan_of(op)
    writes = plan.written or plan.written_names  # running statistics are not among these
    return op in decomposition_table and not (writes or plan.seeded or plan.pattern is Pattern.VIEW)


def narrowed(
    parting: Parting, names: Sequence[str], a: ContentGraph, b: ContentGraph, calls: Mapping[str, KeptCall]
) -> Parting:
    """Return a parting whose region in (b) begins later, where its first ops compute what (a) computes inside.

    It stays as it is if nothing inside corresponds, or if the place would then be another op of (a): what lacks a last
    term may equal a step inside.

    Args:
        parting: with several ops of (b).
        names: nodes of (a) that may be what these compute.
        a, b: both runs.
        calls: of the ops of (a), by record.
    """
    inside = {node.id: node for name in names for node in _nodes_inside(a.nodes[name], calls)}
    if not inside:
        return parting
    richer = ContentGraph({**a.nodes, **inside}, a.results)
    alignment = align_contents(richer, b)
    behind = b.following(parting.b[0])
    for found in find_partings(richer, b, alignment)[:1]:
        moved = bool(found.b) and found.b[0] in behind and parting.b[0] in alignment.partners
        if moved and {*found.a[:1]} <= {*names, *inside}:
            agree = tuple(pair for pair in found.agree if pair[0] in a.nodes) or parting.agree
            return replace(found, a=parting.a or found.a, agree=agree, results=found.results or parting.results)
    return parting


def _nodes_inside(node: ContentNode, calls: Mapping[str, KeptCall]) -> Iterator[ContentNode]:
    record = node.id.rpartition(":")[0]
    call = calls.get(record)
    if call is None or not has_parts(call.func):
        return
    if sum(tensor.numel() for tensor in tensors_in([call.args, call.kwargs])) > MOST_ELEMENTS:
        return
    with (
        untraced(),
        _InnerOutputs() as mode,
        suppress(Exception),
    ):  # what it does not support; the steps until then count
        decomposition_table[call.func](*call.args, **call.kwargs)
    for number, (op, tensor) in enumerate(mode.found):
        if tensor.layout is torch.strided and tensor.numel():
            with untraced():
                found = measure(tensor, rows=True)
            yield ContentNode(
                f"{record}:inside{number}",
                op,
                Kind.COMPUTED,
                found.moments,
                node.reads,
                numel=tensor.numel(),
                rows=found.rows,
                shape=tuple(tensor.shape),
                ordered=found.ordered,
            )


class _InnerOutputs(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[tuple[str, torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if plan_of(func).pattern is not Pattern.VIEW:
            self.found += [(str(func), tensor.detach().clone()) for tensor in tensors_in(output)]
        return output
