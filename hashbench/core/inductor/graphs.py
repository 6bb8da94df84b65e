"""Frozen records of what the compiler made and ran: graphs, passes, and the calls of generated modules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True, slots=True, eq=False)
class GraphPass:
    """A pass that changed a graph.

    Attributes:
        name: as ``GraphTransformObserver`` has it.
        subsystem: ``joint_graph_passes`` or ``post_grad_passes``; the stage that the pass belongs to.
        before: copy of the graph before it.
        after: copy of the graph after it.
    """

    name: str
    subsystem: str
    before: torch.fx.GraphModule = field(repr=False)
    after: torch.fx.GraphModule = field(repr=False)


@dataclass(frozen=True, slots=True, eq=False)
class CompiledGraph:
    """A graph that Inductor compiled.

    Attributes:
        path: file of the generated module.
        module: the graph after all passes, whose placeholders are the inputs of a call in order.
        nodes: the node whose value each buffer holds after its last writer, by buffer name.
        buffers: Inductor's IR of each buffer (``torch._inductor.ir.Buffer``), by name.
        backward: the graph of a backward pass.
        passes: the passes that changed it, in order.
        lowering: Inductor's ``GraphLowering`` of it.
    """

    path: str
    module: torch.fx.GraphModule = field(repr=False)
    nodes: Mapping[str, torch.fx.Node] = field(repr=False)
    buffers: Mapping[str, Any] = field(default_factory=dict, repr=False)
    backward: bool = False
    passes: tuple[GraphPass, ...] = field(default=(), repr=False)
    lowering: Any = field(default=None, repr=False)


def phase_of(backward: bool) -> str:
    """Return the phase of a graph, as rows have it."""
    return "backward" if backward else "forward"


@dataclass(frozen=True, slots=True)
class BufferRead:
    """A tensor that a kernel read.

    Attributes:
        buffer: name in the generated module; empty if unknown.
        digest: of its content just before the call.
        address: of its first byte.
        nbytes: of its content.
    """

    buffer: str
    digest: str
    address: int = 0
    nbytes: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class BufferWrite:
    """A tensor that a kernel wrote.

    Attributes:
        buffer: as in :class:`BufferRead`.
        tensor: what it holds just after the call; later kernels may overwrite its memory.
        digest: of its content just after the call.
        address: of its first byte.
        nbytes: of its content.
    """

    buffer: str
    tensor: torch.Tensor = field(repr=False)
    digest: str = ""
    address: int = 0
    nbytes: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class KernelCall:
    """A call of a generated kernel, or of an op by a generated module.

    Attributes:
        node: id of its record.
        kernel: name of the generated kernel or of the op.
        generated: it is a generated kernel.
        reads: memory that nobody wrote is not among them.
        writes: in the order of its arguments.
        last: names of the buffers that no later call of this graph writes.
        launch: configuration of a Triton kernel; empty for anything else.
        refused: why it did not run, and ATen computed what it was to write; empty if it ran.
    """

    node: str
    kernel: str
    generated: bool = True
    reads: tuple[BufferRead, ...] = ()
    writes: tuple[BufferWrite, ...] = ()
    last: frozenset[str] = frozenset()
    launch: str = ""
    refused: str = ""
