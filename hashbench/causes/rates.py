"""Numbers that follow from evidence: how often, at which price, with what effect of the deterministic kernels.

Pure: imports no torch.
"""

from __future__ import annotations

from hashbench.causes import stats
from hashbench.records import Evidence, Rate, RunCounts

_BASES = (("repeat", "call", "replays"), ("pair", "pair", "pairs"), ("within_process", "process", "processes"))
"""Where a rate may come from, best first: the arm, what it repeats, and the word for one trial."""


def of_evidence(evidence: Evidence) -> Rate | None:
    """How often the difference shows again: in replays of the captured call where it does there, else in pairs of this
    process, else in pairs of fresh processes."""
    for name, on, of in _BASES:
        arm = evidence.arm(name, on)
        if arm.differing:
            return stats.rate_of(arm.differing, arm.trials, distinct=arm.distinct, of=of)
    return None


def of_runs(counts: RunCounts | None) -> Rate | None:
    """How often the runs of the sweep differ from the first; for runs that all agree, what that allows."""
    if counts is None:
        return None
    return stats.rate_of(counts.differing, counts.compared, distinct=counts.distinct, of="runs")


def deterministic_here(evidence: Evidence) -> str:
    """What the captured call did under ``torch.use_deterministic_algorithms(True)``, memory left unfilled."""
    arm = evidence.arm("deterministic", "call")
    if not arm.ran:
        return arm.note if arm.note.startswith("raises") else ""
    outcome = "still differs" if arm.differing else "identical"
    return f"{outcome} ({arm.differing} of {arm.trials} replays differ)"


def deterministic_price(evidence: Evidence) -> float | None:
    """Time of the call with deterministic algorithms over its time without; ``None`` where either was not measured."""
    on, off = evidence.arm("deterministic", "call"), evidence.arm("nondeterministic", "call")
    if not on.ran or not off.ran or not on.seconds or not off.seconds:
        return None
    return on.seconds / off.seconds
