"""Small phrases that several parts use."""

from __future__ import annotations

from collections.abc import Sequence


def a_few(names: Sequence[str], limit: int = 8) -> str:
    """The first names, and how many more there are."""
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
