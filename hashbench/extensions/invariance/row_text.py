"""A row of an invariance in words. Pure; imports no torch."""

from __future__ import annotations

from pathlib import Path

from hashbench.core.catalog import INVARIANCES
from hashbench.core.extensions import RowWords
from hashbench.core.finding import Finding
from hashbench.core.finding.row import cause, how_far, place, row_finding
from hashbench.core.records import Row
from hashbench.core.text import count, in_brackets
from hashbench.extensions.invariance.facts import BatchFacts


class BatchWords(RowWords):
    """Describes rows of models whose items or tokens were compared."""

    def finding(self, row: Row, *, folder: Path) -> Finding | None:
        """Return what differs, the kernel and its place, its shapes, why, and what to do."""
        if row.mode not in INVARIANCES:
            return None
        what, facts = INVARIANCES[row.mode].unit, row.of(BatchFacts)
        smallest = facts.batch_sizes.rpartition(" ")[2]
        sizes = facts.compared_with or f"a batch of {smallest} and one of {row.batch_size}"
        shapes = f"{facts.shapes} and {facts.reference_shapes}" if facts.shapes else "of no kernel"
        from_on = f"; from {count(facts.smallest_batch, 'item')} on" if facts.smallest_batch is not None else ""
        kernel = f"{row.kernel or 'none was found'}{in_brackets(*place(row))}{f': {row.detail}' if row.detail else ''}"
        return row_finding(
            row,
            folder=folder,
            headline=f"{row.name}: the same {what} differ between {sizes} in {row.differing_results}{how_far(row)}",
            facts=(("first kernel", kernel), ("shapes", f"{shapes}{from_on}"), cause(row)),
        )


WORDS = BatchWords()
