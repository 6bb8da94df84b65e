"""A row of a model that was stressed in words, the same in every report. Pure; imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hashbench.core.catalog import LATENT, Kind, Perturbation, Status, kind_of
from hashbench.core.diagnose.causes import stats
from hashbench.core.extensions import RowWords
from hashbench.core.finding import Finding
from hashbench.core.finding.row import cause, evidence, position, row_finding
from hashbench.core.records import Row
from hashbench.core.text import count, percent
from hashbench.extensions.stress.facts import StressFacts

_SHOWN = ("kernel", "module", "phase", "cause", "confidence")
"""Columns that hold those of the difference under stress (``latent_kernel`` and so on) in a row that is shown."""


class StressWords(RowWords):
    """Describes rows of models that were stressed."""

    def shown(self, row: Row) -> Row:
        """Return the row with the status ``latent`` if it passes and is flaky, with kernel, module, phase and cause of
        the difference under stress."""
        facts = row.of(StressFacts)
        if row.accuracy != Status.PASS or facts.latent not in LATENT:
            return row
        return replace(row, accuracy=str(Status.LATENT), **{name: getattr(facts, f"latent_{name}") for name in _SHOWN})

    def written(self, row: Row) -> Row:
        """Return the row as a CSV has it."""
        if row.accuracy != Status.LATENT:
            return row
        empty: dict[str, Any] = dict.fromkeys(_SHOWN, "")
        return replace(row, accuracy=str(Status.PASS), **empty)

    def condition(self, row: Row) -> str:
        """Return ``under memory``."""
        return f"under {row.of(StressFacts).latent}" if row.accuracy == Status.LATENT else ""

    def rate(self, row: Row) -> str:
        """Return ``33 % of pairs under memory``."""
        facts = row.of(StressFacts)
        if row.accuracy != Status.LATENT or facts.latent_rate is None:
            return ""
        if facts.latent == Perturbation.TOGETHER and facts.latent in facts.counts:
            differing, pairs = facts.counts[facts.latent]
            return f"{differing} of {pairs} pairs under several perturbations at once"
        return f"{percent(facts.latent_rate)} of pairs under {facts.latent}"

    def finding(self, row: Row, *, folder: Path) -> Finding | None:
        """Return the report of a flaky function."""
        if row.accuracy != Status.LATENT:
            return None
        meaning = Perturbation[row.of(StressFacts).latent.upper()].meaning
        return row_finding(
            row,
            folder=folder,
            headline=f"{row.name}: flaky: runs agree, and under stress they differ in {self.rate(row)} ({meaning})",
            facts=(("first divergence", f"{row.kernel}{position(row)}"), cause(row), evidence(row)),
        )

    def remarks(self, row: Row) -> Iterator[str]:
        """Yield how often a flaky model differs."""
        latent = row.of(StressFacts).latent
        if row.accuracy == Status.LATENT and latent:
            yield f"flaky: it differs in {self.rate(row)} ({Perturbation[latent.upper()].meaning})"

    def looked(self, row: Row) -> bool:
        """Return whether a row was stressed."""
        return bool(row.of(StressFacts).stressed)

    def always(self, base: Row) -> bool:
        """Return whether every pair under the perturbation differed."""
        return (base.of(StressFacts).latent_rate or 0.0) >= 1

    def suggestion(self, rows: Sequence[Row]) -> str:
        """Return that ``--stress`` finds more, where it was not asked for."""
        stressed = any(row.of(StressFacts).counts for row in rows)
        return "" if stressed else "`--stress` also varies threads, load, memory and addresses"

    def what_passing_means(self, rows: Sequence[Row], *, bound: float) -> str:  # noqa: ARG002
        """Return how often which perturbation was tried, and which differences that can miss."""
        counts = [counts for row in rows if (counts := row.of(StressFacts).counts)]
        if not counts:
            return ""
        passing = [row for row in rows if kind_of(row.accuracy) is Kind.PASS]
        flaky = len(rows) - len(passing)
        pairs = {name: sum(known.get(name, (0, 0))[1] for known in counts) for name in Perturbation}
        provoked = ", ".join(f"{name} in {count(number, 'pair')}" for name, number in pairs.items() if number)
        found = f"{count(flaky, 'model')} {'differs' if flaky == 1 else 'differ'}" if flaky else "none differs"
        text = f"Stress: {count(len(counts), 'model')} that passed, {provoked}: {found}"
        fewest = min(filter(None, map(_most_pairs, passing)), default=0)
        if not fewest:
            return f"{text}."
        most = percent(stats.rate_of(0, fewest, distinct=1, of="pairs").high)
        others = "of the others " if flaky else ""
        return f"{text}. That can miss a difference {others}that shows in up to {most} of such pairs (95 % confidence)."


def _most_pairs(row: Row) -> int:
    """Return the number of pairs of the perturbation with most of them."""
    return max((pairs for _, pairs in row.of(StressFacts).counts.values()), default=0)


WORDS = StressWords()
