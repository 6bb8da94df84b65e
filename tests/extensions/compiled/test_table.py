"""Rows of compiled models in the table of a sweep."""

from __future__ import annotations

from dataclasses import replace

from hashbench.core.report.table import sweep_table, what_passing_means
from tests.core.report.rows import row
from tests.extensions.compiled.compiled_rows import INACCURATE, ROUNDED, WHY
from tests.flat_rows import changed


def test_a_wrong_kernel_of_a_compiled_model_has_stage_place_and_measurements():
    table = sweep_table([replace(INACCURATE, name="net")], command=lambda _: "hashbench sweep --backend inductor")
    header, _, line, *below = table.split("\n\n")[0].splitlines()
    assert header.split() == ["name", "accuracy", "stage", "kernel", "module", "phase", "confidence"]
    assert line.split() == ["net", "fail_accuracy", "codegen", "cpp_fused_relu_0", "Net.act", "forward", "proven"]
    assert [one.strip() for one in below] == [
        "where: cpp_fused_relu_0 (aten.relu.default) in Net.act, net.py:18 forward",
        f"why: {WHY}",
        "to do: report the code generated for aten.relu.default",
        "$ hashbench sweep --backend inductor",
    ]


def test_a_narrow_table_tells_the_stage_below():
    narrow = sweep_table([replace(INACCURATE, name="net_with_a_long_name")], width=44)
    assert "codegen" in narrow.splitlines()[2]
    narrower = " ".join(sweep_table([replace(INACCURATE, name="net_with_a_long_name")], width=30).split())
    assert "why: codegen (proven): buf1 is 0.48 off; beyond the tolerance: loss.1;" in narrower


def test_rounding_blames_no_kernel_in_the_table():
    below = [line.strip() for line in sweep_table([ROUNDED]).splitlines()]
    assert not any(line.startswith("where:") for line in below)
    assert any(line.startswith("why: no kernel is to blame; beyond the tolerance: loss.1; rounding") for line in below)


def test_passing_compiled_models_say_what_is_suspicious_and_what_was_not_compiled():
    passing = changed(INACCURATE, accuracy="pass", stage="", kernel="", op="", module="", source="", cured_by="")
    passing = changed(passing, detail="", semantic="", confidence="", advice="", beyond_rounding=1.1)
    rows = [
        changed(passing, name="a", beyond_rounding=40.0),
        changed(passing, name="b", reference="eager mode is farther from float64 in loss.1: 2e-05, compiled 7e-08"),
        replace(passing, name="c"),
        row("d", "pass_due_to_skip", backend="inductor", error="nothing was compiled: no frame was compiled"),
    ]
    lines = sweep_table(rows).splitlines()
    assert "1 pass: suspicious: 40x the rounding bound (eager mode 0.5) (a)" in lines
    assert "1 pass: eager mode is farther from float64 in loss.1: 2e-05, compiled 7e-08 (b)" in lines
    assert "1 pass_due_to_skip: nothing was compiled: no frame was compiled (d)" in lines
    assert "in all but 1 model none is beyond what rounding explains" in lines[-1]
    assert "two runs of the compiled model were equal" in lines[-1]
    assert "--stress" not in lines[-1]


def test_eager_and_compiled_rows_have_their_own_meaning_of_passing():
    rows = [row("a", rate_high=0.95), row("b", rate_high=0.95, backend="inductor")]
    assert what_passing_means(rows).count("Passed means:") == 2


def test_a_compiled_run_that_fails_is_placed():
    failed = row("net", "fail_to_run", backend="inductor", stage="lowering", op="aten.elu.default", error="Boom")
    below = [line.strip() for line in sweep_table([failed], command=lambda _: "again").splitlines()]
    assert "where: aten.elu.default" in below
    assert "Boom" in below
    assert "to do: compile it in plain Python (torch.compile()), where it should raise the same" in below
