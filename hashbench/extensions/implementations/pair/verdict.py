"""The verdict on two implementations, as data. No torch."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from hashbench.extensions.implementations.verdict import WeightsVerdict


class PairOutcome(enum.Enum):
    """What was found; :mod:`~hashbench.extensions.implementations.pair.finding` has the words."""

    EQUAL = "equal"
    ROUNDING = "rounding"
    MISTAKE = "mistake"
    NOT_KNOWN = "not known"


@dataclass(frozen=True, slots=True)
class OpPlace:
    """Ops of one side.

    Attributes:
        op: name of the first op, ``aten.mm.default``.
        module: path of the module that called it.
        source: ``file:line code`` of the user's code.
        phase: ``forward``, ``backward``.
        ops: names of all ops of the region, the first included, in order.
        output: dtype and shape of what the first wrote, ``float32[2, 11, 64]``.
        scalars: its arguments that are no tensors.
        ids: of ``ops`` in ``columns`` of the verdict.
    """

    op: str
    module: str = ""
    source: str = ""
    phase: str = "forward"
    ops: tuple[str, ...] = ()
    output: str = ""
    scalars: str = ""
    ids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PartedPlace:
    """Where two sides part.

    Attributes:
        a, b: the ops of each side; ``None`` if that side has none for it.
        inputs: what they read and agrees: text of (a), text of (b).
        constants: constants, weights and scalars that differ: name, (a), (b).
        values: sample of what they wrote: (index or place as text, value of a, value of b), at most a few.
        units: largest difference in units of rounding of the dtype; ``None`` where values could not be compared.
        share: part of the elements that differ, 0 ... 1; ``None`` likewise.
        note: what else is known, such as a choice between equal values; a sentence, or empty.
    """

    a: OpPlace | None
    b: OpPlace | None
    inputs: tuple[tuple[str, str], ...] = ()
    constants: tuple[tuple[str, str, str], ...] = ()
    values: tuple[tuple[str, float, float], ...] = ()
    units: float | None = None
    share: float | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class ComparedResult:
    """One result of both sides in their own dtype.

    Attributes:
        name: ``output``, ``output.0``, ``gradient of …``.
        units: largest difference in units of rounding; 0 if equal bit by bit; ``None`` if not comparable.
        relative: largest difference over the largest magnitude.
    """

    name: str
    units: float | None
    relative: float | None = None


@dataclass(frozen=True, slots=True)
class ImplementationsVerdict:
    """What was found out about two implementations.

    Attributes:
        outcome: the verdict.
        reason: why it is not known; empty otherwise.
        parted: independent places where they part, the first one leads.
        results: each result in the models' own dtype.
        weights: of what both hold; ``None`` if not compared, ``weights_reason`` then says why.
        aligned: ops of (b) whose results (a) has too, and all ops of (b).
        left: names of outputs that one side alone returns: they are not compared.
        fallbacks: ops that were computed in a lower dtype than float64, as they have no float64 kernel or cast inside,
            with their number: what is smaller than their rounding is not seen. Float32, or a name that ends in ``in
            bfloat16``.
        dtype: the models' own, ``bfloat16``.
        columns: for the page: ops of each side in order (id, text as ``aten.mm.default in layers.0.attn``), and
            ``joined`` the pairs of ids that hold the same.
        seconds: how long each part took, by name.
        notes: what was taken for equal, as sentences.
    """

    outcome: PairOutcome
    reason: str = ""
    parted: tuple[PartedPlace, ...] = ()
    results: tuple[ComparedResult, ...] = ()
    weights: WeightsVerdict | None = None
    weights_reason: str = ""
    aligned: tuple[int, int] = (0, 0)
    left: tuple[str, ...] = ()
    fallbacks: Mapping[str, int] | None = None
    dtype: str = ""
    columns: tuple[tuple[tuple[str, str], ...], tuple[tuple[str, str], ...]] = ((), ())
    joined: tuple[tuple[str, str], ...] = ()
    seconds: Mapping[str, float] | None = None
    notes: tuple[str, ...] = ()
