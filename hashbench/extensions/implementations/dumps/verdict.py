"""What is known of two dumps: frozen values between finding and saying it. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hashbench.extensions.implementations.dumps.align import First, Partners, fresh
from hashbench.extensions.implementations.dumps.dump import Dump
from hashbench.extensions.implementations.dumps.sketch import Sketch

ROUNDING = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Dtype -> unit roundoff."""

FACTORS = {"float64": 64, "float32": 64, "float16": 8, "bfloat16": 8}
"""Dtype -> unit roundoffs by which moments of equal contents may differ. Kernels add up in float32: a result of a lower
dtype is rounded once, one of float32 with each addition. Llamas of 3 and 16 layers in two implementations differ by at
most 1.8 and 9; mistakes that show in these dtypes by 20 and 100 at least."""


@dataclass(frozen=True, slots=True)
class ComparedDump:
    """One side: what was read, and which tensors have a partner.

    Attributes:
        path, dump: where it is, and what was found there.
        sketches: its tensors in order, without those of dtypes that hold no numbers.
        left_out: names of these.
        partners: places in ``sketches`` -> what each corresponds to.
        first: the first without a partner; ``None``: there is none that the other side has a tensor in place of.
    """

    path: Path
    dump: Dump
    sketches: tuple[Sketch, ...]
    left_out: tuple[str, ...]
    partners: Partners
    first: First | None

    @property
    def is_end_aligned(self) -> bool:
        """Whether the last tensor that holds something new has a partner."""
        places = fresh(self.sketches)
        return bool(places) and places[-1] in self.partners and self.dump.of_calls


@dataclass(frozen=True, slots=True)
class DumpsVerdict:
    """What was found out about two dumps.

    Attributes:
        a, b: the sides.
        dtype: the lowest floating dtype of both.
        tolerance: of moments, relative to sums of magnitudes.
        chosen: the tolerance was asked for.
    """

    a: ComparedDump
    b: ComparedDump
    dtype: str
    tolerance: float
    chosen: bool

    @property
    def is_complete(self) -> bool:
        """Whether every tensor of both sides has a partner."""
        return all(
            len(each.partners) == len(each.sketches) and not each.left_out and each.sketches
            for each in (self.a, self.b)
        )

    @property
    def differs(self) -> bool:
        """Whether a tensor without a partner is followed by no end that agrees."""
        ends = self.a.is_end_aligned or self.b.is_end_aligned
        return not ends and (self.a.first is not None or self.b.first is not None)
