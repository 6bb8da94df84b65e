"""One call as both runs made it: what its first items alone do not show, by ops whose behaviour is written here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hashbench.core.records import Decision
from hashbench.extensions.invariance.call_pair import diagnose
from hashbench.extensions.invariance.cause import ItemEvidence, decide
from hashbench.extensions.invariance.finding import BatchFinding
from hashbench.extensions.invariance.layout import ItemSubset
from hashbench.extensions.invariance.locate import finding_of
from tests.extensions.invariance.programs import compared_runs, random_inputs, runner

BATCH, SIZE = 8, 3


@torch.library.custom_op("hashbench_batch::by_strides", mutates_args=())
def by_strides(x: torch.Tensor) -> torch.Tensor:
    """Contiguous memory by one formula, any other by another."""
    return x * 1 if x.is_contiguous() else x * 1.001


@torch.library.custom_op("hashbench_batch::by_rows", mutates_args=())
def by_rows(rows: torch.Tensor) -> torch.Tensor:
    """Few rows by one formula, many by another."""
    return rows * 1 if len(rows) <= SIZE * 4 else rows * 1.001


@torch.library.custom_op("hashbench_batch::by_rows_of_columns", mutates_args=())
def by_rows_of_columns(rows: torch.Tensor) -> torch.Tensor:
    """The same, and another one for contiguous memory."""
    return by_rows(rows) + float(rows.is_contiguous())


@torch.library.custom_op("hashbench_batch::by_neighbours", mutates_args=())
def by_neighbours(rows: torch.Tensor) -> torch.Tensor:
    """Each row plus a little of the sum of all."""
    return rows + rows.sum() / 1e4


@torch.library.custom_op("hashbench_batch::of_first", mutates_args=())
def of_first(rows: torch.Tensor, count: int) -> torch.Tensor:
    """The sums of so many rows, few of them by one formula, many by another."""
    return rows[:count].sum(1) * (1 if count <= SIZE else 1.001)


def turned(x: torch.Tensor) -> torch.Tensor:
    """As a reshape does where one item needs no copy: the same numbers in another order of memory."""
    return by_strides(x * 2 if len(x) == BATCH else (x * 2).transpose(1, 2).contiguous().transpose(1, 2))


def in_order(op: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """The tokens of all items in the order of their first number, and put back."""

    def function(x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        order = (tokens * torch.arange(1.0, 9.0)).sum(1).sin().argsort()
        return op(tokens[order])[order.argsort()].view_as(x)

    return function


def diagnosed(function: Callable[..., Any]) -> tuple[BatchFinding, ItemEvidence, Decision]:
    run_at = runner(function, random_inputs(3, BATCH), batch=BATCH)
    found = finding_of(run_at, compared_runs(run_at, ItemSubset(BATCH, SIZE)))
    assert isinstance(found, BatchFinding)
    evidence = diagnose(found.call, found.pair, budget=20.0)
    assert evidence is not None
    return found, evidence, decide(evidence)


def test_contiguous_inputs_remedy_a_choice_by_strides() -> None:
    found, evidence, decision = diagnosed(turned)
    assert found.kernel == "hashbench_batch.by_strides.default"
    assert (evidence.arm("other_number").differing, evidence.arm("as_in_runs").differing) == (0, 3)
    assert evidence.removes("same_strides")
    assert (decision.cause, decision.confidence) == ("shape_dependent_kernel", "proven")
    assert "with contiguous inputs: it chooses by the order in memory" in decision.because
    assert "make its inputs contiguous" in decision.advice


@pytest.mark.parametrize(
    ("op", "cause"),
    [
        (by_rows, "shape_dependent_kernel"),
        (lambda rows: by_rows_of_columns(rows.t().contiguous().t()), "shape_dependent_kernel"),
        (by_neighbours, "batch_coupling"),
    ],
    ids=["number", "number, transposed", "content"],
)
def test_rows_in_another_order_repeat_both_calls(op: Any, cause: str) -> None:
    found, evidence, decision = diagnosed(in_order(op))
    assert found.kernel.startswith("hashbench_batch.by_")
    assert found.call is None
    assert evidence.arm("as_in_runs").differing == 3
    assert evidence.arm("other_content").ran
    assert (decision.cause, decision.confidence) == (cause, "proven")


def test_other_content_needs_rows_of_known_items() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        return x + of_first(tokens[tokens[:, 0] > 0], len(x))[:, None, None]

    found, evidence, decision = diagnosed(function)
    assert (found.kernel, found.call) == ("hashbench_batch.of_first.default", None)
    assert evidence.arm("as_in_runs").differing == 3
    assert (evidence.arm("other_content").ran, decision.cause) == (False, "unknown")


@pytest.mark.parametrize(
    ("function", "kernel"),
    [(lambda x: (x * 2).sort(dim=0).values, "sort"), (lambda x: x.flatten(1) @ x.flatten(1).t(), "mm")],
    ids=["other items' rows", "as many as there are items"],
)
def test_what_an_item_has_from_others_is_coupling(function: Callable[..., Any], kernel: str) -> None:
    found, _, decision = diagnosed(function)
    assert (found.kernel.split(".")[1], found.pair) == (kernel, None)
    assert (decision.cause, decision.confidence) == ("batch_coupling", "proven")
