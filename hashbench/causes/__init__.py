"""Causes are inferred from controlled experiments: which mechanism they show, how surely, and what is to be done.

Pure: imports no torch, reads no files. Three principles keep the rules sound. An experiment *removes* a difference only
if nothing differs under it and Fisher's exact test excludes luck (``stats.effect_of``); one that merely seems to
supports at most ``likely``, and only where no rival seems to as well. What was seen to happen (output depends on
uninitialised memory) needs no such test. And a change that makes a difference go away proves no mechanism where it
changes several things at once: another library, a flag.
"""

from __future__ import annotations

from collections.abc import Sequence

from hashbench.catalog import EXPERIMENTS, Confidence, Origin, Role, places
from hashbench.causes.evidence import all_words, base_of, counted, decision, in_words
from hashbench.causes.rules import RULES
from hashbench.causes.stats import fewer, sure_count
from hashbench.records import Decision, Evidence, ExperimentResult

_AGAIN = places((one for one in EXPERIMENTS.values() if one.role is Role.BASE), "pair", "process")
"""The model run again as it was."""

_STEADYING = frozenset(one.name for one in EXPERIMENTS.values() if one.role is Role.STEADY)
"""Experiments that hold one thing still, by which a difference may go but none can come: where they differ, and the
model run again as it was does not, they are no more than further runs of it."""

_REPRODUCES_NOTHING = frozenset(
    one.name for one in EXPERIMENTS.values() if one.role in (Role.FLAG, Role.LIBRARY, Role.PROCESS)
)
"""Experiments that may differ where the sweep's runs agree: they run another kernel than the sweep did, or compare runs
of different processes, whose hash seeds differ."""


def decide(evidence: Evidence) -> Decision:
    """The cause that the evidence shows, the confidence in it, the numbers, and what to do: what the first rule answers
    that applies. ``docs/causes.md`` explains causes and experiments; ``tests/causes`` is the truth table."""
    for rule in (_masked_by_tracing, _unreproduced, *RULES.get(evidence.origin, ())):
        decided = rule(evidence)
        if decided is not None:
            return decided
    limits = evidence.call.limits if evidence.call is not None else ""
    because = f"no mechanism explains all of this: {all_words(evidence) or 'no experiment was made'}"
    because += f"; the call was not captured: {limits}" if limits else ""
    return decision(evidence, "unknown", Confidence.OPEN, because)


def _masked_by_tracing(evidence: Evidence) -> Decision | None:
    if evidence.untraced != "differ" or evidence.first_pair[0]:
        return None
    traced, untraced = evidence.arm("pair", "pair"), evidence.arm("untraced", "pair")
    if untraced.ran and not untraced.differing:
        return None  # the untraced difference did not come again
    sure = fewer(sure_count(untraced), (traced.differing, traced.trials))
    if traced.differing and not sure:
        return None  # a rare difference that traced runs show too
    compared = evidence.first_pair[1]
    numbers = in_words(traced, base=untraced) or f"an untraced pair of runs differs; 0 of {compared} traced ones"
    return decision(evidence, "masked_by_tracing", Confidence.PROVEN if sure else Confidence.LIKELY, numbers)


def _unreproduced(evidence: Evidence) -> Decision | None:
    """The model, run again as it was, agrees, and so does every replay. Replays alone are not enough: they leave out
    what the model did before the call. A changed setting is restored before the next run, so further runs agree."""
    if evidence.origin == Origin.SETTINGS or not any(evidence.arm(*place).ran for place in _AGAIN):
        return None
    repeated = [result for result in evidence.arms if result.ran and result.name not in _REPRODUCES_NOTHING]
    differing, compared = evidence.first_pair
    strays = [result for result in repeated if result.differing]
    if any(not _is_stray(evidence, result) for result in strays) or not (differing or evidence.untraced == "differ"):
        return None
    if any(_more_than_luck(repeated, on) for on in ("call", "pair")):
        return None
    seen = f"{differing} of {compared} runs of the sweep differed" if differing else "an untraced pair differed"
    then = "hardly any did, too few to tell what removes it" if strays else "nothing did"
    because = f"{seen} from the first, then {then}: {', '.join(map(counted, repeated))}"
    fresh = evidence.arm("fresh_process", "process")
    because += f"; {counted(fresh)} differ from each other" if fresh.differing else ""
    return decision(evidence, "unreproduced", Confidence.OPEN, because)


def _is_stray(evidence: Evidence, result: ExperimentResult) -> bool:
    """Whether a result that differs held something still, and what it is compared with was run and never differed."""
    base = base_of(evidence, result.name, result.on)
    return result.name in _STEADYING and base.ran and not base.differing


def _more_than_luck(repeated: Sequence[ExperimentResult], on: str) -> bool:
    """Whether what held something still differs more often than runs as they were, taken together."""
    steadied = [result for result in repeated if result.on == on and result.name in _STEADYING and result.differing]
    plain = [result for result in repeated if result.on == on and result.name in ("repeat", "pair")]
    return bool(steadied) and fewer(_total(steadied), _total(plain))


def _total(results: Sequence[ExperimentResult]) -> tuple[int, int]:
    return sum(result.differing for result in results), sum(result.trials for result in results)
