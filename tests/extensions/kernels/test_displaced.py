"""Right values at other places."""

from __future__ import annotations

import torch

from hashbench.extensions.kernels.displaced import displacement, moved_input
from hashbench.extensions.kernels.misses import Misses, misses
from tests.extensions.kernels.judgements import drawn, judged

X = drawn(24, 24)


def found(got: torch.Tensor, exact: torch.Tensor) -> Misses:
    miss = misses(judged(got, exact), got)
    assert miss is not None
    return miss


def test_transposed_and_shifted_results_are_told_apart() -> None:
    transposed, shifted = displacement(found(X.T.contiguous(), X)), displacement(found(X.roll(1, 0), X))
    assert "transposed" in transposed
    assert shifted
    assert "transposed" not in shifted
    assert displacement(found(2 * X, X)) == ""


def test_an_input_that_is_read_at_another_place() -> None:
    other = drawn(24, 24, seed=9)
    assert "input 1" in moved_input(found(X + other.T, X + other), {"input 0": X, "input 1": other})
    assert moved_input(found(X + 2 * other, X + other), {"input 0": X, "input 1": other}) == ""
