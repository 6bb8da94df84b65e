"""What to do about each stage."""

from __future__ import annotations

import pytest

from hashbench.extensions.compiled.advice import ADVICE, OF_TORCH, advice_for
from hashbench.extensions.compiled.experiments import TRIALS


def test_every_stage_that_is_tried_has_advice() -> None:
    assert set(TRIALS) <= set(ADVICE)


@pytest.mark.parametrize(
    ("stage", "op", "cure", "text"),
    [
        ("lowering", "aten.erf.default", "", "report the lowering of aten.erf.default"),
        (
            *("lowering", "aten.erf.default", "aten.erf.default runs eagerly"),
            "report the lowering of aten.erf.default; until then: aten.erf.default runs eagerly",
        ),
        ("lowering", "", "", "report the lowering of the op"),
        ("", "aten.erf.default", "anything", ""),
        ("aot_autograd", "", "", OF_TORCH),
        (
            *("aot_autograd", "zoo.clip.default", ""),
            "declare what zoo.clip.default does: mutations and aliases in its schema, strides in its fake kernel",
        ),
    ],
)
def test_advice_names_the_op_and_what_helps(stage: str, op: str, cure: str, text: str) -> None:
    assert advice_for(stage, op, cure) == text
