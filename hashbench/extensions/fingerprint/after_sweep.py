"""The fingerprints of many models: each is recorded by a worker of its own, here or on a machine of a cluster."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hashbench.core.catalog import Kind, kind_of
from hashbench.core.errors import HashbenchError
from hashbench.core.processes import Interrupts, describe_end, last_words
from hashbench.core.records import ModelSpec, RunOptions
from hashbench.core.results.folder import ResultsFolder, file_key, left_row
from hashbench.core.suites import registry
from hashbench.core.sweep.executors import Executor, Resources, Task, TaskResult
from hashbench.extensions.fingerprint import document
from hashbench.extensions.fingerprint.document import Fingerprints, ModelFingerprint

if TYPE_CHECKING:
    from hashbench.core.sweep.request import SweepRequest
    from hashbench.core.sweep.run import SweepResult

TARGET = "hashbench.extensions.fingerprint.check:record_model"


@dataclass(frozen=True, slots=True)
class RecordedFingerprints:
    """What was recorded: for each model a file of its own, with the environment of the machine that ran it and the
    threads that it had; and for each model without one the reason, by name (``suite/name`` where several suites have a
    model of this name)."""

    files: tuple[Fingerprints, ...]
    failures: Mapping[str, str]

    @property
    def together(self) -> Fingerprints:
        """All in one file, of models that one machine ran."""
        return Fingerprints(self.files[0].environment, tuple(model for file in self.files for model in file.models))


def record(
    specs: Sequence[ModelSpec],
    options: RunOptions,
    *,
    executor: Executor,
    environment: Mapping[str, Any],
    timeout: float,
    on_progress: Callable[[str], object] = lambda _: None,
    target: str = TARGET,
) -> RecordedFingerprints:
    """Record as many models at once as the executor can run, which is closed at the end.

    Args:
        specs: the models; one that cannot run in this mode on this device is left out.
        options: how they run.
        executor: where.
        environment: the environment of this machine.
        timeout: seconds for one model.
        on_progress: called with what became of each model, a sentence each.
        target: ``module:function`` that a worker calls.

    Raises:
        HashbenchError: no model has a fingerprint.
    """
    names = _names(specs)
    failures: dict[str, str] = {}
    waiting: list[ModelSpec] = []
    for spec in specs:
        if reason := spec.skip_reason(options.mode, device=options.device):
            failures[names[_key(spec)]] = reason
            on_progress(f"[{len(failures)}/{len(specs)}] {names[_key(spec)]}: {reason}")
        else:
            waiting.append(spec)
    made: dict[tuple[str, str], Fingerprints] = {}
    with tempfile.TemporaryDirectory(prefix="hashbench-") as name, Interrupts() as interrupts:
        running: dict[str, int] = {}
        resources = executor.resources
        threads = resources.threads if options.threads is None else options.threads
        options = replace(options, output=name, threads=threads)
        try:
            with interrupts.allowed():
                executor.start(target=target)
            while waiting or running:
                while waiting and (not running or len(running) < executor.capacity):
                    slot = min(set(range(len(running) + 1)) - set(running.values()))
                    task = _task(waiting.pop(0), options, resources, slot, timeout, target)
                    executor.submit(task)
                    running[task.key] = slot
                with interrupts.allowed():
                    results = executor.wait()
                for result in results:
                    del running[result.task.key]
                    spec = result.task.spec
                    models, problem = _made(result)
                    if models:
                        made[_key(spec)] = Fingerprints(_of(models[0], result.environment or environment), models)
                    else:
                        failures[names[_key(spec)]] = problem
                    done = f"[{len(made) + len(failures)}/{len(specs)}]"
                    on_progress(f"{done} {names[_key(spec)]}: {problem or 'recorded'}")
        finally:
            executor.close()
    if not made:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in list(failures.items())[:3])
        raise HashbenchError("no model has a fingerprint", consequence=f"nothing was written ({reasons})")
    return RecordedFingerprints(tuple(made[_key(spec)] for spec in specs if _key(spec) in made), failures)


def record_missing(
    request: SweepRequest,
    options: RunOptions,
    result: SweepResult,
    *,
    executor: Executor,
    environment: Mapping[str, Any],
    on_note: Callable[[str], object],
) -> None:
    """Record the models of a sweep that have no fingerprint in its folder yet, where and with as many threads as they
    ran. What goes wrong with one is a note: the rows are there."""
    folder = request.output
    catalog = [spec for suite in request.selection.suites for spec in registry.catalog(suite)]
    ran = {(row.suite, row.name) for row in result.rows if kind_of(row.accuracy) in (Kind.PASS, Kind.DIFFER)}
    wanted = [
        spec
        for spec in request.selection.of(catalog)
        if (spec.suite, spec.name) in ran
        and (spec.world_size or 1) == 1  # a kernel of one rank is called in a group
        and not document.path_in(folder, (spec.suite, spec.name, options.mode)).exists()
    ]
    if not wanted:
        return
    try:
        recording = record(wanted, options, executor=executor, environment=environment, timeout=request.timeout)
    except HashbenchError as error:
        on_note(f"no kernel fingerprints: {error}")
        return
    for file in recording.files:
        document.write(document.path_in(folder, file.models[0].key), file)
    for name, reason in recording.failures.items():
        on_note(f"no kernel fingerprint of {name}: {reason}")


def remove(outdated: Sequence[ModelSpec], request: SweepRequest) -> None:
    """Delete the fingerprints of models that run again because the file of their suite has changed."""
    for spec in outdated:
        document.path_in(request.output, (spec.suite, spec.name, request.options.mode)).unlink(missing_ok=True)


def _key(spec: ModelSpec) -> tuple[str, str]:
    return spec.suite, spec.name


def _names(specs: Sequence[ModelSpec]) -> dict[tuple[str, str], str]:
    """Map each model to its name, or to ``suite/name`` if another suite has a model of this name."""
    counts = Counter(spec.name for spec in specs)
    return {_key(spec): spec.name if counts[spec.name] == 1 else f"{spec.suite}/{spec.name}" for spec in specs}


def _of(model: ModelFingerprint, environment: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the environment with the number of threads of this model's kernels, which ``--threads`` or ``--jobs`` may
    set."""
    threads = environment.get("threads")
    known = threads if isinstance(threads, Mapping) else {}
    return {**environment, "threads": {**known, "intra_op": model.threads}}


def _task(spec: ModelSpec, options: RunOptions, resources: Resources, slot: int, timeout: float, target: str) -> Task:
    key, folder = file_key(suite=spec.suite, mode=options.mode, name=spec.name), ResultsFolder(Path(options.output))
    for path in (folder.row_path(key), folder.log_path(key)):
        path.parent.mkdir(parents=True, exist_ok=True)
    return Task(
        key=key,
        spec=spec,
        options=options,
        target=target,
        row_path=str(folder.row_path(key)),
        log_path=str(folder.log_path(key)),
        timeout=timeout,
        cpus=resources.slots[slot] if resources.slots else (),
        variables=resources.devices[slot % len(resources.devices)].variables if resources.devices else {},
    )


def _made(result: TaskResult) -> tuple[tuple[ModelFingerprint, ...], str]:
    """Return what a worker recorded, or why it recorded nothing."""
    task = result.task
    path = document.path_in(Path(task.options.output), (task.spec.suite, task.spec.name, task.options.mode))
    if path.exists():
        return document.read(path).models, ""
    if result.timed_out:
        return (), f"no result after {task.timeout:g} s"
    row = left_row(Path(task.row_path), result.row, task.spec, task.options.mode)
    if row is not None:
        return (), row.error or "no result"
    words = last_words(Path(task.log_path))
    return (), " | ".join([result.lost or describe_end(result.exit_code), *words])[:300]
