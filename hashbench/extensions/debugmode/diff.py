"""Compare two logs of ``DebugMode`` for ``hashbench diff``; a :class:`~hashbench.core.extensions.DiffsFiles`."""

from __future__ import annotations

from collections.abc import Sequence

from hashbench.core.finding import Finding
from hashbench.extensions.debugmode import log
from hashbench.extensions.debugmode.find import find
from hashbench.extensions.debugmode.text import finding_of

KIND = "a log of DebugMode"


def owns(text: str) -> bool:
    """Return True if a text is a log of ``DebugMode``."""
    return log.is_debug_log(text)


def diff(texts: Sequence[str], names: Sequence[str], *, context: int) -> Finding:
    """Return the report of two logs."""
    first, second = (log.loads(text, name=name) for text, name in zip(texts, names, strict=True))
    return finding_of(find(first, second, is_random=_is_random), context=context)


def _is_random(name: str) -> bool:
    from hashbench.extensions.debugmode.random_ops import is_random  # imports torch, which most logs do not need

    return is_random(name)
