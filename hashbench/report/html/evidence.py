"""The column ``evidence`` read back: one text per row → the arms of the experiment, and what each of them did.

The text comes from a file that somebody may have edited: what has no meaning is left out, and an arm whose counts
cannot be counts is none.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass

from hashbench.catalog import EXPERIMENTS
from hashbench.causes.evidence import base_of
from hashbench.causes.stats import MOST_TRIALS, Effect, effect_of, rate_of
from hashbench.records import Evidence, ExperimentResult, Row

_ARM = re.compile(
    r"(?:^|; )(?P<on>call|pair|process)/(?P<name>[a-z_0-9]{1,40}) "
    r"(?:(?P<differing>\d{1,9})/(?P<trials>\d{1,9})|not run \()"
)
"""Where an arm begins. Its note is free text that may hold ``; `` too, so the text is not split there."""

BASES = frozenset({("repeat", "call"), ("pair", "pair"), ("within_process", "process"), ("untraced", "pair")})
"""Arms that repeat the same with nothing changed, with which the others are compared."""

_COUNTED_AS_PROOF = frozenset({"poison", "moved"})
"""Arms of which what is counted is itself the proof: output that follows the value, an outcome that is another than in
place."""

_WORDS = {
    Effect.REMOVED: "gone",
    Effect.SEEMS: "gone, but too few trials to be sure",
    Effect.LOWERED: "rarer, still there",
    Effect.STAYS: "still differs",
}

_UNIT_OF_RATE = {"replays": ("repeat", "call"), "pairs": ("pair", "pair"), "processes": ("within_process", "process")}


@dataclass(frozen=True, slots=True)
class ArmRead:
    """One arm as a reader wants it: ``phrase`` says what was changed, ``effect`` in words what that did to the
    difference (empty for a base), ``share``, ``low`` and ``high`` are the observed share and its 95 % bounds, 0 to 1
    (all 0 where the arm was not run)."""

    arm: ExperimentResult
    phrase: str
    effect: str
    base: bool
    share: float = 0.0
    low: float = 0.0
    high: float = 0.0


def arms_of(evidence: str) -> tuple[ExperimentResult, ...]:
    """The arms in the text of the column ``evidence``, in its order; the first of two with the same name."""
    starts = list(_ARM.finditer(evidence))
    ends = [*(start.start() for start in starts[1:]), len(evidence)][: len(starts)]
    found: dict[tuple[str, str], ExperimentResult] = {}
    for start, end in zip(starts, ends, strict=True):
        arm = _arm(start, evidence[start.end() : end])
        if arm is not None:
            found.setdefault((arm.name, arm.on), arm)
    return tuple(found.values())


def _arm(start: re.Match[str], rest: str) -> ExperimentResult | None:
    name, on = start["name"], start["on"]
    if start["trials"] is None:
        return ExperimentResult(name, on, note=rest.rpartition(")")[0] or rest)
    differing, trials = int(start["differing"]), int(start["trials"])
    if not 0 <= differing <= trials or trials == 0:
        return None
    found = rest.strip().removeprefix("[").removesuffix("]")
    return ExperimentResult(name, on, trials=trials, differing=differing, found=found)


def read_evidence(row: Row) -> tuple[ArmRead, ...]:
    """The arms of a row: for each kind of repetition the base first, then as they were run, those not run last."""
    arms = tuple(_with_distinct(arm, row) for arm in arms_of(row.evidence))
    evidence = Evidence(origin=row.origin, arms=arms)
    read = [_read(arm, evidence) for arm in arms]
    kinds = list(dict.fromkeys(arm.on for arm in arms))
    return tuple(sorted(read, key=lambda one: (not one.arm.ran, kinds.index(one.arm.on), not one.base)))


def _with_distinct(arm: ExperimentResult, row: Row) -> ExperimentResult:
    """The text does not tell the number of outcomes; the row does, of the arm that gave its rate."""
    told = _UNIT_OF_RATE.get(row.rate_of) == (arm.name, arm.on) and row.trials == arm.trials
    return dataclasses.replace(arm, distinct=row.distinct) if told and row.distinct else arm


def _read(arm: ExperimentResult, evidence: Evidence) -> ArmRead:
    phrase = EXPERIMENTS[arm.name].phrase if arm.name in EXPERIMENTS else arm.name.replace("_", " ")
    is_base = (arm.name, arm.on) in BASES
    if not arm.ran:
        return ArmRead(arm, phrase, "", is_base)
    rate = rate_of(arm.differing, arm.trials, distinct=arm.distinct, of=arm.on)
    effect = "" if is_base else _effect(arm, base_of(evidence, arm.name, arm.on))
    return ArmRead(arm, phrase, effect, is_base, rate.share, rate.low, rate.high)


def _effect(arm: ExperimentResult, base: ExperimentResult) -> str:
    if arm.name in _COUNTED_AS_PROOF:
        return _proof(arm)
    # Fisher's test over counts that no arm ever reaches would take minutes, and a file can claim them.
    if max(arm.trials, base.trials) > 5 * MOST_TRIALS:
        return ""
    found = effect_of(base, arm)
    if found in _WORDS:
        return _WORDS[found]
    if not base.ran:
        return "differs" if arm.differing else "agrees"
    return "brings it about" if arm.differing else "agrees too"


def _proof(arm: ExperimentResult) -> str:
    if arm.name == "poison":
        return "depends on uninitialised memory" if arm.differing else "does not depend on it"
    return "another outcome" if arm.differing else "agrees too"


def reasons(read: tuple[ArmRead, ...]) -> Iterator[tuple[str, tuple[ArmRead, ...]]]:
    """The arms that were not run, by the reason that they give."""
    waiting = [one for one in read if not one.arm.ran]
    for note in dict.fromkeys(one.arm.note for one in waiting):
        yield note, tuple(one for one in waiting if one.arm.note == note)
