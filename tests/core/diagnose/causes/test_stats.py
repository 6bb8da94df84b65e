"""What counts prove, against published values, against scipy's own tests, and by simulation of what must not happen."""

from __future__ import annotations

import random

import pytest

from hashbench.core.diagnose.causes import stats
from hashbench.core.diagnose.causes.stats import (
    ONE_OF_FEW,
    Effect,
    chance,
    effect_of,
    fewer,
    rate_of,
    sure_count,
    trials_needed,
)
from hashbench.core.records import Evidence, ExperimentResult, RunCounts


def arm(differing: int, trials: int, *, distinct: int = 0, on: str = "call") -> ExperimentResult:
    return ExperimentResult(
        "an arm", on, trials=trials, differing=differing, distinct=distinct, note="" if trials else "budget"
    )


@pytest.mark.parametrize(
    ("differing", "trials", "low", "high"),
    [
        pytest.param(0, 19, 0.0, 0.1459, id="none of 19: the rule that 20 identical runs allow 14.6 %"),
        pytest.param(0, 1, 0.0, 0.95, id="none of one says almost nothing"),
        pytest.param(20, 20, 0.8609, 1.0, id="all of 20"),
        pytest.param(1, 20, 0.0013, 0.2487, id="one of 20"),
        pytest.param(10, 20, 0.2720, 0.7280, id="half"),
        pytest.param(4, 10, 0.1216, 0.7376, id="4 of 10, a textbook's example"),
    ],
)
def test_a_rate_has_its_clopper_pearson_bounds(differing: int, trials: int, low: float, high: float) -> None:
    rate = rate_of(differing, trials, distinct=differing + 1, of="runs")

    assert (rate.low, rate.high) == pytest.approx((low, high), abs=5e-5)
    assert rate.low <= rate.share <= rate.high
    assert (rate.differing, rate.trials, rate.of, rate.distinct) == (differing, trials, "runs", differing + 1)


@pytest.mark.slow
def test_bounds_are_those_of_scipy() -> None:
    from scipy.stats import binomtest

    for differing, trials in ((1, 7), (3, 20), (119, 120), (700, 2000), (1, 10_000), (9_000, 10_000)):
        rate = rate_of(differing, trials, distinct=2, of="replays")
        exact = binomtest(differing, trials).proportion_ci(0.95)
        assert (rate.low, rate.high) == pytest.approx((exact.low, exact.high), rel=1e-9)


def test_a_count_that_no_experiment_reaches_has_bounds_at_once() -> None:
    from scipy.stats import binomtest

    for differing, trials in ((40, 20_000), (10**8, 10**9)):
        rate = rate_of(differing, trials, distinct=2, of="replays")
        exact = binomtest(differing, trials).proportion_ci(0.95)
        assert (rate.low, rate.high) == pytest.approx((exact.low, exact.high), abs=1e-4)


def test_a_rate_in_a_row_still_tells_its_count() -> None:
    for trials in (*range(1, 400), 2000, 99_999):
        for differing in {0, 1, trials // 3, trials - 1, trials}:
            share = stats.significant(differing / trials, stats.RATE_DIGITS)
            assert share is not None
            assert (round(share * trials), share >= 1) == (differing, differing == trials)


@pytest.mark.parametrize(("differing", "trials"), [(0, 0), (3, 2), (-1, 5)])
def test_what_is_no_count_has_no_rate(differing: int, trials: int) -> None:
    with pytest.raises(ValueError, match="not a count"):
        rate_of(differing, trials, distinct=1, of="runs")


def test_the_chance_is_fishers_exact_test() -> None:
    from scipy.stats import fisher_exact

    for (a, n), (b, m) in (((20, 20), (0, 20)), ((7, 20), (2, 30)), ((1, 20), (0, 400)), ((5, 5), (5, 5))):
        expected = fisher_exact([[b, m - b], [a, n - a]], alternative="less").pvalue
        assert chance((a, n), (b, m)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("base", "other", "holds"),
    [
        pytest.param((20, 20), (0, 20), True, id="always against never"),
        pytest.param((7, 20), (0, 20), True, id="a third against never"),
        pytest.param((5, 20), (0, 20), False, id="a quarter against never in 20"),
        pytest.param((1, 20), (0, 20), False, id="one in twenty against never in 20"),
        pytest.param((1, 20), (0, 1979), False, id="one in twenty against never, one trial short"),
        pytest.param((1, 20), (0, 1980), True, id="one in twenty against never, long enough"),
        pytest.param((20, 20), (18, 20), False, id="a little less often"),
        pytest.param((20, 20), (10, 20), True, id="half as often"),
        pytest.param((0, 20), (0, 20), False, id="never against never"),
        pytest.param((0, 20), (5, 20), False, id="more often"),
        pytest.param((228, 228), (0, 2), False, id="two trials are no experiment"),
        pytest.param((228, 228), (0, 3), True, id="three are"),
        pytest.param((20, 20), (0, 0), False, id="an arm that was not run"),
        pytest.param((0, 0), (0, 20), False, id="a base that was not run"),
    ],
)
def test_fewer(base: tuple[int, int], other: tuple[int, int], holds: bool) -> None:
    assert fewer(base, other) is holds


@pytest.mark.parametrize("base", [(20, 20), (10, 20), (3, 20), (1, 20), (6, 119), (1, 1), (4, 4), (37, 1000)])
@pytest.mark.parametrize("level", [0.01, 0.05])
def test_the_trials_needed_are_enough_and_one_less_is_not(base: tuple[int, int], level: float) -> None:
    needed = trials_needed(base, level=level)

    assert fewer(base, (0, needed), level=level)
    assert not fewer(base, (0, needed - 1), level=level)


def test_no_arm_can_differ_less_often_than_never() -> None:
    with pytest.raises(ValueError, match="never differs"):
        trials_needed((0, 20))


@pytest.mark.parametrize(
    ("base", "count"),
    [
        pytest.param(arm(20, 20, distinct=21), (20, 20), id="always another outcome"),
        pytest.param(arm(20, 20, distinct=2), (1, 20), id="all differ from the first and agree with each other"),
        pytest.param(arm(20, 20, distinct=5), (4, 20), id="all differ from the first and most may agree"),
        pytest.param(arm(10, 20, distinct=2), (10, 20), id="two outcomes, half and half"),
        pytest.param(arm(15, 20, distinct=2), (6, 20), id="two outcomes, the first is the rarer one"),
        pytest.param(arm(1, 20, distinct=2), (1, 20), id="one odd outcome"),
        pytest.param(arm(0, 20, distinct=1), (0, 20), id="all agree"),
        pytest.param(arm(3, 3), (3, 3), id="outcomes were not counted"),
    ],
)
def test_the_count_that_does_not_hang_on_the_first_outcome(base: ExperimentResult, count: tuple[int, int]) -> None:
    assert sure_count(base) == count


@pytest.mark.parametrize(
    ("base", "other", "effect"),
    [
        pytest.param(arm(20, 20, distinct=21), arm(0, 20), Effect.REMOVED, id="gone"),
        pytest.param(arm(20, 20, distinct=21), arm(4, 20), Effect.LOWERED, id="rarer but there"),
        pytest.param(arm(20, 20, distinct=21), arm(20, 20), Effect.STAYS, id="as before"),
        pytest.param(arm(1, 20, distinct=2), arm(0, 20), Effect.SEEMS, id="rare, and gone in too few trials"),
        pytest.param(arm(20, 20, distinct=2), arm(0, 20), Effect.SEEMS, id="the first outcome was the odd one"),
        pytest.param(arm(270, 300, distinct=12), arm(0, 28), Effect.REMOVED, id="a dozen outcomes, none common"),
        pytest.param(arm(15, 20, distinct=2), arm(0, 20), Effect.REMOVED, id="two outcomes, the first the rarer one"),
        pytest.param(arm(228, 228, distinct=229), arm(0, 2), Effect.SEEMS, id="two trials are no experiment"),
        pytest.param(arm(20, 20), arm(0, 0), Effect.NOT_RUN, id="not run"),
        pytest.param(arm(0, 20), arm(0, 20), Effect.ABSENT, id="there was nothing to remove"),
        pytest.param(arm(0, 0), arm(0, 20), Effect.ABSENT, id="the base was not run"),
        pytest.param(arm(4, 4), arm(0, 3), Effect.SEEMS, id="four pairs are few among a dozen arms"),
        pytest.param(
            arm(4, 4), arm(0, 3, on="process"), Effect.REMOVED, id="four fresh processes are enough for two arms"
        ),
        pytest.param(arm(2, 2), arm(0, 2, on="process"), Effect.SEEMS, id="two fresh processes are not"),
    ],
)
def test_what_an_arm_did(base: ExperimentResult, other: ExperimentResult, effect: Effect) -> None:
    assert effect_of(base, other) is effect


@pytest.mark.parametrize("rate", [0.05, 0.1, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("others", [1, 3, 10**9], ids=["two outcomes", "four outcomes", "ever new outcomes"])
def test_arms_that_do_nothing_are_seldom_blamed(rate: float, others: int) -> None:
    """A kernel that leaves its commonest outcome at some rate; twelve arms that change nothing. At most 5 % of
    diagnoses may call one of them a remedy."""
    draw = random.Random(1337)
    blamed, diagnoses = 0, 1000
    for _ in range(diagnoses):
        base = _replayed(draw, rate, others)
        blamed += any(effect_of(base, _replayed(draw, rate, others)) is Effect.REMOVED for _ in range(12))

    assert blamed / diagnoses <= 0.05


def _replayed(draw: random.Random, rate: float, others: int, trials: int = 20) -> ExperimentResult:
    outcomes = [draw.randint(1, others) if draw.random() < rate else 0 for _ in range(trials + 1)]
    differing = sum(outcome != outcomes[0] for outcome in outcomes)
    return arm(differing, trials, distinct=len(set(outcomes)))


def test_few_processes_have_their_own_level() -> None:
    assert trials_needed((4, 4), level=ONE_OF_FEW) == 3
    assert trials_needed((3, 3), level=ONE_OF_FEW) == 3


# ----------------------------------------------------------------------------------------------- numbers of a diagnosis

REPEAT = ExperimentResult("repeat", "call", 20, 5, 3)
PAIR = ExperimentResult("pair", "pair", 10, 4, 2)
WITHIN = ExperimentResult("within_process", "process", 4, 4, 5)
AGREEING_REPEAT = ExperimentResult("repeat", "call", 200, 0, 1)
AGREEING_PAIR = ExperimentResult("pair", "pair", 20, 0, 1)


@pytest.mark.parametrize(
    ("arms", "expected"),
    [
        pytest.param((REPEAT, PAIR, WITHIN), ("replays", 5, 20, 3), id="replays that differ come first"),
        pytest.param((AGREEING_REPEAT, PAIR), ("pairs", 4, 10, 2), id="pairs where no replay differs"),
        pytest.param((AGREEING_PAIR, WITHIN), ("processes", 4, 4, 5), id="processes where no pair here differs"),
        pytest.param((AGREEING_REPEAT, AGREEING_PAIR), None, id="nothing differed again"),
        pytest.param((), None, id="no experiment"),
    ],
)
def test_rate_comes_from_where_the_difference_shows(
    arms: tuple[ExperimentResult, ...], expected: tuple[str, int, int, int] | None
) -> None:
    found = stats.rate_of_evidence(Evidence("kernel", arms=arms))
    assert (found and (found.of, found.differing, found.trials, found.distinct)) == expected


def test_runs_that_all_agree_leave_a_rate_possible() -> None:
    found = stats.rate_of_runs(RunCounts(compared=19, differing=0, distinct=1))
    assert found is not None
    assert (found.of, found.share, found.low) == ("runs", 0.0, 0.0)
    assert found.high == pytest.approx(0.1459, abs=1e-4)


def test_a_model_that_never_ran_twice_has_no_rate() -> None:
    assert stats.rate_of_runs(None) is None


def deterministic(**fields: object) -> Evidence:
    return Evidence(
        "kernel",
        arms=(
            ExperimentResult("deterministic", "call", **fields),
            ExperimentResult("nondeterministic", "call", 20, 20, 21, 0.5),
        ),
    )  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "text", "price"),
    [
        pytest.param({"trials": 20, "seconds": 1.0}, "identical (0 of 20 replays differ)", 2.0, id="it helps"),
        pytest.param(
            {"trials": 20, "differing": 3, "seconds": 0.5},
            "still differs (3 of 20 replays differ)",
            1.0,
            id="it does not",
        ),
        pytest.param(
            {"note": "raises: no deterministic", "raised": True}, "raises: no deterministic", None, id="it raises"
        ),
        pytest.param({"note": "budget"}, "", None, id="it was not tried"),
    ],
)
def test_what_deterministic_algorithms_did_and_cost(fields: dict[str, object], text: str, price: float | None) -> None:
    evidence = deterministic(**fields)
    assert (stats.deterministic_here(evidence), stats.deterministic_price(evidence)) == (text, price)
