"""Choose the tracer: the native recorder, or the Python dispatch mode.

The Python dispatch mode changes which ops run: while any mode is active, torch treats every tensor as a subclass, so
gradients accumulate by ``add`` instead of ``add_`` and some formulas differ. The native recorder sees the ops of the
untraced program. Traces of the two are therefore never compared.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hashbench.core.errors import HashbenchError
from hashbench.core.records import TRACERS

if TYPE_CHECKING:
    from hashbench.core.native.build import Unavailable


@dataclass(frozen=True, slots=True)
class Choice:
    """The tracer in use.

    Attributes:
        tracer: ``native`` or ``python``.
        reason: why ``auto`` fell back to ``python``; ``""`` otherwise.
    """

    tracer: str
    reason: str = ""


@functools.cache  # repeating the imports would cost a tenth of entering a trace
def native_unavailable() -> Unavailable | None:
    """Return why the native tracer cannot be used in this process; ``None`` if it can."""
    from hashbench.core.native.build import Unavailable
    from hashbench.core.trace.native import load

    found = load()
    return found if isinstance(found, Unavailable) else None


def native_sees_into_subclasses() -> bool:
    """Return True if the native tracer sees calls within ops on tensor subclasses."""
    from hashbench.core.native.library import sees_into_subclasses

    return sees_into_subclasses()


def choose(wanted: str, *, into_subclasses: bool = False) -> Choice:
    """Return the tracer for ``auto`` (native if available, else Python), ``native`` or ``python``.

    With ``into_subclasses``, ``auto`` is native only if calls within ops on tensor subclasses are seen: without the
    collectives of a DTensor's op, what came from another rank would seem to be made here.

    Raises:
        HashbenchError: ``native`` is unavailable, or ``wanted`` is none of the three.
    """
    if wanted not in TRACERS:
        raise HashbenchError(
            f"invalid tracer {wanted!r:.80}",
            consequence="nothing was traced",
            tip=f"Choose from: {', '.join(TRACERS)}.",
        )
    if wanted == "python":
        return Choice("python")
    missing = native_unavailable()
    if missing is None and wanted == "auto" and into_subclasses and not native_sees_into_subclasses():
        return Choice("python", "this torch hides collectives within ops on DTensors from the native tracer")
    if missing is None:
        return Choice("native")
    if wanted == "native":
        advice = f"{missing.advice[:1].upper()}{missing.advice[1:]}."
        raise HashbenchError(
            "the native tracer is unavailable",
            consequence=f"{missing.what}, so nothing was traced",
            tip=f"{advice} Or choose the tracer `auto`, which falls back to the Python dispatch mode, or `python`.",
        )
    return Choice("python", missing.reason)
