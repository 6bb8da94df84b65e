"""Numbers that follow from evidence: where a rate comes from, and what the deterministic kernels did and cost."""

from __future__ import annotations

import pytest

from hashbench.causes import stats
from hashbench.records import Evidence, ExperimentResult, RunCounts

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
