"""Which tracer makes a trace: the native recorder, or the Python dispatch mode.

The Python dispatch mode changes which ops run: while any mode is on, torch takes every tensor for a tensor subclass, so
that gradients accumulate by ``add`` in place of ``add_`` and some formulas are others. The native recorder sees the ops
of the untraced program. So traces of the two are never compared as if they were the same.
"""

from __future__ import annotations

from dataclasses import dataclass

from hashbench.errors import HashbenchError
from hashbench.records import TRACERS

OTHER_OPS = "the Python dispatch mode changes which ops run, and the native tracer does not"
"""Why traces of different tracers are not compared."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The tracer that is used, ``native`` or ``python``; ``reason`` says why ``auto`` did not get the native one, and
    is empty otherwise."""

    tracer: str
    reason: str = ""


def native_unavailable() -> str:
    """Why the native tracer cannot be used in this process, as a sentence without its full stop; empty where it can."""
    return "the native tracer is not part of this version"


def choose(wanted: str) -> Choice:
    """The tracer for ``auto`` (the native one where it can be used), ``native`` or ``python``.

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
    reason = native_unavailable()
    if not reason:
        return Choice("native")
    if wanted == "native":
        raise HashbenchError(
            "the native tracer cannot be used here",
            consequence=f"{reason}, so nothing was traced",
            tip="Choose the tracer `auto`, which takes the Python dispatch mode then, or `python`.",
        )
    return Choice("python", reason)


def refuse_different(first: str, second: str, *, names: tuple[str, str] = ("the first", "the second")) -> None:
    """Raise :class:`HashbenchError` where what was traced by ``first`` would be compared with what was traced by
    another; ``names`` are what it calls them."""
    if first != second:
        raise HashbenchError(
            f"the traces are of different tracers: {names[0]} is {first}, {names[1]} is {second}",
            consequence=f"{OTHER_OPS}, so nothing was compared",
            tip="Make both with one: `--tracer`, or the argument of that name.",
        )
