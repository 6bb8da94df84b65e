"""Compute rates with confidence bounds, exact tests on counts, and the effect of an experiment on a difference.

Sources: C. J. Clopper and E. S. Pearson, "The use of confidence or fiducial limits illustrated in the case of the
binomial", Biometrika 26 (1934); R. A. Fisher's exact test, one-sided.
"""

from __future__ import annotations

from bisect import bisect_left
from enum import Enum
from math import comb, exp, lgamma, log, log1p, sqrt
from statistics import NormalDist

from hashbench.core.catalog import EXPERIMENTS
from hashbench.core.records import Evidence, ExperimentResult, Rate, RunCounts

ONE_OF_MANY = 0.01
"""Significance level of one arm where about a dozen are compared: replays of a call, pairs of runs. With 0.05 each, one
diagnosis in three would blame an arm without any effect."""

ONE_OF_FEW = 0.05
"""Significance level for runs in fresh processes: two arms are compared, and a trial costs seconds."""

FEWEST = 3
"""Fewer trials show nothing, however sure the baseline is."""

MOST_TRIALS = 2000
"""Upper limit of the trials of one arm, however rare the difference is."""

_PARTS = 2**40
"""Resolution of a bound between 0 and 1."""

Count = tuple[int, int]
"""Differing outcomes, and trials."""


def significant(number: float | None, digits: int = 4) -> float | None:
    """Round ``number`` to that many significant digits, as rows store measurements and estimates; ``None`` stays
    ``None``."""
    return None if number is None else float(f"{number:.{digits}g}")


RATE_DIGITS = 6
"""Significant digits of a rate in a row, from which its count is recovered: enough for 100 000 trials, and a rate below
1 stays below 1."""


def rate_of(differing: int, trials: int, *, distinct: int, of: str) -> Rate:
    """Return the rate of outcomes that differ from the first, with Clopper–Pearson bounds at 95 %.

    Where none or all differ, the whole 5 % lies on the one open side: 0 of 19 gives at most 0.146.

    Raises:
        ValueError: ``trials`` is not positive, or ``differing`` not between 0 and ``trials``.
    """
    if not 0 <= differing <= trials or trials == 0:
        raise ValueError(f"{differing} of {trials} is not a count of outcomes that differ")
    low = _bound(differing, trials - differing + 1, 0.05 if differing == trials else 0.025) if differing else 0.0
    high = _bound(differing + 1, trials - differing, 0.975 if differing else 0.95) if differing < trials else 1.0
    return Rate(differing=differing, trials=trials, of=of, low=low, high=high, distinct=distinct)


def _bound(successes: int, failures: int, quantile: float) -> float:
    """Return the quantile of a beta distribution with integer parameters, by its binomial sum: the rate at which
    ``successes`` or more are seen with that probability, in one trial fewer than both together.

    For counts beyond those of any experiment, which a file can claim, Wilson's approximation.
    """
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
        first, other = log(rate), log1p(-rate)
        return sum(exp(way + k * first + (trials - k) * other) for k, way in enumerate(ways, successes))

    return (1 + bisect_left(range(1, _PARTS), quantile, key=seen)) / _PARTS


def chance(base: Count, arm: Count) -> float:
    """Return the p-value of Fisher's exact test: the probability that the arm has this few of all differences by
    chance."""
    (in_base, base_trials), (in_arm, arm_trials) = base, arm
    both = in_base + in_arm
    ways = sum(comb(arm_trials, k) * comb(base_trials, both - k) for k in range(in_arm + 1))
    return ways / comb(base_trials + arm_trials, both)


def fewer(base: Count, arm: Count, *, level: float = ONE_OF_MANY) -> bool:
    """Return True if the arm differs significantly less often than the baseline; never with fewer than ``FEWEST``
    trials."""
    return base[1] > 0 and arm[1] >= FEWEST and chance(base, arm) <= level


def trials_needed(base: Count, *, level: float = ONE_OF_MANY) -> int:
    """Return how many trials an arm without any difference needs for :func:`fewer` to hold: 3 where 20 of 20 of the
    baseline differ, 1980 where 1 of 20 does.

    Raises:
        ValueError: nothing differs in the baseline, so that no arm can differ less often.
    """
    if base[0] <= 0:
        raise ValueError("no number of trials shows that an arm differs less often than a base that never differs")
    return bisect_left(range(2**20), True, key=lambda trials: fewer(base, (0, trials), level=level))


def sure_count(arm: ExperimentResult) -> Count:
    """Return the number of outcomes that surely differ from the commonest one, and the trials of the arm.

    All trials are compared with one first outcome. If that happens to be a rare one, all differ from it and agree
    with each other: 20 of 20 with 2 distinct outcomes is one odd outcome among 21, which is no more than 1 of 20. The
    commonest outcome is either the first, or has at most all that differ but one of each other kind.
    """
    if arm.distinct < 2:  # not counted
        return arm.differing, arm.trials
    return _from_commonest(arm.differing, arm.trials, arm.distinct), arm.trials


def _from_commonest(differing: int, trials: int, distinct: int) -> int:
    return min(differing, trials - differing + distinct - 1)


def trials_to_see(counts: RunCounts | None, *, asked: int, times: int) -> int:
    """Return the trials in which to look for a difference: ``asked``, or as many runs as showed it ``times`` times in
    the sweep that ``counts`` describes, up to ``MOST_TRIALS``. With 10 times, it stays hidden by chance once in 20,000.
    """
    if counts is None or not counts.differing:
        return asked
    sure = _from_commonest(counts.differing, counts.compared, counts.distinct)
    return max(asked, min(times * counts.compared // max(1, sure), MOST_TRIALS))


def arm_length(base: ExperimentResult, *, asked: int) -> int:
    """Return the trials of the arms beside this baseline: ``asked``, or for a rare difference as many as an arm needs
    to show that it removes it, up to ``MOST_TRIALS``."""
    sure = sure_count(base)
    return max(asked, min(trials_needed(sure), MOST_TRIALS)) if sure[0] else asked


def is_rare(arm: ExperimentResult) -> bool:
    """Return True if at most one in ten outcomes differs, so that there is a usual one."""
    return arm.differing * 10 <= arm.trials


class Effect(Enum):
    """The effect of an experiment on a difference, in the words of a report."""

    ABSENT = "there was none"
    NOT_RUN = "not run"
    REMOVED = "gone"
    SEEMS = "gone, but too few trials to be sure"
    LOWERED = "rarer, still there"
    STAYS = "still differs"


def _luck(base: ExperimentResult, arm: ExperimentResult) -> float:
    """Return the probability of so few differences in the arm if it changes nothing.

    Where more differ from the first outcome than surely differ from the commonest, the first was an odd one, which has
    a probability of its own.
    """
    sure, trials = sure_count(base)
    odd_first = sure / (trials + 1) if sure < base.differing else 1.0
    return odd_first * chance((sure, trials), (arm.differing, arm.trials))


def effect_of(base: ExperimentResult, arm: ExperimentResult) -> Effect:
    """Return the effect of ``arm`` on the difference that ``base`` shows.

    A difference that became rarer is not gone: another mechanism is left, or the change missed a part of it.
    """
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
    """Return the rate at which the difference reproduces: in replays of the captured call if it does there, else in
    pairs of this process, else in pairs of fresh processes."""
    for base in (experiment for experiment in EXPERIMENTS.values() if experiment.rate_of):
        arm = evidence.arm(base.name, *base.on)
        if arm.differing:
            return rate_of(arm.differing, arm.trials, distinct=arm.distinct, of=base.rate_of)
    return None


def rate_of_runs(counts: RunCounts | None) -> Rate | None:
    """Return the rate at which the runs of the sweep differ from the first; if all agree, the upper bound."""
    if counts is None:
        return None
    return rate_of(counts.differing, counts.compared, distinct=counts.distinct, of="runs")


def deterministic_here(evidence: Evidence) -> str:
    """Describe the captured call under ``torch.use_deterministic_algorithms(True)``, memory left unfilled."""
    arm = evidence.arm("deterministic", "call")
    if not arm.ran:
        return arm.note if arm.raised else ""
    outcome = "still differs" if arm.differing else "identical"
    return f"{outcome} ({arm.differing} of {arm.trials} replays differ)"


def deterministic_price(evidence: Evidence) -> float | None:
    """Return the time of the call with deterministic algorithms over its time without; ``None`` unless both were
    measured."""
    on, off = evidence.arm("deterministic", "call"), evidence.arm("nondeterministic", "call")
    if not on.ran or not off.ran or not on.seconds or not off.seconds:
        return None
    return on.seconds / off.seconds
