"""Which tensors a step reads: one of several parts of about equal cost in each step, all of them every so often. Pure.

The parts follow from the tensors' names and sizes alone, so that two runs of one model read the same tensors in the
same step, whatever the order in which an optimizer holds them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

MOST_PARTS = 16
"""Maximum number of parts."""

_BYTES_OF_A_CALL = 2**16
"""Bytes that are hashed in about the time that hashing takes beside the bytes."""

_LEAST = 10 * _BYTES_OF_A_CALL
"""Minimum of a part: less is not worth a rotation."""


@dataclass(frozen=True, slots=True)
class Rotation:
    """Tensors by step.

    Attributes:
        parts: indices of the tensors of each part, ascending.
        every: every how many steps all tensors are read.
    """

    parts: tuple[tuple[int, ...], ...]
    every: int

    @classmethod
    def of(cls, tensors: Sequence[tuple[str, int]], *, every: int) -> Rotation:
        """Divide tensors, as names and sizes in bytes, into at most :data:`MOST_PARTS` parts: the largest first, each
        to the part that has least."""
        cost = [size + _BYTES_OF_A_CALL for _, size in tensors]
        share = min(MOST_PARTS, max(1, math.ceil(sum(cost) / _LEAST)))
        parts: list[list[int]] = [[] for _ in range(share)]
        filled = [0] * share
        for index in sorted(range(len(tensors)), key=lambda index: (-cost[index], tensors[index][0])):
            least = min(range(share), key=lambda part: (filled[part], part))
            parts[least].append(index)
            filled[least] += cost[index]
        return cls(tuple(tuple(sorted(part)) for part in parts), every)

    def is_complete(self, step: int) -> bool:
        """Return True if this step reads all tensors."""
        return step % self.every == 0 or len(self.parts) == 1

    def read_at(self, step: int) -> tuple[int, ...]:
        """Return the indices of the tensors that this step reads, ascending."""
        if self.is_complete(step):
            return tuple(sorted(index for part in self.parts for index in part))
        return self.parts[step % len(self.parts)]
