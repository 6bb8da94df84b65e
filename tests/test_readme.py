"""The first screen of the README: an example that can be typed, then one table of commands and pages."""

from __future__ import annotations

import re
import shlex

import pytest
from command_helpers import CHECKOUT

from hashbench import cli

README = (CHECKOUT / "README.md").read_text(encoding="utf-8")
ROW = re.compile(
    r"^\| (?P<have>[^|]+) \| `(?P<type>[^`|]+)` \| \[(?P<name>\w+)\]\(docs/(?P<page>\w+)\.md(?:#[\w-]+)?\) \|$"
)
HEADER = "| you have | type | page |\n|---|---|---|\n"
SCREEN, TABLE = README[: README.index(HEADER)], README[README.index(HEADER) + len(HEADER) :].partition("\n\n")[0]
OF_THE_FIELD = ("HashDebugTrace", "dispatched", "benchmarks/dynamo", "eager_two_runs_differ")


def test_it_is_short() -> None:
    assert len(README.splitlines()) <= 120


def test_the_example_has_at_most_sixteen_lines() -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```", SCREEN, re.MULTILINE | re.DOTALL)
    assert len(code.splitlines()) <= 16


@pytest.mark.parametrize("line", TABLE.splitlines())
def test_each_row_has_a_command_that_parses_and_a_page(line: str) -> None:
    row = ROW.match(line)
    assert row is not None
    assert (CHECKOUT / "docs" / f"{row['page']}.md").is_file()
    assert row["name"] == row["page"]
    words = shlex.split(row["type"])
    if words[0] == "hashbench":
        assert callable(cli._parser().parse_args(words[1:]).command)
    else:
        assert row["page"] in ("pytest", "testing")


def test_every_question_of_the_index_is_in_the_readme() -> None:
    index = (CHECKOUT / "docs" / "index.md").read_text(encoding="utf-8")
    questions = index.partition("## Questions")[2].partition("## Inside")[0]
    pages = re.findall(r"^- \[\w+\]\((\w+)\.md\)", questions, re.MULTILINE)
    assert [page for page in pages if f"docs/{page}.md" not in README] == []


@pytest.mark.parametrize("word", OF_THE_FIELD)
def test_words_of_the_field_come_after_the_table(word: str) -> None:
    assert word not in SCREEN + TABLE
    assert word in README
