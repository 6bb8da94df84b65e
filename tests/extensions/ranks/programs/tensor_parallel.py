"""Layers split over ranks: by DTensor, by functional collectives, experts by ``all_to_all``."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from tests.extensions.ranks.programs.base import (
    HIDDEN,
    NARROW,
    WIDE,
    Program,
    Racy,
    Results,
    Run,
    Truth,
    at,
    batch,
    network,
    racy,
    trained,
)


def split_layers(run: Run) -> Results:
    """TP of two layers."""
    run.arm(rank=0, call=1)
    mesh = init_device_mesh("cpu", (run.world_size,))
    model = parallelize_module(network(Racy()), mesh, {"0": ColwiseParallel(), "3": RowwiseParallel()})
    return trained(model, 0)


def split_sequence(run: Run) -> Results:
    """A norm whose input is split along the sequence, then TP."""
    run.arm(rank=1, call=1)
    mesh = init_device_mesh("cpu", (run.world_size,))
    torch.manual_seed(0)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(WIDE)
            self.up = nn.Linear(WIDE, HIDDEN)
            self.race = Racy()
            self.down = nn.Linear(HIDDEN, NARROW)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(self.race(self.up(self.norm(x[None]))))

    from torch.distributed.tensor import Replicate, Shard

    plan = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Replicate()),
    }
    return trained(parallelize_module(Model(), mesh, plan), 0)


def functional_collectives(run: Run) -> Results:
    """Collectives that return new tensors."""
    run.arm(rank=1, call=1)
    group = dist.group.WORLD
    weight = torch.eye(WIDE)
    for iteration in range(2):
        x = racy(batch(run.rank, iteration) @ weight)
        total = functional.all_reduce(x, "sum", group)
        everyone = functional.all_gather_tensor(x, 0, group)
        share = functional.reduce_scatter_tensor(everyone * total.mean(), "sum", 0, group)
        weight = weight + 0.01 * (share.t() @ total)
    return {"weight": weight + 0}


def experts(run: Run) -> Results:
    """A mixture of experts, one on each rank: rows are sent to the expert that a gate chooses, in uneven parts."""
    run.arm(rank=0, call=1)
    torch.manual_seed(0)
    gate = torch.randn(WIDE, run.world_size)
    torch.manual_seed(10 + run.rank)
    expert = nn.Parameter(torch.randn(WIDE, WIDE) / 4)
    optimizer = torch.optim.SGD([expert], lr=0.1, foreach=False)
    total = torch.zeros(())
    for iteration in range(2):
        x = batch(run.rank, iteration, rows=7)
        chosen = (x @ gate).argmax(1)
        order = chosen.argsort(stable=True)
        sent = torch.bincount(chosen, minlength=run.world_size)
        came = torch.empty_like(sent)
        dist.all_to_all_single(came, sent)
        to, back = sent.tolist(), came.tolist()
        rows = torch.empty(sum(back), WIDE)
        dist.all_to_all_single(rows, x[order].contiguous(), back, to)
        made = racy(rows @ expert)
        optimizer.zero_grad()
        made.square().mean().backward()
        optimizer.step()
        returned = torch.empty_like(x)
        dist.all_to_all_single(returned, made.detach(), to, back)
        total = total + returned.sum()
    return {"expert": expert, "total": total}


PROGRAMS = {
    "tensor_parallel": Program(split_layers, truth=at(0, module="1")),
    "sequence_parallel": Program(split_sequence, truth=at(1, module="race")),
    "functional": Program(functional_collectives, truth=Truth(1)),
    "experts": Program(experts, ranks=3, truth=at(0)),
}
