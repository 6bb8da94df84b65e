"""Find out who wrote over a buffer: what a kernel reads under a name is what was written under it, or it is lost.

Memory that goes by two names on purpose (a view that is written through) looks the same, so that this is asked only of
a kernel that is wrong, and right if memory is not reused.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

from hashbench.core.inductor.graphs import BufferRead, CompiledGraph, KernelCall
from hashbench.core.inductor.nodes import NodeFacts, common, facts_of
from hashbench.extensions.compiled.memory import Access, left_by, overwriter


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


@dataclass(slots=True)
class OverwriterSearch:
    """Observer of what one call reads.

    Attributes:
        node: id of the call's record.
        found: who wrote over what it reads; ``None`` if nobody did.
    """

    node: str
    found: Overwriter | None = None

    def observe(self, graph: CompiledGraph, inputs: Sequence[Any]) -> Generator[None, KernelCall, None]:  # noqa: ARG002
        """Look for it among the calls of one graph."""
        accesses: list[Access] = []
        while True:
            call = yield
            if call.node == self.node:
                self.found = next(filter(None, (_overwriter(graph, read, accesses) for read in call.reads)), self.found)
            accesses.append(Access.of(call, len(accesses)))


def _overwriter(graph: CompiledGraph, read: BufferRead, accesses: Sequence[Access]) -> Overwriter | None:
    """Return who of ``accesses`` wrote over what the last writer of a name had left under it."""
    written = [left for access in accesses for left in access.writes if read.buffer and left.name == read.buffer]
    if not written or written[-1].digest == read.digest:
        return None
    guilty = overwriter(written[-1], accesses)
    if guilty is None:
        return None
    facts = common(facts_of(graph.nodes[left.name]) for left in guilty.writes if left.name in graph.nodes)
    return Overwriter(guilty.kernel, guilty.node, read.buffer, left_by(written[-1], accesses), facts)
