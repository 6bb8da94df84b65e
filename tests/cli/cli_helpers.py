"""A zoo that was swept once, for all tests of the command line."""

from __future__ import annotations

from pathlib import Path

from hashbench.core.results.rows import read_rows

ZOO_SWEEP = ("sweep", "--suite", "zoo.py", "--inference", "--keep-traces", "--diagnose-budget", "0")


def trace_of(folder: Path, model: str, run: int = 1) -> Path:
    row = next(row for row in read_rows(folder / "out" / "accuracy.csv") if row.name == model)
    return folder / "out" / row.traces.split()[run - 1]
