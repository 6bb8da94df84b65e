"""The cause and the advice, from results of experiments alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hashbench.core.records import Decision, ExperimentResult
from hashbench.extensions.invariance.cause import ItemEvidence, MeasuredRemedy, decide
from hashbench.extensions.invariance.experiments import diagnose_item_call
from hashbench.extensions.invariance.item_call import ItemCall
from hashbench.extensions.invariance.layout import ItemAxis

FIRST = ItemAxis(0)


ROWS = 1 / torch.arange(1.0, 241.0).reshape(8, 30)


def rarely(rows: torch.Tensor) -> torch.Tensor:
    """A number of each row, seldom another: nearly every seed gives the same, another number of rows does not."""
    return rows.sum(1) * (1 + (torch.rand(rows.shape[0]) < 1e-9)) * (1.0 if len(rows) > 7 else 1.5)


def diagnosed(function: Callable[..., Any], *, rows: torch.Tensor = ROWS) -> tuple[ItemEvidence, Decision]:
    evidence = diagnose_item_call(ItemCall(function, (rows,), {}, len(rows), (FIRST,), (FIRST,)))
    return evidence, decide(evidence)


def arm(name: str, differing: int, trials: int) -> ExperimentResult:
    return ExperimentResult(name, "items", trials, differing)


STEADY, NUMBERS = arm("same_items", 0, 3), arm("other_number", 5, 7)


@pytest.mark.parametrize(
    ("arms", "cause", "confidence"),
    [
        ((), "unknown", "open"),
        ((STEADY,), "unknown", "open"),
        ((arm("same_items", 1, 3), NUMBERS, arm("other_content", 9, 9)), "unknown", "open"),
        ((STEADY, NUMBERS, arm("other_content", 0, 9)), "shape_dependent_kernel", "proven"),
        ((STEADY, NUMBERS), "shape_dependent_kernel", "likely"),
        ((STEADY, arm("other_number", 0, 7), arm("other_places", 1, 4)), "shape_dependent_kernel", "likely"),
        ((STEADY, NUMBERS, arm("other_content", 1, 9)), "batch_coupling", "proven"),
        ((arm("other_content", 1, 9),), "batch_coupling", "likely"),
    ],
    ids=str,
)
def test_the_cause(arms: tuple[ExperimentResult, ...], cause: str, confidence: str) -> None:
    decision = decide(ItemEvidence(8, arms))

    assert (decision.cause, decision.confidence) == (cause, confidence)
    assert decision.because
    assert decision.advice.endswith(".")
    assert "{" not in decision.advice


SEEDED = {"random": True, "follows_seed": True}


@pytest.mark.parametrize(
    ("arms", "more", "cause", "confidence"),
    [
        ((STEADY, NUMBERS, arm("other_content", 1, 9)), SEEDED, "batch_coupling", "proven"),
        ((STEADY, NUMBERS, arm("other_content", 0, 9)), SEEDED | {"placed": True}, "batch_coupling", "proven"),
        ((STEADY, NUMBERS, arm("other_content", 0, 9)), SEEDED, "batch_coupling", "likely"),
        ((NUMBERS, arm("other_content", 0, 9)), SEEDED | {"placed": True}, "batch_coupling", "likely"),
        ((STEADY, arm("other_number", 0, 7), arm("other_content", 0, 9)), SEEDED, "unknown", "open"),
        ((STEADY, arm("other_places", 4, 4)), SEEDED | {"placed": True, "moved": True}, "batch_coupling", "proven"),
        ((STEADY, NUMBERS, arm("other_places", 0, 4)), SEEDED | {"moved": True}, "unknown", "open"),
        ((STEADY, NUMBERS, arm("other_content", 0, 9)), {"random": True}, "shape_dependent_kernel", "likely"),
    ],
    ids=["content", "placed", "mixed", "unsteady", "same", "moved", "in its place", "no matter which"],
)
def test_random_numbers_by_number_of_items_are_coupling(arms, more, cause, confidence) -> None:
    """The generator begins anew for each repetition: what other content changes is not drawn."""
    decision = decide(ItemEvidence(8, arms, **more))
    assert (decision.cause, decision.confidence) == (cause, confidence)
    drawn = "draws random numbers" in decision.because or "gets other numbers" in decision.because
    assert decision.advice.startswith("Draw for each item") == drawn


def test_draws_are_not_blamed_if_no_seed_matters() -> None:
    evidence, decision = diagnosed(rarely)
    assert (evidence.random, evidence.follows_seed) == (True, False)
    assert (decision.cause, decision.confidence) == ("shape_dependent_kernel", "likely")


def test_advice_lists_measured_remedies_cheapest_first() -> None:
    remedies = (
        MeasuredRemedy("pad the batch to 8 items", 4, 0, 3.04, "one item"),
        MeasuredRemedy("compute without oneDNN", 4, 1, 0.5),
        MeasuredRemedy("compute with one thread", 4, 0, 1.5),
        MeasuredRemedy("compute with prayers", 0, 0),
    )
    arms = (STEADY, NUMBERS, arm("other_content", 0, 9))

    assert decide(ItemEvidence(8, arms, remedies=remedies)).advice.endswith(
        ": compute with one thread (1.5x the time) or pad the batch to 8 items (3x the time of one item)."
    )
