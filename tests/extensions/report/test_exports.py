"""Traces as text, and the words of docs/csv.md."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from hashbench.core.catalog import Origin, Status
from hashbench.core.divergence import find as find_divergence
from hashbench.core.records import Leaf, OpRecord, Result, Trace
from hashbench.core.results.rows import ROWS
from tests.extensions.report.histories import digest, record
from tests.extensions.report.judgements import OF_MODELS

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


def test_traces_and_verdicts_print_short() -> None:
    first, second = chain("33"), chain("44")
    verdict = find_divergence(first, second)
    assert repr(first) == "<Trace: ops=5 (5 forward), leaves=1, results=1>"
    assert repr(Trace(())) == "<Trace: ops=0, leaves=0, results=0>"
    assert repr(verdict) == "<Verdict: kernel at c in Net; results that differ: 1>"
    assert repr(find_divergence(first, first)) == "<Verdict: no divergence; results that differ: 0>"
    assert str(verdict).splitlines() == diff(first, second)


# --------------------------------------------------------------------------------------------- docs/csv.md

DOCUMENT = "".join(
    (Path(__file__).parents[3] / "docs" / name).read_text(encoding="utf-8") for name in ("csv_columns.md", "csv.md")
)


def documented(heading: str) -> list[list[str]]:
    """The cells of every table line between ``## heading`` and the next such heading that begins with a code word."""
    (section,) = re.findall(rf"^## {heading}\n(.*?)(?=^##? |\Z)", DOCUMENT, re.MULTILINE | re.DOTALL)
    lines = re.findall(r"^\| `([^`]+)` \|(.*)\|$", section, re.MULTILINE)
    return [[word, *(cell.strip() for cell in rest.split(" | "))] for word, rest in lines]


def test_every_column_is_documented_in_order_with_meaning_and_when_it_is_empty():
    lines = documented("Columns")
    assert tuple(word for word, *_ in lines) == tuple(ROWS.columns)
    assert all(len(cells) == 3 and all(cells) for cells in lines)


def test_every_status_is_documented_with_its_relation_to_dynamo():
    lines = documented("Status words")
    assert tuple(word for word, *_ in lines) == tuple(Status)
    assert all(len(cells) == 3 and all(cells) for cells in lines)


def test_every_origin_is_documented():
    assert tuple(word for word, *_ in documented("Origins")) == tuple(Origin)


def test_every_outcome_is_documented_with_whether_it_is_worse():
    told = {word: worse == "yes" for word, _, worse in documented("Baselines")}
    assert told == {str(outcome): outcome.worse for outcome in OF_MODELS}
