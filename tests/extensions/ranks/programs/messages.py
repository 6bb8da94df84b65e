"""Collectives and messages by themselves: asynchronous, coalesced, from any source, in several groups, not waited for,
of a rank that is killed."""

from __future__ import annotations

import os
import signal

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.extensions.ranks.lateness import told_once_blocked
from tests.extensions.ranks.programs.base import (
    WIDE,
    Program,
    Racy,
    Results,
    Run,
    Truth,
    batch,
    loss_of,
    network,
    parameters_of,
    racy,
    sgd,
)
from tests.gloo import exchanges_lists


def asynchronous(run: Run) -> Results:
    """An ``all_reduce`` that goes on while other ops run."""
    run.arm(rank=1, call=1)
    weight = torch.eye(WIDE)
    for iteration in range(2):
        x = batch(run.rank, iteration)
        made = racy(x @ weight)
        work = dist.all_reduce(made, async_op=True)
        beside = x.sin()
        work.wait()
        weight = weight + 0.01 * (beside.t() @ made)
    return {"weight": weight}


def coalesced_in_subgroups(run: Run) -> Results:
    """Two collectives in one call in each half of the ranks, then one of all."""
    run.arm(rank=2, call=1)
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    half = halves[run.rank // 2]
    weight = torch.eye(WIDE)
    for iteration in range(2):
        first, second = batch(run.rank, iteration) @ weight, racy(batch(run.rank, iteration + 2) @ weight)
        dist.all_reduce_coalesced([first, second], group=half)
        mean = first.t() @ second
        dist.all_reduce(mean)
        weight = weight + 0.01 * mean
    return {"weight": weight}


def any_source(run: Run) -> Results:
    """What comes first counts more: rank 0 takes messages as they come, in an order that each run has for itself."""
    store = dist.distributed_c10d._get_default_store()
    x = batch(run.rank)
    total = torch.zeros_like(x)
    order = [1, 2] if run.number % 2 == 0 or not run.planted else [2, 1]
    for turn in range(2):
        if run.rank == 0:
            came = torch.empty_like(x)
            dist.recv(came)
            total = 0.5 * total + came
            store.set(f"came {turn}", "yes")
        elif run.rank == order[turn]:
            dist.send(x, 0)
        else:
            store.wait([f"came {turn}"])
    return {"total": total}


def two_groups(run: Run) -> Results:
    """Two groups of the same ranks, whose collectives each rank begins in another order."""
    run.arm(rank=1, call=1)
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    left = {}
    for iteration in range(2):
        parts = [batch(run.rank, iteration) * 2, racy(batch(run.rank, iteration) * 3)]
        works = {}
        for number in (0, 1) if run.rank == 0 else (1, 0):
            works[number] = dist.all_reduce(parts[number], group=groups[number], async_op=True)
        for work in works.values():
            work.wait()
        left = {f"part.{number}": part + 0 for number, part in enumerate(parts)}
    return left


def groups_made_anew(run: Run) -> Results:
    """Groups whose names are others in each run, since others were made before."""
    run.arm(rank=0, call=1)
    group = dist.new_group([0, 1])
    made = batch(run.rank)
    for _ in range(2):
        made = racy(made) / 2
        dist.all_reduce(made, group=group)
    return {"made": made + 0}


def groups_before(run: Run) -> None:
    """What other programs of the same process have made."""
    for _ in range(3 * run.number):
        dist.new_group([0, 1])


def read_before_wait(run: Run) -> Results:
    """An asynchronous ``all_reduce`` that rank 1 joins once rank 0 has read its output, or waits for it."""
    store = dist.distributed_c10d._get_default_store()
    x = batch(run.rank)
    made = x * 2
    if run.rank == 1:
        store.wait(["reading"])
    work = dist.all_reduce(made, async_op=True)
    if run.rank == 1 or not run.planted:
        if run.rank == 0:
            store.set("reading", "yes")
        work.wait()
        mean = made.mean()
    else:
        with told_once_blocked(lambda: store.set("reading", "yes")):
            mean = made.mean()
        work.wait()
    return {"mean": mean}


def killed(run: Run) -> Results:
    """Rank 1 is killed in the third step of its second run."""
    run.disarm()
    return _trained_until_killed(run)


def killed_behind_race(run: Run) -> Results:
    """The same, two steps after a race."""
    run.arm(rank=1)
    return _trained_until_killed(run)


def _trained_until_killed(run: Run) -> Results:
    model = DistributedDataParallel(network(Racy()))
    optimizer = sgd(model.parameters())
    for iteration in range(4):
        optimizer.zero_grad()
        loss = loss_of(model, batch(run.rank, iteration))
        if run.planted and run.rank == 1 and run.number == 1 and iteration == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()
        optimizer.step()
    return parameters_of(model)


def barriers(run: Run) -> Results:
    """Barriers between the ops, one of them asynchronous."""
    run.arm(rank=1, call=1)
    made = batch(run.rank)
    for _ in range(2):
        dist.barrier()
        made = racy(made) / 2
        work = dist.barrier(async_op=True)
        dist.all_reduce(made)
        work.wait()
    return {"made": made + 0}


def asked_of_gloo(_: Run) -> None:
    """Learn what gloo has before anything is recorded."""
    exchanges_lists()


def every_kind(run: Run) -> Results:
    """Blocking collectives of every kind that gloo has."""
    run.arm(rank=0)
    x, ranks = racy(batch(run.rank)), run.world_size
    parts = [part.contiguous() for part in x.repeat(ranks, 1).chunk(ranks)]

    def new(count: int) -> list[torch.Tensor]:
        return [torch.empty_like(x) for _ in range(count)]

    reduced, (single, scattered, received, shared), gathered, exchanged = x * 2, new(4), new(ranks), new(ranks)
    at_root = new(ranks) if run.rank == 0 else None
    dist.all_reduce(reduced)
    dist.all_gather(gathered, x)
    dist.reduce_scatter_tensor(single, torch.cat(parts))
    dist.reduce_scatter(shared, parts)
    dist.scatter(scattered, parts if run.rank == 1 else None, src=1)
    if exchanges_lists():
        dist.all_to_all(exchanged, parts)
    else:
        exchanged.clear()
    dist.gather(x, at_root, dst=0)
    dist.reduce(parts[0], dst=1)
    dist.broadcast(parts[1], src=0)
    messages = [
        dist.P2POp(dist.isend, x, (run.rank + 1) % ranks),
        dist.P2POp(dist.irecv, received, (run.rank - 1) % ranks),
    ]
    for work in dist.batch_isend_irecv(messages):
        work.wait()
    left = [reduced, *gathered, single, shared, scattered, *exchanged, *(at_root or ()), received, *parts[:2]]
    return {f"sum.{number}": tensor.sum() for number, tensor in enumerate(left)}


PROGRAMS = {
    "async_all_reduce": Program(asynchronous, truth=Truth(1)),
    "coalesced_in_subgroups": Program(coalesced_in_subgroups, ranks=4, truth=Truth(2)),
    "any_source": Program(
        any_source, ranks=3, truth=Truth(0, origin=("collective",), kernel="c10d.recv_any_source_.default")
    ),
    "two_groups": Program(two_groups, truth=Truth(1)),
    "groups_made_anew": Program(groups_made_anew, truth=Truth(0), before=groups_before),
    "read_before_wait": Program(read_before_wait, truth=Truth(0, origin=("unwaited",), kernel="aten.mean.default")),
    "killed": Program(killed, truth=Truth(missing=(1,))),
    "killed_behind_race": Program(killed_behind_race, truth=Truth(1, module="1", iteration=0, missing=(1,))),
    "barriers": Program(barriers, truth=Truth(1)),
    "every_kind": Program(every_kind, ranks=3, truth=Truth(0), before=asked_of_gloo),
}
