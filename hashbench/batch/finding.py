"""The first kernel whose rows differ although this item's rows of all its inputs are equal. Pure: no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class RowDifference:
    """How far rows that should be equal are apart: the largest absolute and relative difference and the largest
    distance in representable values; ``None`` where there is no number (not floating point, not measured)."""

    max_abs: float | None = None
    max_relative: float | None = None
    max_ulp: int | None = None


@dataclass(frozen=True, slots=True)
class BatchFinding:
    """Where an item's result came to depend on the batch: between a run at ``batch`` and one of its first ``size``
    items.

    ``kernel`` is the op's name, ``record`` the id of its record, ``module`` and ``source_line`` where it was called;
    empty where none can be named, and ``detail`` then says why. ``shapes`` and ``reference_shapes`` are those of its
    tensor arguments at ``size`` and at ``batch``, ``(1,256)x(256,512)``. ``sources`` are the ids of all records in
    which a difference entered that reached an output, the named one first. ``benign`` counts records whose rows differ
    without reaching an output, ``not_attributable`` those of which it cannot be told which rows belong to which item.
    ``call`` is the call at ``batch``, captured for experiments; ``None`` where that was not possible.
    """

    size: int
    batch: int
    kernel: str = ""
    record: str = ""
    module: str = ""
    source_line: str = ""
    shapes: str = ""
    reference_shapes: str = ""
    difference: RowDifference = RowDifference()
    sources: tuple[str, ...] = ()
    benign: int = 0
    not_attributable: int = 0
    detail: str = ""
    call: Any = field(default=None, compare=False, repr=False)
