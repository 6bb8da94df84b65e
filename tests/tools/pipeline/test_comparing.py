"""Two checks compared: which stages differ by themselves, and the report."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hashbench.core.errors import HashbenchError
from hashbench.tools.pipeline.comparing import compare
from hashbench.tools.pipeline.observed import (
    MOMENTS,
    BatchRecords,
    Listing,
    Observed,
    Outputs,
    RandomState,
    RepeatResult,
    TransformStep,
    Weights,
)
from hashbench.tools.pipeline.stages import STAGES
from tests.tools.pipeline.pipeline_helpers import (
    FILES,
    GENERATORS,
    batches,
    check,
    compared,
    in_another_order,
    loader,
    said,
    sample,
    seen,
    statuses,
)


def test_equal_checks_agree_in_every_stage() -> None:
    verdict = compared(seen())
    assert verdict.repeats
    assert statuses(verdict) == dict.fromkeys(STAGES, "equal")


def seeded(*names: str, drew: str = "torch") -> tuple[Observed, Observed]:
    """Two checks of a pipeline that seeds these generators, and whose model then draws from ``drew``."""
    made = []
    for side in "ab":
        states = [{name: f"{name} {side}" for name in GENERATORS}] * 2
        states += [states[0] | dict.fromkeys(names, "seeded")] * 2
        states += [states[2] | {drew: f"{states[2][drew]} drawn"}] * (len(MOMENTS) - 4)
        moments = dict(zip(MOMENTS, states, strict=True))
        made.append(seen(random_state=RandomState(moments, ()), weights=Weights({"weight": f"float32[2]:{side}"}, {})))
    return made[0], made[1]


@pytest.mark.parametrize(
    ("names", "drew", "expected"),
    [
        (("python", "numpy"), "torch", "set_seed seeds Python and NumPy, and not torch"),
        (("python", "torch"), "numpy", "set_seed seeds Python and torch, and not NumPy"),
        ((), "torch", "torch is not seeded"),
        (("torch",), "torch", ""),
    ],
)
def test_missing_seed_is_named_before_symptoms(names: tuple[str, ...], drew: str, expected: str) -> None:
    first, second = seeded(*names, drew=drew)
    text = said(compared(second, first))
    assert ("Add to set_seed:" in text) == bool(expected)
    assert expected in text
    assert ("Add to set_seed:\n    torch.manual_seed(seed)" in text) == (drew == "torch" and bool(expected))


def test_seeding_is_not_blamed_for_another_seed() -> None:
    first, second = seeded("python")
    assert compared(replace(second, loader=loader(seed=2)), first).seeding is None


def test_nothing_that_can_be_compared_is_no_agreement() -> None:
    blind = seen(
        loader=loader(listing=None),
        batches=BatchRecords((replace(batches(sample(0)).batches[0], digest=None, samples=None),), 2, True),
        weights=Weights(None, None),
        outputs=Outputs(None, None, None),
        layers=None,
        trace=None,
    )
    with pytest.raises(HashbenchError, match="not the same as equal"):
        compared(blind, blind)


def test_checks_of_other_numbers_of_steps_are_refused() -> None:
    with pytest.raises(HashbenchError, match="2 and 5 steps"):
        compared(seen(batches=batches(*map(sample, range(4)), asked_for=5)))


def test_weights_that_differ_by_themselves_are_told_beside_the_first_stage() -> None:
    verdict = compared(seen(batches=in_another_order(), weights=Weights({"weight": "w1"}, {})))
    assert [finding.stage for finding in verdict.findings] == ["order", "initial weights"]


def test_names_from_a_file_do_not_steer_the_terminal() -> None:
    verdict = compared(seen(weights=Weights({"\x1b[2Jweight": "w1"}, {})))
    assert "\x1b" not in said(verdict)


@pytest.mark.parametrize(
    ("changes", "also"),
    [
        ({}, []),
        ({"before": "another image"}, ["before transform", "after transform"]),
        ({"steps": (TransformStep("dataset.transform Flip", "a clock", ()),)}, ["after transform"]),
    ],
    ids=["a label made of the index", "another image", "a transform that reads a clock"],
)
def test_a_label_that_follows_the_order_is_no_second_finding(changes: dict[str, Any], also: list[str]) -> None:
    moved = [sample(1, index="0", after="label 0"), sample(0, index="1", after="label 1"), sample(2), sample(3)]
    moved = [replace(item, **changes) if number == 0 else item for number, item in enumerate(moved)]
    files = tuple(FILES[place] for place in (1, 0, 2, 3))
    other = seen(batches=batches(*moved), loader=loader(listing=Listing("dataset.files", "/images", files)))
    findings = compared(seen(), other).findings
    assert [finding.stage for finding in findings] == ["order", *also]


def test_stages_that_follow_the_hash_seed_with_the_first_one_are_no_findings_of_their_own() -> None:
    files = FILES[::-1]
    other = seen(
        loader=loader(listing=Listing("dataset.files", "/images", files)),
        batches=batches(sample(0, after="label 1"), *(sample(place) for place in (1, 2, 3))),
        weights=Weights({"weight": "float32[2]:w1"}, {}),
    )

    def found(**gone: bool) -> dict[str, str]:
        hash_order = {"order": True, "after transform": True, "initial weights": False} | gone
        verdict = compare(check(seen()), check(other), hash_order=hash_order)
        return {finding.stage: finding.reasons[0].cause for finding in verdict.findings}

    assert found() == {"order": "set_order", "initial weights": "initial_state"}
    assert found(**{"after transform": False}).keys() == {"order", "after transform", "initial weights"}


def test_the_repetition_of_a_check_excludes_or_proves_the_order_of_sets() -> None:
    other = seen(loader=loader(listing=Listing("dataset.files", "/images", FILES[::-1])))
    first, second = (
        replace(one, surroundings=replace(one.surroundings, hash_seed=seed, hash_seed_by="hashbench"))
        for one, seed in ((seen(), "5"), (other, "6"))
    )
    repeats, hashed = RepeatResult(True, "", None, 2), RepeatResult(False, "order", True, 4)

    def reasons(repetition: RepeatResult | None) -> list[str]:
        verdict = compare(check(first, repetition=repetition), check(second, repetition=repetition))
        return [reason.cause for reason in verdict.findings[0].reasons]

    same_seed = replace(second, surroundings=first.surroundings)
    assert reasons(None) == ["unsorted_listing", "set_order"]
    assert [reason.cause for reason in compared(same_seed, first).findings[0].reasons] == ["unsorted_listing"]
    assert reasons(repeats) == ["unsorted_listing"]
    assert reasons(hashed) == ["set_order"]
