"""Random programs of which the item axis is known by construction, and a runner of them.

All numbers are small whole ones, so that every sum is exact and every op gives an item the same in any batch, but for
the one that is planted: ``hashbench_batch::plant`` adds 1 where it is told that the batch is large.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional

from hashbench.core.records import Failure, op_of
from hashbench.core.run import leaves
from hashbench.core.run.outcome import Run, add_result
from hashbench.core.run.rng import reset_rng_state
from hashbench.core.trace.api import HashDebugTrace
from hashbench.core.trace.callbacks import TraceCallback
from hashbench.core.trace.digest import unobserved
from hashbench.extensions.invariance.batch_items import compare_items, item_rows
from hashbench.extensions.invariance.finding import BatchFinding, RowComparison, find_sources
from hashbench.extensions.invariance.layout import ItemSubset
from hashbench.extensions.invariance.locate import RowsCompared, RunAt, compare_rows, finding_of

PLANTED = "hashbench_batch.plant.default"

_large = [False]
_wrong = [False]


@torch.library.custom_op("hashbench_batch::plant", mutates_args=())
def plant(x: torch.Tensor) -> torch.Tensor:
    """``x``, or ``x + 1`` while the batch is large."""
    return x + 1 if _large[0] else x.clone()


@torch.library.custom_op("hashbench_batch::by_expert", mutates_args=())
def by_expert(rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """The product of each group of rows, which ends where ``ends`` says, with its own matrix; while the batch is large
    and :data:`wrong_experts` is true, with 1 added."""
    starts = [0, *ends.tolist()]
    made = [rows[start:end] @ w for start, end, w in zip(starts, starts[1:], weights, strict=False)]
    return torch.cat(made) + (1 if _large[0] and _wrong[0] else 0)


@contextlib.contextmanager
def wrong_experts() -> Any:
    """The op by expert adds while the batch is large."""
    _wrong[0] = True
    try:
        yield
    finally:
        _wrong[0] = False


@contextlib.contextmanager
def large_batch(large: bool) -> Any:
    """Whether the planted op adds."""
    _large[0] = large
    try:
        yield
    finally:
        _large[0] = False


def runner(
    function: Callable[..., Any],
    inputs: Mapping[str, torch.Tensor],
    *,
    batch: int,
    above: int = 10**9,
    tracer: str = "auto",
) -> RunAt:
    """Runs ``function`` on the first so many items of ``inputs``; those whose first dimension is no batch are given as
    they are. The planted op adds where the batch is larger than ``above``."""

    module = function if isinstance(function, torch.nn.Module) else None

    def run_at(size: int, callback: TraceCallback) -> Run | Failure:
        given = {
            name: tensor[:size].contiguous() if tensor.shape[:1] == (batch,) else tensor
            for name, tensor in inputs.items()
        }
        reset_rng_state(0)
        trace = HashDebugTrace(model=module, inputs=given, watcher=callback, tracer=tracer)
        results: dict[str, Any] = {}
        with torch.no_grad(), trace, large_batch(size > above):
            trace.iteration = 0
            output = function(**given)
            with unobserved():
                found = [*leaves.leaves(output, "output")]
            for name, value in found:
                add_result(results, trace, name, value, copied=True)
        return Run(trace.finish(), results)

    return run_at


def compared_runs(run_at: RunAt, subset: ItemSubset) -> RowsCompared:
    """Two runs compared call by call; what differs are outputs whose first dimension is the batch."""
    found = compare_rows(run_at, subset)
    assert not isinstance(found, Failure)
    whole, part = (run.results for run in found.runs)
    difference = compare_items(whole, part, item_rows(subset.batch, subset.size)).difference
    names = () if difference is None else difference.names
    return replace(found, comparison=find_sources(found.comparison.runs, names))


Plant = Callable[[torch.Tensor], torch.Tensor]
Segment = Callable[[torch.Tensor, Plant], torch.Tensor]


class _Weights:
    """Small whole numbers that do not depend on the batch."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.square = torch.randint(-2, 3, (8, 8), generator=generator).float()
        self.experts = torch.randint(-2, 3, (3, 8, 8), generator=generator).float()
        self.token = torch.randint(-2, 3, (1, 1, 8), generator=generator).float()
        self.table = torch.randint(-2, 3, (7, 8), generator=generator).float()
        self.kernel = torch.randint(-1, 2, (8, 8, 3), generator=generator).float()


_W = _Weights(0)


def small(x: torch.Tensor) -> torch.Tensor:
    """So that sums stay exact."""
    return torch.remainder(x, 7)


# Each takes and gives (batch, 4, 8), and goes its own way in between.


def _elementwise(x: torch.Tensor, p: Plant) -> torch.Tensor:
    return small(p(x * 2 + 1) - 3)


def _linear(x: torch.Tensor, p: Plant) -> torch.Tensor:
    return small(p(functional.linear(x, _W.square)))


def _matrix_by_column(x: torch.Tensor, p: Plant) -> torch.Tensor:
    return small(p(_W.square @ x.flatten(0, 1).t()).t().reshape(x.shape))


def _attention(x: torch.Tensor, p: Plant) -> torch.Tensor:
    batch = x.shape[0]
    q, k, v = (p(x @ m).view(batch, 4, 2, 4).transpose(1, 2) for m in (_W.square, _W.square + 1, _W.square - 1))
    scores = small(p(torch.bmm(q.reshape(batch * 2, 4, 4), k.reshape(batch * 2, 4, 4).transpose(1, 2))))
    mixed = torch.bmm(scores, v.reshape(batch * 2, 4, 4)).view(batch, 2, 4, 4)
    return small(p(mixed.transpose(1, 2).reshape(batch, 4, 8)))


def _token(x: torch.Tensor, p: Plant) -> torch.Tensor:
    longer = p(torch.cat([_W.token.expand(x.shape[0], -1, -1), x], 1))
    return small(longer.cumsum(1)[:, 1:])


def _windows(x: torch.Tensor, p: Plant) -> torch.Tensor:
    batch = x.shape[0]
    parts = x.view(batch, 2, 2, 2, 4).permute(0, 1, 3, 2, 4).reshape(batch * 4, 2, 4)
    parts = p(parts.roll(1, 1) * 2)
    return small(parts.view(batch, 2, 2, 2, 4).permute(0, 1, 3, 2, 4).reshape(batch, 4, 8))


def _time_major(x: torch.Tensor, p: Plant) -> torch.Tensor:
    state, states = x.new_zeros(x.shape[0], 8), []
    for step in p(x.transpose(0, 1).contiguous()).unbind(0):
        state = small(step + state @ _W.square)
        states.append(state)
    return torch.stack(states).transpose(0, 1)


def _sorted_and_put_back(x: torch.Tensor, p: Plant) -> torch.Tensor:
    order = x.sum((1, 2)).argsort(stable=True)
    rows = small(p(x[order] * 3))
    return rows[order.argsort()]


def _flipped_and_put_back(x: torch.Tensor, p: Plant) -> torch.Tensor:
    return small(p(x.flip(0) + 2).flip(0))


def _ragged(x: torch.Tensor, p: Plant) -> torch.Tensor:
    rows = x.reshape(-1, 8)
    chosen = rows.sum(1) % 3 == 0
    changed = small(p(rows[chosen] @ _W.square))
    return rows.masked_scatter(chosen[:, None], changed).view_as(x)


def _ragged_index(x: torch.Tensor, p: Plant) -> torch.Tensor:
    rows = x.reshape(-1, 8)
    out = torch.zeros_like(rows)
    for kind in range(3):
        (at,) = torch.where(rows[:, 0] % 3 == kind)
        out.index_add_(0, at, small(p(rows[at] + kind)))
    return out.view_as(x)


def _items_in_a_loop(x: torch.Tensor, p: Plant) -> torch.Tensor:
    return torch.stack([small(item @ _W.square + 1) for item in p(x)])


def _items_in_two_loops(x: torch.Tensor, p: Plant) -> torch.Tensor:
    first = [item @ _W.square for item in x.unbind()]
    return small(p(torch.stack([item.t().contiguous().t() + 1 for item in first])))


def _two_views(x: torch.Tensor, p: Plant) -> torch.Tensor:
    both = p(torch.cat([x, x * 2], 0))
    one, other = both.chunk(2)
    return small(one - other)


def _repeated(x: torch.Tensor, p: Plant) -> torch.Tensor:
    several = p(x.repeat_interleave(3, 0)).view(-1, 3, 4, 8)
    return small(several.sum(1))


def _in_place(x: torch.Tensor, p: Plant) -> torch.Tensor:
    out = torch.empty_like(x)
    out[..., :4].copy_(p(x)[..., 4:])
    out[..., 4:] = x[..., :4]
    out.add_(1).mul_(2)
    torch.remainder(out, 7, out=out)
    return out


def _convolution(x: torch.Tensor, p: Plant) -> torch.Tensor:
    image = x.transpose(1, 2)
    return small(p(functional.conv1d(image, _W.kernel, padding=1)).transpose(1, 2))


def _groups_merged_with_channels(x: torch.Tensor, p: Plant) -> torch.Tensor:
    batch = x.shape[0]
    merged = x.transpose(1, 2).reshape(1, batch * 8, 4)
    weight = _W.kernel[:, :1].repeat(batch, 1, 1)
    out = p(functional.conv1d(merged, weight, padding=1, groups=batch * 8))
    return small(out.view(batch, 8, 4).transpose(1, 2))


def _embedding(x: torch.Tensor, p: Plant) -> torch.Tensor:
    tokens = x[..., 0].long() % 7
    bags = functional.embedding_bag(tokens.flatten(), _W.table, torch.arange(0, tokens.numel(), 4), mode="sum")
    return small(p(x + bags[:, None]) + functional.embedding(tokens, _W.table))


def _as_wide_as_the_batch(x: torch.Tensor, p: Plant) -> torch.Tensor:
    """Another dimension is as large as the reference's batch."""
    wide = x.flatten(1)[:, :8]
    return small(p(wide @ _W.square)[:, None] + x)


def _norm(x: torch.Tensor, p: Plant) -> torch.Tensor:
    """Several outputs, of which one is of no dimension of the batch."""
    values, places = x.max(2, keepdim=True)
    rows, sizes = torch.aminmax(x, dim=1, keepdim=True)
    return small(p(values - places) + rows + sizes + x)


def _channels_last(x: torch.Tensor, p: Plant) -> torch.Tensor:
    image = x.reshape(-1, 2, 4, 4).to(memory_format=torch.channels_last)
    return small(p(image * 2)).reshape(x.shape)


def _conjugated(x: torch.Tensor, p: Plant) -> torch.Tensor:
    z = torch.complex(p(x), x).conj()
    return small(z.imag + z.real)


def _moved_elsewhere(x: torch.Tensor, p: Plant) -> torch.Tensor:
    moved = x.permute(1, 2, 0).contiguous()
    return small(p(moved * 3 + 1)).permute(2, 0, 1)


def _across_the_batch(x: torch.Tensor, p: Plant) -> torch.Tensor:
    """Items by items, of which only each item's own is used."""
    rows = x.flatten(1)
    return small(p(x) + (rows @ rows.t()).diagonal()[:, None, None])


def _unused_reduction(x: torch.Tensor, p: Plant) -> torch.Tensor:
    loss = x.mean()
    return small(p(x) + 0 * _W.square[0]) if loss is not None else x


def _sorted_by_expert(x: torch.Tensor, p: Plant) -> torch.Tensor:
    """How many rows each expert has is reduced over the batch, and tells where its rows are."""
    rows = x.reshape(-1, 8)
    expert = rows.sum(1).remainder(3).long()
    order = expert.argsort(stable=True)
    ends = torch.bincount(expert, minlength=3).cumsum(0)
    grouped = small(p(by_expert(rows[order], _W.experts, ends)))
    return grouped[order.argsort()].view_as(x)


SEGMENTS: tuple[Segment, ...] = (
    *(_elementwise, _linear, _matrix_by_column, _attention, _token, _windows, _time_major, _sorted_and_put_back),
    *(_flipped_and_put_back, _ragged, _ragged_index, _items_in_a_loop, _items_in_two_loops, _two_views, _repeated),
    *(_in_place, _convolution, _groups_merged_with_channels, _embedding, _as_wide_as_the_batch, _norm),
    *(_channels_last, _conjugated, _moved_elsewhere, _across_the_batch, _unused_reduction),
    _sorted_by_expert,
)


class Program:
    """A few segments after each other, in which the planted op is called at one place, or at none."""

    def __init__(self, *segments: Segment, at: int | None = None) -> None:
        self.segments, self.at = segments, at
        self.places = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.places = 0

        def place(value: torch.Tensor) -> torch.Tensor:
            self.places += 1
            return plant(value) if self.places - 1 == self.at else value

        for segment in self.segments:
            x = segment(x, place)
        return x

    def __repr__(self) -> str:
        return " ".join(segment.__name__ for segment in self.segments) + f" at {self.at}"


def random_program(seed: int) -> tuple[Program, int, int]:
    """A program that follows from ``seed``, with the sizes of a batch and of a part of it."""
    chosen = random.Random(seed)
    batch, size = chosen.choice([(8, 4), (8, 2), (8, 1), (6, 3), (5, 2), (8, 3)])
    return Program(*(chosen.choice(SEGMENTS) for _ in range(chosen.randint(1, 4)))), batch, size


def random_inputs(seed: int, batch: int) -> dict[str, torch.Tensor]:
    """The input of a program."""
    return {"x": torch.randint(-3, 4, (batch, 4, 8), generator=torch.Generator().manual_seed(seed)).float()}


BATCH, SIZE = 8, 3


def compared(
    function: Callable[..., Any], *, batch: int = BATCH, size: int = SIZE, above: int = 10**9, tracer: str = "auto"
) -> RowComparison:
    """Two runs of a function of an input of shape (batch, 4, 8)."""
    inputs = random_inputs(3, batch)
    run_at = runner(function, inputs, batch=batch, above=above, tracer=tracer)
    return compared_runs(run_at, ItemSubset(batch, size)).comparison


def located(function: Callable[..., Any], *, above: int = SIZE, tracer: str = "auto") -> BatchFinding:
    """What is found of a function whose planted op adds where the batch is larger than ``above``."""
    inputs = random_inputs(3, BATCH)
    run_at = runner(function, inputs, batch=BATCH, above=above, tracer=tracer)
    found = finding_of(run_at, compared_runs(run_at, ItemSubset(BATCH, SIZE)))
    assert isinstance(found, BatchFinding)
    return found


def blamed(found: RowComparison) -> list[str]:
    """The ops in which a difference of items' rows entered."""
    return [op_of(node) for node in (*found.sources, *found.benign)]
