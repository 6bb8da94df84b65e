"""``BitwiseEquivalenceMode``: every op is run again from identical inputs, and compared bit by bit."""

from __future__ import annotations

from hashbench.tools.bitwise.findings import (
    BitwiseMismatchError,
    BitwiseMismatchWarning,
    Mismatch,
    Unchecked,
    Unwritten,
)
from hashbench.tools.bitwise.mode import BitwiseEquivalenceMode

__all__ = [
    "BitwiseEquivalenceMode",
    "BitwiseMismatchError",
    "BitwiseMismatchWarning",
    "Mismatch",
    "Unchecked",
    "Unwritten",
]
