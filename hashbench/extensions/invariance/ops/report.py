"""An audit of batch invariance as tables, and its samples judged in two audits. Pure: reads no file, prints nothing."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Sequence

from tabulate import tabulate

from hashbench.core.report.audits import by_verdict, table_of_counts, values_of
from hashbench.core.report.compare import Became
from hashbench.core.text import cut, join_limited
from hashbench.extensions.invariance.ops.table import Invariance, InvarianceRow

COLUMNS = ("verdict", "op", "dtypes", "samples", "smallest batch", "kernel", "because", "repro")
_WIDTH = 60
_LISTED = (Invariance.DEPENDS, Invariance.PLACE, Invariance.UNSTEADY, Invariance.TIMEOUT, Invariance.CRASHED)
"""Verdicts whose ops are listed; those of others are counted."""


def findings(rows: Iterable[InvarianceRow]) -> list[tuple[str, ...]]:
    """Format one line for each op whose rows depend on the batch, with how many of its samples with a batch axis do."""
    kept = tuple(rows)
    measured = Counter(row.op for row in kept if row.items is not None)
    shown = (row for row in kept if row.verdict in _LISTED)
    grouped = by_verdict(shown, list(Invariance), lambda row: (row.verdict, row.op))
    return [_line(verdict, op, same, measured[op]) for (verdict, op), same in grouped]


def coupled(rows: Iterable[InvarianceRow]) -> str:
    """Return the ops of which a sample computes over the items of the batch."""
    return ", ".join(sorted({row.op for row in rows if row.verdict == Invariance.COUPLED}))


def _line(verdict: str, op: str, rows: Sequence[InvarianceRow], measured: int) -> tuple[str, ...]:
    values = functools.partial(values_of, rows)
    smallest = [row.smallest_batch for row in rows if row.smallest_batch is not None]
    said = "; ".join(values("error" if verdict in (Invariance.TIMEOUT, Invariance.CRASHED) else "because")[:1])
    return (
        verdict,
        op,
        ", ".join(values("dtype")),
        f"{len(rows)} of {measured}" if measured else str(len(rows)),
        str(min(smallest)) if smallest else "",
        join_limited(values("kernel"), limit=2),
        cut(said, _WIDTH),
        next(iter(values("repro")), ""),
    )


def summary(rows: Sequence[InvarianceRow], *, style: str = "simple") -> str:
    """Format for a terminal: the ops that depend on the batch, those that compute over it, then the counts. With the
    style ``github`` for a page of documentation, which has no repros beside it."""
    if not rows:
        return "No op was run."
    columns = COLUMNS[:-1] if style == "github" else COLUMNS
    listed = [[cell.replace("|", "/") for cell in line[: len(columns)]] for line in findings(rows)]
    parts = [tabulate(listed, headers=columns, tablefmt=style, disable_numparse=True)] if listed else []
    if names := coupled(rows):
        parts.append(f"Computed over the batch in at least one sample (coupled): {names}")
    parts.append(table_of_counts(rows, Invariance, style=style))
    return "\n\n".join(parts)


# ------------------------------------------------------------------------------------------------ two audits


_DEGREES = {
    Invariance.INVARIANT: 0,
    Invariance.PLACE: 1,
    Invariance.DEPENDS: 1,
    Invariance.COUPLED: 2,
}
"""How much an item depends on the others, by verdict; what has none was not measured."""

_NOTHING_TO_MEASURE = (Invariance.NO_AXIS, Invariance.RANDOM)


def decide(base: str, new: str) -> Became:
    """Return the outcome of a sample whose verdict was ``base`` and is ``new``."""
    old, now = _DEGREES.get(Invariance(base)), _DEGREES.get(Invariance(new))
    if now is None:
        same = old is None and (base not in _NOTHING_TO_MEASURE or new in _NOTHING_TO_MEASURE)
        return Became.UNCHANGED if same else Became.NOT_MEASURED
    if now > (old or 0):
        return Became.BECAME_DEPENDENT
    if old is None:
        return Became.MEASURED_NOW
    if now < old:
        return Became.DEPENDS_DIFFERENTLY if now else Became.BECAME_INVARIANT
    return Became.UNCHANGED if base == new else Became.DEPENDS_DIFFERENTLY


def judged(base: InvarianceRow, new: InvarianceRow) -> tuple[Became, str]:
    """Return outcome and note of a sample in two audits."""
    outcome, moved = decide(base.verdict, new.verdict), _moved(base, new)
    if outcome is Became.UNCHANGED:
        return Became.DEPENDS_DIFFERENTLY if moved else outcome, moved
    verdicts = f"{base.verdict} → {new.verdict}" if base.verdict != new.verdict else ""
    return outcome, "; ".join(filter(None, (verdicts, moved)))


def _moved(base: InvarianceRow, new: InvarianceRow) -> str:
    """Describe what two rows differ in: the kernel, from how many items on, and the numbers of items that differ."""
    columns = (("kernel", "kernel"), ("smallest_batch", "smallest batch"), ("sizes", "sizes"))
    values = ((word, getattr(base, name), getattr(new, name)) for name, word in columns)
    return "; ".join(f"{word}: {old} → {now}" for word, old, now in values if old and now and old != now)
