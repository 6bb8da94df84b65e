"""Two implementations of one function as a test compares them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hashbench.testing import CheckFailedError, assert_same_model


class Joined(nn.Module):
    """Two matrices in one, tokens in rows."""

    def __init__(self, one: nn.Linear, other: nn.Linear, factor: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.cat([one.weight.data, other.weight.data]).t().contiguous())
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = (x.flatten(0, 1) @ self.weight).chunk(2, -1)
        return torch.sigmoid(first) * second * self.factor


class Apart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = (nn.Linear(24, 8, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.one(x)) * self.other(x)


@pytest.fixture
def model() -> Apart:
    torch.manual_seed(3)
    return Apart()


X = torch.randn(4, 7, 24, generator=torch.Generator().manual_seed(1))


def test_another_layout_passes_and_nothing_is_changed(model: Apart) -> None:
    other = Joined(model.one, model.other)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    assert_same_model(model, other, X)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())
    assert {parameter.dtype for parameter in other.parameters()} == {torch.float32}
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_mistake_fails_with_the_finding(model: Apart) -> None:
    with pytest.raises(CheckFailedError, match=r"A mistake: .*Joined \(b, test_model\.py:\d+\)") as failed:
        assert_same_model(model, Joined(model.one, model.other, 1.001), (X,))
    (finding,) = failed.value.findings
    assert finding.differs
    assert finding.data["outcome"] == "mistake"


def test_rounding_passes_unless_bits_are_asked_for() -> None:
    def mean(x: torch.Tensor) -> torch.Tensor:
        return x.sum(-1) / 24

    def other(x: torch.Tensor) -> torch.Tensor:
        return (x.flip(-1) / 24).sum(-1)

    x = X * torch.logspace(0, 3, 24)  # sums whose order shows
    assert_same_model(mean, other, x)
    assert_same_model(mean, mean, x, bitwise=True)
    with pytest.raises(CheckFailedError, match="The same function: "):
        assert_same_model(mean, other, x, bitwise=True)


def test_what_cannot_be_run_is_not_known(model: Apart) -> None:
    with pytest.raises(CheckFailedError, match=r"cannot run \(b\): it raised RuntimeError"):
        assert_same_model(model, nn.Linear(5, 5), X)
    with pytest.raises(CheckFailedError, match="needs a model to call as b, not a Tensor"):
        assert_same_model(model, X, X)  # type: ignore[arg-type]


def test_inputs_and_outputs_of_each_side(model: Apart) -> None:
    def by_name(*, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"y": torch.sigmoid(rows @ model.one.weight.t().to(rows)) * (rows @ model.other.weight.t().to(rows))}

    assert_same_model(
        model, by_name, X, inputs_b={"rows": X.flatten(0, 1)}, outputs_a=lambda y: [y], outputs_b=lambda y: [y["y"]]
    )


def test_with_a_loss_a_wrong_backward_is_a_mistake(model: Apart) -> None:
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(_ctx, x):
            return x.clone()

        @staticmethod
        def backward(_ctx, gradient):
            return gradient * 1.01

    class Scaled(Apart):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Wrong.apply(super().forward(x))

    other = Scaled()
    other.load_state_dict(model.state_dict())
    assert_same_model(model, other, X)
    with pytest.raises(CheckFailedError, match=r"A mistake: .*backward"):
        assert_same_model(model, other, X, loss=lambda y: y.square().mean())
