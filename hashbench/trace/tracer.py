"""Which tracer makes a trace: the native recorder, or the Python dispatch mode.

The Python dispatch mode changes which ops run: while any mode is on, torch takes every tensor for a tensor subclass, so
that gradients accumulate by ``add`` in place of ``add_`` and some formulas are others. The native recorder sees the ops
of the untraced program. So traces of the two are never compared as if they were the same.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hashbench.errors import HashbenchError
from hashbench.records import TRACERS

if TYPE_CHECKING:
    from hashbench.native.build import Unavailable


@dataclass(frozen=True, slots=True)
class Choice:
    """The tracer that is used, ``native`` or ``python``; ``reason`` says why ``auto`` did not get the native one, and
    is empty otherwise."""

    tracer: str
    reason: str = ""


@functools.cache  # to ask for the imports again would be a tenth of what it takes to make and enter a trace
def native_unavailable() -> Unavailable | None:
    """What is wrong where the native tracer cannot be used in this process; ``None`` where it can."""
    from hashbench.native.build import Unavailable
    from hashbench.trace.native import load

    found = load()
    return found if isinstance(found, Unavailable) else None


def choose(wanted: str) -> Choice:
    """The tracer for ``auto`` (the native one where it can be used, else the Python one), ``native`` or ``python``.

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
    missing = native_unavailable()
    if missing is None:
        return Choice("native")
    if wanted == "native":
        advice = f"{missing.advice[:1].upper()}{missing.advice[1:]}."
        raise HashbenchError(
            "the native tracer cannot be used here",
            consequence=f"{missing.what}, so nothing was traced",
            tip=f"{advice} Or choose the tracer `auto`, which takes the Python dispatch mode then, or `python`.",
        )
    return Choice("python", missing.reason)
