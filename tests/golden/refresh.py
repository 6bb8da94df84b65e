"""Rewrite the wording of golden inputs as the product writes it today: ``python -m tests.golden.refresh``.

Rows below ``inputs/`` were written by hashbench once, and keep its sentences of that day. Those that a rule decides
(``because`` and ``advice``) are decided anew, from the case of ``evidence.json`` that a row is named after, else from
the evidence in the row's own file, and replaced in its CSV and in its row file. A row keeps its sentences where the
rules come to another cause or confidence than it has: it is then an input of another version, and stays one. Other
texts (kernels, errors, notes) are what they were. A sentence of several rows is replaced in all of them.
"""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from pathlib import Path

from hashbench.core.diagnose.causes import decide
from hashbench.core.records import Evidence
from hashbench.core.results.folder import with_evidence
from hashbench.core.results.rows import read_rows
from tests.golden.producers import evidence_of
from tests.golden.stage import INPUTS

NOT_OURS = frozenset({"bad", "dynamo", "expected", "future"})
"""Folders with files that are damaged on purpose, or written by others."""

COLUMNS = ("because", "advice")
"""Columns whose sentences the rules write."""


Decided = dict[str, dict[str, str]]
"""Sentences of today by model and column."""


def decided_in(folder: Path, cases: dict[str, Evidence]) -> Decided:
    """Decide the rows of a sweep's folder anew; only those that come to the cause and confidence that they have."""
    found: Decided = {}
    for row in read_rows(folder / "accuracy.csv"):
        results = with_evidence(row, folder).evidence.results if row.cause else ()
        own = Evidence(origin=row.origin, arms=results) if results else None
        for evidence in filter(None, (cases.get(row.name), own) if row.cause else ()):
            now = decide(evidence)
            if (now.cause, now.confidence) == (row.cause, row.confidence):
                found[row.name] = {"because": now.because, "advice": now.advice}
                break
    return found


def lines_of(folder: Path) -> list[dict[str, str]]:
    """Read the lines of a sweep's CSV as they are."""
    return list(csv.DictReader(io.StringIO((folder / "accuracy.csv").read_text(encoding="utf-8"), newline="")))


def refresh(folder: Path, decided: Decided, elsewhere: dict[str, str]) -> int:
    """Replace sentences in the rows of one folder, in place; return how many cells of its CSV changed.

    Rows that are not ``decided`` get what their sentences became ``elsewhere``.
    """
    path, lines, today = folder / "accuracy.csv", lines_of(folder), {}
    if not lines or _as_csv(lines) != path.read_text(encoding="utf-8"):
        return 0
    changed = 0
    for line in lines:
        now = decided.get(line["name"]) or {column: elsewhere.get(line.get(column, ""), "") for column in COLUMNS}
        now = {column: text for column, text in now.items() if text and line.get(column) not in ("", None, text)}
        today[line["name"]] = now
        line.update(now)
        changed += len(now)
    path.write_text(_as_csv(lines), encoding="utf-8", newline="")
    for file in (folder / "rows").glob("*.json"):
        stored = file.read_text(encoding="utf-8")
        row = json.loads(stored)
        for column, text in today.get(row.get("name", ""), {}).items():
            stored = stored.replace(*(f'"{column}": {json.dumps(value)}' for value in (row[column], text)))
        file.write_text(stored, encoding="utf-8")
    return changed


def _as_csv(lines: list[dict[str, str]]) -> str:
    stream = io.StringIO(newline="")
    writer = csv.DictWriter(stream, list(lines[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return stream.getvalue()


if __name__ == "__main__":
    entries = json.loads((INPUTS / "evidence.json").read_text(encoding="utf-8"))
    known = {case["name"]: evidence_of(case) for case in entries}
    files = (file for file in INPUTS.glob("**/accuracy.csv") if not NOT_OURS & set(file.relative_to(INPUTS).parts))
    folders = sorted(file.parent for file in files)
    decisions = {folder: decided_in(folder, known) for folder in folders}
    pairs = {
        (line[column], text)
        for folder, decided in decisions.items()
        for line in lines_of(folder)
        for column, text in decided.get(line["name"], {}).items()
        if line[column] and text and line[column] != text
    }
    counts = Counter(old for old, _ in pairs)
    unambiguous = {old: new for old, new in pairs if counts[old] == 1}
    for folder, decided in decisions.items():
        print(f"{refresh(folder, decided, unambiguous)} sentences in {folder.relative_to(INPUTS)}")
