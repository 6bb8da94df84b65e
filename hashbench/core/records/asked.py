"""What is asked: models and options. Pure; imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hashbench.core.catalog import INVARIANCES

PHASES = ("forward", "backward", "optimizer")


MODES = ("training", "inference")
"""Modes of a model: ``train()`` with backward and optimizer, or ``eval()``, forward only."""


BATCH_INVARIANCE = "batch-invariance"


INVARIANCE_GROUPS: Mapping[str, tuple[str, ...]] = {
    group: tuple(invariance.name for invariance in INVARIANCES.values() if invariance.group == group)
    for group in dict.fromkeys(invariance.group for invariance in INVARIANCES.values())
}
"""What ``--invariance`` takes, and the invariances that each word stands for; these are taken, too."""


def invariances_of(words: Sequence[str]) -> tuple[str, ...]:
    """The invariances that words of ``--invariance`` stand for, each once.

    Raises:
        ValueError: a word stands for none.
    """
    known = {**INVARIANCE_GROUPS, **{invariance.name: (invariance.name,) for invariance in INVARIANCES.values()}}
    for word in words:
        if word not in known:
            raise ValueError(f"{word!r} is none of {', '.join(known)}")
    return tuple(dict.fromkeys(name for word in words for name in known[word]))


SWEEP_MODES = (*MODES, *INVARIANCES)
"""Modes of a sweep; the invariances run models in inference."""


SMALLEST_BATCH = 8
"""Minimum batch size for batch invariance, as in dynamo."""


DETERMINISTIC = ("on", "warn", "off")


DTYPES = ("float32", "bfloat16", "float16", "amp")


TRACERS = ("auto", "native", "python")


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One model of a suite: a line of ``models/<suite>.csv`` or an entry of a user's ``MODELS``.

    Attributes:
        suite: name of the suite; for a zoo file, the file's name without ``.py``.
        name: of the model in its suite.
        task: kind of task.
        family: architecture family.
        batch_size: examples per step; ``None`` if the model's function makes the inputs.
        input_shape: without batch dimension.
        arguments: passed to the constructor.
        default: part of the default selection.
        skip_training: why training cannot run; empty if it can.
        skip_inference: why inference cannot run; empty if it can.
        devices: supported device types (``cuda``, ``xpu``); empty: any.
        deterministic: level; empty: the command line's, else the harness default.
        optimizer: as for ``deterministic``.
        iterations: steps per run; ``None``: as for ``deterministic``.
        runs: number of runs; ``None``: as for ``deterministic``.
        world_size: number of ranks that run the model together; ``None``: as for ``deterministic``, else 1.
        parameters: number of elements of the module's parameters, if known.
        note: remark.
        source: absolute path of the zoo file.
    """

    suite: str
    name: str
    task: str = ""
    family: str = ""
    batch_size: int | None = None
    input_shape: tuple[int, ...] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)
    default: bool = False
    skip_training: str = ""
    skip_inference: str = ""
    devices: tuple[str, ...] = ()
    deterministic: str = ""
    optimizer: str = ""
    iterations: int | None = None
    runs: int | None = None
    world_size: int | None = None
    parameters: int | None = None
    note: str = ""
    source: str = ""

    def skip_reason(self, mode: str, *, device: str = "cpu") -> str:
        """Return why this model cannot run in ``mode`` on ``device`` (``cpu``, ``cuda:1``); empty if it can."""
        if self.devices and device.partition(":")[0] not in self.devices:
            return f"needs {' or '.join(self.devices)}"
        return self.skip_training if mode == "training" else self.skip_inference


def flags_of_mode(mode: str) -> tuple[str, ...]:
    """Return the command line flags that select this mode of a sweep."""
    if mode not in INVARIANCES:
        return (f"--{mode}",)
    named = ("--invariance", INVARIANCES[mode].name) if mode != BATCH_INVARIANCE else ()
    return ("--inference", "--batch-invariant", *named)


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How to run every model of a sweep: the flags of ``hashbench sweep``.

    Attributes:
        mode: one of :data:`SWEEP_MODES`.
        device: torch device.
        dtype: empty: as the model was built.
        iterations: steps per run; ``None``: the model's, else 2.
        runs: number of runs; ``None``: the model's, else 2.
        batch_size: ``None``: the model's.
        threads: torch threads; ``None``: torch's default.
        seed: of all random generators.
        cotangent: ``ones`` or ``random``: default loss in training.
        deterministic: empty: the model's, else ``on``.
        hash_inputs: hash every input before each call.
        untraced_pair: also compare two untraced runs.
        keep_traces: keep traces of runs that agree.
        all_sources: look for every independent source of differences.
        replays: minimum repetitions per experiment.
        diagnose_budget: seconds for all experiments on one model; 0: none.
        capture_mib: largest call captured for experiments, in MiB.
        tracer: one of :data:`TRACERS`; ``auto``: native if available.
        stress: rerun passing models under perturbations.
        backend: of ``torch.compile``, whose program is compared with eager mode; empty: no compiled run. Behind an
            ``@``: the device that it makes code for.
        compilations: number of compilations that are compared; 1: no further one.
        extensions: names of further extensions that are asked for.
        output: results folder.
    """

    mode: str = "inference"
    device: str = "cpu"
    dtype: str = ""
    iterations: int | None = None
    runs: int | None = None
    batch_size: int | None = None
    threads: int | None = None
    seed: int = 1337
    cotangent: str = "ones"
    deterministic: str = ""
    hash_inputs: bool = False
    untraced_pair: bool = False
    keep_traces: bool = False
    all_sources: bool = False
    replays: int = 20
    diagnose_budget: float = 120.0
    capture_mib: float = 2048.0
    tracer: str = "auto"
    stress: bool = False
    backend: str = ""
    compilations: int = 1
    extensions: tuple[str, ...] = ()
    output: str = ""

    @property
    def dtype_column(self) -> str:
        """The ``dtype`` of every row of the sweep, also for models without a result."""
        return self.dtype or "float32"

    @property
    def made_for(self) -> str:
        """The device that code is made for: what follows an ``@`` in the backend, else ``device``."""
        return self.backend.partition("@")[2] or self.device

    @property
    def batch_invariant(self) -> bool:
        """Whether an invariance is checked, as ``--batch-invariant`` and ``--invariance`` ask for."""
        return self.mode in INVARIANCES

    @property
    def invariance(self) -> str:
        """Name of the invariance that is checked; empty in other modes."""
        return INVARIANCES[self.mode].name if self.batch_invariant else ""

    @property
    def model_mode(self) -> str:
        """The mode in which a model is built and run, one of :data:`MODES`."""
        return "inference" if self.batch_invariant else self.mode

    def batch_size_of(self, spec: ModelSpec) -> int | None:
        """Return the examples per step of a model; ``None`` if its function makes the inputs."""
        of_items = self.batch_invariant and INVARIANCES[self.mode].unit == "items"
        if self.batch_size is not None or spec.batch_size is None or not of_items:
            return self.batch_size or spec.batch_size
        return max(SMALLEST_BATCH, spec.batch_size)
