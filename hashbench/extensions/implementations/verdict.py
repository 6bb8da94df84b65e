"""What is known of the weights of two sides: frozen values between finding and saying it. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Names = tuple[str, ...]

Kind = Literal["same", "tied", "fused", "cut", "regrouped"]
"""How tensors that hold the same elements correspond."""

Mistake = Literal["changed", "narrowed", "missing", "lines", "exchanged", "order", "layout", "copy"]
"""What differs: elements; elements that went through a narrower dtype; a whole tensor is missing on a side; rows or
columns are; tensors stand in each other's places; parts of a fused one do; one is laid out unlike its siblings; a
tensor holds what another one should."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsMatch:
    """Tensors that hold the same elements on both sides.

    Attributes:
        kind: how they correspond.
        a, b: their names.
        how: in which order the elements are, if not in the same; and what was added.
        cast: the dtypes of both sides, where they differ.
    """

    kind: Kind
    a: Names
    b: Names
    how: str = ""
    cast: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsDifference:
    """Something that differs.

    Attributes:
        kind: what differs.
        a, b: names of the tensors concerned on both sides.
        text: more of it in words.
        differing, total: elements that differ, and all that were compared; ``None``: not counted.
        first_a, first_b: index of the first element that differs, in both tensors.
        value_a, value_b: its values.
    """

    kind: Mistake
    a: Names
    b: Names
    text: str = ""
    differing: int | None = None
    total: int | None = None
    first_a: tuple[int, ...] = ()
    first_b: tuple[int, ...] = ()
    value_a: str = ""
    value_b: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsVerdict:
    """What two sides hold.

    Attributes:
        a, b: number of tensors.
        matches: tensors with the same elements.
        differences: what differs, the surest first.
        constants_a, constants_b: number of tensors of one repeated value that the other side has as well.
        unknown: what could not be compared, in sentences.
    """

    a: int
    b: int
    matches: tuple[WeightsMatch, ...]
    differences: tuple[WeightsDifference, ...]
    constants_a: int = 0
    constants_b: int = 0
    unknown: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        """Whether nothing differs and all was compared, more than constants among it."""
        return not self.differences and not self.unknown and bool(self.matches)
