"""Terms that a sum lacks."""

from __future__ import annotations

import torch

from hashbench.extensions.kernels.lost import lost_carry, lost_elements
from hashbench.extensions.kernels.misses import Misses, misses
from tests.extensions.kernels.judgements import drawn, judged

X = drawn(32, 96)


def found(got: torch.Tensor, exact: torch.Tensor) -> Misses:
    miss = misses(judged(got, exact), got)
    assert miss is not None
    return miss


def test_the_last_elements_of_a_sum() -> None:
    exact = X.double().sum(1)
    words = lost_elements(found(X[:, :-3].double().sum(1).float(), exact), {"input 0": X})
    assert "the last 3 elements" in words
    assert lost_elements(found((2.5 * exact).float(), exact), {"input 0": X}) == ""


def test_a_carry_that_is_lost_at_a_border() -> None:
    exact = X.double().cumsum(1)
    parts = torch.cat([part.cumsum(1) for part in X.double().split(32, 1)], 1).float()
    assert "columns 32 and 64" in lost_carry(found(parts, exact))
    assert lost_carry(found((2.5 * exact).float(), exact)) == ""
