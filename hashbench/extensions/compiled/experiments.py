"""Which compilations with one change prove a finding, and what their results say. Pure; imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from hashbench.core.catalog import Confidence
from hashbench.core.records import ExperimentResult

COMPILATION = "compilation"
"""What these experiments repeat, as in :class:`~hashbench.core.catalog.Experiment`."""

MOST = 6
"""Compilations for one finding."""


@dataclass(frozen=True, slots=True)
class Trials:
    """Changes that are tried for a stage of the compiler, by the names of ``inductor.fallbacks.CHANGES``.

    Attributes:
        cures: that take a mistake of this stage away, the smallest first.
        controls: that should not.
    """

    cures: tuple[str, ...]
    controls: tuple[str, ...] = ()


OP = "eager_op"
"""The change that is tried with one op after another."""

TRIALS: Mapping[str, Trials] = MappingProxyType(
    {
        "decomposition": Trials(("no_decomposition", OP), ("scalar_code",)),
        "joint_graph_passes": Trials(("no_pass", OP), ("scalar_code",)),
        "post_grad_passes": Trials(("no_pass", OP), ("scalar_code",)),
        "lowering": Trials((OP,), ("scalar_code", "no_buffer_reuse")),
        "codegen": Trials(("scalar_code", "no_inplace_buffers", "no_buffer_reuse", OP), ("one_thread",)),
        "memory_planning": Trials(("no_buffer_reuse", "no_inplace_buffers", OP), ("scalar_code",)),
        "runtime": Trials(("one_thread", OP), ("no_buffer_reuse",)),
        "rounding": Trials(("precision_casts", OP)),
    }
)
"""Stage → the changes that are tried for a finding there."""

STAGE_OF_CURE: Mapping[str, str] = MappingProxyType(
    {"no_inplace_buffers": "memory_planning", "no_buffer_reuse": "memory_planning"}
)
"""Change → the stage whose mistake it was if a kernel looked wrong, and this helped."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A compilation to make: a change, and the op that it concerns (with :data:`OP`)."""

    change: str
    op: str = ""


def trial(attempt: Trial, *, gone: bool = False, note: str = "") -> ExperimentResult:
    """Return the result of one compilation: whether the finding was ``gone``, or why it was not run."""
    ran = not note
    differing = int(ran and not gone)
    return ExperimentResult(
        attempt.change, COMPILATION, trials=int(ran), differing=differing, found=attempt.op, note=note
    )


def next_attempt(stage: str, ops: Sequence[str], made: Sequence[ExperimentResult]) -> Trial | None:
    """Return the next compilation to make: cures up to the first one that helps, then a control if nothing else has
    shown that the finding does not vanish with any change.

    Args:
        stage: of the finding.
        ops: those that may be to blame, the likeliest first.
        made: what was tried.
    """
    trials = TRIALS.get(stage, Trials(()))
    tried = {(result.name, result.found) for result in made}
    if len(made) >= MOST:
        return None
    if any(map(_is_gone, made)):
        steady = any(result.ran and result.differing for result in made)
        waiting = [Trial(name) for name in (() if steady else trials.controls)]
    else:
        waiting = [trial for name in trials.cures for trial in (_each(ops) if name == OP else [Trial(name)])]
    return next((trial for trial in waiting if (trial.change, trial.op) not in tried), None)


def _each(ops: Sequence[str]) -> list[Trial]:
    return [Trial(OP, op) for op in dict.fromkeys(ops) if op]


def conclude(stage: str, made: Sequence[ExperimentResult]) -> tuple[Trial | None, Confidence]:
    """Return the smallest change that made the finding vanish, and how firmly the trials support the stage.

    Proven: a cure of the stage helped, and another change was tried and did not.
    """
    cures = TRIALS.get(stage, Trials(())).cures
    cure = next((result for result in made if result.name in cures and _is_gone(result)), None)
    if cure is None:
        return None, Confidence.OPEN
    others = [result for result in made if result.ran and result is not cure]
    steady = bool(others) and not any(map(_is_gone, others))
    return Trial(cure.name, cure.found), Confidence.PROVEN if steady else Confidence.LIKELY


def _is_gone(trial: ExperimentResult) -> bool:
    return trial.ran and not trial.differing
