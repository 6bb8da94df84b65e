"""What is printed of ranks, and their JSON documents; the golden files hold whole texts."""

from __future__ import annotations

import json
from dataclasses import fields, replace

import pytest

from hashbench.core.catalog import Origin
from hashbench.core.records import Divergence, Steering
from hashbench.extensions.ranks.replicas import ReplicaDifference, ReplicasVerdict, check_replicas
from hashbench.extensions.ranks.text import MOST_LINES, check_document, check_text, diff_document, diff_text
from hashbench.extensions.ranks.verdict import RankDivergence, RankResult, RanksVerdict
from tests.core.divergence.rank_runs import judge_ranks, rank_traces
from tests.extensions.ranks.rank_texts import CHECKS, DIFFS

FOUND = RankDivergence(
    Origin.SEQUENCE,
    "forward.0/net/aten.mul.Tensor#0",
    "aten.mul.Tensor",
    3,
    "forward",
    0,
    "net",
    "",
    "op only in the first run",
    source="train.py:3 step",
    steered_by=Steering("item#0", "3", "4", "aten.bincount.default"),
    rank=1,
    through="rank 1: aten.mul -> all_reduce #7 of group 0-1 -> rank 0",
    missing=(2,),
)
MANY = RanksVerdict(
    64,
    tuple(replace(FOUND, rank=rank) for rank in range(20)),
    tuple(replace(FOUND, rank=rank) for rank in range(20, 40)),
    tuple(RankResult(rank, f"weight.{number}", number) for rank in range(64) for number in range(3)),
    (3, 4),
    tuple(f"Sentence {number}." for number in range(30)),
    dict.fromkeys(range(64), 3),
    tuple(range(64)),
    90_000,
    (2, 5),
)


def test_a_text_that_the_golden_files_hold_has_ten_lines_at_most() -> None:
    texts = [diff_text(judge_ranks(lines)) for lines in DIFFS.values()]
    texts += [check_text(check_replicas(rank_traces(lines))) for lines in CHECKS.values()]
    assert max(text.count("\n") + 1 for text in texts) <= MOST_LINES


@pytest.mark.parametrize("first", [MANY.first, (), MANY.first[:1]], ids=["many", "none", "one"])
def test_a_text_of_many_ranks_has_ten_lines_at_most(first: tuple[RankDivergence, ...]) -> None:
    lines = diff_text(replace(MANY, first=first)).splitlines()
    assert len(lines) <= MOST_LINES
    assert "agree" not in lines[0]
    assert lines[-1].endswith("Sentence 1. And 28 more.")


def test_a_text_of_many_replicas_has_ten_lines_at_most() -> None:
    one = ReplicaDifference("w", (0, 1, 2), (2,), 3, "optimizer#0", (0, 2), "kernel", 2, "node", "aten.put.default")
    verdict = ReplicasVerdict(3, (one,) * 20, {(0, 1, 2): 20}, ("w",) * 20, (0, 3), (3, 4), MANY.unknown)
    lines = check_text(verdict).splitlines()
    assert len(lines) <= MOST_LINES
    assert lines[:2] == ["replicas differ:  w on ranks 0, 1, 2 since step 3", "minority:         rank 2"]


def test_a_run_that_was_not_compared_whole_is_never_told_to_agree() -> None:
    verdict = replace(MANY, first=(), later=(), differing=(), unknown=("No trace of rank 3 in the first run.",))
    assert diff_text(verdict).startswith("Nothing that was compared differs, and not all was compared: ranks 0, 1")
    checked = ReplicasVerdict(2, checked={(0, 1): 3}, missing=(2,))
    assert check_text(checked).startswith("Replicas that were compared agree: 3 parameters on ranks 0, 1.")


def test_the_scalar_that_was_read_before_is_shown() -> None:
    assert "read before:      item#0 returned 3 and 4, which came from aten.bincount.default" in diff_text(
        replace(MANY, first=(FOUND,))
    )


def test_the_values_of_an_argument_are_shown_where_they_can_be_told_apart() -> None:
    detail, values = "a non-tensor argument differs", {"first": "(2)", "second": "(3)"}
    shown = replace(FOUND, origin=Origin.OUTSIDE, detail=detail, **values)
    assert f"what differs:     {detail}: (2) and (3)" in diff_text(replace(MANY, first=(shown,)))
    assert f"({detail}: (2) and (3))" in diff_text(replace(MANY, first=(shown, shown)))
    long = replace(shown, first=f"({'1' * 99}2{'1' * 99})", second=f"({'1' * 99}3{'1' * 99})")
    assert f"what differs:     {detail}\n" in diff_text(replace(MANY, first=(long,)))
    apart = ReplicaDifference("w", (0, 1), (), 3, origin="outside", detail=detail, **values)
    assert check_text(ReplicasVerdict(2, (apart,))).endswith(f"{detail}: (2) and (3)")


def test_the_document_of_two_runs_holds_all_that_is_known() -> None:
    document = json.loads(json.dumps(diff_document(replace(MANY, first=(FOUND,)))))
    first = document["first"][0]
    assert list(first)[:7] == ["rank", "origin", "kernel", "module", "iteration", "through", "missing"]
    assert {*first} == {field.name for field in fields(RankDivergence)} > {field.name for field in fields(Divergence)}
    assert (first["rank"], first["origin"], first["missing"]) == (1, "sequence", [2])
    assert document["differing"][0] == {"rank": 0, "name": "weight.0", "step": 0}
    assert (document["equal"], document["steps"], document["missing"]) == (False, [2, 5], [3, 4])
    assert {*document} == {field.name for field in fields(RanksVerdict)} | {"equal"}


def test_the_document_of_replicas_holds_all_that_is_known() -> None:
    document = json.loads(
        json.dumps(check_document(check_replicas(rank_traces(CHECKS["a kernel behind the reduction"]))))
    )
    assert document["differing"][0]["origin"] == "kernel"
    assert document["checked"] == [{"ranks": [0, 1], "parameters": 1}]
    assert {*document} == {field.name for field in fields(ReplicasVerdict)} | {"equal"}
