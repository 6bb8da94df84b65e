"""Measure the distance between sampled elements of two results, as :func:`hashbench.core.run.distance.measure` does for
whole tensors, but with NumPy integers: torch's own arithmetic may be what changed. Pure; imports no torch."""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

FLOATS: dict[str, tuple[int, int]] = {
    "float64": (11, 52),
    "float32": (8, 23),
    "bfloat16": (8, 7),
    "float16": (5, 10),
    "float8_e4m3fn": (4, 3),
    "float8_e5m2": (5, 2),
}
"""Bits of exponent and significand, by dtype."""

_PARTS = {"complex128": "float64", "complex64": "float32", "complex32": "float16"}


@dataclass(frozen=True, slots=True)
class Distance:
    """Distance between the sampled elements of two results.

    Attributes:
        samples: number of sampled elements.
        differing: number of those whose bits differ.
        max_ulp: largest distance in units in the last place; ``None`` if there is no number.
        max_relative: largest relative difference; ``None`` if there is no number.
    """

    samples: int = 0
    differing: int = 0
    max_ulp: int | None = None
    max_relative: float | None = None


def distance(kept: Iterable[tuple[str, int, str, str]]) -> Distance:
    """Measure the distance over several outputs.

    Args:
        kept: per output its dtype, bytes per element, and its samples before and now (base64).
    """
    total = differing = 0
    ulps: list[int] = []
    relatives: list[float] = []
    for dtype, itemsize, old, new in kept:
        a, b = (_elements(text, itemsize) for text in (old, new))
        if a is None or b is None or a.shape != b.shape:
            continue
        total += len(a)
        others = (a != b).any(axis=1)
        differing += int(others.sum())
        part = _PARTS.get(dtype, dtype)
        if others.any() and part in FLOATS:
            _append_distances(part, a[others], b[others], ulps, relatives)
    return Distance(total, differing, max(ulps, default=None), max(relatives, default=None))


def _elements(text: str, itemsize: int) -> np.ndarray[Any, Any] | None:
    """Return the bytes of sampled elements, one row each; ``None`` if there are none."""
    try:
        content = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return None
    whole = bool(content) and not len(content) % itemsize
    return np.frombuffer(content, np.uint8).reshape(-1, itemsize) if whole else None


def _append_distances(
    dtype: str, a: np.ndarray[Any, Any], b: np.ndarray[Any, Any], ulps: list[int], relatives: list[float]
) -> None:
    """Append the distances of differing numbers, given as rows of bytes, to ``ulps`` and ``relatives``.

    Two NaNs, or two zeros, are 0 units apart.
    """
    width = (1 + sum(FLOATS[dtype])) // 8
    bits = [np.ascontiguousarray(part).view(f"<u{width}").reshape(-1) for part in (a, b)]
    differ = bits[0] != bits[1]
    for x, y in zip(bits[0][differ].tolist(), bits[1][differ].tolist(), strict=True):
        old, new = value_of(x, dtype), value_of(y, dtype)
        if (math.isnan(old) and math.isnan(new)) or old == new == 0:
            ulps.append(0)
        elif math.isfinite(old) and math.isfinite(new):
            ulps.append(abs(_ordered(x, 8 * width) - _ordered(y, 8 * width)))
            relatives += [abs((old - new) / old)] if old else []


def value_of(bits: int, dtype: str) -> float:
    """Return the exact number with these bits in a floating-point ``dtype`` of :data:`FLOATS`.

    >>> value_of(0x3FC0, "bfloat16"), value_of(0xC0, "float8_e4m3fn"), value_of(0x7F80, "bfloat16")
    (1.5, -2.0, inf)
    """
    exponent_bits, fraction_bits = FLOATS[dtype]
    fraction, largest = bits & ((1 << fraction_bits) - 1), (1 << exponent_bits) - 1
    exponent = (bits >> fraction_bits) & largest
    sign = -1.0 if bits >> (exponent_bits + fraction_bits) else 1.0
    if exponent == largest and (dtype != "float8_e4m3fn" or fraction == (1 << fraction_bits) - 1):
        return float("nan") if fraction else sign * float("inf")
    significand = fraction + ((exponent > 0) << fraction_bits)
    return sign * math.ldexp(significand, max(exponent, 1) - (largest >> 1) - fraction_bits)


def _ordered(bits: int, width: int) -> int:
    """Map the bits of a floating-point number to an integer in value order, so that a difference counts ULPs."""
    sign = 1 << (width - 1)
    return sign - bits if bits & sign else bits
