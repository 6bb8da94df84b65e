"""One report of a finding: text at any width, one JSON shape, a page that loads nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hashbench.core.finding import Finding, Table, as_json, as_text, document, few
from hashbench.core.finding.page import as_html

FOUND = Finding(
    headline="The runs diverge: kernel aten.put_.default in Net",
    facts=(("first divergence", "forward.0/Net/aten.put_.default#0"), ("module", ""), ("what differs", "w " * 60)),
    table=Table("around it:", ("step", "loss"), (("1e5", "="), ("7", "≠"))),
    notes=("It may be a race.",),
    next=("hashbench diff a b --context 10", "hashbench replay repro"),
    parts=(Finding(headline="trace of step 7", facts=(("origin", "kernel"),)),),
    data={"step": 7},
)


def test_the_text_has_its_parts_in_order() -> None:
    text = as_text(FOUND, width=60)
    marks = [FOUND.headline, "first divergence:", "around it:", "It may be", "trace of step 7", "Next: hashbench diff"]
    assert sorted(marks, key=text.index) == marks
    assert text.endswith("Next: hashbench diff a b --context 10\n      hashbench replay repro")
    assert "1e5" in text, "names that look like numbers are kept"
    assert "module" not in text, "a fact without a value has no line"


@given(width=st.integers(30, 200), words=st.lists(st.text("abc.#/-", min_size=1, max_size=20), min_size=1, max_size=60))
def test_lines_are_wrapped_between_words_and_lose_none(width: int, words: list[str]) -> None:
    found = Finding(headline=" ".join(words), facts=(("what differs", " ".join(words)),), notes=(" ".join(words),))
    text = as_text(found, width=width)
    assert all(len(line) <= max(width, 40) for line in text.splitlines())
    assert text.replace("what differs:", "").split() == words * 3


def test_a_word_longer_than_the_line_stays_whole() -> None:
    command = "hashbench watch diff " + "x" * 90
    text = as_text(Finding(headline="y" * 90, next=(command,)), width=40)
    assert text.splitlines() == ["y" * 90, "", f"Next: {command}"]


def test_the_document_has_the_verdict_and_all_else() -> None:
    found = json.loads(as_json(FOUND))
    assert (found["headline"], found["equal"], found["differs"], found["step"]) == (FOUND.headline, False, True, 7)
    assert found["facts"]["first divergence"] == "forward.0/Net/aten.put_.default#0"
    assert found["table"] == {"headers": ["step", "loss"], "rows": [["1e5", "="], ["7", "≠"]]}
    assert (found["next"], found["notes"]) == (list(FOUND.next), list(FOUND.notes))
    assert found["parts"] == [document(FOUND.parts[0])]


@pytest.mark.parametrize(("number", "last"), [(7, "Note 6."), (8, "And 2 more notes, which --json has.")])
def test_a_text_has_a_few_notes_and_the_document_all(number: int, last: str) -> None:
    found = Finding(headline="x", notes=tuple(f"Note {index}." for index in range(number)))
    lines = as_text(found).splitlines()
    assert (len(lines), lines[-1]) == (9, last)
    assert document(found)["notes"] == list(found.notes)


def test_a_list_names_two() -> None:
    assert few(["a", "b"]) == "a, b"
    assert few(["a", "b", "c", "d"]) == "a, b and 2 more"


class _Page(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.words: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        assert not {name for name, _ in attrs} & {"src", "onerror", "onclick", "href"}, "a page loads nothing"

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def test_the_page_shows_all_and_escapes_names() -> None:
    evil = replace(FOUND, headline="<script>alert(1)</script>\x1b[2J", notes=("<img src=x onerror=y>\udcff",))
    page = as_html(evil, title="hashbench diff", of="a and b")
    parsed = _Page(page)
    assert "script" not in parsed.tags
    assert "img" not in parsed.tags
    shown = " ".join(parsed.words)
    for text in ("<script>alert(1)</script>", "forward.0/Net/aten.put_.default#0", "≠", "trace of step 7", *FOUND.next):
        assert text in shown
    assert "\x1b" not in page
    page.encode("utf-8")
