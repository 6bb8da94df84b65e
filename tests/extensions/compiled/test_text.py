"""A compiled row in words."""

from __future__ import annotations

from typing import Any

import pytest

from hashbench.core.catalog import Status
from hashbench.core.extensions import blamed
from hashbench.core.records import Row, RowEvidence
from hashbench.extensions.compiled import text
from tests.experiment_texts import result
from tests.flat_rows import changed, made

TRIALS = ("compilation/scalar_code 1/1", "compilation/eager_op 0/1", "compilation/no_buffer_reuse 1/1")
WRONG = made(
    *("cpu", "wrong_relu", None, "fail_accuracy"),
    **{"suite": "two", "mode": "training", "dtype": "float32"},
    runs=2,
    backend="inductor",
    graphs=1,
    graph_breaks=0,
    compile_seconds=7.8,
    kernels=16,
    checked=1.0,
    stage="codegen",
    kernel="cpp_fused_relu_0",
    op="aten.relu.default",
    module="Net.act",
    source="net.py:18 forward",
    phase="forward",
    differing_results="loss.1",
    detail="buf1 is 0.48 off",
    beyond_rounding=2.2e7,
    eager_rounding=0.5,
    semantic="yes",
    cured_by="aten.relu.default runs eagerly",
    confidence="proven",
    evidence=RowEvidence.of(map(result, TRIALS)),
    advice="report the code generated for aten.relu.default",
)
ROUNDING = changed(
    WRONG,
    **{"stage": "rounding", "kernel": "", "source": "", "cured_by": "", "semantic": "no", "beyond_rounding": 1.5},
    detail="rounding, amplified by aten.sub.Tensor in Net x3e+04 (to 5e+04 ulp)",
)
PASSES = changed(WRONG, accuracy="pass", stage="", kernel="", op="", source="", module="", detail="", cured_by="")
PASSES = changed(PASSES, semantic="", confidence="", advice="", evidence=RowEvidence(), beyond_rounding=1.1)


def test_a_wrong_kernel_is_told_with_op_module_and_line() -> None:
    assert text.WORDS.where(WRONG) == "cpp_fused_relu_0 (aten.relu.default) in Net.act, net.py:18 forward"
    assert text.WORDS.why(WRONG) == (
        "buf1 is 0.48 off; beyond the tolerance: loss.1; 2.2e+07x the rounding bound (eager mode 0.5); "
        "in float64 too: a mistake, not rounding; fixed by: aten.relu.default runs eagerly (1 of 3 compilations)"
    )
    assert text.WORDS.why_with_stage(WRONG).startswith("codegen (proven): buf1 is 0.48 off; beyond the tolerance")
    assert text.WORDS.place(WRONG) == "codegen: cpp_fused_relu_0 (aten.relu.default) in Net.act"


def test_a_row_read_from_a_csv_shows_the_evidence_whole() -> None:
    read = changed(WRONG, evidence=RowEvidence(WRONG.evidence.text))
    assert not read.evidence.results
    assert text.WORDS.why(read).endswith(f"fixed by: aten.relu.default runs eagerly ({'; '.join(TRIALS)})")


def test_rounding_blames_no_kernel() -> None:
    assert text.WORDS.where(ROUNDING) == ""
    assert blamed(ROUNDING) == ""
    assert text.WORDS.place(ROUNDING) == "rounding, no kernel is to blame"
    assert text.WORDS.why_with_stage(ROUNDING).startswith(
        "rounding (proven): no kernel is to blame; beyond the tolerance"
    )
    assert "not in float64: rounding, not a mistake" in text.WORDS.why(ROUNDING)
    assert "1.5x the rounding bound" in text.WORDS.why(ROUNDING)


def test_a_stage_without_kernels_blames_the_op() -> None:
    row = changed(WRONG, stage="decomposition", kernel="", op="aten.elu.default")
    assert blamed(row) == "aten.elu.default"
    assert text.WORDS.where(row) == "aten.elu.default in Net.act, net.py:18 forward"
    assert text.WORDS.place(row) == "decomposition: aten.elu.default in Net.act"


@pytest.mark.parametrize(
    ("row", "said"),
    [
        pytest.param(PASSES, [], id="nothing to say"),
        pytest.param(changed(PASSES, beyond_rounding=16.0), [], id="at the limit"),
        pytest.param(
            changed(PASSES, beyond_rounding=40.0, eager_rounding=0.9, detail="cpp_fused_var_0 is right in float64"),
            ["suspicious: cpp_fused_var_0 is right in float64; 40x the rounding bound (eager mode 0.9)"],
            id="beyond rounding",
        ),
        pytest.param(
            changed(PASSES, beyond_rounding=2e7, stage="codegen", kernel="cpp_fused_relu_0", semantic="yes"),
            [
                "suspicious at cpp_fused_relu_0: codegen: 2e+07x the rounding bound (eager mode 0.5); "
                "in float64 too: a mistake, not rounding"
            ],
            id="a mistake within the tolerance",
        ),
        pytest.param(
            changed(
                PASSES, stage="post_grad_passes", confidence="proven", detail="pass fold is wrong", reference="far"
            ),
            ["suspicious: post_grad_passes (proven): pass fold is wrong; far"],
            id="a pass is wrong, and the figure of a kernel that is right is left out",
        ),
        pytest.param(changed(PASSES, reference="eager mode is farther"), ["eager mode is farther"], id="the reference"),
        pytest.param(
            changed(PASSES, compilations="fresh cache: same; max_autotune: not compared (no time)"),
            ["compilations: max_autotune: not compared (no time)"],
            id="a compilation that was not compared",
        ),
        pytest.param(
            changed(PASSES, detail="kernels are not seen: CUDA graphs replay their launches (triton.cudagraphs)"),
            ["kernels are not seen: CUDA graphs replay their launches (triton.cudagraphs)"],
            id="kernels whose calls are hidden",
        ),
        pytest.param(changed(WRONG, reference="eager mode is farther"), [], id="said in why"),
    ],
)
def test_what_a_passing_row_says_beside_its_status(row: Row, said: list[str]) -> None:
    assert list(text.WORDS.remarks(row)) == said


def test_the_limit_is_that_of_the_judge() -> None:
    from hashbench.core.run.rounding import LIMIT

    assert text.SUSPICIOUS == LIMIT


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "inductor: 1 graph, 0 graph breaks, compiled in 7.8 s; 16 kernel calls, 100 % of their buffers checked"),
        ({"kernels": None, "checked": None}, "inductor: 1 graph, 0 graph breaks, compiled in 7.8 s"),
        (dict.fromkeys(("graphs", "graph_breaks", "compile_seconds", "kernels", "checked")), "inductor"),
        ({"backend": ""}, ""),
    ],
)
def test_the_program_is_counted(changes: dict[str, Any], words: str) -> None:
    assert text.program(changed(WRONG, **changes)) == words


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "report the code generated for aten.relu.default"),
        ({"advice": "", "confidence": "open"}, "see its log, and report the failed diagnosis"),
        ({"advice": "", "stage": "", "semantic": "unknown"}, "let the model run in float64"),
        ({"advice": "", "accuracy": "compilations_differ"}, "let all runs use one compilation"),
        ({"advice": "", "accuracy": "fail_to_run"}, "compile it in plain Python (torch.compile()), where"),
        ({"advice": "", "accuracy": "fail_to_run", "backend": "aot_eager"}, "(torch.compile(backend='aot_eager'))"),
        ({"advice": "", "accuracy": "fail_to_run", "backend": "inductor@cuda:90"}, "leave --as out"),
        ({"advice": "", "accuracy": "fail_to_run", "backend": ""}, ""),
        (
            {"advice": "", "accuracy": "fail_to_run", "error": "InductorError: InvalidCxxCompiler: No working …"},
            "install a C++ compiler",
        ),
        ({"advice": "", "accuracy": "crashed"}, ""),
    ],
)
def test_what_to_do(changes: dict[str, Any], words: str) -> None:
    found = text.WORDS.remedy(changed(WRONG, **changes))
    assert words in found
    assert bool(found) == bool(words)


def test_passing_means_more_than_equal_runs() -> None:
    meaning = text.WORDS.what_passing_means([changed(PASSES, checked=share) for share in (0.8, 0.9, 1.0)], bound=0.95)
    assert meaning == (
        "Passed means: two eager runs were equal, two runs of the compiled model were equal, and its results are eager "
        "mode's within torch's tolerance; 90 % of the buffers that its kernels write were checked (median), none is "
        "beyond what rounding explains. That can miss a difference between compiled runs that shows in up to 95 % of "
        "them (95 % confidence)."
    )
    assert "in all but 1 model none is beyond" in text.WORDS.what_passing_means(
        [PASSES, changed(PASSES, beyond_rounding=40.0)], bound=0.95
    )
    interpreted = text.WORDS.what_passing_means([changed(PASSES, backend="inductor@cuda:90")], bound=0.95)
    assert "two runs of Triton code for cuda:90, interpreted on the CPU, were equal" in interpreted
    assert "within torch's tolerance, but for what the remarks say; " in text.WORDS.what_passing_means(
        [PASSES, changed(PASSES, reference="compared by cosine similarity only")], bound=0.95
    )
    assert "no kernel was checked" in text.WORDS.what_passing_means([changed(PASSES, checked=None)], bound=0.95)
    assert text.WORDS.what_passing_means([], bound=0.95) == ""


@pytest.mark.parametrize("status", [Status.FAIL_ACCURACY, Status.COMPILATIONS_DIFFER])
def test_only_compiled_rows_are_told_so(status: Status) -> None:
    row = changed(PASSES, accuracy=status)
    assert text.WORDS.tells(row)
    assert not text.WORDS.tells(changed(row, backend=""))
    assert text.WORDS.tells(changed(row, accuracy="fail_to_run", stage="lowering"))
    assert not text.WORDS.tells(changed(row, accuracy=Status.COMPILED_RUNS_DIFFER))


def test_compilations_that_differ_are_listed() -> None:
    row = changed(
        PASSES,
        accuracy="compilations_differ",
        kernel="cpp_fused_relu_0",
        detail="compiled with max_autotune: loss.1; first kernel with another source",
        compilations="fresh cache: same; max_autotune: 3 results differ",
    )
    assert text.WORDS.why(row) == (
        "compiled with max_autotune: loss.1; first kernel with another source; "
        "compilations: fresh cache: same; max_autotune: 3 results differ"
    )
