"""Judge the kernels of compiled graphs, each alone: its buffers against the nodes that they hold, evaluated from what
other kernels left.

The rule of blame:

* A buffer is judged after its last writer in the call of the graph; what is written before (zeros that are added to)
  is no node's value.
* Its error counts in units of what rounding explains (:mod:`hashbench.core.run.rounding`).
* Beyond :data:`~hashbench.core.run.rounding.LIMIT`, its kernel is blamed, unless it did not read what had
  been left for it (by digest) and another call has since written over that memory: then that call is
  (:class:`LostInput`). :mod:`hashbench.extensions.compiled.memory` decides it.
* What a graph returns must at its end still be what its last writer left.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from hashbench.core.inductor.graphs import BufferWrite, CompiledGraph, KernelCall, phase_of
from hashbench.core.inductor.nodes import facts_of
from hashbench.core.run.rounding import LIMIT, References, measure
from hashbench.core.trace.digest import digest
from hashbench.extensions.compiled.evaluate import (
    Evaluator,
    NotEvaluated,
    NoValueReason,
    Operands,
    Precision,
    Subgraph,
    subgraph_of,
)
from hashbench.extensions.compiled.memory import (
    RETURN,
    Access,
    LeftContent,
    LostInput,
    behind,
    left_by,
    lost_inputs,
    overwriter,
)


@dataclass(frozen=True, slots=True)
class JudgedBuffer:
    """A buffer that was compared with its node.

    Attributes:
        node: id of the record of the call that wrote it last.
        kernel: name of that call's kernel or op.
        buffer: name in the generated module.
        op: aten op of the user's program that it is the value of (``aten.gelu.default``).
        module: path of the module.
        source: ``file:line code``.
        phase: ``forward`` or ``backward``.
        ratio: error in units of what rounding explains, see
            :class:`~hashbench.core.run.rounding.MeasuredError`.
        own_ratio: the same of eager mode's own result; None if not needed.
        relative_error: largest error over the largest magnitude.
        nodes: number of FX nodes between recorded values and it.
        behind: kernels whose results have no node and were read: a mistake may be theirs.
        lost: what the kernel should have read had been written over: it is not to blame.
    """

    node: str
    kernel: str
    buffer: str
    op: str
    module: str
    source: str
    phase: str
    ratio: float
    own_ratio: float | None = None
    relative_error: float = 0.0
    nodes: int = 1
    behind: tuple[str, ...] = ()
    lost: bool = False


@dataclass(frozen=True, slots=True)
class KernelJudgement:
    """What was found out about the kernels of one step, in the order of their calls.

    Attributes:
        buffers: those with a reference.
        lost: values that were written over before they were read.
        unchecked: number of written buffers without a reference, by reason.
        kernels: number of calls.
        refused: why kernels did not run, by their names.
    """

    buffers: tuple[JudgedBuffer, ...] = ()
    lost: tuple[LostInput, ...] = ()
    unchecked: Mapping[str, int] = field(default_factory=Counter)
    kernels: int = 0
    refused: Mapping[str, str] = field(default_factory=dict)

    @property
    def checked(self) -> float:
        """Share of written buffers that were judged, 0 ... 1; 0 if nothing was written."""
        written = len(self.buffers) + sum(self.unchecked.values())
        return len(self.buffers) / written if written else 0.0

    @property
    def largest(self) -> JudgedBuffer | None:
        """The buffer with the largest ratio; None if none was judged."""
        return max(self.buffers, key=lambda buffer: buffer.ratio, default=None)

    def first_beyond(self, limit: float = LIMIT) -> JudgedBuffer | None:
        """Return the first buffer beyond ``limit`` whose kernel read what it should have; None if there is none."""
        return next((buffer for buffer in self.buffers if buffer.ratio > limit and not buffer.lost), None)


def content_digest(tensor: torch.Tensor) -> str:
    """Return the digest of a tensor's content, as records have it."""
    return digest(tensor).value


class KernelJudge:
    """Judge the calls of compiled graphs during one step, as they come; an
    :class:`~hashbench.extensions.compiled.observed.GraphObserver`."""

    def __init__(self) -> None:
        self._plan = functools.cache(_GraphPlan)
        self._buffers: list[JudgedBuffer] = []
        self._lost: list[LostInput] = []
        self._unchecked: Counter[str] = Counter()
        self._kernels = 0
        self._refused: dict[str, str] = {}

    def observe(self, graph: CompiledGraph, inputs: Sequence[Any]) -> Generator[None, KernelCall, None]:
        """Judge the calls of one graph. Inputs that it uses are copied: a kernel may write over them."""
        running = _GraphCall(self._plan(graph), inputs)
        try:
            while True:
                call = yield
                running.called(call)
                self._kernels += 1
                self._refused |= {call.kernel: call.refused} if call.refused else {}
        finally:
            running.end()
            self._buffers += running.buffers
            self._lost += running.lost
            self._unchecked += running.unchecked

    def result(self) -> KernelJudgement:
        """Return what was found out about all calls that have ended."""
        return KernelJudgement(
            tuple(self._buffers), tuple(self._lost), Counter(self._unchecked), self._kernels, dict(self._refused)
        )


class _GraphPlan:
    """What a graph alone says: nodes of buffers, operands, and which nodes each of them is evaluated from."""

    def __init__(self, graph: CompiledGraph) -> None:
        self.graph = graph
        self.operands = Operands(graph.module.graph)
        self.placeholders = graph.module.graph.find_nodes(op="placeholder")
        self.nodes = {
            **{name: op for node, op in self.operands.written.items() for name in (node.name, str(node.target))},
            **graph.nodes,
        }
        self.needs: dict[torch.fx.Node, tuple[torch.fx.Node, ...]] = {}
        ends = {*self.nodes.values(), *self.placeholders}
        for node in dict.fromkeys(self.nodes.values()):
            try:
                self.needs[node] = subgraph_of(node, ends, self.operands).inputs
            except NotEvaluated:
                self.needs[node] = ()
        self.readers = Counter(item for inputs in self.needs.values() for item in inputs)
        results = graph.module.graph.output_node().all_input_nodes
        self.returned = {self.operands.storage.get(node, node) for node in results}


class _GraphCall:
    """One call of a graph: what is recorded, and what was found out."""

    def __init__(self, plan: _GraphPlan, inputs: Sequence[Any]) -> None:
        self.buffers: list[JudgedBuffer] = []
        self.lost: list[LostInput] = []
        self.unchecked: Counter[str] = Counter()
        self._plan = plan
        self._readers = Counter(plan.readers)
        self._settled: set[torch.fx.Node] = set()
        self._recorded: dict[torch.fx.Node, Any] = {}
        self._left: dict[torch.fx.Node, LeftContent] = {}
        self._accesses: list[Access] = []
        self._returned: dict[torch.fx.Node, tuple[torch.Tensor, LeftContent]] = {}
        for node, value in zip(plan.placeholders, inputs, strict=False):
            if not isinstance(value, torch.Tensor):
                self._recorded[node] = value
            elif self._readers[node]:
                self._recorded[node] = value.detach().clone()
                if value.layout is torch.strided:
                    self._left[node] = LeftContent(node.name, "", -1, value.data_ptr(), value.nbytes)

    def called(self, call: KernelCall) -> None:
        """Judge what a call wrote last, then take it as recorded. Its tensors are read now; what later nodes need is
        copied."""
        values = Evaluator(self._plan.graph.module, self._recorded, self._plan.operands)
        shapes: dict[torch.fx.Node, Sequence[int]] = {}
        known: list[tuple[BufferWrite, torch.fx.Node]] = []
        for write in call.writes:
            if write.buffer and write.buffer not in call.last:
                continue
            node = self._plan.nodes.get(write.buffer)
            try:
                self.buffers.append(self._judged(call, write, node, values, shapes))
            except NotEvaluated as answer:
                self.unchecked[str(answer.reason)] += 1
            except RuntimeError:  # torch lacks a comparison for a dtype, or memory: never the end of the user's step
                self.unchecked[str(NoValueReason.RAISED)] += 1
            if node is not None:
                known.append((write, node))
        recorded = frozenset([write.buffer for write, node in known if self._record(write, node, shapes)])
        self._accesses.append(Access.of(call, len(self._accesses), recorded))

    def _judged(
        self,
        call: KernelCall,
        write: BufferWrite,
        node: torch.fx.Node | None,
        values: Evaluator,
        shapes: dict[torch.fx.Node, Sequence[int]],
    ) -> JudgedBuffer:
        if call.refused:
            raise NotEvaluated(NoValueReason.NOT_RUN, call.refused)
        if node is None:
            raise NotEvaluated(NoValueReason.NO_ORIGIN, write.buffer)
        subgraph = subgraph_of(node, self._recorded, self._plan.operands)
        own = values.value(subgraph)
        shapes[node] = own.shape
        evaluate = functools.partial(functools.partial, values.value, subgraph)
        references = References(own, evaluate(Precision.FLOAT64), evaluate(Precision.ROUNDED))
        measured = measure(fitted(write.tensor, own.shape), references)
        facts = facts_of(node)
        lost, through = self._blame(call, subgraph) if measured.ratio > LIMIT else (False, ())
        return JudgedBuffer(
            node=call.node,
            kernel=call.kernel,
            buffer=write.buffer,
            op=facts.op,
            module=facts.module,
            source=facts.source,
            phase=phase_of(self._plan.graph.backward),
            ratio=measured.ratio,
            own_ratio=measured.own,
            relative_error=measured.relative,
            nodes=len(subgraph.ops),
            behind=through,
            lost=lost,
        )

    def _blame(self, call: KernelCall, subgraph: Subgraph) -> tuple[bool, tuple[str, ...]]:
        """Return whether an input of a wrong result was lost, and the kernels between recorded values and it."""
        for node in subgraph.inputs:
            left = self._left.get(node)
            if left is not None and not left.digest:
                self._left[node] = replace(left, digest=content_digest(self._recorded[node]))
        needed = [self._left[node] for node in subgraph.inputs if node in self._left]
        lost = lost_inputs(call.kernel, call.reads, needed, self._accesses)
        self.lost += [item for item in lost if item not in self.lost]
        return bool(lost), tuple(self._accesses[item].kernel for item in behind(call.reads, self._accesses))

    def _record(self, write: BufferWrite, node: torch.fx.Node, shapes: Mapping[torch.fx.Node, Sequence[int]]) -> bool:
        """Keep what a node's buffer holds if other nodes are evaluated from it, and what is to be returned.

        ``shapes``: of evaluated nodes; others have that with which they were traced.
        """
        left = LeftContent(write.buffer, write.digest, len(self._accesses), write.address, write.nbytes)
        root = self._plan.operands.storage.get(node, node)
        if root in self._plan.returned:
            self._returned[root] = write.tensor, left
        if not self._readers[node]:
            self._settle(node)
            return False
        meta = node.meta.get("val")
        shape = shapes.get(node, meta.shape if isinstance(meta, torch.Tensor) else None)
        if shape is None or not all(type(size) is int for size in shape):
            return False
        try:
            self._recorded[node] = fitted(write.tensor, shape).clone()
        except NotEvaluated:
            return False
        self._left[node] = left
        self._settle(node)
        return True

    def _settle(self, node: torch.fx.Node) -> None:
        """Drop the values that only this node was to be evaluated from."""
        if node in self._settled:
            return
        self._settled.add(node)
        for item in self._plan.needs[node]:
            self._readers[item] -= 1
            if not self._readers[item] and item is not node:
                self._recorded.pop(item, None)

    def end(self) -> None:
        """Compare what is returned with what its last writers left."""
        for tensor, left in self._returned.values():
            guilty = overwriter(left, self._accesses)
            if guilty is not None and left.digest and content_digest(tensor) != left.digest:
                writer = left_by(left, self._accesses)
                self.lost.append(LostInput(RETURN, left.name, writer, guilty.kernel, guilty.node))


def fitted(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Return what a buffer holds in the shape of its node, which a view may have changed: elements in logical order.

    Raises:
        NotEvaluated: it has another number of elements, or it has no strides.
    """
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise NotEvaluated(NoValueReason.LAYOUT, str(tensor.layout))
    if tuple(tensor.shape) == tuple(shape):
        return tensor
    if tensor.numel() != math.prod(shape) or not tensor.is_contiguous():
        raise NotEvaluated(NoValueReason.SHAPE, f"{tuple(tensor.shape)} for {tuple(shape)}")
    return tensor.reshape(*shape)
