"""Comparisons, sweeps, traces and failed tests as text, Markdown, JSON and CSV; and the words of docs/csv.md."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from hashbench.catalog import CAUSES, Origin, Status
from hashbench.divergence import find as find_divergence
from hashbench.records import ROW_COLUMNS, Leaf, OpRecord, Result, Row, RowEvidence, Trace
from hashbench.report.compare import Outcome, compare
from hashbench.report.text import as_json, as_markdown, as_text, escape_markdown, summary
from hashbench.results.load import Selection
from hashbench.text import five_lines, shorten
from tests.experiment_texts import evidence
from tests.report.histories import digest, record

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
    replace(DIFFERING, name="vgg11"),
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
def test_a_comparison_counts_the_rows_that_have_no_partner(new, words):
    compared = compare(sweep(row("a"), row("b")), sweep(*new))
    assert re.fullmatch(words, summary(compared))
    assert json.loads(as_json(compared))["without_partner"] == {"base": 4 - len(new) - 1, "new": 1}


def test_names_that_look_like_numbers_stay_as_they_are():
    assert "1e5" in as_text(compare(sweep(row("1e5")), sweep(row("1e5", "timeout"))))


@pytest.mark.parametrize(
    ("text", "width", "short"),
    [("abcdefghij", 10, "abcdefghij"), ("abcdefghijk", 10, "abcde…hijk"), ("abcdef", 3, "a…f"), ("", 3, "")],
)
def test_long_texts_are_cut_in_the_middle(text, width, short):
    assert shorten(text, width) == short


# ------------------------------------------------------------------------------------------------- two traces


def op(name: str, *values: str, reads: str = "input/0") -> OpRecord:
    return replace(record(name, reads), outputs=tuple(map(digest, values)))


def trace(*records: OpRecord, value: str = "aa", start: str = "11") -> Trace:
    leaf = Leaf("input/0", "input", digest(start), 0)
    return Trace(records, (leaf,), (Result("output.0", digest(value), records[-1].id),))


def chain(value: str) -> Trace:
    names, values = "abcde", ("11", "22", value, value, value)
    reads = ["input/0", *(f"forward.0/Net/{name}#0" for name in names)]
    return trace(*(op(n, v, reads=r) for n, v, r in zip(names, values, reads, strict=False)), value=value)


def pair_and_reader(second: str) -> Trace:
    return trace(op("pair", "11", second), op("reader", "55", reads="forward.0/Net/pair#0"), value=second)


def diff(first: Trace, second: Trace, *, context: int = 3) -> list[str]:
    return find_divergence(first, second).text(context=context).splitlines()


EXCERPTS = {
    "an op between its neighbours": (chain("33"), chain("44"), ["  b", "- c", "+ c", "- d", "+ d"]),
    "a reader of a second output": (
        pair_and_reader("22"),
        pair_and_reader("33"),
        ["- pair", "+ pair", "- reader", "+ reader"],
    ),
    "an op of one run alone": (
        trace(op("a", "22"), op("b", "33")),
        trace(op("a", "22"), op("extra", "44"), op("b", "55"), value="bb"),
        ["+ extra", "- b", "+ b"],
    ),
    "the op that read an input that differs": (
        trace(op("a", "22"), start="11"),
        trace(op("a", "33"), start="12", value="bb"),
        ["- a", "+ a"],
    ),
}


@pytest.mark.parametrize(("first", "second", "shown"), EXCERPTS.values(), ids=EXCERPTS)
def test_a_diff_shows(first: Trace, second: Trace, shown: list[str]) -> None:
    lines = [line for line in diff(first, second, context=1) if line[1:].startswith(" op\t")]
    assert [f"{line[0]} {line.split('/')[2].split('#')[0]}" for line in lines] == shown


def test_equal_traces_and_harmless_differences_are_said_to_be() -> None:
    assert diff(chain("33"), chain("33")) == ["The traces are equal: 5 records, 1 result."]
    lines = diff(*(trace(op("workspace", value), op("a", "22")) for value in ("33", "44")))
    assert lines[0] == "No divergence reaches a result (2 records, 1 result compared)."
    assert lines[-1] == "1 record differs without reaching a result: forward.0/Net/workspace#0"


def test_traces_and_verdicts_print_short() -> None:
    first, second = chain("33"), chain("44")
    verdict = find_divergence(first, second)
    assert repr(first) == "<Trace: ops=5 (5 forward), leaves=1, results=1>"
    assert repr(Trace(())) == "<Trace: ops=0, leaves=0, results=0>"
    assert repr(verdict) == "<Verdict: kernel at c in Net; results that differ: 1>"
    assert repr(find_divergence(first, first)) == "<Verdict: no divergence; results that differ: 0>"
    assert str(verdict).splitlines() == diff(first, second)


# ---------------------------------------------------------------------------------------------- a failed test

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


# --------------------------------------------------------------------------------------------- docs/csv.md

DOCUMENT = (Path(__file__).parents[2] / "docs" / "csv.md").read_text(encoding="utf-8")


def documented(heading: str) -> list[list[str]]:
    """The cells of every table line between ``## heading`` and the next such heading that begins with a code word."""
    (section,) = re.findall(rf"^## {heading}\n(.*?)(?=^## |\Z)", DOCUMENT, re.MULTILINE | re.DOTALL)
    lines = re.findall(r"^\| `([^`]+)` \|(.*)\|$", section, re.MULTILINE)
    return [[word, *(cell.strip() for cell in rest.split(" | "))] for word, rest in lines]


def test_every_column_is_documented_in_order_with_meaning_and_when_it_is_empty():
    lines = documented("Columns")
    assert tuple(word for word, *_ in lines) == ROW_COLUMNS
    assert all(len(cells) == 3 and all(cells) for cells in lines)


def test_every_status_is_documented_with_its_relation_to_dynamo():
    lines = documented("Status words")
    assert tuple(word for word, *_ in lines) == tuple(Status)
    assert all(len(cells) == 3 and all(cells) for cells in lines)


def test_every_origin_is_documented():
    assert tuple(word for word, *_ in documented("Origins")) == tuple(Origin)


def test_every_outcome_is_documented_with_whether_it_is_worse():
    told = {word: worse == "yes" for word, _, worse in documented("Baselines")}
    assert told == {str(outcome): outcome.worse for outcome in Outcome}
