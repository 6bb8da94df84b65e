"""Differences in units of rounding, and elements in the places of the other side."""

from __future__ import annotations

import math

import pytest
import torch

from hashbench.extensions.implementations.pair.places import arranged, sample
from hashbench.extensions.implementations.pair.rounded import apart_by
from tests.core.run.one_dtype import drawn

X = drawn(4, 6)


def test_equal_values_are_no_unit_apart_and_masks_do_not_count() -> None:
    x = torch.tensor([1.0, -math.inf, math.nan, torch.finfo(torch.float32).min])
    assert apart_by(x, x.clone()) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_difference_is_counted_in_units_of_the_coarser_dtype(dtype: torch.dtype) -> None:
    ones = torch.ones(8)
    assert apart_by(ones, (ones + torch.finfo(dtype).eps).to(dtype)) == pytest.approx(1.0, rel=0.01)


def test_integers_are_equal_or_infinitely_apart() -> None:
    assert apart_by(torch.arange(3), torch.arange(3)) == 0
    assert apart_by(torch.arange(3), torch.arange(3) + 1) == math.inf


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        pytest.param(X.reshape(2, 2, 6).transpose(1, 2), X, id="theirs are rows"),
        pytest.param(X, X.t().contiguous(), id="transposed"),
        pytest.param(X, X.reshape(2, 12), id="of another shape"),
    ],
)
def test_elements_are_put_where_the_other_side_has_them(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    like = arranged(ours, theirs + 1e-6)
    assert like is not None
    assert torch.equal(like, theirs)


def test_tensors_of_other_sizes_have_no_places() -> None:
    assert arranged(X, X[:2]) is None


def test_a_sample_has_the_elements_that_differ_most() -> None:
    other = X.clone()
    other[2, 3] += 1.0
    values, share = sample(X, other)
    assert [place for place, _, _ in values] == ["[2, 3]"]
    assert share == pytest.approx(1 / 24)
