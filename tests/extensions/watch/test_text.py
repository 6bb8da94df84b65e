"""Which further look ``hashbench watch diff`` proposes; its words are held by golden files."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hashbench.core.divergence import find
from hashbench.extensions.watch.text import finding_of, next_look
from hashbench.extensions.watch.traced import TracedSteps
from tests.core.divergence.runs import Run
from tests.extensions.watch.test_compare import recording
from tests.extensions.watch.watch_texts import LOOPS, RACE, verdict


def test_what_was_not_judged_is_not_equal_and_settings_alone_are() -> None:
    equal = {name for name, loop in LOOPS.items() if loop.equal}
    assert equal == {"equal runs", "a difference that did not come again", "settings that nothing follows"}


def test_no_trace_is_proposed_of_a_model_that_is_not_called() -> None:
    first, second = recording("a"), recording("b", {6: {"gradient": {"c.weight": "x"}}})
    for one in (first, second):
        for step in one.steps.values():
            del step.parts["batch"]  # type: ignore[attr-defined]
    assert next_look(verdict(first, second)) == []


def test_a_trace_begins_with_a_step_in_which_the_model_is_called() -> None:
    """Optimizers that step within the backward pass make several steps of one call."""
    first, second = recording("a"), recording("b", {6: {"gradient": {"c.weight": "x"}}})
    for one in (first, second):
        for number in (5, 6):
            del one.steps[number].parts["batch"]  # type: ignore[attr-defined]
    assert "HASHBENCH_TRACE_STEP=4:7" in next_look(verdict(first, second))[0]


@pytest.mark.parametrize(
    ("traced", "command"),
    [
        (None, "TRACE_STEP=9:11"),
        ((2, 3), "TRACE_STEP=9:11"),
        ((9, 10), "TRACE_STEP=8:11"),
        ((8, 10), ""),
    ],
)
def test_a_look_is_not_proposed_twice(traced: tuple[int, int] | None, command: str) -> None:
    """A trace of other steps helps nothing; after one that named no kernel the step before them is traced as well."""
    looked = () if traced is None else (TracedSteps(0, *traced, None, "it names none"),)
    commands = next_look(replace(RACE, traced=looked))
    assert bool(commands) == bool(command)
    assert command in "".join(commands)


@pytest.mark.parametrize(
    ("loop", "proposed"),
    [("another batch", True), ("a batch that one run lacks", False), ("another learning rate", False)],
)
def test_a_check_of_the_data_is_proposed_where_a_batch_differs_first(loop: str, proposed: bool) -> None:
    commands = finding_of(LOOPS[loop]).next
    assert any(command.startswith("hashbench pipeline check ") for command in commands) == proposed


@pytest.mark.parametrize(
    ("lines", "candidates", "advice"),
    [
        ("a = put input/0 => a|A", "accumulation order, write race and ", False),
        ("n = randperm rng=g|G -> n|N\na = mul n => a|A", "rng (no experiment was made)", True),
    ],
)
def test_a_traced_kernel_has_candidates_and_advice(lines: str, candidates: str, advice: bool) -> None:
    found = find(Run(lines).trace(), Run(lines, second=True).trace())
    (part,) = finding_of(replace(RACE, traced=(TracedSteps(0, 10, 10, found),))).parts
    facts = dict(part.facts)
    assert facts["candidates"].startswith(candidates)
    assert bool(facts.get("advice")) == advice
