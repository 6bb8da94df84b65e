"""What ``hashbench.watch`` costs: a training step with and without it, in processor time of one thread.

Steps with and without it take turns in one process, on one model. A round is as many steps as lie between two in which
all tensors are read; the figure is the median over the rounds.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

import hashbench
from benchmarks.table import Table, against
from benchmarks.workloads import TrainingStep, Transformer, bert_like, gpt2_like, resnet18, step_of

GOAL = 0.01
EVERY = 16
_WARM_UPS = 1


def _bert_of_sentences() -> TrainingStep:
    """4 layers, 128 wide, 8×64 tokens, AdamW."""
    step = step_of(Transformer(128, heads=2, causal=False), torch.randint(0, 1000, (8, 64)))
    return TrainingStep(step.model, step.example, torch.optim.AdamW(step.model.parameters()))


WORKLOADS: dict[str, Callable[[], TrainingStep]] = {
    "resnet18, batch 8": resnet18,
    "GPT-2-like, 4 layers, 256 wide, 2x128": gpt2_like,
    "BERT-like, 4 layers, 128 wide, 8x64, AdamW": _bert_of_sentences,
    "BERT-like, 4 layers, 128 wide, 1x32": bert_like,
}


def _timed(step: TrainingStep) -> float:
    begin = time.process_time()
    step()
    return time.process_time() - begin


def shares(step: TrainingStep, folder: Path, *, seconds: float, fewest: int = 3) -> tuple[list[float], float, float]:
    """Return the share of a step that watching adds, round by round; seconds of a step; bytes of a line."""
    draw, added, base = random.Random(0), [], []
    watch = hashbench.watch(folder, model=step.model, optimizer=step.optimizer, every=EVERY)
    watch.start()
    step()
    end = 0.0
    for number in range(100_000):
        if number == _WARM_UPS:
            end = time.perf_counter() + seconds
        taken = {True: 0.0, False: 0.0}
        for _ in range(EVERY):
            for watched in draw.sample([True, False], 2):
                watch.remove()
                if watched:
                    watch.install()
                taken[watched] += _timed(step)
        if number >= _WARM_UPS:
            added.append(taken[True] / taken[False] - 1)
            base.append(taken[False] / EVERY)
        if number >= _WARM_UPS + fewest - 1 and time.perf_counter() > end:
            break
    watch.stop()
    lines = (folder / "rank0.jsonl").read_bytes().splitlines()
    return added, statistics.median(base), sum(map(len, lines[3:])) / len(lines[3:])


def measure(*, seconds: float = 60.0) -> list[Table]:
    """Measure each workload for about this long, with one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    rows = []
    try:
        for name, make in WORKLOADS.items():
            torch.manual_seed(0)
            with tempfile.TemporaryDirectory() as folder:
                added, step, size = shares(make(), Path(folder), seconds=seconds)
            figure = statistics.median(added)
            cells = against(100 * figure, goal=100 * GOAL, unit=" %")
            rows.append((name, f"{1000 * step:.1f} ms", len(added), *cells, f"{size:.0f}"))
    finally:
        torch.set_num_threads(threads)
    headers = ("workload", "step", "rounds", "added", "goal", "reached", "bytes a step")
    return [Table("Cost of hashbench.watch", headers, tuple(rows))]


if __name__ == "__main__":
    for table in measure():
        print(table.text())
