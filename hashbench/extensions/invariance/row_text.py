"""A row of an invariance in words. Pure; imports no torch."""

from __future__ import annotations

from pathlib import Path

from hashbench.core.catalog import INVARIANCES
from hashbench.core.extensions import RowWords
from hashbench.core.records import Row
from hashbench.core.text import count, how_far, in_brackets, in_lines, remedy_line, why_line
from hashbench.extensions.invariance.facts import BatchFacts


class BatchWords(RowWords):
    """Describes rows of models whose items or tokens were compared."""

    def lines(self, row: Row, *, folder: Path) -> str:
        """Return what differs, the kernel and its place, its shapes, why, and what to do."""
        if row.mode not in INVARIANCES:
            return ""
        what, facts = INVARIANCES[row.mode].unit, row.of(BatchFacts)
        smallest = facts.batch_sizes.rpartition(" ")[2]
        sizes = facts.compared_with or f"a batch of {smallest} and one of {row.batch_size}"
        place = in_brackets(f"in {row.module}" if row.module else "", f"at {row.source}" if row.source else "")
        shapes = f"shapes: {facts.shapes} and {facts.reference_shapes}" if facts.shapes else "shapes: of no kernel"
        from_on = f"; from {count(facts.smallest_batch, 'item')} on" if facts.smallest_batch is not None else ""
        lines = (
            f"{row.name}: the same {what} differ between {sizes} in {row.differing_results}{how_far(row)}",
            f"first kernel: {row.kernel or 'none was found'}{place}{f': {row.detail}' if row.detail else ''}",
            f"{shapes}{from_on}",
            why_line(row),
            remedy_line(row, folder),
        )
        return in_lines(lines)


WORDS = BatchWords()
