"""The first kernel whose rows differ although the item's rows of all its inputs are equal."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import nn

from hashbench.core.records import Failure, op_of
from hashbench.extensions.invariance.finding import BatchFinding
from hashbench.extensions.invariance.judged import RowEffect
from hashbench.extensions.invariance.layout import ItemAxis, ItemSubset
from hashbench.extensions.invariance.locate import compare_rows, finding_of
from tests.extensions.invariance.programs import (
    BATCH,
    PLANTED,
    SEGMENTS,
    SIZE,
    Program,
    Segment,
    blamed,
    compared,
    located,
    plant,
    random_inputs,
    random_program,
    runner,
)


def check_every_place(program: Program, batch: int, size: int, *, tracer: str = "auto") -> None:
    """A program blames nothing as it is; with the planted op at any of its places it blames that op alone."""
    program.at = None
    clean = compared(program, batch=batch, size=size, tracer=tracer)
    assert (clean.differing, blamed(clean)) == ((), [])
    for place in range(program.places):
        program.at = place
        found = compared(program, batch=batch, size=size, above=size, tracer=tracer)
        if found.differing:  # else the planted difference was washed out
            assert [op_of(node) for node in found.sources] == [PLANTED], (program, found.detail)


@pytest.mark.parametrize("segment", SEGMENTS, ids=lambda segment: segment.__name__)
def test_the_op_that_looks_at_the_batch_is_named_and_nothing_else(segment: Segment) -> None:
    check_every_place(Program(segment), BATCH, SIZE)


@pytest.mark.parametrize("tracer", ["native", "python"])
@pytest.mark.parametrize("seed", range(12))
def test_in_random_programs(seed: int, tracer: str) -> None:
    check_every_place(*random_program(seed), tracer=tracer)


def test_every_segment_has_a_place_for_the_planted_op() -> None:
    for segment in SEGMENTS:
        program = Program(segment)
        program(**random_inputs(0, BATCH))
        assert program.places, segment


# ------------------------------------------------------------------------------------------------------- coupling


# ----------------------------------------------------------------------------------------------------- what is said


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return plant(x.flatten(0, 1)) @ self.weight


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = Head()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x * 2).view_as(x)


@pytest.mark.parametrize("tracer", ["native", "python"])
def test_a_finding_says_where_and_how_much_and_has_the_call(tracer: str) -> None:
    found = located(Model(), tracer=tracer)
    assert (found.batch, found.size, found.kernel, found.module) == (BATCH, SIZE, PLANTED, "Model.head")
    assert re.fullmatch(r"test_locate\.py:\d+ forward", found.source_line)
    assert (found.shapes, found.reference_shapes) == ("(12,8)", "(32,8)")
    assert (found.benign, found.not_attributable, found.detail) == ((), 0, "")
    assert found.call.axes == found.call.outputs == (ItemAxis(0, 1, 4),)
    assert found.call.items == BATCH
    # Alone it does not differ, since it is told the size of the batch otherwise; the runs give the numbers.
    assert found.difference.max_abs == 1.0


def test_sizes_among_the_arguments_of_the_call_are_known() -> None:
    found = located(
        lambda x: (x + 1).repeat(x.shape[0], 1, 1)[: x.shape[0]] + torch.full((x.shape[0], 1, 1), 1 / x.shape[0])
    )
    assert found.kernel == "aten.full.default"
    assert found.detail.startswith("its arguments depend on the batch: [3, 1, 1], 0.333")
    assert found.call.scaled == (0,)


def test_only_the_outputs_that_are_named_are_explained() -> None:
    inputs = random_inputs(3, BATCH)
    run_at = runner(lambda x: (plant(x * 2), plant(x * 3)), inputs, batch=BATCH, above=SIZE)
    rows = compare_rows(run_at, ItemSubset(BATCH, SIZE), ["output.1"])
    assert not isinstance(rows, Failure)
    found = finding_of(run_at, rows)
    assert isinstance(found, BatchFinding)
    assert (found.record, len(found.sources), len(found.benign)) == (f"forward.0//{PLANTED}#1", 1, 1)


def test_an_op_that_only_the_smaller_batch_runs_is_named() -> None:
    found = located(lambda x: (x * 2 if x.shape[0] == BATCH else plant(x * 2).neg()) + 1)
    assert found.kernel == PLANTED
    assert found.detail == f"a batch of {BATCH} calls different ops here (none)"
    assert (found.shapes, found.reference_shapes, found.call) == ("(3,4,8)", "", None)


def test_a_failing_run_is_said() -> None:
    failure = Failure("no memory")
    assert compare_rows(lambda *_: failure, ItemSubset(8, 4)) is failure


# --------------------------------------------------------------------------------------------------- real layers


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], *, batch_first: bool) -> None:
        super().__init__()
        self.layer, self.batch_first = kind(8, 8, batch_first=batch_first), batch_first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states, _ = self.layer(x if self.batch_first else x.transpose(0, 1))
        return states[:, -1] if self.batch_first else states[-1]


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv1d(4, 4, 3), nn.BatchNorm1d(4), nn.Flatten(), nn.Linear(24, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        steps = x.transpose(0, 1)
        mixed, _ = self.inner(steps, steps, steps)
        return mixed.transpose(0, 1)


_MOVING = ("clone", "copy", "cat", "stack", "index", "gather", "repeat", "embedding.", "empty", "zeros", "constant_pad")


@pytest.mark.parametrize(
    "module",
    [
        lambda: Recurrent(nn.GRU, batch_first=True),
        lambda: Recurrent(nn.LSTM, batch_first=False),
        lambda: Recurrent(nn.RNN, batch_first=False),
        Encoder,
        Attention,
        Convolution,
    ],
    ids=["gru", "lstm", "rnn", "encoder", "attention", "convolution"],
)
def test_calls_of_real_layers_are_attributed(
    module: Callable[[], nn.Module],
) -> None:
    torch.manual_seed(0)
    found = compared(module().eval(), size=1)
    judged = found.runs.judged
    assert all(judged[node].reference == "" for node in found.not_attributable)  # torch takes another op for one
    assert not [op for op in blamed(found) if op.partition(".")[2].startswith(_MOVING)]
    effects = {one.effect for one in judged.values()}
    assert effects - {RowEffect.UNKNOWN}  # which calls differ is the processor's doing
    assert blamed(found) or found.not_attributable or RowEffect.PROPAGATED not in effects
