"""A plugin of pytest for ``benchmarks.gpu_hour``: each test's outcome goes into a CSV as soon as it is known."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the flag for the CSV."""
    parser.addoption("--outcomes", type=Path, metavar="CSV", help="write the outcome of each test into CSV")


def pytest_configure(config: pytest.Config) -> None:
    """Write the header, and add a row a test from then on."""
    path = config.getoption("--outcomes")
    if path is not None:
        config.pluginmanager.register(_Outcomes(path))


class _Outcomes:
    """Appends a row for each test that has ended."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("test,outcome,seconds,why\n", encoding="utf-8")

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test has one row: of its call, or of the part that ended it."""
        if report.when != "call" and report.passed:
            return
        why = ""
        if report.failed:
            why = str(report.longrepr).strip().splitlines()[-1]
        elif report.skipped and isinstance(report.longrepr, tuple):
            why = report.longrepr[2]
        row = (report.nodeid, report.outcome, f"{report.duration:.1f}", why)
        with self._path.open("a", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerow(row)
