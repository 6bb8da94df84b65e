"""An audit of batch invariance as tables. Pure: reads no file, prints nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from tabulate import tabulate

from hashbench.results.invariance_table import Invariance, InvarianceRow
from hashbench.text import a_few

COLUMNS = ("verdict", "op", "dtypes", "samples", "smallest batch", "kernel", "because", "repro")
_WIDTH = 60
_LISTED = (Invariance.DEPENDS, Invariance.PLACE, Invariance.UNSTEADY, Invariance.TIMEOUT, Invariance.CRASHED)
"""Verdicts whose ops are listed; those of others are counted."""


def counts(rows: Iterable[InvarianceRow]) -> list[tuple[str, int, int]]:
    """``(verdict, ops, samples)`` in the order of the verdicts. An op may be in several."""
    samples = Counter((row.verdict, row.source, row.op) for row in rows)
    of_verdicts = {word: [count for (verdict, *_), count in samples.items() if verdict == word] for word in Invariance}
    return [(word, len(of_ops), sum(of_ops)) for word, of_ops in of_verdicts.items() if of_ops]


def findings(rows: Iterable[InvarianceRow]) -> list[tuple[str, ...]]:
    """One line for each op whose rows depend on the batch, with how many of its samples with a batch axis do."""
    groups: dict[tuple[Invariance, str], list[InvarianceRow]] = {}
    measured: Counter[str] = Counter()
    for row in rows:
        measured[row.op] += row.items is not None
        if row.verdict in _LISTED:
            groups.setdefault((Invariance(row.verdict), row.op), []).append(row)
    order = list(Invariance)
    return [
        _line(*key, groups[key], measured[key[1]])
        for key in sorted(groups, key=lambda key: (order.index(key[0]), key[1]))
    ]


def coupled(rows: Iterable[InvarianceRow]) -> str:
    """The ops of which a sample computes over the items of the batch."""
    return ", ".join(sorted({row.op for row in rows if row.verdict == Invariance.COUPLED}))


def _line(verdict: Invariance, op: str, rows: Sequence[InvarianceRow], measured: int) -> tuple[str, ...]:
    def values(name: str) -> list[str]:
        return list(dict.fromkeys(filter(None, (getattr(row, name) for row in rows))))

    smallest = [row.smallest_batch for row in rows if row.smallest_batch is not None]
    said = "; ".join(values("error" if verdict in (Invariance.TIMEOUT, Invariance.CRASHED) else "because")[:1])
    return (
        verdict,
        op,
        ", ".join(values("dtype")),
        f"{len(rows)} of {measured}" if measured else str(len(rows)),
        str(min(smallest)) if smallest else "",
        a_few(values("kernel"), limit=2),
        said if len(said) <= _WIDTH else f"{said[: _WIDTH - 1]}…",
        next(iter(values("repro")), ""),
    )


def summary(rows: Sequence[InvarianceRow], *, style: str = "simple") -> str:
    """For a terminal: the ops that depend on the batch, those that compute over it, then the counts. With the style
    ``github`` for a page of documentation."""
    if not rows:
        return "No op was run."
    listed = [[cell.replace("|", "/") for cell in line] for line in findings(rows)]
    parts = [tabulate(listed, headers=COLUMNS, tablefmt=style, disable_numparse=True)] if listed else []
    if names := coupled(rows):
        parts.append(f"Computed over the batch in at least one sample (coupled): {names}")
    parts.append(tabulate(counts(rows), headers=("verdict", "ops", "samples"), tablefmt=style))
    return "\n\n".join(parts)
