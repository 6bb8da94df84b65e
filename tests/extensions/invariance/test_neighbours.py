"""Experiments on whole runs: other ops or other memory for another number of items."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from hashbench.core.records import BATCH_INVARIANCE, Row
from tests.extensions.invariance.batch_invariance_helpers import BATCH, checked
from tests.flat_rows import flat


def row(accuracy: str, **more: Any) -> Row:
    return Row("cpu", "net", 8, accuracy, suite="zoo", mode=BATCH_INVARIANCE, dtype="float32", **more)


@torch.library.custom_op("batch_test::split_sum", mutates_args=())
def split_sum(x: torch.Tensor) -> torch.Tensor:
    rows = x.numpy().reshape(len(x), 4, -1)
    in_order = np.add.accumulate(rows, axis=-1)[..., -1]
    halves = sum(np.add.accumulate(part, axis=-1)[..., -1] for part in np.split(rows, 2, axis=-1))
    return torch.from_numpy(np.where(len(x) > 4, halves, in_order).astype(np.float32))


DIAGNOSED = replace(BATCH, diagnose_budget=20.0)


def by_size(x: torch.Tensor, *, apart: bool) -> torch.Tensor:
    """More than five items go to another op, which rounds otherwise, or the same."""
    return split_sum(x) if len(x) <= 5 else whole_sum(x, apart)


@torch.library.custom_op("batch_test::whole_sum", mutates_args=())
def whole_sum(x: torch.Tensor, apart: bool) -> torch.Tensor:
    rows = x.numpy().reshape(len(x), 4, -1)
    parts = np.split(rows, 2, axis=-1) if apart else [rows]
    return torch.from_numpy(sum(np.add.accumulate(part, axis=-1)[..., -1] for part in parts).astype(np.float32))


def scaled_after(x: torch.Tensor) -> torch.Tensor:
    rows = by_size(x, apart=True)
    return rows / rows.abs().amax()


@pytest.mark.parametrize("function", [functools.partial(by_size, apart=True), scaled_after], ids=["alone", "scaled"])
def test_other_ops_for_another_number_of_items_are_a_choice_by_size(function):
    """Also where what is behind it computes over the batch: that is not what is read here."""
    row = checked(function, torch.randn(8, 1024), options=DIAGNOSED)
    assert (row.accuracy, row.kernel) == ("fail_batch_invariance_at_4", "batch_test.split_sum.default")
    assert (row.cause, row.confidence, flat(row).smallest_batch) == ("shape_dependent_kernel", "proven", 6), row.because
    assert "a batch of 8 calls different ops here (batch_test.whole_sum.default)" in row.detail
    assert "0 of 6 with different content in the other items" in row.because
    assert "Draw" not in row.advice


def test_other_ops_that_leave_the_same_are_nothing():
    assert checked(functools.partial(by_size, apart=False), torch.randn(8, 1024)).accuracy == "pass"


def test_cdist_for_many_rows_is_no_coupling():
    """From 26 rows on: ``_euclidean_dist``."""
    table = torch.randn(20, 5, generator=torch.Generator().manual_seed(0))
    row = checked(lambda x: torch.cdist(x, table), torch.randn(40, 5), options=DIAGNOSED)
    assert (row.accuracy, row.kernel) == ("fail_batch_invariance_at_20", "aten._cdist_forward.default")
    assert (row.cause, row.confidence, flat(row).smallest_batch) == ("shape_dependent_kernel", "proven", 26), (
        row.because
    )
    assert row.advice.startswith("Give the kernel the same number of items")


def routed(x: torch.Tensor, *, by_row: bool, small: bool) -> torch.Tensor:
    """A larger, or a smaller, batch is scaled, by the largest number of all or of each."""
    if (len(x) <= 4) is small:
        return x / (x.abs().amax(dim=1, keepdim=True) if by_row else x.abs().amax())
    return x.neg().neg() if not by_row else x / x.abs().max(dim=1, keepdim=True).values


@pytest.mark.parametrize("small", [False, True])
def test_other_ops_that_compute_over_the_batch_are_coupling(*, small: bool):
    x = torch.arange(1.0, 49).view(8, 6)
    row = checked(functools.partial(routed, by_row=False, small=small), x, options=DIAGNOSED)
    assert (row.accuracy, row.cause, row.confidence) == ("fail_batch_invariance_at_4", "batch_coupling", "proven")
    assert "with different content in the other items" in row.because
    assert row.advice.startswith("Let nothing be computed over the items of a batch")
    assert checked(functools.partial(routed, by_row=True, small=small), x).accuracy == "pass"
