"""Verdicts on a kernel and its reference, written by hand: one of every outcome, and every kind of fault."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hashbench.extensions.kernels.verdict import (
    Example,
    Fault,
    FaultKind,
    JudgedOutput,
    KernelOutcome,
    RoundingVerdict,
    TriedVariation,
    VariationOutcome,
)

OUTPUT = JudgedOutput(
    name="output",
    dtype="bfloat16",
    shape=(128, 1024),
    ratio=1.3,
    explained_by="accumulation in float32",
    own_ratio=1.8,
    better=1.4,
    worst=(3, 17),
    got=0.125,
    wanted=0.1251,
    picture=((0.0, 0.5, 1.3), (0.7, 3.0, 16.0)),
)
GRADIENT = replace(
    OUTPUT,
    name="gradient of input 0",
    ratio=float("inf"),
    explained_by="",
    better=None,
    worst=(0, 1),
    got=float("nan"),
    wanted=0.5 + 0.25j,
    picture=((0.2, float("nan")), (300.0, float("inf"))),
)

VARIATIONS = (
    TriedVariation("given", VariationOutcome.WITHIN_ROUNDING, 1.3, meaning="the inputs as they are"),
    TriedVariation("sizes", VariationOutcome.WITHIN_ROUNDING, 2.1, meaning="1024 became 1021"),
    TriedVariation("strides", VariationOutcome.REFUSED, reason="AssertionError: x must be contiguous"),
    TriedVariation("denormals", VariationOutcome.NOT_DEFINED, reason="RuntimeError: not implemented"),
    TriedVariation("float32", VariationOutcome.NOT_APPLICABLE, reason="the inputs are float32"),
    TriedVariation("tiny", VariationOutcome.OUT_OF_TIME, meaning="values times 2^-20"),
    TriedVariation("nan", VariationOutcome.OFF),
)
LOST = Fault(
    FaultKind.LOST_ELEMENTS,
    variation="sizes",
    where="rows 96 to 127",
    share=0.25,
    ratio=4e5,
    detail="the last 5 of 1021 terms",
    example=Example(("float32[1, 7], zeros but 1.0 at [0, 6]",), (0,), 0.0, 1.0),
    doubt="a mask that hides them does the same",
)
RIGHT = RoundingVerdict(
    KernelOutcome.WITHIN_ROUNDING,
    outputs=(OUTPUT,),
    variations=VARIATIONS,
    remarks=("It returns NaN where the reference returns infinity.",),
    dtype="bfloat16",
    seconds=2.5,
)
WRONG = replace(
    RIGHT,
    outcome=KernelOutcome.WRONG,
    faults=(LOST,),
    variations=(
        VARIATIONS[0],
        TriedVariation("sizes", VariationOutcome.WRONG, 4e5, meaning="1024 became 1021"),
        *VARIATIONS[2:],
    ),
)
SCALED = Fault(FaultKind.SCALED, ratio=3.1, detail="by 1.01 (3.1 units, 40 standard errors)")

VERDICTS: Mapping[str, RoundingVerdict] = {
    "within rounding": RIGHT,
    "equal": replace(RIGHT, outputs=(replace(OUTPUT, ratio=0.0, explained_by="equal", better=None),), remarks=()),
    "by accumulation in bfloat16": replace(
        RIGHT, outputs=(replace(OUTPUT, ratio=7.0, explained_by="accumulation in bfloat16", better=0.25),)
    ),
    "an approximation that is claimed": replace(
        RIGHT, outputs=(replace(OUTPUT, explained_by="approximation"),), approximate=3e-4
    ),
    "lost elements": WRONG,
    "several faults": replace(
        WRONG,
        outputs=(OUTPUT, GRADIENT),
        faults=(
            SCALED,
            replace(LOST, variation="given", where="where input 0 < 0", output="gradient of input 0"),
            Fault(FaultKind.WRITES_INPUT, detail="input 0 at [0, 0]"),
            Fault(FaultKind.CALLS_DIFFER, share=0.01),
        ),
    ),
    "a gradient": replace(
        WRONG, outputs=(OUTPUT, GRADIENT), faults=(replace(SCALED, output="gradient of input 0", where="column 0"),)
    ),
    "a kernel that raises": RoundingVerdict(
        KernelOutcome.WRONG,
        faults=(Fault(FaultKind.RAISED, variation="sizes", detail="IndexError: index 1021 is out of bounds"),),
        variations=VARIATIONS[:1],
        dtype="float32",
    ),
    "not known": RoundingVerdict(
        KernelOutcome.NOT_KNOWN, reason="the reference has no float64 kernel: aten._grouped_mm", dtype="bfloat16"
    ),
}
"""What a reader would call it -> the verdict."""
