"""The kernel whose rows depend on the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hashbench.core.diagnose.calls.live import captured_environment
from hashbench.extensions.invariance.finding import BatchFinding
from hashbench.extensions.invariance.item_call import ItemCall
from hashbench.extensions.invariance.ops.kernel import another_order, kernel_of, located
from tests.extensions.invariance.ops.op_helpers import FIRST, planted_place
from tests.extensions.invariance.test_experiments import ROWS, in_blocks


@torch.library.custom_op("planted_rows::by_number", mutates_args=())
def planted(rows: torch.Tensor) -> torch.Tensor:
    return rows * (1.0 if len(rows) < 3 else 1.001)


@pytest.mark.parametrize(
    ("function", "sizes", "kernel"),
    [(planted, (1, 2), "planted_rows.by_number.default"), (planted_place, (), "planted_rows.by_place.default")],
    ids=["number", "place"],
)
def test_the_kernel_is_the_first_whose_inputs_rows_are_equal(
    function: Callable[..., Any], sizes: tuple[int, ...], kernel: str
) -> None:
    call = ItemCall(lambda rows: function(rows.neg()).exp() + 1, (ROWS,), {}, 8, (FIRST,), (FIRST,))
    with captured_environment(call):
        found = kernel_of(call, sizes)

    assert found is not None
    assert found.kernel == kernel
    assert found.call is not None
    assert (found.call.axes, found.call.outputs, found.call.items) == ((FIRST,), (FIRST,), 8)


def test_the_kernel_is_named_where_the_runs_make_other_calls() -> None:
    call = ItemCall(lambda rows: in_blocks(planted(rows)), (ROWS,), {}, 8, (FIRST,), (FIRST,))
    with captured_environment(call):
        found = kernel_of(call, (2,))

    assert found is not None
    assert found.kernel == "planted_rows.by_number.default"


def test_of_several_numbers_that_is_taken_whose_call_can_be_repeated() -> None:
    call = ItemCall(lambda rows: planted(rows) if len(rows) > 1 else rows.exp(), (ROWS,), {}, 8, (FIRST,), (FIRST,))
    with captured_environment(call):
        found = kernel_of(call, (1, 2))

    assert found is not None
    assert (found.kernel, found.call is not None) == ("planted_rows.by_number.default", True)


def test_other_numbers_are_tried_where_the_first_and_the_last_name_none() -> None:
    call, tried = ItemCall(planted, (ROWS,), {}, 8, (FIRST,), (FIRST,)), []
    with captured_environment(call), pytest.MonkeyPatch.context() as patch:

        def only_of_two(call: ItemCall, chosen: range) -> BatchFinding | None:
            tried.append(len(chosen))
            return located(call, chosen) if len(chosen) == 2 else BatchFinding(len(chosen), 8, detail="none")

        patch.setattr("hashbench.extensions.invariance.ops.kernel.located", only_of_two)
        found = kernel_of(call, (1, 2, 3, 4))
    assert tried == [1, 4, 2]
    assert found is not None
    assert found.kernel == "planted_rows.by_number.default"


def test_an_order_in_which_items_come_out_otherwise_is_found() -> None:
    call = ItemCall(planted_place, (ROWS,), {}, 8, (FIRST,), (FIRST,))
    with captured_environment(call):
        assert another_order(call) == [1, 2, 3, 4, 5, 6, 7, 0]
