"""What is printed of ranks, and their JSON documents; the golden files hold whole texts."""

from __future__ import annotations

import json
from dataclasses import fields, replace

import pytest

from hashbench.core.catalog import Origin
from hashbench.core.finding import as_json
from hashbench.core.records import Divergence, Steering
from hashbench.extensions.ranks.notes import Repro
from hashbench.extensions.ranks.replicas import ReplicaDifference, ReplicasVerdict, check_replicas
from hashbench.extensions.ranks.text import check_finding, diff_finding
from hashbench.extensions.ranks.verdict import RankDivergence, RankResult, RanksVerdict
from tests.core.divergence.rank_runs import rank_traces
from tests.extensions.ranks.rank_texts import CHECKS

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


MOST_LINES = 24
"""Of either text, in 100 columns: it fits a terminal."""


@pytest.mark.parametrize("first", [MANY.first, (), MANY.first[:1]], ids=["many", "none", "one"])
def test_a_text_of_many_ranks_is_short(first: tuple[RankDivergence, ...]) -> None:
    found = diff_finding(replace(MANY, first=first))
    assert len(str(found).splitlines()) <= MOST_LINES
    assert "agree" not in found.headline
    assert "Sentence 5.\nAnd 24 more notes, which --json has." in str(found)
    assert found.notes == MANY.unknown


def test_a_text_of_many_replicas_is_short() -> None:
    drifted = ReplicaDifference("w", (0, 1, 2), (2,), 3, "optimizer#0", (0, 2), "kernel", 2, "node", "aten.put.default")
    verdict = ReplicasVerdict(3, (drifted,) * 20, {(0, 1, 2): 20}, ("w",) * 20, (0, 3), (3, 4), MANY.unknown)
    found = check_finding(verdict)
    assert len(str(found).splitlines()) <= MOST_LINES
    assert (found.headline, found.facts[0]) == (
        "Replicas differ: w on ranks 0, 1, 2 since step 3",
        ("minority", "rank 2"),
    )


def test_a_run_that_was_not_compared_whole_is_never_told_to_agree() -> None:
    found = diff_finding(replace(MANY, first=(), later=(), differing=(), unknown=("No trace of rank 3.",)))
    assert found.headline.startswith("Nothing that was compared differs, and not all was compared: ranks 0, 1")
    assert not found.equal
    checked = check_finding(ReplicasVerdict(2, checked={(0, 1): 3}, missing=(2,)))
    assert checked.headline.startswith("Replicas that were compared agree: 3 parameters on ranks 0, 1")
    assert (checked.equal, checked.differs) == (False, False)


def test_the_scalar_that_was_read_before_is_shown() -> None:
    facts = dict(diff_finding(replace(MANY, first=(FOUND,))).facts)
    assert facts["steered by"] == "item#0 returned 3 and 4, which came from aten.bincount.default"


def test_the_values_of_an_argument_are_shown_where_they_can_be_told_apart() -> None:
    detail, values = "a non-tensor argument differs", {"first": "(2)", "second": "(3)"}
    shown = replace(FOUND, origin=Origin.OUTSIDE, detail=detail, **values)

    def facts(*first: RankDivergence) -> dict[str, str]:
        return dict(diff_finding(replace(MANY, first=first)).facts)

    assert facts(shown)["what differs"] == f"{detail}: (2) and (3)"
    assert facts(shown, replace(shown, rank=2))["rank 2"].endswith(f": {detail}: (2) and (3)")
    long = replace(shown, first=f"({'1' * 99}2{'1' * 99})", second=f"({'1' * 99}3{'1' * 99})")
    assert facts(long)["what differs"] == detail
    apart = ReplicaDifference("w", (0, 1), (), 3, origin="outside", detail=detail, **values)
    assert dict(check_finding(ReplicasVerdict(2, (apart,))).facts)["origin"].endswith(f"{detail}: (2) and (3)")


@pytest.mark.parametrize(
    ("origin", "source", "flags"),
    [
        (Origin.KERNEL, "train.py:3", [" --capture 'forward.0/net/aten.mul.Tensor#0@1'"]),
        (Origin.SEQUENCE, "", [" --source-lines"]),
        (Origin.SEQUENCE, "train.py:3", []),
    ],
)
def test_the_next_recording_captures_a_kernel_or_has_source_lines(
    origin: Origin, source: str, flags: list[str]
) -> None:
    found = replace(FOUND, origin=origin, source=source)
    ends = [f"ranks record -o C{flag} -- <the same script>" for flag in flags]
    commands = diff_finding(replace(MANY, first=(found,))).next
    assert [command.removeprefix("torchrun … -m hashbench ") for command in commands] == ends


def test_a_repro_is_a_fact_and_its_command_is_next() -> None:
    found = diff_finding(MANY, repro=Repro("r", "3 of 20 replays differ", "hashbench replay r"))
    assert (dict(found.facts)["repro"], found.next) == ("3 of 20 replays differ", ("hashbench replay r",))
    assert (found.data["repro"], found.data["repeat_with"]) == ("r", "hashbench replay r")
    assert dict(diff_finding(MANY, repro=Repro(reproduced="not captured: why")).facts)["repro"] == "not captured: why"


def test_the_document_of_two_runs_holds_all_that_is_known() -> None:
    document = json.loads(as_json(diff_finding(replace(MANY, first=(FOUND,)))))
    first = document["first"][0]
    assert list(first)[:7] == ["rank", "origin", "kernel", "module", "iteration", "through", "missing"]
    assert {*first} == {field.name for field in fields(RankDivergence)} > {field.name for field in fields(Divergence)}
    assert (first["rank"], first["origin"], first["missing"]) == (1, "sequence", [2])
    assert document["differing"][0] == {"rank": 0, "name": "weight.0", "step": 0}
    assert (document["equal"], document["steps"], document["missing"]) == (False, [2, 5], [3, 4])
    assert {*document} > {field.name for field in fields(RanksVerdict)}


def test_the_document_of_replicas_holds_all_that_is_known() -> None:
    document = json.loads(as_json(check_finding(check_replicas(rank_traces(CHECKS["a kernel behind the reduction"])))))
    assert document["differing"][0]["origin"] == "kernel"
    assert document["checked"] == [{"ranks": [0, 1], "parameters": 1}]
    assert {*document} > {field.name for field in fields(ReplicasVerdict)}
