"""Words for indices along a dimension."""

from __future__ import annotations

import numpy as np
import pytest

from hashbench.extensions.kernels.slices import axis_of, entropy, words_for


@pytest.mark.parametrize(
    ("shape", "dim", "at", "words"),
    [
        ((128, 8), 0, range(96, 127), "rows 96 to 126"),
        ((128, 8), 0, [5], "row 5"),
        ((8, 128), 1, range(123, 128), "the last 5 columns"),
        ((2, 128, 3), 1, range(123, 128), "the last 5 of dimension 1"),
        ((128,), 0, range(64, 128), "the last 64 elements"),
        ((8, 128), 1, range(31, 128, 32), "every 32nd column from 31 on"),
        ((8, 1024), 1, range(64, 1024), "all but the first 64 columns"),
        ((128, 8), 0, [3, 17, 40], "rows 3, 17 and 40"),
    ],
)
def test_indices_in_words(shape: tuple[int, ...], dim: int, at: list[int], words: str) -> None:
    assert words_for(np.array(at), axis_of(shape, dim)).text == words


def test_all_and_nothing_cost_no_bits() -> None:
    assert entropy(0, 8) == entropy(8, 8) == 0
    assert entropy(4, 8) == 8
