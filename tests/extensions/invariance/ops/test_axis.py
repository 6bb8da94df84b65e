"""Item axes are found by experiment, and samples are widened."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hashbench.extensions.invariance.layout import ItemAxis
from hashbench.extensions.invariance.ops.axis import widened, with_items
from tests.extensions.invariance.ops.op_helpers import FIRST, found


@pytest.mark.parametrize(
    ("function", "args", "axes"),
    [
        (torch.neg, (torch.rand(3, 5),), (FIRST,)),
        (torch.add, (torch.rand(5, 5), torch.rand(5, 5)), (FIRST, FIRST)),
        (torch.add, (torch.rand(4, 5), torch.rand(5)), (FIRST, None)),
        (torch.add, (torch.rand(()), torch.rand(4, 5)), (None, FIRST)),
        (torch.mm, (torch.rand(4, 5), torch.rand(5, 4)), (FIRST, None)),
        (torch.sum, (torch.rand(4, 5), 0), (ItemAxis(1),)),
        (torch.cumsum, (torch.rand(4, 5), 0), (ItemAxis(1),)),
        (lambda weight, places: weight[places], (torch.rand(6, 3), torch.tensor([1, 5, 2])), (None, FIRST)),
        (lambda rows, _: rows.clone(), (torch.rand(5, 5), torch.rand(5)), (FIRST, None)),
    ],
    ids=[
        "alone",
        "both",
        "broadcast",
        "after a number",
        "matrix",
        "reduced",
        "in order",
        "indices",
        "as many channels",
    ],
)
def test_the_item_axis_is_found_by_experiment(
    function: Callable[..., Any], args: tuple[Any, ...], axes: tuple[ItemAxis | None, ...]
) -> None:
    itemwise = found(function, *args)

    assert itemwise is not None
    assert (itemwise.call.axes, itemwise.coupled) == (axes, False)


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (torch.sum, (torch.rand(4),)),
        (torch.nn.functional.conv2d, (torch.rand(1, 3, 4, 4), torch.rand(6, 3, 2, 2))),
        (torch.rand, (3,)),
        (torch.linalg.inv, (torch.eye(3) + torch.rand(3, 3),)),
    ],
    ids=["all reduced", "one image and a weight", "no tensor", "refuses the same row twice"],
)
def test_where_nothing_is_one_for_each_item_there_is_no_axis(function: Callable[..., Any], args: Any) -> None:
    assert found(function, *args) is None


def test_items_inside_a_merged_dimension_of_the_output_are_found() -> None:
    itemwise = found(lambda rows: rows.reshape(-1), torch.rand(3, 4))

    assert itemwise is not None
    assert itemwise.call.outputs == (ItemAxis(0, inner=4),)


def test_what_is_computed_over_the_items_is_coupled() -> None:
    itemwise = found(lambda rows: torch.softmax(rows, 0), torch.rand(4, 5))

    assert itemwise is not None
    assert itemwise.coupled


def test_inner_dimensions_are_widened_alone_in_all_tensors_and_numbers() -> None:
    itemwise = found(torch.nn.functional.layer_norm, torch.rand(3, 6), [6], torch.rand(6))
    assert itemwise is not None
    (wide,) = widened(itemwise)

    assert wide.widened == "6→258"
    assert wide.call.shapes == "(3,258)x(258)"
    assert wide.call.args[1] == [258]


def test_no_two_items_and_no_two_rows_of_a_widened_sample_are_equal() -> None:
    itemwise = found(torch.matmul, torch.rand(3, 6, 6) + 1, torch.rand(6, 6))
    assert itemwise is not None
    wide = with_items(next(widened(itemwise)).call, 8)
    items, weight = wide.tensors

    assert items.shape == (8, 258, 258)
    assert len(items.flatten(1).unique(dim=0)) == 8
    assert [torch.linalg.matrix_rank(one.double()) for one in (*items, weight)] == [258] * 9
