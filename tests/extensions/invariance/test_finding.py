"""The first kernel whose rows differ on equal rows, and what is attributed to none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from hashbench.extensions.invariance.finding import RowDifference
from hashbench.extensions.invariance.judged import RowEffect
from hashbench.extensions.invariance.layout import MOST_ROWS, ItemSubset
from tests.extensions.invariance.programs import (
    BATCH,
    PLANTED,
    SEGMENTS,
    SIZE,
    Program,
    blamed,
    by_expert,
    compared,
    compared_runs,
    located,
    plant,
    random_inputs,
    runner,
    wrong_experts,
)


def scaled_by_the_batch(x: torch.Tensor) -> torch.Tensor:
    return x / x.abs().sum()


def centred(x: torch.Tensor) -> torch.Tensor:
    return x - x.mean(0)


def normed_in_training(x: torch.Tensor) -> torch.Tensor:
    return functional.batch_norm(x, None, None, training=True)


def divided_by_the_number_of_items(x: torch.Tensor) -> torch.Tensor:
    return x * (1.0 / x.shape[0])


def experts_of_limited_capacity(x: torch.Tensor) -> torch.Tensor:
    scores, at = (x.sum((1, 2)) + 100 * torch.arange(x.shape[0])).topk(2)
    return torch.zeros_like(x).index_copy(0, at, x[at] * scores[:, None, None])


def rolled(x: torch.Tensor) -> torch.Tensor:
    return x + x.roll(1, 0)


def contrasted(x: torch.Tensor) -> torch.Tensor:
    rows = x.flatten(1)
    return rows @ rows.t()


def drawn(x: torch.Tensor) -> torch.Tensor:
    noise = torch.rand(x.shape[0] * 3)
    return x + torch.rand(()) + 0 * noise[0]


@pytest.mark.parametrize(
    ("function", "kernel"),
    [
        (scaled_by_the_batch, "sum"),
        (centred, "mean"),
        (normed_in_training, "native_batch_norm"),
        (divided_by_the_number_of_items, "mul"),
        (experts_of_limited_capacity, "topk"),
        (rolled, "roll"),
        (contrasted, "mm"),
        (drawn, "rand"),
    ],
)
def test_kernel_where_items_mix_is_named(function: Callable[..., Any], kernel: str) -> None:
    found = located(function)
    assert found.kernel.split(".")[1] == kernel, found
    assert found.sources[0] == found.record
    assert found.coupled is (kernel != "native_batch_norm")  # that normalises in the same op


def test_other_sources_and_benign_kernels_are_listed() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        plant(x)
        return plant(x * 2), plant(x * 3)

    found = located(function)
    first, second, third = (f"forward.0//{PLANTED}#{number}" for number in range(3))
    assert (found.sources, found.benign) == ((second, third), (first,))


def test_kernels_that_are_rounded_away_are_benign() -> None:
    run_at = runner(lambda x: plant(x).clamp(max=-9), random_inputs(3, BATCH), batch=BATCH, above=SIZE)
    found = compared_runs(run_at, ItemSubset(BATCH, SIZE)).comparison
    assert (found.differing, found.benign) == ((), (f"forward.0//{PLANTED}#0",))


def test_a_loss_over_the_batch_that_nothing_reads_is_not_named() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return plant(x), x.mean()

    found = located(function)
    assert found.sources == (f"forward.0//{PLANTED}#0",)
    assert found.benign == ()


def test_a_part_of_memory_written_earlier_is_followed() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty(x.shape[0], 8, 8)
        out[:, :4].copy_(plant(x))
        out[:, 4:].copy_(x)
        return out * 2

    assert located(function).kernel == PLANTED


@torch.library.custom_op("hashbench_batch::plant_into", mutates_args=("out",))
def plant_into(out: torch.Tensor, x: torch.Tensor) -> None:
    """Writes all of ``out``; rows of many items by another formula."""
    out.copy_(x * (1 if len(x) <= SIZE else 1.001))


def test_memory_that_an_op_is_given_to_fill_is_not_what_it_reads() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        out.numpy()[:] = len(x)  # what happens to be there
        plant_into(out, x)
        return out * 2

    assert located(function).kernel == "hashbench_batch.plant_into.default"


class Chooses(nn.Module):
    """The program takes another parameter for a large batch, or another part of one."""

    def __init__(self, *, part: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.tensor([2.0, 5.0])), nn.Parameter(torch.tensor([3.0]))
        self.part = part

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (self.first[:1] if len(x) == BATCH else self.first[1:] if self.part else self.second)


@pytest.mark.parametrize("part", [False, True])
def test_a_kernel_that_is_given_another_parameter_is_not_blamed(*, part: bool) -> None:
    found = located(Chooses(part=part))
    assert (found.kernel, found.detail) == ("", "no call differs whose rows could be followed to the outputs")


def test_reversed_loop_over_items_blames_no_call() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        alike = (x * 0 + 1).unbind()
        return torch.stack([alike[at] * (at + 1.5) for at in reversed(range(len(x)))][::-1])

    found = compared(function)
    assert found.differing == ()
    assert not [node for node, one in found.runs.judged.items() if one.effect is RowEffect.ORIGIN]


def test_rows_sorted_by_expert_are_not_blamed() -> None:
    with wrong_experts():
        found = located(Program(SEGMENTS[-1]))
    assert found.kernel == "hashbench_batch.by_expert.default"
    assert not found.coupled
    assert found.difference == RowDifference()  # rows at the same place are other tokens'


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [64, 1024])
def test_of_many_rows_sorted_by_expert_the_sort_is_not_blamed(tokens: int) -> None:
    """1,024 rows are as many as had a digest each once: more were compared in groups, which no sort leaves together."""

    def function(x: torch.Tensor) -> torch.Tensor:
        rows = (x.repeat(1, tokens, 1) + torch.arange(4.0 * tokens)[:, None]).flatten(0, 1)
        expert, order = rows.sum(1).remainder(3).long().sort()
        ends = torch.bincount(expert, minlength=3).cumsum(0)
        made = by_expert(rows[order], torch.eye(8).expand(3, 8, 8), ends)
        return torch.zeros_like(made).index_copy(0, order, made).view(len(x), -1)

    assert blamed(compared(function)) == []
    with wrong_experts():
        found = located(function)
    if tokens * 4 * BATCH > MOST_ROWS:  # rows of several elements have a digest for several of them together
        assert (found.kernel, found.sources) == ("", ())
        assert found.detail.startswith("which rows belong to which item is not known from ")
    else:
        assert found.kernel == "hashbench_batch.by_expert.default"
