"""Conditions on inputs that tell wrong elements."""

from __future__ import annotations

import pytest
import torch

from hashbench.extensions.kernels.conditions import conditions_on
from tests.extensions.kernels.judgements import drawn

X = drawn(32, 48)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [(X < 0, "where input 0 < 0"), (X.abs() > 1, "where |input 0| > 1"), (X.isnan(), "")],
    ids=["negative", "large", "none"],
)
def test_the_best_condition_comes_first(wrong: torch.Tensor, words: str) -> None:
    found = conditions_on(wrong, {"input 0": X})
    assert (found[0].words.text if found else "") == words
    if found:
        assert torch.equal(found[0].mask().broadcast_to(X.shape), wrong)


def test_what_fits_the_result_in_no_way_tells_nothing() -> None:
    assert conditions_on(X < 0, {"input 0": drawn(7)}) == []
