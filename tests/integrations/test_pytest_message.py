"""The five lines of a failure, beside the golden file pytest_messages.txt."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hashbench.catalog import CAUSES
from hashbench.records import Row, RowEvidence
from hashbench.text import five_lines
from tests.experiment_texts import evidence

FOLDER = Path("kept")
ROW = Row(
    "cpu",
    "test_op",
    None,
    "eager_two_runs_differ",
    ops=7,
    origin="kernel",
    kernel="aten.index_add_.default",
    op_index=2,
    phase="backward",
    module="Net.embed",
    source="net.py:12 forward",
    detail="the output differs although every input is equal",
    cause="accumulation_order",
    confidence="proven",
    because="0 of 20 with one thread",
    evidence=evidence("call/repeat 20/20", "call/clocks (torch's own kernels read no clock)", "call/one_thread 0/20"),
    trials=20,
    rate_of="replays",
    rate=0.5,
    rate_low=0.3,
    rate_high=0.7,
    differing_results="output.0",
    differing_elements=12,
    max_abs_diff=9.54e-07,
    max_ulp=3,
    advice="Sort the targets.",
    repro="repro/x",
    reproduced="yes: 20 of 20 calls differ",
    traces="traces/x.run1.log traces/x.run2.log",
)


def test_what_is_not_known_is_said_to_be_unknown() -> None:
    bare = Row("cpu", "test_op", None, "eager_two_runs_differ", differing_results="output")

    assert five_lines(bare, folder=FOLDER).splitlines() == [
        "test_op: runs differ in output; how often is not known",
        "first divergence: not in any op that was traced",
        "cause: not looked for",
        "evidence: none gathered; seen again in a further pair: not tried",
        "to do: let the diagnosis run (diagnose=True).",
    ]


def test_arms_for_which_time_was_lacking_are_shown() -> None:
    found = evidence("pair/pair 3/3", "pair/clocks (budget)", "pair/entropy (budget)")
    text = five_lines(replace(ROW, evidence=found), folder=FOLDER)
    assert "differ): pair/pair 3/3; not run for lack of time: pair/clocks, pair/entropy\n" in text


@pytest.mark.parametrize("cause", ["unreproduced", "unknown"])
def test_no_advice_names_flags_that_pytest_lacks(cause: str) -> None:
    row = replace(ROW, cause=cause, advice=CAUSES[cause].advice)
    remedy = five_lines(row, folder=FOLDER).splitlines()[-1]

    assert "--" in CAUSES[cause].advice
    assert "--" not in remedy
    assert "hashbench_replays" in remedy


def test_only_that_advice_names_flags() -> None:
    assert {name for name, cause in CAUSES.items() if "--" in cause.advice} == {"unreproduced", "unknown"}


@pytest.mark.parametrize("text", ["two\nlines", "a\rb\x85c\u2028d", "\x1b[31mred\x07", "long " * 1000])
def test_texts_of_the_code_under_test_stay_on_their_line(text: str) -> None:
    row = replace(
        ROW, name=text, detail=text, because=text, evidence=RowEvidence(text), advice=text, differing_results=text
    )
    lines = five_lines(row, folder=FOLDER).splitlines()

    assert len(lines) == 5
    assert all(line.isprintable() and len(line) <= 500 for line in lines)
