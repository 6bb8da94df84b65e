"""What a test that fails says of a compiled model, from rows written by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from hashbench.core.catalog import Status
from hashbench.core.records import ExperimentResult, Row, RowEvidence
from hashbench.extensions.compiled.failure import accuracy_finding, is_wrong
from tests import flat_rows
from tests.flat_rows import made

WRONG = made(
    dev="cpu",
    name="Net",
    batch_size=None,
    accuracy=Status.FAIL_ACCURACY,
    suite="pytest",
    backend="inductor",
    stage="codegen",
    kernel="cpp_fused_relu_0",
    op="aten.relu.default",
    module="Net.relu",
    source="net.py:7 return x.relu()",
    phase="forward",
    differing_results="loss.1, grad.first.weight",
    detail="buf1 is 0.87 off",
    beyond_rounding=5.8e4,
    eager_rounding=0.5,
    semantic="yes",
    confidence="proven",
    cured_by="scalar code (cpp.simdlen=1)",
    advice="report the code generated for aten.relu.default",
    evidence=RowEvidence.of(
        [
            ExperimentResult("scalar_code", "compilation", trials=1, differing=0),
            ExperimentResult("no_buffer_reuse", "compilation", trials=1, differing=1),
            ExperimentResult("eager_op", "compilation", note="budget"),
        ]
    ),
)
HERE = Path("kept")


def changed(**columns: object) -> Row:
    return flat_rows.changed(WRONG, **columns)


def test_all_that_is_known_is_a_fact() -> None:
    found = accuracy_finding(changed(traces="a b", repro="repro/x"), folder=HERE)
    assert found.next == ("python kept/repro/x/repro.py",), "the traces are those of equal runs"
    assert found.headline == (
        "Net: what inductor made of it is not what eager mode computes (beyond the tolerance: loss.1, "
        "grad.first.weight)"
    )
    assert dict(found.facts) == {
        "stage": "codegen: kernel cpp_fused_relu_0, aten.relu.default (forward, in Net.relu, at net.py:7 return "
        "x.relu())",
        "why": "buf1 is 0.87 off; its largest error is 5.8e+04x the rounding bound, eager mode's own 0.5; it "
        "computes something else in float64, too, where rounding is out of the way",
        "evidence": "proven; compilations with a change in which it is there: compilation/scalar_code 0/1; "
        "compilation/no_buffer_reuse 1/1; gone if scalar code (cpp.simdlen=1); not tried for lack of time "
        "(diagnose_budget): eager_op",
        "to do": "report the code generated for aten.relu.default.",
    }


def test_wrong_within_the_tolerance() -> None:
    row = changed(accuracy=Status.PASS, detail="buf1 is 0.87 off")
    assert is_wrong(row)
    assert (
        accuracy_finding(row, folder=HERE).headline
        == "Net: torch's rule accepts it, and what inductor made of it computes something else"
    )


def test_nothing_is_looked_for_without_a_diagnosis() -> None:
    unknown = {"stage": "", "op": "", "kernel": "", "semantic": "", "evidence": RowEvidence(), "advice": ""}
    row = changed(**unknown, beyond_rounding=None, differing_results="output.1", detail="")
    assert dict(accuracy_finding(row, folder=HERE).facts) == {
        "stage": "none was found",
        "why": "not looked for",
        "evidence": "no compilation with a change was tried",
        "to do": "let the diagnosis run (diagnose=True).",
    }


def test_a_model_that_did_not_compile_is_a_headline() -> None:
    row = changed(accuracy=Status.REFERENCE_FAIL, stage="lowering", error="LoweringException:\nno such luck")
    found = accuracy_finding(row, folder=HERE)
    assert (found.facts, found.next) == ((), ())
    assert found.headline == (
        "Net: fail_to_run with backend inductor in lowering, at aten.relu.default: LoweringException: no such luck"
    )


def test_runs_that_differ_are_told_apart() -> None:
    for status, whose in ((Status.TWO_RUNS_DIFFER, "eager"), (Status.COMPILED_RUNS_DIFFER, "compiled")):
        row = changed(accuracy=status, differing_results="output.1", origin="kernel", detail="reads equal")
        found = accuracy_finding(row, folder=HERE)
        assert found.headline.startswith(f"Net: {whose} runs differ in output.1")
        assert [label for label, _ in found.facts] == ["first divergence", "cause", "evidence", "to do"]


OPINIONS = [
    (Status.PASS, "", False),
    (Status.PASS, "no", False),
    (Status.PASS, "unknown", False),
    (Status.PASS, "yes", True),
    (Status.FAIL_ACCURACY, "no", True),
    (Status.SKIPPED, "", True),
]


@pytest.mark.parametrize(("status", "semantic", "wrong"), OPINIONS)
def test_what_is_wrong(status: str, semantic: str, wrong: bool) -> None:
    assert is_wrong(changed(accuracy=status, semantic=semantic)) == wrong
