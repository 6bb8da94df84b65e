"""Tell a wrong lowering from wrong generated code, for one buffer: its IR is evaluated by torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hashbench.core.inductor.graphs import BufferWrite, CompiledGraph, KernelCall
from hashbench.core.inductor.nodes import NodeFacts, facts_of
from hashbench.core.trace.digest import untraced
from hashbench.extensions.compiled import lowered
from hashbench.extensions.compiled.evaluate import (
    Evaluator,
    NotEvaluated,
    Operands,
    Precision,
    recorded_inputs,
    subgraph_of,
    unit_roundoff,
)
from hashbench.extensions.compiled.rounding import LIMIT


@dataclass(frozen=True, slots=True, eq=False)
class ExpectedBuffer:
    """What a buffer should hold.

    Attributes:
        reference: its value, evaluated in float64 from recorded values.
        allowed: error that rounding explains for each element, in float64.
    """

    reference: torch.Tensor = field(repr=False)
    allowed: torch.Tensor = field(repr=False)


class SplitJudge:
    """Judge of one buffer of one call.

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
        self._graph: CompiledGraph | None = None
        self._values: dict[str, torch.Tensor] = {}
        self._recorded: dict[torch.fx.Node, Any] = {}

    def begin(self, graph: CompiledGraph, inputs: Sequence[Any]) -> None:
        self._graph = graph
        self._recorded = recorded_inputs(graph.module, inputs)
        self._values = {node.name: value for node, value in self._recorded.items() if isinstance(value, torch.Tensor)}

    def called(self, call: KernelCall) -> None:
        graph = self._graph
        if graph is None:
            return
        with untraced():
            if call.node == self._node:
                for write in call.writes:
                    if write.buffer == self._buffer:
                        self._decide(graph, write)
            for write in call.writes:
                if write.buffer:
                    self._values[write.buffer] = write.tensor.detach().clone()
                    node = graph.nodes.get(write.buffer)
                    if node is not None and write.buffer in call.last:
                        self._recorded[node] = self._values[write.buffer]

    def end(self) -> None:
        self._graph, self._values, self._recorded = None, {}, {}

    def _decide(self, graph: CompiledGraph, write: BufferWrite) -> None:
        node, ir = graph.nodes.get(write.buffer), graph.buffers.get(write.buffer)
        if node is None or ir is None:
            return
        operands = Operands(graph.module.graph)
        try:
            subgraph = subgraph_of(node, self._recorded, operands)
            self.ops = tuple({facts.op: facts for facts in map(facts_of, subgraph.ops)}.values())[::-1]
            exact, own = (
                Evaluator(graph.module, self._recorded, operands, precision=precision).value(subgraph)
                for precision in (Precision.FLOAT64, Precision.OWN)
            )
        except NotEvaluated:
            return
        if not all(isinstance(each, torch.Tensor) and each.numel() == write.tensor.numel() for each in (exact, own)):
            return
        shape = write.tensor.shape
        exact, own = exact.reshape(shape), own.reshape(shape)
        self.expected = ExpectedBuffer(exact, _explained(exact, own, write.tensor.dtype))
        try:
            made, narrow = (
                lowered.evaluate(ir, self._values, graph=graph.lowering, float64=wide).reshape(shape)
                for wide in (True, False)
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
    wide = torch.complex128 if exact.is_complex() else torch.float64
    lost = torch.maximum((own.to(wide) - exact).abs(), unit_roundoff(dtype) * exact.abs()).nan_to_num()
    return lost + lost.square().mean().sqrt()
