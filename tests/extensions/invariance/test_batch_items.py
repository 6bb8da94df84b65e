"""Items of a batch in inputs and outputs: counted, cut and compared."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hashbench.core.records import BATCH_INVARIANCE, Row
from hashbench.core.run.workload import batch_of
from hashbench.extensions.invariance.batch_items import compare_items, first_items, halves, item_rows, why_not
from tests.extensions.invariance.batch_invariance_helpers import checked


def test_how_much_differs_is_measured_over_the_items_that_both_have():
    row = checked(lambda x: x if len(x) > 4 else x + torch.eye(len(x), 6), torch.zeros(8, 6))
    assert (row.differing_results, row.differing_elements, row.max_abs_diff) == ("output.1", 4, 1.0)
    assert row.count_variability == pytest.approx(4 / 24, rel=1e-3)


X = torch.zeros


BATCHES = {
    "as stated": ((X(8, 2), X(3)), 8, 8, ""),
    "the first dimension of all": ((X(6, 2), {"mask": X(6)}, X(())), None, 6, ""),
    "several first dimensions": ((X(6, 2), X(5)), None, None, "no batch size is known"),
    "no tensor": ((1, "a"), None, None, "no batch size is known"),
    "one item": ((X(1, 2),), None, 1, "its batch has one item"),
    "not first": ((X(3, 8),), 8, 8, "no input has the batch of 8 as its first dimension"),
}


@pytest.mark.parametrize(("inputs", "stated", "batch", "reason"), BATCHES.values(), ids=BATCHES)
def test_what_the_batch_is_and_why_there_is_nothing_smaller(inputs, stated, batch, reason):
    assert batch_of(inputs, stated) == batch
    assert why_not(inputs, batch).startswith(reason)
    assert bool(why_not(inputs, batch)) == bool(reason)


def test_inputs_are_cut_where_their_first_dimension_is_the_batch():
    image = torch.randn(8, 3, 4, 4).to(memory_format=torch.channels_last)
    inputs = {"image": image, "table": torch.randn(5, 8), "scale": torch.tensor(2.0), "names": ["a"]}
    cut = first_items(inputs, 2, 8)
    assert torch.equal(cut["image"], image[:2])
    assert cut["image"].is_contiguous(memory_format=torch.channels_last)
    assert (cut["table"].shape, cut["scale"].shape, cut["names"]) == ((5, 8), (), ["a"])
    assert first_items(inputs, 8, 8) is inputs


@pytest.mark.parametrize(("batch", "sizes"), [(8, [4, 2, 1]), (16, [8, 4, 2, 1]), (5, [2, 1]), (2, [1])])
def test_the_sizes_are_halves_down_to_one(batch, sizes):
    assert list(halves(batch)) == sizes


def test_strides_are_no_difference_and_signs_of_zero_are():
    first, second = torch.zeros(4, 3, 2), torch.zeros(2, 2, 3).transpose(1, 2)
    assert compare_items({"output.0": first}, {"output.0": second}, item_rows(4, 2)).difference is None
    found = compare_items({"output.0": first}, {"output.0": -second}, item_rows(4, 2))
    assert found.difference is not None
    assert found.difference.representation == "sign of zero"


def row(accuracy: str, **more: Any) -> Row:
    return Row("cpu", "net", 8, accuracy, suite="zoo", mode=BATCH_INVARIANCE, dtype="float32", **more)
