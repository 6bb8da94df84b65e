"""docs/csv.md says something about every column and every word."""

from __future__ import annotations

import re
from pathlib import Path

from hashbench.catalog import Origin, Status
from hashbench.records import ROW_COLUMNS
from hashbench.report.compare import Outcome

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
