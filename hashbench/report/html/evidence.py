"""The column ``evidence`` for a reader: each experiment, what it did to the difference, and its confidence interval.

The effects are those by which the rules decide. A row that was read from a CSV alone has no results to show here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hashbench.catalog import EXPERIMENTS, Role
from hashbench.causes.evidence import base_of, effect
from hashbench.causes.stats import MOST_TRIALS, Effect, rate_of
from hashbench.records import Evidence, ExperimentResult, Row

_WORDS = {
    Effect.REMOVED: "gone",
    Effect.SEEMS: "gone, but too few trials to be sure",
    Effect.LOWERED: "rarer, still there",
    Effect.STAYS: "still differs",
}


@dataclass(frozen=True, slots=True)
class ArmRead:
    """One experiment as a reader wants it: ``phrase`` says what was changed, ``effect`` in words what that did to the
    difference (empty for a base), ``share``, ``low`` and ``high`` are the observed share and its 95 % bounds, 0 to 1
    (all 0 where it was not run)."""

    arm: ExperimentResult
    phrase: str
    effect: str
    base: bool
    share: float = 0.0
    low: float = 0.0
    high: float = 0.0


def read_evidence(row: Row) -> tuple[ArmRead, ...]:
    """The experiments of a row: for each kind of repetition the base first, then as they were run, those not run
    last."""
    evidence = Evidence(origin=row.origin, arms=row.evidence.results)
    read = [_read(result, evidence) for result in evidence.arms]
    kinds = list(dict.fromkeys(result.on for result in evidence.arms))
    return tuple(sorted(read, key=lambda one: (not one.arm.ran, kinds.index(one.arm.on), not one.base)))


def _read(result: ExperimentResult, evidence: Evidence) -> ArmRead:
    experiment = EXPERIMENTS.get(result.name)
    phrase = experiment.phrase if experiment is not None else result.name.replace("_", " ")
    is_base = experiment is not None and experiment.role is Role.BASE
    if not result.ran:
        return ArmRead(result, phrase, "", is_base)
    rate = rate_of(result.differing, result.trials, distinct=result.distinct, of=result.on)
    words = "" if is_base else _effect(result, evidence)
    return ArmRead(result, phrase, words, is_base, rate.share, rate.low, rate.high)


def _effect(result: ExperimentResult, evidence: Evidence) -> str:
    experiment = EXPERIMENTS.get(result.name)
    if experiment is not None and experiment.proof is not None:
        return experiment.proof[0 if result.differing else 1]
    base = base_of(evidence, result.name, result.on)
    # Fisher's test over counts that no experiment ever reaches would take minutes, and a file can claim them.
    if max(result.trials, base.trials) > 5 * MOST_TRIALS:
        return ""
    words = _WORDS.get(effect(evidence, result.name, result.on))
    if words is not None:
        return words
    if not base.ran:
        return "differs" if result.differing else "agrees"
    return "brings it about" if result.differing else "agrees too"


def reasons(read: tuple[ArmRead, ...]) -> Iterator[tuple[str, tuple[ArmRead, ...]]]:
    """The experiments that were not run, by the reason that they give."""
    waiting = [one for one in read if not one.arm.ran]
    for note in dict.fromkeys(one.arm.note for one in waiting):
        yield note, tuple(one for one in waiting if one.arm.note == note)
