"""Counting outcomes: how often those of a repeated call differ, and copies of some that do.

Outcomes are kept as digests, of which a thousand cost nothing; contents are copied for the first outcome and for a few
others only.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable

from hashbench.records import ExperimentResult
from hashbench.replay.call import CallOutcome, held_bytes
from hashbench.replay.facts import Snapshot

MOST_COPIES = 5
MOST_BYTES = 2**26
"""Together with the first, so many outcomes are copied, and while they take no more than this; two in any case."""


class Tally:
    """Outcomes of one arm, compared with ``reference`` (default: with the first of its own)."""

    def __init__(self, reference: CallOutcome | None = None) -> None:
        self.reference = reference
        self.trials = self.differing = 0
        self.seconds: list[float] = []
        self.copies: list[Snapshot] = []
        self.outcomes: list[CallOutcome] = []
        self._seen: Counter[int] = Counter() if reference is None else Counter({hash(reference): 1})
        self._copied_bytes = 0

    def add(self, outcome: CallOutcome, *, seconds: float, copy: Callable[[], Snapshot]) -> None:
        """One more outcome; ``copy`` copies its content, and is called where that is kept."""
        self.seconds.append(seconds)
        if self.reference is None:
            self.reference = outcome
        else:
            self.trials += 1
            self.differing += outcome != self.reference
        new = not self._seen[hash(outcome)]
        self._seen[hash(outcome)] += 1
        if new and (len(self.copies) < 2 or self._has_room()):
            self.outcomes.append(outcome)
            self.copies.append(copy())
            self._copied_bytes += sum(map(held_bytes, self.copies[-1]))

    def _has_room(self) -> bool:
        return len(self.copies) < MOST_COPIES and self._copied_bytes < MOST_BYTES

    @property
    def distinct(self) -> int:
        """Outcomes, the reference among them."""
        return len(self._seen)

    def arm(self, name: str, *, found: str = "", note: str = "") -> ExperimentResult:
        """The tally as an arm on the call."""
        return ExperimentResult(
            name,
            "call",
            trials=self.trials,
            differing=self.differing,
            distinct=self.distinct,
            seconds=statistics.median(self.seconds) if self.seconds else None,
            found=found,
            note=note,
        )
