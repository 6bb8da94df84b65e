"""``hashbench.read_sweep``: columns, their dtypes, and empty cells."""

from __future__ import annotations

import subprocess
import sys

import pandas
import pytest
from core.report.rows import differing, row, selection, write_sweep

import hashbench
from hashbench.core.errors import HashbenchError
from hashbench.core.records import ExpectedRow
from hashbench.core.results.rows import EXPECTED_ROWS, ROWS


def test_columns_are_those_of_the_csv(tmp_path):
    write_sweep(tmp_path, row("a"), differing("b"))
    assert list(hashbench.read_sweep(tmp_path).columns) == list(ROWS.types)


@pytest.mark.parametrize("path", ["accuracy.csv", "."])
def test_numbers_and_texts_have_their_dtypes(tmp_path, path):
    rows = (row("a", threads=4, seconds=1.5), row("b"))
    write_sweep(tmp_path, *rows)
    frame = hashbench.read_sweep(str(tmp_path / path))
    assert frame["name"].tolist() == ["a", "b"]
    assert {name: str(frame[name].dtype) for name in ("name", "threads", "seconds")} == {
        "name": "string",
        "threads": "Int64",
        "seconds": "Float64",
    }
    assert frame["threads"].tolist() == [4, pandas.NA if rows[1].threads is None else rows[1].threads]
    assert frame["seconds"][0] == 1.5


def test_an_empty_cell_is_missing_and_zero_is_not(tmp_path):
    write_sweep(tmp_path, row("a", peak_memory_mib=None, seconds=0.0, error=""))
    frame = hashbench.read_sweep(tmp_path)
    assert frame["peak_memory_mib"].isna().all()
    assert frame["error"].isna().all()
    assert frame["seconds"].tolist() == [0.0]


def test_modes_of_a_folder_are_read_together(tmp_path):
    for mode in ("training", "inference"):
        write_sweep(tmp_path / mode, row("a", mode=mode), selection=selection(row("a", mode=mode)))
    assert sorted(hashbench.read_sweep(tmp_path)["mode"]) == ["inference", "training"]


def test_a_baseline_has_its_three_columns(tmp_path):
    path = tmp_path / "expected.csv"
    path.write_text(EXPECTED_ROWS.text([ExpectedRow("cpu", "a", 4, "pass", since="2026-11-20")]))
    frame = hashbench.read_sweep(path)
    assert frame["since"].tolist() == ["2026-11-20"]
    assert frame["link"].isna().all()


def test_a_missing_folder_is_refused(tmp_path):
    with pytest.raises(HashbenchError, match="does not exist"):
        hashbench.read_sweep(tmp_path / "none")


def test_reading_rows_imports_no_pandas(tmp_path):
    write_sweep(tmp_path, row("a"))
    code = (
        "import sys, hashbench; assert 'hashbench.core.results' not in sys.modules\n"
        "from hashbench.core.results.load import load_sweep\n"
        f"assert len(load_sweep({str(tmp_path)!r}).rows) == 1\n"
        "assert 'pandas' not in sys.modules and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
