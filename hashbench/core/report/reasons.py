"""Which kind of reason made a model get worse: the rule, on what is known of it. Pure; imports no torch.

A kind is named where the evidence excludes the others; where two things changed at once, or nothing is recorded, the
reason is :attr:`Reason.UNKNOWN`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from hashbench.core.catalog import Word

CHANCE = 0.05
"""Least probability of an earlier pass, at the rate of today's differences, by which chance explains that pass."""


class Reason(Word):
    """Kinds of reasons, the most severe first: wrong in every run, then unknown, then without a result, then wrong now
    and then.

    Attributes:
        meaning: a clause for a first-time reader.
    """

    meaning: str

    COMPILER = "compiler", "eager runs agree, and the compiled model does not give what they give"
    LIBRARY = "library", "its kernel computes something else since the environment changed, as fingerprints show"
    MODEL = "model", "the file of its suite changed, and nothing else that is recorded"
    UNKNOWN = "not known", "several things changed at once, or what changed is not recorded"
    MACHINE = "harness or machine", "it ran out of memory, time or disk, was killed, or left no row"
    FLAKE = "flake", "it differs in some runs of one build and not in others"


class Sign(Enum):
    """What is known of one thing in both sweeps."""

    CHANGED = "changed"
    SAME = "same"
    UNKNOWN = "unknown"
    VARIES = "varies"
    """Of a kernel: it was repeatable, and is not any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Signs:
    """What is known of a model that got worse.

    Attributes:
        comparable: it ran under the same conditions as before.
        lacked: it lacked memory, time or disk, was killed from outside, or left no row although it was asked for.
        compiled: its eager runs agree, and its compiled program does not give the same, or does not run.
        some_runs: it differs in some runs of this build and not in others, so that chance explains the earlier pass.
        model: the files of its suite.
        environment: the machine, its libraries and settings.
        kernel: the kernel where runs diverge first, called with equal inputs in both sweeps.
    """

    comparable: bool = True
    lacked: bool = False
    compiled: bool = False
    some_runs: bool = False
    model: Sign = Sign.UNKNOWN
    environment: Sign = Sign.UNKNOWN
    kernel: Sign = Sign.UNKNOWN


def decide_reason(signs: Signs) -> Reason:
    """Return the kind of reason that these signs prove."""
    changed_model = signs.model is Sign.CHANGED
    if not signs.comparable:
        return Reason.UNKNOWN
    if signs.lacked:
        return Reason.UNKNOWN if changed_model else Reason.MACHINE
    if signs.compiled:
        return Reason.COMPILER
    if signs.some_runs:
        return Reason.UNKNOWN if changed_model or signs.kernel is Sign.CHANGED else Reason.FLAKE
    if signs.kernel in (Sign.CHANGED, Sign.VARIES):
        return Reason.LIBRARY if signs.environment is Sign.CHANGED and not changed_model else Reason.UNKNOWN
    if changed_model and signs.environment is Sign.SAME:
        return Reason.MODEL
    return Reason.UNKNOWN


def explained_by_chance(rate: float, pairs: int) -> bool:
    """Return True if runs that differ at this ``rate`` (0 to 1) could well have agreed in so many ``pairs`` before.

    >>> explained_by_chance(2 / 9, 1), explained_by_chance(1.0, 1), explained_by_chance(0.5, 20)
    (True, False, False)
    """
    return 0 < rate < 1 and (1 - rate) ** max(1, pairs) >= CHANCE


@dataclass(frozen=True, slots=True)
class KernelSigns:
    """What two recordings of the kernels of one model say, by op.

    Attributes:
        changed: ops with other outputs for equal inputs.
        varies: ops that were repeatable and are not any more.
        same: ops with equal outputs wherever they were compared.
        environment: what changed between the recordings, ``torch 2.15.0 -> 2.15.1``; empty if nothing did.
        tell: command that would compare kernels where a recording is missing; empty for none.
    """

    changed: frozenset[str] = frozenset()
    varies: frozenset[str] = frozenset()
    same: frozenset[str] = frozenset()
    environment: str = ""
    tell: str = ""

    def of(self, op: str) -> Sign:
        """Return what is known of the kernels of an op."""
        known = ((Sign.CHANGED, self.changed), (Sign.VARIES, self.varies), (Sign.SAME, self.same))
        return next((sign for sign, ops in known if op in ops), Sign.UNKNOWN)
