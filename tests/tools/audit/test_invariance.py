"""``hashbench audit --rows`` on planted ops: what they do with the items of a batch is written here, and depends on no
processor."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import fuzzing
import pytest
import torch

from hashbench import cli
from hashbench.batch.finding import BatchFinding
from hashbench.batch.item_call import ItemCall, in_force
from hashbench.batch.layout import ItemAxis
from hashbench.check.function import FunctionCall
from hashbench.errors import HashbenchError
from hashbench.io import to_json
from hashbench.results import audit_table, load
from hashbench.results.audit_table import AUDIT_ROWS, Audit, AuditOptions
from hashbench.results.invariance_table import INVARIANCE, INVARIANCE_ROWS, Invariance, InvarianceRow, audit_kind
from hashbench.results.rows import read_table
from hashbench.tools.audit import invariance, invariance_report, report
from hashbench.tools.audit.axis import Itemwise, draws, find_axis, widened, with_items
from hashbench.tools.audit.cases import Case
from hashbench.tools.audit.kernel import another_order, kernel_of, located
from tests.batch.test_experiments import ROWS, Unsteady, alone, by_number, drawing, in_blocks, scaled

FIRST = ItemAxis(0)
SMALL = ROWS[:5]


def found(function: Callable[..., Any], *args: Any) -> Itemwise | None:
    return find_axis(function, args, {})


# ------------------------------------------------------------------------------------------------------ the axis


@pytest.mark.parametrize(
    ("function", "args", "axes"),
    [
        (torch.neg, (torch.rand(3, 5),), (FIRST,)),
        (torch.add, (torch.rand(5, 5), torch.rand(5, 5)), (FIRST, FIRST)),
        (torch.add, (torch.rand(4, 5), torch.rand(5)), (FIRST, None)),
        (torch.add, (torch.rand(()), torch.rand(4, 5)), (None, FIRST)),
        (torch.mm, (torch.rand(4, 5), torch.rand(5, 4)), (FIRST, None)),
        (torch.sum, (torch.rand(4, 5), 0), (ItemAxis(1),)),
        (torch.cumsum, (torch.rand(4, 5), 0), (ItemAxis(1),)),
        (lambda weight, places: weight[places], (torch.rand(6, 3), torch.tensor([1, 5, 2])), (None, FIRST)),
        (lambda rows, _: rows.clone(), (torch.rand(5, 5), torch.rand(5)), (FIRST, None)),
    ],
    ids=[
        "alone",
        "both",
        "broadcast",
        "after a number",
        "matrix",
        "reduced",
        "in order",
        "indices",
        "as many channels",
    ],
)
def test_the_item_axis_is_found_by_experiment(
    function: Callable[..., Any], args: tuple[Any, ...], axes: tuple[ItemAxis | None, ...]
) -> None:
    itemwise = found(function, *args)

    assert itemwise is not None
    assert (itemwise.call.axes, itemwise.coupled) == (axes, False)


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (torch.sum, (torch.rand(4),)),
        (torch.nn.functional.conv2d, (torch.rand(1, 3, 4, 4), torch.rand(6, 3, 2, 2))),
        (torch.rand, (3,)),
        (torch.linalg.inv, (torch.eye(3) + torch.rand(3, 3),)),
    ],
    ids=["all reduced", "one image and a weight", "no tensor", "refuses the same row twice"],
)
def test_where_nothing_is_one_for_each_item_there_is_no_axis(function: Callable[..., Any], args: Any) -> None:
    assert found(function, *args) is None


def test_items_inside_a_merged_dimension_of_the_output_are_found() -> None:
    itemwise = found(lambda rows: rows.reshape(-1), torch.rand(3, 4))

    assert itemwise is not None
    assert itemwise.call.outputs == (ItemAxis(0, inner=4),)


def test_what_is_computed_over_the_items_is_coupled() -> None:
    itemwise = found(lambda rows: torch.softmax(rows, 0), torch.rand(4, 5))

    assert itemwise is not None
    assert itemwise.coupled


def test_inner_dimensions_are_widened_alone_in_all_tensors_and_numbers() -> None:
    itemwise = found(torch.nn.functional.layer_norm, torch.rand(3, 6), [6], torch.rand(6))
    assert itemwise is not None
    (wide,) = widened(itemwise)

    assert wide.widened == "6→258"
    assert wide.call.shapes == "(3,258)x(258)"
    assert wide.call.args[1] == [258]


def test_no_two_items_and_no_two_rows_of_a_widened_sample_are_equal() -> None:
    itemwise = found(torch.matmul, torch.rand(3, 6, 6) + 1, torch.rand(6, 6))
    assert itemwise is not None
    wide = with_items(next(widened(itemwise)).call, 8)
    items, weight = wide.tensors

    assert items.shape == (8, 258, 258)
    assert len(items.flatten(1).unique(dim=0)) == 8
    assert [torch.linalg.matrix_rank(one.double()) for one in (*items, weight)] == [258] * 9


# ------------------------------------------------------------------------------------------------------ measuring


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
    with in_force(call):
        assert invariance.measured(call) == (verdict, sizes)


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
    search = invariance._Search(AuditOptions(), None)
    return list(search.rows_of_case(case))


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


# ------------------------------------------------------------------------------------------------------ the kernel


@torch.library.custom_op("planted_rows::by_number", mutates_args=())
def planted(rows: torch.Tensor) -> torch.Tensor:
    return rows * (1.0 if len(rows) < 3 else 1.001)


@torch.library.custom_op("planted_rows::by_place", mutates_args=())
def planted_place(rows: torch.Tensor) -> torch.Tensor:
    return rows * (1.0 + 0.001 * (torch.arange(len(rows)) % 2)).view(-1, *[1] * (rows.dim() - 1))


@pytest.mark.parametrize(
    ("function", "sizes", "kernel"),
    [(planted, (1, 2), "planted_rows.by_number.default"), (planted_place, (), "planted_rows.by_place.default")],
    ids=["number", "place"],
)
def test_the_kernel_is_the_first_whose_inputs_rows_are_equal(
    function: Callable[..., Any], sizes: tuple[int, ...], kernel: str
) -> None:
    call = ItemCall(lambda rows: function(rows.neg()).exp() + 1, (ROWS,), {}, 8, (FIRST,), (FIRST,))
    with in_force(call):
        found = kernel_of(call, sizes)

    assert found is not None
    assert found.kernel == kernel
    assert found.call is not None
    assert (found.call.axes, found.call.outputs, found.call.items) == ((FIRST,), (FIRST,), 8)


def test_the_kernel_is_named_where_the_runs_make_other_calls() -> None:
    call = ItemCall(lambda rows: in_blocks(planted(rows)), (ROWS,), {}, 8, (FIRST,), (FIRST,))
    with in_force(call):
        found = kernel_of(call, (2,))

    assert found is not None
    assert found.kernel == "planted_rows.by_number.default"


def test_of_several_numbers_that_is_taken_whose_call_can_be_repeated() -> None:
    call = ItemCall(lambda rows: planted(rows) if len(rows) > 1 else rows.exp(), (ROWS,), {}, 8, (FIRST,), (FIRST,))
    with in_force(call):
        found = kernel_of(call, (1, 2))

    assert found is not None
    assert (found.kernel, found.call is not None) == ("planted_rows.by_number.default", True)


def test_other_numbers_are_tried_where_the_first_and_the_last_name_none() -> None:
    call, tried = ItemCall(planted, (ROWS,), {}, 8, (FIRST,), (FIRST,)), []
    with in_force(call), pytest.MonkeyPatch.context() as patch:

        def only_of_two(call: ItemCall, chosen: range) -> BatchFinding | None:
            tried.append(len(chosen))
            return located(call, chosen) if len(chosen) == 2 else BatchFinding(len(chosen), 8, detail="none")

        patch.setattr("hashbench.tools.audit.kernel.located", only_of_two)
        found = kernel_of(call, (1, 2, 3, 4))
    assert tried == [1, 4, 2]
    assert found is not None
    assert found.kernel == "planted_rows.by_number.default"


def test_rows_that_come_out_the_same_when_they_are_looked_at_are_not_attributable(monkeypatch: Any) -> None:
    monkeypatch.setattr("hashbench.tools.audit.invariance.measured", lambda _: (Invariance.DEPENDS, (1, 2)))
    row = rows_of(lambda rows: rows.exp())[0]
    assert (row.verdict, row.kernel) == ("depends on the number", "")
    assert row.because.startswith("not attributable: in runs of their own the rows of 2 items are those among 8")


def test_what_depends_on_the_place_alone_has_a_kernel_and_a_cause() -> None:
    row = rows_of(lambda rows: planted_place(rows.neg()))[0]

    assert (row.verdict, row.kernel) == ("depends on the place", "planted_rows.by_place.default")
    assert (row.cause, row.confidence) == ("shape_dependent_kernel", "proven")
    assert "at other places of the batch: where an item lies in the batch decides too" in row.because


def test_an_order_in_which_items_come_out_otherwise_is_found() -> None:
    call = ItemCall(planted_place, (ROWS,), {}, 8, (FIRST,), (FIRST,))
    with in_force(call):
        assert another_order(call) == [1, 2, 3, 4, 5, 6, 7, 0]


# -------------------------------------------------------------------------------------------------- its files


ROW = InvarianceRow("cpu", "op_db", "mm", "float32", "0", "", "depends on the number", 8, "1 2", 3)


def test_rows_survive_the_file_exactly(tmp_path: Path) -> None:
    died = INVARIANCE.died("cpu", ("op_db", "aborts"), timed_out=False, error="killed by SIGABRT")
    hung = INVARIANCE.died("cpu", ("op_db", "hangs"), timed_out=True, error="no result after 120 s")
    path = tmp_path / "invariance.csv"
    path.write_text(INVARIANCE_ROWS.text([ROW, died, hung]))

    assert INVARIANCE_ROWS.rows(read_table(path)) == [ROW, died, hung]
    assert (died.verdict, hung.verdict) == ("crashed", "timeout")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("depends on the number", "depends", "has the verdict 'depends'"),
        (",8,1 2,3,", ",-8,1 2,3,", "'-8' as items: that is not a count"),
        (",8,1 2,3,", ",8,1-2,3,", "'1-2' as sizes: that is not numbers of items"),
        (",op_db,", ",,", "has no source"),
        ("sample,widened", "sample,wider", "columns that this hashbench does not know: wider"),
    ],
)
def test_a_file_that_is_none_is_refused_in_one_line(tmp_path: Path, old: str, new: str, said: str) -> None:
    (tmp_path / "invariance.csv").write_text(INVARIANCE_ROWS.text([ROW]).replace(old, new, 1))
    with pytest.raises(HashbenchError, match=said) as refused:
        audit_table.read(tmp_path, INVARIANCE)

    assert "\n" not in str(refused.value)


def test_a_damaged_file_is_refused_or_read_and_never_more(tmp_path: Path) -> None:
    content = INVARIANCE_ROWS.text([ROW, replace(ROW, sample="1", widened="5→260"), replace(ROW, sample="2")]).encode()
    for name, damaged in fuzzing.damaged(content, seed=5):
        (tmp_path / "invariance.csv").write_bytes(damaged)
        assert "\n" not in read_or_refused(tmp_path), name


def read_or_refused(path: Path) -> str:
    """What reading says; anything else than an error of ours goes through."""
    try:
        return f"{len(invariance_report.findings(audit_table.read(path, INVARIANCE).rows))} findings"
    except HashbenchError as refused:
        return str(refused)


def test_rows_of_a_worker_that_are_none_are_refused() -> None:
    for name, document in fuzzing.altered(to_json(ROW), seed=6):
        try:
            row = INVARIANCE_ROWS.from_json(document)
        except ValueError:
            continue
        assert row.verdict in list(Invariance), name
        invariance_report.summary([row])


def test_the_text_lists_what_depends_on_the_batch_and_counts_the_rest() -> None:
    invariant = InvarianceRow("cpu", "op_db", "mm", "float32", "1", "", "invariant", 8)
    coupled = InvarianceRow("cpu", "op_db", "softmax", "float32", "0", "", "coupled", 8)
    text = invariance_report.summary([ROW, invariant, coupled])

    assert invariance_report.findings([ROW, invariant, coupled])[0][:5] == (
        *("depends on the number", "mm", "float32", "1 of 2", "3"),
    )
    assert "(coupled): softmax" in text
    assert report.counts([ROW, invariant], Invariance) == [("invariant", 1, 1), ("depends on the number", 1, 1)]
    assert invariance_report.summary([]) == "No op was run."


def test_the_page_explains_every_column_and_verdict() -> None:
    page = (Path(__file__).parents[3] / "docs" / "audit.md").read_text(encoding="utf-8")

    for name in (*INVARIANCE_ROWS.types, *Invariance):
        assert f"`{name}`" in page, name


def test_the_pages_table_is_that_of_the_baseline() -> None:
    root = Path(__file__).parents[3]
    baseline = root / "results" / "expected" / "audit_rows_cpu.csv"
    table = runpy.run_path(str(root / "docs" / "readme_tables.py"))["audit"](baseline)
    page = (root / "docs" / "audit_results.md").read_text(encoding="utf-8")

    assert audit_kind(baseline) is INVARIANCE
    assert baseline.with_name("audit_rows_cpu.environment.json").is_file()
    assert f"<!-- audit rows -->\n{table}\n<!-- /audit rows -->" in page
    assert "| depends on the number | " in table


# -------------------------------------------------------------------------------------------------- two audits


PLACED = replace(ROW, verdict="depends on the place", sizes="")
INVARIANT = replace(ROW, verdict="invariant", sizes="", smallest_batch=None)
COUPLED = replace(INVARIANT, verdict="coupled", cause="batch_coupling")
NO_AXIS = replace(INVARIANT, verdict="no batch axis", items=None)
FAILS = replace(NO_AXIS, verdict="fails")
CRASHED = replace(NO_AXIS, verdict="crashed")

CHANGES = {
    "the same": (ROW, ROW, "unchanged", ""),
    "it began to depend": (INVARIANT, ROW, "became dependent", "invariant → depends on the number"),
    "it depends by more than rounding": (ROW, COUPLED, "became dependent", "depends on the number → coupled"),
    "it was not measured and depends": (FAILS, PLACED, "became dependent", "fails → depends on the place"),
    "it depends no longer": (ROW, INVARIANT, "became invariant", "depends on the number → invariant"),
    "only rounding is left": (COUPLED, ROW, "depends otherwise", "coupled → depends on the number"),
    "now the place": (ROW, PLACED, "depends otherwise", "depends on the number → depends on the place"),
    "another kernel": (replace(ROW, kernel="a"), replace(ROW, kernel="b"), "depends otherwise", "kernel: a → b"),
    "another size": (ROW, replace(ROW, smallest_batch=2), "depends otherwise", "smallest batch: 3 → 2"),
    "it died": (INVARIANT, CRASHED, "not measured any more", "invariant → crashed"),
    "it has no axis any more": (ROW, NO_AXIS, "not measured any more", "depends on the number → no batch axis"),
    "what had no axis died": (NO_AXIS, CRASHED, "not measured any more", "no batch axis → crashed"),
    "it was never measured": (FAILS, CRASHED, "unchanged", ""),
    "it is measured now": (NO_AXIS, INVARIANT, "measured now", "no batch axis → invariant"),
    "it is gone": (INVARIANT, None, "missing", ""),
    "it is new": (None, ROW, "new", ""),
    "other threads": (replace(ROW, threads=2), replace(INVARIANT, threads=4), "not comparable", "threads: 2 → 4"),
    "other items": (ROW, replace(ROW, items=32), "not comparable", "items: 8 → 32"),
}


@pytest.mark.parametrize(("base", "new", "expected", "note"), CHANGES.values(), ids=CHANGES)
def test_what_became_of_a_sample(
    base: InvarianceRow | None, new: InvarianceRow | None, expected: str, note: str
) -> None:
    sides = [Audit(name, () if row is None else (row,)) for name, row in (("a", base), ("b", new))]
    (change,) = invariance_report.compare(*sides).changes

    assert change.outcome == expected
    assert change.outcome.worse == (
        expected in ("became dependent", "not measured any more", "missing", "not comparable")
    )
    assert change.note == note or expected == "unchanged"


def test_neither_row_is_no_comparison() -> None:
    with pytest.raises(ValueError, match="neither"):
        invariance_report.decide("", "")


def written(folder: Path, *rows: InvarianceRow) -> Path:
    folder.mkdir()
    (folder / "invariance.csv").write_text(INVARIANCE_ROWS.text(rows))
    (folder / "environment.json").write_text(f'{{"key": "a", "packages": {{"torch": "{folder.name}"}}}}')
    return folder


def test_compare_takes_folders_and_files_in_every_form(tmp_path: Path, capsys: Any) -> None:
    base = written(tmp_path / "2.14", INVARIANT, replace(ROW, op="addmm"))
    new = written(tmp_path / "2.15", replace(ROW, kernel="mm"), replace(INVARIANT, op="addmm"))

    assert cli.main(["compare", str(base), str(new)]) == 1
    said = capsys.readouterr().out
    assert "packages.torch: 2.14 → 2.15" in said
    assert "became dependent (1)\n  op_db mm float32 0   invariant → depends on the number" in said
    assert "became invariant (1)\n  op_db addmm float32 0" in said
    for form in ("markdown", "json", "csv"):
        assert cli.main(["compare", str(base / "invariance.csv"), str(new), "--format", form]) == 1
        assert "became dependent" in capsys.readouterr().out
    assert cli.main(["compare", str(new), str(new)]) == 0


def test_audits_of_two_kinds_are_not_compared(tmp_path: Path, capsys: Any) -> None:
    rows = written(tmp_path / "rows", ROW)
    plain = tmp_path / "audit.csv"
    plain.write_text(AUDIT_ROWS.text([]))
    assert cli.main(["compare", str(rows), str(plain)]) == 2
    said = f"hashbench: {plain} is an audit without --rows and {rows} is an audit with --rows: they cannot be compared"
    assert capsys.readouterr().err == f"{said}. Name two audits of one kind, or two sweeps.\n"


def test_a_folder_of_expected_sweeps_may_hold_one_too(tmp_path: Path) -> None:
    (tmp_path / "rows_cpu.csv").write_text(INVARIANCE_ROWS.text([ROW]))
    (tmp_path / "a_training_cpu.csv").write_text("dev,name,batch_size,accuracy\ncpu,resnet18,4,pass\n")

    assert [row.name for row in load.load_sweep(tmp_path).rows] == ["resnet18"]


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
