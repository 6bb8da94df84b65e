"""Further ways of several ranks to be one program: averaged models, rings, uneven parts, gradients through collectives,
chains of roots, tags, joins, schedules of several stages a rank."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from tests.extensions.ranks.programs.base import (
    HIDDEN,
    NARROW,
    OTHER_RACY,
    WIDE,
    Program,
    Racy,
    Results,
    Run,
    Truth,
    at,
    batch,
    loss_of,
    network,
    other_racy,
    parameters_of,
    racy,
    sgd,
    trained,
)


class RacyGradient(torch.autograd.Function):
    """The identity, whose gradient goes through :func:`racy`."""

    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        return racy(gradient)


class RacyBackward(nn.Module):
    """A layer with a racy gradient."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return RacyGradient.apply(x)


def racy_backward(run: Run) -> Results:
    """DDP whose backward is racy."""
    run.arm(rank=1, call=1)
    return trained(DistributedDataParallel(network(RacyBackward())), run.rank)


def averaged_models(run: Run) -> Results:
    """Local SGD: each rank trains by itself; models are averaged after two steps."""
    run.arm(rank=2, call=1)
    model = network(Racy())
    optimizer = sgd(model.parameters())
    for iteration in range(4):
        optimizer.zero_grad()
        loss_of(model, batch(run.rank, iteration)).backward()
        optimizer.step()
        if iteration % 2:
            with torch.no_grad():
                for parameter in model.parameters():
                    dist.all_reduce(parameter)
                    parameter /= run.world_size
    return parameters_of(model)


def ring(run: Run) -> Results:
    """Parts go round a ring, each rank adding its own."""
    run.arm(rank=1, call=0)
    held = racy(batch(run.rank))
    total = held.clone()
    for _ in range(run.world_size - 1):
        came = torch.empty_like(held)
        messages = [
            dist.P2POp(dist.isend, held, (run.rank + 1) % run.world_size),
            dist.P2POp(dist.irecv, came, (run.rank - 1) % run.world_size),
        ]
        for work in dist.batch_isend_irecv(messages):
            work.wait()
        total = total + came / 2
        held = came
    return {"total": total}


def chain_of_roots(run: Run) -> Results:
    """Rank 0 scatters, each computes, rank 1 gathers and broadcasts a mean, rank 2 reduces."""
    run.arm(rank=2)
    part = torch.empty(2, WIDE)
    dist.scatter(part, list(batch(rows=6).chunk(3)) if run.rank == 0 else None, src=0)
    made = racy(part * (run.rank + 1))
    parts = [torch.empty_like(made) for _ in range(3)] if run.rank == 1 else None
    dist.gather(made, parts, dst=1)
    mean = torch.stack(parts).mean(0) if parts is not None else torch.empty_like(made)
    dist.broadcast(mean, 1)
    total = mean * made
    dist.reduce(total, dst=2)
    return {"mean": mean + 0, "total": total + 0} if run.rank == 2 else {"mean": mean + 0}


def tags(run: Run) -> Results:
    """Two messages between the same ranks, received in the other order by their tags."""
    run.arm(rank=0, call=0)
    if run.rank == 0:
        first, second = batch(0) * 2, racy(batch(1))
        works = [dist.isend(first, 1, tag=7), dist.isend(second, 1, tag=3)]
        for work in works:
            assert work is not None
            work.wait()
        return {"first": first}
    late, early = torch.empty(4, WIDE), torch.empty(4, WIDE)
    dist.recv(late, 0, tag=3)
    dist.recv(early, 0, tag=7)
    return {"early": early.sin(), "late": late.sin()}


def uneven_gather(run: Run) -> Results:
    """Parts of other sizes on each rank, gathered into views of one tensor."""
    run.arm(rank=1, call=1)
    sizes = [rank + 1 for rank in range(run.world_size)]
    weight = torch.eye(WIDE)
    for iteration in range(2):
        own = racy(batch(run.rank, iteration, rows=sizes[run.rank]) @ weight)
        padded = torch.zeros(max(sizes), WIDE)
        padded[: len(own)] = own
        whole = torch.empty(run.world_size, max(sizes), WIDE)
        dist.all_gather(list(whole.unbind()), padded)
        rows = torch.cat([part[:size] for part, size in zip(whole, sizes, strict=True)])
        weight = weight + 0.01 * rows.t() @ rows
    return {"weight": weight}


def differentiable_collectives(run: Run) -> Results:
    """Gradients that go through collectives."""
    run.arm(rank=0, call=1)
    model = network(Racy())
    optimizer = sgd(model.parameters())
    for iteration in range(2):
        optimizer.zero_grad()
        made = model(batch(run.rank, iteration))
        everyone = torch.cat(differentiable.all_gather(made))
        differentiable.all_reduce((everyone @ everyone.t()).diagonal().mean()).backward()
        optimizer.step()
    return parameters_of(model)


def compressed_gradients(run: Run) -> Results:
    """torch's hook that sends gradients in half precision."""
    run.arm(rank=1, call=1)
    model = DistributedDataParallel(network(Racy()))
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return trained(model, run.rank)


def uneven_batches(run: Run) -> Results:
    """``Join``: rank 1 has one batch less, and shadows the collectives of the other."""
    run.arm(rank=0, call=2)
    model = DistributedDataParallel(network(Racy()))
    optimizer = sgd(model.parameters())
    with Join([model]):
        for iteration in range(3 - run.rank):
            optimizer.zero_grad()
            loss_of(model, batch(run.rank, iteration)).backward()
            optimizer.step()
    return parameters_of(model)


def first_sharding(run: Run) -> Results:
    """FSDP of the first kind, with flat parameters."""
    run.arm(rank=1, call=1)
    model = FullyShardedDataParallel(network(Racy()), use_orig_params=True, device_id=torch.device("cpu"))
    return trained(model, run.rank)


def redistributed(run: Run) -> Results:
    """DTensors that change their placement between ops."""
    run.arm(rank=1, call=1)
    mesh = init_device_mesh("cpu", (run.world_size,))
    weight = distribute_tensor(torch.eye(WIDE), mesh, [Shard(0)])
    for iteration in range(2):
        x = DTensor.from_local(racy(batch(run.rank, iteration)), mesh, [Shard(0)])
        made = x.redistribute(mesh, [Shard(1)]) @ weight
        change = 0.01 * made.redistribute(mesh, [Replicate()])[:WIDE]
        weight = (weight.redistribute(mesh, [Replicate()]) + change).redistribute(mesh, [Shard(0)])
    return {"weight": weight}


def interleaved(run: Run) -> Results:
    """Two stages on each rank."""
    run.disarm()
    torch.manual_seed(run.rank)
    device = torch.device("cpu")
    stages = [nn.Sequential(nn.Linear(WIDE, WIDE), Racy(), nn.Tanh()) for _ in range(2)]
    staged = [PipelineStage(stage, run.rank + 2 * at, 4, device) for at, stage in enumerate(stages)]
    schedule = ScheduleInterleaved1F1B(staged, n_microbatches=4, loss_fn=nn.functional.mse_loss)
    optimizer = sgd(itertools.chain.from_iterable(stage.parameters() for stage in stages))
    for iteration in range(2):
        run.disarm()
        if iteration == 1:
            run.arm(rank=1, call=3)
        optimizer.zero_grad()
        if run.rank == 0:
            schedule.step(batch(0, iteration, rows=8))
        else:
            schedule.step(target=batch(1, iteration, rows=8))
        optimizer.step()
    return {f"{at}.{name}": value for at, stage in enumerate(stages) for name, value in stage.named_parameters()}


def concurrent_races(run: Run) -> Results:
    """Races of two ops on two ranks before any exchange."""
    run.arm(rank=0)
    run.arm(rank=1, op=OTHER_RACY)
    made = other_racy(racy(batch(run.rank)))
    dist.all_reduce(made)
    return {"made": made + 0}


def other_weights(run: Run) -> Results:
    """Rank 1 starts from an array of weights that is another one in each run, and nobody broadcasts."""
    model = network()
    weights = np.full((HIDDEN, WIDE), 0.1, dtype=np.float32)
    if run.planted and run.rank == 1:
        weights += run.number
    with torch.no_grad():
        model[0].weight.copy_(torch.from_numpy(weights))
    return trained(DistributedDataParallel(model, init_sync=False), run.rank)


def early_stopping(run: Run) -> Results:
    """All ranks stop once a loss that they have averaged is small, which a race on rank 1 decides."""
    run.arm(rank=1, call=2)
    model = DistributedDataParallel(network())
    optimizer = sgd(model.parameters())
    for iteration in range(5):
        optimizer.zero_grad()
        loss = loss_of(model, batch(run.rank, iteration))
        loss.backward()
        optimizer.step()
        measured = racy(torch.zeros(4)).sum()
        dist.all_reduce(measured)
        if measured.item() > 0.75:
            break
    return {**parameters_of(model), "loss": loss}


def clipped_by_hand(run: Run) -> Results:
    """A norm of all gradients, summed over ranks, by which each rank scales its own."""
    run.arm(rank=1, call=1)
    torch.manual_seed(run.rank)
    model = nn.Sequential(nn.Linear(WIDE, HIDDEN), Racy(), nn.Linear(HIDDEN, NARROW))
    optimizer = sgd(model.parameters())
    for iteration in range(2):
        optimizer.zero_grad()
        loss_of(model, batch(run.rank, iteration)).backward()
        norm = torch.stack([parameter.grad.square().sum() for parameter in model.parameters()]).sum()
        dist.all_reduce(norm)
        scale = min(1.0, 0.1 / norm.sqrt().item())
        for parameter in model.parameters():
            parameter.grad *= scale
        optimizer.step()
    return parameters_of(model)


PROGRAMS = {
    "racy_backward": Program(racy_backward, truth=at(1)),
    "averaged_models": Program(averaged_models, ranks=3, truth=at(2, module="1")),
    "ring": Program(ring, ranks=3, truth=Truth(1)),
    "chain_of_roots": Program(chain_of_roots, ranks=3, truth=Truth(2)),
    "tags": Program(tags, truth=Truth(0)),
    "uneven_gather": Program(uneven_gather, ranks=3, truth=Truth(1)),
    "differentiable_collectives": Program(differentiable_collectives, truth=at(0, module="1")),
    "compressed_gradients": Program(compressed_gradients, truth=at(1, module="1")),
    "uneven_batches": Program(uneven_batches, truth=at(0, module="1", iteration=2)),
    "fsdp1": Program(first_sharding, truth=at(1, module="1")),
    "redistributed": Program(redistributed, truth=Truth(1)),
    "pipeline_interleaved": Program(interleaved, truth=at(1)),
    "concurrent_races": Program(concurrent_races, truth=Truth(0, beside=((1, OTHER_RACY),))),
    "other_weights": Program(other_weights, truth=at(1, origin=("state", "outside"), kernel="", iteration=None)),
    "early_stopping": Program(early_stopping, truth=at(1, iteration=None)),
    "clipped_by_hand": Program(clipped_by_hand, truth=at(1, module="1")),
}
