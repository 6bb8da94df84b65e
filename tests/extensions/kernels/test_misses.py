"""The wrong elements of a result."""

from __future__ import annotations

import torch

from hashbench.extensions.kernels.misses import misses, number, rms, whole
from tests.extensions.kernels.judgements import drawn, judged

X = drawn(16, 32)


def test_only_wrong_elements_are_misses() -> None:
    assert misses(judged(X, X), X) is None
    got = X.clone()
    got[3, 4] += 1
    found = misses(judged(got, X), got)
    assert found is not None
    assert found.wrong.nonzero().tolist() == [[3, 4]]
    assert bool(whole(judged(got, X), got).finite.all())


def test_an_explanation_must_leave_rounding_alone() -> None:
    got = 2 * X
    found = misses(judged(got, X), got)
    assert found is not None
    assert found.fits(found.value - 2 * found.exact, found.wrong)
    assert not found.fits(found.value - 1.9 * found.exact, found.wrong)


def test_numbers_have_four_digits_and_complex_ones_no_dust() -> None:
    assert [number(value) for value in (1.0, 1 / 3, 1 + 1e-9j)] == ["1", "0.3333", "1+0j"]
    assert rms(torch.empty(0)) == 0
