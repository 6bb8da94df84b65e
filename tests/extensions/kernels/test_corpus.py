"""What the judge says of ``models/kernels``: a sample here, all of it with ``exhaustive``."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

from benchmarks.kernels import (
    FOLDER,
    HELD_OUT,
    Case,
    Row,
    Scored,
    case,
    corpus,
    is_as_good,
    is_close,
    report,
    results,
    scored,
)
from hashbench.extensions.kernels.verdict import Fault, FaultKind, KernelOutcome, RoundingVerdict

LEAST = {"right": 0.98, "wrong": 0.95}
"""Shares of right kernels that must be accepted, and of wrong ones that must be found."""

SAMPLE = {
    ("softmax_online", "exp2", "bfloat16"),
    ("softmax_online", "rescale_forgotten", "float32"),
    ("layer_norm_blocks", "one_pass", "float32"),
    ("layer_norm_blocks", "", "float16"),
    ("rms_norm_backward", "", "float32"),
    ("attention_flash", "weights_in_dtype", "bfloat16"),
    ("cumsum_blocks", "refuses", "float32"),
    ("dropout_given", "in_dtype", "bfloat16"),
    ("linear_recurrence", "sequential", "float16"),
    ("matmul_split", "sequential", "bfloat16"),
}
"""Kernel, fault and dtype of each row of the sample."""

ROWS = [*corpus(), *corpus(HELD_OUT)]
SAMPLED = [row for row in ROWS if (row.kernel, row.fault, row.dtype) in SAMPLE]


@pytest.mark.slow
@pytest.mark.parametrize("row", SAMPLED, ids=str)
def test_a_sample_is_judged_right(row: Row) -> None:
    (found,) = scored([row])
    assert found.right, found.missed()


def test_the_sample_is_in_the_table() -> None:
    assert len(SAMPLED) == len(SAMPLE)


@pytest.mark.exhaustive
@pytest.mark.parametrize("folder", [FOLDER, HELD_OUT], ids=lambda folder: folder.name)
def test_right_kernels_are_accepted_and_wrong_ones_found(folder: Path) -> None:
    found = list(scored([row for row in ROWS if row.folder == folder]))
    missed = "\n".join(filter(None, (each.missed() for each in found)))
    for outcome, least in LEAST.items():
        group = [each for each in found if each.row.outcome == outcome]
        assert sum(each.right for each in group) >= least * len(group), f"{outcome}\n{report(found)}\n{missed}"


def test_the_table_names_what_the_files_hold() -> None:
    kinds = {kind.value for kind in FaultKind}
    for row in ROWS:
        assert set(filter(None, row.kind.split("|"))) <= kinds
        assert row.fault in texts(row.folder / f"{row.kernel}.py") | {""}
    assert {path.stem for path in FOLDER.rglob("[!_]*.py")} == {row.kernel for row in ROWS}


def texts(path: Path) -> set[str]:
    """Return all string literals of a file."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


@pytest.mark.parametrize("kernel", sorted({row.kernel for row in ROWS}))
def test_kernels_and_references_agree_in_structure_and_repeat(kernel: str) -> None:
    row = next(row for row in ROWS if row.kernel == kernel)
    asked = case(row)
    got, again = (results(asked.make_kernel(), asked.given(), asked.backward) for _ in range(2))
    own = results(asked.reference, asked.given(), asked.backward)
    assert [(x.shape, x.dtype) for x in got] == [(x.shape, x.dtype) for x in own]
    assert all(map(torch.equal, got, again))


def kept(factor: float) -> Case:
    return Case(lambda: lambda x: x.sin() * factor, torch.sin, (torch.linspace(0, 1, 50),), backward=True)


def test_both_baselines_accept_the_reference_and_find_a_large_error() -> None:
    assert is_close(kept(1))
    assert is_as_good(kept(1))
    assert not is_close(kept(1.01))
    assert not is_as_good(kept(1.01))


def judged(outcome: KernelOutcome, *faults: Fault, expected: str = "wrong") -> Scored:
    row = Row(FOLDER, "softmax_online", "float32", "tail", expected, True, "stale|scaled", "row 3", False, "")
    return Scored(row, RoundingVerdict(outcome, faults=faults), 1.0, True, False)


def test_another_outcome_kind_or_place_is_a_miss() -> None:
    fault = Fault(FaultKind.STALE, where="row 3 of 7")
    assert judged(KernelOutcome.WRONG, fault).missed() == ""
    assert "right: within rounding" in judged(KernelOutcome.WITHIN_ROUNDING).missed()
    assert "right: not known" in judged(KernelOutcome.NOT_KNOWN, expected="right").missed()
    assert "kind: wrong: sign of zero" in judged(KernelOutcome.WRONG, Fault(FaultKind.SIGN_OF_ZERO)).missed()
    assert "where: wrong: stale" in judged(KernelOutcome.WRONG, Fault(FaultKind.STALE, where="row 4")).missed()


def test_the_report_counts_each_group() -> None:
    found = [judged(KernelOutcome.WRONG, Fault(FaultKind.STALE)), judged(KernelOutcome.NOT_KNOWN, expected="right")]
    lines = [" ".join(line.split()) for line in report(found).splitlines()]
    assert lines[1] == "right accepted 0 of 1 (0.0%) 1 of 1 (100.0%) 0 of 1 (0.0%)"
    assert lines[2] == "wrong found 1 of 1 (100.0%) 0 of 1 (0.0%) 1 of 1 (100.0%)"
    assert lines[4:7] == ["not known 1", "kind named 1 of 1 (100.0%)", "place named 0 of 1 (0.0%)"]
