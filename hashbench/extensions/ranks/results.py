"""Results that a traced program adds itself. No torch: an untraced program imports this, too."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

CURRENT: ContextVar[Callable[[str, Any], None] | None] = ContextVar("CURRENT", default=None)
"""Adds a result to the trace of :func:`~hashbench.extensions.ranks.record.record_ranks` that this context is in."""


def result(name: str, value: Any) -> None:
    """Add a result by which two runs under ``hashbench ranks record`` are compared: a loss, a metric, a tensor.

    It is hashed at once, as it is on this rank. Untraced, and in threads that the program starts, this does nothing.

    Args:
        name: of the result; a name that the step already has gets a count (``loss#1``).
        value: a tensor of any shape, a number, a string, ``None``, or lists and dictionaries of these, whose items
            become results of their own (``metrics.accuracy``).

    Raises:
        TypeError: under a trace, ``value`` is something else, whose text may be another in each run.
    """
    add = CURRENT.get()
    if add is not None:
        for path, item in _items(name, value):
            add(path, item)


def _items(name: str, value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, Mapping):
        pairs = [(str(key), item) for key, item in value.items()]
    elif isinstance(value, (list, tuple)):
        pairs = [(str(number), item) for number, item in enumerate(value)]
    elif value is None or isinstance(value, (bool, int, float, complex, str, bytes)) or hasattr(value, "data_ptr"):
        return [(name, value)]
    else:
        raise TypeError(f"a result is a tensor or a number, and {name} is a {type(value).__name__}")
    return [found for key, item in pairs for found in _items(f"{name}.{key}", item)]
