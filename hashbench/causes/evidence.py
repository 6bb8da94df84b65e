"""How evidence is read: what an arm is compared with, what it did to the difference, and how that is said.

Pure: imports no torch, reads no files. The rules in ``causes`` are written in these words.
"""

from __future__ import annotations

from collections.abc import Iterable

from hashbench.catalog import EXPERIMENTS, REPEATED, Place, places
from hashbench.causes.stats import Effect, effect_of
from hashbench.records import Evidence, ExperimentResult

CALL_WORLD = places((one for one in EXPERIMENTS.values() if one.holds), "call")
WORLD = places((one for one in EXPERIMENTS.values() if one.holds), "pair", "process")
"""What holds one thing outside torch still, the most specific first."""

FEW = 5
"""Outcomes that a choice among algorithms may have."""

# ---------------------------------------------------------------------------------------------------- effects


def base_of(evidence: Evidence, name: str, on: str) -> ExperimentResult:
    """What an arm is compared with: the same thing repeated with nothing changed."""
    if on == "call":
        return evidence.arm("repeat", "call")
    if on == "pair":
        return evidence.arm("pair", "pair")
    if name == "fixed_order":
        return evidence.arm("fresh_process", "process")
    within = evidence.arm("within_process", "process")
    return within if within.ran else evidence.arm("pair", "pair")


def effect(evidence: Evidence, name: str, on: str) -> Effect:
    """What an arm did to the difference. Processes whose hash seeds and addresses differ may differ from each other and
    yet not in themselves; fixing these then says nothing about two runs in one process."""
    inside = (evidence.arm("pair", "pair"), evidence.arm("within_process", "process"))
    if name == "fixed_order" and not any(arm.differing for arm in inside):
        return Effect.ABSENT
    return effect_of(base_of(evidence, name, on), evidence.arm(name, on))


def removes(evidence: Evidence, name: str, on: str) -> bool:
    """Whether the difference is gone under the arm, and luck does not explain it."""
    return effect(evidence, name, on) is Effect.REMOVED


def pick(evidence: Evidence, places: Iterable[Place]) -> tuple[ExperimentResult, str] | None:
    """The arm that explains the difference, with the confidence in it: the first that removes it; else the only one
    that seems to. Where a difference is so rare that several arms seem to remove it, none of them has shown anything.
    Generators put back of which none had moved cannot be what removed it."""
    effects = {place: effect(evidence, *place) for place in places}
    for place, found in effects.items():
        arm = evidence.arm(*place)
        if found is Effect.REMOVED and (arm.name != "generators" or arm.found):
            return arm, "proven"
    hints = (Effect.REMOVED, Effect.SEEMS, Effect.LOWERED)
    seeming = [place for place, found in effects.items() if found in hints]
    return (evidence.arm(*seeming[0]), "likely") if len(seeming) == 1 else None


def repeat_differs(evidence: Evidence) -> bool:
    """Whether the captured call gives several outcomes with its memory, content and random state put back in place."""
    return evidence.arm("repeat", "call").differing > 0


def few_outcomes(arm: ExperimentResult) -> bool:
    """Whether the same few outcomes come again: one choice among some, where sums in any order give ever new ones."""
    return 0 < arm.distinct <= max(2, min(FEW, arm.trials / 4))


# -------------------------------------------------------------------------------------------------- sentences


def count(arm: ExperimentResult) -> str:
    """``3 of 20``."""
    return f"{arm.differing} of {arm.trials}"


def counted(arm: ExperimentResult) -> str:
    """``20 of 20 replays with one thread``."""
    experiment = EXPERIMENTS[arm.name]
    unit = "" if experiment.has_unit else f" {REPEATED[arm.on].unit}"
    return f"{count(arm)}{unit} {experiment.phrase}"


def told(*arms: ExperimentResult, base: ExperimentResult | None = None) -> str:
    """``20 of 20 unmodified replays differ; 0 of 20 with one thread``. Arms that were not run are left out."""
    shown = [arm for arm in ((base, *arms) if base is not None else arms) if arm.ran]
    parts = []
    for place, arm in enumerate(shown):
        follows = place > 0 and shown[0].on == arm.on != "process"
        words = f"{count(arm)} {EXPERIMENTS[arm.name].phrase}" if follows else counted(arm)
        parts.append(words + (" differ" if place == 0 else "") + (f" ({arm.found})" if arm.found else ""))
    return "; ".join(parts)


def told_of(evidence: Evidence, *places: Place) -> str:
    """The same of arms that share a base, after that base."""
    return told(*(evidence.arm(*place) for place in places), base=base_of(evidence, *places[0]))


def all_words(evidence: Evidence) -> str:
    """The whole evidence: ``call/repeat 20/20, call/one_thread 0/20``."""
    return ", ".join(arm.word() for arm in evidence.arms)


def with_numbers(sentence: str, numbers: str) -> str:
    """A sentence, and the numbers where there are any."""
    return f"{sentence}: {numbers}" if numbers else sentence
