"""What changes if every op rounds at random?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from hashbench.extensions.compiled.roundings import moved_by_rounding, rounding_backend

EPS = torch.finfo(torch.float64).eps
X = torch.rand(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 0.5


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def compiled(model: Callable[[torch.Tensor], torch.Tensor], seed: int = 1) -> Callable[[torch.Tensor], torch.Tensor]:
    torch._dynamo.reset()
    return torch.compile(model, backend=rounding_backend(seed))


def relative(rounded: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return (rounded - right).abs() / right.abs()


@pytest.mark.slow
def test_every_element_is_an_ulp_off() -> None:
    apart = relative(compiled(torch.sin)(X), torch.sin(X))
    assert float(apart.max()) <= 1.5 * EPS
    assert float((apart > 0).double().mean()) > 0.9


@pytest.mark.slow
def test_seeds_differ_and_repeat() -> None:
    one, again, other = (compiled(torch.sin, seed)(X) for seed in (1, 1, 2))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


@pytest.mark.slow
def test_the_gradient_is_rounded() -> None:
    x = X.clone().requires_grad_()
    compiled(torch.sin)(x).sum().backward()
    assert x.grad is not None
    apart = relative(x.grad, torch.cos(X))
    assert 0 < float(apart.max()) <= 3 * EPS


@pytest.mark.slow
def test_the_dtype_of_the_op_counts() -> None:
    apart = relative(compiled(lambda x: x.float().sin())(X), X.float().sin())
    assert 0.5 * torch.finfo(torch.float32).eps < float(apart.max()) <= 4 * torch.finfo(torch.float32).eps


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [
        pytest.param(lambda x: x.round() * 2, id="integers"),
        pytest.param(lambda x: (x > 1).to(x.dtype), id="a mask"),
        pytest.param(lambda x: x.view(10, 100).t(), id="views"),
        pytest.param(lambda x: x > 1, id="bools"),
    ],
)
def test_what_is_exact_stays(model: Callable[[torch.Tensor], torch.Tensor]) -> None:
    assert torch.equal(compiled(model)(X), model(X))


@pytest.mark.slow
def test_what_is_written_in_place_stays_the_same_tensor() -> None:
    x = X.clone()
    result = compiled(lambda x: x.mul_(3.0))(x)
    assert result.data_ptr() == x.data_ptr()
    assert torch.equal(x, X * 3)


@pytest.mark.slow
def test_how_far_rounding_moves_a_result() -> None:
    def run(backend: Any, _: torch.dtype | None) -> dict[str, torch.Tensor]:
        torch._dynamo.reset()
        found = torch.compile(lambda x: (x.sin(), x[1:]), backend=backend)(X.float())
        return dict(zip(("sine", "part"), found, strict=True))

    moved = moved_by_rounding(run, "sine")
    assert moved is not None
    assert 0 < moved < 1e-6
    assert moved_by_rounding(run, "part") == 0.0
    assert moved_by_rounding(run, "no such result") is None
