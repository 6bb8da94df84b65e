"""Comparisons and sweeps as text, Markdown, JSON and CSV."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

from hashbench.report.compare import compare
from hashbench.report.text import as_json, as_markdown, as_text, escape_markdown, summary, sweep_table
from hashbench.results.load import Selection
from hashbench.text import shorten

from .rows import DIFFERING, row, sweep

HOSTILE = "<img src=x>|`a`"

BASE = sweep(
    *(row(name) for name in ("alexnet", "vgg11", HOSTILE, "gone")),
    *(row(f"model{number}", mode="inference") for number in range(20)),
    label="results/expected",
    environments={"e1": {"torch": {"version": "2.14"}, "threads": 2}},
)
NEW = sweep(
    row("alexnet"),
    dataclasses.replace(DIFFERING, name="vgg11"),
    row(HOSTILE, "crashed", error="signal 9 | see <log>\n`x`"),
    label="results/now",
    environments={"e1": {"torch": {"version": "2.15"}, "threads": 2}},
)
COMPARISON = compare(BASE, NEW)


def test_markdown_shows_hostile_names_and_errors_as_they_are():
    text = as_markdown(COMPARISON)
    assert "<" not in text
    (line,) = [line for line in text.splitlines() if "img" in line]
    assert line.count("|") - line.count("\\|") == 7, "six cells, whatever the texts hold"
    assert "&lt;img src=x&gt;\\|\\`a\\`" in line
    assert "signal 9 \\| see &lt;log&gt; \\`x\\`" in line


@pytest.mark.parametrize(
    ("text", "escaped"),
    [
        ("mobilenet_v3_small", "mobilenet_v3_small"),
        ("__init__", "\\_\\_init\\_\\_"),
        ("a*b*c", "a\\*b\\*c"),
        ("[x](javascript:y)", "\\[x\\](javascript:y)"),
        ("a\\|b", "a\\\\\\|b"),
        ("a\nb", "a b"),
        ("&lt;", "&amp;lt;"),
    ],
)
def test_markdown_is_escaped(text, escaped):
    assert escape_markdown(text) == escaped


def test_json_has_every_model_and_no_numbers_that_json_lacks():
    odd = row("alexnet", max_abs_diff=math.inf, rate=math.nan)
    content = json.loads(as_json(compare(BASE, sweep(odd))), parse_constant=pytest.fail)
    assert content["worse"] is True
    assert sum(content["counts"].values()) == len(content["changes"]) == 24
    (alexnet,) = [change for change in content["changes"] if change["name"] == "alexnet"]
    assert (alexnet["outcome"], alexnet["worse"], alexnet["new"]["max_abs_diff"]) == ("unchanged", False, "inf")
    assert "kernel" not in alexnet["base"], "empty is left out"


def test_models_that_were_not_selected_are_one_line():
    asked = Selection(frozenset({("torchvision", "model1")}), mode="training", device="cpu")
    everything = sweep(*(row(f"model{number}") for number in range(100)))
    text = as_text(compare(everything, sweep(row("model1"), selections=(asked,))))
    assert "- not selected: NEW was not asked to run them (99 models: 99 pass)" in text
    assert len(text.splitlines()) < 10


@pytest.mark.parametrize(("count", "listed"), [(4, True), (5, False)], ids=["four are listed", "five are one line"])
def test_models_that_are_not_comparable_for_one_reason_share_a_line(count, listed):
    names = [f"model{number}" for number in range(count)]
    text = as_text(compare(sweep(*map(row, names)), sweep(*(row(name, batch_size=8) for name in names))))
    assert ("model0" in text) == listed
    assert "batch_size 4 → 8" in text


def test_a_comparison_in_which_all_is_well_is_short():
    quiet = compare(sweep(row("a")), sweep(row("a")))
    assert summary(quiet) == "Nothing got worse: 1 unchanged"
    assert "outcome" not in as_text(quiet)


def test_names_that_look_like_numbers_stay_as_they_are():
    assert "1e5" in as_text(compare(sweep(row("1e5")), sweep(row("1e5", "timeout"))))
    assert "1e5" in sweep_table([row("1e5")])


@pytest.mark.parametrize(
    ("text", "width", "short"),
    [("abcdefghij", 10, "abcdefghij"), ("abcdefghijk", 10, "abcde…hijk"), ("abcdef", 3, "a…f"), ("", 3, "")],
)
def test_long_texts_are_cut_in_the_middle(text, width, short):
    assert shorten(text, width) == short


# -------------------------------------------------------------------------------------------- a sweep's table


def test_the_table_of_a_sweep_leaves_out_what_is_empty():
    table = sweep_table([row("alexnet", seconds=1.25), dataclasses.replace(DIFFERING, benign=2)])
    header, *_ = table.splitlines()
    assert header.split() == ["name", "accuracy", "origin", "kernel", "module", "benign", "seconds"]
    assert table.endswith("2 models in training: 1 pass, 1 eager_two_runs_differ")


def test_the_table_of_a_sweep_gives_the_cause_in_the_place_of_the_origin():
    table = sweep_table([row("a"), dataclasses.replace(DIFFERING, cause="write_race", confidence="proven")])
    header, _, _, line, *_ = table.splitlines()
    assert header.split()[-2:] == ["cause", "confidence"]
    assert "origin" not in header
    assert line.split()[-2:] == ["write_race", "proven"]


def test_the_table_of_a_sweep_fits_140_columns_whatever_the_rows_hold():
    texts = dict.fromkeys(
        ("name", "accuracy", "kernel", "module", "phase", "cause", "confidence", "error"), "long " * 50
    )
    table = sweep_table([row(**texts, benign=123_456, seconds=12_345.6)])
    assert max(map(len, table.splitlines()[:4])) <= 140


def test_the_table_of_a_sweep_says_what_agreeing_runs_prove():
    few, many = row("a", runs=2, rate_high=0.95), row("b", runs=20, rate_high=0.14586)
    failed = row("c", "crashed", runs=2, rate_high=0.99)
    proved = "at most 14.6% of further runs may differ from the first"
    assert sweep_table([many, failed]).splitlines()[-1].startswith(f"Where 20 runs agree, {proved}")
    assert "Where 2 runs agree, at most 95.0%" in sweep_table([few, many])
    assert "runs agree" not in sweep_table([failed])


def test_zero_benign_records_are_shown_as_zero():
    assert "benign" in sweep_table([row(benign=0)])


def test_errors_stand_below_the_table_on_one_line_each():
    table = sweep_table([row("a", "crashed", error="killed\nby signal 9"), row("b")])
    assert "\na: killed by signal 9\n" in table


def test_a_sweep_without_rows_has_words_for_it():
    assert sweep_table([]) == "No model was run."
