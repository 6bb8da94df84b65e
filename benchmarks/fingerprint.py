"""What a kernel fingerprint costs: seconds to collect the signatures of a model and to run them, beside an untraced run
of it; bytes of its file; seconds to verify it. Without the start of a process and loading the model."""

from __future__ import annotations

import functools
import gzip
import time
from collections.abc import Callable
from typing import TypeVar

import torch

from benchmarks.table import Table, against
from hashbench.core.check.model import BenchmarkRunner, prepared_run
from hashbench.core.records import Failure, ModelSpec, RunOptions
from hashbench.core.run.outcome import attempt
from hashbench.core.run.rng import preserved_rng
from hashbench.core.run.settings import deterministic_settings
from hashbench.core.suites import registry
from hashbench.extensions.fingerprint import document
from hashbench.extensions.fingerprint.calls import KernelCollector
from hashbench.extensions.fingerprint.check import fingerprint_of
from hashbench.extensions.fingerprint.checking import check
from hashbench.extensions.fingerprint.document import Fingerprints
from hashbench.extensions.fingerprint.verify import SAME

SECONDS, BYTES = 5.0, 100_000
MODELS = (
    ("torchvision", "resnet18"),
    ("torchvision", "mobilenet_v3_small"),
    ("torchvision", "squeezenet1_1"),
    ("torchvision", "densenet121"),
    ("huggingface_tiny", "BertForMaskedLM"),
    ("huggingface_tiny", "GPT2ForSequenceClassification"),
)
"""In training, with their own batch size."""

_Made = TypeVar("_Made")


def measure() -> list[Table]:
    """One row for each model."""
    registry.require(sorted({suite for suite, _ in MODELS}))
    specs = {(spec.suite, spec.name): spec for suite, _ in MODELS for spec in registry.catalog(suite)}
    rows = [_row(specs[model]) for model in MODELS if model in specs]
    headers = ("model", "kernels", "untraced run", "collecting", "over a run", "recorded in", "goal", "reached",
               "bytes", "goal", "reached", "verified in", "changed")  # fmt: skip
    clock = "CPU seconds of this process" if torch.get_num_threads() == 1 else "seconds on the wall"
    note = f"Seconds are {clock}. A run has two steps; a fingerprint is recorded by one run and then all kernels."
    return [Table("Kernel fingerprints", headers, tuple(rows), (note,))]


def _row(spec: ModelSpec) -> tuple[object, ...]:
    options = RunOptions(mode="training")
    runner = BenchmarkRunner(options)
    with preserved_rng(), deterministic_settings("on", threads=None), runner.pick_grad():
        workload = runner.prepare(runner.load_model(spec))
        runner.load_model(spec)  # imports are not counted
        prepare = functools.partial(prepared_run, runner, workload, spec.optimizer)
        attempt(prepare, options, traced=False)
        untraced, _ = _timed(lambda: attempt(prepare, options, traced=False))
        collecting, _ = _timed(lambda: attempt(prepare, options, watcher=KernelCollector()))
    loading, _ = _timed(lambda: runner.load_model(spec))
    recorded, made = _timed(lambda: fingerprint_of(spec, options))
    if isinstance(made, Failure):
        return spec.name, made.error, *[""] * 11
    fingerprints = Fingerprints({}, (made,))
    nbytes = len(gzip.compress(document.text_of(fingerprints).encode()))
    verified, results = _timed(lambda: [checked.status for checked in check(fingerprints)])
    return (
        spec.name,
        len(made.kernels),
        f"{untraced:.2f} s",
        f"{collecting:.2f} s",
        f"{collecting / untraced:.2f}x",
        *against(recorded - loading, goal=SECONDS, unit=" s"),
        *against(nbytes / 1000, goal=BYTES / 1000, unit=" KB"),
        f"{verified:.2f} s",
        len(results) - results.count(SAME),
    )


def _timed(call: Callable[[], _Made]) -> tuple[float, _Made]:
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    begin = clock()
    made = call()
    return clock() - begin, made
