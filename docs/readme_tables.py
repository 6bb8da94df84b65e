"""Rewrite the tables in README.md, docs/causes.md, benchmarks/README.md, docs/findings.md and results/expected/audit.md
from measured files: no result in them is typed by hand.

    python docs/readme_tables.py --specimens results/specimens/* --benchmarks benchmarks.json
    python docs/readme_tables.py --cost overhead.json
    python docs/readme_tables.py --audit results/expected/audit_cpu.csv results/expected/audit_rows_cpu.csv
    python docs/readme_tables.py --sweeps results/full/* --differences results/full/* results/off/*

A table stands between ``<!-- name -->`` and ``<!-- /name -->``. A table whose file is not given stays as it is.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import textwrap
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tabulate import tabulate

from hashbench.core.catalog import CAUSES
from hashbench.core.records import Row
from hashbench.core.results.rows import read_rows
from hashbench.tools.audit import audit_table
from hashbench.tools.audit import report as audit_report

ROOT = Path(__file__).parent.parent
SPECIMEN_COLUMNS = ("kernel", "phase", "cause", "confidence", "because")
CAUSES_COLUMNS = ("cause", "confidence")
README_COLUMNS = ("kernel", "cause", "because")
README_CAUSES = ("accumulation_order", "write_race", "uninitialized_memory", "outside_value")
"""The four rows of the README; docs/causes.md has one of every cause."""
STATUSES = ("pass", "eager_two_runs_differ", "pass_due_to_skip")
FINDING_COLUMNS = ("accuracy", "kernel", "module", "phase", "cause", "confidence", "because", "error")
NATIVE_GOALS = "Goals of the native tracer"
LONGEST = 145
"""Characters of a cell; whole sentences are in the CSV."""


def specimens(
    folders: Sequence[Path], *, columns: Sequence[str] = SPECIMEN_COLUMNS, causes: Sequence[str] = CAUSES
) -> str:
    """Of sweeps of the specimens the first row of each of ``causes``, with what that specimen is, in that order."""
    with (ROOT / "models" / "specimens.csv").open(newline="", encoding="utf-8") as file:
        notes = {line["name"]: line["note"] for line in csv.DictReader(file)}
    rows: dict[str, dict[str, str]] = {}
    for folder in folders:
        with (folder / "accuracy.csv").open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                rows.setdefault(row["cause"], row)
    shown = [rows[cause] for cause in causes if cause in rows]
    lines = [[notes[row["name"]], *(_code(row[column]) for column in columns)] for row in shown]
    return _table(["what the model does", *columns], lines)


def benchmarks(path: Path, *, of: str = "") -> str:
    """The tables of ``python -m benchmarks --json`` whose title begins with ``of``, and the machine."""
    found = json.loads(path.read_text(encoding="utf-8"))
    machine = ", ".join(f"{name} {value}" for name, value in found["machine"].items())
    tables = [table for table in found["tables"] if table["title"].startswith(of)]
    parts = [f"**{table['title']}**\n\n{_table(table['headers'], table['rows'])}" for table in tables]
    return "\n\n".join([*parts, f"Measured with `python -m benchmarks` on:\n{machine}."])


def cost(path: Path) -> str:
    """One sentence on the cost of tracing: the smallest and the largest ratio of the workloads that have a goal."""
    tables = json.loads(path.read_text(encoding="utf-8"))["tables"]
    goals = [table for table in tables if table["title"].startswith(NATIVE_GOALS)]
    found = (row[table["headers"].index("native / no mode")] for table in goals for row in table["rows"])
    ratios = sorted(found, key=float)
    return f"A traced training step takes {ratios[0]}x to {ratios[-1]}x as long as the same step untraced."


def sweeps(folders: Sequence[Path]) -> str:
    """Of each suite in each sweep: how many models had which status, their times added up, and the largest of them."""
    lines = []
    for folder in folders:
        rows = read_rows(folder / "accuracy.csv")
        suites = dict.fromkeys(row.suite for row in rows)
        lines += [_sweep_line([row for row in rows if row.suite == suite]) for suite in suites]
    headers = ["suite", "mode", "pass", "differ", "skipped", "other", "threads", "time", "largest process"]
    return _table(headers, lines)


def _sweep_line(rows: Sequence[Row]) -> list[str]:
    counts = Counter(row.accuracy for row in rows)
    seconds = sum((row.seconds or 0.0) + (row.overhead_seconds or 0.0) for row in rows)
    largest = max(row.peak_memory_mib or 0.0 for row in rows)
    threads = " and ".join(map(str, sorted({row.threads for row in rows if row.threads})))
    others = ", ".join(f"{count} {word}" for word, count in counts.items() if word not in STATUSES)
    columns = [str(counts[word]) for word in STATUSES]
    measured = [f"{seconds / 60:.0f} min", f"{largest / 1024:.1f} GiB"]
    return [rows[0].suite, rows[0].mode, *columns, others, threads, *measured]


def differences(folders: Sequence[Path]) -> str:
    """Every row that is neither a pass nor a skip."""
    rows = [row for folder in folders for row in read_rows(folder / "accuracy.csv")]
    return _table(
        ["model", "suite", "mode", "deterministic", *FINDING_COLUMNS],
        [
            [_code(text) for text in (row.name, row.suite, row.mode, row.deterministic)]
            + [_code(str(getattr(row, column) or "")) for column in FINDING_COLUMNS]
            for row in rows
            if row.accuracy not in ("pass", "pass_due_to_skip")
        ],
    )


def audit(path: Path) -> str:
    """How many samples had each verdict, and a line for each op about which there is something to say; and where."""
    kind = audit_table.audit_kind(path) or audit_table.DETERMINISM
    found = audit_table.read(path, kind)
    where = [f"torch {one['packages']['torch']}, {one['cpu']['model']}" for one in found.environments]
    said = [f"Measured with {' and '.join(where)}."] if where else []
    if kind is audit_table.DETERMINISM:
        tables = audit_report.tables_as_markdown(found.rows)
    else:
        tables = kind.reports().summary(found.rows, style="github")
    return "\n\n".join([tables.rstrip("\n"), *said])


def _code(text: str) -> str:
    if " " not in text and ("." in text or "_" in text):
        return f"`{text}`"
    return textwrap.shorten(text, LONGEST, placeholder=" …").replace("|", "\\|")


def _table(headers: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    padded = tabulate(lines, headers=headers, tablefmt="github", disable_numparse=True)
    return re.sub(r"-{4,}", "---", re.sub(r" {2,}\|", " |", padded))


def _replace(page: Path, name: str, table: str) -> None:
    text = page.read_text(encoding="utf-8")
    block = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
    if not block.search(text):
        raise SystemExit(f"{page} has no place for {name}: it was not written. Add <!-- {name} --> to it.")
    page.write_text(block.sub(lambda found: f"{found[1]}{table}\n{found[2]}", text), encoding="utf-8")


def main() -> None:
    """Read the given files, replace their tables."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("--specimens", type=Path, nargs="+", help="results folders of sweeps of the specimens")
    parser.add_argument("--benchmarks", type=Path, help="file of `python -m benchmarks --json`")
    parser.add_argument("--cost", type=Path, help="file of `python -m benchmarks overhead --json`")
    parser.add_argument("--sweeps", type=Path, nargs="+", help="results folders for the totals in docs/findings.md")
    parser.add_argument("--differences", type=Path, nargs="+", help="results folders for the findings there")
    parser.add_argument("--audit", type=Path, nargs="+", help="audits, for the tables in results/expected/audit.md")
    given = parser.parse_args()
    findings = ROOT / "docs" / "findings.md"
    if given.sweeps is not None:
        _replace(findings, "sweeps", sweeps(given.sweeps))
    for path in given.audit or ():
        audits = ROOT / "results" / "expected" / "audit.md"
        _replace(audits, "audit" if audit_table.DETERMINISM.lies_at(path) else "audit rows", audit(path))
    if given.differences is not None:
        _replace(findings, "differences", differences(given.differences))
    if given.specimens is not None:
        short = specimens(given.specimens, columns=README_COLUMNS, causes=README_CAUSES)
        _replace(ROOT / "README.md", "specimens", short)
        _replace(ROOT / "docs" / "causes.md", "specimens", specimens(given.specimens, columns=CAUSES_COLUMNS))
    if given.cost is not None or given.benchmarks is not None:
        _replace(ROOT / "README.md", "cost", cost(given.cost or given.benchmarks))
        native = benchmarks(given.cost or given.benchmarks, of=NATIVE_GOALS)
        _replace(ROOT / "benchmarks" / "README.md", "native", native)
    if given.benchmarks is not None:
        _replace(ROOT / "benchmarks" / "README.md", "benchmarks", benchmarks(given.benchmarks))


if __name__ == "__main__":
    main()
