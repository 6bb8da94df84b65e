"""Kinds of audits, on a kind planted here: its rows, its files, and its tables."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from hashbench.core.report.audits import AuditKind, by_verdict, counts, table_of_counts, values_of
from hashbench.core.results.rows import RowFormat


@dataclass(frozen=True, slots=True)
class PlantedRow:
    dev: str
    source: str
    op: str
    sample: str
    verdict: str
    speed: int | None = None
    error: str = ""


FORMAT = RowFormat(
    PlantedRow,
    what="an audit of speed",
    example="a speed.csv",
    key=("dev", "source", "op", "sample"),
    label=" ".join,
    required=("op", "verdict"),
    filled=("op", "verdict"),
)
KIND = AuditKind("with --speed", "speed.csv", FORMAT, "nowhere", no_sample={"sample": "none"}, marks=("speed",))
ROWS = [PlantedRow("cpu", "op_db", "mm", word[0], word) for word in ("slow", "fast")]


def test_an_op_that_died_has_one_row_without_a_sample() -> None:
    died = KIND.died("cpu", ("op_db", "mm"), timed_out=True, error="no result after 9 s")
    assert died == PlantedRow("cpu", "op_db", "mm", "none", "timeout", error="no result after 9 s")
    assert KIND.died("cpu", ("op_db", "mm"), timed_out=False, error="killed").verdict == "crashed"


@pytest.mark.parametrize(
    ("header", "lies"),
    [("op,verdict,speed", True), ("op,verdict", False), ("speed,name", False)],
    ids=["all its marks", "another audit", "no audit"],
)
def test_a_table_is_known_by_its_columns(header: str, lies: bool, tmp_path: Path) -> None:
    path = tmp_path / "any.csv"
    path.write_text(header + "\n")
    assert KIND.lies_at(path) is lies


def test_a_folder_is_known_by_the_file_unless_it_is_a_sweep(tmp_path: Path) -> None:
    assert not KIND.lies_at(tmp_path)
    (tmp_path / "speed.csv").touch()
    assert KIND.lies_at(tmp_path)
    (tmp_path / "accuracy.csv").touch()
    assert not KIND.lies_at(tmp_path)


def test_rows_are_grouped_and_counted_in_the_order_of_verdicts() -> None:
    words = ("fast", "slow", "never")
    assert [key for key, _ in by_verdict(ROWS, words, lambda row: (row.verdict, row.op))] == [
        ("fast", "mm"),
        ("slow", "mm"),
    ]
    assert counts(ROWS, words) == [("fast", 1, 1), ("slow", 1, 1)]
    assert "never" not in table_of_counts(ROWS, words)
    assert (values_of(ROWS, "op"), values_of(ROWS, "error")) == (["mm"], [])
