"""Specimens whose operators do what no ATen kernel does: threads, counters and sources of noise of their own."""

from __future__ import annotations

import functools
import itertools
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

Example = tuple[nn.Module, tuple[torch.Tensor, ...]]

NOISE, SILENCE = "/dev/urandom", "/dev/zero"
"""A device whose bytes are random, which no experiment can hold still, and one whose bytes are all zero."""

_CALLS = itertools.count()


def bytes_of(device: str, count: int) -> torch.Tensor:
    with Path(device).open("rb", buffering=0) as file:
        return torch.frombuffer(bytearray(file.read(count)), dtype=torch.uint8)


def partial_sum(rows: torch.Tensor) -> torch.Tensor:
    """Stand for a worker elsewhere: up to 4 ms of waiting, as the noise says, then the sum of its rows."""
    time.sleep(bytes_of(NOISE, 1).item() / 64_000)  # as long for all, they finish in one order on some machines
    return rows.sum(dim=0)


@torch.library.custom_op("zoo::reduce_rows", mutates_args=())
def reduce_rows(rows: torch.Tensor, *, in_order: bool) -> torch.Tensor:
    """The sum of the rows: workers sum up a part each, and the parts are added in the order of their completion."""
    finished: list[torch.Tensor] = []

    def work(part: torch.Tensor) -> torch.Tensor:
        total = partial_sum(part)
        finished.append(total)
        return total

    with ThreadPoolExecutor(max_workers=16) as pool:
        totals = list(pool.map(work, rows.chunk(64)))
    return functools.reduce(torch.add, totals if in_order else finished)


class ParallelReduction(nn.Module):
    """Describe a document by the sum of its words' features."""

    def __init__(self, features: int, *, in_order: bool) -> None:
        super().__init__()
        self.embed = nn.Linear(features, features)
        self.classify = nn.Linear(features, 4)
        self.in_order = in_order

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.classify(reduce_rows(self.embed(words), in_order=self.in_order))


def parallel_reduction(*, in_order: bool) -> Example:
    return ParallelReduction(64, in_order=in_order), (torch.randn(4096, 64),)


@torch.library.custom_op("zoo::dither", mutates_args=())
def dither(features: torch.Tensor, device: str) -> torch.Tensor:
    """Add noise of less than a thousandth, from a device, before the features are rounded elsewhere."""
    noise = bytes_of(device, features.numel()).view(features.shape)
    return features + noise / 256_000


class DitheredFeatures(nn.Module):
    """A classifier on dithered features."""

    def __init__(self, features: int, device: str) -> None:
        super().__init__()
        self.embed = nn.Linear(features, features)
        self.classify = nn.Linear(features, 4)
        self.device = device

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.classify(dither(self.embed(features), self.device))


def dithered_features(device: str) -> Example:
    return DitheredFeatures(16, device), (torch.randn(8, 16),)


@torch.library.custom_op("zoo::shrink", mutates_args=())
def shrink(features: torch.Tensor, device: str) -> torch.Tensor:
    """Zero what is small. The zeros keep the sign that the last rounding left, which depends on a device's noise."""
    upwards = bytes_of(device, features.numel()).view(features.shape) % 2 == 1
    zeros = torch.where(upwards, 0.0, -0.0)
    return torch.where(features.abs() < 0.5, zeros, features)


class SoftShrinkage(nn.Module):
    """Sparse features: a layer whose small outputs become zero, of either sign."""

    def __init__(self, features: int, device: str) -> None:
        super().__init__()
        self.embed = nn.Linear(features, features)
        self.device = device

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return shrink(self.embed(features), self.device)


def soft_shrinkage(device: str) -> Example:
    # So many zeros that two runs hardly ever have equally many negative ones: the same values in different places.
    return SoftShrinkage(16, device), (torch.randn(8192, 16),)


@torch.library.custom_op("zoo::anneal", mutates_args=())
def anneal(scores: torch.Tensor, calls: int) -> torch.Tensor:
    """Sharpen scores more with every call of the process, or as if ``calls`` had been made before (-1: unknown)."""
    return scores * (1.0 + 0.01 * (next(_CALLS) if calls < 0 else calls))


class AnnealedGate(nn.Module):
    """A gate that opens and shuts more firmly the longer it is in use; it may count its uses itself."""

    def __init__(self, features: int, *, counted_here: bool) -> None:
        super().__init__()
        self.score = nn.Linear(features, features)
        self.counted_here, self.uses = counted_here, 0

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        self.uses += 1
        return features * torch.sigmoid(anneal(self.score(features), self.uses if self.counted_here else -1))


def annealed_gate(*, counted_here: bool) -> Example:
    return AnnealedGate(16, counted_here=counted_here), (torch.randn(8, 16),)


class FastPathPooling(nn.Module):
    """Sum the features of each region; a debugger gets the plain formula, nobody else does.

    The fast path adds in any order. It is left as soon as any dispatch mode is active, as some formulas of torch's are.
    """

    def __init__(self, features: int, regions: int, *, fast: bool) -> None:
        super().__init__()
        self.embed = nn.Linear(features, features)
        self.regions, self.fast = regions, fast

    def forward(self, points: torch.Tensor, region: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(points)
        pooled = hidden.new_zeros(self.regions, hidden.shape[1])
        if self.fast and _get_current_dispatch_mode() is None:
            return pooled.index_put((region,), hidden, accumulate=True)
        return pooled.index_add(0, region, hidden)


def fast_path_pooling(*, fast: bool) -> Example:
    points, regions = 400_000, 1000
    return FastPathPooling(8, regions, fast=fast), (torch.randn(points, 8), torch.randint(regions, (points,)))


MODELS = {
    "parallel_reduction": lambda: parallel_reduction(in_order=False),
    "parallel_reduction_twin": lambda: parallel_reduction(in_order=True),
    "dithered_features": lambda: dithered_features(NOISE),
    "dithered_features_twin": lambda: dithered_features(SILENCE),
    "soft_shrinkage": lambda: soft_shrinkage(NOISE),
    "soft_shrinkage_twin": lambda: soft_shrinkage(SILENCE),
    "annealed_gate": lambda: annealed_gate(counted_here=False),
    "annealed_gate_twin": lambda: annealed_gate(counted_here=True),
    "fast_path_pooling": lambda: fast_path_pooling(fast=True),
    "fast_path_pooling_twin": lambda: fast_path_pooling(fast=False),
}
