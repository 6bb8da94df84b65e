"""A row as a failed test shows it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hashbench.core.catalog import CAUSES
from hashbench.core.finding.row import row_finding
from hashbench.core.records import Row, RowEvidence
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
    reproduced="in a fresh process 20 of 20 calls differ",
    traces="traces/x.run1.log traces/x.run2.log",
)


def facts_of(row: Row) -> dict[str, str]:
    return dict(row_finding(row, folder=FOLDER).facts)


def test_what_is_not_known_is_said_to_be_unknown() -> None:
    bare = row_finding(Row("cpu", "test_op", None, "eager_two_runs_differ", differing_results="output"), folder=FOLDER)
    assert bare.headline == "test_op: runs differ in output; how often is not known"
    assert dict(bare.facts) == {
        "first divergence": "not in any op that was traced",
        "cause": "not looked for",
        "evidence": "none gathered; seen again in a further pair: not tried",
        "to do": "let the diagnosis run (diagnose=True).",
    }
    assert bare.next == ()


@pytest.mark.parametrize(
    ("mode", "repeats"),
    [("training", "hashbench replay 'kept/repro/x y'"), ("batch-invariance", "python 'kept/repro/x y/repro.py'")],
)
def test_the_commands_repeat_the_difference_and_read_the_traces(mode: str, repeats: str) -> None:
    row = replace(ROW, mode=mode, repro="repro/x y", traces="traces/x.run1.log.gz traces/x.run2.log.gz")
    reads = "hashbench diff kept/traces/x.run1.log.gz kept/traces/x.run2.log.gz"
    assert row_finding(row, folder=FOLDER).next == (repeats, reads)
    assert facts_of(row)["repro"] == ROW.reproduced


def test_arms_for_which_time_was_lacking_are_shown() -> None:
    found = evidence("pair/pair 3/3", "pair/clocks (budget)", "pair/entropy (budget)")
    shown = facts_of(replace(ROW, evidence=found))["evidence"]
    assert shown.endswith("differ: pair/pair 3/3; not run for lack of time: pair/clocks, pair/entropy")


@pytest.mark.parametrize("cause", ["unreproduced", "unknown"])
def test_no_advice_names_flags_that_pytest_lacks(cause: str) -> None:
    remedy = facts_of(replace(ROW, cause=cause, advice=CAUSES[cause].advice))["to do"]
    assert "--" in CAUSES[cause].advice
    assert "--" not in remedy
    assert "hashbench_replays" in remedy


def test_only_that_advice_names_flags() -> None:
    assert {name for name, cause in CAUSES.items() if "--" in cause.advice} == {"unreproduced", "unknown"}


@pytest.mark.parametrize("text", ["two\nlines", "a\rb\x85c\u2028d", "\x1b[31mred\x07", "long " * 1000])
def test_texts_of_the_tested_code_stay_on_their_line(text: str) -> None:
    row = replace(
        ROW, name=text, detail=text, because=text, evidence=RowEvidence(text), advice=text, differing_results=text
    )
    found = row_finding(row, folder=FOLDER)
    shown = [found.headline, *(fact for _, fact in found.facts)]
    assert all(line.isprintable() and len(line) <= 500 for line in shown)
