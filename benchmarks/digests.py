"""How fast digests are made on the CPU, beside a plain read of the same bytes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from benchmarks.table import Table, against
from hashbench.core.trace.digest import raw_digest

GOAL = 20.0
_SIZES = {"4 KiB": 2**12, "256 KiB": 2**18, "4 MiB": 2**22, "64 MiB": 2**26}


def measure() -> list[Table]:
    """GB/s by size: hashbench's digest, ``numpy.sum`` and ``torch.sum`` over the same bytes, ``torch.hash_tensor``."""
    rows = []
    for label, size in _SIZES.items():
        tensor = torch.randint(0, 256, (size,), dtype=torch.uint8)
        words, array = tensor.view(torch.int64), tensor.numpy().view("uint64")
        speeds = _interleaved(
            [
                lambda tensor=tensor: raw_digest(tensor),
                lambda array=array: array.sum(),
                lambda words=words: words.sum(),
                lambda words=words: torch.hash_tensor(words),
            ],
            size=size,
        )
        goal = against(speeds[0], goal=GOAL, at_most=False) if size == 2**26 else (f"{speeds[0]:.3g}", "", "")
        rows.append((label, *goal, *(f"{speed:.3g}" for speed in speeds[1:])))
    return [
        Table(
            title="Digests on the CPU, GB/s",
            headers=("size", "hashbench", "goal", "reached", "numpy.sum", "torch.sum", "torch.hash_tensor"),
            rows=tuple(rows),
            notes=("The two sums show what the machine's memory gives. A digest is made by one thread.",),
        )
    ]


def _interleaved(functions: list[Callable[[], object]], *, size: int) -> list[float]:
    calls, repetitions = max(1, 2**22 // size), 30
    taken: list[list[float]] = [[] for _ in functions]
    for _ in range(repetitions):
        for function, times in zip(functions, taken, strict=True):
            begin = time.perf_counter()
            for _ in range(calls):
                function()
            times.append(time.perf_counter() - begin)
    return [size * calls / statistics.median(times) / 1e9 for times in taken]
