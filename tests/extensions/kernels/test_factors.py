"""Names of factors."""

from __future__ import annotations

import pytest

from hashbench.extensions.kernels.factors import factor_words


@pytest.mark.parametrize(
    ("factor", "error", "sizes", "words"),
    [
        (64 / 63, 1e-6, (8, 64), "1.016 (64/63)"),
        (64 / 63, 1e-2, (8, 64), "1.016"),
        (0.125, 1e-9, (), "0.125 (1/8)"),
        (3.0, 1e-9, (), "3"),
        (1.00002, 1e-9, (), "1 + 2e-05"),
        (0.7310, 1e-6, (), "0.731"),
    ],
)
def test_factors_have_names(factor: float, error: float, sizes: tuple[int, ...], words: str) -> None:
    assert factor_words(factor, error, sizes) == words
