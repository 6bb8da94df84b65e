"""A whole sweep as one frozen request, and its run: which models, on what machines, in which order.

The command line makes one from its flags, a night one for every suite and mode. Nothing here prints.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from hashbench.errors import HashbenchError
from hashbench.records import ModelSpec, RunOptions
from hashbench.suites import registry
from hashbench.suites.selection import Selection
from hashbench.sweep import estimates
from hashbench.sweep.estimates import EarlierSweep
from hashbench.sweep.events import Event
from hashbench.sweep.executors import EXECUTORS, LOCAL, Executor
from hashbench.sweep.executors.local import LocalExecutor
from hashbench.sweep.local_devices import local_devices
from hashbench.sweep.run import SweepResult, run_sweep


@dataclass(frozen=True, slots=True)
class RayCluster:
    """What ``executor="ray"`` is asked for; fields as the arguments of
    :class:`hashbench.sweep.executors.ray.RayExecutor` (``patience`` of ``None``: its default)."""

    address: str = ""
    gpus: float | None = None
    resources: Mapping[str, float] = field(default_factory=dict)
    patience: float | None = None


@dataclass(frozen=True, slots=True)
class SweepRequest:
    """What one sweep is asked for. Fields without a word here are as in :func:`hashbench.sweep.run.run_sweep`.

    ``jobs`` of ``None``: one model at a time, or as many as the ``cluster`` can run (``None``: on this machine).
    ``times_from``: the sweep that tells how long each model takes; ``None``: the newest one nearby where several run.
    """

    selection: Selection
    options: RunOptions
    output: Path
    command_line: tuple[str, ...] = ()
    executor: str = LOCAL
    cluster: RayCluster = RayCluster()
    jobs: int | None = None
    resume: bool = False
    timeout: float = 2000.0
    times_from: Path | None = None
    memory_mib: float | None = None
    retries: int = 1


def run(
    request: SweepRequest,
    *,
    on_event: Callable[[Event], None] | None = None,
    on_note: Callable[[str], object] = str,
) -> SweepResult:
    """Run a sweep.

    Args:
        request: what is asked for.
        on_event: told what happens, as by :func:`~hashbench.sweep.run.run_sweep`.
        on_note: told what the user should know of the machine, a line each.

    Raises:
        HashbenchError: as :func:`~hashbench.sweep.run.run_sweep`, or the selection, the device or the cluster is not
            there.
        SweepInterrupted: Ctrl-C.
    """
    from hashbench.run.environment import digests_note

    options = request.options
    catalog = [spec for suite in request.selection.suites for spec in registry.catalog(suite)]
    specs = request.selection.of(catalog)
    _refuse_batch_size(options, specs)
    with _executor_elsewhere(request, specs) as cluster:
        # Where others run the models, this machine need not have the device; each of theirs tells its own.
        devices = local_devices(options.device if cluster is None else "cpu")
        executor = cluster
        if devices.assignments:
            options = replace(options, device=devices.device)
            executor = LocalExecutor(jobs=request.jobs or 1, devices=devices.assignments)
        for note in (*devices.notes, *filter(None, [digests_note(devices.environment)])):
            on_note(note)
        return run_sweep(
            specs,
            options,
            output=request.output,
            environment={**devices.environment, "command_line": list(request.command_line)},
            timeout=request.timeout,
            jobs=request.jobs or 1,
            resume=request.resume,
            on_event=on_event,
            partition=request.selection.partition(catalog),
            earlier=_earlier(request, specs, options),
            memory_mib=request.memory_mib,
            retries=request.retries,
            executor=executor,
        )


def _refuse_batch_size(options: RunOptions, specs: Sequence[ModelSpec]) -> None:
    fixed = next((spec.name for spec in specs if spec.batch_size is None), None)
    if options.batch_size is not None and fixed is not None:
        raise HashbenchError(
            f"--batch-size does not apply to {fixed}",
            consequence="its own function makes its inputs, so nothing was run",
            tip="Leave it out, or choose other models.",
        )


@contextlib.contextmanager
def _executor_elsewhere(request: SweepRequest, specs: Sequence[ModelSpec]) -> Iterator[Executor | None]:
    """The request's executor, connected; closed at the end. ``None`` for worker processes of this machine."""
    if not EXECUTORS[request.executor]:
        yield None
        return
    module, _, function = EXECUTORS[request.executor].partition(":")
    executor: Executor = getattr(importlib.import_module(module), function)(request, specs)
    with contextlib.closing(executor):
        yield executor


def _earlier(request: SweepRequest, specs: Sequence[ModelSpec], options: RunOptions) -> EarlierSweep | None:
    """The sweep that tells how long each model takes. One worker at a time runs the models in their own order."""
    if request.times_from is not None:
        return estimates.read(request.times_from, mode=options.mode, device=options.device)
    if (request.jobs or 1) == 1 and request.executor == LOCAL:
        return None
    models = {(spec.suite, spec.name) for spec in specs}
    return estimates.newest_before(request.output, models=models, mode=options.mode, device=options.device)
