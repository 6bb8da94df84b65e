"""A row of a model with ranks in words. Pure; imports no torch."""

from __future__ import annotations

from pathlib import Path

from hashbench.core.catalog import Kind, Status, status_of
from hashbench.core.extensions import RowWords
from hashbench.core.finding import Facts, Finding
from hashbench.core.finding.row import cause, evidence, first_divergence, row_finding
from hashbench.core.records import Row
from hashbench.core.text import cut_line
from hashbench.extensions.ranks.facts import RankFacts


class RankWords(RowWords):
    """Describes rows of models with ranks."""

    def finding(self, row: Row, *, folder: Path) -> Finding | None:
        """Return what differs, the rank and kernel, how it came to the others, why, the evidence, and what to do."""
        facts, status = row.of(RankFacts), status_of(row.accuracy)
        if facts.world_size is None:
            return None
        if status is None or status.kind is Kind.FAIL:
            words = f"{row.name}: {status.meaning if status is not None else row.accuracy}: {row.error}"
            return Finding(headline=cut_line(words), facts=(cause(row),) if row.cause else ())
        where = f"on rank {facts.rank} of {facts.world_size}" if facts.rank is not None else ""
        known: Facts = (first_divergence(row, where), ("through", facts.through), cause(row), evidence(row))
        if status is not Status.REPLICAS_DIFFER:
            return row_finding(row, folder=folder, facts=known, reader="ranks diff")
        what = f"{row.name}: runs agree, and replicas differ between its {facts.world_size} ranks"
        known = known if row.evidence else known[:-1]
        headline = f"{what}: {row.differing_results}"
        return row_finding(row, folder=folder, headline=headline, facts=known, reader="ranks check")


WORDS = RankWords()
