"""Tell a wrong lowering from wrong generated code, for one buffer: its IR is evaluated by torch."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hashbench.core.inductor.graphs import BufferWrite, CompiledGraph, KernelCall
from hashbench.core.inductor.nodes import NodeFacts, facts_of
from hashbench.core.run.distance import unit_roundoff, wide
from hashbench.core.run.rounding import LIMIT
from hashbench.extensions.compiled import lowered
from hashbench.extensions.compiled.evaluate import (
    Evaluator,
    NotEvaluated,
    Operands,
    Precision,
    recorded_inputs,
    subgraph_of,
)


@dataclass(frozen=True, slots=True, eq=False)
class ExpectedBuffer:
    """What a buffer should hold.

    Attributes:
        reference: its value, evaluated in float64 from recorded values.
        allowed: error that rounding explains for each element, in float64.
    """

    reference: torch.Tensor = field(repr=False)
    allowed: torch.Tensor = field(repr=False)


class StageSplit:
    """Observer of one buffer of one call.

    Args:
        node: id of the call's record.
        buffer: name of the buffer.

    Attributes:
        stage: ``lowering`` or ``codegen``; empty if it cannot be told.
        ops: of the program, that the buffer is computed by from recorded values, the last first, each once.
        expected: what the buffer should hold; ``None`` if that is not known.
    """

    def __init__(self, node: str, buffer: str) -> None:
        self.stage = ""
        self.ops: tuple[NodeFacts, ...] = ()
        self.expected: ExpectedBuffer | None = None
        self._node, self._buffer = node, buffer

    def observe(self, graph: CompiledGraph, inputs: Sequence[Any]) -> Generator[None, KernelCall, None]:
        """Decide at the call, from what was left by those before it."""
        recorded = recorded_inputs(graph.module, inputs)
        contents = {node.name: value for node, value in recorded.items() if isinstance(value, torch.Tensor)}
        while True:
            call = yield
            for write in call.writes:
                if call.node == self._node and write.buffer == self._buffer:
                    self._decide(graph, write, recorded, contents)
            for write in call.writes:
                if write.buffer:
                    contents[write.buffer] = write.tensor.detach().clone()
                    node = graph.nodes.get(write.buffer)
                    if node is not None and write.buffer in call.last:
                        recorded[node] = contents[write.buffer]

    def _decide(
        self,
        graph: CompiledGraph,
        write: BufferWrite,
        recorded: Mapping[torch.fx.Node, Any],
        contents: Mapping[str, torch.Tensor],
    ) -> None:
        node, ir = graph.nodes.get(write.buffer), graph.buffers.get(write.buffer)
        if node is None or ir is None:
            return
        operands = Operands(graph.module.graph)
        try:
            subgraph = subgraph_of(node, recorded, operands)
            self.ops = tuple({facts.op: facts for facts in map(facts_of, subgraph.ops)}.values())[::-1]
            values = Evaluator(graph.module, recorded, operands)
            exact, own = (values.value(subgraph, precision) for precision in (Precision.FLOAT64, Precision.OWN))
        except NotEvaluated:
            return
        if not exact.numel() == own.numel() == write.tensor.numel():
            return
        shape = write.tensor.shape
        exact, own = exact.reshape(shape), own.reshape(shape)
        self.expected = ExpectedBuffer(exact, _explained(exact, own, write.tensor.dtype))
        try:
            made, narrow = (
                lowered.evaluate(ir, contents, graph=graph.lowering, float64=float64).reshape(shape)
                for float64 in (True, False)
            )
        except lowered.NotComputed:
            return
        # A formula of the IR that is less exact is no mistake; what the IR itself loses in its own dtype is allowed.
        allowed = LIMIT * self.expected.allowed + (made.double() - narrow.double()).abs().nan_to_num()
        self.stage = lowered.stage_of(exact, made, write.tensor, allowed)


def _explained(exact: torch.Tensor, own: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the error that rounding explains for each element, in float64; 0 for integers and bools."""
    if not (exact.is_floating_point() or exact.is_complex()):
        return torch.zeros(exact.shape, dtype=torch.float64)
    lost = torch.maximum((wide(own) - exact).abs(), unit_roundoff(dtype) * exact.abs()).nan_to_num()
    return lost + lost.square().mean().sqrt()
