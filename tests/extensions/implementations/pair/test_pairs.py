"""What the comparison says of ``models/pairs``: a sample here, all of it with ``exhaustive``."""

from __future__ import annotations

import os

import pytest

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from benchmarks.pairs import Row, Scored, corpus, report, scored
from hashbench.extensions.implementations.pair.verdict import ImplementationsVerdict, OpPlace, PairOutcome, PartedPlace

pytest.importorskip("transformers")
pytest.importorskip("timm")

LEAST = {"verdict": 0.98, "layer": 0.95, "op": 0.80}
"""Shares that must be right; 0.90 of the ops is the goal.

A formula beside a fused op, or beside a recurrence, is a region of more than five ops where torch has no decomposition
of the same steps.
"""

SAMPLE = {
    ("llama_engine", "", "interleaved"),
    ("llama_engine", "bfloat16", "one_rounding"),
    ("segment_pools", "bfloat16", "up_as_convolution"),
    ("llama_decode", "", "window"),
    ("qwen_packed", "", "running_positions"),
    ("gpt2_nano", "", "eps"),
    ("vit_timm", "", "formula"),
    ("gemma_window", "", "window_missing"),
    ("mixtral_moe", "", "not_renormalised"),
    ("mobilenet_folded", "", ""),
    ("mamba_scan", "", "state_late"),
    ("tensor_parallel", "", "wrong_shard"),
    ("norm_backward", "", "gated_scaled"),
    ("attention_backward", "", "formula"),
}
"""Pair, dtype and fault of each row of the sample."""

ROWS = corpus()
SAMPLED = [row for row in ROWS if (row.pair, row.dtype, row.fault) in SAMPLE]


@pytest.mark.slow
@pytest.mark.parametrize("row", SAMPLED, ids=str)
def test_a_sample_is_judged_right(row: Row) -> None:
    (found,) = scored([row])
    assert found.missed() == ""


def test_the_sample_is_in_the_table() -> None:
    assert len(SAMPLED) == len(SAMPLE)


@pytest.mark.exhaustive
def test_mistakes_are_named_and_no_clean_pair_is_blamed() -> None:
    found = list(scored(ROWS))
    missed = "\n".join(filter(None, (each.missed() for each in found)))
    assert [each.missed() for each in found if each.blamed] == []
    for name, asked in {
        "verdict": [each.right for each in found],
        "layer": [each.layer for each in found if each.layer is not None],
        "op": [each.op for each in found if each.op is not None],
    }.items():
        assert sum(asked) >= LEAST[name] * len(asked), f"{name}\n{report(found)}\n{missed}"


def judged(outcome: PairOutcome, *, module: str = "layers.1", op: str = "aten.mul.Tensor", ops: int = 1) -> Scored:
    row = Row("gpt2_nano", "", "scale", "mistake", "layers.1", "mul|matmul", "", "")
    place = OpPlace(op, module, "x.py:3 y = x", ops=(op, *["aten.add.Tensor"] * (ops - 1)))
    verdict = ImplementationsVerdict(outcome, parted=(PartedPlace(None, place),))
    return Scored(row, verdict, 1.0)


def test_another_outcome_layer_or_op_is_a_miss() -> None:
    assert judged(PairOutcome.MISTAKE).missed() == ""
    assert judged(PairOutcome.MISTAKE, op="aten.bmm.default").missed() == ""
    assert "verdict: rounding" in judged(PairOutcome.ROUNDING).missed()
    assert "layer: mistake" in judged(PairOutcome.MISTAKE, module="layers.2").missed()
    assert "op: mistake" in judged(PairOutcome.MISTAKE, op="aten.sub.Tensor").missed()


def test_a_region_of_more_than_five_ops_counts_by_its_first_one() -> None:
    row = judged(PairOutcome.MISTAKE, op="aten.sub.Tensor", ops=2).row
    ops = ("aten.sub.Tensor", *["aten.add.Tensor"] * 3, "aten.mul.Tensor")
    for region, right in ((ops, True), ((*ops[:1], "aten.add.Tensor", *ops[1:]), False)):
        place = OpPlace("aten.sub.Tensor", "layers.1", ops=region)
        found = Scored(row, ImplementationsVerdict(PairOutcome.MISTAKE, parted=(PartedPlace(None, place),)), 1.0)
        assert found.op is right
