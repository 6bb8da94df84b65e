"""What a difference is held against."""

from __future__ import annotations

import math

import pytest
import torch

from hashbench.core.run.distance import in_units
from hashbench.extensions.compiled.units import smallest_unit

EXACT = torch.tensor([1.0, -2.0, 1 / 3, 1000.0], dtype=torch.float64)


def f64(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_zero_of_which_eager_mode_loses_nothing_is_measured_by_the_other_results() -> None:
    floor = smallest_unit({"other": EXACT, "zero": f64(0.0)}, torch.float32)
    assert in_units(f64(1e-17), f64(0.0), torch.zeros(1), floor=floor, own_dtype=torch.float32) < 1e-6
    assert in_units(f64(1e-3), f64(0.0), torch.zeros(1), floor=floor, own_dtype=torch.float32) > 1e3
    assert in_units(f64(1e-17), f64(0.0), torch.zeros(1), own_dtype=torch.float32) == math.inf


def test_the_smallest_unit_follows_the_median_result() -> None:
    results = {"mask": f64(-1e300), "a": f64(2.0), "b": f64(0.5, 4.0), "count": torch.tensor([10**6]), "none": f64()}
    assert smallest_unit(results, torch.float32) == pytest.approx(3e-3 * 2**-24)
    assert smallest_unit({}, torch.float32) == 0.0
