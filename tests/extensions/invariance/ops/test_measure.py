"""``hashbench audit --rows`` on planted ops: what they do with the items of a batch is written here, and depends on no
processor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hashbench import cli
from hashbench.core.check.function import FunctionCall
from hashbench.core.diagnose.calls.live import captured_environment
from hashbench.core.results.rows import read_table
from hashbench.extensions.invariance.item_call import ItemCall
from hashbench.extensions.invariance.ops import measure
from hashbench.extensions.invariance.ops.axis import draws
from hashbench.extensions.invariance.ops.table import INVARIANCE_ROWS, Invariance, InvarianceRow
from hashbench.tools.audit.cases import Case
from tests.extensions.invariance.ops.op_helpers import FIRST, planted_place
from tests.extensions.invariance.test_experiments import ROWS, Unsteady, alone, by_number, drawing, scaled

SMALL = ROWS[:5]


@pytest.mark.parametrize(
    ("function", "verdict", "sizes"),
    [
        (alone, Invariance.INVARIANT, ()),
        (by_number, Invariance.DEPENDS, (1, 2)),
        (Unsteady(), Invariance.UNSTEADY, ()),
        (lambda rows: torch.arange(len(rows)) + rows[:, 0], Invariance.PLACE, ()),
        (lambda rows: torch.tensor([0, 1, 2, 3, 3, 2, 1, 0])[: len(rows)] + rows[:, 0], Invariance.PLACE, ()),
    ],
    ids=["invariant", "number", "unsteady", "place", "the same backwards"],
)
def test_what_becomes_of_the_rows(function: Callable[..., Any], verdict: str, sizes: tuple[int, ...]) -> None:
    call = ItemCall(function, (ROWS,), {}, 8, (FIRST,), (FIRST,))
    with captured_environment(call):
        assert measure.measured(call) == (verdict, sizes)


def seeded(rows: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(0)
    return rows + torch.rand(rows.shape)


def seeded_and_put_back(rows: torch.Tensor) -> torch.Tensor:
    """As torch's op database calls what draws."""
    with torch.random.fork_rng():
        return seeded(rows)


def windowed(rows: torch.Tensor) -> torch.Tensor:
    """An item's neighbours enter by so little that it may seem to be rounding."""
    return rows + rows.sum(0) * 1e-4


def rows_of(function: Callable[..., Any], rows: torch.Tensor = SMALL) -> list[InvarianceRow]:
    case = Case("op_db", "planted", "float32", "0", "rows", FunctionCall(function, (rows,)))
    samples = [("float32", [case])]
    return list(measure.rows_of(("op_db", "planted"), samples, device="cpu", budget=10.0, folder=None))


def test_a_row_says_from_which_number_on_and_why() -> None:
    row, *wide = rows_of(by_number)

    assert (row.verdict, row.items, row.sizes, row.smallest_batch) == ("depends on the number", 8, "1 2", 3)
    assert (row.cause, row.confidence) == ("shape_dependent_kernel", "proven")
    assert "pad the batch to a multiple of 4 items" in row.advice
    assert [(one.widened, one.items) for one in wide] == [("30→270", 32)]


@pytest.mark.parametrize(
    ("function", "verdict"),
    [
        (alone, "invariant"),
        (scaled, "coupled"),
        (drawing, "draws random numbers"),
        (seeded, "draws random numbers"),
        (seeded_and_put_back, "draws random numbers"),
        (Unsteady(), "differs by itself"),
        (windowed, "coupled"),
        (torch.sum, "no batch axis"),
    ],
)
def test_each_has_its_verdict(function: Callable[..., Any], verdict: str) -> None:
    assert {row.verdict for row in rows_of(function)} == {verdict}


def test_a_kernel_that_could_draw_and_does_not_draws_nothing() -> None:
    dropout = ItemCall(torch.nn.functional.dropout, (ROWS, 0.5, False), {}, 8, (FIRST,), (FIRST,))
    assert not draws(dropout)
    assert draws(replace(dropout, args=(ROWS, 0.5, True)))

    attention = torch.nn.functional.scaled_dot_product_attention  # its kernel could drop out
    assert draws(ItemCall(attention, (ROWS[:, None],) * 3, {}, 8, (FIRST,) * 3, (FIRST,))) is False


def test_a_number_of_items_of_which_the_output_has_no_dimension_is_not_compared() -> None:
    assert {row.verdict for row in rows_of(lambda rows: rows.squeeze(0))} == {"invariant"}


def test_an_op_that_refuses_its_sample_fails() -> None:
    (row,) = rows_of(lambda rows: rows.reshape(7, 7))

    assert row.verdict == "fails"
    assert "shape '[7, 7]' is invalid" in row.error


def test_rows_that_come_out_the_same_when_they_are_looked_at_are_not_attributable(monkeypatch: Any) -> None:
    monkeypatch.setattr("hashbench.extensions.invariance.ops.measure.measured", lambda _: (Invariance.DEPENDS, (1, 2)))
    row = rows_of(lambda rows: rows.exp())[0]
    assert (row.verdict, row.kernel) == ("depends on the number", "")
    assert row.because.startswith("not attributable: in runs of their own the rows of 2 items are those among 8")


def test_what_depends_on_the_place_alone_has_a_kernel_and_a_cause() -> None:
    row = rows_of(lambda rows: planted_place(rows.neg()))[0]

    assert (row.verdict, row.kernel) == ("depends on the place", "planted_rows.by_place.default")
    assert (row.cause, row.confidence) == ("shape_dependent_kernel", "proven")
    assert "at other places of the batch: where an item lies in the batch decides too" in row.because


@pytest.mark.slow
def test_the_command_leaves_a_table(tmp_path: Path, capsys: Any) -> None:
    ops = ["--ops", "exp", "nn.functional.batch_norm"]
    output = [*ops, "--dtypes", "float32", "--samples", "2", "--output", str(tmp_path / "out")]
    assert cli.main(["audit", "--rows", *output]) == 0

    rows = INVARIANCE_ROWS.rows(read_table(tmp_path / "out" / "invariance.csv"))
    assert {row.verdict for row in rows if row.op == "exp"} <= {"invariant", "no batch axis"}
    assert "coupled" in {row.verdict for row in rows if row.op == "nn.functional.batch_norm"}  # where it trains
    assert "invariance.csv" in capsys.readouterr().out
    assert cli.main(["audit", "--rows", "--results", str(tmp_path), *output]) == 2
