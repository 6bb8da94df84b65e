"""A kernel and its reference as a test compares them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from hashbench.extensions.kernels.verdict import KernelOutcome
from hashbench.testing import CheckFailedError, assert_within_rounding, within_rounding

X = torch.randn(6, 40, generator=torch.Generator().manual_seed(1))
QUICK = ("sizes", "strides", "offset", "large", "tiny", "spikes", "integers", "zeros", "denormals", "float32")


def blocks(x: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
    """A mean in blocks, as no CPU kernel of torch computes it."""
    total = torch.zeros_like(x[:, 0], dtype=torch.float32)
    for block in x.float().split(16, 1):
        total = total + block.flip(1).cumsum(1)[:, -1]
    return (total / x.shape[1] * factor).to(x.dtype)


def mean(x: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
    return x.mean(1) * factor


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_another_order_of_sums_passes_and_nothing_is_changed(dtype: torch.dtype) -> None:
    x = X.to(dtype)
    before, state = x.clone(), torch.get_rng_state()
    assert_within_rounding(blocks, mean, x, without=QUICK)
    assert torch.equal(x, before)
    assert torch.equal(state, torch.get_rng_state())
    assert not x.requires_grad


def test_a_mistake_fails_with_the_finding() -> None:
    with pytest.raises(CheckFailedError, match=r"^Wrong: ") as failed:
        assert_within_rounding(lambda x: blocks(x) * 1.01, mean, X, without=QUICK)
    (finding,) = failed.value.findings
    assert finding.differs
    assert finding.data["outcome"] == "wrong"
    assert not within_rounding(lambda x: blocks(x) * 1.01, mean, X, without=QUICK).right


def test_the_fixture_of_pytest_fails_as_the_function_does(assert_within_rounding: Callable[..., None]) -> None:
    assert_within_rounding(blocks, mean, X, without=QUICK)
    with pytest.raises(CheckFailedError, match=r"^Wrong: "):
        assert_within_rounding(lambda x: blocks(x) + 1, mean, X, without=QUICK)


def test_the_verdict_is_data() -> None:
    verdict = within_rounding(blocks, mean, X, without=QUICK, seed=5)
    assert verdict.right
    assert verdict.outcome is KernelOutcome.WITHIN_ROUNDING
    assert verdict.seed == 5
    assert {each.name for each in verdict.variations} >= {*QUICK, "given"}


def test_arguments_by_name_a_claim_and_gradients() -> None:
    assert_within_rounding(blocks, mean, X, kwargs={"factor": 3.0}, without=QUICK)
    assert_within_rounding(lambda x: blocks(x) * 1.01, mean, X, approximate=0.05, without=QUICK)
    assert_within_rounding(blocks, mean, X, backward=True, without=QUICK)

    class Halved(torch.autograd.Function):
        @staticmethod
        def forward(_ctx, x):
            return x.mean(1)

        @staticmethod
        def backward(_ctx, gradient):
            return gradient[:, None].expand(6, 40) / 39

    assert_within_rounding(Halved, mean, X, without=(*QUICK, "seeds", "nan", "inf"))
    with pytest.raises(CheckFailedError, match=r"Wrong gradient of input 0"):
        assert_within_rounding(Halved, mean, X, backward=True, without=(*QUICK, "seeds", "nan", "inf"))


def test_what_cannot_be_judged_fails_in_words() -> None:
    with pytest.raises(CheckFailedError, match="there is no variation 'sices'"):
        within_rounding(blocks, mean, X, without=["sices"])
    with pytest.raises(CheckFailedError, match="it cannot be called"):
        within_rounding(X, mean, X)  # type: ignore[arg-type]


def test_a_reference_that_raises_is_not_known_and_fails() -> None:
    def refuses(x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("no such thing")

    with pytest.raises(CheckFailedError, match="no such thing"):
        assert_within_rounding(blocks, refuses, X, without=QUICK)


def test_without_the_extension_it_is_said_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hashbench.extensions.MISSING", ("kernels",))
    with pytest.raises(CheckFailedError, match="needs hashbench/extensions/kernels, and this folder is missing"):
        assert_within_rounding(blocks, mean, X)
