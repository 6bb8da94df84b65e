"""The verdict on a kernel and its reference, as data. No torch."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class KernelOutcome(enum.StrEnum):
    """What was found; :mod:`~hashbench.extensions.kernels.finding` has the words."""

    WITHIN_ROUNDING = "within rounding"
    WRONG = "wrong"
    NOT_KNOWN = "not known"


class FaultKind(enum.StrEnum):
    """What is wrong with a kernel."""

    BEYOND_ROUNDING = "beyond rounding"
    LOST_ELEMENTS = "lost elements of a sum"
    SCALED = "scaled"
    SHIFTED = "shifted by a constant"
    DISPLACED = "right values at other places"
    STALE = "stale"
    UNWRITTEN = "memory that was not written"
    ZEROS = "zeros in place of values"
    NON_FINITE = "non-finite"
    SIGN_OF_ZERO = "sign of zero"
    APPROXIMATION = "approximation"
    LOWER_PRECISION = "computed in a lower dtype"
    WRITES_INPUT = "writes its inputs"
    CALLS_DIFFER = "differs from call to call"
    STRUCTURE = "another number, shape or dtype of results"
    RAISED = "raised"


class VariationOutcome(enum.StrEnum):
    """What a variation of the inputs showed."""

    WITHIN_ROUNDING = "within rounding"
    WRONG = "wrong"
    REFUSED = "refused by the kernel"
    NOT_DEFINED = "refused by the reference"
    NOT_APPLICABLE = "not applicable"
    OUT_OF_TIME = "out of time"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class JudgedOutput:
    """One result of the kernel, for the inputs as they were given.

    Attributes:
        name: ``output``, ``output.1``, ``gradient of input 0``.
        dtype: ``bfloat16``.
        shape: sizes.
        ratio: largest error of an element in units of what rounding explains; 0 if equal bit by bit.
        explained_by: what explains the error, as :mod:`hashbench.core.run.rounding` says; empty if nothing does.
        own_ratio: the same as ``ratio`` for the reference in its own dtype; ``None`` if not needed.
        better: root mean square error of the reference in its own dtype over that of the kernel, both against float64:
            above 1 the kernel is nearer to float64. ``None`` where one of them is 0.
        worst: index of the element with the largest ratio.
        got: of the kernel there.
        wanted: of the reference in float64 there.
        picture: errors in units over positions, at most 64 rows of at most 64 columns: the largest of each block of a
            matrix of (all leading dimensions, last dimension); empty where there is none.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    ratio: float
    explained_by: str = ""
    own_ratio: float | None = None
    better: float | None = None
    worst: tuple[int, ...] = ()
    got: float | complex | None = None
    wanted: float | complex | None = None
    picture: tuple[tuple[float, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Example:
    """The smallest input that was found to show a fault.

    Attributes:
        inputs: each in words, ``float32[1, 7], zeros but 1.0 at [0, 6]``.
        index: of an element that is wrong.
        got: of the kernel there.
        wanted: of the reference in float64 there.
    """

    inputs: tuple[str, ...] = ()
    index: tuple[int, ...] = ()
    got: float | complex | None = None
    wanted: float | complex | None = None


@dataclass(frozen=True, slots=True)
class Fault:
    """One way in which the kernel is wrong.

    Attributes:
        kind: what is wrong.
        variation: name of the variation that showed it first; ``given``: the inputs as they are.
        output: name of the result.
        where: elements as slices, ``rows 96 to 127``, ``the last 5 of dimension 1``, ``where input 0 < 0``; empty: all.
        share: part of the elements that are wrong, 0 ... 1.
        ratio: largest error in units of what rounding explains; ``None`` where that has no meaning.
        detail: a clause with the measurement: ``by 1.01 (3.1 units, 40 standard errors)``.
        example: the smallest input; ``None`` where none was looked for.
        doubt: why ``kind`` or ``where`` may be another; empty if it is certain.
    """

    kind: FaultKind
    variation: str = "given"
    output: str = "output"
    where: str = ""
    share: float | None = None
    ratio: float | None = None
    detail: str = ""
    example: Example | None = None
    doubt: str = ""


@dataclass(frozen=True, slots=True)
class TriedVariation:
    """One variation of the inputs.

    Attributes:
        name: as it is turned off by.
        outcome: what it showed.
        ratio: largest of all results; ``None`` where nothing was judged.
        reason: why it was refused, or is not applicable; empty otherwise.
        meaning: what was varied, a clause: ``sizes that are not multiples of blocks: 1024 became 1021``.
    """

    name: str
    outcome: VariationOutcome
    ratio: float | None = None
    reason: str = ""
    meaning: str = ""


@dataclass(frozen=True, slots=True)
class RoundingVerdict:
    """What was found out about a kernel and its reference.

    Attributes:
        outcome: the verdict.
        reason: why it is not known; empty otherwise.
        outputs: each result for the inputs as they were given; gradients after outputs.
        faults: what is wrong, the one that leads first.
        variations: all that are known, in order, those that were off included.
        remarks: what is no fault and worth knowing, as sentences.
        dtype: of the first floating-point input, or result: ``bfloat16``.
        device: ``cpu``.
        approximate: what the kernel claims, relative to the largest magnitude of a result; ``None``: it claims nothing.
        seed: of the variations.
        seconds: how long it took.
    """

    outcome: KernelOutcome
    reason: str = ""
    outputs: tuple[JudgedOutput, ...] = ()
    faults: tuple[Fault, ...] = ()
    variations: tuple[TriedVariation, ...] = ()
    remarks: tuple[str, ...] = ()
    dtype: str = ""
    device: str = "cpu"
    approximate: float | None = None
    seed: int = 1337
    seconds: float = 0.0

    @property
    def right(self) -> bool:
        """Whether nothing is wrong and all results could be judged."""
        return self.outcome is KernelOutcome.WITHIN_ROUNDING
