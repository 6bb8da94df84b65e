"""Causes are inferred from controlled experiments: which mechanism they show, how surely, and what is to be done.

Pure: imports no torch, reads no files. :func:`decide` goes through small rules in order, and the first that answers
decides; each verdict states the counts it rests on. Rules for what came from outside are in ``outside``, those for
kernels in ``kernel``; what an experiment did to a difference is judged in ``evidence`` and ``stats``.
``docs/causes.md`` explains every cause and every experiment, and ``tests/causes`` is the truth table.

Three principles keep the rules sound. An experiment *removes* a difference only if nothing differs under it and
Fisher's exact test excludes luck (``stats.effect_of``); one that merely seems to supports at most ``likely``, and only
where no rival seems to as well. What was seen to happen (output depends on uninitialised memory) needs no such test.
And a change that makes a difference go away proves no mechanism where it changes several things at once: another
library, a flag.
"""

from __future__ import annotations

from collections.abc import Sequence

from hashbench.catalog import EXPERIMENTS, Role, places
from hashbench.causes.advice import decision
from hashbench.causes.evidence import all_words, base_of, counted, told
from hashbench.causes.kernel import KERNEL_RULES
from hashbench.causes.outside import OUTSIDE_RULES
from hashbench.causes.stats import fewer, sure_count
from hashbench.records import Decision, Evidence, ExperimentResult

_RULES = {**OUTSIDE_RULES, "kernel": KERNEL_RULES}

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
    """The cause that the evidence shows, the confidence in it, the numbers, and what to do."""
    for rule in (_masked_by_tracing, _unreproduced, *_RULES.get(evidence.origin, ())):
        found = rule(evidence)
        if found is not None:
            return found
    return _unknown(evidence)


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
    numbers = told(traced, base=untraced) or f"an untraced pair of runs differs; 0 of {compared} traced ones"
    return decision(evidence, "masked_by_tracing", "proven" if sure else "likely", numbers)


def _unreproduced(evidence: Evidence) -> Decision | None:
    """The model, run again as it was, agrees, and so does every replay. Replays alone are not enough: they leave out
    what the model did before the call. A changed setting is restored before the next run, so further runs agree."""
    if evidence.origin == "settings" or not any(evidence.arm(*place).ran for place in _AGAIN):
        return None
    repeated = [arm for arm in evidence.arms if arm.ran and arm.name not in _REPRODUCES_NOTHING]
    differing, compared = evidence.first_pair
    strays = [arm for arm in repeated if arm.differing]
    if any(not _is_stray(evidence, arm) for arm in strays) or not (differing or evidence.untraced == "differ"):
        return None
    if any(_more_than_luck(repeated, on) for on in ("call", "pair")):
        return None
    seen = f"{differing} of {compared} runs of the sweep differed" if differing else "an untraced pair differed"
    then = "hardly any did, too few to tell what removes it" if strays else "nothing did"
    because = f"{seen} from the first, then {then}: {', '.join(map(counted, repeated))}"
    return decision(evidence, "unreproduced", "open", because + _between_processes(evidence))


def _is_stray(evidence: Evidence, arm: ExperimentResult) -> bool:
    """Whether an arm that differs holds something still, and what it is compared with was run and never differed."""
    base = base_of(evidence, arm.name, arm.on)
    return arm.name in _STEADYING and base.ran and not base.differing


def _more_than_luck(repeated: Sequence[ExperimentResult], on: str) -> bool:
    """Whether the arms that hold something still differ more often than runs as they were, taken together."""
    steadied = [arm for arm in repeated if arm.on == on and arm.name in _STEADYING and arm.differing]
    plain = [arm for arm in repeated if arm.on == on and arm.name in ("repeat", "pair")]
    return bool(steadied) and fewer(_total(steadied), _total(plain))


def _total(arms: Sequence[ExperimentResult]) -> tuple[int, int]:
    return sum(arm.differing for arm in arms), sum(arm.trials for arm in arms)


def _between_processes(evidence: Evidence) -> str:
    fresh: ExperimentResult = evidence.arm("fresh_process", "process")
    return f"; {counted(fresh)} differ from each other" if fresh.differing else ""


def _unknown(evidence: Evidence) -> Decision:
    """Names no mechanism and keeps all evidence."""
    limits = evidence.call.limits if evidence.call is not None else ""
    because = f"no mechanism explains all of this: {all_words(evidence) or 'no experiment was made'}"
    return decision(evidence, "unknown", "open", because + (f"; the call was not captured: {limits}" if limits else ""))
