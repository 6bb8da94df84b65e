"""Rewrite the tables in README.md and benchmarks/README.md from measured files: no result in them is typed by hand.

    python docs/readme_tables.py --specimens results/specimens/training --benchmarks benchmarks.json

A table stands between ``<!-- name -->`` and ``<!-- /name -->``. A table whose file is not given stays as it is.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
from collections.abc import Sequence
from pathlib import Path

from tabulate import tabulate

ROOT = Path(__file__).parent.parent
SPECIMEN_COLUMNS = ("accuracy", "origin", "kernel", "phase", "module", "benign")


def specimens(folder: Path) -> str:
    """The rows of a sweep of the specimens that are no clean twins, with what each specimen is."""
    with (ROOT / "models" / "specimens.csv").open(newline="", encoding="utf-8") as file:
        notes = {line["name"]: line["note"] for line in csv.DictReader(file)}
    with (folder / "accuracy.csv").open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if not row["name"].endswith("_twin")]
    shown = [row for row in rows if row["accuracy"] != "pass_due_to_skip"]
    lines = [[notes[row["name"]], *(_code(row[column]) for column in SPECIMEN_COLUMNS)] for row in shown]
    return _table(["what the model does", *SPECIMEN_COLUMNS], lines)


def benchmarks(path: Path, *, only_goals: bool) -> str:
    """The tables of ``python -m benchmarks --json`` (``only_goals``: those with goals), and the machine."""
    found = json.loads(path.read_text(encoding="utf-8"))
    machine = ", ".join(f"{name} {value}" for name, value in found["machine"].items())
    shown = [table for table in found["tables"] if not only_goals or "goal" in table["headers"]]
    parts = [f"**{table['title']}**\n\n{_table(table['headers'], table['rows'])}" for table in shown]
    return "\n\n".join([*parts, f"Measured with `python -m benchmarks` on: {machine}."])


def _code(text: str) -> str:
    return f"`{text}`" if "." in text or "_" in text else text


def _table(headers: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return tabulate(lines, headers=headers, tablefmt="github", disable_numparse=True)


def _replace(page: Path, name: str, table: str) -> None:
    text = page.read_text(encoding="utf-8")
    block = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
    if not block.search(text):
        raise SystemExit(f"{page} has no place for {name}: it was not written. Add <!-- {name} --> to it.")
    page.write_text(block.sub(lambda found: f"{found[1]}{table}\n{found[2]}", text), encoding="utf-8")


def main() -> None:
    """Read the given files, replace their tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--specimens", type=Path, help="results folder of a sweep of the specimens")
    parser.add_argument("--benchmarks", type=Path, help="file of `python -m benchmarks --json`")
    given = parser.parse_args()
    if given.specimens is not None:
        _replace(ROOT / "README.md", "specimens", specimens(given.specimens))
    if given.benchmarks is not None:
        _replace(ROOT / "README.md", "benchmarks", benchmarks(given.benchmarks, only_goals=True))
        _replace(ROOT / "benchmarks" / "README.md", "benchmarks", benchmarks(given.benchmarks, only_goals=False))


if __name__ == "__main__":
    main()
