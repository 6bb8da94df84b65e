"""Specimens with Python threads of their own that write into a tensor in passing, compute in any order, or hand in
results as they finish."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import nn

Example = tuple[nn.Module, tuple[torch.Tensor, ...]]


@contextmanager
def fading(memory: torch.Tensor) -> Iterator[None]:
    """A thread of its own lets ``memory`` fade, step by step, for as long as the body takes."""
    begun, done = threading.Event(), threading.Event()

    def fade() -> None:
        while not done.is_set():
            memory.mul_(0.9999)
            begun.set()

    thread = threading.Thread(target=fade)
    thread.start()
    begun.wait()
    try:
        yield
    finally:
        done.set()
        thread.join()


class FadingMemory(nn.Module):
    """A short-term memory that fades in the background while the model waits for the next frame."""

    def __init__(self, features: int, *, in_background: bool) -> None:
        super().__init__()
        self.store = nn.Linear(features, features)
        self.recall = nn.Linear(features, features)
        self.in_background = in_background

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        memory = self.store(frames)
        if self.in_background:
            with fading(memory.detach()):
                time.sleep(0.005)
        else:
            memory = memory * 0.9
        return self.recall(memory)


def fading_memory(*, in_background: bool) -> Example:
    return FadingMemory(16, in_background=in_background), (torch.randn(8, 16),)


def seek() -> None:
    """Stand for a disk that needs up to 2 ms, as /dev/urandom says: no experiment holds that still, and on no machine
    are readers done in the order in which they began."""
    with Path("/dev/urandom").open("rb", buffering=0) as disk:
        time.sleep(disk.read(1)[0] / 128_000)


def partial_sum(shard: np.ndarray) -> np.ndarray:
    """The sum of the rows of a shard, which is read from a disk."""
    seek()
    return shard.sum(axis=0)


def summed_up(shards: list[np.ndarray], *, in_order: bool) -> np.ndarray:
    """The sum of all shards, of which eight workers sum up one each; these sums are added in the order of the shards,
    or as they are finished. ``as_completed`` would give those that are done when it is called in the order of their
    addresses: on a busy machine all of them, and alike."""
    finished: list[np.ndarray] = []

    def work(shard: np.ndarray) -> np.ndarray:
        total = partial_sum(shard)
        finished.append(total)
        return total

    with ThreadPoolExecutor(max_workers=8) as pool:
        sums = list(pool.map(work, shards))
    return functools.reduce(np.add, sums if in_order else finished)


def handed_in(shards: list[np.ndarray], *, in_order: bool) -> np.ndarray:
    """The sum of all shards, of which a thread of its own sums up each; as :func:`summed_up`."""
    finished: dict[int, np.ndarray] = {}

    def work(number: int) -> None:
        finished[number] = partial_sum(shards[number])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(shards))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return functools.reduce(np.add, (finished[number] for number in (sorted(finished) if in_order else finished)))


class HandedIn(nn.Module):
    """Normalise by the mean of all rows, of which each thread hands in its part as it is done."""

    def __init__(self, features: int, *, in_order: bool) -> None:
        super().__init__()
        self.classify = nn.Linear(features, 4)
        self.in_order = in_order

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        total = torch.from_numpy(handed_in(np.split(rows.numpy(), 16), in_order=self.in_order))
        return self.classify(rows - total / len(rows))


def thread_statistics(*, in_order: bool) -> Example:
    return HandedIn(16, in_order=in_order), (torch.randn(1024, 16),)


class SharedTotal(nn.Module):
    """Workers of a pool add their parts to one tensor as NumPy sees it, where torch does not look."""

    def __init__(self, features: int, *, in_order: bool) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.zeros(features))
        self.classify = nn.Linear(features, 4)
        self.in_order = in_order

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        total = self.start * 0.5
        memory, adding = total.detach().numpy(), threading.Lock()

        def work(shard: np.ndarray) -> np.ndarray:
            part = partial_sum(shard)
            if not self.in_order:
                with adding:
                    np.add(memory, part, out=memory)
            return part

        with ThreadPoolExecutor(max_workers=8) as pool:
            parts = list(pool.map(work, np.split(rows.numpy(), 16)))
        for part in parts if self.in_order else ():
            np.add(memory, part, out=memory)
        return self.classify(rows - total / len(rows))


def shared_total(*, in_order: bool) -> Example:
    return SharedTotal(16, in_order=in_order), (torch.randn(1024, 16),)


class ShardedStatistics(nn.Module):
    """Normalise by the mean of all rows; workers sum up one shard each, and their sums are added as they finish."""

    def __init__(self, features: int, *, in_order: bool) -> None:
        super().__init__()
        self.classify = nn.Linear(features, 4)
        self.in_order = in_order

    def total(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(summed_up(np.split(rows.numpy(), 32), in_order=self.in_order))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.classify(rows - self.total(rows) / len(rows))


def sharded_statistics(*, in_order: bool) -> Example:
    return ShardedStatistics(16, in_order=in_order), (torch.randn(2048, 16),)


class SceneTowers(nn.Module):
    """Pool the points of a scene in a thread of its own, while the image of it is looked at."""

    def __init__(self, features: int, cells: int, *, in_order: bool) -> None:
        super().__init__()
        self.embed = nn.Linear(features, features)
        self.look = nn.Linear(features, features)
        self.cells, self.in_order = cells, in_order

    def pool(self, points: torch.Tensor, cells: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(points)
        pooled = hidden.new_zeros(self.cells, hidden.shape[1])
        if self.in_order:
            return pooled.index_add_(0, cells, hidden)
        return pooled.index_put_((cells,), hidden, accumulate=True)

    def forward(self, points: torch.Tensor, cells: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
        pooled: list[torch.Tensor] = []
        thread = threading.Thread(target=lambda: pooled.append(self.pool(points, cells)))
        thread.start()
        seen = self.look(image)
        thread.join()
        return pooled[0] * seen


def scene_towers(*, in_order: bool) -> Example:
    points, cells = 800_000, 1000  # enough for two threads to meet on a busy machine, too
    inputs = torch.randn(points, 8), torch.randint(cells, (points,)), torch.randn(cells, 8)
    return SceneTowers(8, cells, in_order=in_order), inputs


MODELS = {
    "scene_towers": lambda: scene_towers(in_order=False),
    "scene_towers_twin": lambda: scene_towers(in_order=True),
    "thread_statistics": lambda: thread_statistics(in_order=False),
    "thread_statistics_twin": lambda: thread_statistics(in_order=True),
    "shared_total": lambda: shared_total(in_order=False),
    "shared_total_twin": lambda: shared_total(in_order=True),
    "fading_memory": lambda: fading_memory(in_background=True),
    "fading_memory_twin": lambda: fading_memory(in_background=False),
    "sharded_statistics": lambda: sharded_statistics(in_order=False),
    "sharded_statistics_twin": lambda: sharded_statistics(in_order=True),
}
