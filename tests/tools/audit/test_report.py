"""``audit.csv`` written, read and compared."""

from __future__ import annotations

import json
import runpy
from dataclasses import replace
from pathlib import Path

import fuzzing
import pytest

from hashbench import __version__, cli
from hashbench.core.errors import HashbenchError
from hashbench.core.io import to_json
from hashbench.core.report.audits import counts
from hashbench.core.report.compare import Became
from hashbench.core.results import load
from hashbench.tools.audit import audit_table, report
from hashbench.tools.audit.audit_table import AUDIT_ROWS, AuditManifest, AuditOptions, AuditRow, AuditVerdict, Shown

ROW = AuditRow("cpu", "op_db", "put", "float32", "0", "forward", "as documented", documented="not listed",
               off="identical", on="identical", unfilled="identical", runs=20, off_distinct=1, on_distinct=1,
               unfilled_distinct=1, inputs="float32[5,5]", threads=8)  # fmt: skip
DIFFERS = replace(ROW, verdict="undocumented nondeterminism", off="differs", off_distinct=9)
UNDER = replace(DIFFERS, verdict="differs under the flag", on="differs", on_distinct=9)
RAISES = replace(ROW, verdict="raises", on="raises", unfilled="raises", on_distinct=None, unfilled_distinct=None)
DEAD = AuditRow("cpu", "op_db", "put", "float32", "0", "forward", "crashed")


def written(folder: Path, *rows: AuditRow, torch: str = "2.15.0", asked: AuditManifest | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "audit.csv").write_text(AUDIT_ROWS.text(rows))
    environment = {"key": torch, "cpu": {"cores": 2 + len(torch), "model": "a CPU"}, "packages": {"torch": torch}}
    (folder / "environment.json").write_text(json.dumps(environment))
    if asked is not None:
        (folder / "audit.json").write_text(json.dumps(to_json(asked)))
    return folder


def test_rows_survive_the_file_exactly(tmp_path: Path) -> None:
    rows = (ROW, replace(DIFFERS, sample="=1+1", because='a\nb, "c"'), replace(DEAD, dtype="", error="-x"))

    read = audit_table.read(written(tmp_path, *rows)).rows

    assert read == (rows[0], replace(rows[1], because='a b, "c"'), rows[2])
    assert "\n'=1" not in (tmp_path / "audit.csv").read_text()
    assert [AUDIT_ROWS.from_json(json.loads(json.dumps(to_json(row)))) for row in rows] == list(rows)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("op,verdict,off,on\nput,as documented,,\n", "lacks the columns dev, source, phase"),
        (f"{','.join(AUDIT_ROWS.types)},more\n", "columns that this hashbench does not know: more"),
        (AUDIT_ROWS.text([ROW, ROW]), "holds cpu op_db put float32 0 forward twice"),
        (AUDIT_ROWS.text([ROW]).replace(",20,", ",-20,"), "line 2 of .* '-20' as runs: that is not a count"),
        (AUDIT_ROWS.text([ROW]).replace("as documented", "fine"), "'fine'"),
        (AUDIT_ROWS.text([ROW]).replace("op_db", ""), "required column 'source' is empty"),
        (AUDIT_ROWS.text([ROW])[:-5], "is cut off"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_audit_is_refused_in_one_line(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "audit.csv").write_text(text)

    with pytest.raises(HashbenchError, match=said) as refused:
        audit_table.read(tmp_path)

    assert "\n" not in str(refused.value)


def read_or_refused(path: Path) -> str:
    """What reading says; anything else than an error of ours goes through."""
    try:
        return f"{len(audit_table.read(path).rows)} rows"
    except HashbenchError as refused:
        return str(refused)


def test_a_damaged_audit_is_refused_or_read_and_never_more(tmp_path: Path) -> None:
    content = AUDIT_ROWS.text([ROW, replace(DIFFERS, sample="1"), replace(RAISES, sample="2")]).encode()
    path = tmp_path / "audit.csv"
    for name, damaged in fuzzing.damaged(content, seed=5):
        path.write_bytes(damaged)
        assert "\n" not in read_or_refused(path), name


def test_rows_of_a_worker_that_are_none_are_refused() -> None:
    for name, document in fuzzing.altered(to_json(ROW), seed=6):
        try:
            row = AUDIT_ROWS.from_json(document)
        except ValueError:
            continue
        assert isinstance(row.op, str), name
        assert row.verdict in list(AuditVerdict), name


def test_a_folder_of_expected_sweeps_may_hold_an_audit_too(tmp_path: Path) -> None:
    (tmp_path / "audit_cpu.csv").write_text(AUDIT_ROWS.text([ROW]))
    (tmp_path / "a_training_cpu.csv").write_text("dev,name,batch_size,accuracy\ncpu,resnet18,4,pass\n")

    assert [row.name for row in load.load_sweep(tmp_path).rows] == ["resnet18"]


# ---------------------------------------------------------------------------------------------------- compare

CHANGES = {
    "the same": (ROW, ROW, "unchanged"),
    "it began to differ": (ROW, DIFFERS, "became nondeterministic"),
    "it differs under the flag now": (DIFFERS, UNDER, "became nondeterministic"),
    "it raised and differs now": (RAISES, DIFFERS, "became nondeterministic"),
    "it no longer differs": (DIFFERS, ROW, "fixed"),
    "it no longer differs under the flag": (UNDER, DIFFERS, "fixed"),
    "it is refused now": (ROW, RAISES, "now raises"),
    "it is refused no longer": (RAISES, ROW, "fixed"),
    "it died": (ROW, DEAD, "not measured any more"),
    "a difference died": (DIFFERS, DEAD, "not measured any more"),
    "it lives again": (DEAD, ROW, "measured now"),
    "it lives again and differs": (DEAD, DIFFERS, "became nondeterministic"),
    "it is gone": (ROW, None, "missing"),
    "it is new": (None, DIFFERS, "new"),
    "another kernel differs": (replace(DIFFERS, kernel="a"), replace(DIFFERS, kernel="b"), "differs differently"),
    "the documentation changed": (DIFFERS, replace(DIFFERS, documented="deterministic under the flag: x",
                                                   verdict="as documented"), "documented differently"),
    "other inputs": (ROW, replace(ROW, inputs="float32[6]"), "not comparable"),
    "other threads": (ROW, replace(DIFFERS, threads=4), "not comparable"),
}  # fmt: skip


@pytest.mark.parametrize(("base", "new", "expected"), CHANGES.values(), ids=CHANGES)
def test_what_became_of_a_sample(base, new, expected) -> None:
    sides = [audit_table.Audit(name, () if row is None else (row,)) for name, row in (("a", base), ("b", new))]

    comparison = report.compare(*sides)

    assert [change.outcome for change in comparison.changes] == [expected]
    worse = {"became nondeterministic", "now raises", "not measured any more", "missing", "not comparable"}
    assert comparison.got_worse == (expected in worse)


def test_what_the_second_audit_was_not_asked_for_is_not_missing(tmp_path: Path) -> None:
    rows = [replace(ROW, op=op, dtype=dtype) for op in ("put", "sum") for dtype in ("float32", "int64")]
    rows.append(replace(ROW, source="sweep"))
    base = audit_table.read(written(tmp_path / "a", *rows))
    asked = AuditManifest(AuditOptions(dtypes=("float32",)), (("op_db", "put"),), sweeps=False)
    new = audit_table.read(written(tmp_path / "b", replace(rows[0], op="max"), asked=asked))

    found = {change.key[1:4]: change.outcome for change in report.compare(base, new).changes}

    assert found[("op_db", "put", "float32")] is Became.MISSING
    assert found[("op_db", "put", "int64")] is Became.NOT_ASKED
    assert found[("op_db", "sum", "float32")] is Became.NOT_ASKED
    assert found[("sweep", "put", "float32")] is Became.NOT_ASKED


def test_audits_without_a_common_row_are_refused(tmp_path: Path, capsys) -> None:
    base = written(tmp_path / "a", ROW)
    new = written(tmp_path / "b", replace(ROW, op="another"))
    assert cli.main(["compare", str(base), str(new)]) == 2
    assert "no row in common: nothing was compared" in capsys.readouterr().err


def test_compare_says_torchs_version_first_and_ends_with_1(tmp_path: Path, capsys) -> None:
    base = written(tmp_path / "a", ROW, torch="2.14.0")
    new = written(tmp_path / "b", UNDER, torch="2.15.0.dev")

    code = cli.main(["compare", str(base), str(new)])

    lines = [line for line in capsys.readouterr().out.splitlines() if line]
    assert code == 1
    assert lines[1] == "packages.torch: 2.14.0 → 2.15.0.dev"
    assert lines[2].startswith("cpu.cores")
    assert "became nondeterministic (1)" in lines
    assert "  op_db put float32 0 forward  as documented → differs under the flag" in lines


@pytest.mark.parametrize("form", ["text", "markdown", "json", "csv"])
def test_an_audit_compared_with_itself_is_unchanged(tmp_path: Path, capsys, form: str) -> None:
    folder = written(tmp_path, ROW, replace(UNDER, sample="1"))

    assert cli.main(["compare", str(folder), str(folder / "audit.csv"), "--format", form]) == 0
    assert "unchanged" in capsys.readouterr().out


def test_an_audit_and_a_sweep_are_not_compared(tmp_path: Path, capsys) -> None:
    folder = written(tmp_path / "a", ROW)
    sweep = tmp_path / "accuracy.csv"
    sweep.write_text("dev,name,batch_size,accuracy\ncpu,resnet18,4,pass\n")

    assert cli.main(["compare", str(sweep), str(folder)]) == 2
    assert "accuracy.csv is not an audit and" in capsys.readouterr().err


# ----------------------------------------------------------------------------------------------------- tables


def test_findings_leave_out_what_another_sample_of_the_op_shows() -> None:
    small = replace(ROW, verdict="documented but never seen here", documented="deterministic under the flag: put_")
    large = replace(small, source="stress", sample="duplicates", off="differs", verdict="as documented")

    assert report.findings([small, large]) == []
    assert [line["op"] for line in report.confirmed([small, large, ROW])] == ["put"]
    [line] = report.findings([small])
    assert (line["verdict"], line["op"], line["samples"]) == ("documented but never seen here", "put", "1")


def test_the_tables_count_samples_and_ops_by_verdict() -> None:
    rows = [ROW, replace(ROW, sample="1"), replace(UNDER, op="add_", kernel="aten.add_.Tensor", cause="write | race")]
    page = report.tables_as_markdown(rows)

    assert counts(rows, AuditVerdict) == [("as documented", 1, 2), ("differs under the flag", 1, 1)]
    assert "| differs under the flag | add_ " in page
    assert "write / race" in page
    assert "aten.add_.Tensor" in report.summary(rows)


def test_the_pages_tables_are_made_from_the_file(tmp_path: Path) -> None:
    root = Path(__file__).parents[3]
    script = runpy.run_path(str(root / "docs" / "readme_tables.py"))
    folder = written(tmp_path, ROW, replace(UNDER, sample="1", op="add_", cause="overlapping_views"))

    text = script["audit"](folder)

    assert "| as documented " in text
    assert "overlapping_views" in text
    assert "Measured with torch 2.15.0, a CPU." in text
    assert "<!-- audit -->" in (root / "results" / "expected" / "audit.md").read_text(encoding="utf-8")


def test_the_page_explains_every_column_verdict_and_builder() -> None:
    from hashbench.tools.audit.cases import BUILDERS

    page = (Path(__file__).parents[3] / "docs" / "audit.md").read_text(encoding="utf-8")

    for name in (*AUDIT_ROWS.types, *AuditVerdict, *Shown, *audit_table.SOURCES):
        assert f"`{name}`" in page, name
    for builder in BUILDERS:
        assert f"`{builder}(" in page, builder


def test_an_option_that_an_audit_lacks_has_its_default(tmp_path: Path) -> None:
    manifest = AuditManifest(AuditOptions(dtypes=("float32",)), (("op_db", "put"),), sweeps=False)
    written = to_json(manifest)
    del written["options"]["tracer"]
    (tmp_path / "audit.json").write_text(json.dumps(written))
    assert audit_table.read_manifest(tmp_path / "audit.json") == manifest


@pytest.mark.parametrize("change", [{"schema": 2}, {"newer": 1}, {"options": {"newer": 1}}])
def test_an_audit_of_another_version_is_refused_with_both_named(tmp_path: Path, change: dict) -> None:
    written = json.loads(audit_table.manifest_text(AuditManifest(AuditOptions(), (), sweeps=False)))
    (tmp_path / "audit.json").write_text(json.dumps({**written, **change, "hashbench": "9.8.7"}))
    with pytest.raises(
        HashbenchError, match=rf"hashbench 9\.8\.7 wrote it .* this is hashbench {__version__}"
    ) as caught:
        audit_table.read_manifest(tmp_path / "audit.json")
    assert "another --output" in str(caught.value)


def test_rows_of_an_op_of_another_version_are_refused_and_damaged_ones_are_none(tmp_path: Path) -> None:
    op = ("op_db", "put")
    (tmp_path / "ops").mkdir()
    audit_table.write_op(tmp_path, op, [ROW])
    path = audit_table.op_file(tmp_path, op)
    written = json.loads(path.read_text())
    assert audit_table.read_op(tmp_path, op) == (ROW,)
    del written["rows"][0]["cause"]
    path.write_text(json.dumps(written))
    assert audit_table.read_op(tmp_path, op) == (replace(ROW, cause=""),)
    written["rows"][0]["newer"] = 1
    path.write_text(json.dumps({**written, "hashbench": "9.8.7"}))
    with pytest.raises(HashbenchError, match=r"newer; hashbench 9\.8\.7 wrote it"):
        audit_table.read_op(tmp_path, op)
    path.write_text(path.read_text()[:-9])
    assert audit_table.read_op(tmp_path, op) is None


@pytest.mark.parametrize("tracer", ["native", "python"])
def test_kernels_of_audits_by_different_tracers_are_not_compared(tracer: str) -> None:
    environments = ({"key": "a", "tracer": "python"}, {"key": "b", "tracer": tracer})
    rows = (replace(DIFFERS, kernel="aten.add.Tensor"), replace(DIFFERS, kernel="aten.add_.Tensor"))
    base, new = (audit_table.Audit("an audit", (row,), (one,)) for row, one in zip(rows, environments, strict=True))

    compared = report.compare(base, new)

    (change,) = compared.changes
    if tracer == "python":
        assert (change.outcome, change.note) == (Became.DIFFERS_DIFFERENTLY, "aten.add.Tensor → aten.add_.Tensor")
    else:
        note = "tracer python → native, so kernels are not compared"
        assert (change.outcome, change.note) == (Became.UNCHANGED, note)
    assert ("so kernels are not compared" in report.as_text(compared)) is (tracer == "native")
