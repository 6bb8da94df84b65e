"""How far rounding grows on its way through a compiled graph, and by which ops."""

from __future__ import annotations

import sys
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

from hashbench.core.inductor.graphs import CompiledGraph, KernelCall
from hashbench.core.inductor.nodes import NodeFacts, facts_of
from hashbench.core.run.distance import relative, unit_roundoff
from hashbench.extensions.compiled.evaluate import (
    Evaluator,
    NotEvaluated,
    Operands,
    Precision,
    recorded_inputs,
    subgraph_of,
)

SHOWN = 5


@dataclass(frozen=True, slots=True)
class Amplified:
    """A buffer whose relative error is larger than those of what it is computed from.

    Attributes:
        kernel: that wrote it.
        facts: op, module and source of its node.
        error: largest error over the largest magnitude, in unit roundoffs of its dtype, against the whole graph in
            float64.
        factor: by how much the largest error of what it is computed from has grown in it; of inputs of the graph, 1
            unit roundoff counts.
    """

    kernel: str
    facts: NodeFacts
    error: float
    factor: float


class Amplification:
    """Observer that compares every buffer with its node, evaluated in float64 from the inputs of the graph's call.

    Args:
        eager: compare what eager mode computes for the node in its own dtype, instead of the buffer.
    """

    def __init__(self, *, eager: bool = False) -> None:
        self._eager = eager
        self._found: list[Amplified] = []

    def observe(self, graph: CompiledGraph, inputs: Sequence[Any]) -> Generator[None, KernelCall, None]:
        """Compare the buffers of one call of a graph."""
        recorded, operands = recorded_inputs(graph.module, inputs), Operands(graph.module.graph)
        values, errors = Evaluator(graph.module, recorded, operands), dict.fromkeys(recorded, 1.0)
        while True:
            call = yield
            for write in call.writes:
                node = graph.nodes.get(write.buffer)
                if node is None or write.buffer not in call.last or not write.tensor.is_floating_point():
                    continue
                try:
                    subgraph = subgraph_of(node, recorded, operands)
                    value = values.value(subgraph) if self._eager else write.tensor
                    exact = values.value(subgraph, Precision.FLOAT64)
                except NotEvaluated:
                    continue
                if exact.numel() != value.numel() or not value.numel():
                    continue
                error = relative(value, exact.reshape(value.shape)) / unit_roundoff(value.dtype)
                error = min(error, sys.float_info.max)
                before = max([1.0, *(errors[each] for each in subgraph_of(node, errors, operands).inputs)])
                errors[node] = error
                self._found.append(Amplified(call.kernel, facts_of(node), error, error / before))

    def result(self) -> tuple[Amplified, ...]:
        """Return the buffers in which errors grew most, the largest factor first."""
        return tuple(sorted(self._found, key=lambda each: -each.factor)[:SHOWN])
