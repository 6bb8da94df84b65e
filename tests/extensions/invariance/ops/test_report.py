"""Reports and comparisons of ``hashbench audit --rows``, and the files that they read."""

from __future__ import annotations

import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import fuzzing
import pytest

from hashbench import cli
from hashbench.core.errors import HashbenchError
from hashbench.core.io import to_json
from hashbench.core.report import audits
from hashbench.core.results import load
from hashbench.core.results.rows import read_table
from hashbench.extensions.invariance.ops import report
from hashbench.extensions.invariance.ops.table import INVARIANCE, INVARIANCE_ROWS, Invariance, InvarianceRow
from hashbench.tools.audit import audit_table
from hashbench.tools.audit.audit_table import AUDIT_ROWS, Audit, audit_kind
from hashbench.tools.audit.report import compare

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
        (",op_db,", ",,", "required column 'source' is empty"),
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
        return f"{len(report.findings(audit_table.read(path, INVARIANCE).rows))} findings"
    except HashbenchError as refused:
        return str(refused)


def test_rows_of_a_worker_that_are_none_are_refused() -> None:
    for name, document in fuzzing.altered(to_json(ROW), seed=6):
        try:
            row = INVARIANCE_ROWS.from_json(document)
        except ValueError:
            continue
        assert row.verdict in list(Invariance), name
        report.summary([row])


def test_the_text_lists_what_depends_on_the_batch_and_counts_the_rest() -> None:
    invariant = InvarianceRow("cpu", "op_db", "mm", "float32", "1", "", "invariant", 8)
    coupled = InvarianceRow("cpu", "op_db", "softmax", "float32", "0", "", "coupled", 8)
    text = report.summary([ROW, invariant, coupled])

    assert report.findings([ROW, invariant, coupled])[0][:5] == (
        *("depends on the number", "mm", "float32", "1 of 2", "3"),
    )
    assert "(coupled): softmax" in text
    assert audits.counts([ROW, invariant], Invariance) == [("invariant", 1, 1), ("depends on the number", 1, 1)]
    assert report.summary([]) == "No op was run."


def test_the_page_explains_every_column_and_verdict() -> None:
    page = (Path(__file__).parents[4] / "docs" / "audit.md").read_text(encoding="utf-8")

    for name in (*INVARIANCE_ROWS.types, *Invariance):
        assert f"`{name}`" in page, name


def test_the_pages_table_is_that_of_the_baseline() -> None:
    root = Path(__file__).parents[4]
    baseline = root / "results" / "expected" / "audit_rows_cpu.csv"
    table = runpy.run_path(str(root / "docs" / "readme_tables.py"))["audit"](baseline)
    page = (root / "results" / "expected" / "audit.md").read_text(encoding="utf-8")

    assert audit_kind(baseline) is INVARIANCE
    assert baseline.with_name("audit_rows_cpu.environment.json").is_file()
    assert f"<!-- audit rows -->\n{table}\n<!-- /audit rows -->" in page
    assert "| depends on the number | " in table


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
    "only rounding is left": (COUPLED, ROW, "depends differently", "coupled → depends on the number"),
    "now the place": (ROW, PLACED, "depends differently", "depends on the number → depends on the place"),
    "another kernel": (replace(ROW, kernel="a"), replace(ROW, kernel="b"), "depends differently", "kernel: a → b"),
    "another size": (ROW, replace(ROW, smallest_batch=2), "depends differently", "smallest batch: 3 → 2"),
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
    (change,) = compare(*sides, INVARIANCE).changes

    assert change.outcome == expected
    assert change.outcome.worse == (
        expected in ("became dependent", "not measured any more", "missing", "not comparable")
    )
    assert change.note == note or expected == "unchanged"


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
    assert capsys.readouterr().err == f"{said}. Compare two audits of the same kind, or two sweeps.\n"


def test_a_folder_of_expected_sweeps_may_hold_one_too(tmp_path: Path) -> None:
    (tmp_path / "rows_cpu.csv").write_text(INVARIANCE_ROWS.text([ROW]))
    (tmp_path / "a_training_cpu.csv").write_text("dev,name,batch_size,accuracy\ncpu,resnet18,4,pass\n")

    assert [row.name for row in load.load_sweep(tmp_path).rows] == ["resnet18"]
