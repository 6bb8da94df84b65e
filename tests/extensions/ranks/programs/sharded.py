"""FSDP2 alone, with TP, as HSDP, through a checkpoint, with shards that are empty."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint as recomputed

from tests.extensions.ranks.programs.base import (
    WIDE,
    Program,
    Racy,
    Results,
    Run,
    at,
    batch,
    loss_of,
    network,
    parameters_of,
    trained,
)


def sharded(model: nn.Module, **options: Any) -> nn.Module:
    """FSDP2, each layer that has parameters and the whole by itself."""
    for layer in model.children():
        if any(True for _ in layer.parameters()):
            fully_shard(layer, **options)
    return fully_shard(model, **options)


def fully_sharded(run: Run) -> Results:
    """FSDP2 on two ranks."""
    run.arm(rank=1, call=1)
    return trained(sharded(network(Racy())), run.rank)


def two_dimensional(run: Run) -> Results:
    """FSDP2 over one dimension of a mesh, TP over the other."""
    run.arm(rank=2, call=1)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = parallelize_module(network(Racy()), mesh["tensor"], {"0": ColwiseParallel(), "3": RowwiseParallel()})
    return trained(sharded(model, mesh=mesh["data"]), run.rank // 2)


class Recomputed(nn.Module):
    """A block whose forward runs again in backward."""

    def __init__(self, *between: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDE, WIDE), *between, nn.ReLU(), nn.Linear(WIDE, WIDE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + recomputed(self.layers, x, use_reentrant=False)


def hybrid(run: Run) -> Results:
    """HSDP with blocks that are recomputed, gradients clipped, AdamW."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = sharded(nn.Sequential(Recomputed(), Recomputed(Racy())), mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for iteration in range(2):
        run.disarm()
        if iteration == 1:
            run.arm(rank=3)
        optimizer.zero_grad()
        loss_of(model, batch(run.rank, iteration)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return parameters_of(model)


def behind_checkpoint(run: Run) -> Results:
    """A step, a distributed checkpoint that another model loads, and a step of that one."""
    run.disarm()
    model = sharded(network(Racy()))
    trained(model, run.rank, iterations=1)
    folder = run.folder / "checkpoint"
    checkpoint.save(get_model_state_dict(model), checkpoint_id=folder)
    again = sharded(network(Racy(), seed=1))
    state = get_model_state_dict(again)
    checkpoint.load(state, checkpoint_id=folder)
    set_model_state_dict(again, state)
    run.arm(rank=1)
    return trained(again, run.rank, iterations=1)


def empty_shards(run: Run) -> Results:
    """Weights of fewer rows than there are ranks."""
    run.arm(rank=0, call=1)
    torch.manual_seed(0)
    return trained(sharded(nn.Sequential(nn.Linear(WIDE, 3), Racy(), nn.Linear(3, 2))), run.rank)


PROGRAMS = {
    "fsdp2": Program(fully_sharded, truth=at(1, module="1")),
    "fsdp2_tp": Program(two_dimensional, ranks=4, truth=at(2, module="1")),
    "hsdp_recomputed_clipped": Program(hybrid, ranks=4, truth=at(3, module="1.layers.1")),
    "behind_checkpoint": Program(behind_checkpoint, truth=at(1, module="1", iteration=None)),
    "empty_shards": Program(empty_shards, ranks=4, truth=at(0, module="1")),
}
