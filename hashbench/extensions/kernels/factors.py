"""Names of factors by which results are wrong: ``0.9844 (63/64)``, ``1.443 (log2 e)``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

_NAMED = {
    "sqrt 2": math.sqrt(2),
    "1/sqrt 2": math.sqrt(0.5),
    "ln 2": math.log(2),
    "log2 e": 1 / math.log(2),
    "pi": math.pi,
    "1/pi": 1 / math.pi,
    "sqrt(2/pi)": math.sqrt(2 / math.pi),
}

_LARGEST = 8
"""Largest numerator and denominator of a fraction that is named without a size of the result in it."""


def factor_words(factor: float, error: float, sizes: Sequence[int]) -> str:
    """Return a factor in words, with its name if it has one.

    Args:
        factor: as it was measured.
        error: of the measurement.
        sizes: of the result, which often make factors: n/(n-1), 1/sqrt(n).
    """
    near = max(3 * error, 1e-6 * abs(factor))
    if abs(factor - round(factor)) <= near and abs(factor) < 1e6 and round(factor) != 1:
        return str(round(factor))
    found = [name for name, value in _names(sizes) if abs(factor - value) <= near]
    told = f"{factor:.4g}" if abs(factor - 1) > 1e-3 else f"1 {'+' if factor > 1 else '-'} {abs(factor - 1):.3g}"
    precise = near < 0.05 * min(abs(factor - 1), abs(factor))
    return f"{told} ({found[0]})" if found and precise else told


def _names(sizes: Sequence[int]) -> Iterator[tuple[str, float]]:
    for bottom in range(2, _LARGEST + 1):
        for top in range(1, _LARGEST + 1):
            if math.gcd(top, bottom) == 1:
                yield f"{top}/{bottom}", top / bottom
    for size in dict.fromkeys([*sizes, *(1 << exponent for exponent in range(3, 14))]):
        if size > 2:
            yield f"{size}/{size - 1}", size / (size - 1)
            yield f"{size - 1}/{size}", (size - 1) / size
            yield f"1/{size}", 1 / size
            yield f"sqrt {size}", math.sqrt(size)
            yield f"1/sqrt {size}", 1 / math.sqrt(size)
    yield from _NAMED.items()
