"""Specimens that pass a plain pair nearly always and differ under stress: each shows in less than one plain pair in ten
(column ``latent``, where ``truth_latent`` says under what)."""

from __future__ import annotations

import functools
import gc
import os
import weakref
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import numpy as np
import torch
from torch import nn

Example = tuple[nn.Module, tuple[torch.Tensor, ...]]

LARGE = 10 * 2**20
"""Elements of ``float32`` that the C library always maps afresh from the system, full of zeros: 40 MiB."""

ITERATIONS = 2
"""Of a run, where nobody asks for another number."""


# ------------------------------------------------------------------------------------------------ unwritten memory


class LargeWorkspace(nn.Module):
    """Tokens summed through a workspace of which only the written rows should be read."""

    def __init__(self, features: int, *, cleared: bool) -> None:
        super().__init__()
        self.project = nn.Linear(features, features)
        self.cleared = cleared

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        make = torch.zeros if self.cleared else torch.empty
        workspace = make(LARGE // tokens.shape[1], tokens.shape[1])
        workspace[: len(tokens)] = self.project(tokens)
        return workspace[: len(tokens) + 1].sum(dim=0)  # one row too many


def large_workspace(*, cleared: bool) -> Example:
    return LargeWorkspace(32, cleared=cleared), (torch.randn(16, 32),)


class FrameStack(nn.Module):
    """The last frames of a video in one buffer; nobody has written the frames before the first one."""

    def __init__(self, *, cleared: bool) -> None:
        super().__init__()
        self.mix = nn.Conv2d(4, 2, 1)
        self.cleared = cleared

    def forward(self, frame: torch.Tensor) -> torch.Tensor:
        stack = frame.new_empty(LARGE // frame.numel(), *frame.shape)
        stack[0 if not self.cleared else slice(None)] = frame
        return self.mix(stack[:4])


def frame_stack(*, cleared: bool) -> Example:
    return FrameStack(cleared=cleared), (torch.randn(16, 16),)


@torch.library.custom_op("zoo::pack_pages", mutates_args=())
def pack_pages(rows: torch.Tensor, pages: int) -> torch.Tensor:
    """The sum of ``rows`` in pages of one row each, and of ``pages`` behind them that are never written."""
    packed = torch.empty(LARGE // rows.shape[1], rows.shape[1])
    packed[: len(rows)] = rows
    return packed[: len(rows) + pages].sum(dim=0)


class PagedSum(nn.Module):
    """Sums the pages of a cache by an operator of its own."""

    def __init__(self, features: int, *, pages: int) -> None:
        super().__init__()
        self.embed = nn.Linear(features, features)
        self.pages = pages

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return pack_pages(self.embed(rows), self.pages)


def paged_sum(*, pages: int) -> Example:
    return PagedSum(16, pages=pages), (torch.randn(8, 16),)


class _Rescaled(torch.autograd.Function):
    """Doubles; its gradient goes through a workspace of which one row is never written."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, cleared: bool) -> torch.Tensor:
        ctx.cleared = cleared
        return 2 * rows

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        make = torch.zeros if ctx.cleared else torch.empty
        workspace = make(LARGE // gradient.shape[1], gradient.shape[1])
        workspace[: len(gradient) - 1] = gradient[:-1]
        return 2 * workspace[: len(gradient)], None


class RescaledRows(nn.Module):
    """A layer whose handwritten gradient leaves out the last row."""

    def __init__(self, features: int, *, cleared: bool) -> None:
        super().__init__()
        self.embed = nn.Linear(features, features)
        self.cleared = cleared

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return _Rescaled.apply(self.embed(rows), self.cleared)


def rescaled_rows(*, cleared: bool) -> Example:
    return RescaledRows(16, cleared=cleared), (torch.randn(8, 16),)


class SensorScratch(nn.Module):
    """Reads a window from scratch memory of NumPy's, which holds nothing yet."""

    def __init__(self, samples: int, *, cleared: bool) -> None:
        super().__init__()
        self.detect = nn.Linear(samples, 2)
        self.cleared = cleared

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        make = np.zeros if self.cleared else np.empty
        scratch = torch.from_numpy(make(LARGE, dtype=np.float32)[: samples.numel()].copy())
        return self.detect(samples + scratch)


def sensor_scratch(*, cleared: bool) -> Example:
    return SensorScratch(32, cleared=cleared), (torch.randn(32),)


# -------------------------------------------------------------------------------------------------- string hashes

_BRANCHES = ("audio", "depth", "event", "image", "lidar", "radar", "sonar", "text")


class BranchFusion(nn.Module):
    """Branches joined in the order of a collection of their names."""

    def __init__(self, features: int, *, names: Callable[[Collection[str]], Collection[str]]) -> None:
        super().__init__()
        self.branches = nn.ModuleDict({name: nn.Linear(features, features) for name in _BRANCHES})
        self.names = names

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        for name in self.names(_BRANCHES):
            features = features + torch.tanh(self.branches[name](features))
        return features


def branch_fusion(*, names: Callable[[Collection[str]], Collection[str]]) -> Example:
    return BranchFusion(16, names=names), (torch.randn(4, 16),)


class HashedVocabulary(nn.Module):
    """Words without an entry share rows of an embedding, by their hash."""

    def __init__(self, rows: int, features: int, *, hashed: Callable[[str], int]) -> None:
        super().__init__()
        self.embed = nn.Embedding(rows, features)
        self.hashed = hashed

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        for name in _BRANCHES:
            features = features + self.embed.weight[self.hashed(name) % self.embed.num_embeddings]
        return features


def hashed_vocabulary(*, hashed: Callable[[str], int]) -> Example:
    return HashedVocabulary(64, 16, hashed=hashed), (torch.randn(4, 16),)


# ----------------------------------------------------------------------------------------------- garbage collector


class _Entry:
    """An entry of a cache that refers to itself, so that only the garbage collector removes it."""

    def __init__(self, *, cyclic: bool) -> None:
        self.neighbours = [self] if cyclic else []


class EntryCache(nn.Module):
    """Scales by how many entries of a weak cache are alive, dropped ones among them where they are in cycles."""

    def __init__(self, features: int, *, cyclic: bool) -> None:
        super().__init__()
        self.project = nn.Linear(features, features)
        self.cyclic = cyclic

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        gc.collect(0)  # the next collection comes 700 objects later, unless another threshold is set
        cache: weakref.WeakSet[_Entry] = weakref.WeakSet()
        for _ in range(16):
            cache.add(_Entry(cyclic=self.cyclic))
        return self.project(features) * (1.0 + len(cache))


def entry_cache(*, cyclic: bool) -> Example:
    return EntryCache(16, cyclic=cyclic), (torch.randn(4, 16),)


class _Loan:
    """A number on loan from a pool, given back when the garbage collector removes it."""

    def __init__(self, pool: list[float]) -> None:
        self.pool = pool
        self.own: _Loan | None = self

    def __del__(self) -> None:
        self.pool.append(0.5)


class LoanPool(nn.Module):
    """Adds up what a pool holds, whose loans are given back at once, or when the garbage collector finds them."""

    def __init__(self, features: int, *, at_once: bool) -> None:
        super().__init__()
        self.project = nn.Linear(features, features)
        self.at_once = at_once

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        gc.collect(0)  # as in EntryCache
        pool: list[float] = []
        for _ in range(16):
            loan = _Loan(pool)
            if self.at_once:
                loan.own = None  # no cycle any more
        return self.project(features) + sum(pool)


def loan_pool(*, at_once: bool) -> Example:
    return LoanPool(16, at_once=at_once), (torch.randn(4, 16),)


# ------------------------------------------------------------------------------------------------- state of a process


class ProcessShard(nn.Module):
    """Begins with the shard that belongs to its process."""

    def __init__(self, shards: int, features: int, *, number: Callable[[], int]) -> None:
        super().__init__()
        self.shards = nn.Parameter(torch.randn(shards, features))
        self.number = number

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return features * self.shards[self.number() % len(self.shards)]


def process_shard(*, number: Callable[[], int]) -> Example:
    return ProcessShard(1009, 16, number=number), (torch.randn(4, 16),)


_SEEN: list[int] = []
"""State that survives a run: the lengths of the inputs that were seen."""


class TunedWindow(nn.Module):
    """Takes another window with every run of the process, once it has seen the inputs of three."""

    def __init__(self, *, tuned: bool) -> None:
        super().__init__()
        self.mix = nn.Conv1d(1, 1, 3, padding=1)
        self.tuned = tuned

    def forward(self, signal: torch.Tensor) -> torch.Tensor:
        _SEEN.append(signal.shape[-1])
        further = max(0, len(_SEEN) - 3 * ITERATIONS) if self.tuned else 0
        width = 2 + further % 7
        return nn.functional.avg_pool1d(self.mix(signal), width).mean(dim=-1)


def tuned_window(*, tuned: bool) -> Example:
    return TunedWindow(tuned=tuned), (torch.randn(2, 1, 64),)


# --------------------------------------------------------------------------------------------------------- threads


@torch.library.custom_op("zoo::sum_shares", mutates_args=())
def sum_shares(rows: torch.Tensor) -> torch.Tensor:
    """The sum of ``rows``: each thread sums a share, and the shares are added as they are done. Of two shares the order
    does not matter; of more it does."""
    threads = torch.get_num_threads()
    with ThreadPoolExecutor(threads) as pool:
        shares = [pool.submit(share.sum, dim=0) for share in rows.chunk(threads)]
        return functools.reduce(torch.add, (share.result() for share in as_completed(shares)))


@torch.library.custom_op("zoo::sum_shares_in_order", mutates_args=())
def sum_shares_in_order(rows: torch.Tensor) -> torch.Tensor:
    """The same, with the shares added in their order."""
    threads = torch.get_num_threads()
    with ThreadPoolExecutor(threads) as pool:
        return functools.reduce(torch.add, pool.map(lambda share: share.sum(dim=0), rows.chunk(threads)))


class SharedSum(nn.Module):
    """The mean of many embedded rows, by an operator that shares them out among threads."""

    def __init__(self, features: int, *, in_order: bool) -> None:
        super().__init__()
        self.embed = nn.Linear(features, features)
        self.in_order = in_order

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            embedded = self.embed(rows)
            return sum_shares_in_order(embedded) if self.in_order else sum_shares(embedded)


def shared_sum(*, in_order: bool) -> Example:
    return SharedSum(16, in_order=in_order), (torch.randn(2**16, 16),)


def length_of(text: str) -> int:
    return 7 * len(text)


MODELS = {
    "large_workspace": lambda: large_workspace(cleared=False),
    "large_workspace_twin": lambda: large_workspace(cleared=True),
    "frame_stack": lambda: frame_stack(cleared=False),
    "frame_stack_twin": lambda: frame_stack(cleared=True),
    "paged_sum": lambda: paged_sum(pages=2),
    "paged_sum_twin": lambda: paged_sum(pages=0),
    "branch_fusion": lambda: branch_fusion(names=set),
    "branch_fusion_twin": lambda: branch_fusion(names=sorted),
    "hashed_vocabulary": lambda: hashed_vocabulary(hashed=hash),
    "hashed_vocabulary_twin": lambda: hashed_vocabulary(hashed=length_of),
    "entry_cache": lambda: entry_cache(cyclic=True),
    "entry_cache_twin": lambda: entry_cache(cyclic=False),
    "loan_pool": lambda: loan_pool(at_once=False),
    "loan_pool_twin": lambda: loan_pool(at_once=True),
    "rescaled_rows": lambda: rescaled_rows(cleared=False),
    "rescaled_rows_twin": lambda: rescaled_rows(cleared=True),
    "sensor_scratch": lambda: sensor_scratch(cleared=False),
    "sensor_scratch_twin": lambda: sensor_scratch(cleared=True),
    "process_shard": lambda: process_shard(number=os.getpid),
    "process_shard_twin": lambda: process_shard(number=lambda: 7),
    "tuned_window": lambda: tuned_window(tuned=True),
    "tuned_window_twin": lambda: tuned_window(tuned=False),
    "shared_sum": lambda: shared_sum(in_order=False),
    "shared_sum_twin": lambda: shared_sum(in_order=True),
}
