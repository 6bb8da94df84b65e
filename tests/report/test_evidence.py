"""The column ``evidence``, read back."""

from __future__ import annotations

import dataclasses

import pytest

from hashbench.records import ExperimentResult
from hashbench.report.html.evidence import ArmRead, arms_of, read_evidence, reasons
from tests.report.histories import DIAGNOSED

ARMS = (
    ExperimentResult("repeat", "call", trials=33, differing=33),
    ExperimentResult("one_thread", "call", trials=20),
    ExperimentResult("moved", "call", trials=8, differing=2, found="4, 16 bytes"),
    ExperimentResult("busy", "call", note="raises: no; really (not) today"),
    ExperimentResult("generators", "pair", trials=8, found="a.b, c[0]"),
    ExperimentResult("fresh_process", "process", note="budget"),
)


def test_what_a_row_says_reads_back_as_the_arms_it_was_made_of() -> None:
    assert arms_of("; ".join(arm.word() for arm in ARMS)) == ARMS


@pytest.mark.parametrize(
    "text",
    ["", "nonsense", "call/repeat", "call/repeat 5/3", "call/repeat 0/0", "call/repeat -1/3", "tree/repeat 1/3"],
)
def test_what_has_no_meaning_is_no_arm(text: str) -> None:
    assert arms_of(text) == ()


def test_of_two_arms_with_one_name_the_first_counts() -> None:
    assert [arm.differing for arm in arms_of("call/repeat 3/3; call/repeat 0/3")] == [3]


def read(evidence: str, **values: object) -> dict[str, ArmRead]:
    row = dataclasses.replace(DIAGNOSED, evidence=evidence, **values)
    return {one.arm.name: one for one in read_evidence(row)}


@pytest.mark.parametrize(
    ("evidence", "arm", "effect"),
    [
        ("call/repeat 33/33; call/one_thread 0/20", "one_thread", "gone"),
        ("call/repeat 1/20; call/one_thread 0/20", "one_thread", "gone, but too few trials to be sure"),
        ("call/repeat 33/33; call/one_thread 20/20", "one_thread", "still differs"),
        ("call/repeat 33/33; call/one_thread 2/20", "one_thread", "rarer, still there"),
        ("call/repeat 0/20; call/busy 3/20", "busy", "brings it about"),
        ("call/repeat 0/20; call/busy 0/20", "busy", "agrees too"),
        ("call/repeat 20/20; call/poison 20/20", "poison", "depends on uninitialised memory"),
        ("call/repeat 20/20; call/poison 0/20", "poison", "does not depend on it"),
        ("call/one_thread 3/20", "one_thread", "differs"),
        ("call/repeat 20/20", "repeat", ""),
    ],
)
def test_an_arm_is_said_to_be(evidence: str, arm: str, effect: str) -> None:
    assert read(evidence)[arm].effect == effect


def test_an_odd_first_outcome_is_not_taken_for_twenty_that_differ() -> None:
    # 20 of 20 with 2 outcomes is one odd outcome among 21: that it is gone in 20 trials shows nothing.
    found = read("call/repeat 20/20; call/one_thread 0/5", distinct=2, trials=20)
    assert found["one_thread"].effect == "gone, but too few trials to be sure"


def test_bounds_are_those_of_the_counts() -> None:
    found = read("call/repeat 10/20")["repeat"]
    assert found.share == 0.5
    assert found.low == pytest.approx(0.272, abs=0.001)
    assert found.high == pytest.approx(0.728, abs=0.001)


def test_counts_that_no_arm_reaches_are_not_computed_with() -> None:
    assert read("call/repeat 999999999/999999999; call/one_thread 1/999999999")["one_thread"].effect == ""


def test_the_base_comes_first_and_what_was_not_run_last() -> None:
    found = read("call/busy not run (why); call/one_thread 0/20; call/repeat 20/20; pair/pair 8/8")
    assert list(found) == ["repeat", "one_thread", "pair", "busy"]


def test_arms_that_were_not_run_share_their_reason() -> None:
    row = dataclasses.replace(DIAGNOSED, evidence="call/a not run (x); call/b not run (y); call/c not run (x)")
    told = [(note, [one.arm.name for one in arms]) for note, arms in reasons(read_evidence(row))]
    assert told == [("x", ["a", "c"]), ("y", ["b"])]
