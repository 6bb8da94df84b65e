"""Which decomposition computes something else than its op?"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from hashbench.extensions.compiled.aot import decomposition_table
from hashbench.extensions.compiled.aot_graphs import Checked
from hashbench.extensions.compiled.decompositions import WrongDecomposition, check_decompositions
from hashbench.extensions.compiled.units import WRONG
from tests.extensions.compiled.steps import Norms, ZeroGradient, made, step_of

aten = torch.ops.aten

X = [torch.randn(6, 8, generator=torch.Generator().manual_seed(0))]


@pytest.fixture(autouse=True)
def _harness_random() -> Iterator[None]:
    from torch._inductor import config

    with config.patch(fallback_random=True):
        yield
    torch._dynamo.reset()


class Call(torch.nn.Module):
    """One call of a function, in inference."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.function(*inputs)


def checked(
    function: Callable[..., Any], table: dict[Any, Callable[..., Any]], *inputs: torch.Tensor
) -> Checked[WrongDecomposition]:
    return check_decompositions(step_of(Call(function), inputs or X, training=False), table=table)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Norms, ZeroGradient])
def test_a_right_model_has_no_wrong_one(kind: Any) -> None:
    inputs = X if kind is Norms else [torch.randn(2, 3, 8, 8)]
    found = check_decompositions(step_of(made(kind), inputs))
    assert (found.wrong, found.raised) == ((), ())
    assert found.calls > 5


@pytest.mark.slow
def test_a_wrong_one_is_named_with_its_module_and_source() -> None:
    table = dict(decomposition_table())
    right = table[aten.elu.default]
    table[aten.elu.default] = lambda *args, **kwargs: right(*args, **kwargs) * (1 + 1e-6)
    step = step_of(made(Norms), X)
    check_decompositions(step, table=table)
    began = time.monotonic()
    (wrong,) = check_decompositions(step, table=table).wrong
    assert time.monotonic() - began < 30  # 0.3 s on a calm machine
    assert (wrong.op, wrong.output, wrong.backward, wrong.calls) == ("aten.elu.default", 0, False, 1)
    assert wrong.relative == pytest.approx(1e-6, rel=1e-3)
    assert wrong.error > 1
    assert wrong.facts.op == "aten.elu.default"
    assert "functional.elu(self.norm(self.inner(x)))" in wrong.facts.source


@pytest.mark.slow
def test_one_of_a_backward_pass() -> None:
    table = dict(decomposition_table())
    right = table[aten.native_layer_norm_backward.default]

    def decomposed(*args: Any, **kwargs: Any) -> Any:
        first, second, third = right(*args, **kwargs)
        return first, second * 1.001, third

    table[aten.native_layer_norm_backward.default] = decomposed
    (wrong,) = check_decompositions(step_of(made(Norms), X), table=table).wrong
    assert (wrong.op, wrong.output, wrong.backward) == ("aten.native_layer_norm_backward.default", 1, True)
    assert wrong.facts.module == "norm"


@pytest.mark.slow
def test_only_the_innermost_wrong_one_is_named() -> None:
    """One of layer norm calls var_mean, which is decomposed too."""
    table = dict(decomposition_table())
    seen = []

    def var_mean(*args: Any, **kwargs: Any) -> Any:
        seen.append(args)
        variance, mean = aten.var_mean.correction(*args, **kwargs)
        return variance * 1.001, mean

    table[aten.var_mean.correction] = var_mean
    (wrong,) = check_decompositions(step_of(made(Norms), X), table=table).wrong
    assert seen
    assert (wrong.op, wrong.output, wrong.facts.op) == ("aten.var_mean.correction", 0, "aten.native_layer_norm.default")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("decomposed", "error"),
    [
        pytest.param(lambda x, k, dim: (x.sort(dim=dim, descending=True)[0][:, :k], None), 0.0, id="right"),
        pytest.param(lambda x, k, dim: (x.topk(k, dim)[0], x.topk(k, dim)[1] + 1), math.inf, id="wrong integers"),
        pytest.param(lambda x, k, dim: (x.topk(k, dim)[0] * 2, x.topk(k, dim)[1]), None, id="wrong values"),
    ],
)
def test_several_outputs(decomposed: Callable[..., Any], error: float | None) -> None:
    found = checked(lambda x: sum(x.topk(3, 1)), {aten.topk.default: lambda x, k, dim=-1: decomposed(x, k, dim)})
    assert len(found.wrong) == (0 if error == 0.0 else 1)
    for wrong in found.wrong:
        assert wrong.output == (1 if error else 0)
        assert wrong.error == error or wrong.error > WRONG


@pytest.mark.slow
def test_an_output_that_nothing_reads_does_not_count() -> None:
    table = {aten.topk.default: lambda x, k, dim=-1: (x.topk(k, dim)[0], x.topk(k, dim)[1] + 1)}
    assert checked(lambda x: x.topk(3, 1)[0], table).wrong == ()


@pytest.mark.slow
@pytest.mark.parametrize(("factor", "outputs"), [(1.0, []), (1.5, [0, 1])])
def test_ops_that_write_their_argument(factor: float, outputs: list[int]) -> None:
    """The graph goes on with what the op itself wrote, once."""

    def decomposed(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return x.copy_(x + other * factor)

    def model(x: torch.Tensor) -> torch.Tensor:
        return (x * 2).cos()

    added: list[torch.Tensor] = []

    def cos(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        aten.add_.Tensor(y, x)
        added.append(y)
        return x.cos()

    found = checked(model, {aten.cos.default: cos, aten.add_.Tensor: decomposed})
    assert [wrong.output for wrong in found.wrong] == outputs
    torch.testing.assert_close(added[0], X[0].double() * 4)


@pytest.mark.slow
def test_random_and_uninitialised_ops_are_not_checked() -> None:
    table = {
        aten.rand_like.default: lambda x, **_: x * 0,
        aten.native_dropout.default: lambda x, *_: (x * 0, x > 0),
        aten.empty_like.default: lambda x, **_: x * 0 + 5,
    }
    found = checked(lambda x: torch.rand_like(x) + torch.empty_like(x).mul(0) + torch.nn.functional.dropout(x), table)
    assert (found.wrong, found.calls) == ((), 0)


@pytest.mark.slow
def test_one_that_raises_is_noted() -> None:
    def raises(*_: Any) -> Any:
        raise ValueError("not here")

    found = checked(torch.sin, {aten.sin.default: raises})
    assert (found.wrong, found.calls) == ((), 0)
    assert [(raised.what, raised.exception) for raised in found.raised] == [
        ("aten.sin.default", "ValueError: not here")
    ]


@pytest.mark.slow
def test_one_that_declines_is_right() -> None:
    found = checked(torch.sin, {aten.sin.default: lambda _: NotImplemented})
    assert (found.wrong, found.raised, found.calls) == ((), (), 0)


@pytest.mark.slow
def test_one_that_calls_its_own_op_ends() -> None:
    found = checked(torch.sin, {aten.sin.default: lambda x: aten.sin.default(x)})
    assert (found.wrong, found.calls) == ((), 1)


@pytest.mark.slow
def test_a_sum_that_is_zero_in_exact_arithmetic_is_right() -> None:
    """Relative differences lie there: another order of summation differs by more than 1."""
    x = torch.tensor([0.1, 0.7, -0.1, -0.7, 0.3, 1e3, -0.3, -1e3]).repeat(8)
    found = checked(lambda x: x.sum(), {aten.sum.default: lambda x: x.view(8, 8).sum(0).sum()}, x.double() / 3)
    assert (found.wrong, found.calls) == ((), 1)


@pytest.mark.slow
def test_nan_that_is_lost() -> None:
    x = torch.tensor([1.0, math.nan, 3.0])
    (wrong,) = checked(lambda x: x.relu(), {aten.relu.default: lambda x: torch.where(x > 0, x, 0.0)}, x).wrong
    assert wrong.error == math.inf
    right = checked(lambda x: x.relu(), {aten.relu.default: lambda x: torch.where(x < 0, 0.0, x)}, x)
    assert right.wrong == ()
