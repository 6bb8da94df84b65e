"""Compare two recordings of a model and list the kernels that changed. Pure; imports no torch.

Two recordings are as conclusive as a verification, since synthetic inputs are the same everywhere. A kernel whose
inputs differ, because the model itself produced other indices or another range, is not compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hashbench.core.report.reasons import KernelSigns
from hashbench.core.text import count, join_limited
from hashbench.extensions.fingerprint.document import VARIES, Fingerprints, Kernel, ModelFingerprint
from hashbench.extensions.fingerprint.text import environment_changes, family

_SHOWN = 4
"""Maximum number of kernels in a sentence."""


@dataclass(frozen=True, slots=True)
class Changes:
    """Comparison of two recordings of a model.

    Attributes:
        equal: kernels with equal inputs and outputs.
        changed: kernels with equal inputs and different outputs.
        other_inputs: number of signatures in both with different inputs.
        alone: number of signatures in only one of them.
    """

    equal: tuple[Kernel, ...]
    changed: tuple[Kernel, ...]
    other_inputs: int = 0
    alone: int = 0

    @property
    def same(self) -> int:
        """Number of kernels with equal inputs and outputs."""
        return len(self.equal)

    @property
    def compared(self) -> int:
        """Number of kernels that were compared."""
        return self.same + len(self.changed)


def changes_between(base: ModelFingerprint, new: ModelFingerprint) -> Changes:
    """Compare the kernels of two recordings of a model."""
    before = {kernel.signature(): kernel for kernel in base.kernels}
    after = {kernel.signature(): kernel for kernel in new.kernels}
    other_inputs = 0
    equal, changed = [], []
    for key, kernel in before.items():
        if key not in after:
            continue
        if base.inputs_of(kernel) != new.inputs_of(after[key]):
            other_inputs += 1
        elif kernel.outputs == after[key].outputs:
            equal.append(kernel)
        else:
            changed.append(kernel)
    return Changes(tuple(equal), tuple(changed), other_inputs, alone=len(before.keys() ^ after.keys()))


def signs_between(base: Fingerprints, new: Fingerprints) -> KernelSigns:
    """Return what two recordings of one model say of its kernels, by op.

    An op varies if it was recorded wherever it was called, and gives other results now when it is repeated.
    """
    before, after = base.models[0], new.models[0]
    changes = changes_between(before, after)
    recorded = {kernel.op for kernel in before.kernels} - before.left_out.get(VARIES, {}).keys()
    changed, varies = {kernel.op for kernel in changes.changed}, recorded & after.left_out.get(VARIES, {}).keys()
    return KernelSigns(
        changed=frozenset(changed),
        varies=frozenset(varies),
        same=frozenset({kernel.op for kernel in changes.equal} - changed - varies),
        environment=", ".join(environment_changes(base.environment, new.environment)),
    )


def changes_text(changes: Changes, *, base: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Format the changes from environment ``base`` to ``new`` as one clause.

    ``2 of 57 kernels changed with torch 2.15.0 -> 2.15.1: aten.mm.default (MKL), aten.gelu.default (oneDNN)``.
    """
    since = ", ".join(environment_changes(base, new)) or "no known change of the environment"
    others = f"; {changes.other_inputs} had other inputs" if changes.other_inputs else ""
    if not changes.compared:
        return f"no kernel can be compared with {since}{others}"
    if not changes.changed:
        return f"none of {count(changes.compared, 'kernel')} changed with {since}{others}"
    named = dict.fromkeys(f"{kernel.op} ({family(kernel.library)})" for kernel in changes.changed)
    share = f"{len(changes.changed)} of {count(changes.compared, 'kernel')}"
    return f"{share} changed with {since}: {join_limited(list(named), _SHOWN)}{others}"
