"""Comparisons as text, Markdown and JSON."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace

import pytest

from hashbench.core.report.compare import compare
from hashbench.core.report.text import as_json, as_markdown, as_text, escape_markdown, headline, totals
from hashbench.core.results.load import Requested
from tests.core.report.rows import DIFFERING, row, sweep

HOSTILE = "<img src=x>|`a`"


BASE = sweep(
    *(row(name) for name in ("alexnet", "vgg11", HOSTILE, "gone")),
    *(row(f"model{number}", mode="inference") for number in range(20)),
    label="results/expected",
    environments={"e1": {"torch": {"version": "2.14"}, "threads": 2}},
)


NEW = sweep(
    row("alexnet"),
    replace(DIFFERING, name="vgg11"),
    row(HOSTILE, "crashed", error="signal 9 | see <log>\n`x`"),
    label="results/now",
    environments={"e1": {"torch": {"version": "2.15"}, "threads": 2}},
)


COMPARISON = compare(BASE, NEW)


def test_markdown_escapes_names_and_errors():
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


def test_json_has_every_model_and_no_infinity():
    odd = row("alexnet", max_abs_diff=math.inf, rate=math.nan)
    content = json.loads(as_json(compare(BASE, sweep(odd))), parse_constant=pytest.fail)
    assert content["worse"] is True
    assert sum(content["counts"].values()) == len(content["changes"]) == 24
    (alexnet,) = [change for change in content["changes"] if change["name"] == "alexnet"]
    assert (alexnet["outcome"], alexnet["worse"], alexnet["new"]["max_abs_diff"]) == ("unchanged", False, "inf")
    assert "kernel" not in alexnet["base"], "empty is left out"


def test_models_that_were_not_selected_are_one_line():
    asked = Requested(frozenset({("torchvision", "model1")}), mode="training", device="cpu")
    everything = sweep(*(row(f"model{number}") for number in range(100)))
    text = as_text(compare(everything, sweep(row("model1"), selections=(asked,))))
    assert "- not selected: NEW was not asked to run them (99 models: 99 pass)" in text
    assert len(text.splitlines()) < 12


@pytest.mark.parametrize(("count", "listed"), [(4, True), (5, False)], ids=["four are listed", "five are one line"])
def test_models_not_comparable_alike_share_a_line(count, listed):
    names = [f"model{number}" for number in range(count)]
    text = as_text(compare(sweep(*map(row, names)), sweep(*(row(name, batch_size=8) for name in names))))
    assert ("model0" in text) == listed
    assert "batch_size 4 → 8" in text


def test_a_comparison_in_which_all_is_well_is_short():
    quiet = compare(sweep(row("a")), sweep(row("a")))
    assert f"{headline(quiet)}: {totals(quiet)}" == "Nothing got worse: 1 unchanged"
    assert "outcome" not in as_text(quiet)


SUMMARIES = {
    "a repair by a setting and a new race": (
        [replace(DIFFERING, name="a", deterministic="off")],
        [row("a"), replace(DIFFERING, name="b")],
        "b is new and differs; nothing got worse in the 1 row that both have: 1 passes under other settings, 1 new; "
        "without a partner: 1 row of NEW",
    ),
    "other settings alone": (
        [row("a", threads=1)],
        [replace(DIFFERING, name="a", threads=8)],
        "Whether anything got worse is not known: 1 not comparable",
    ),
    "a new row that fails, and one that got worse": (
        [row("a")],
        [row("a", "crashed"), row("b", "crashed")],
        "b is new and fails; worse: 1 regressed, 1 new; without a partner: 1 row of NEW",
    ),
}


@pytest.mark.parametrize(("old", "new", "said"), SUMMARIES.values(), ids=SUMMARIES)
def test_summary_names_new_trouble_first_and_calls_worse_what_is_known_to_be(old, new, said):
    compared = compare(sweep(*old), sweep(*new))
    assert f"{headline(compared)}: {totals(compared)}" == said
    if "is new" in said:
        assert compared.changes[0].new.name == "b"


@pytest.mark.parametrize(
    ("new", "words"),
    [
        ([row("a"), row("c")], "Worse: 1 missing, 1 new, 1 unchanged; without a partner: 1 row of BASE, 1 row of NEW"),
        (
            [row("a"), row("b"), row("c")],
            "Nothing got worse in the 2 rows that both have: 1 new, 2 unchanged; .*: 1 row of NEW",
        ),
    ],
)
def test_summary_counts_rows_without_a_partner(new, words):
    compared = compare(sweep(row("a"), row("b")), sweep(*new))
    assert re.fullmatch(words, f"{headline(compared)}: {totals(compared)}")
    assert json.loads(as_json(compared))["without_partner"] == {"base": 4 - len(new) - 1, "new": 1}


def test_names_that_look_like_numbers_stay_as_they_are():
    assert "1e5" in as_text(compare(sweep(row("1e5")), sweep(row("1e5", "timeout"))))


@pytest.mark.parametrize("kernel", ["aten.mm.default", "aten._scaled_dot_product_flash_attention_backward.default"])
def test_the_kernel_of_a_note_is_never_cut(kernel):
    module = ".".join(["layer"] * 20)
    found = compare(sweep(row("a")), sweep(replace(DIFFERING, name="a", kernel=kernel, module=module)))
    (line,) = (line for line in as_text(found).splitlines() if line.startswith("regressed"))
    assert f"kernel: {kernel}" in line
    assert module not in line


def test_a_long_error_is_cut():
    found = compare(sweep(row("a")), sweep(row("a", "crashed", error="long " * 40)))
    (line,) = (line for line in as_text(found).splitlines() if line.startswith("regressed"))
    assert "…" in line
    assert len(line) < 150
