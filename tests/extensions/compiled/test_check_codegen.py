"""A generated kernel leaves a part of its result as the memory was: code generation is to blame, not the program.
Of the ops in a fused kernel, the one whose code is wrong is named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
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


class OddWidth(torch.nn.Module):
    """Elementwise work on rows whose width is a multiple of no vector's."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.randn(67))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(rows * self.scale) * 2


def no_tail(patches: Any) -> None:
    """Leave out the stores of what remains where a loop's size is no multiple of a vector."""
    from torch._inductor.codegen.cpp import CppVecKernel

    right = CppVecKernel.store

    def wrong(self: Any, *args: Any, **kwargs: Any) -> None:
        if self.tail_size is None:
            right(self, *args, **kwargs)

    patches.attribute(CppVecKernel, "store", wrong)


@pytest.fixture
def planting() -> Iterator[Any]:
    module = import_file(data_folder() / "compiled" / "_planted.py")
    yield module
    module.undo()


def swept(output: Path, build: Callable[[], torch.nn.Module] = OddWidth, width: int = 67) -> Row:
    options = RunOptions(mode="inference", backend="inductor", threads=1, diagnose_budget=60.0, output=str(output))
    runner = FunctionRunner(options)
    runner.build = lambda: Workload(build(), (torch.randn(16, width),))
    return runner.run_model(ModelSpec("here", "net"))


@pytest.mark.slow
def test_a_store_that_is_left_out_is_code_generation(planting: Any, tmp_path: Path) -> None:
    planting.plant(no_tail)
    row = swept(tmp_path)
    assert (flat(row).stage, flat(row).op, row.module) == ("codegen", "aten.mul.Tensor", "OddWidth"), row.detail
    assert row.kernel.startswith("cpp_fused_")
    assert "report the code generated for aten.mul.Tensor" in row.advice
    assert row.repro
    if row.accuracy == Status.COMPILED_RUNS_DIFFER:  # not where both runs were given the same memory
        assert (row.cause, row.confidence) == ("uninitialized_memory", "proven")
        assert row.reproduced.startswith("in a fresh process 20 of 20")
    else:
        assert "x the rounding bound" in row.reproduced


@pytest.mark.slow
def test_its_twin_passes(planting: Any, tmp_path: Path) -> None:
    planting.undo()
    row = swept(tmp_path)
    assert (row.accuracy, flat(row).stage) == (Status.PASS, "")


class Phase(torch.nn.Module):
    """A remainder and a product in one kernel; the twin has the product alone."""

    def __init__(self, *, both: bool) -> None:
        super().__init__()
        self.scale, self.both = torch.nn.Parameter(torch.rand(64) + 1), both

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        turned = torch.remainder(rows, 0.75) if self.both else torch.sin(rows)
        return turned * self.scale


def wrong_remainder(patches: Any) -> None:
    """Lose the sign of the divisor in vector code, as C does."""
    from torch._inductor.codegen.cpp import CppVecOverrides

    patches.attribute(CppVecOverrides, "remainder", staticmethod(lambda a, b: f"({a} - {b} * ({a} / {b}).trunc())"))


@pytest.mark.slow
@pytest.mark.parametrize("both", [True, False])
def test_the_neighbour_of_a_wrong_op_is_not_blamed(both: bool, planting: Any, tmp_path: Path) -> None:
    planting.plant(wrong_remainder)
    row = swept(tmp_path, lambda: Phase(both=both), 64)
    if both:
        assert (flat(row).stage, flat(row).op) == ("codegen", "aten.remainder.Scalar"), row.evidence.text
        assert "torch.remainder" in row.source
        assert row.advice.startswith("report the code generated for aten.remainder.Scalar")
    else:
        assert (row.accuracy, flat(row).stage) == (Status.PASS, "")
