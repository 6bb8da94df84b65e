"""What torch's rule accepts although it is far off: a model that does not run in float64, and small gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from hashbench.core.catalog import Status
from hashbench.core.records import ModelSpec, Row, RunOptions
from hashbench.core.run.workload import Workload
from hashbench.core.suites.csv_file import data_folder
from hashbench.core.suites.python_suites import import_file
from tests.flat_rows import flat
from tests.runner_helpers import FunctionRunner

TRAINING = RunOptions(mode="training", backend="inductor", threads=1, diagnose_budget=1.0)


class InOneDtype(torch.nn.Module):
    """A constant in float32: cast to float64, it raises."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = torch.nn.Linear(6, 8), torch.nn.Linear(8, 8)
        self.act = torch.nn.ELU(1.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.act(self.inner(x))
        return torch.addmm(torch.zeros(4, 8), hidden, self.outer.weight) * 1.25


class ReadThenUpdated(torch.nn.Module):
    """A buffer that is updated behind autograd, between the forward and its backward."""

    scale: torch.Tensor

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.linear, self.factor = torch.nn.Linear(6, 8), factor
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self.linear(x) * self.scale * 1e-3
        self.scale.data.mul_(self.factor)
        return result


class Gaps(torch.nn.Module):
    """Reads what lies between the elements of its input, of which compiled code makes no copy."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return torch.as_strided_copy(x, (3,), (2,))


class NoGaps(Gaps):
    """Reads a tensor of its own in the same way."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_strided_copy(x + 1, (3,), (2,))


def wrong_decomposition(patches: Any) -> None:
    """Lose the ``alpha`` of ``elu``."""
    from torch._inductor import decomposition

    op = torch.ops.aten.elu.default
    for table in (decomposition.decompositions, decomposition.fast_random_decomps()):
        patches.item(table, op, lambda x, *_: torch.where(x > 0, x, torch.expm1(x)))


def wrong_pass(patches: Any) -> None:
    """Multiply twice, after a pass."""
    from torch._inductor.fx_passes import post_grad

    right = post_grad.remove_assert_ops

    def wrong(graph: torch.fx.Graph) -> None:
        right(graph)
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor):
            if 1.25 in node.args:
                node.args = (node.args[0], 1.5625)

    patches.attribute(post_grad, "remove_assert_ops", wrong)


def nothing(_: Any) -> None: ...


@pytest.fixture
def planting() -> Iterator[Any]:
    module = import_file(data_folder() / "compiled" / "_planted.py")
    yield module
    module.undo()


def swept(build: Callable[[], torch.nn.Module], *, gaps: bool = False) -> Row:
    runner = FunctionRunner(replace(TRAINING, mode="inference") if gaps else TRAINING)
    runner.build = lambda: Workload(build(), (torch.arange(10.0)[::2] if gaps else torch.randn(4, 6),))
    return runner.run_model(ModelSpec("here", "net"))


Case = tuple[Callable[[], torch.nn.Module], Callable[[Any], None], dict[str, str]]
WRONG: dict[str, Case] = {
    "a decomposition": (
        InOneDtype,
        wrong_decomposition,
        {"stage": "decomposition", "op": "aten.elu.default", "module": "InOneDtype.act", "semantic": "unknown"},
    ),
    "a pass that scales": (
        InOneDtype,
        wrong_pass,
        {"stage": "post_grad_passes", "op": "aten.mul.Tensor", "semantic": "unknown"},
    ),
    "small gradients, twice too large": (lambda: ReadThenUpdated(0.5), nothing, {"semantic": "yes"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", WRONG)
def test_what_is_far_off_is_told_and_looked_for(case: str, planting: Any) -> None:
    build, fault, expected = WRONG[case]
    planting.plant(fault)
    row = swept(build)
    assert {name: getattr(flat(row), name) for name in expected} == expected, row.detail
    assert flat(row).stage not in ("", "rounding")
    assert " off" in flat(row).reference
    assert "rounding" not in row.detail
    if flat(row).semantic == "unknown":
        assert "compared by cosine similarity only" in flat(row).reference
        assert "does not run in float64" in row.detail
    if case != "a decomposition":  # which turns some results as well
        assert row.accuracy == Status.PASS


@pytest.mark.slow
@pytest.mark.parametrize("build", [InOneDtype, lambda: ReadThenUpdated(1.0)])
def test_a_right_model_has_no_remark(build: Callable[[], torch.nn.Module]) -> None:
    row = swept(build)
    assert (row.accuracy, flat(row).stage, flat(row).reference, flat(row).semantic, row.detail) == (
        Status.PASS,
        "",
        "",
        "",
        "",
    )


@pytest.mark.slow
@pytest.mark.parametrize(("build", "wrong"), [(Gaps, True), (NoGaps, False)])
def test_float64_reads_the_same_gaps(build: Callable[[], torch.nn.Module], wrong: bool) -> None:
    row = swept(build, gaps=True)
    status = Status.FAIL_ACCURACY if wrong else Status.PASS
    assert (row.accuracy, flat(row).stage, flat(row).reference) == (status, "aot_autograd" if wrong else "", "")
