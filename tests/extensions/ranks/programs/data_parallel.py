"""DDP: buckets, accumulation, hooks of communication, batches and generators of each rank, ZeRO."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from tests.extensions.ranks.programs.base import (
    HIDDEN,
    NARROW,
    OTHER_RACY,
    SUMS,
    WIDE,
    OtherRacy,
    Program,
    Racy,
    Replicas,
    Results,
    Run,
    Truth,
    at,
    batch,
    loss_of,
    network,
    parameters_of,
    racy,
    scatter_add_,
    sgd,
    trained,
)

SMALL_BUCKETS = 0.0003
"""MiB, less than the parameters of :func:`network`."""


def buckets(run: Run) -> Results:
    """Several buckets and buffers; the second iteration has its buckets built anew."""
    run.arm(rank=1, call=1)
    model = network(Racy(), nn.BatchNorm1d(16))
    return trained(DistributedDataParallel(model, bucket_cap_mb=SMALL_BUCKETS), run.rank)


def accumulation(run: Run) -> Results:
    """Two parts of a batch in each step, the first under ``no_sync``."""
    run.arm(rank=0, call=2)
    model = DistributedDataParallel(network(Racy()))
    optimizer = sgd(model.parameters())
    for iteration in range(2):
        optimizer.zero_grad()
        first, second = batch(run.rank, iteration).chunk(2)
        with model.no_sync():
            loss_of(model, first).backward()
        loss_of(model, second).backward()
        optimizer.step()
    return parameters_of(model)


def comm_hook(run: Run) -> Results:
    """A hook of communication. On rank 1 its callback runs in a thread of the backend, since rank 0 joins only then."""
    run.arm(rank=1, call=1)
    store, calls = dist.distributed_c10d._get_default_store(), itertools.count()

    def reduced(_, bucket):  # type: ignore[no-untyped-def]  # torch reads annotations, and refuses texts
        call = f"set {next(calls)}"
        if run.rank == 0:
            store.wait([call])
        future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        made = future.then(lambda done: racy(done.value()[0]) / run.world_size)
        if run.rank == 1:
            store.set(call, "yes")
        return made

    model = DistributedDataParallel(network())
    model.register_comm_hook(None, reduced)
    return trained(model, run.rank)


def two_races(run: Run) -> Results:
    """A race on rank 1, and a later one of another op on rank 0, which reads the batch."""
    run.arm(rank=1, call=0)
    run.arm(rank=0, call=1, op=OTHER_RACY)
    return trained(DistributedDataParallel(nn.Sequential(OtherRacy(), *network(Racy()))), run.rank)


def scattered_rows(run: Run) -> Results:
    """Gradients of rows of a table that are summed in an order of their own on rank 0."""
    run.arm(rank=0, call=1, op=SUMS)
    table = batch(rows=3)
    for iteration in range(2):
        x = batch(run.rank, iteration, rows=9) * torch.logspace(-3, 3, 9)[:, None]
        gradient = torch.zeros_like(table)
        scatter_add_(gradient, torch.arange(9) % 3, x * table.mean())
        dist.all_reduce(gradient)
        table = table - 0.1 * gradient
    return {"table": table}


class RacySGD(torch.optim.Optimizer):
    """SGD whose gradients go through :func:`racy`."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(racy(parameter.grad), alpha=-group["lr"])


def zero_step(run: Run) -> Results:
    """ZeRO: each rank updates its share of the parameters, and broadcasts it."""
    model = DistributedDataParallel(network())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=RacySGD, lr=0.1)
    for iteration in range(2):
        run.disarm()
        if iteration == 1:
            run.arm(rank=1)
        optimizer.zero_grad()
        loss_of(model, batch(run.rank, iteration)).backward()
        optimizer.step()
    return parameters_of(model)


def unseeded_generator(run: Run) -> Results:
    """Noise on the batch, on rank 1 from a generator that nobody has seeded."""
    generator = torch.Generator().manual_seed(7)
    if run.planted and run.rank == 1:
        generator.manual_seed(1000 + run.number)
    model = DistributedDataParallel(network())
    optimizer = sgd(model.parameters())
    for iteration in range(2):
        optimizer.zero_grad()
        x = batch(run.rank, iteration)
        loss_of(model, x + torch.randn(x.shape, generator=generator)).backward()
        optimizer.step()
    return parameters_of(model)


def data_order(run: Run) -> Results:
    """Examples in the order of a list, which is another one in each run on rank 1."""
    examples = batch(run.rank, rows=8)
    order = list(range(8))
    if run.planted and run.rank == 1:
        order = order[run.number + 1 :] + order[: run.number + 1]
    model = DistributedDataParallel(network())
    optimizer = sgd(model.parameters())
    for iteration in range(2):
        optimizer.zero_grad()
        chosen = torch.tensor(order[4 * iteration : 4 * iteration + 4])
        loss_of(model, examples[chosen]).backward()
        optimizer.step()
    return parameters_of(model)


def own_dropout_seeds(run: Run) -> Results:
    """Dropout from a seed of each rank."""
    run.arm(rank=0, call=1)
    model = DistributedDataParallel(network(nn.Dropout(0.5), Racy()))
    torch.manual_seed(run.rank)
    return trained(model, run.rank)


def unused_parameters(run: Run) -> Results:
    """A branch that only rank 0 takes; DDP looks for the parameters that are not used."""
    run.arm(rank=1, call=1)

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk = network(Racy())
            self.branch = nn.Linear(WIDE, NARROW)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = self.trunk(x)
            return out + self.branch(x) if run.rank == 0 else out

    model = DistributedDataParallel(Branches(), find_unused_parameters=True)
    return trained(model, run.rank)


def sparse_gradients(run: Run) -> Results:
    """Gradients of rows of a table, which are sparse tensors."""
    run.arm(rank=1, call=1)
    torch.manual_seed(0)
    table = nn.EmbeddingBag(HIDDEN, WIDE, mode="sum", sparse=True)
    optimizer = sgd(table.parameters())
    for iteration in range(2):
        optimizer.zero_grad()
        rows = torch.arange(4 * run.rank, 4 * run.rank + 4).view(2, 2)
        weights = racy(torch.full((2, 2), 0.5 + iteration))
        table(rows, per_sample_weights=weights).square().mean().backward()
        gradient = table.weight.grad.coalesce()
        dist.all_reduce(gradient)
        table.weight.grad = gradient / run.world_size
        optimizer.step()
    return dict(table.named_parameters())


def zeros_in_any_order(run: Run) -> Results:
    """A bucket of gradients; those that are missing are zeroed in an order of each run, as DDP does by address."""
    run.arm(rank=1, call=1)
    weight, bucket = torch.ones(WIDE), torch.ones(3, WIDE)
    for iteration in range(2):
        for missing in range(2):
            bucket[(missing + run.number) % 2].zero_()
        bucket[2].copy_(racy(weight * batch(run.rank, iteration)[0]))
        dist.all_reduce(bucket)
        weight = weight - 0.1 * bucket.sum(0)
    return {"weight": weight}


PROGRAMS = {
    "ddp_buckets": Program(buckets, truth=at(1, module="1")),
    "ddp_accumulation": Program(accumulation, truth=at(0, module="1")),
    "ddp_comm_hook": Program(
        comm_hook,
        truth=at(1, iteration=None),
        replicas=Replicas(("0.weight", "0.bias", "2.weight", "2.bias"), step=1),
    ),
    "ddp_two_races": Program(two_races, truth=at(1, module="2", iteration=0, later=((0, OTHER_RACY),))),
    "scattered_rows": Program(scattered_rows, truth=Truth(0, kernel=SUMS)),
    "zero_step": Program(zero_step, truth=at(1)),
    "unseeded_generator": Program(unseeded_generator, truth=at(1, origin=("rng",), kernel="", iteration=None)),
    "data_order": Program(data_order, truth=at(1, origin=("outside", "input"), kernel="", iteration=None)),
    "own_dropout_seeds": Program(own_dropout_seeds, truth=at(0, module="2")),
    "sparse_gradients": Program(sparse_gradients, truth=at(1)),
    "zeros_in_any_order": Program(zeros_in_any_order, truth=at(1, iteration=None)),
    "unused_parameters": Program(unused_parameters, truth=at(1, module="trunk.1")),
}
