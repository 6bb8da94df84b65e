"""Find out who wrote over a buffer: what a kernel reads under a name is what was written under it, or it is lost.

Memory that goes by two names on purpose (a view that is written through) looks the same, so that this is asked only of
a kernel that is wrong, and right if memory is not reused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hashbench.core.inductor.graphs import CompiledGraph, KernelCall
from hashbench.core.inductor.nodes import NodeFacts, common, facts_of
from hashbench.extensions.compiled.memory import overlap


@dataclass(frozen=True, slots=True)
class Overwriter:
    """A call that wrote over a buffer.

    Attributes:
        kernel: its kernel.
        node: id of its record.
        buffer: what was lost.
        written_by: kernel that had written it.
        facts: what the guilty call computes.
    """

    kernel: str
    node: str
    buffer: str
    written_by: str
    facts: NodeFacts


class NamesJudge:
    """Judge of what one call reads.

    Args:
        node: id of the call's record.

    Attributes:
        found: who wrote over what it reads; ``None`` if nobody did.
    """

    def __init__(self, node: str) -> None:
        self.found: Overwriter | None = None
        self._node = node
        self._graph: CompiledGraph | None = None
        self._calls: list[KernelCall] = []

    def begin(self, graph: CompiledGraph, inputs: Sequence[Any]) -> None:  # noqa: ARG002
        self._graph, self._calls = graph, []

    def called(self, call: KernelCall) -> None:
        if call.node == self._node:
            self._decide(call)
        self._calls.append(call)

    def end(self) -> None:
        self._graph, self._calls = None, []

    def _decide(self, call: KernelCall) -> None:
        for read in call.reads:
            written = [
                (position, write)
                for position, one in enumerate(self._calls)
                for write in one.writes
                if read.buffer and write.buffer == read.buffer
            ]
            if not written or written[-1][1].digest == read.digest:
                continue
            position, lost = written[-1]
            later = self._calls[position + 1 :]
            guilty = [one for one in later if any(overlap(lost, write) for write in one.writes)]
            if guilty:
                facts = self._facts(guilty[-1])
                writer = self._calls[position].kernel
                self.found = Overwriter(guilty[-1].kernel, guilty[-1].node, read.buffer, writer, facts)
                return

    def _facts(self, call: KernelCall) -> NodeFacts:
        nodes = {} if self._graph is None else self._graph.nodes
        return common(facts_of(nodes[write.buffer]) for write in call.writes if write.buffer in nodes)
