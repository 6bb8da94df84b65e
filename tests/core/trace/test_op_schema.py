"""Ops that torch computes by another formula because a mode is active: found in traces, named in rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from hashbench import HashDebugTrace
from hashbench.core.check.model import BenchmarkRunner
from hashbench.core.records import RunOptions
from hashbench.core.run.outcome import Outcome
from hashbench.core.run.workload import Workload
from hashbench.core.trace import op_schema
from hashbench.core.trace.tracer import native_unavailable


def traced(function: Callable[[], object]) -> tuple[str, ...]:
    with HashDebugTrace(tracer="python") as trace:
        function()
    return op_schema.mode_dependent(trace.finish())


def gradient_of(value: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
    value.backward()
    assert of.grad is not None
    return of.grad


def weights(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator).to(dtype).requires_grad_()


FOUND: dict[str, tuple[Callable[[], torch.Tensor], tuple[str, ...]]] = {
    "the derivative of prod": (
        lambda: gradient_of((w := weights(5)).prod(), of=w),
        ("aten.prod.default",),
    ),
    "the derivative of prod over a dimension": (
        lambda: gradient_of((w := weights(5, 3)).prod(0).sum(), of=w),
        ("aten.prod.dim_int",),
    ),
    "singular values without a gradient": (
        lambda: torch.linalg.svdvals(weights(64, 64).detach()),
        ("aten._linalg_svd.default",),
    ),
    "a complex pseudo-inverse": (
        lambda: torch.linalg.pinv(weights(4, 3, dtype=torch.complex64)).detach(),
        ("aten.linalg_pinv.atol_rtol_tensor",),
    ),
    "a complex least squares": (
        lambda: torch.linalg.lstsq(*(weights(4, 3, dtype=torch.complex64).detach() for _ in range(2))).solution,
        ("aten.linalg_lstsq.default",),
    ),
    "a product with a batch of one, without a gradient": (
        lambda: weights(8, 1, 96).detach() @ weights(1, 96, 32).detach(),
        ("aten.mm.default",),
    ),
}
NOT_FOUND = {
    "prod without a derivative": lambda: weights(5).detach().prod(),
    "prod whose derivative is not computed": lambda: weights(5).prod(),
    "singular values with a gradient": lambda: torch.linalg.svdvals(weights(4, 4)).sum().backward(),
    "a real pseudo-inverse": lambda: torch.linalg.pinv(weights(4, 3)),
    "a product of two matrices": lambda: weights(8, 96).detach() @ weights(96, 32).detach(),
    "nothing at all": lambda: None,
}


@pytest.mark.parametrize(("function", "ops"), FOUND.values(), ids=FOUND)
def test_a_trace_shows_that_a_mode_changed_the_formula_of(function: Callable[[], object], ops: tuple[str, ...]) -> None:
    assert traced(function) == ops


@pytest.mark.skipif(native_unavailable() is not None, reason="the native tracer cannot be built here")
@pytest.mark.parametrize(("function", "ops"), FOUND.values(), ids=FOUND)
def test_the_native_tracer_changes_none_of_them(function: Callable[[], torch.Tensor], ops: tuple[str, ...]) -> None:
    untraced = function()
    with HashDebugTrace(tracer="native") as trace:
        found = function()
    assert torch.equal(found, untraced)
    assert op_schema.mode_dependent(trace.finish()) == ()
    assert ops  # which a mode changes


@pytest.mark.parametrize("function", NOT_FOUND.values(), ids=NOT_FOUND)
def test_a_mode_does_not_change_the_formula_of(function: Callable[[], object]) -> None:
    assert traced(function) == ()


def test_every_line_of_the_table_can_match_something() -> None:
    assert op_schema.mode_dependent_ops()
    for entry in op_schema.mode_dependent_ops():
        assert entry.op.startswith("aten."), entry
        assert entry.phase in ("any", "backward", "no gradient"), entry
        assert not entry.signature or entry.op in entry.signature, entry


# ---------------------------------------------------------------------------------------------------- in a row


class Product(torch.nn.Module):
    """The product of a layer's outputs along one dimension; its derivative depends on a mode."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(6, 6)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layer(inputs).prod(1)


def check(module: torch.nn.Module, *, untraced_pair: bool = False) -> Outcome:
    torch.manual_seed(0)
    runner = BenchmarkRunner(RunOptions(mode="training", untraced_pair=untraced_pair, iterations=1, tracer="python"))
    return runner.check_accuracy(Workload(module=module.train(), inputs=(torch.randn(5, 6),), iterations=1))


@pytest.mark.parametrize(
    ("module", "ops"),
    [
        pytest.param(Product(), "aten.prod.dim_int", id="a product, with its name"),
        pytest.param(torch.nn.Linear(6, 6), "", id="a linear layer, with nothing"),
    ],
)
def test_a_row_passes_and_names_the_ops_that_tracing_changes_for(module: torch.nn.Module, ops: str) -> None:
    outcome = check(module)
    assert (outcome.accuracy, outcome.perturbed_ops) == ("pass", ops)


def test_an_untraced_pair_confirms_that_tracing_changed_the_results() -> None:
    outcome = check(Product(), untraced_pair=True)
    assert (outcome.accuracy, outcome.untraced) == ("pass", "agree")
    assert outcome.perturbed_ops == "aten.prod.dim_int (results differ from those of an untraced run)"


def test_an_untraced_pair_says_where_no_known_op_explains_the_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op_schema, "mode_dependent_ops", lambda: ())
    outcome = check(Product(), untraced_pair=True)
    assert outcome.perturbed_ops == "unknown (results differ from those of an untraced run)"
