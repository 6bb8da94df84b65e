"""Which compilations with one change prove a finding, and what their results say. Pure; imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from hashbench.catalog import Confidence
from hashbench.records import ExperimentResult

COMPILATION = "compilation"
"""What these experiments repeat, as in :class:`~hashbench.catalog.Experiment`."""

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


_OP = "eager_op"
TRIALS: Mapping[str, Trials] = MappingProxyType(
    {
        "decomposition": Trials(("no_decomposition", _OP), ("scalar_code",)),
        "joint_graph_passes": Trials(("no_pass", _OP), ("scalar_code",)),
        "post_grad_passes": Trials(("no_pass", _OP), ("scalar_code",)),
        "lowering": Trials((_OP,), ("scalar_code", "no_buffer_reuse")),
        "codegen": Trials(("scalar_code", "one_thread", "no_fusion", _OP), ("no_buffer_reuse",)),
        "memory_planning": Trials(("no_buffer_reuse", "no_inplace_buffers", "no_fusion", _OP), ("scalar_code",)),
        "runtime": Trials(("one_thread", _OP), ("no_buffer_reuse",)),
        "rounding": Trials(("precision_casts", _OP)),
    }
)
"""Stage → the changes that are tried for a finding there."""


def trial(change: str, *, gone: bool = False, note: str = "") -> ExperimentResult:
    """Return the result of one compilation with a change: whether the finding was ``gone``, or why it was not run."""
    return ExperimentResult(
        change, COMPILATION, trials=0 if note else 1, differing=int(not gone and not note), note=note
    )


def next_change(stage: str, made: Sequence[ExperimentResult]) -> str:
    """Return the next change to try; empty if it is decided: cures up to the first one that helps, then controls."""
    trials = TRIALS.get(stage, Trials(()))
    tried = {trial.name for trial in made}
    if len(made) >= MOST:
        return ""
    cured = any(_gone(trial) for trial in made if trial.name in trials.cures)
    waiting = [name for name in (() if cured else trials.cures) if name not in tried]
    if waiting:
        return waiting[0]
    return next((name for name in trials.controls if name not in tried), "") if cured else ""


def conclude(stage: str, made: Sequence[ExperimentResult]) -> tuple[str, Confidence]:
    """Return the smallest change that made the finding vanish, and how firmly the trials support the stage.

    Proven: a cure of the stage helped, and a control was run and did not.
    """
    trials = TRIALS.get(stage, Trials(()))
    by_name = {trial.name: trial for trial in made}
    cure = next((name for name in trials.cures if name in by_name and _gone(by_name[name])), "")
    controls = [by_name[name] for name in trials.controls if name in by_name and by_name[name].ran]
    if not cure:
        return "", Confidence.OPEN
    steady = bool(controls) and not any(_gone(trial) for trial in controls)
    return cure, Confidence.PROVEN if steady else Confidence.LIKELY


def _gone(trial: ExperimentResult) -> bool:
    return trial.ran and not trial.differing
