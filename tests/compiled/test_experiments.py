"""Which compilations are tried for a finding, and what they prove."""

from __future__ import annotations

import pytest

from hashbench.catalog import Confidence
from hashbench.compiled.experiments import MOST, TRIALS, conclude, next_change, trial
from hashbench.inductor.fallbacks import CHANGES_BY_NAME


def made(*words: str) -> list[object]:
    """``"scalar_code"`` stays, ``"+eager_op"`` makes the finding vanish, ``"?no_pass"`` was not run."""
    return [
        trial(word.lstrip("+?"), gone=word.startswith("+"), note="budget" if word.startswith("?") else "")
        for word in words
    ]


@pytest.mark.parametrize(
    ("stage", "words", "following"),
    [
        ("lowering", (), "eager_op"),
        ("lowering", ("+eager_op",), "scalar_code"),
        ("lowering", ("+eager_op", "scalar_code"), "no_buffer_reuse"),
        ("lowering", ("+eager_op", "scalar_code", "no_buffer_reuse"), ""),
        ("lowering", ("eager_op",), ""),  # nothing cures it: controls would show nothing
        ("codegen", ("scalar_code",), "one_thread"),
        ("codegen", ("+scalar_code",), "no_buffer_reuse"),
        ("codegen", ("?scalar_code",), "one_thread"),
        ("post_grad_passes", (), "no_pass"),
        ("dynamo", (), ""),
        ("", (), ""),
    ],
)
def test_cures_are_tried_until_one_helps_then_controls(stage: str, words: tuple[str, ...], following: str) -> None:
    assert next_change(stage, made(*words)) == following  # type: ignore[arg-type]


def test_no_more_than_six_compilations_are_made() -> None:
    for stage, trials in TRIALS.items():
        done: list[object] = []
        while name := next_change(stage, done):  # type: ignore[arg-type]
            done.append(trial(name))
        assert len(done) <= MOST, stage
        assert len(trials.cures) + len(trials.controls) <= MOST


@pytest.mark.parametrize(
    ("stage", "words", "cure", "confidence"),
    [
        ("lowering", ("+eager_op", "scalar_code"), "eager_op", Confidence.PROVEN),
        ("lowering", ("+eager_op", "+scalar_code"), "eager_op", Confidence.LIKELY),  # everything makes it vanish
        ("lowering", ("+eager_op", "?scalar_code"), "eager_op", Confidence.LIKELY),  # no control was run
        ("lowering", ("eager_op",), "", Confidence.OPEN),
        ("codegen", ("scalar_code", "one_thread", "no_fusion", "+eager_op", "no_buffer_reuse"), "eager_op", "proven"),
        ("memory_planning", ("+no_buffer_reuse", "scalar_code"), "no_buffer_reuse", Confidence.PROVEN),
        ("dynamo", (), "", Confidence.OPEN),
    ],
)
def test_a_finding_is_proven_by_a_cure_and_a_control(
    stage: str, words: tuple[str, ...], cure: str, confidence: str
) -> None:
    assert conclude(stage, made(*words)) == (cure, confidence)  # type: ignore[arg-type]


def test_every_change_exists() -> None:
    for trials in TRIALS.values():
        assert {*trials.cures, *trials.controls} <= CHANGES_BY_NAME.keys()
