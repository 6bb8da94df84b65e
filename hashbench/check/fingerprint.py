"""The kernel fingerprint of a model: its op signatures collected in one traced run, then each run in isolation."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from hashbench.catalog import Status
from hashbench.check.model import BenchmarkRunner
from hashbench.check.pair import again_with_warnings
from hashbench.errors import named_line
from hashbench.fingerprint import document
from hashbench.fingerprint.calls import KernelCollector
from hashbench.fingerprint.document import Fingerprints, ModelFingerprint
from hashbench.fingerprint.measure import isolation, measure
from hashbench.processes import tell_phase
from hashbench.records import Failure, ModelSpec, Row, RunOptions
from hashbench.run.outcome import release_memory
from hashbench.run.rng import preserved_rng

SECONDS = 60.0
"""After so many, no further kernel of a model is run; the rest is left out, which the fingerprint says."""


def fingerprint_of(spec: ModelSpec, options: RunOptions) -> ModelFingerprint | Failure:
    """The fingerprint of a model, or why it cannot be run. Settings and random state are as before afterwards."""
    runner = BenchmarkRunner(options)
    wanted = options.deterministic or spec.deterministic or "on"
    with preserved_rng():
        collected, _ = again_with_warnings(functools.partial(_collected, runner, spec), wanted)
        return collected.failure or fingerprint_from(collected.kernels, spec, options, level=collected.deterministic)


@dataclass(frozen=True, slots=True)
class _Collected:
    """The signatures of one run at this deterministic level, or why it failed."""

    kernels: KernelCollector
    deterministic: str
    failure: Failure | None = None


def _collected(runner: BenchmarkRunner, spec: ModelSpec, level: str) -> _Collected:
    """The signatures of one run at this deterministic level; the model's memory is free again."""
    collector = KernelCollector()
    tell_phase("collecting its kernels")
    try:
        run = runner.watched_run(spec, collector, level=level)
    except Exception as error:  # of the model's own code
        return _Collected(collector, level, Failure(named_line(error)))
    finally:
        release_memory(runner.device)
    return _Collected(collector, level, run if isinstance(run, Failure) else None)


def fingerprint_from(
    collected: KernelCollector, spec: ModelSpec, options: RunOptions, *, level: str, seconds: float = SECONDS
) -> ModelFingerprint:
    """The fingerprint of a model whose run, at deterministic ``level``, was collected. Each kernel runs in isolation;
    one that has not begun after so many ``seconds`` is left out."""
    tell_phase("running its kernels")
    with isolation(deterministic=level, threads=options.threads):
        measured = measure(collected, device=torch.device(options.device), seconds=seconds)
        threads = torch.get_num_threads()
    return ModelFingerprint(
        suite=spec.suite,
        name=spec.name,
        mode=options.mode,
        device=options.device,
        dtype=options.dtype_column,
        deterministic=level,
        threads=threads,
        kernels=measured.kernels,
        contents=measured.contents,
        left_out=measured.left_out,
    )


def record_model(spec: ModelSpec, options: RunOptions) -> Row:
    """What a worker of ``hashbench fingerprint record`` calls: write the model's fingerprint into the folder
    ``options.output``, in a file of the model's own. The row tells why there is none."""
    made = fingerprint_of(spec, options)
    row = Row(options.device, spec.name, None, Status.PASS, suite=spec.suite, mode=options.mode)
    if isinstance(made, Failure):
        return replace(row, accuracy=Status.FIRST_RUN_FAIL, error=made.error)
    document.write(document.path_in(Path(options.output), made.key), Fingerprints({}, (made,)))
    return row
