"""Which kernels changed from one recording of a model to another. Pure; imports no torch.

Two recordings tell as much as a verification: inputs are the same wherever they are recorded. Where the model itself
led to other inputs (other indices, another range), nothing is said of a kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hashbench.fingerprint.document import Kernel, ModelFingerprint
from hashbench.fingerprint.text import environment_changes, family
from hashbench.text import a_few, count

_SHOWN = 4
"""Kernels that a sentence names."""


@dataclass(frozen=True, slots=True)
class Changes:
    """Of the signatures that both recordings of a model have with the same inputs, how many gave the ``same`` and which
    ``changed``; how many are in both with ``other_inputs``, and how many in one of them ``alone``."""

    same: int
    changed: tuple[Kernel, ...]
    other_inputs: int = 0
    alone: int = 0

    @property
    def compared(self) -> int:
        """How many tell something."""
        return self.same + len(self.changed)


def changes_between(base: ModelFingerprint, new: ModelFingerprint) -> Changes:
    """Which kernels of ``base`` gave something else in ``new``."""
    before = {kernel.signature(): kernel for kernel in base.kernels}
    after = {kernel.signature(): kernel for kernel in new.kernels}
    same = other_inputs = 0
    changed = []
    for key in before.keys() & after.keys():
        if base.inputs_of(before[key]) != new.inputs_of(after[key]):
            other_inputs += 1
        elif before[key].outputs == after[key].outputs:
            same += 1
        else:
            changed.append(before[key])
    order = {kernel.signature(): place for place, kernel in enumerate(base.kernels)}
    changed.sort(key=lambda kernel: order[kernel.signature()])
    return Changes(same, tuple(changed), other_inputs, alone=len(before.keys() ^ after.keys()))


def changes_text(changes: Changes, *, base: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """One clause on the kernels that changed from environment ``base`` to ``new``: ``2 of 57 kernels changed with torch
    2.15.0 -> 2.15.1: aten.mm.default (MKL), aten.gelu.default (oneDNN)``."""
    since = ", ".join(environment_changes(base, new)) or "no known change of the environment"
    others = f"; {changes.other_inputs} had other inputs" if changes.other_inputs else ""
    if not changes.compared:
        return f"no kernel can be compared with {since}{others}"
    if not changes.changed:
        return f"none of {count(changes.compared, 'kernel')} changed with {since}{others}"
    named = dict.fromkeys(f"{kernel.op} ({family(kernel.library)})" for kernel in changes.changed)
    share = f"{len(changes.changed)} of {count(changes.compared, 'kernel')}"
    return f"{share} changed with {since}: {a_few(list(named), _SHOWN)}{others}"
