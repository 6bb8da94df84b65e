"""The text of an op's non-tensor arguments: equal for equal values in any process, never an address."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_REPRESENTED = (bool, int, float, complex, str, bytes, type(None))


def argument_text(values: Sequence[Any]) -> str:
    """Arguments separated by commas, positional ones as they are and keyword ones as ``name=value``.

    A keyword argument is given as a pair ``(name, value)``. Numbers are exact (``repr``); an object of a type that
    is not a plain value is written as the name of its type, since its ``repr`` may hold an address.
    """
    return ", ".join(map(_one, values))


def _one(value: Any) -> str:
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str):
        return f"{value[0]}={_one(value[1])}"
    if isinstance(value, _REPRESENTED):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_one, value))}]"
    module = type(value).__module__
    if module == "torch" and type(value).__name__ in ("dtype", "device", "layout", "memory_format"):
        return str(value)
    if type(value).__name__ in ("SymInt", "SymFloat", "SymBool"):
        return str(value)
    return f"<{type(value).__name__}>"
