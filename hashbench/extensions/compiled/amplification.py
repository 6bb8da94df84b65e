"""How far rounding grows on its way through a compiled graph, and by which ops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hashbench.core.inductor.graphs import CompiledGraph, KernelCall
from hashbench.core.inductor.nodes import NodeFacts, facts_of
from hashbench.core.trace.digest import untraced
from hashbench.extensions.compiled.evaluate import (
    Evaluator,
    NotEvaluated,
    Operands,
    Precision,
    recorded_inputs,
    subgraph_of,
    unit_roundoff,
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


class AmplificationJudge:
    """Compare every buffer with the same node of the whole graph in float64, evaluated from the inputs of its call.

    Args:
        eager: compare what eager mode computes for the node in its own dtype, instead of the buffer.
    """

    def __init__(self, *, eager: bool = False) -> None:
        self._eager = eager
        self._found: list[Amplified] = []
        self._graph: CompiledGraph | None = None

    def begin(self, graph: CompiledGraph, inputs: Sequence[Any]) -> None:
        self._graph, self._operands = graph, Operands(graph.module.graph)
        self._recorded = recorded_inputs(graph.module, inputs)
        self._errors: dict[torch.fx.Node, float] = {}
        self._exact, self._own = (
            Evaluator(graph.module, self._recorded, self._operands, precision=precision)
            for precision in (Precision.FLOAT64, Precision.OWN)
        )

    def called(self, call: KernelCall) -> None:
        graph = self._graph
        if graph is None:
            return
        for write in call.writes:
            node = graph.nodes.get(write.buffer)
            if node is None or write.buffer not in call.last or not write.tensor.is_floating_point():
                continue
            with untraced():
                error = self._error(node, write.tensor)
            if error is None:
                continue
            between = subgraph_of(node, {**self._recorded, **dict.fromkeys(self._errors)}, self._operands)
            before = max([1.0, *(self._errors.get(one, 1.0) for one in between.inputs)])
            self._errors[node] = error
            self._found.append(Amplified(call.kernel, facts_of(node), error, error / before))

    def end(self) -> None:
        self._graph = None
        self._recorded, self._errors = {}, {}
        del self._exact, self._own

    def result(self) -> tuple[Amplified, ...]:
        """Return the buffers in which errors grew most, the largest factor first."""
        return tuple(sorted(self._found, key=lambda one: -one.factor)[:SHOWN])

    def _error(self, node: torch.fx.Node, value: torch.Tensor) -> float | None:
        try:
            subgraph = subgraph_of(node, self._recorded, self._operands)
            exact = self._exact.value(subgraph)
            value = self._own.value(subgraph) if self._eager else value
        except NotEvaluated:
            return None
        if not isinstance(exact, torch.Tensor) or exact.numel() != value.numel() or not value.numel():
            return None
        exact = exact.reshape(value.shape) if exact.shape != value.shape else exact
        largest = float(exact.abs().nan_to_num().max())
        apart = float((value.double() - exact).abs().nan_to_num().max())
        return apart / largest / unit_roundoff(value.dtype) if largest else 0.0
