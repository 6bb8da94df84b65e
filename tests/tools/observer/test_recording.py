"""Which observations of two runs match: a truth table on observations written by hand."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace

import pytest

from hashbench.core.records import OpRecord, TensorDigest
from hashbench.core.report.compare import EnvironmentChange
from hashbench.tools.observer.recording import Kind, Observation, PutBack, mismatches, newest_mismatch, table


def run(text: str) -> list[Observation]:
    """Observations from words ``name=value``; of one name there may be several, as of one op."""
    found: list[Observation] = []
    counts: Counter[str] = Counter()
    for word in text.split():
        name, _, value = word.partition("=")
        counts[name] += 1
        number = counts[name]
        digest = TensorDigest("float32", (2,), (1,), value)
        record = OpRecord(f"{name}#{number}", "forward", 0, "", name, outputs=(digest,), source="model.py:3 forward")
        found.append(Observation(f"{name}_{number}", record))
    return found


def found(reference: str, current: str, *, finished: bool = True) -> list[str]:
    result = mismatches(run(reference), run(current), finished=finished)
    return [f"{one.kind} {name}" for name, one in result.items()]


TABLE = {
    "equal": ("a=1 b=2", "a=1 b=2", []),
    "one value": ("a=1 b=2 c=3", "a=1 b=9 c=3", ["changed b_1"]),
    "inserted in front": ("a=1 b=2 c=3", "x=0 a=1 b=2 c=3", ["inserted x_1"]),
    "inserted between": ("a=1 b=2 c=3", "a=1 x=0 b=2 c=3", ["inserted x_1"]),
    "inserted at the end": ("a=1 b=2", "a=1 b=2 x=0", ["inserted x_1"]),
    "missing in front": ("a=1 b=2 c=3", "b=2 c=3", ["missing reference:a_1"]),
    "missing at the end": ("a=1 b=2 c=3", "a=1 b=2", ["missing reference:c_1"]),
    "another": ("a=1 b=2 c=3", "a=1 x=2 c=3", ["missing reference:b_1", "inserted x_1"]),
    "inserted and changed": ("a=1 b=2 c=3", "x=0 a=1 b=2 c=9", ["inserted x_1", "changed c_1"]),
    "numbers shift, content does not": ("a=1 b=2 a=3", "a=1 x=0 b=2 a=3", ["inserted x_1"]),
    "nothing observed": ("a=1 b=2", "", ["missing reference:a_1", "missing reference:b_1"]),
    "nothing in the reference": ("", "a=1", ["inserted a_1"]),
}


@pytest.mark.parametrize(("reference", "current", "expected"), TABLE.values(), ids=TABLE)
def test_what_does_not_match(reference: str, current: str, expected: list[str]) -> None:
    assert found(reference, current) == expected


def test_what_is_still_to_come_is_not_missing_yet() -> None:
    assert found("a=1 b=2 c=3 d=4", "a=1 b=9", finished=False) == ["changed b_1"]
    assert found("a=1 b=2 c=3 d=4", "a=1 c=3", finished=False) == ["missing reference:b_1"]


def test_an_insertion_into_a_long_run_is_found_once() -> None:
    ops = " ".join(f"op{number % 7}={number}" for number in range(5000))
    words = ops.split()
    assert found(ops, " ".join([*words[:2300], "op3=0", *words[2300:]])) == ["inserted op3_330"]


def test_a_reference_made_to_be_slow_takes_no_quadratic_time() -> None:
    reference, current = run("a=1 b=1 " * 10_000), run("a=1 " * 10_000)
    started = time.process_time()
    found = mismatches(reference, current, finished=True)
    assert time.process_time() - started < 5
    assert {one.kind for one in found.values()} == {Kind.MISSING}


def with_output(observation: Observation, **change: object) -> Observation:
    return with_record(observation, outputs=(observation.record.outputs[0]._replace(**change),))


def with_record(observation: Observation, **change: object) -> Observation:
    return replace(observation, record=replace(observation.record, **change))


[A] = run("a=1")
CHANGES = {
    "dtype": (with_output(A, dtype="float64"), "changed: different dtype"),
    "shape": (with_output(A, shape=(3,)), "changed: different shape"),
    "stride": (with_output(A, stride=(2,)), "changed: different stride"),
    "content": (with_output(A, value="9"), "changed: different content"),
    "stride and content": (
        with_output(A, stride=(2,), value="9"), "changed: different stride, and different bytes in memory order"),
    "arguments": (with_record(A, arguments="dim=1"), "changed: its arguments were (), are (dim=1)"),
    "scalar": (with_record(A, scalar="dim=1"), "changed: its value was none, is dim=1"),
    "the generator's state alone": (with_record(A, rng="77"), ""),
    "the generator's state and content": (
        with_output(with_record(A, rng="77"), value="9"),
        "changed: different content, RNG state before it differs"),
    "not put back": (replace(A, note="different shape"), "not put back: different shape"),
}  # fmt: skip


@pytest.mark.parametrize(("new", "expected"), CHANGES.values(), ids=CHANGES)
def test_it_says_what_differs_in_an_observation(new: Observation, expected: str) -> None:
    found = mismatches([A], [new], finished=True)
    assert [f"{mismatch.kind}: {mismatch.detail}" for mismatch in found.values()] == [expected] * bool(expected)
    assert all(mismatch.source == "model.py:3 forward" for mismatch in found.values())


@pytest.mark.parametrize(
    ("current", "kind", "reference_index"),
    [
        ("a=1 b=2", None, None),
        ("a=1 b=3", Kind.CHANGED, 1),
        ("a=1 x=2", Kind.INSERTED, None),
        ("a=1 b=2 c=3", Kind.INSERTED, None),
    ],
)
def test_while_it_runs_the_newest_is_judged_alone(current: str, kind: Kind | None, reference_index: int | None) -> None:
    mismatch = newest_mismatch(run("a=1 b=2"), run(current))
    assert (mismatch and mismatch.kind, mismatch and mismatch.reference_index) == (kind, reference_index)


def test_the_table_holds_every_fact_and_no_control_characters() -> None:
    [old], [new] = run("a=1"), run("a=2")
    new = replace(new, name="a\x1b[31m\n1")
    found = list(mismatches([old], [new], finished=True).values())
    text = table(
        found,
        observed=1,
        expected=1,
        changes=[EnvironmentChange("threads.intra_op", "2", "1")],
        put_back=[PutBack("noise_1", True), PutBack("mask_1", False, "cuda:0 to cpu")],
    )
    assert text.startswith("1 mismatch in 1 observations (the reference has 1)")
    for part in ("changed", "0 / 0", "model.py:3 forward", "different content", "float32[2]:2", "float32[2]:1"):
        assert part in text
    assert "threads.intra_op: 2 in the reference, 1 now" in text
    assert "values put back: 2, other than this run's: 1: noise_1" in text
    assert "mask_1 (cuda:0 to cpu)" in text
    assert "\x1b" not in text


def test_a_table_of_many_names_the_first_and_counts_the_rest() -> None:
    found = mismatches([], run(" ".join(f"x{n}=1" for n in range(60))), finished=True)
    text = table(list(found.values()), observed=60, expected=0)
    assert "x49_1" in text
    assert "x50_1" not in text
    assert text.endswith("and 10 more")
