"""Which tensors a step reads: one of several parts of about equal cost, all of them in as many steps. Pure.

The parts follow from the tensors' names and sizes alone, so that two runs of one model read the same tensors in the
same step, whatever the order in which an optimizer holds them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_BYTES_OF_A_CALL = 2**16
"""Bytes that are hashed in about the time that hashing takes beside the bytes."""

_LEAST = 10 * _BYTES_OF_A_CALL
"""Minimum of a part: less is not worth a rotation."""


@dataclass(frozen=True, slots=True)
class Rotation:
    """Tensors by step: each step reads the next part.

    Attributes:
        parts: indices of the tensors of each part, ascending.
    """

    parts: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, tensors: Sequence[tuple[str, int]], *, every: int) -> Rotation:
        """Divide tensors, as names and sizes in bytes, into at most ``every`` parts: the largest first, each to the
        part that has least."""
        cost = [size + _BYTES_OF_A_CALL for _, size in tensors]
        share = min(every, max(1, math.ceil(sum(cost) / _LEAST)))
        parts: list[list[int]] = [[] for _ in range(share)]
        filled = [0] * share
        for index in sorted(range(len(tensors)), key=lambda index: (-cost[index], tensors[index][0])):
            least = min(range(share), key=lambda part: (filled[part], part))
            parts[least].append(index)
            filled[least] += cost[index]
        return cls(tuple(tuple(sorted(part)) for part in parts))

    @property
    def reads_all(self) -> bool:
        """True if each step reads all tensors."""
        return len(self.parts) == 1

    def read_at(self, step: int) -> tuple[int, ...]:
        """Return the indices of the tensors that this step reads, ascending."""
        return self.parts[step % len(self.parts)]
