"""Calls that read other memory through a view, although it was written with equal rows; counterparts of calls that two
runs make a different number of times."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from hashbench.core.records import BATCH_INVARIANCE, Row
from hashbench.extensions.invariance.judged import RowEffect
from hashbench.extensions.invariance.layout import ItemSubset
from tests.extensions.invariance.batch_invariance_helpers import BATCH, checked
from tests.extensions.invariance.programs import compared_runs, random_inputs, runner


def row(accuracy: str, **more: Any) -> Row:
    return Row("cpu", "net", 8, accuracy, suite="zoo", mode=BATCH_INVARIANCE, dtype="float32", **more)


DIAGNOSED = replace(BATCH, diagnose_budget=20.0)


def read_by_columns(x: torch.Tensor) -> torch.Tensor:
    return torch.as_strided(x * 2, x.shape, (1, len(x))).exp()


def read_by_rows(x: torch.Tensor) -> torch.Tensor:
    return torch.as_strided(x * 2, x.shape, (x.shape[1], 1)).exp()


VIEWS = {
    "of what a call left": (read_by_columns, "aten.exp.default", "aten.as_strided.default"),
    "of the input": (lambda x: x.as_strided(x.shape, (1, len(x))).exp(), "aten.exp.default", "aten.as_strided.default"),
    "of a different shape": (
        lambda x: (x.t() * 2).contiguous().view(len(x), -1).exp(),
        "aten.exp.default",
        "aten.view",
    ),
    "of the last item": (lambda x: x.exp() + (x * 2)[-1:], "aten.add.Tensor", "aten.slice.Tensor"),
    "of a view": (
        lambda x: (x * 2).as_strided((x.shape[1], len(x)), (len(x), 1)).t().exp(),
        "aten.exp.default",
        "aten.as_strided.default, aten.t.default",
    ),
    "of memory that was written in place": (
        lambda x: (x * 2).add_(1).as_strided(x.shape, (1, len(x))).exp(),
        "aten.exp.default",
        "aten.as_strided.default",
    ),
}


@pytest.mark.parametrize(("function", "kernel", "view"), VIEWS.values(), ids=VIEWS)
def test_first_reader_of_other_items_memory_is_named(function, kernel, view):
    row = checked(function, torch.randn(8, 6), options=DIAGNOSED)
    assert (row.accuracy, row.kernel) == ("fail_batch_invariance_at_4", kernel)
    assert row.detail.startswith(f"through {view}")
    assert (row.cause, row.confidence) == ("batch_coupling", "proven"), row.because
    assert "6 of 6 with different content in the other items" in row.because


def at_the_end(x: torch.Tensor) -> torch.Tensor:
    """Items at the front of a buffer, read at a place that follows from how many there are."""
    buffer = torch.zeros(16, x.shape[1])
    buffer[: len(x)] = x
    return buffer.as_strided(x.shape, (x.shape[1], 1), x.shape[1] * (8 - len(x))).exp()


def test_a_view_that_shows_no_other_items_is_no_coupling():
    row = checked(at_the_end, torch.randn(8, 6), options=DIAGNOSED)
    assert (row.kernel, row.cause) == ("aten.exp.default", "shape_dependent_kernel"), row.because
    assert row.detail.startswith("through aten.as_strided.default")


def test_a_view_that_shows_each_item_its_own_memory_is_nothing():
    assert checked(read_by_rows, torch.randn(8, 6)).accuracy == "pass"
    row = checked(lambda x: read_by_rows(x) - x.mean(0), torch.randn(8, 6), options=DIAGNOSED)
    assert (row.kernel, row.cause) == ("aten.mean.dim", "batch_coupling")


def test_a_result_that_is_a_view_of_other_memory_is_said():
    row = checked(lambda x: (x * 2).as_strided(x.shape, (1, len(x))), torch.randn(8, 6), options=DIAGNOSED)
    assert (row.kernel, row.cause) == ("", "unknown")
    assert "output.0 is a view, and shows other memory of what forward.0/Lambda/aten.mul.Tensor" in row.because


# ------------------------------------------------------------------------------------------------------ counterparts

SUBSET = ItemSubset(8, 4)


def test_loops_over_items_are_matched_by_content() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        doubled = [item * 2 for item in x.unbind()]
        return torch.stack([item * 3 for item in doubled])

    found = compared_runs(runner(function, random_inputs(0, 8), batch=8), SUBSET).comparison
    assert (found.not_attributable, found.differing) == ((), ())
    references = [found.runs.judged[f"forward.0//aten.mul.Tensor#{number}"].reference for number in (4, 7)]
    assert references == ["forward.0//aten.mul.Tensor#8", "forward.0//aten.mul.Tensor#11"]


def test_cut_for_another_call_is_not_different() -> None:
    """The smaller run makes one range more: the one that the reference has, too, where another one is beside it."""

    def function(x: torch.Tensor) -> torch.Tensor:
        own = torch.arange(3.0 * len(x))
        return x * 2 if len(x) == 8 else x * 2 + 0 * own.sum() + 0 * torch.arange(24.0).sum()

    found = compared_runs(runner(function, random_inputs(0, 8), batch=8), SUBSET).comparison
    twin = found.runs.judged["forward.0//aten.arange.default#1"]
    assert (twin.reference, twin.effect) == ("forward.0//aten.arange.default#0", RowEffect.UNKNOWN)
