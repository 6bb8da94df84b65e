"""A whole sweep as one frozen request, and its run: which models, on what machines, in which order.

The command line makes one from its flags, a night one for every suite and mode. Nothing here prints.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hashbench.core.catalog import OUT_OF_MEMORY
from hashbench.core.devices import visibility
from hashbench.core.diagnose import fresh_process
from hashbench.core.errors import HashbenchError
from hashbench.core.extensions import after_sweep, executor_maker, forget_models, preload_of
from hashbench.core.io import read_json
from hashbench.core.processes import available_memory_mib
from hashbench.core.records import ModelSpec, RunOptions
from hashbench.core.results.folder import ACCURACY_FILE, SELECTION_FILE, ResultsFolder, checked_manifest
from hashbench.core.results.load import load_sweep
from hashbench.core.run import environment as fingerprints
from hashbench.core.suites import registry
from hashbench.core.suites.selection import Selection
from hashbench.core.sweep import LOCAL
from hashbench.core.sweep.executors import Executor, RayCluster
from hashbench.core.sweep.executors.local import (
    NATIVE_PRELOAD,
    LocalExecutor,
    answer_of_a_fork,
    begin_server,
    preload_for,
)
from hashbench.core.sweep.run import Event, SweepOpened, SweepResult, run_sweep
from hashbench.core.sweep.schedule import EarlierSweep
from hashbench.core.workers import WORKER_VARIABLES

_FEWEST_MIB_FOR_A_POOL = 6400
"""Of available memory: four Pythons that have imported torch take a quarter of it, for as long as the sweep lasts."""

_LOOKED_AT = 50
"""Earlier folders that are opened at most, the newest first: there may be thousands."""


@dataclass(frozen=True, slots=True)
class SweepRequest:
    """What one sweep is asked for. Fields without a word here are as in :func:`hashbench.core.sweep.run.run_sweep`.

    ``jobs`` of ``None``: one model at a time, or as many as the ``cluster`` can run. ``memory_mib``: what the models
    that run at once may be expected to take of this machine's memory together; ``None``: most of what is free.
    ``times_from``: the sweep that tells how long each model takes; ``None``: the newest one nearby where several run.
    ``fingerprints``: afterwards, record the kernel fingerprints of the models that ran (docs/fingerprint.md).
    """

    selection: Selection
    options: RunOptions
    output: Path
    command_line: tuple[str, ...] = ()
    executor: str = LOCAL
    cluster: RayCluster = field(default_factory=RayCluster)
    jobs: int | None = None
    resume: bool = False
    timeout: float = 2000.0
    times_from: Path | None = None
    memory_mib: float | None = None
    retries: int = 1
    fingerprints: bool = False


def run(
    request: SweepRequest,
    *,
    on_event: Callable[[Event], object] = lambda _: None,
    on_note: Callable[[str], object] = lambda _: None,
) -> SweepResult:
    """Run a sweep.

    Args:
        request: what is asked for.
        on_event: called with what happens, as by :func:`~hashbench.core.sweep.run.run_sweep`.
        on_note: called with what the user should know of the machine, a line each.

    Raises:
        HashbenchError: as :func:`~hashbench.core.sweep.run.run_sweep`, or the selection, the device or the cluster is
            not there.
        SweepInterrupted: Ctrl-C.
    """
    options = request.options
    ResultsFolder(request.output).refuse_unusable(resume=request.resume)
    if request.times_from is not None:
        load_sweep(request.times_from)
    with contextlib.ExitStack() as stack:
        stack.enter_context(registry.listed_once())
        # Before the files are imported: what is changed meanwhile then runs again, next time.
        digests = registry.digests(request.selection.suites)
        is_local = request.executor == LOCAL
        devices = None
        if is_local and options.device != "cpu":  # before code of users is imported
            devices = _devices_for(request)
        if is_local and options.device == "cpu" and any(map(registry.is_imported, request.selection.suites)):
            begin_server(preload_for(options.tracer, *preload_of(request)))  # while files are listed
        catalog = [spec for suite in request.selection.suites for spec in registry.catalog(suite)]
        specs = request.selection.of(catalog)
        _refuse_batch_size(options, specs)
        cluster: Executor | None = None
        if not is_local:
            preload = preload_for(options.tracer, *preload_of(request))
            made = executor_maker(request.executor)(
                specs, options, jobs=request.jobs, preload=preload, cluster=request.cluster
            )
            cluster = stack.enter_context(contextlib.closing(made))
        # Where others run the models, this machine need not have the device; each of theirs tells its own, and how it
        # traces.
        if cluster is None:
            devices = devices or _devices_for(request)
            options = replace(options, device=devices.device)
        else:
            devices = local_devices("cpu")
        environment = {**devices.environment, "command_line": list(request.command_line)}
        if cluster is not None:
            environment.pop("tracer", None)
        for note in (*devices.notes, *filter(None, [fingerprints.digests_note(devices.environment)])):
            on_note(note)

        def handle(event: Event) -> None:
            if isinstance(event, SweepOpened) and (note := fingerprints.tracer_note(environment)):
                on_note(note)
            if isinstance(event, SweepOpened):
                forget_models([spec for spec in specs if spec.suite in event.outdated], request)
            on_event(event)

        executor = cluster or devices.executor(jobs=request.jobs or 1, memory_mib=request.memory_mib)
        if cluster is None and options.device == "cpu":
            if options.stress:
                stack.enter_context(_stress_server(preload_for(options.tracer), at_once=True))
            stack.enter_context(diagnosis_servers([request]))
        result = run_sweep(
            specs,
            options,
            output=request.output,
            environment=environment,
            executor=executor,
            timeout=request.timeout,
            resume=request.resume,
            on_event=handle,
            partition=request.selection.partition(catalog),
            earlier=_earlier(request, specs, options),
            retries=request.retries,
            digests=digests,
        )
        for record in after_sweep(request):
            record(request, options, result, executor=executor, environment=devices.environment, on_note=on_note)
        return result


def _devices_for(request: SweepRequest) -> LocalDevices:
    options = request.options
    return local_devices(options.device, options.tracer, preload=preload_of(request), backend=options.backend)


@contextlib.contextmanager
def diagnosis_servers(requests: Collection[SweepRequest]) -> Iterator[None]:
    """Start fork servers, with torch imported, for the fresh processes of these sweeps; each starts at its first
    request. One serves repros and stressed runs, several the runs of an experiment if there is memory for them. None if
    nothing is diagnosed or stressed on this machine's CPU; existing servers are shared."""
    here = [request.options for request in requests if request.executor == LOCAL and request.options.device == "cpu"]
    diagnosed = [options for options in here if options.diagnose_budget > 0]
    with contextlib.ExitStack() as stack:
        if stressed := [options for options in here if options.stress]:
            needed = {name: None for options in stressed for name in preload_for(options.tracer)}
            stack.enter_context(_stress_server(tuple(needed), at_once=False))
        if diagnosed and not fresh_process.is_served():
            alone = fresh_process.served(fresh_process.TORCH_ALONE, environment=WORKER_VARIABLES, at_once=False)
            stack.enter_context(alone)
        if diagnosed and not fresh_process.is_pooled() and available_memory_mib() >= _FEWEST_MIB_FOR_A_POOL:
            native = any(options.tracer != "python" for options in diagnosed)
            preload = (NATIVE_PRELOAD,) if native else ()
            stack.enter_context(fresh_process.pooled(preload=preload, environment=WORKER_VARIABLES))
        yield


def _stress_server(preload: Sequence[str], *, at_once: bool) -> contextlib.AbstractContextManager[None]:
    """Start the fork server of stressed models, with what workers preload; reuse the existing server if it has that."""
    if fresh_process.is_served(fresh_process.DEFAULT_TARGET, *preload):
        return contextlib.nullcontext()
    return fresh_process.served(preload=preload, environment=WORKER_VARIABLES, at_once=at_once)


def _refuse_batch_size(options: RunOptions, specs: Sequence[ModelSpec]) -> None:
    fixed = next((spec.name for spec in specs if spec.batch_size is None), None)
    if options.batch_size is not None and fixed is not None:
        raise HashbenchError(
            f"--batch-size does not apply to {fixed}",
            consequence="its own function makes its inputs, so nothing was run",
            tip="Leave it out, or choose other models.",
        )


# ---------------------------------------------------------------------------------------- devices of this machine


@dataclass(frozen=True, slots=True)
class LocalDevices:
    """The ``environment``'s fingerprint; ``device`` as workers call theirs; the ``assignments`` that they are given in
    turn (none on the CPU and on kinds that cannot be shared out); ``notes`` for the user, a line each; ``preload`` is
    imported and called before workers are forked."""

    environment: dict[str, Any]
    device: str
    assignments: tuple[visibility.DeviceAssignment, ...] = ()
    notes: tuple[str, ...] = ()
    preload: tuple[str, ...] = ()

    def executor(self, *, jobs: int = 1, memory_mib: float | None = None) -> LocalExecutor:
        """Create the executor of ``jobs`` workers at once on these devices."""
        return LocalExecutor(jobs=jobs, preload=self.preload, devices=self.assignments, memory_mib=memory_mib)


def local_devices(
    device: str, tracer: str = "python", *, preload: Sequence[str] = (), backend: str = ""
) -> LocalDevices:
    """Look at this machine: the environment, and the devices of workers on ``device``, traced by ``tracer``. Workers
    also ``preload`` these. Notes name the devices that are left out
    and the variable that is overridden. A ``backend`` of ``torch.compile`` is looked up.

    A child process looks, on the CPU a fork of the workers' server: a process that has initialised CUDA cannot fork
    workers that use it.

    Raises:
        HashbenchError: the device, the tracer or the backend is not available.
    """
    collect = functools.partial(
        fingerprints.collect_in_child, device=device, variables=WORKER_VARIABLES, tracer=tracer, backend=backend
    )
    if device == "cpu":
        loaded = preload_for(tracer, *preload)
        by = functools.partial(answer_of_a_fork, preload=loaded)
        return LocalDevices(collect(by=by), device, preload=loaded)
    environment = collect()
    loaded = preload_for(environment.get("tracer", "python"), *preload)
    assignments = visibility.assignments(device, environment, os.environ)
    if not assignments:
        return LocalDevices(environment, device, preload=loaded)
    conflict = visibility.workspace_conflict(os.environ.get(visibility.WORKSPACE_VARIABLE))
    notes = tuple(filter(None, (visibility.left_out(device, environment), conflict)))
    # Each worker sees its own as number 0, so the rows of cuda:1 are rows of cuda.
    return LocalDevices(environment, visibility.kind(device), assignments, notes, loaded)


# ------------------------------------------------------------------------- time and memory estimates from a past sweep


def _earlier(request: SweepRequest, specs: Sequence[ModelSpec], options: RunOptions) -> EarlierSweep:
    """Return the sweep whose timings order the models; an empty one for one worker, which keeps the order of the
    selection."""
    if request.times_from is not None:
        return read_estimates(request.times_from, mode=options.mode, device=options.device)  # of any backend
    if (request.jobs or 1) == 1 and request.executor == LOCAL:
        return EarlierSweep()
    models = {(spec.suite, spec.name) for spec in specs}
    of = {"mode": options.mode, "device": options.device, "backend": options.backend}
    return newest_before(request.output, models=models, **of)


def read_estimates(path: Path, *, mode: str, device: str) -> EarlierSweep:
    """Read times and memory of models in ``mode`` on ``device`` from the sweep at ``path`` (a results folder, or a
    CSV).

    Raises:
        HashbenchError: it cannot be read, or has no times for any model in this mode on this device.
    """
    rows = [row for row in load_sweep(path).rows if (row.mode, row.dev) == (mode, device)]
    seconds = {(row.suite, row.name): row.seconds + (row.overhead_seconds or 0.0) for row in rows if row.seconds}
    if not seconds:
        raise HashbenchError(
            f"{path} has no times for {mode} on {device}",
            consequence="it has no timings to schedule by",
            tip="Name another sweep with --times-from, or leave it out.",
        )
    sufficed = [row for row in rows if row.accuracy not in OUT_OF_MEMORY]  # those wanted more than they got
    return EarlierSweep(
        str(path),
        seconds,
        memory_mib={(row.suite, row.name): row.peak_memory_mib for row in sufficed if row.peak_memory_mib},
        device_memory_mib={(row.suite, row.name): row.device_memory_mib for row in sufficed if row.device_memory_mib},
    )


def newest_before(
    output: Path, *, models: Collection[tuple[str, str]], mode: str, device: str, backend: str = ""
) -> EarlierSweep:
    """Find the newest sweep of at least half of ``models``, as ``(suite, name)``, in this mode on this device under
    this backend, beside ``output`` or under the same name beside its parent (``<night>/<suite>_<mode>``); an empty one
    if there is none."""
    for manifest in _newest_manifests(output.absolute()):
        try:
            content = checked_manifest(read_json(manifest))
            asked, known = content["options"], {(suite, name) for suite, name in content["models"]}
            enough = 2 * len(known.intersection(models)) >= len(models)
            if enough and (asked["mode"], asked["device"], asked.get("backend", "")) == (mode, device, backend):
                return read_estimates(manifest.parent, mode=mode, device=device)
        except (OSError, ValueError, KeyError, HashbenchError):
            continue
    return EarlierSweep()


def _newest_manifests(output: Path) -> list[Path]:
    """List the manifests of finished sweeps other than ``output``, the newest first."""
    try:
        beside = output.parent.glob(f"*/{SELECTION_FILE}")
        other_nights = output.parents[1].glob(f"*/{output.name}/{SELECTION_FILE}") if len(output.parents) > 1 else ()
        others = [path for path in (*beside, *other_nights) if path.parent.resolve() != output.resolve()]
        dated = [(path.stat().st_mtime, path) for path in others if path.with_name(ACCURACY_FILE).is_file()]
    except OSError:
        return []
    return [path for _, path in sorted(dated, reverse=True)[:_LOOKED_AT]]
