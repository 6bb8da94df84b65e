"""Which compilations are tried for a finding, and what they prove."""

from __future__ import annotations

import pytest

from hashbench.core.catalog import Confidence
from hashbench.core.records import ExperimentResult
from hashbench.extensions.compiled.experiments import MOST, TRIALS, Trial, conclude, next_attempt, trial
from hashbench.extensions.compiled.fallbacks import CHANGES_BY_NAME


def made(*words: str) -> list[ExperimentResult]:
    """``"scalar_code"`` stays, ``"+eager_op:aten.erf"`` makes the finding vanish, ``"?no_pass"`` was not run."""
    return [
        trial(
            Trial(*word.lstrip("+?").split(":")),
            gone=word.startswith("+"),
            note="budget" if word.startswith("?") else "",
        )
        for word in words
    ]


def named(attempt: Trial | None) -> str:
    return "" if attempt is None else ":".join(filter(None, (attempt.change, attempt.op)))


@pytest.mark.parametrize(
    ("stage", "words", "following"),
    [
        ("lowering", (), "eager_op:aten.erf"),
        ("lowering", ("+eager_op:aten.erf",), "scalar_code"),  # a control: it should stay
        ("lowering", ("+eager_op:aten.erf", "scalar_code"), ""),
        ("lowering", ("+eager_op:aten.erf", "?scalar_code"), "no_buffer_reuse"),
        ("lowering", ("eager_op:aten.erf",), "eager_op:aten.mul"),  # the next op of the kernel
        ("lowering", ("eager_op:aten.erf", "+eager_op:aten.mul"), ""),  # the first one is the control
        ("lowering", ("eager_op:aten.erf", "eager_op:aten.mul"), ""),  # nothing cures it
        ("codegen", ("scalar_code",), "no_inplace_buffers"),
        ("codegen", ("+scalar_code",), "one_thread"),
        ("codegen", ("scalar_code", "+no_inplace_buffers"), ""),
        ("codegen", ("?scalar_code",), "no_inplace_buffers"),
        ("codegen", ("scalar_code", "no_inplace_buffers", "no_buffer_reuse"), "eager_op:aten.erf"),
        ("post_grad_passes", (), "no_pass"),
        ("dynamo", (), ""),
        ("", (), ""),
    ],
)
def test_cures_are_tried_until_one_helps_then_a_control(stage: str, words: tuple[str, ...], following: str) -> None:
    assert named(next_attempt(stage, ("aten.erf", "aten.mul"), made(*words))) == following


def test_no_more_than_six_compilations_are_made() -> None:
    for stage in TRIALS:
        done: list[ExperimentResult] = []
        while attempt := next_attempt(stage, [f"aten.op{number}" for number in range(9)], done):
            done.append(trial(attempt))
        assert 0 < len(done) <= MOST, stage


@pytest.mark.parametrize(
    ("stage", "words", "cure", "confidence"),
    [
        ("lowering", ("+eager_op:aten.erf", "scalar_code"), "eager_op:aten.erf", Confidence.PROVEN),
        (
            "lowering",
            ("+eager_op:aten.erf", "+scalar_code"),
            "eager_op:aten.erf",
            Confidence.LIKELY,
        ),  # whatever is done
        ("lowering", ("+eager_op:aten.erf", "?scalar_code"), "eager_op:aten.erf", Confidence.LIKELY),  # no control
        ("lowering", ("eager_op:aten.erf",), "", Confidence.OPEN),
        ("codegen", ("scalar_code", "no_inplace_buffers", "+eager_op:aten.mul"), "eager_op:aten.mul", "proven"),
        ("memory_planning", ("+no_buffer_reuse", "scalar_code"), "no_buffer_reuse", Confidence.PROVEN),
        ("dynamo", (), "", Confidence.OPEN),
    ],
)
def test_a_finding_is_proven_by_a_cure_and_another_change(
    stage: str, words: tuple[str, ...], cure: str, confidence: str
) -> None:
    found, how = conclude(stage, made(*words))
    assert (named(found), how) == (cure, confidence)


def test_every_change_exists() -> None:
    for trials in TRIALS.values():
        assert {*trials.cures, *trials.controls} <= CHANGES_BY_NAME.keys()
