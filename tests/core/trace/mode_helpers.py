"""Queries of traces and small models, shared by the tests of tracing."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hashbench import HashDebugTrace
from hashbench.core.records import OpRecord, Trace
from hashbench.core.trace import file
from hashbench.core.trace.digest import digest


def ops(trace: HashDebugTrace | Trace) -> list[str]:
    """The names of all recorded ops, without namespace and overload."""
    found = trace.finish() if isinstance(trace, HashDebugTrace) else trace
    return [record.op.split(".")[1] for record in found.records]


def record(trace: HashDebugTrace, op: str, nth: int = 0) -> OpRecord:
    """The nth record of an op."""
    return [r for r in trace.finish().records if r.op.split(".")[1] == op][nth]


def value(tensor: torch.Tensor) -> str:
    return digest(tensor).value


def trained(trace: HashDebugTrace, steps: int, *, optimizers: int = 1, explicit: bool = False) -> Trace:
    models = [nn.Linear(2, 2) for _ in range(optimizers)]
    made = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    with trace:
        for _ in range(steps):
            for model, optimizer in zip(models, made, strict=True):
                optimizer.zero_grad()
                model(torch.ones(3, 2)).sum().backward()
                optimizer.step()
            if explicit:
                trace.step()
        torch.ones(1)
    return trace.finish()


def iterations(trace: Trace, op: str) -> list[int | None]:
    return [record.iteration for record in trace.records if record.op == op]


class Nested(torch.autograd.Function):
    """A custom function whose backward may run another. Beyond 60 of them autograd goes on in a thread of its own."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, depth: int) -> torch.Tensor:
        ctx.depth = depth
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.depth:
            with torch.enable_grad():
                Nested.apply(torch.ones(2, requires_grad=True), ctx.depth - 1).sum().backward()
        return gradient.clone(), None


def text_of(model: nn.Module, x: torch.Tensor) -> list[str]:
    torch.manual_seed(0)
    model.zero_grad()
    with HashDebugTrace(model=model, inputs=(x,)) as trace:
        y = model(x)
        y.sum().backward()
    trace.add_result("output", y)
    return file.dumps(trace.finish()).splitlines()


def values(found: OpRecord) -> list[str]:
    return [output.value for output in found.outputs]


def written(trace: HashDebugTrace) -> list[str]:
    """The digests of all that the ops of a trace wrote."""
    return [value for record in trace.finish().records for value in values(record)]


class Dropping(nn.Sequential):
    """A small network with a dropout."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.GELU(), nn.Linear(8, 2))


class Attending(nn.Module):
    """A small transformer layer over tokens, with an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.embed((x * 9).long().abs() % 10))


def train(kind: type[nn.Module], steps: int = 2, **options: Any) -> list[torch.Tensor]:
    """What two steps of training leave, from a fixed seed."""
    torch.manual_seed(3)
    model = kind()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, **options)
    for _ in range(steps):
        optimizer.zero_grad()
        out = model(torch.rand(5, 6))
        out.square().mean().backward()
        optimizer.step()
    state = [entry for parameter in optimizer.state.values() for entry in parameter.values()]
    return [out.detach(), *model.parameters(), *model.buffers(), *state, torch.get_rng_state()]
