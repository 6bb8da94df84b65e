"""Records check their counts, and print on one line."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from hashbench.core import records
from hashbench.core.records import (
    ROW_COLUMNS,
    CallFacts,
    Evidence,
    ExpectedRow,
    ExperimentResult,
    ModelSpec,
    OpRecord,
    Rate,
    Row,
    RowEvidence,
    RunOptions,
    TensorDigest,
    Trace,
    Verdict,
    contiguous_stride,
    extended,
    op_of,
)

ROW = Row("cpu", "net", 4, "pass", suite="zoo")


@pytest.mark.parametrize(
    ("shape", "stride"), [((), ()), ((3,), (1,)), ((2, 3, 4), (12, 4, 1)), ((2, 0, 4), (4, 4, 1))], ids=str
)
def test_contiguous_stride(shape: tuple[int, ...], stride: tuple[int, ...]) -> None:
    assert contiguous_stride(shape) == stride


def test_digest_word_has_no_stride() -> None:
    assert TensorDigest("float32", (8, 3), (1, 8), "00ff").word() == "float32[8,3]:00ff"
    assert TensorDigest("float32", (), (), "").word() == "float32[]:blank"


def test_op_of_a_record_id() -> None:
    assert op_of("forward/0/net.fc/aten.mm.default#2") == "aten.mm.default"
    assert op_of("forward/0/net.fc/aten.mm.default") == "aten.mm.default"


@pytest.mark.parametrize(("trials", "differing"), [(1, 2), (0, 1), (3, -1)])
def test_impossible_counts_raise(trials: int, differing: int) -> None:
    with pytest.raises(ValueError, match="not a count"):
        ExperimentResult("repeat", "call", trials, differing)


def test_experiment_words() -> None:
    assert ExperimentResult("moved", "call", 20, 3, found="all by 4 bytes").word() == "call/moved 3/20 [all by 4 bytes]"
    missing = ExperimentResult("clocks", "pair", note=records.NO_TIME)
    assert (missing.word(), missing.lacked_time) == ("pair/clocks not run (budget)", True)
    assert ExperimentResult("clocks", "pair").note == "nothing to compare"
    assert not ExperimentResult("clocks", "pair", 3, note=records.NO_TIME).lacked_time


def test_row_evidence_must_match_its_text() -> None:
    results = [ExperimentResult("repeat", "call", 20, 3), ExperimentResult("clocks", "pair", 2)]
    evidence = RowEvidence.of(iter(results))
    assert str(evidence) == "call/repeat 3/20; pair/clocks 0/2"
    assert evidence == RowEvidence("call/repeat 3/20; pair/clocks 0/2")
    assert evidence.result("clocks", "pair") is results[1]
    assert not evidence.result("clocks", "call").ran
    with pytest.raises(ValueError, match="not that of its results"):
        RowEvidence("call/repeat 4/20", tuple(results))


@pytest.mark.parametrize(
    ("arm", "first_pair", "expected"),
    [((3, 0), (0, 1), True), ((3, 1), (0, 1), False), ((3, 0), (1, 1), False), (None, (0, 1), False)],
)
def test_difference_between_processes(arm: tuple[int, int] | None, first_pair: Any, expected: bool) -> None:
    arms = () if arm is None else (ExperimentResult("within_process", "process", *arm),)
    evidence = Evidence("kernel", first_pair=first_pair, arms=arms, call=CallFacts("aten.mm.default"))
    assert evidence.between_processes is expected


def test_rate_share() -> None:
    assert Rate(3, 12, "runs", 0.1, 0.5, 2).share == 0.25


@pytest.mark.parametrize(
    ("device", "mode", "reason"),
    [("cuda:1", "training", "no backward"), ("cuda", "inference", ""), ("cpu", "inference", "needs cuda or xpu")],
)
def test_skip_reason(device: str, mode: str, reason: str) -> None:
    spec = ModelSpec("zoo", "net", skip_training="no backward", devices=("cuda", "xpu"))
    assert spec.skip_reason(mode, device=device) == reason


@pytest.mark.parametrize(
    ("backend", "device"), [("", "cuda:1"), ("inductor", "cuda:1"), ("inductor@cuda:90", "cuda:90"), ("@", "cuda:1")]
)
def test_code_is_made_for_the_device_of_the_backend_or_of_the_model(backend: str, device: str) -> None:
    assert RunOptions(device="cuda:1", backend=backend).made_for == device


@pytest.mark.parametrize(
    ("mode", "asked", "own", "expected"),
    [
        ("inference", None, 2, 2),
        ("inference", 5, 2, 5),
        ("batch-invariance", None, 2, records.SMALLEST_BATCH),
        ("batch-invariance", None, 32, 32),
        ("batch-invariance", 4, 2, 4),
        ("batch-invariance", None, None, None),
    ],
)
def test_batch_size_of(mode: str, asked: int | None, own: int | None, expected: int | None) -> None:
    assert RunOptions(mode=mode, batch_size=asked).batch_size_of(ModelSpec("zoo", "net", batch_size=own)) == expected


def test_traces_and_verdicts_print_on_one_line() -> None:
    op = OpRecord("forward/0/aten.mm.default", "forward", 0, "", "aten.mm.default")
    assert repr(Trace((op, op))) == "<Trace: ops=2 (2 forward), leaves=0, results=0>"
    assert repr(Verdict((), None, ())) == "<Verdict: no divergence; results that differ: 0>"


def test_extended_row_keeps_all_columns() -> None:
    row = extended(ExpectedRow, ROW, since="2026-11-20")
    assert (row.since, row.link) == ("2026-11-20", "")
    assert all(getattr(row, column) == getattr(ROW, column) for column in ROW_COLUMNS)


def test_records_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        ROW.name = "other"  # type: ignore[misc]
