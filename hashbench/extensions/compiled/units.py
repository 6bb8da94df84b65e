"""What a difference is held against: units of what eager mode loses (:func:`hashbench.core.run.distance.in_units`)."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

import torch

from hashbench.core.run.distance import dense, magnitude, unit_roundoff

EXPLAINED = 16.0
"""Multiple of what random roundings change, up to which rounding explains a difference."""

SUSPICIOUS = 1e-9
"""Relative difference in float64 from which a change of a program is held against what it loses in its own dtype. A
right change moves results by 1e-15."""

WRONG = 1e-3
"""Distance in those units from which a change of a program is wrong."""

WRONG_BESIDE_ROUNDING = 1000.0
"""The same where rounding is in the way: results in a lower dtype, a constant that was folded in float32."""


def mistake_limit(dtype: torch.dtype) -> float:
    """Return the distance from which a difference in a dtype is a mistake, in units of what rounding changes there.

    In float32 it is 1e-4. A guess on the safe side: a sum of a million terms in another order may move by a thousand
    ulps, of which random roundings of one ulp an op know nothing.
    """
    return max(EXPLAINED, 1e-4 / unit_roundoff(dtype))


def moved_by_one_unit(value: torch.Tensor) -> torch.Tensor:
    """Return a result moved by an ulp of its largest element, which may be lost where nothing else is known."""
    if not (value.is_floating_point() or value.is_complex()):
        return value
    return dense(value) + 2 * unit_roundoff(value.dtype) * magnitude(value)


def smallest_unit(reference: Mapping[str, torch.Tensor], own_dtype: torch.dtype) -> float:
    """Return the unit for a result of which eager mode loses nothing, or which is all rounding: 1e-3 of half an ulp of
    the model's dtype, at the median of the results' largest magnitudes.

    Differences below it times the limit of the ladder are a few ulps of float64.
    """
    largest = [size for tensor in reference.values() if (size := magnitude(tensor)) > 0]
    return 1e-3 * unit_roundoff(own_dtype) * statistics.median(largest) if largest else 0.0
