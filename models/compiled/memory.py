"""Specimens whose buffers share memory that they must not share."""

from __future__ import annotations

from typing import Any

import torch
from _planted import Patches, plant_if
from torch import nn
from torch.nn import functional

Example = tuple[nn.Module, tuple[torch.Tensor, ...]]


def reuse_of_live_buffer(patches: Patches) -> None:
    """Let one buffer of a graph take the memory of another that is read later, and not by the one that fills it."""
    from torch._inductor import config
    from torch._inductor.codegen.wrapper import AllocateLine, ReuseLine, buffer_reuse_key
    from torch._inductor.virtualized import V

    right = AllocateLine.plan

    def names_read(nodes: list[Any]) -> set[str]:
        return {dependency.name for node in nodes for dependency in node.read_writes.reads}

    def wrong(self: Any, state: Any) -> Any:
        allocated = vars(state).setdefault("planted_allocated", [])
        nodes, here = V.graph.scheduler.nodes, self.scheduler_node_index
        needed = names_read(nodes[here + 1 :]) - names_read(nodes[here : here + 1])
        for other in allocated:
            fits = config.allow_buffer_reuse and buffer_reuse_key(other.node) == buffer_reuse_key(self.node)
            if fits and other.node.get_name() in needed and not hasattr(state, "planted_reuse"):
                state.planted_reuse = True
                return ReuseLine(self.wrapper, other.node, self.node, delete_old=False)
        line = right(self, state)
        if line is self:
            allocated.append(self)
        return line

    patches.attribute(AllocateLine, "plan", wrong)


def early_inplace(patches: Patches) -> None:
    """Let a kernel write over what it reads, though others read that later."""
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen, ReuseLine
    from torch._inductor.scheduler import SchedulerNode

    decide, reuse = SchedulerNode.decide_inplace_update, PythonWrapperCodegen.codegen_inplace_reuse

    def alone(self: Any) -> None:
        buffers = [self.scheduler.name_to_buf.get(read.name) for read in self.read_writes.reads]
        users = {buffer: buffer.users for buffer in buffers if buffer is not None}
        for buffer, its in users.items():
            buffer.users = [user for user in its if user.node is self] or its
        try:
            decide(self)
        finally:
            for buffer, its in users.items():
                buffer.users = its

    def keep_name(self: Any, old: Any, new: Any) -> None:
        reuse(self, old, new)
        line = self.lines[-1]
        assert isinstance(line, ReuseLine)
        line.delete_old = False  # later readers know it by its old name

    patches.attribute(SchedulerNode, "decide_inplace_update", alone)
    patches.attribute(PythonWrapperCodegen, "codegen_inplace_reuse", keep_name)


class Hourglass(nn.Module):
    """Squeeze features, gate them, and add what was squeezed."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.embed = nn.Linear(features, features)
        self.squeeze = nn.Linear(features, features // 2)
        self.mix = nn.Linear(features, features // 4)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(rows)
        gate = torch.sigmoid(self.squeeze(functional.gelu(hidden)).repeat(1, 2))
        return self.mix(gate) + hidden.unflatten(1, (4, -1)).amax(1)


class Shortcut(nn.Module):
    """A linear layer behind ``gelu``, beside a shortcut."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.embed = nn.Linear(features, features)
        self.mix = nn.Linear(features, features)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(rows)
        return torch.tanh(self.mix(functional.gelu(hidden)) + hidden)


def live_buffer_reused(*, wrong: bool) -> Example:
    plant_if(wrong, reuse_of_live_buffer)
    return Hourglass(64), (torch.randn(16, 64),)


def early_update(*, wrong: bool) -> Example:
    plant_if(wrong, early_inplace)
    return Shortcut(24), (torch.randn(16, 24),)


MODELS = {
    "live_buffer_reused": lambda: live_buffer_reused(wrong=True),
    "live_buffer_reused_twin": lambda: live_buffer_reused(wrong=False),
    "early_update": lambda: early_update(wrong=True),
    "early_update_twin": lambda: early_update(wrong=False),
}
