"""Which tracer makes a trace: the native recorder, or the Python dispatch mode.

The Python dispatch mode changes which ops run: while any mode is on, torch takes every tensor for a tensor subclass, so
that gradients accumulate by ``add`` in place of ``add_`` and some formulas are others. The native recorder sees the ops
of the untraced program. So traces of the two are never compared as if they were the same.
"""

from __future__ import annotations

from dataclasses import dataclass

from hashbench.errors import HashbenchError
from hashbench.records import TRACERS

NOT_BY_ITSELF = "the native tracer is new: `auto` does not take it yet"
"""Why ``auto`` is the Python dispatch mode for now."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The tracer that is used, ``native`` or ``python``; ``reason`` says why ``auto`` did not get the native one, and
    is empty otherwise."""

    tracer: str
    reason: str = ""


def native_unavailable(wanted: str) -> str:
    """Why the native tracer is not used in this process where ``wanted``, ``auto`` or ``native``, would have it, as a
    sentence without its full stop; empty where it is."""
    if wanted == "auto":
        return NOT_BY_ITSELF
    from hashbench.trace.native import load

    found = load()
    return found if isinstance(found, str) else ""


def choose(wanted: str) -> Choice:
    """The tracer for ``auto`` (which does not take the native one yet), ``native`` or ``python``.

    Raises:
        HashbenchError: the native tracer is asked for and cannot be used, or ``wanted`` is none of the three.
    """
    if wanted not in TRACERS:
        raise HashbenchError(
            f"{wanted!r:.80} is not a tracer",
            consequence="nothing was traced",
            tip=f"It is one of: {', '.join(TRACERS)}.",
        )
    if wanted == "python":
        return Choice("python")
    reason = native_unavailable(wanted)
    if not reason:
        return Choice("native")
    if wanted == "native":
        raise HashbenchError(
            "the native tracer cannot be used here",
            consequence=f"{reason}, so nothing was traced",
            tip="Choose the tracer `auto`, which takes the Python dispatch mode then, or `python`.",
        )
    return Choice("python", reason)
