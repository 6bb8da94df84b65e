"""Where the items of a batch are in a tensor. Pure: shapes only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ItemAxis:
    """The dimension of a tensor along which the items of a batch lie.

    ``dim`` has size ``outer * items * inner``, and index ``(o * items + item) * inner + i`` belongs to ``item``:
    flattened heads (``batch * heads``) have ``inner`` = heads, rows repeated as a whole have ``outer`` > 1.
    """

    dim: int
    outer: int = 1
    inner: int = 1

    def items(self, shape: Sequence[int]) -> int:
        """How many items a tensor of this shape holds.

        Raises:
            ValueError: the dimension is no multiple of ``outer * inner``.
        """
        items, rest = divmod(shape[self.dim], self.outer * self.inner)
        if rest:
            raise ValueError(f"dimension {self.dim} of {tuple(shape)} does not hold whole items of {self}")
        return items
