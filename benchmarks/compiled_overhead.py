"""What tracing costs compiled code: one training step with and without it, in processor time of one thread.

Processor time, and the median of ratios of neighbouring steps, because other programs run on the machine as well.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch

from benchmarks.table import Table, against
from hashbench import HashDebugTrace

GOALS = {"BERT-like, 4 layers, 128 wide, 8x64": 1.4, "resnet18, 2x3x64x64": 1.2}
_WARM_UPS = 3


class Layer(torch.nn.Module):
    """Attention and a feed-forward network, each with a layer norm behind it."""

    def __init__(self, wide: int = 128, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (torch.nn.Linear(wide, wide) for _ in range(4))
        self.first, self.second = torch.nn.Linear(wide, 4 * wide), torch.nn.Linear(4 * wide, wide)
        self.norm, self.last = torch.nn.LayerNorm(wide), torch.nn.LayerNorm(wide)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        each = [part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.query, self.key, self.value)]
        attended = torch.nn.functional.scaled_dot_product_attention(*each).transpose(1, 2).flatten(2)
        x = self.norm(x + self.out(attended))
        last: torch.Tensor = self.last(x + self.second(torch.nn.functional.gelu(self.first(x))))
        return last


def _bert() -> Callable[[], object]:
    layers = [Layer() for _ in range(4)]
    model = torch.nn.Sequential(torch.nn.Embedding(1000, 128), *layers, torch.nn.Linear(128, 1000))
    return _trained(model, torch.randint(0, 1000, (8, 64)))


def _resnet() -> Callable[[], object]:
    import torchvision

    return _trained(torchvision.models.resnet18(), torch.randn(2, 3, 64, 64))


WORKLOADS: Mapping[str, Callable[[], Callable[[], object]]] = dict(zip(GOALS, (_bert, _resnet), strict=True))


def _trained(model: torch.nn.Module, x: torch.Tensor) -> Callable[[], object]:
    compiled = torch.compile(model)

    def step() -> None:
        model.zero_grad()
        compiled(x).square().mean().backward()

    return step


def ratios(step: Callable[[], object], *, rounds: int) -> list[float]:
    """Return the processor time of a traced step by that of the untraced one before it."""
    found = []
    for _ in range(rounds):
        start = time.process_time()
        step()
        untraced = time.process_time()
        with HashDebugTrace():
            step()
        found.append((time.process_time() - untraced) / (untraced - start))
    return found


def measure(*, seconds: float = 60.0) -> list[Table]:
    """Measure each workload for about this long, with one thread: kernels are generated for a number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    rows = []
    try:
        for name, make in WORKLOADS.items():
            torch.manual_seed(0)
            torch._dynamo.reset()
            step = make()
            ratios(step, rounds=_WARM_UPS)
            start = time.monotonic()
            step()
            rounds = max(10, int(seconds / (time.monotonic() - start) / 3))
            found = statistics.median(ratios(step, rounds=rounds))
            rows.append((name, rounds, *against(found, goal=GOALS[name])))
    finally:
        torch.set_num_threads(threads)
    return [Table("Compiled code, traced by untraced", ("workload", "rounds", "ratio", "goal", "reached"), tuple(rows))]


if __name__ == "__main__":
    for table in measure():
        print(table.text())
