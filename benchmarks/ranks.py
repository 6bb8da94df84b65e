"""What recording costs on two ranks: steps of a small transformer under DDP, FSDP2 and TP, with and without it.

Each rank is a process of one thread. All ranks run the same arms in the same order, a block of steps each, so that what
else happens on the machine meets all arms alike.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.overhead import interleaved, ratio
from benchmarks.table import Table, against
from hashbench import HashDebugTrace

RANKS, LAYERS, WIDTH, HEADS, BATCH, TOKENS = 2, 4, 128, 4, 4, 32
BLOCK = 3
"""Steps that are recorded together."""

TOTAL_GOAL, CONTRIBUTIONS_GOAL, BYTES_GOAL = 1.30, 0.03, 40.0
_REPETITIONS = 25
UNTRACED, TRACED, RECORDED, WITHOUT = "untraced", "traced", "recorded", "without contributions"

Step = Callable[[], None]


class Layer(nn.Module):
    """Attention and a feed-forward network, whose heads may lie on several ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.first, self.second = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norm, self.last = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        split = (-1, WIDTH // HEADS)
        parts = [part(x).unflatten(-1, split).transpose(1, 2) for part in (self.query, self.key, self.value)]
        attended = nn.functional.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2)
        x = self.norm(x + self.out(attended))
        last: torch.Tensor = self.last(x + self.second(nn.functional.gelu(self.first(x))))
        return last


def _data_parallel(model: nn.Sequential) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def _fully_sharded(model: nn.Sequential) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


def _tensor_parallel(model: nn.Sequential) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    columns, rows = ("query", "key", "value", "first"), ("out", "second")
    for layer in model:
        plan = {**{name: ColwiseParallel() for name in columns}, **{name: RowwiseParallel() for name in rows}}
        parallelize_module(layer, mesh, plan)
    return model


WORKLOADS: Mapping[str, Callable[[nn.Sequential], nn.Module]] = {
    "DDP": _data_parallel,
    "FSDP2": _fully_sharded,
    "TP": _tensor_parallel,
}


def block_of(wrap: Callable[[nn.Sequential], nn.Module], *, rank: int) -> Step:
    """Return a block of training steps of a model that the ranks share."""
    torch.manual_seed(0)
    model = wrap(nn.Sequential(*[Layer() for _ in range(LAYERS)]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(BATCH, TOKENS, WIDTH, generator=torch.Generator().manual_seed(rank))

    def run() -> None:
        for _ in range(BLOCK):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

    return run


@contextlib.contextmanager
def recorded(folder: Path, *, contributions: bool = True) -> Iterator[None]:
    """Record this rank; without contributions, what it gives is not hashed."""
    from hashbench.core.trace.digest import PENDING
    from hashbench.extensions.ranks.record import record_ranks

    def unread(tensor: torch.Tensor, _: object) -> tuple[object, ...]:
        return tensor.dtype, tuple(tensor.shape), None, PENDING

    with contextlib.ExitStack() as stack:
        if not contributions:
            stack.enter_context(mock.patch("hashbench.core.trace.collectives.digest_unless_in_flight", unread))
        stack.enter_context(record_ranks(folder))
        yield


def _seconds(clock: Callable[[], float], arm: Callable[[], AbstractContextManager[object]], step: Step) -> float:
    dist.barrier()
    begin = clock()
    with arm():
        step()
    return clock() - begin


def measure_rank(rank: int, folder: str, repetitions: int) -> None:
    """Measure all workloads on one rank; write the seconds of each clock and arm to a file."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    into = Path(folder, "recording")
    arms: dict[str, Callable[[], AbstractContextManager[object]]] = {
        UNTRACED: contextlib.nullcontext,
        TRACED: partial(HashDebugTrace, tracer="native"),
        RECORDED: partial(recorded, into),
        WITHOUT: partial(recorded, into, contributions=False),
    }
    taken: dict[str, object] = {}
    for name, wrap in WORKLOADS.items():
        step = block_of(wrap, rank=rank)
        # Zero seconds: all ranks make the same number of repetitions.
        clocks = {"wall": time.perf_counter, "processor": time.process_time}
        taken[name] = {
            clock: interleaved(step, seconds=0, arms=arms, timed=partial(_seconds, how), fewest=repetitions)
            for clock, how in clocks.items()
        }
        with recorded(into):
            step()
        taken[f"{name} size"] = size_of(into / f"rank{rank}.log.gz")
    Path(folder, f"rank{rank}.json").write_text(json.dumps(taken))
    dist.barrier()
    dist.destroy_process_group()


def size_of(path: Path) -> tuple[int, int, int]:
    """Return the bytes on disk and as text of a rank's file, and the number of its records."""
    content = path.read_bytes()
    text = gzip.decompress(content)
    return len(content), len(text), sum(line.startswith(b"op\t") for line in text.splitlines())


def measure(*, repetitions: int = _REPETITIONS) -> list[Table]:
    """Recording by the untraced step, the share of contributions, and the size on disk."""
    with tempfile.TemporaryDirectory(prefix="hashbench-bench-") as folder:
        torch.multiprocessing.spawn(measure_rank, (folder, repetitions), nprocs=RANKS)
        taken = [json.loads(Path(folder, f"rank{rank}.json").read_text()) for rank in range(RANKS)]
    return [_overhead(taken), _sizes(taken)]


def _overhead(taken: list[dict[str, dict[str, dict[str, list[float]]]]]) -> Table:
    rows: list[tuple[object, ...]] = []
    for name in WORKLOADS:
        for clock in ("wall", "processor"):
            # The slowest rank is what a step takes: both wait for it.
            arms = {
                arm: [max(both) for both in zip(*(rank[name][clock][arm] for rank in taken), strict=True)]
                for arm in (UNTRACED, TRACED, RECORDED, WITHOUT)
            }
            total = ratio(arms[RECORDED], arms[UNTRACED])
            share = statistics.median(
                (whole - less) / base
                for whole, less, base in zip(arms[RECORDED], arms[WITHOUT], arms[UNTRACED], strict=True)
            )
            step = statistics.median(arms[UNTRACED]) / BLOCK
            rows.append(
                (
                    f"{name}, {clock} time",
                    f"{step * 1e3:.1f} ms",
                    f"{ratio(arms[TRACED], arms[UNTRACED]):.3g}",
                    *against(total, goal=TOTAL_GOAL),
                    *against(share, goal=CONTRIBUTIONS_GOAL),
                    len(arms[UNTRACED]),
                )
            )
    return Table(
        title=f"Recording {RANKS} ranks of a {LAYERS}-layer transformer, {WIDTH} wide, {BATCH}x{TOKENS}",
        headers=(
            *("workload", "untraced step", "traced / untraced", "recorded / untraced", "goal", "reached"),
            *("added by contributions / untraced", "goal", "reached", "repetitions"),
        ),
        rows=tuple(rows),
        notes=(
            f"Medians of ratios within one repetition of {BLOCK} steps. Recorded: records are built and written "
            "in that time; traced: not even built.",
        ),
    )


def _sizes(taken: list[dict[str, tuple[int, int, int]]]) -> Table:
    rows: list[tuple[object, ...]] = []
    for name in WORKLOADS:
        on_disk, text, records = taken[0][f"{name} size"]
        figures = against(on_disk / records, goal=BYTES_GOAL, unit=" B")
        rows.append((name, records // BLOCK, f"{text / records:.0f} B", *figures))
    return Table(
        title="Size of a rank's recording",
        headers=("workload", "records a step", "text a record", "on disk a record", "goal", "reached"),
        rows=tuple(rows),
    )
