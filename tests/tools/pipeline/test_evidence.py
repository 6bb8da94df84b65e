"""From two records to the evidence, and to the reason that it gives."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hashbench.tools.pipeline.comparing import compare
from hashbench.tools.pipeline.loading import NOT_LOADER
from hashbench.tools.pipeline.observed import (
    IMPORT,
    MOMENTS,
    BatchRecord,
    BatchRecords,
    LoaderWorker,
    Outputs,
    RandomState,
    TransformStep,
    Weights,
)
from tests.tools.pipeline.pipeline_helpers import (
    GENERATORS,
    batches,
    check,
    compared,
    loader,
    sample,
    seen,
    whole,
)

OTHER = {**GENERATORS, "torch": "t1"}


def test_batches_that_cannot_be_compared_are_not_said_to_be_equal() -> None:
    other = {"outputs": Outputs({"output": "float32[2]:o1"}, {}, ("0.25",))}
    unseen, equal = compared(whole(None, **other), whole(None)), compared(whole("a", **other), whole("a"))
    assert unseen.first == equal.first == "first output"
    assert unseen.findings[0].reasons[0].because.startswith("weights are equal (after transform was not seen)")
    assert equal.findings[0].reasons[0].because.startswith("weights and first batches are equal")


def test_what_one_check_alone_saw_is_not_said_to_differ_in_the_other() -> None:
    blind = seen(loader=loader(listing=None), batches=whole("a", "b").batches)
    findings = {finding.stage: finding.reasons[0].cause for finding in compared(blind).findings}
    assert findings == {"file list": "recorded_once", "order": "recorded_once"}


def test_a_generator_is_blamed_where_it_moved_and_not_where_it_stood_still() -> None:
    def states(*torchs: str) -> RandomState:
        return RandomState({m: {**GENERATORS, "torch": t} for m, t in zip(MOMENTS, torchs, strict=True)}, ())

    def because(first: RandomState, second: RandomState) -> str:
        changed = seen(random_state=second, weights=Weights({"weight": "float32[2]:w1"}, {}))
        return compared(changed, seen(random_state=first)).findings[0].reasons[0].because

    at_import = because(states("a", "a1", "s", "s", "s", "s", "s"), states("b", "b1", "s", "s", "s", "s", "s"))
    in_make_model = because(states("a", "a", "a", "a", "a1", "a1", "a1"), states("b", "b", "b", "b", "b1", "b1", "b1"))
    seeded_there = because(states("a", "a", "a", "a", "s", "s", "s"), states("b", "b", "b", "b", "s", "s", "s"))
    nowhere = because(states(*"ssssssx"), states(*"ssssssy"))
    assert at_import == f"{IMPORT} drew from torch, which was in a different state"
    assert in_make_model == "make_model drew from torch, which was in a different state"
    assert seeded_there == "make_model drew from torch, which it found in a different state and then seeded"
    assert nowhere.startswith("no generator that was seen")


def test_a_batch_of_a_loader_of_ones_own_is_traced_to_the_generator_that_it_was_drawn_from() -> None:
    made = [
        replace(
            whole(),
            batches=BatchRecords(
                (BatchRecord(0, "a"), BatchRecord(1, digest, None, None, states, ("torch",))), 2, False
            ),
        )
        for digest, states in (("b", GENERATORS), ("c", OTHER))
    ]
    reason = compared(made[1], made[0]).findings[0].reasons[0]
    expected = "the loader drew from torch, which was in a different state"
    assert (reason.cause, reason.because) == ("unseeded_loader", expected)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"seed": 2}, "seed 1 / 2"),
        ({"shuffle": True}, "shuffle False / True"),
        ({"generators": {"sampler.generator": "g0"}}, "generators none / ['sampler.generator']"),
    ],
)
def test_loaders_that_were_asked_for_other_things_are_told_from_unseeded_ones(
    changes: dict[str, Any], said: str
) -> None:
    order = batches(*map(sample, (2, 0, 3, 1)))
    verdict = compare(check(seen(loader=loader(**changes), batches=order)), check())
    mirrored = compare(check(), check(seen(loader=loader(**changes), batches=order)))
    assert [reason.cause for reason in verdict.findings[0].reasons] == ["different_arguments"]
    assert said in mirrored.findings[0].reasons[0].because
    same = compare(check(), check(seen(batches=order)))
    assert [reason.cause for reason in same.findings[0].reasons] == ["outside_value"]


def flipped(place: int, **changes: Any) -> Any:
    step = TransformStep("dataset.transform Flip", f"flipped {place}", ("torch",))
    return sample(place, after=f"flipped {place}", steps=(step,), drew=("torch",), **changes)


def test_a_worker_that_its_init_function_moved_is_told_from_one_that_began_elsewhere() -> None:
    rest = [sample(place) for place in (1, 2, 3)]
    step = TransformStep("dataset.transform Flip", "not flipped", ("torch",))
    one = batches(flipped(0), *rest)
    other = batches(replace(flipped(0), after="not flipped", steps=(step,), generators=OTHER), *rest)
    begun = RandomState(dict.fromkeys(MOMENTS, GENERATORS), (LoaderWorker(0, OTHER, OTHER),))
    moved = RandomState(dict.fromkeys(MOMENTS, GENERATORS), (LoaderWorker(0, GENERATORS, OTHER),))

    by_base = compared(seen(batches=other, random_state=begun), seen(batches=one))
    by_init = compared(seen(batches=other, random_state=moved), seen(batches=one))
    assert by_base.findings[0].reasons[0].cause == "random_transform"
    assert by_init.findings[0].reasons[0].cause == "worker_seeds"


def test_a_generator_that_parts_inside_a_batch_is_named() -> None:
    other_batches = batches(sample(0, after="noise"), *(sample(place, generators=OTHER) for place in (1, 2, 3)))
    (finding,) = compared(seen(), seen(batches=other_batches)).findings
    assert finding.stage == "after transform"
    assert finding.reasons[0].cause == "reseeded"
    assert "a.png" in finding.reasons[0].because


def test_a_generator_that_parts_inside_a_batch_of_a_loader_of_ones_own_is_named() -> None:
    def whole(content: str, behind: dict[str, str]) -> BatchRecords:
        drew = ("torch",)
        made = (
            BatchRecord(0, content, generators=GENERATORS, drew=drew),
            BatchRecord(1, content, generators=behind, drew=drew),
        )
        return BatchRecords(made, asked_for=2, exhausted=True)

    facts = loader(absent={"loader": NOT_LOADER}, listing=None)
    one, other = (seen(loader=facts, batches=whole(*state)) for state in (("x", GENERATORS), ("y", OTHER)))
    (finding,) = compared(one, other).findings
    assert [reason.cause for reason in finding.reasons] == ["reseeded"]
    assert "batch 0" in finding.reasons[0].because
