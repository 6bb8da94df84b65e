"""The page of figures of ``benchmarks.gpu_hour``, made from its CSVs alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

import tabulate

Rows = Sequence[Mapping[str, str]]

_LONGEST = 160
"""Characters of a cell."""


def page(machine: Mapping[str, str], outcomes: Rows, found: Mapping[str, Rows]) -> str:
    """Return the page as Markdown.

    Args:
        machine: label and text of what the figures were measured on, the card first.
        outcomes: rows of ``steps.csv``.
        found: step -> rows of its CSV.
    """
    blocks = [f"# One GPU: {machine['card']}", "```console\n$ make gpu\n```"]
    blocks.append("\n".join(f"* {label}: {text}" for label, text in machine.items()))
    blocks.append(_table(["step", "what", "outcome", "rows", "seconds"], [_step(row) for row in outcomes]))
    for row in outcomes:
        rows = found.get(row["step"], ())
        if rows:
            blocks += [f"## {row['what'][:1].upper()}{row['what'][1:]}", *_SECTIONS.get(row["step"], _all)(rows)]
    return "\n\n".join(blocks) + "\n"


def _step(row: Mapping[str, str]) -> list[str]:
    name = f"[{row['step']}]({row['step']}.csv)" if int(row["rows"]) else row["step"]
    return [name, row["what"], row["outcome"], row["rows"], row["seconds"]]


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = [[_cell(cell) for cell in row] for row in rows]
    return tabulate.tabulate(cells, headers=headers, tablefmt="github", disable_numparse=True)


def _cell(text: str) -> str:
    line = " ".join(text.split()).replace("|", "\\|")
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}…"


def _counts(rows: Rows, column: str) -> str:
    """How many rows have each value: ``12 pass, 2 timeout``."""
    counted = Counter(row[column] for row in rows)
    return ", ".join(f"{number} {value}" for value, number in counted.most_common())


def _picked(rows: Rows, columns: Sequence[str], wanted: Callable[[Mapping[str, str]], bool]) -> Iterator[str]:
    """A table of the rows that are wanted, if there are any."""
    chosen = [[row.get(name, "") for name in columns] for row in rows if wanted(row)]
    if chosen:
        yield _table(columns, chosen)


def _tests(rows: Rows) -> Iterator[str]:
    yield f"{_counts(rows, 'outcome')}."
    yield from _picked(rows, ("test", "outcome", "why"), lambda row: row["outcome"] == "failed")


def _audit(rows: Rows) -> Iterator[str]:
    yield f"{len({row['op'] for row in rows})} ops, {len(rows)} rows: {_counts(rows, 'verdict')}."
    columns = ("op", "phase", "verdict", "off", "on", "kernel", "cause", "confidence")
    yield from _picked(rows, columns, lambda row: row["verdict"] != "as documented" or row["off"] != "identical")


def _models(rows: Rows) -> Iterator[str]:
    yield f"{_counts(rows, 'accuracy')}."
    columns = ("name", "mode", "accuracy", "kernel", "cause", "confidence", "error")
    yield from _picked(rows, columns, lambda row: row["accuracy"] != "pass")


def _specimens(rows: Rows) -> Iterator[str]:
    columns = ("name", "mode", "accuracy", "truth_accuracy", "kernel", "truth_kernel", "cause", "truth_cause", "error")
    yield from _picked(rows, columns, lambda _: True)


def _all(rows: Rows) -> Iterator[str]:
    yield from _picked(rows, tuple(rows[0]), lambda _: True)


def _overhead(rows: Rows) -> Iterator[str]:
    yield from _picked(rows, ("workload", "what", "figure", "table"), lambda _: True)


_SECTIONS: Mapping[str, Callable[[Rows], Iterator[str]]] = {
    "tests": _tests,
    "audit": _audit,
    "compiled": _models,
    "invariance": _models,
    "overhead": _overhead,
    "specimens": _specimens,
}
