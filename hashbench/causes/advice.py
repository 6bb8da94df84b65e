"""What to do about a cause, in one sentence, and what the deterministic algorithms did about it here.

Pure: imports no torch, reads no files.
"""

from __future__ import annotations

from hashbench.catalog import CAUSES
from hashbench.causes.evidence import base_of, count, effect, removes, told
from hashbench.causes.stats import Effect, deterministic_price
from hashbench.records import Decision, Evidence, ExperimentResult

SEED_IT = (
    "Seed the generator with a fixed number: here it is seeded from the system's entropy (torch.seed(), "
    "Generator.seed(), a generator made without a seed)."
)
"""What to do about a generator that putting it back does not help, since it is seeded anew in every run."""

_FLAG = "torch.use_deterministic_algorithms(True)"


def decision(evidence: Evidence, cause: str, confidence: str, because: str, *, named: str = "") -> Decision:
    """A decision with the advice that belongs to it; ``named`` is what an arm singled out."""
    known = CAUSES[cause]
    clauses = [known.advice.format(named=named or known.unnamed), _deterministic_clause(evidence, cause)]
    return Decision(cause, confidence, because, "; ".join(filter(None, clauses)) + ".")


def removal(evidence: Evidence, cause: str, arm: ExperimentResult, confidence: str) -> Decision:
    """The decision that rests on one arm that removes the difference, or seems to."""
    numbers = told(arm, base=base_of(evidence, arm.name, arm.on))
    caveat = "" if confidence == "proven" else ", which excludes neither luck nor a second mechanism"
    return decision(evidence, cause, confidence, numbers + caveat, named=arm.found)


def _deterministic_clause(evidence: Evidence, cause: str) -> str:
    if cause == "uninitialized_memory":
        filled = removes(evidence, "deterministic_fill", "call") and not removes(evidence, "deterministic", "call")
        return f"{_FLAG} only hides it, by filling fresh memory" if filled else ""
    arm = evidence.arm("deterministic", "call")
    if not CAUSES[cause].in_kernel:
        return ""
    if arm.raised:
        return f"{_FLAG} {arm.note}"
    found = effect(evidence, "deterministic", "call")
    if found is Effect.REMOVED:
        price = deterministic_price(evidence)
        return f"{_FLAG} makes it identical here" + (f", and takes {price:.2g}x as long" if price else "")
    if found is Effect.SEEMS:
        return f"with {_FLAG} {count(arm)} replays differ here, too few to exclude luck"
    return f"with {_FLAG} it still differs here ({count(arm)} replays)" if arm.differing else ""
