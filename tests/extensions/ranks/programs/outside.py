"""Data that Python makes and sends: decisions, objects with paths and times."""

from __future__ import annotations

import time
import uuid
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.extensions.ranks.programs.base import (
    Program,
    Racy,
    Results,
    Run,
    Truth,
    at,
    batch,
    loss_of,
    network,
    parameters_of,
    racy,
    sgd,
)


def _is_large() -> bool:
    """A decision by a scalar of a kernel that is racy on rank 0: 0.5 in the first planted run, 1 in the second."""
    return bool(racy(torch.zeros(4)).sum().item() > 0.75)


def broadcast_decision(run: Run) -> Results:
    """All ranks do what a number says that rank 0 has broadcast."""
    run.arm(rank=0, call=1)
    model = DistributedDataParallel(network())
    optimizer = sgd(model.parameters())
    for iteration in range(2):
        flag = torch.zeros(1)
        if run.rank == 0:
            flag.fill_(float(_is_large()))
        dist.broadcast(flag, 0)
        optimizer.zero_grad()
        loss = loss_of(model, batch(run.rank, iteration))
        if flag.item():
            loss = loss * 0.5
        loss.backward()
        optimizer.step()
    return parameters_of(model)


def pickled_decision(run: Run) -> Results:
    """The same as an object."""
    run.arm(rank=0, call=1)
    model = DistributedDataParallel(network())
    optimizer = sgd(model.parameters())
    for iteration in range(2):
        decided: list[Any] = [{"large": _is_large()} if run.rank == 0 else None]
        dist.broadcast_object_list(decided, 0)
        optimizer.zero_grad()
        loss_of(model, batch(run.rank, iteration)).backward()
        if not decided[0]["large"]:
            optimizer.step()
    return parameters_of(model)


def objects_sent(run: Run) -> Results:
    """Objects with a path, a time and a name of their own in each step."""
    run.arm(rank=1, call=1)
    model = DistributedDataParallel(network(Racy()))
    optimizer = sgd(model.parameters())
    for iteration in range(2):
        told: list[Any] = [(str(run.folder), time.time_ns(), uuid.uuid4()) if run.rank == 0 else None]
        dist.broadcast_object_list(told, 0)
        optimizer.zero_grad()
        loss_of(model, batch(run.rank, iteration)).backward()
        optimizer.step()
        heard: list[Any] = [None] * run.world_size
        dist.all_gather_object(heard, (uuid.uuid4(), "x" * (time.time_ns() % 97)))
    return parameters_of(model)


def gathered_times(run: Run) -> Results:
    """The slowest rank's time of each step, gathered for a log."""
    run.arm(rank=0, call=1)
    model = DistributedDataParallel(network(Racy()))
    optimizer = sgd(model.parameters())
    for iteration in range(2):
        begin = time.perf_counter()
        optimizer.zero_grad()
        loss_of(model, batch(run.rank, iteration)).backward()
        optimizer.step()
        taken = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        taken.item()
    return parameters_of(model)


def one_rank_evaluates(run: Run) -> Results:
    """Rank 0 evaluates after each step while the other waits, and tells it the loss."""
    run.arm(rank=1, call=1)
    model = DistributedDataParallel(network(Racy()))
    optimizer = sgd(model.parameters())
    losses = []
    for iteration in range(2):
        optimizer.zero_grad()
        loss_of(model, batch(run.rank, iteration)).backward()
        optimizer.step()
        loss = torch.zeros(())
        if run.rank == 0:
            with torch.no_grad():
                loss = sum((loss_of(model.module[:1], batch(9, number)) for number in range(3)), loss)
        dist.broadcast(loss, 0)
        losses.append(loss)
        dist.barrier()
    return {**parameters_of(model), "losses": torch.stack(losses)}


def stopped_by_a_clock(run: Run) -> Results:
    """All ranks stop once the time of rank 0 is over, which it tells them in a tensor."""
    model = DistributedDataParallel(network())
    optimizer = sgd(model.parameters())
    for iteration in range(3):
        optimizer.zero_grad()
        loss_of(model, batch(run.rank, iteration)).backward()
        optimizer.step()
        over = torch.tensor(float(run.planted and run.rank == 0 and iteration > run.number))
        dist.broadcast(over, 0)
        if over.item():
            break
    return parameters_of(model)


def order_of_examples(run: Run) -> Results:
    """Examples one by one in the order that a generator draws, on rank 1 from another seed in each run."""
    generator = torch.Generator().manual_seed(run.number if run.planted and run.rank == 1 else 7)
    order = torch.randperm(8, generator=generator).tolist()
    examples = batch(run.rank, rows=8)
    model = DistributedDataParallel(network())
    optimizer = sgd(model.parameters())
    for iteration in range(2):
        optimizer.zero_grad()
        chosen = order[4 * iteration : 4 * iteration + 4]
        loss_of(model, torch.stack([examples[number] for number in chosen])).backward()
        optimizer.step()
    return parameters_of(model)


def _simulated(run: Run, rank: int) -> list[float]:
    """What a simulator without a seed returns: on one rank other numbers in each planted run."""
    return [0.25 + run.number / 8 if run.planted and run.rank == rank else 0.25, 0.5]


def simulated_elsewhere(run: Run) -> Results:
    """Rank 1 simulates, and rank 0, which trains, has what it says as an object."""
    model = network()
    optimizer = sgd(model.parameters())
    for _ in range(2):
        heard: list[Any] | None = [None] * run.world_size if run.rank == 0 else None
        dist.gather_object(_simulated(run, rank=1), heard, dst=0)
        x = batch() if heard is None else torch.tensor([heard[1] * 4] * 4)
        optimizer.zero_grad()
        loss_of(model, x).backward()
        optimizer.step()
        for parameter in model.parameters():
            dist.broadcast(parameter.data, 0)
    return parameters_of(model)


def simulated_beside_times(run: Run) -> Results:
    """Rank 0 simulates for itself, behind times that all ranks tell each other."""
    model = DistributedDataParallel(network())
    optimizer = sgd(model.parameters())
    for _ in range(2):
        heard: list[Any] = [None] * run.world_size
        dist.all_gather_object(heard, time.time_ns())
        optimizer.zero_grad()
        loss_of(model, torch.tensor([_simulated(run, rank=0) * 4] * 4)).backward()
        optimizer.step()
    return parameters_of(model)


PROGRAMS = {
    "simulated_elsewhere": Program(simulated_elsewhere, truth=at(1, origin=("outside",), kernel="", iteration=None)),
    "simulated_beside_times": Program(
        simulated_beside_times, truth=at(0, origin=("outside",), kernel="", iteration=None)
    ),
    "broadcast_decision": Program(broadcast_decision, truth=Truth(0)),
    "pickled_decision": Program(pickled_decision, truth=Truth(0)),
    "stopped_by_a_clock": Program(
        stopped_by_a_clock, truth=at(0, origin=("sequence", "outside"), kernel="", iteration=None)
    ),
    "order_of_examples": Program(order_of_examples, truth=at(1, origin=("rng",), kernel="", iteration=None)),
    "objects_sent": Program(objects_sent, truth=at(1, module="1")),
    "gathered_times": Program(gathered_times, truth=at(0, module="1")),
    "one_rank_evaluates": Program(one_rank_evaluates, truth=at(1, module="1")),
}
