"""Moments and digests of tensors."""

from __future__ import annotations

import math

import pytest
import torch

from hashbench.core.divergence.content import EXACT, Moments
from hashbench.extensions.implementations.pair.moments import additive_digest, measure
from tests.core.run.one_dtype import drawn

X = drawn(6, 8, dtype=torch.float64)


def agree(one: torch.Tensor, other: torch.Tensor) -> bool:
    return measure(one).moments.agree(measure(other).moments, EXACT)


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(X.t(), id="transposed"),
        pytest.param(X.flatten()[torch.randperm(48)], id="permuted"),
        pytest.param(torch.nn.functional.pad(X, (0, 3, 2, 0)), id="padded with zeros"),
        pytest.param(X * (1 + 1e-13), id="rounded"),
        pytest.param(X.repeat(1, 1, 1)[0].as_strided((8, 6), (1, 8)), id="strided"),
    ],
)
def test_moments_do_not_depend_on_layout(other: torch.Tensor) -> None:
    assert agree(X, other)


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(-X, id="sign"),
        pytest.param(X * 1.000001, id="scale"),
        pytest.param(X.abs(), id="magnitude"),
        pytest.param(torch.where(X[0, 0] == X, X[0, 1], X), id="one element"),
        pytest.param(torch.where(X[0, 0] == X, math.nan, X), id="not a number"),
    ],
)
def test_moments_of_other_elements_do_not_agree(other: torch.Tensor) -> None:
    assert not agree(X, other)


def test_moments_of_parts_add_up() -> None:
    first, second = (measure(part).moments for part in X.split(2, 1)[:2])
    assert (first + second).agree(measure(X[:, :4]).moments, EXACT)


def test_special_values_are_counted_and_not_summed() -> None:
    masked = torch.cat([X.flatten(), torch.tensor([math.inf, -math.inf, math.nan, torch.finfo(torch.float32).min])])
    moments = measure(masked).moments
    assert moments.special == 4
    assert Moments(moments.sums, moments.sizes).agree(measure(X).moments, EXACT)


def test_what_cancellation_left_agrees_with_zero_but_not_without_operands() -> None:
    rest, zero = torch.full((4,), 1e-17, dtype=torch.float64), torch.zeros(4)
    assert measure(rest, operands=1.0).moments.agree(measure(zero).moments, EXACT)
    assert not agree(rest, zero)


def test_order_is_seen_by_places_alone() -> None:
    exchanged = X[[1, 0, 2, 3, 4, 5]]
    assert agree(X, exchanged)
    one, other = measure(X).ordered, measure(exchanged).ordered
    assert abs(one[0] - other[0]) > EXACT * (one[1] + other[1])


def test_rows_without_elements_are_left_out() -> None:
    rows = measure(torch.nn.functional.pad(X, (0, 0, 2, 0)), rows=True).rows
    assert rows is not None
    assert rows.shape == (6, 4)
    assert rows[:, 0] == pytest.approx(X.sum(1).numpy())


@pytest.mark.parametrize(
    ("value", "squares"),
    [
        pytest.param(torch.tensor([1 + 2j, 3j]), 14.0, id="complex"),
        pytest.param(torch.tensor([True, False]), 1.0, id="bool"),
        pytest.param(torch.arange(3), 5.0, id="int"),
        pytest.param(torch.ones(2, dtype=torch.bfloat16), 2.0, id="bfloat16"),
    ],
)
def test_any_dtype_is_measured(value: torch.Tensor, squares: float) -> None:
    assert measure(value).moments.agree(measure(value.flip(0)).moments, EXACT)
    assert measure(value).moments.sums[1] == squares


def test_digests_are_additive_and_blind_to_order_dtype_and_sign_of_zero() -> None:
    whole = X.float()
    assert additive_digest(whole) == additive_digest(whole.t().double()) == additive_digest(whole.flip(0))
    parts = [additive_digest(part) for part in whole.split(3)]
    assert sum(parts) % 2**64 == additive_digest(whole)
    assert additive_digest(torch.tensor([0.0])) == additive_digest(torch.tensor([-0.0]))
    changed = torch.where(whole == whole[0, 0], torch.nextafter(whole, whole + 1), whole)
    assert additive_digest(changed) != additive_digest(whole)
