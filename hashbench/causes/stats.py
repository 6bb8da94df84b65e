"""Rates with their confidence bounds, exact tests on counts, and what an experiment did to a difference.

Sources: C. J. Clopper and E. S. Pearson, "The use of confidence or fiducial limits illustrated in the case of the
binomial", Biometrika 26 (1934); R. A. Fisher's exact test, one-sided.
"""

from __future__ import annotations

from bisect import bisect_left
from enum import Enum
from math import comb, exp, lgamma, log, log1p, sqrt
from statistics import NormalDist

from hashbench.catalog import EXPERIMENTS
from hashbench.records import Evidence, ExperimentResult, Rate, RunCounts

ONE_OF_MANY = 0.01
"""Chance that an arm without any effect may have of passing for a remedy, where a dozen arms are looked at: replays of
a call, pairs of runs. With 0.05 each, one diagnosis in three would blame an arm that did nothing."""

ONE_OF_FEW = 0.05
"""The same for runs in fresh processes: two arms are looked at, and a trial costs seconds."""

FEWEST = 3
"""Trials without which an arm shows nothing, however sure the base is."""

MOST_TRIALS = 2000
"""Trials of one arm at most, however rare the difference is."""

_PARTS = 2**40
"""Rates that a bound can be, between 0 and 1."""

Count = tuple[int, int]
"""How many differed, of how many."""


def significant(number: float | None, digits: int = 4) -> float | None:
    """``number`` with that many significant digits, as a row holds what was measured or estimated: further digits of a
    bound or a share mean nothing. ``None`` where it is not known."""
    return None if number is None else float(f"{number:.{digits}g}")


RATE_DIGITS = 6
"""Significant digits of a rate in a row, from which its count is told again: enough for 100 000 trials, and what is
below 1 stays below 1."""


def rate_of(differing: int, trials: int, *, distinct: int, of: str) -> Rate:
    """How often outcomes differ from the first, with the Clopper–Pearson bounds at 95 %. Where none or all differ, the
    whole 5 % lies on the one open side: 0 of 19 gives at most 0.146.

    Raises:
        ValueError: ``trials`` is not positive, or ``differing`` not between 0 and ``trials``.
    """
    if not 0 <= differing <= trials or trials == 0:
        raise ValueError(f"{differing} of {trials} is not a count of outcomes that differ")
    low = _bound(differing, trials - differing + 1, 0.05 if differing == trials else 0.025) if differing else 0.0
    high = _bound(differing + 1, trials - differing, 0.975 if differing else 0.95) if differing < trials else 1.0
    return Rate(differing=differing, trials=trials, of=of, low=low, high=high, distinct=distinct)


def _bound(successes: int, failures: int, quantile: float) -> float:
    """The quantile of a beta distribution of whole numbers, by its binomial sum: the rate at which ``successes`` or
    more are seen with that chance, in one trial fewer than both together. For counts beyond those of any experiment,
    which a file can claim, Wilson's approximation."""
    if successes == 1:  # none or all differ, as in every clean model
        return float(1 - (1 - quantile) ** (1 / failures))
    if failures == 1:
        return float(quantile ** (1 / successes))
    trials = successes + failures - 1
    if trials > 5 * MOST_TRIALS:
        deviations, rate = NormalDist().inv_cdf(quantile), successes / trials
        spread = sqrt(rate * (1 - rate) / trials + (deviations / (2 * trials)) ** 2)
        return (rate + deviations**2 / (2 * trials) + deviations * spread) / (1 + deviations**2 / trials)
    ways = [lgamma(trials + 1) - lgamma(k + 1) - lgamma(trials - k + 1) for k in range(successes, trials + 1)]

    def seen(part: int) -> float:
        rate = part / _PARTS
        one, other = log(rate), log1p(-rate)
        return sum(exp(way + k * one + (trials - k) * other) for k, way in enumerate(ways, successes))

    return (1 + bisect_left(range(1, _PARTS), quantile, key=seen)) / _PARTS


def chance(base: Count, arm: Count) -> float:
    """Fisher's exact test: the chance that, of all that differ in both, so few or fewer fall on the arm by luck."""
    (in_base, base_trials), (in_arm, arm_trials) = base, arm
    both = in_base + in_arm
    ways = sum(comb(arm_trials, k) * comb(base_trials, both - k) for k in range(in_arm + 1))
    return ways / comb(base_trials + arm_trials, both)


def fewer(base: Count, arm: Count, *, level: float = ONE_OF_MANY) -> bool:
    """Whether the arm differs less often than the base, by more than luck explains; with too few trials it does not."""
    return base[1] > 0 and arm[1] >= FEWEST and chance(base, arm) <= level


def trials_needed(base: Count, *, level: float = ONE_OF_MANY) -> int:
    """Trials that an arm without any difference needs for :func:`fewer` to hold against this base: 3 where 20 of 20
    differ, 1980 where 1 of 20 does.

    Raises:
        ValueError: nothing differs in the base, so that no arm can differ less often.
    """
    if base[0] <= 0:
        raise ValueError("no number of trials shows that an arm differs less often than a base that never differs")
    return bisect_left(range(2**20), True, key=lambda trials: fewer(base, (0, trials), level=level))


def sure_count(arm: ExperimentResult) -> Count:
    """How many outcomes surely differ from the commonest one, of the trials of an arm.

    All trials are compared with one first outcome. Where that happened to be a rare one, all differ from it and agree
    with each other: 20 of 20 with 2 distinct outcomes is one odd outcome among 21, no more than 1 of 20 says. The
    commonest outcome is either the first, or holds at most all that differ but one of each other kind.
    """
    if arm.distinct < 2:  # not counted
        return arm.differing, arm.trials
    return _from_commonest(arm.differing, arm.trials, arm.distinct), arm.trials


def _from_commonest(differing: int, trials: int, distinct: int) -> int:
    return min(differing, trials - differing + distinct - 1)


def trials_to_see(counts: RunCounts | None, *, asked: int, times: int) -> int:
    """Trials in which a difference is looked for: ``asked``, or as many runs as showed it so many ``times`` in the
    sweep that ``counts`` tells of, up to ``MOST_TRIALS``. With 10 times, it stays hidden by luck once in 20,000."""
    if counts is None or not counts.differing:
        return asked
    sure = _from_commonest(counts.differing, counts.compared, counts.distinct)
    return max(asked, min(times * counts.compared // max(1, sure), MOST_TRIALS))


def arm_length(base: ExperimentResult, *, asked: int) -> int:
    """Trials that arms need beside this base: as many as were asked for, and where its difference is rare so many that
    one which removes it can show that, up to ``MOST_TRIALS``."""
    sure = sure_count(base)
    return max(asked, min(trials_needed(sure), MOST_TRIALS)) if sure[0] else asked


def is_rare(arm: ExperimentResult) -> bool:
    """Whether at most one in ten outcomes differs from the usual one, so that there is a usual one."""
    return arm.differing * 10 <= arm.trials


class Effect(Enum):
    """What an experiment did to a difference, in a reader's words."""

    ABSENT = "there was none"
    NOT_RUN = "not run"
    REMOVED = "gone"
    SEEMS = "gone, but too few trials to be sure"
    LOWERED = "rarer, still there"
    STAYS = "still differs"


def _luck(base: ExperimentResult, arm: ExperimentResult) -> float:
    """The chance of so few differences in the arm if it changes nothing. Where more differ from the first outcome
    than surely differ from the commonest, the first was another than that, which has a chance of its own."""
    sure, trials = sure_count(base)
    odd_first = sure / (trials + 1) if sure < base.differing else 1.0
    return odd_first * chance((sure, trials), (arm.differing, arm.trials))


def effect_of(base: ExperimentResult, arm: ExperimentResult) -> Effect:
    """What ``arm`` did to the difference that ``base`` shows. A difference that became rarer is not gone: another
    mechanism is left, or the change missed a part of it."""
    if not base.differing:
        return Effect.ABSENT
    if not arm.ran:
        return Effect.NOT_RUN
    level = ONE_OF_FEW if arm.on == "process" else ONE_OF_MANY
    sure = arm.trials >= FEWEST and _luck(base, arm) <= level
    if not arm.differing:
        return Effect.REMOVED if sure else Effect.SEEMS
    return Effect.LOWERED if sure else Effect.STAYS


# ------------------------------------------------------------------------------------- numbers of a diagnosis


def rate_of_evidence(evidence: Evidence) -> Rate | None:
    """How often the difference shows again: in replays of the captured call where it does there, else in pairs of this
    process, else in pairs of fresh processes."""
    for base in (one for one in EXPERIMENTS.values() if one.rate_of):
        arm = evidence.arm(base.name, *base.on)
        if arm.differing:
            return rate_of(arm.differing, arm.trials, distinct=arm.distinct, of=base.rate_of)
    return None


def rate_of_runs(counts: RunCounts | None) -> Rate | None:
    """How often the runs of the sweep differ from the first; for runs that all agree, what that allows."""
    if counts is None:
        return None
    return rate_of(counts.differing, counts.compared, distinct=counts.distinct, of="runs")


def deterministic_here(evidence: Evidence) -> str:
    """What the captured call did under ``torch.use_deterministic_algorithms(True)``, memory left unfilled."""
    arm = evidence.arm("deterministic", "call")
    if not arm.ran:
        return arm.note if arm.raised else ""
    outcome = "still differs" if arm.differing else "identical"
    return f"{outcome} ({arm.differing} of {arm.trials} replays differ)"


def deterministic_price(evidence: Evidence) -> float | None:
    """Time of the call with deterministic algorithms over its time without; ``None`` where either was not measured."""
    on, off = evidence.arm("deterministic", "call"), evidence.arm("nondeterministic", "call")
    if not on.ran or not off.ran or not on.seconds or not off.seconds:
        return None
    return on.seconds / off.seconds
