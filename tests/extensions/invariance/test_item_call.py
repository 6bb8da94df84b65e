"""Calls with item axes: other items, copies, generators and sizes."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from hashbench.core.diagnose.calls.live import captured_environment
from hashbench.extensions.invariance.cause import decide
from hashbench.extensions.invariance.experiments import diagnose_item_call
from hashbench.extensions.invariance.item_call import SEED, ItemCall, item_digests, items_first
from hashbench.extensions.invariance.layout import ItemAxis, NotItemwiseError

FIRST = ItemAxis(0)


ROWS = 1 / torch.arange(1.0, 241.0).reshape(8, 30)


def test_an_axis_inside_a_merged_dimension_is_followed() -> None:
    """``batch * heads``: four items with three heads each."""
    merged = torch.arange(24.0).reshape(12, 2)
    call = ItemCall(torch.ops.aten.neg.default, (merged,), {}, 4, (ItemAxis(0, inner=3),), (ItemAxis(0, inner=3),))

    assert call.select([2, 0]).args[0][:, 0].tolist() == [12.0, 14.0, 16.0, 0.0, 2.0, 4.0]
    with captured_environment(call):
        rows = call.rows_of([2, 0])
        assert rows == {item: digest for item, digest in enumerate(call.rows()) if item in rows}


def test_a_transposed_matrix_stays_one() -> None:
    call = ItemCall(torch.ops.aten.neg.default, (torch.rand(5, 4).t(),), {}, 4, (FIRST,), (FIRST,))

    assert call.at(2).args[0].stride() == (1, 2)


def test_part_keeps_strides_and_cache_line_offset() -> None:
    part = torch.rand(4, 8)[:, 3:5]
    call = ItemCall(torch.ops.aten.neg.default, (part,), {}, 4, (FIRST,), (FIRST,))

    two = call.at(2).args[0]
    assert two.stride() == part.stride() == (8, 1)
    assert two.data_ptr() % 64 == part.data_ptr() % 64
    assert torch.equal(two, part[:2])


def test_a_size_among_the_arguments_follows_the_number_of_items() -> None:
    call = ItemCall(torch.ops.aten.expand.default, (torch.rand(1, 3), [8, 3]), {}, 8, (None,), (FIRST,), scaled=(1,))

    assert call.at(3).args[1] == [3, 3]
    with captured_environment(call):
        assert len(call.at(3).rows()) == 3


def test_in_place_output_leaves_the_call_unchanged() -> None:
    rows = torch.rand(4, 3)
    call = ItemCall(torch.ops.aten.add_.Tensor, (rows, 1.0), {}, 4, (FIRST,), (FIRST,))
    with captured_environment(call):
        first = call.rows()

        assert call.rows() == first
        assert first == tuple((digest,) for digest in item_digests(rows + 1.0, FIRST, 4))


def test_a_dimension_that_does_not_hold_the_items_is_refused() -> None:
    with pytest.raises(NotItemwiseError, match="does not hold 5 items"):
        ItemCall(torch.neg, (ROWS,), {}, 5, (FIRST,), (FIRST,))


def drawn_privately(*, normal: bool, items: int = 8) -> tuple[ItemCall, torch.Generator]:
    """A call that draws six numbers for each item, from a generator that was drawn from before."""
    generator = torch.Generator().manual_seed(3)
    torch.rand(5, generator=generator)
    op = torch.ops.aten.randn.generator if normal else torch.ops.aten.rand.generator
    return ItemCall(op, ([items, 6],), {"generator": generator}, items, (), (FIRST,), scaled=(0,)), generator


def test_generator_argument_is_reset_for_every_run() -> None:
    call, generator = drawn_privately(normal=True)
    state = generator.get_state()
    with captured_environment(call):
        first, again, other = (call.run(seed=seed)[0][0] for seed in (SEED, SEED, SEED + 1))
        assert call.draws()

    assert torch.equal(generator.get_state(), state)
    assert torch.equal(first, torch.randn(8, 6, generator=generator))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_generator_passed_twice_stays_one() -> None:
    generator = torch.Generator().manual_seed(3)

    def twice(rows: torch.Tensor, one: torch.Generator, other: torch.Generator) -> torch.Tensor:
        return rows + torch.rand(rows.shape, generator=one) - torch.rand(rows.shape, generator=other)

    left, _ = ItemCall(twice, (ROWS, generator, generator), {}, 8, (FIRST,), (FIRST,)).run()
    assert torch.equal(left[0], twice(ROWS, generator, generator))


def attention_of(weights: torch.Tensor, values: torch.Tensor) -> ItemCall:
    """Two items of two tokens each, of which the first is watched; tokens see what their row of weights says."""
    axes = ItemAxis(1, inner=2, also=(2,)), ItemAxis(1, inner=2)
    return ItemCall(torch.ops.aten.bmm.default, (weights, values), {}, 2, axes, (ItemAxis(1, inner=2),), watched=0)


def test_an_item_of_two_dimensions_is_a_block():
    call = attention_of(torch.arange(16.0).view(1, 4, 4), torch.arange(8.0).view(1, 4, 2))
    assert call.select([1]).args[0].tolist() == [[[10.0, 11.0], [14.0, 15.0]]]
    assert items_first(call.args[0], call.axes[0], 2)[1].flatten().tolist() == [10.0, 11.0, 14.0, 15.0]
    assert call.with_scaled_neighbours(0, 2.0).args[0][0, :2].tolist() == [[0.0, 1.0, 4.0, 6.0], [4.0, 5.0, 12.0, 14.0]]


def test_a_call_on_the_host_seeds_its_generators_and_asks_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has not started a device would note a stack for each: longer than most calls."""
    monkeypatch.setattr(torch, "manual_seed", None)

    def drawn(rows: torch.Tensor) -> torch.Tensor:
        return rows + torch.rand(1) + random.random() + np.random.rand()

    call = ItemCall(drawn, (ROWS,), {}, 8, (FIRST,), (FIRST,))
    with captured_environment(call):
        assert call.rows() == call.rows()
        assert call.rows() != call.rows(seed=1)


def test_a_watched_item_keeps_its_place() -> None:
    def by_place(rows: torch.Tensor) -> torch.Tensor:
        return rows * torch.arange(1.0, len(rows) + 1)[:, None]

    evidence = diagnose_item_call(ItemCall(by_place, (ROWS,), {}, 8, (FIRST,), (FIRST,), watched=0))
    assert evidence.arm("other_places").note == "the items have an order"
    assert decide(evidence).cause == "unknown"
