"""Replicas that must agree within one run."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from tests.extensions.ranks.programs.base import (
    HIDDEN,
    NARROW,
    RACY,
    WIDE,
    Program,
    Racy,
    Replicas,
    Results,
    Run,
    Truth,
    batch,
    loss_of,
    network,
    parameters_of,
    racy,
    sgd,
    trained,
)

CLEAN = Truth()
"""Two runs agree, also planted: the fault is the same in each."""


class Norm(nn.Module):
    """A norm of a part of the sequence, whose weight is a replica on all ranks."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.mesh, self.reduces = init_device_mesh("cpu", (run.world_size,)), not run.planted
        self.weight = nn.Parameter(distribute_tensor(torch.ones(WIDE), self.mesh, [Replicate()]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        assert isinstance(weight, DTensor)
        local = weight.to_local(grad_placements=[Partial() if self.reduces else Replicate()])
        return torch.nn.functional.layer_norm(x, (WIDE,), local)


def reduce_gradients(model: nn.Module, *, without: str = "") -> None:
    """Sum the gradients of plain parameters over the ranks."""
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor) and name != without:
            dist.all_reduce(parameter.grad)


def unreduced_norm(run: Run) -> Results:
    """Each rank has a part of the sequence; the gradient of the norm's weight is not summed over them."""
    torch.manual_seed(0)
    model = nn.Sequential(Norm(run), nn.Linear(WIDE, NARROW))
    optimizer = sgd(model.parameters())
    for iteration in range(2):
        optimizer.zero_grad()
        loss_of(model, batch(0, iteration, rows=8).chunk(run.world_size)[run.rank]).backward()
        reduce_gradients(model)
        optimizer.step()
    return parameters_of(model)


def forgotten_gradient(run: Run) -> Results:
    """Plain parameters, whose gradients are summed over the ranks but one in the second step."""
    model = network()
    optimizer = sgd(model.parameters())
    for iteration in range(3):
        optimizer.zero_grad()
        loss_of(model, batch(run.rank, iteration)).backward()
        reduce_gradients(model, without="0.bias" if run.planted and iteration == 1 else "")
        optimizer.step()
    return parameters_of(model)


def rank_local_backward(run: Run) -> Results:
    """Behind DDP's backward, rank 1 alone adds the gradient of a penalty."""
    model = DistributedDataParallel(network())
    optimizer = sgd(model.parameters())
    weight = model.module[2].weight
    for iteration in range(2):
        optimizer.zero_grad()
        loss_of(model, batch(run.rank, iteration)).backward()
        if run.planted and run.rank == 1:
            (penalty,) = torch.autograd.grad(weight.square().sum() * 0.01, [weight])
            weight.grad += penalty
        optimizer.step()
    return parameters_of(model)


def other_seed(run: Run) -> Results:
    """Data parallelism by hand, whose models each rank makes for itself; rank 1 from another seed."""
    model = network(seed=run.rank if run.planted else 0)
    optimizer = sgd(model.parameters())
    for iteration in range(2):
        optimizer.zero_grad()
        loss_of(model, batch(run.rank, iteration)).backward()
        reduce_gradients(model)
        optimizer.step()
    return parameters_of(model)


class Replicated(nn.Module):
    """A product with a replicated weight, of which each rank computes all."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        mesh = init_device_mesh("cpu", (run.world_size,))
        self.weight = nn.Parameter(distribute_tensor(torch.randn(WIDE, HIDDEN), mesh, [Replicate()]))
        self.race = Racy()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert isinstance(self.weight, DTensor)
        return self.race(x @ self.weight.to_local())


def racy_replicated_region(run: Run) -> Results:
    """A region that each of three ranks computes for itself, from the same data; rank 2 comes to another gradient."""
    run.arm(rank=2, call=1)
    torch.manual_seed(0)
    return trained(Replicated(run), 0)


def batch_norm(run: Run) -> Results:
    """Statistics of each rank's own batches, which planted nobody broadcasts: as documented."""
    model = DistributedDataParallel(network(nn.BatchNorm1d(HIDDEN)), broadcast_buffers=not run.planted)
    return trained(model, run.rank)


def own_learning_rate(run: Run) -> Results:
    """Rank 1 goes another way with the same gradient."""
    model = DistributedDataParallel(network())
    optimizer = sgd(model.parameters())
    for iteration in range(2):
        optimizer.zero_grad()
        loss_of(model, batch(run.rank, iteration)).backward()
        if run.planted and run.rank == 1 and iteration == 1:
            optimizer.param_groups[0]["lr"] = 0.2
        optimizer.step()
    return parameters_of(model)


def skipped_update(run: Run) -> Results:
    """Rank 0 leaves one parameter alone in the second step, as its own check of overflow tells it to."""
    model = DistributedDataParallel(network())
    optimizer = sgd(model.parameters())
    for iteration in range(2):
        optimizer.zero_grad()
        loss_of(model, batch(run.rank, iteration)).backward()
        if run.planted and run.rank == 0 and iteration == 1:
            model.module[0].bias.grad = None
        optimizer.step()
    return parameters_of(model)


def racy_update(run: Run) -> Results:
    """HSDP whose update of one shard is racy on one of the two ranks that hold it."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(network(), mesh=mesh)
    optimizer = LocalSGD(model.parameters())
    for iteration in range(2):
        run.disarm()
        optimizer.zero_grad()
        loss_of(model, batch(run.rank, iteration)).backward()
        if iteration == 1:
            run.arm(rank=3)
        optimizer.step()
    return parameters_of(model)


class LocalSGD(torch.optim.Optimizer):
    """SGD on each rank's own part of a tensor."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert closure is None
        for parameter in self.param_groups[0]["params"]:
            parameter.to_local().sub_(racy(parameter.grad.to_local()), alpha=0.1)


PROGRAMS = {
    "unreduced_norm": Program(unreduced_norm, truth=CLEAN, replicas=Replicas(("0.weight",), origin="unreduced")),
    "forgotten_gradient": Program(
        forgotten_gradient, truth=CLEAN, replicas=Replicas(("0.bias",), step=1, origin="unreduced")
    ),
    "rank_local_backward": Program(
        rank_local_backward, truth=CLEAN, replicas=Replicas(("2.weight",), origin="sequence")
    ),
    "other_seed": Program(
        other_seed, truth=CLEAN, replicas=Replicas(("0.weight", "0.bias", "2.weight", "2.bias"), origin="rng")
    ),
    "racy_replicated_region": Program(
        racy_replicated_region,
        ranks=3,
        truth=Truth(2, module="race", iteration=1),
        replicas=Replicas(("weight",), step=1, minority=(2,), kernel=RACY, origin="kernel"),
    ),
    "own_learning_rate": Program(
        own_learning_rate, truth=CLEAN, replicas=Replicas(("0.weight", "0.bias", "2.weight", "2.bias"), step=1)
    ),
    "skipped_update": Program(skipped_update, truth=CLEAN, replicas=Replicas(("0.bias",), step=1, origin="sequence")),
    "racy_update": Program(
        racy_update,
        ranks=4,
        truth=Truth(3, iteration=1),
        replicas=Replicas(("0.weight",), step=1, kernel=RACY, origin="kernel"),
    ),
    "batch_norm": Program(batch_norm, truth=CLEAN),
}
