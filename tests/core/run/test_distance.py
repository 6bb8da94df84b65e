"""How far two tensors are apart: relative to the largest magnitude, and in units of what eager mode loses."""

from __future__ import annotations

import math

import pytest
import torch

from hashbench.core.run.distance import in_units, relative

EXACT = torch.tensor([1.0, -2.0, 1 / 3, 1000.0], dtype=torch.float64)
INF, NAN = math.inf, math.nan


def f64(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("own_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_eager_mode_loses_is_one_unit(own_dtype: torch.dtype) -> None:
    own = EXACT.to(own_dtype) + torch.tensor([0, 0, 0, 8], dtype=own_dtype)
    assert in_units(own.double(), EXACT, own, own_dtype=torch.float32) == pytest.approx(1.0)


def test_rounding_of_float64_is_far_below_one_unit() -> None:
    assert 0 < in_units(EXACT * (1 + 2**-52), EXACT, EXACT.float(), own_dtype=torch.float32) < 1e-7


def test_a_mistake_of_a_thousandth_is_far_above() -> None:
    assert in_units(EXACT * 1.001, EXACT, EXACT.float(), own_dtype=torch.float32) > 1e4


def test_nothing_lost_is_half_an_ulp() -> None:
    one = f64(1.0)
    assert in_units(f64(1 + 2**-24), one, one.float(), own_dtype=torch.float32) == pytest.approx(1.0)
    assert in_units(f64(1 + 2**-24), one, None, own_dtype=torch.float32) == pytest.approx(1.0)


def test_zero_in_exact_arithmetic_is_measured_by_what_eager_mode_misses_it_by() -> None:
    """A gradient in front of a batch norm: the relative difference is 3."""
    assert in_units(f64(3e-18), f64(-1e-18), torch.tensor([2e-9]), own_dtype=torch.float32) < 1e-8


@pytest.mark.parametrize(
    ("value", "reference", "expected"),
    [
        pytest.param(torch.tensor([1, 2]), torch.tensor([1, 2]), 0.0, id="equal integers"),
        pytest.param(torch.tensor([1, 2]), torch.tensor([1, 3]), INF, id="other integers"),
        pytest.param(torch.tensor([True]), torch.tensor([False]), INF, id="other bools"),
        pytest.param(f64(1.0, NAN), f64(1.0, NAN), 0.0, id="NaN in both"),
        pytest.param(f64(1.0, 0.0), f64(1.0, NAN), INF, id="NaN is lost"),
        pytest.param(f64(1.0, NAN), f64(1.0, 0.0), INF, id="NaN appears"),
        pytest.param(f64(INF), f64(INF), 0.0, id="infinite in both"),
        pytest.param(f64(INF), f64(-INF), INF, id="infinite with another sign"),
        pytest.param(f64(NAN), f64(INF), INF, id="NaN instead of infinite"),
        pytest.param(f64(1.0), f64(1.0, 1.0), INF, id="other shape"),
        pytest.param(f64(), f64(), 0.0, id="empty"),
        pytest.param(f64(-0.0), f64(0.0), 0.0, id="negative zero"),
        pytest.param(torch.tensor([1j, 2.0]), torch.tensor([1j, 2.0]), 0.0, id="equal complex"),
    ],
)
def test_special_values(value: torch.Tensor, reference: torch.Tensor, expected: float) -> None:
    assert in_units(value, reference, None, own_dtype=torch.float32) == expected
    assert relative(value, reference) == expected


@pytest.mark.parametrize(
    ("value", "reference", "expected"),
    [
        pytest.param(f64(1.5, -4.0), f64(1.0, -4.0), 0.125, id="over the largest magnitude"),
        pytest.param(torch.tensor([1.5, -4.0]), f64(1.0, -4.0), 0.125, id="of another dtype"),
        pytest.param(f64(1.0, NAN), f64(2.0, NAN), 0.5, id="beside NaN"),
        pytest.param(f64(1e-3), f64(0.0), INF, id="of zero"),
        pytest.param(torch.tensor([1 + 1j]), torch.tensor([2 + 1j]), 0.5, id="of complex parts"),
    ],
)
def test_relative_differences(value: torch.Tensor, reference: torch.Tensor, expected: float) -> None:
    assert relative(value, reference) == expected


def test_complex_parts_count() -> None:
    reference = torch.tensor([1 + 1e-3j], dtype=torch.complex128)
    own = reference.to(torch.complex64)
    assert in_units(reference + 1e-4j, reference, own, own_dtype=torch.float32) > 1e3


def test_a_mask_of_the_lowest_number_does_not_hide_the_rest() -> None:
    """finfo.min is another number in each dtype."""
    reference = f64(torch.finfo(torch.float64).min, 1.0)
    own = torch.tensor([torch.finfo(torch.float32).min, 1.0])
    assert in_units(reference, reference, own, own_dtype=torch.float32) == 0.0
    assert in_units(reference + f64(0, 1e-3), reference, own, own_dtype=torch.float32) > 1e3


def test_what_overflows_in_eager_mode_hides_nothing() -> None:
    reference, own = f64(1e39, 1.0), torch.tensor([INF, 1.0])
    assert in_units(reference + f64(0, 1e-3), reference, own, own_dtype=torch.float32) > 1e3
