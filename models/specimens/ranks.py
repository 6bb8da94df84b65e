"""Specimens that exchange data with other processes, each with its own planted cause.

The first ones run in one process, in a group with a pretended second rank or of one rank, where a collective is the
identity; the others on several ranks, whose factory is called with a process group that is up.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

Example = tuple[nn.Module, tuple[torch.Tensor, ...]]

_BUILT = itertools.count()
"""Models built in this process: every rank builds one for each run."""


class SharedMean(nn.Module):
    """Center features on their mean over some ranks; behind that, the gain is drawn from the system's entropy."""

    def __init__(self, features: int, *, drawn: bool, ranks: tuple[int, ...]) -> None:
        super().__init__()
        self.mix = nn.Linear(features, features)
        self.drawn = drawn
        self.ranks = ranks

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        mean = features.detach().mean(0)
        dist.all_reduce(mean, group=pretended_group(self.ranks))
        gain = 1 + (os.urandom(1)[0] / 256 if self.drawn else 0.5)
        return torch.tanh(self.mix(features - mean / len(self.ranks))) * gain


@functools.cache
def pretended_group(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    """The group of these ranks in this process, which is rank 0; the other one is pretended."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if not dist.is_initialized():
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    return dist.new_group(list(ranks))


def shared_mean(*, drawn: bool, ranks: tuple[int, ...]) -> Example:
    pretended_group(ranks)
    return SharedMean(8, drawn=drawn, ranks=ranks), (torch.randn(4, 8),)


@torch.library.custom_op("hashbench_ranks::dithered", mutates_args=())
def dithered(x: torch.Tensor, drawn: bool) -> torch.Tensor:
    """Add a little noise of the system's entropy."""
    return x * (1 + (int.from_bytes(os.urandom(4), "big") / 2**32 if drawn else 0.5))


dithered.register_autograd(lambda _, gradient: (gradient, None))


class Dithered(nn.Module):
    """Add noise, of the system's entropy on one rank."""

    def __init__(self, *, drawn: bool) -> None:
        super().__init__()
        self.drawn = drawn

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return dithered(x, self.drawn)


def data_parallel(*between: nn.Module) -> DistributedDataParallel:
    """A small network whose gradients are reduced over the ranks."""
    return DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), *between, nn.Tanh(), nn.Linear(16, 4)))


def batch_of_rank() -> tuple[torch.Tensor, ...]:
    """A batch, another on every rank."""
    return (torch.randn(4, 8, generator=torch.Generator().manual_seed(dist.get_rank())),)


def noisy_rank(*, drawn: bool) -> Example:
    """One rank draws; the others have its gradients from DDP."""
    return data_parallel(Dithered(drawn=drawn and dist.get_rank() == 1)), batch_of_rank()


class FirstCome(nn.Module):
    """Rank 0 weighs the data of two others in the order in which they arrive, which changes from run to run.

    The last one waits, for a while at most, until the first has been received.
    """

    def __init__(self, features: int, *, named: bool) -> None:
        super().__init__()
        self.mix = nn.Linear(features, features)
        self.named, self.turns, self.calls = named, next(_BUILT), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.mix(x)
        weighed = self.gathered(hidden.detach().mean(0) + dist.get_rank())
        dist.broadcast(weighed, 0)
        return torch.tanh(hidden) * weighed

    def gathered(self, share: torch.Tensor) -> torch.Tensor:
        store, received = dist.distributed_c10d._get_default_store(), f"received{self.calls}"
        last = 1 + (self.turns >> self.calls) % 2
        self.calls += 1
        dist.barrier()
        if dist.get_rank() == 0:
            parts = [torch.empty_like(share) for _ in range(2)]
            for source, part in enumerate(parts, start=1):
                dist.recv(part, src=source if self.named else None)
                store.set(received, "")
            return parts[0] + 2 * parts[1]
        if dist.get_rank() == last:
            with contextlib.suppress(RuntimeError):
                store.wait([received], timedelta(seconds=1))
        dist.send(share, 0)
        return torch.empty_like(share)


def first_come(*, named: bool) -> Example:
    return FirstCome(8, named=named), batch_of_rank()


class EarlyReader(nn.Module):
    """Rank 0 adds up a mean over the ranks, in the background, and reads it before rank 1 has given its part."""

    def __init__(self, features: int, *, waits: bool) -> None:
        super().__init__()
        self.mix = nn.Linear(features, features)
        self.waits, self.calls = waits, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        store, read = dist.distributed_c10d._get_default_store(), f"read{self.calls}"
        self.calls += 1
        mean = x.detach().mean(0)
        dist.barrier()
        if dist.get_rank() == 1 and not self.waits:
            with contextlib.suppress(RuntimeError):
                store.wait([read], timedelta(seconds=1))
        work = dist.all_reduce(mean, async_op=True)
        if self.waits or dist.get_rank() == 1:
            work.wait()
        centred = x - mean / dist.get_world_size()
        if dist.get_rank() == 0:
            store.set(read, "")
        work.wait()
        return torch.tanh(self.mix(centred))


def early_reader(*, waits: bool) -> Example:
    return EarlyReader(8, waits=waits), batch_of_rank()


class Unsynced(nn.Module):
    """Replicas that every rank trains on its own batch, without reducing their gradients."""

    def __init__(self, *, synced: bool) -> None:
        super().__init__()
        self.replica = data_parallel()
        self.synced = synced

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with contextlib.nullcontext() if self.synced else self.replica.no_sync():
            return self.replica(x)


def unsynced_replica(*, synced: bool) -> Example:
    return Unsynced(synced=synced), batch_of_rank()


class LateHead(nn.Module):
    """Initialize the last layer in the first step, from a seed of the rank."""

    def __init__(self, *, own: bool) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 16), nn.Linear(16, 4)
        self.seed, self.drawn = dist.get_rank() if own else 0, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.drawn:
            torch.manual_seed(self.seed)
            nn.init.uniform_(self.head.weight)
            self.drawn = True
        return self.head(torch.tanh(self.body(x)))


def late_head(*, own: bool) -> Example:
    return DistributedDataParallel(LateHead(own=own)), batch_of_rank()


MODELS = {
    "shared_mean": lambda: shared_mean(drawn=True, ranks=(0, 1)),
    "shared_mean_twin": lambda: shared_mean(drawn=False, ranks=(0, 1)),
    "lone_mean": lambda: shared_mean(drawn=True, ranks=(0,)),
    "lone_mean_twin": lambda: shared_mean(drawn=False, ranks=(0,)),
    "noisy_rank": lambda: noisy_rank(drawn=True),
    "noisy_rank_twin": lambda: noisy_rank(drawn=False),
    "first_come": lambda: first_come(named=False),
    "first_come_twin": lambda: first_come(named=True),
    "early_reader": lambda: early_reader(waits=False),
    "early_reader_twin": lambda: early_reader(waits=True),
    "unsynced_replica": lambda: unsynced_replica(synced=False),
    "unsynced_replica_twin": lambda: unsynced_replica(synced=True),
    "late_head": lambda: late_head(own=True),
    "late_head_twin": lambda: late_head(own=False),
}
