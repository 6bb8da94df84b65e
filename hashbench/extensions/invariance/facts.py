"""The columns of an invariance. Pure; imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from hashbench.core.records import Facts, column


@dataclass(frozen=True, slots=True)
class BatchFacts(Facts):
    """What the same items or tokens show in another run.

    Attributes:
        compared_with: in words, what was compared; empty: batches of other sizes.
        batch_sizes: the smaller batches, in their order: ``4 2 1``.
        smallest_batch: smallest number of items with which the kernel that is named differs.
        shapes: that this kernel was given in the other run.
        reference_shapes: those in the full batch.
        not_attributable: number of records that could not be attributed to items.
    """

    compared_with: str = column(label="Compared", formerly="company")
    batch_sizes: str = column(label="Batch sizes compared")
    smallest_batch: int | None = None
    shapes: str = ""
    reference_shapes: str = ""
    not_attributable: int | None = None
