"""Rewrite the tables in README.md from measured files, so that no result in it is typed by hand.

    python docs/readme_tables.py --specimens results/specimens/training --benchmarks benchmarks.json

A table stands between ``<!-- name -->`` and ``<!-- /name -->``. A table whose file is not given stays as it is.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
from collections.abc import Iterator, Sequence
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


def benchmarks(path: Path) -> str:
    """Every table of ``python -m benchmarks --json`` that has goals, and the machine."""
    found = json.loads(path.read_text(encoding="utf-8"))
    machine = ", ".join(f"{name} {value}" for name, value in found["machine"].items())
    return "\n\n".join([*_goal_tables(found), f"Measured with `python -m benchmarks` on: {machine}."])


def _goal_tables(found: dict[str, list[dict[str, list[str]]]]) -> Iterator[str]:
    for table in found["tables"]:
        if "goal" in table["headers"]:
            yield f"**{table['title']}**\n\n{_table(table['headers'], table['rows'])}"


def _code(text: str) -> str:
    return f"`{text}`" if "." in text or "_" in text else text


def _table(headers: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return tabulate(lines, headers=headers, tablefmt="github", disable_numparse=True)


def _replace(text: str, name: str, table: str) -> str:
    block = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
    if not block.search(text):
        raise SystemExit(
            f"README.md has no place for {name}: nothing was written. Add <!-- {name} --> <!-- /{name} -->."
        )
    return block.sub(lambda found: f"{found[1]}{table}\n{found[2]}", text)


def main() -> None:
    """Read the given files, replace their tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--specimens", type=Path, help="results folder of a sweep of the specimens")
    parser.add_argument("--benchmarks", type=Path, help="file of `python -m benchmarks --json`")
    given = parser.parse_args()
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    if given.specimens is not None:
        text = _replace(text, "specimens", specimens(given.specimens))
    if given.benchmarks is not None:
        text = _replace(text, "benchmarks", benchmarks(given.benchmarks))
    readme.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
