"""Read evidence: the baseline of each experiment, its effect on the difference, and both in words.

Pure: imports no torch, reads no files. The rules in ``rules`` are written in these terms.
"""

from __future__ import annotations

from collections.abc import Iterable

from hashbench.core.catalog import (
    CAUSES,
    EXPERIMENTS,
    REPEATED,
    Confidence,
    Limit,
    Place,
    Remedy,
    named_by,
    places,
    sentence_of,
)
from hashbench.core.diagnose.causes.stats import Effect, deterministic_price, effect_of
from hashbench.core.records import Decision, Evidence, ExperimentResult
from hashbench.core.text import price_words

CALL_CONTROLS = places((experiment for experiment in EXPERIMENTS.values() if experiment.holds), "call")
MODEL_CONTROLS = places((experiment for experiment in EXPERIMENTS.values() if experiment.holds), "pair", "process")
"""Experiments that hold one thing outside torch constant, the most specific first."""

FEW = 5
"""Most outcomes that a choice among algorithms may have."""

_FLAG = "torch.use_deterministic_algorithms(True)"

_NEVER_BOTH = ("entropy", "clocks")
"""On the pair: a value comes from the one or from the other."""

# ---------------------------------------------------------------------------------------------------- effects


def base_of(evidence: Evidence, name: str, on: str) -> ExperimentResult:
    """Return the baseline of an experiment: the same repetitions with nothing changed."""
    if on == "call":
        return evidence.arm("repeat", "call")
    if on == "pair":
        return evidence.arm("pair", "pair")
    if on == "collective":
        return evidence.arm("contributions", "collective")
    if name == "fixed_order":
        return evidence.arm("fresh_process", "process")
    within = evidence.arm("within_process", "process")
    return within if within.ran else evidence.arm("pair", "pair")


def effect(evidence: Evidence, name: str, on: str) -> Effect:
    """Return the effect of an experiment on the difference.

    Processes with different hash seeds and addresses may differ from each other and yet not within themselves; fixing
    these then says nothing about two runs in one process.
    """
    inside = (evidence.arm("pair", "pair"), evidence.arm("within_process", "process"))
    between = evidence.between_processes or any(result.differing for result in inside)
    if name == "fixed_order" and not between:
        return Effect.ABSENT
    known = effect_of(base_of(evidence, name, on), evidence.arm(name, on))
    return Effect.SEEMS if known is Effect.REMOVED and on == "pair" and _has_gone(evidence) else known


def _has_gone(evidence: Evidence) -> bool:
    """Return True if pairs agree under two experiments that cannot both remove a difference.

    The difference has then gone by itself since the unchanged pairs were run, as one that follows the machine's load
    does.
    """
    base = evidence.arm("pair", "pair")
    return all(effect_of(base, evidence.arm(name, "pair")) is Effect.REMOVED for name in _NEVER_BOTH)


def removes(evidence: Evidence, name: str, on: str = "call") -> bool:
    """Return True if nothing differs under the experiment and chance does not explain that."""
    return effect(evidence, name, on) is Effect.REMOVED


def pick(evidence: Evidence, places: Iterable[Place]) -> tuple[ExperimentResult, Confidence] | None:
    """Return the experiment that explains the difference, and the confidence: the first that removes it, else the only
    one that seems to.

    If a difference is so rare that several experiments seem to remove it, none is picked. Restoring generators that had
    not moved cannot have removed it.
    """
    effects = {place: effect(evidence, *place) for place in places}
    for place, known in effects.items():
        result = evidence.arm(*place)
        if known is Effect.REMOVED and (result.name != "generators" or result.found):
            return result, Confidence.PROVEN
    hints = (Effect.REMOVED, Effect.SEEMS, Effect.LOWERED)
    seeming = [place for place, known in effects.items() if known in hints]
    return (evidence.arm(*seeming[0]), Confidence.LIKELY) if len(seeming) == 1 else None


def few_outcomes(result: ExperimentResult) -> bool:
    """Return True if the same few outcomes recur, as with a choice of algorithms; unordered sums give new ones."""
    return 0 < result.distinct <= max(2, min(FEW, result.trials / 4))


# -------------------------------------------------------------------------------------------------- sentences


def count(result: ExperimentResult) -> str:
    """Format a result as ``3 of 20``."""
    return f"{result.differing} of {result.trials}"


def counted(result: ExperimentResult) -> str:
    """Format a result with its unit: ``20 of 20 replays with one thread``."""
    experiment = EXPERIMENTS[result.name]
    unit = "" if experiment.has_unit else f" {REPEATED[result.on].unit}"
    return f"{count(result)}{unit} {experiment.phrase}"


def in_words(*results: ExperimentResult, base: ExperimentResult | None = None) -> str:
    """Format results as ``20 of 20 unmodified replays differ; 0 of 20 with one thread``, omitting those that were not
    run."""
    shown = [result for result in ((base, *results) if base is not None else results) if result.ran]
    parts = []
    for position, result in enumerate(shown):
        follows = position > 0 and shown[0].on == result.on != "process"
        text = f"{count(result)} {EXPERIMENTS[result.name].phrase}" if follows else counted(result)
        parts.append(text + (" differ" if position == 0 else "") + (f" ({result.found})" if result.found else ""))
    return "; ".join(parts)


def in_words_of(evidence: Evidence, *places: Place) -> str:
    """Format experiments that share a baseline, after that baseline, as :func:`in_words` does."""
    return in_words(*(evidence.arm(*place) for place in places), base=base_of(evidence, *places[0]))


def all_words(evidence: Evidence) -> str:
    """Format the whole evidence: ``call/repeat 20/20, call/one_thread 0/20``."""
    return ", ".join(result.word() for result in evidence.arms)


# -------------------------------------------------------------------------------------------------- decisions


def decision(evidence: Evidence, cause: str, confidence: Confidence, because: str, *, named: str = "") -> Decision:
    """Return a decision with its advice; ``named`` is what an experiment singled out."""
    clauses = [_advice(evidence, cause, named), _deterministic_clause(evidence, cause)]
    return Decision(cause, str(confidence), because, "; ".join(filter(None, clauses)) + ".")


def _advice(evidence: Evidence, cause: str, named: str) -> str:
    """Join the remedies of a cause that no experiment refuted.

    Those that helped come first, with those that no experiment can test; if none helped, all that are left; if none is
    left, the measurements.
    """
    known = CAUSES[cause]
    left = [remedy for remedy in known.remedies if not is_refuted(evidence, remedy)]
    if not left:
        tried = dict.fromkeys(result for remedy in known.remedies for result in _tests(evidence, remedy))
        numbers = ", ".join(
            f"{counted(result)} differ" if result.ran else f"{result.place} {result.note}" for result in tried
        )
        return f"No usual remedy makes it go away here ({numbers}): look at the evidence and the repro"
    helped = [remedy for remedy in left if _has_helped(evidence, remedy)]
    remedies = [*helped, *(remedy for remedy in left if not (helped and remedy.tests))]
    sources = [source for source in known.sources if _has_helped(evidence, source)]
    sources = sources or [source for source in known.sources if not is_refuted(evidence, source)]
    return sentence_of(remedies).format(named=named or named_by(sources or known.sources))


def is_refuted(evidence: Evidence, remedy: Remedy) -> bool:
    """Return True if every experiment made for this remedy still differs, or raised."""
    tests = _tests(evidence, remedy)
    return bool(tests) and all(result.differing or result.raised for result in tests)


def _has_helped(evidence: Evidence, remedy: Remedy) -> bool:
    return any(removes(evidence, result.name, result.on) for result in _tests(evidence, remedy))


def _tests(evidence: Evidence, remedy: Remedy) -> list[ExperimentResult]:
    """List the results of the experiments that test a remedy."""
    return [result for result in evidence.arms if result.name in remedy.tests and (result.ran or result.raised)]


def removal(evidence: Evidence, cause: str, result: ExperimentResult, confidence: Confidence) -> Decision:
    """Return the decision that rests on one experiment that removes the difference, or seems to."""
    numbers = in_words(result, base=base_of(evidence, result.name, result.on))
    caveat = "" if confidence is Confidence.PROVEN else ", which excludes neither luck nor a second mechanism"
    return decision(evidence, cause, confidence, numbers + caveat, named=result.found)


def cut_short(results: Iterable[ExperimentResult], confidence: str) -> tuple[ExperimentResult, ...]:
    """Return the experiments that ran out of time, if more trials might have decided more: none where the cause is
    proven."""
    return () if confidence == Confidence.PROVEN else tuple(result for result in results if result.is_cut_short)


def with_more_time(advice: str, limited: Iterable[ExperimentResult], *, flag: str) -> str:
    """Prefix the advice with "give more time by ``flag``" if experiments were ``limited``."""
    remedy = Limit.BUDGET.remedy.format(flag=flag)
    return " ".join(filter(None, (f"{remedy}.", advice))) if any(limited) else advice


def _deterministic_clause(evidence: Evidence, cause: str) -> str:
    """Describe the effect of deterministic algorithms on the captured call."""
    if cause == "uninitialized_memory":
        filled = removes(evidence, "deterministic_fill") and not removes(evidence, "deterministic")
        return f"{_FLAG} only hides it, by filling fresh memory" if filled else ""
    result = evidence.arm("deterministic", "call")
    if not CAUSES[cause].in_kernel:
        return ""
    if result.raised:
        return f"{_FLAG} {result.note}"
    known = effect(evidence, "deterministic", "call")
    if known is Effect.REMOVED:
        price = deterministic_price(evidence)
        return f"{_FLAG} makes it identical here" + (f", {price_words(price)}" if price else "")
    if known is Effect.SEEMS:
        return f"with {_FLAG} {count(result)} replays differ here, too few to exclude luck"
    return f"with {_FLAG} it still differs here ({count(result)} replays)" if result.differing else ""
