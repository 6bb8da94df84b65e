"""Rules for a kernel whose outputs differ although its inputs are equal.

Pure: imports no torch, reads no files. Each rule answers with a decision or leaves it to the next. First come those on
the captured call, then those on the model around it.
"""

from __future__ import annotations

from dataclasses import replace

from hashbench.catalog import EXPERIMENTS, Place, Role, places
from hashbench.causes.advice import decision, removal
from hashbench.causes.evidence import (
    CALL_WORLD,
    WORLD,
    all_words,
    base_of,
    effect,
    few_outcomes,
    pick,
    removes,
    repeat_differs,
    told,
    told_of,
)
from hashbench.causes.evidence import with_numbers as _with
from hashbench.causes.outside import Rule, held_still
from hashbench.causes.stats import Effect, fewer, is_rare, sure_count
from hashbench.records import CallFacts, Decision, Evidence, ExperimentResult

_ORDERING: tuple[Place, ...] = (("one_thread", "call"), ("one_worker", "call"), ("deterministic", "call"))
_TUNED = "cudnn_benchmark"
_LIBRARIES = places(one for one in EXPERIMENTS.values() if one.role is Role.LIBRARY and one.name != _TUNED)
_DISTURBING = tuple(one for one in EXPERIMENTS.values() if one.role is Role.DISTURB and one.cause)


def _facts(evidence: Evidence) -> CallFacts:
    return evidence.call or CallFacts("")


# ------------------------------------------------------------------------------------------ inside the call


def _uninitialized(evidence: Evidence) -> Decision | None:
    """Output that follows what fresh memory was filled with is proof positive; no test of chance is needed."""
    on = "pair" if _facts(evidence).allocation else "call"
    poison = evidence.arm("poison", on)
    if poison.differing:
        return decision(evidence, "uninitialized_memory", "proven", told(poison))
    if not _facts(evidence).allocation:
        return None
    if poison.ran:
        because = f"results do not follow what fresh memory holds, so it was filled behind torch's back: {told(poison)}"
        return decision(evidence, "opaque_producer", "likely", because)
    because = _with("memory was read that no recorded op had written", told(base=evidence.arm("pair", "pair")))
    return decision(evidence, "uninitialized_memory", "likely", because)


def _drawn_inside(evidence: Evidence) -> Decision | None:
    """A generator, entropy or a clock inside the op, ahead of what its outputs look like: noise may well choose values
    or places. Where one thread or worker removes the difference too, holding the value still may only have steadied the
    threads, and the looks decide."""
    if any(removes(evidence, name, "call") for name in ("one_thread", "one_worker")):
        return None
    picked = pick(evidence, CALL_WORLD)
    return _held_still(evidence, CALL_WORLD) if picked is not None and picked[1] == "proven" else None


def _overlapping(evidence: Evidence) -> Decision | None:
    if not _facts(evidence).overlap or not repeat_differs(evidence):
        return None
    found = effect(evidence, "copied_sources", "call")
    numbers = told_of(evidence, ("copied_sources", "call"), ("one_thread", "call"))
    if found is Effect.REMOVED:
        return decision(evidence, "overlapping_views", "proven", numbers)
    if Effect.STAYS in (found, effect(evidence, "one_thread", "call")):
        return None
    because = f"the op writes memory that it reads through another view: {numbers}"
    return decision(evidence, "overlapping_views", "likely", because)


def _unordered(evidence: Evidence) -> Decision | None:
    """Places differ and values do not. Where whole numbers remove that, values matter after all: a few sums may have
    traded places by chance."""
    if not _facts(evidence).same_values or not repeat_differs(evidence):
        return None
    doubtful = removes(evidence, "exact_values", "call")
    numbers = told_of(evidence, ("exact_values", "call"), *_ORDERING)
    because = f"outcomes that differ hold the same values in other places: {numbers}"
    return decision(evidence, "unordered_output", "likely" if doubtful else "proven", because)


def _tied(evidence: Evidence) -> Decision | None:
    """Places differ, and each of them holds the same value: which of several equal elements is named is left to chance.
    Among whole numbers more are equal, so that the difference has to stay."""
    if not _facts(evidence).tied_places or not repeat_differs(evidence):
        return None
    exact = effect(evidence, "exact_values", "call")
    numbers = told_of(evidence, ("exact_values", "call"), *_ORDERING)
    because = f"outcomes differ in places that hold equal values: {numbers}"
    sure = exact in (Effect.STAYS, Effect.LOWERED)
    return decision(evidence, "unordered_output", "proven" if sure else "likely", because)


def _race(evidence: Evidence) -> Decision | None:
    """Every differing element is some input's value: the last writer won. Sums in 16 bits hit such a value by chance,
    so whole numbers, on which a race still differs, have to confirm it."""
    if not _facts(evidence).chosen_values or not repeat_differs(evidence):
        return None
    exact, ordered = effect(evidence, "exact_values", "call"), _ordered(evidence)
    if exact is Effect.REMOVED or ordered is Effect.STAYS:
        return None
    sure = exact in (Effect.STAYS, Effect.LOWERED) and ordered is Effect.REMOVED
    numbers = told_of(evidence, ("exact_values", "call"), *_ORDERING)
    because = f"wherever outcomes differ, each holds a value of one of the inputs: {numbers}"
    return decision(evidence, "write_race", "proven" if sure else "likely", because)


def _accumulation(evidence: Evidence) -> Decision | None:
    """Two experiments have to agree: whole numbers show that rounding is what differs, a fixed order of work that
    the order decides it. The deterministic flag alone may also have chosen another algorithm."""
    exact, ordered = effect(evidence, "exact_values", "call"), _ordered(evidence)
    if Effect.REMOVED not in (exact, ordered) or Effect.STAYS in (exact, ordered) or exact is Effect.LOWERED:
        return None
    by_flag_alone = not any(removes(evidence, *place) for place in _ORDERING[:2])
    rival = by_flag_alone and any(removes(evidence, *place) for place in _LIBRARIES)
    sure = exact is ordered and not rival
    numbers = told_of(evidence, ("exact_values", "call"), *_ORDERING)
    return decision(evidence, "accumulation_order", "proven" if sure else "likely", numbers)


def _ordered(evidence: Evidence) -> Effect:
    """What fixing the order of work does: by one thread, by one worker, or by the deterministic kernel. A kernel that
    threads of this processor do not run has no ``one_thread`` arm, and then nothing here excludes an order."""
    effects = [effect(evidence, *place) for place in _ORDERING]
    known = (Effect.REMOVED, Effect.SEEMS, Effect.LOWERED)
    return next((found for found in known if found in effects), effects[0])


def _place_or_load(evidence: Evidence) -> Decision | None:
    """A call that agrees in place and alone, rare exceptions aside, but not elsewhere or under load."""
    repeat = evidence.arm("repeat", "call")
    if not repeat.ran or not is_rare(repeat):
        return None
    differing = [arm for one in _DISTURBING if (arm := evidence.arm(one.name, "call")).differing]
    sure = [arm for arm in differing if _more(arm, repeat)]
    if repeat.differing and not sure:
        return None
    if not differing:
        return _elsewhere(evidence, repeat)
    arm = (sure or differing)[0]
    return decision(evidence, EXPERIMENTS[arm.name].cause, "proven" if sure else "likely", told(arm, base=repeat))


def _elsewhere(evidence: Evidence, repeat: ExperimentResult) -> Decision | None:
    """Inputs in new memory change the outcome; what that memory held before does not. Their address is left."""
    fresh, poison = evidence.arm("fresh_memory", "call"), evidence.arm("poison", "call")
    if not poison.ran or not _more(fresh, repeat):
        return None
    return decision(evidence, "alignment", "likely", told(fresh, poison, base=repeat))


def _more(arm: ExperimentResult, base: ExperimentResult) -> bool:
    """Whether an arm differs more often than its base, by more than luck explains."""
    return fewer((arm.differing, arm.trials), (base.differing, base.trials))


def _held_still(evidence: Evidence, places: tuple[Place, ...]) -> Decision | None:
    picked = pick(evidence, places)
    if picked is not None and picked[0].name == "clocks":
        return _timed(evidence, *picked)
    return held_still(evidence, places)


def _held_still_inside(evidence: Evidence) -> Decision | None:
    return _held_still(evidence, CALL_WORLD)


def _timed(evidence: Evidence, clocks: ExperimentResult, confidence: str) -> Decision:
    """A clock inside an op either chooses how to compute, which whole numbers hide, or enters what is computed."""
    base = base_of(evidence, clocks.name, clocks.on)
    if removes(evidence, "exact_values", "call"):
        numbers = told(clocks, evidence.arm("exact_values", "call"), base=base)
        sure = confidence == "proven" and few_outcomes(base)
        return decision(evidence, "algorithm_selection", "proven" if sure else "likely", numbers)
    if few_outcomes(base):
        because = f"{base.distinct} outcomes come again: {told(clocks, base=base)}"
        return decision(evidence, "algorithm_selection", "likely", because)
    return removal(evidence, "outside_value", clocks, confidence)


def _library(evidence: Evidence) -> Decision | None:
    """Another library or algorithm agrees, or trying them out makes it worse. Neither shows that the choice among them
    varies: the one that was chosen may itself differ."""
    base, tuned = evidence.arm("repeat", "call"), evidence.arm(_TUNED, "call")
    if tuned.differing and fewer(sure_count(tuned), (base.differing, base.trials)):
        return decision(evidence, "algorithm_selection", "likely", told(tuned, base=base))
    picked = pick(evidence, _LIBRARIES)
    return None if picked is None else removal(evidence, "algorithm_selection", picked[0], "likely")


def _capped(rule: Rule) -> Rule:
    """Replays that never gave what the trace recorded may show another mechanism than the model did. Where every replay
    gives something new, the recorded outcome is not to be expected among them."""

    def capped(evidence: Evidence) -> Decision | None:
        found = rule(evidence)
        repeat = evidence.arm("repeat", "call")
        recurring = not repeat.differing or few_outcomes(repeat)
        if (
            found is None
            or found.confidence != "proven"
            or not recurring
            or _facts(evidence).matches_record is not False
        ):
            return found
        because = f"{found.because}; but no replay gave what the trace had recorded"
        return replace(found, confidence="likely", because=because)

    return capped


# ----------------------------------------------------------------------------------------- around the call


def _held_still_around(evidence: Evidence) -> Decision | None:
    """One of torch's own kernels that differs in place, with all its inputs restored, keeps nothing that a change
    of the world around it could explain."""
    if repeat_differs(evidence) and not _facts(evidence).custom:
        return None
    return _held_still(evidence, WORLD)


def _representation(evidence: Evidence) -> Decision | None:
    """Left when nothing names a mechanism; proven once the last experiment, in fresh processes, was tried."""
    word = _facts(evidence).representation or evidence.representation
    if not word:
        return None
    tried = any(arm.name == "fresh_process" for arm in evidence.arms)
    sentence = f"values are equal and only the bits differ ({word}); what makes them differ stays open"
    because = _with(sentence, all_words(evidence))
    return decision(evidence, "representation", "proven" if tried else "likely", because)


def _opaque_producer(evidence: Evidence) -> Decision | None:
    if not evidence.opaque_producer:
        return None
    because = _with("a view or copy differs, so what it read was written behind torch's back", all_words(evidence))
    return decision(evidence, "opaque_producer", "likely", because)


def _opaque_kernel(evidence: Evidence) -> Decision | None:
    if not _facts(evidence).custom:
        return None
    seen = any(arm.differing for arm in evidence.arms)
    sentence = "an op that torch does not define differs from equal inputs, and no experiment explains it"
    because = _with(sentence, all_words(evidence) or "none was made")
    return decision(evidence, "opaque_kernel", "likely" if seen else "open", because)


_INSIDE: tuple[Rule, ...] = (
    _drawn_inside,
    _overlapping,
    _unordered,
    _tied,
    _race,
    _accumulation,
    _place_or_load,
    _held_still_inside,
    _library,
)

KERNEL_RULES: tuple[Rule, ...] = (
    _uninitialized,  # memory that follows the poison matches no record, so that is no argument against it
    *map(_capped, _INSIDE),
    _held_still_around,
    _representation,
    _opaque_producer,
    _opaque_kernel,
)
"""The rules, in order."""
