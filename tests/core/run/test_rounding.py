"""Errors in units of what rounding explains."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
import torch

from hashbench.core.run.rounding import LIMIT, NEAR, MeasuredError, measure, units_apart

nan, inf = math.nan, math.inf


@dataclass
class Given:
    """References written by hand; ``noise`` is the relative size of random rounding."""

    own: torch.Tensor
    wide: torch.Tensor | None = None
    noise: float = 0.0
    flips: tuple[torch.Tensor, ...] = ()
    asked: list[str] = field(default_factory=list)

    def exact(self) -> torch.Tensor:
        self.asked.append("exact")
        return self.reference()

    def reference(self) -> torch.Tensor:
        if self.wide is not None:
            return self.wide
        if self.own.dtype.is_complex:
            return self.own.to(torch.complex128)
        return self.own.double() if self.own.dtype.is_floating_point else self.own

    def rounded(self, seed: int, scale: float) -> torch.Tensor:
        self.asked.append(f"rounded {scale:g}")
        if scale > 1 and self.flips:
            return self.flips[seed % len(self.flips)]
        reference = self.reference()
        return reference * (1 + scale * self.noise * (-1) ** seed) if self.noise else reference


def floats(*values: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def doubles(*values: float) -> torch.Tensor:
    return floats(*values, dtype=torch.float64)


ONES = torch.ones(64)


def off(relative: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Ones, of which one is off."""
    made = ONES.double().clone()
    made[5] += relative
    return made.to(dtype)


def test_equal_results_ask_for_nothing():
    given = Given(floats(1.0, 2.0))
    assert measure(floats(1.0, 2.0), given) == MeasuredError(0.0)
    assert given.asked == []


def test_results_within_a_few_units_of_eager_mode_ask_for_nothing():
    given = Given(ONES)
    found = measure(off(2.0**-22), given)
    assert 0 < found.ratio <= NEAR
    assert found.own is None
    assert given.asked == []


def test_a_result_as_wrong_as_eager_mode_asks_for_float64_alone():
    given = Given(off(2e-5), ONES.double())
    found = measure(off(-2e-5), given)
    assert found.ratio <= 1.01
    assert given.asked == ["exact"]


def test_a_result_that_random_rounding_explains_is_rounding():
    given = Given(ONES, ONES.double(), noise=1e-5)
    found = measure(off(5e-5), given)
    assert 2 < found.ratio < LIMIT
    assert given.asked[:4] == ["exact", "rounded 1", "rounded 1", "rounded 1"][: len(given.asked)]


def test_a_planted_error_is_beyond():
    found = measure(off(1e-3), Given(ONES, ONES.double(), noise=1e-7))
    assert found.ratio > 1000
    assert found.relative == pytest.approx(1e-3, rel=1e-3)
    assert found.own == 0.0


def test_an_error_of_eager_mode_is_shown_beside():
    found = measure(off(1e-2), Given(off(1e-6), ONES.double()))
    assert found.ratio > LIMIT
    assert 0.5 < (found.own or 0) <= 1


def test_float64_alone_is_its_own_reference():
    ones = ONES.double()
    wrong = ones.clone()
    wrong[3] += 1e-9
    given = Given(ones, ones, noise=2.0**-53)
    assert measure(wrong, given).ratio > 1000
    eight = ones.clone()
    eight[3] += 8 * 2.0**-53  # in units of both roundings, the result's and the reference's
    assert measure(eight, Given(ones, ones)).ratio == pytest.approx(4)
    near = ones.clone()
    near[3] += 2.0**-50
    assert measure(near, Given(ones, ones, noise=2.0**-53)).ratio < LIMIT


@pytest.mark.parametrize(
    ("value", "own", "wide", "expected"),
    [
        pytest.param(floats(nan, 1), floats(1, 1), None, inf, id="NaN where the reference has none"),
        pytest.param(floats(inf, 1), floats(1, 1), None, inf, id="infinite where the reference is not"),
        pytest.param(floats(1, 1), floats(nan, 1), None, inf, id="a number where the reference is NaN"),
        pytest.param(floats(1, 1), floats(inf, 1), None, inf, id="a number where the reference is infinite"),
        pytest.param(floats(-inf, 1), floats(inf, 1), None, inf, id="the other infinity"),
        pytest.param(floats(nan, 1), floats(inf, 1), None, inf, id="NaN for infinity"),
        pytest.param(floats(nan, 1), floats(nan, 1), None, 0, id="NaN in both"),
        pytest.param(floats(inf, 1), floats(inf, 1), None, 0, id="infinite in both"),
        pytest.param(floats(nan, 1), floats(nan, 1), doubles(2, 1), 0, id="NaN as in eager mode alone"),
        pytest.param(floats(nan, 1 + 1e-5), floats(nan, 1), None, "beyond", id="NaN in both, another is wrong"),
        pytest.param(floats(inf, 1), floats(3e38, 1), doubles(4e38, 1), 0, id="overflow of the dtype"),
        pytest.param(floats(2, 1), floats(1, 1), doubles(nan, 1), "beyond", id="a number that eager mode alone has"),
        pytest.param(floats(1 + 5e-7, 1), floats(1, 1), doubles(nan, 1), 9, id="nearly what eager mode alone has"),
        pytest.param(floats(0.0), floats(-0.0), None, 0, id="zeros of both signs"),
        pytest.param(floats(-0.0, 1), floats(0.0, 1 + 1e-3), doubles(0, 1), 0, id="zeros beside an own error"),
        pytest.param(floats(0.0), floats(1e-40), None, 1, id="a denormal number flushed to zero"),
        pytest.param(floats(), floats(), None, 0, id="zero-size"),
        pytest.param(torch.tensor(True), torch.tensor(True), None, 0, id="equal bools"),
        pytest.param(torch.tensor(True), torch.tensor(False), None, inf, id="unequal bools"),
        pytest.param(torch.tensor([3, 4]), torch.tensor([3, 4]), None, 0, id="equal integers"),
        pytest.param(torch.tensor([3, 5]), torch.tensor([3, 4]), None, inf, id="unequal integers"),
        pytest.param(torch.tensor([2**53 + 1]), torch.tensor([2**53]), None, inf, id="integers that float64 confuses"),
    ],
)
def test_special_values(value: torch.Tensor, own: torch.Tensor, wide: torch.Tensor | None, expected: float | str):
    found = measure(value, Given(own, wide)).ratio
    if expected == "beyond":
        assert LIMIT < found < inf
    elif expected == inf:
        assert found == inf
    else:
        assert found <= expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_every_floating_dtype_has_its_own_unit(dtype: torch.dtype):
    unit = torch.finfo(dtype).eps / 2
    own = ONES.to(dtype)
    assert units_apart(off(2 * unit, dtype), own) == pytest.approx(2, rel=1e-3)
    assert measure(off(256 * unit, dtype), Given(own)).ratio > LIMIT


def test_small_numbers_count_in_float16():
    own = torch.full((64,), 1e-5, dtype=torch.float16)
    wrong = own.clone()
    wrong[3] = 4e-5
    assert measure(wrong, Given(own)).ratio > LIMIT


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_complex_numbers(dtype: torch.dtype):
    own = torch.full((64,), 1 + 2j, dtype=dtype)
    wrong = own.clone()
    wrong[3] += 1e-3j
    assert measure(own.clone(), Given(own)).ratio == 0
    assert measure(wrong, Given(own, noise=1e-7 if dtype is torch.complex64 else 1e-16)).ratio > 1000
    missing = own.clone()
    missing[3] = complex(nan, 0)
    assert measure(missing, Given(own)).ratio == inf


def test_a_step_that_larger_rounding_flips_is_rounding():
    own, other = ONES.clone(), ONES.clone()
    other[5] = 2.0  # 1.5 rounded to even, or down
    assert measure(other, Given(own)).ratio == inf or measure(other, Given(own)).ratio > 1000
    assert measure(other, Given(own, flips=(own.double(), other.double()))).ratio == LIMIT


def test_a_result_between_the_flips_is_rounding():
    value, low, high = (off(by) for by in (0.4, 0.0, 0.5))
    assert measure(value, Given(low, flips=(low.double(), high.double()))).ratio == LIMIT
    assert measure(off(0.6), Given(low, flips=(low.double(), high.double()))).ratio > 1000


def test_one_flip_does_not_excuse_another_element():
    own, other = ONES.clone(), ONES.clone()
    other[5], other[6] = 2.0, 1.01
    flipped = ONES.double().clone()
    flipped[5] = 2.0
    assert measure(other, Given(own, flips=(flipped,))).ratio > 1000


def test_an_index_that_larger_rounding_flips_is_rounding():
    own, other = torch.tensor([3, 4]), torch.tensor([3, 7])
    assert measure(other, Given(own, flips=(own, other))).ratio == LIMIT
    assert measure(other, Given(own, flips=(own, torch.tensor([3, 8])))).ratio == inf


def test_flips_are_given_up_where_none_helps():
    given = Given(ONES)
    assert measure(off(0.5), given).ratio > LIMIT
    assert given.asked.count(f"rounded {LIMIT:g}") == 4


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_float8(dtype: torch.dtype):
    own = torch.tensor([1.0, 2.0, 4.0]).to(dtype)
    assert measure(own, Given(own, own.double())).ratio == 0
