"""How evidence is read and put in words: few outcomes, advice, experiments that ran out of time."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from hashbench.core.catalog import CAUSES, EXPERIMENTS, Origin, Role
from hashbench.core.diagnose.causes import cut_short, decide, with_more_time
from hashbench.core.diagnose.causes.evidence import (
    all_words,
    base_of,
    counted,
    effect,
    few_outcomes,
    in_words_of,
    pick,
    removes,
)
from hashbench.core.diagnose.causes.stats import Effect
from hashbench.core.records import CallFacts, Evidence, ExperimentResult
from tests.core.diagnose.causes.evidence_helpers import (
    ALWAYS,
    EVERYWHERE,
    INSIDE,
    NEVER,
    PAIR,
    RARE,
    beginning,
    kernel,
    seen,
)
from tests.experiment_texts import result

FEW = {
    "two of 20": ("call/repeat 10/20~2", True),
    "five of 20": ("call/repeat 15/20~5", True),
    "six of 20": ("call/repeat 15/20~6", False),
    "four of 8, which may all be new": ("call/repeat 6/8~4", False),
    "two of 4": ("call/repeat 2/4~2", True),
    "forty of 320, which come again but are no choice among a few": ("call/repeat 300/320~40", False),
    "none": ("call/repeat (budget)", False),
}


@pytest.mark.parametrize(("text", "few"), FEW.values(), ids=FEW)
def test_a_few_outcomes_come_again(text: str, few: bool) -> None:
    assert few_outcomes(result(text)) is few


OUTCOMES = (None, "0/20", "20/20", "5/20~2", "(raises: no such kernel)")
"""Of an experiment: not made, gone, still there, rarer, refused."""


FACTS: Sequence[dict[str, Any]] = (
    {},
    {"custom": True},
    {"overlap": True},
    {"same_values": True},
    {"chosen_values": True},
    {"tied_places": True},
    {"allocation": True},
    {"representation": "sign of zero"},
)


def all_evidence(seed: int, count: int) -> Iterator[Evidence]:
    """Evidence with any outcome of any experiment, of any origin: every combination has the same chance."""
    drawn = random.Random(seed)
    steadying = [place for place in EVERYWHERE if place[1] != "items" and EXPERIMENTS[place[0]].role is not Role.BASE]
    for _ in range(count):
        made = drawn.sample(steadying, drawn.randrange(1, len(steadying)))
        outcomes = [(f"{on}/{name}", drawn.choice(OUTCOMES)) for name, on in made]
        bases = drawn.choice(
            ((ALWAYS, PAIR, INSIDE), (NEVER, PAIR, INSIDE), (RARE,), ("repeat 0/20", "pair/pair 0/20"))
        )
        facts: dict[str, Any] = {"opaque_producer": drawn.random() < 0.2, "steered": drawn.random() < 0.3}
        facts["reordered"] = drawn.random() < 0.3
        call = CallFacts("aten.some_op.default", **drawn.choice(FACTS))
        origin = drawn.choice([*Origin, *[Origin.KERNEL] * 6])
        yield seen(origin, *bases, *(f"{place} {text}" for place, text in outcomes if text), call=call, **facts)


def refuted(evidence: Evidence, tests: Sequence[str]) -> list[ExperimentResult]:
    """The experiments of a remedy, where each that was made still shows the difference."""
    made = [arm for arm in evidence.arms if (arm.ran or arm.raised) and arm.name in tests]
    return made if all(arm.differing or arm.raised for arm in made) else []


@pytest.mark.slow
def test_no_refuted_remedy_is_recommended() -> None:
    """Not helped: each experiment that does the same and was made still differs, or raised."""
    left_out: Counter[str] = Counter()
    for evidence in all_evidence(7, 4_000):
        decision = decide(evidence)
        cause, advice = CAUSES[decision.cause], decision.advice.lower()
        for remedy in cause.remedies:
            against = refuted(evidence, remedy.tests)
            assert not (against and beginning(remedy) in advice), (decision, against)
            left_out[cause.name] += bool(against)
        named = re.search(r"\((generator[^)]*|clock[^)]*|file[^)]*|entropy[^)]*)\)", advice)
        for source in cause.sources if named else ():
            against = refuted(evidence, source.tests)
            assert not (against and re.search(rf"\b{source.clause}\b", named[1] if named else "")), (decision, against)
    testable = {name for name, cause in CAUSES.items() if any(remedy.tests for remedy in cause.remedies)}
    assert {name for name, times in left_out.items() if times} == testable


def test_advice_lists_measurements_where_nothing_helped() -> None:
    decision = decide(kernel(ALWAYS, "copied_sources 8/20", "one_thread 0/20", overlap=True))
    assert decision.cause == "overlapping_views"
    assert decision.advice.startswith(
        "No usual remedy makes it go away here (8 of 20 replays with aliased inputs copied first"
    )


def test_threads_that_draw_are_told_to_be_joined_in_order() -> None:
    decision = decide(seen("rng", PAIR, "pair/generators 5/5", "pair/one_worker 0/20"))
    assert (decision.cause, decision.confidence) == ("call_order", "proven")
    assert "eset" not in decision.advice
    assert decision.advice.startswith("Join the results of threads")


def test_changed_inputs_are_not_told_to_be_seeded() -> None:
    decision = decide(seen("input", PAIR, INSIDE, "process/fresh_process 0/3"))
    assert (decision.cause, decision.confidence) == ("surviving_state", "proven")
    assert "eed" not in decision.advice.replace("need", "")


ENDED = {
    "an order of a set that was not told from a surviving state": (
        seen("outside", PAIR, INSIDE, "process/fresh_process 3/3", "process/fixed_order (budget)"),
        ["process/fixed_order"],
    ),
    "too few replays": (kernel(ALWAYS, "exact_values (budget)", "one_thread 0/20"), ["call/exact_values"]),
    "nothing but lack of time": (
        seen("kernel", "call/repeat (budget)", "pair/pair (budget)"),
        ["call/repeat", "pair/pair"],
    ),
    "proven all the same": (kernel(ALWAYS, "exact_values 0/20", "one_thread 0/20", "clocks (budget)"), []),
    "no time was lacking": (seen("outside", PAIR, INSIDE, "process/fresh_process 3/3"), []),
    "not made for another reason": (seen("outside", PAIR, "process/fresh_process (only models of a suite)"), []),
}


@pytest.mark.parametrize(("evidence", "places"), ENDED.values(), ids=ENDED)
def test_experiments_cut_short_are_named_unless_proven(evidence: Evidence, places: list[str]) -> None:
    decision = decide(evidence)
    limited = cut_short(evidence.arms, decision.confidence)
    assert [result.place for result in limited] == places
    sentence = f"the time for experiments ended before these were complete: {', '.join(places)}"
    assert decision.because.endswith(sentence) == bool(places)
    advice = with_more_time(decision.advice, limited, flag="--budget")
    assert advice.startswith(
        "The time for experiments ended before the cause was certain: give them more (--budget). "
    ) == bool(places)
    assert advice.endswith(decision.advice)


@pytest.mark.parametrize(
    ("arms", "advice"),
    [
        pytest.param(["pair/generators 0/20 [noise.DRAW]"], "Reset noise.DRAW at the start", id="put back"),
        pytest.param(["pair/generators 20/20", "pair/entropy 0/20"], "Seed the generator with a fixed", id="entropy"),
    ],
)
def test_advice_for_a_generator_is_what_helped(arms: list[str], advice: str) -> None:
    assert decide(seen("rng", PAIR, *arms)).advice.startswith(advice)


@pytest.mark.parametrize(
    ("seconds", "price"),
    [(0.018, "at no cost that could be measured"), (0.051, "which takes about 5x as long")],
)
def test_advice_has_the_price_of_determinism(seconds: float, price: str) -> None:
    evidence = kernel(ALWAYS, "exact_values 0/20", "one_thread 0/20")
    on = ExperimentResult("deterministic", "call", 20, 0, 1, seconds=seconds)
    off = ExperimentResult("nondeterministic", "call", 20, 20, 21, seconds=0.01)
    said = decide(replace(evidence, arms=(*evidence.arms, on, off))).advice
    assert said.endswith(f"; torch.use_deterministic_algorithms(True) makes it identical here, {price}.")


def test_filled_memory_only_hides_unwritten_memory() -> None:
    arms = (ALWAYS, "poison 20/20", "deterministic 20/20", "deterministic_fill 0/20")

    assert decide(kernel(*arms)).advice.endswith("only hides it, by filling fresh memory.")


# ------------------------------------------------------------------------------------ baselines, effects and words


@pytest.mark.parametrize(
    ("place", "texts", "expected"),
    [
        pytest.param(("one_thread", "call"), [ALWAYS], "call/repeat", id="of a call"),
        pytest.param(("clocks", "pair"), [PAIR], "pair/pair", id="of a pair"),
        pytest.param(("fresh_process", "process"), [PAIR, INSIDE], "process/within_process", id="of a process"),
        pytest.param(("fresh_process", "process"), [PAIR], "pair/pair", id="of processes with one run"),
        pytest.param(
            ("fixed_order", "process"),
            [INSIDE, "process/fresh_process 3/3"],
            "process/fresh_process",
            id="of a fixed order",
        ),
    ],
)
def test_the_baseline_of_an_experiment(place: tuple[str, str], texts: list[str], expected: str) -> None:
    assert base_of(seen("outside", *texts), *place).place == expected


def test_a_difference_gone_by_itself_is_removed_by_nothing() -> None:
    both = seen("outside", PAIR, "pair/entropy 0/20", "pair/clocks 0/20")
    assert effect(both, "entropy", "pair") is Effect.SEEMS
    assert not removes(both, "clocks", "pair")
    assert removes(seen("outside", PAIR, "pair/entropy 5/5", "pair/clocks 0/20"), "clocks", "pair")


@pytest.mark.parametrize(
    ("texts", "picked"),
    [
        pytest.param([PAIR, "pair/entropy 20/20", "pair/clocks 0/20"], ("clocks", "proven"), id="the one that removes"),
        pytest.param(["pair/pair 1/20", "pair/entropy 0/20"], ("entropy", "likely"), id="the only one that seems to"),
        pytest.param(["pair/pair 1/20", "pair/entropy 0/20", "pair/clocks 0/20"], None, id="several that seem to"),
        pytest.param([PAIR, "pair/entropy 20/20"], None, id="none"),
    ],
)
def test_the_experiment_that_explains(texts: list[str], picked: tuple[str, str] | None) -> None:
    found = pick(seen("outside", *texts), [("entropy", "pair"), ("clocks", "pair")])
    assert (found and (found[0].name, str(found[1]))) == picked


def test_results_are_said_with_their_unit_once() -> None:
    known = kernel(ALWAYS, "one_thread 0/20", "exact_values (raises: no such kernel)")
    assert in_words_of(known, ("one_thread", "call"), ("exact_values", "call")) == (
        "20 of 20 unmodified replays differ; 0 of 20 with one thread"
    )
    assert counted(known.arm("one_thread", "call")) == "0 of 20 replays with one thread"
    assert all_words(known).startswith("call/repeat 20/20, call/one_thread 0/20, call/exact_values ")
