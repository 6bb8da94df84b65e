"""A row of a model with ranks in words. Pure; imports no torch."""

from __future__ import annotations

from pathlib import Path

from hashbench.core.catalog import Kind, Status, status_of
from hashbench.core.extensions import RowWords
from hashbench.core.records import Row
from hashbench.core.text import evidence_line, in_lines, remedy_line, what_line, where_line, why_line
from hashbench.extensions.ranks.facts import RankFacts


class RankWords(RowWords):
    """Describes rows of models with ranks."""

    def lines(self, row: Row, *, folder: Path) -> str:
        """Return at most six lines: what differs, the rank and kernel, how it came to the others, why, the evidence,
        and what to do."""
        facts, status = row.of(RankFacts), status_of(row.accuracy)
        if facts.world_size is None:
            return ""
        if status is None or status.kind is Kind.FAIL:
            words = f"{row.name}: {status.meaning if status is not None else row.accuracy}: {row.error}"
            return in_lines((words, *([f"cause: {row.cause}, {row.confidence}"] if row.cause else [])))
        replicas = f"{row.name}: runs agree, and replicas differ between its {facts.world_size} ranks"
        what = f"{replicas}: {row.differing_results}" if status is Status.REPLICAS_DIFFER else what_line(row)
        where = where_line(row, f"on rank {facts.rank} of {facts.world_size}" if facts.rank is not None else "")
        came = [f"came to other ranks: {facts.through}"] if facts.through else []
        evidence = [evidence_line(row)] if row.evidence or status is not Status.REPLICAS_DIFFER else []
        return in_lines((what, where, *came, why_line(row), *evidence, remedy_line(row, folder)))


WORDS = RankWords()
