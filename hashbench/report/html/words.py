"""What the verdicts on a night mean, in a sentence for somebody who reads one for the first time."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from hashbench.report.expectations import Standing

STANDINGS: Mapping[Standing, str] = MappingProxyType(
    {
        Standing.NEW_DIFFERENCE: "It was fine, and two runs differ now.",
        Standing.BROKEN: "It fails now, and did not before, or failed in another way.",
        Standing.MOVED: "It differed before, and now in another place or for another reason.",
        Standing.MISSING: "It was asked for and left no result: absent is not equal.",
        Standing.NOW_SKIPPED: "It was run before and is skipped now: a difference could hide there.",
        Standing.NOT_COMPARABLE: "It ran under other conditions: whether it got worse is not known.",
        Standing.UNEXPECTED: "Nothing says what to expect of it.",
        Standing.STALE: "What is expected of it has not been seen for a long time: the expectation can go.",
        Standing.FIXED: "It did not pass and passes now.",
        Standing.NOT_SEEN: "It differs now and then, and did not this time: that is not fixed.",
        Standing.MET: "It does what it did before.",
        Standing.NOT_ASKED: "The last night was not asked to run it.",
    }
)

NO_ADVICE: Mapping[Standing, str] = MappingProxyType(
    {
        Standing.NEW_DIFFERENCE: "Sweep it again with more --replays, for a diagnosis.",
        Standing.BROKEN: "Run it again alone (hashbench sweep --only NAME); its log is in the sweep's folder.",
        Standing.MOVED: "Compare both diagnoses; the earlier one stands in the night before.",
        Standing.MISSING: "Look whether the sweep ended, and go on with it: hashbench sweep --resume.",
        Standing.NOW_SKIPPED: "Read the reason, and sweep it again once that is gone.",
        Standing.NOT_COMPARABLE: "Sweep again under the same conditions, or make a new baseline for these.",
        Standing.STALE: "Take it out of the CSV of what is expected.",
    }
)
"""What to do where the row itself holds no advice."""
