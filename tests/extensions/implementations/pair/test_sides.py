"""Sides in their own dtype and in float64."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hashbench.extensions.implementations.pair.sides import Side, build, build_wide, common_names

X = torch.linspace(-1, 1, 12).reshape(3, 4)


class Scaled(nn.Module):
    """Has a weight that is drawn, and a table that is computed."""

    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("table", torch.arange(1, 5) / 3, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.table


def test_weights_are_those_of_the_own_dtype_and_computed_constants_are_exact() -> None:
    side = Side(Scaled, lambda: (X,))
    own, wide = build(side, 3).model, build_wide(side, 3).model
    assert torch.equal(own.linear.weight.double(), wide.linear.weight)
    assert torch.equal(wide.table, torch.arange(1, 5, dtype=torch.float64) / 3)
    assert not torch.equal(own.table.double(), wide.table)
    assert torch.get_default_dtype() is torch.float32


def test_a_model_that_was_built_before_is_cast() -> None:
    model = Scaled().eval()
    wide = build_wide(Side(lambda: model, lambda: (X,)), 3)
    assert torch.equal(wide.model.table, model.table.double())
    assert not wide.model.training
    assert (model.table.dtype, wide.inputs[0].dtype) == (torch.float32, torch.float64)


def test_a_model_inside_a_function_is_in_float64_during_a_run_only() -> None:
    model = Scaled()
    seen = []

    def function(x: torch.Tensor) -> torch.Tensor:
        seen.append(model.table.dtype)
        result: torch.Tensor = model(x)
        return result

    results = build_wide(Side(lambda: function, lambda: (X,)), 3).run()
    assert seen == [torch.float64]
    assert results["output"].dtype is torch.float64
    assert model.table.dtype is torch.float32


def test_results_are_outputs_loss_and_gradients_by_name() -> None:
    side = Side(Scaled, lambda: {"x": X}, outputs=lambda y: {"y": y, "more": [y]}, loss=torch.sum)
    assert list(build(side, 3).run()) == [
        "output.y",
        "output.more.0",
        "loss",
        "gradient of linear.weight",
        "gradient of linear.bias",
    ]


@pytest.mark.parametrize(
    ("a", "b", "names", "left"),
    [
        ("x y", "y x", {"y": "y", "x": "x"}, ()),
        ("x y", "p q", {"p": "x", "q": "y"}, ()),
        ("x y z", "y x", {"y": "y", "x": "x"}, ("z",)),
        ("x loss", "p loss", {"p": "x", "loss": "loss"}, ()),
        ("x y", "p", {}, ("x", "y", "p")),
        ("x", "p loss", {"p": "x"}, ("loss",)),
        ("loss", "p", {}, ("loss", "p")),
    ],
)
def test_outputs_correspond_by_name_or_order(a: str, b: str, names: dict[str, str], left: tuple[str, ...]) -> None:
    assert common_names(dict.fromkeys(a.split()), dict.fromkeys(b.split())) == (names, left)
