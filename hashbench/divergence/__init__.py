"""The first divergence of two traces: alignment, origins, causal slice, verdict. Pure: no torch, no files."""

from __future__ import annotations

from hashbench.divergence.verdict import find

__all__ = ["find"]
