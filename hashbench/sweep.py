"""Many models: which run, which have run, and what becomes of those that never answer.

One model at a time goes to a worker (:mod:`hashbench.executors`), which leaves its row in a file; a worker that died or
was too slow left none and gets one from here. Whatever ends a sweep early – Ctrl-C, a full disk, ``kill -9`` – the
rows on disk are whole, and a resumed sweep runs the other models. Nothing here knows of processes, and nothing
imports torch.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hashbench.executors import Ended, Executor, Task
from hashbench.executors.local import LocalExecutor
from hashbench.interrupts import Interrupts
from hashbench.postmortem import describe_end, last_words
from hashbench.records import HashbenchError, ModelSpec, Row, RunOptions
from hashbench.results_folder import ResultsFolder, file_key
from hashbench.words import a_few

SWEEP_SCHEMA = 1
"""Version of ``sweep.json``; a sweep of another version cannot be resumed."""

DEFAULT_TARGET = "hashbench.runner:run_model"

# ------------------------------------------------------------------------------------------------------ words


@dataclass(frozen=True, slots=True)
class SweepOpened:
    """The sweep begins with ``done`` of ``total`` rows on disk; ``damaged`` row files were thrown away."""

    total: int
    done: int
    damaged: int


@dataclass(frozen=True, slots=True)
class ModelStarted:
    """A worker begins with model ``name``."""

    name: str


@dataclass(frozen=True, slots=True)
class ModelFinished:
    """``row`` is on disk, as number ``done`` of ``total``. ``eta_seconds`` is the time left at the pace so far."""

    row: Row
    done: int
    total: int
    eta_seconds: float


Event = SweepOpened | ModelStarted | ModelFinished


@dataclass(frozen=True, slots=True)
class SweepResult:
    """All rows in the order of the selection, and the folder that holds them. ``resumed`` rows were there before,
    ``damaged`` row files were thrown away and their models run again."""

    rows: tuple[Row, ...]
    output: Path
    resumed: int = 0
    damaged: int = 0


class SweepInterrupted(Exception):  # noqa: N818 – not an error: the user asked for it
    """Ctrl-C ended the sweep: ``done`` of ``total`` rows are in ``output``, and no worker is left."""

    def __init__(self, *, done: int, total: int, output: Path) -> None:
        super().__init__(f"{done} of {total} rows written; continue with --resume")
        self.done, self.total, self.output = done, total, output


# ------------------------------------------------------------------------------------------------------ sweep


def run_sweep(
    specs: Sequence[ModelSpec],
    options: RunOptions,
    *,
    output: Path,
    environment: Mapping[str, Any],
    timeout: float = 2000.0,
    jobs: int = 1,
    resume: bool = False,
    on_event: Callable[[Event], None] | None = None,
    target: str = DEFAULT_TARGET,
    executor: Executor | None = None,
) -> SweepResult:
    """Run every model of ``specs`` in a process of its own and leave one row each in ``output``.

    Args:
        specs: the models, each at most once.
        options: how to run them. Where ``jobs`` is above 1 and ``threads`` is not set, workers share the cores.
        output: the results folder; created with its parents.
        environment: content of ``environment.json``; its ``key`` becomes the ``env`` of rows that have none.
        timeout: seconds that one model may take, with the start of its process.
        jobs: how many models run at once.
        resume: keep the rows that are in ``output`` and run the others. An empty folder is filled from the start.
        on_event: told what happens, in this thread.
        target: the function ``(ModelSpec, RunOptions) -> Row`` that workers call, as ``module:function``.
        executor: where models run; by default ``jobs`` processes of this machine.

    Raises:
        HashbenchError: the folder cannot be used for this sweep, or the disk is full; the rows on disk are safe.
        SweepInterrupted: Ctrl-C.
    """
    folder = ResultsFolder(output)
    options = replace(options, output=str(folder.path), threads=_threads(options, jobs))
    plan = _Plan(specs=_by_key(specs, options.mode), options=options, target=target, timeout=timeout)
    workers = executor or LocalExecutor(jobs=jobs)
    with Interrupts() as interrupts, folder.claimed(resume=resume):
        sweep = _Sweep(
            plan,
            folder=folder,
            executor=workers,
            interrupts=interrupts,
            on_event=on_event or _ignore,
            environment_key=str(environment.get("key", "")),
        )
        sweep.open(environment)
        return sweep.run()


@dataclass(frozen=True, slots=True)
class _Plan:
    """What a sweep is to do; ``specs`` by key, in the order of the selection."""

    specs: Mapping[str, ModelSpec]
    options: RunOptions
    target: str
    timeout: float

    def manifest(self) -> dict[str, Any]:
        """What a resumed sweep must have in common with the one that it resumes."""
        options = dataclasses.asdict(self.options)
        del options["output"]  # results folders can be moved
        return {
            "schema": SWEEP_SCHEMA,
            "suites": sorted({spec.suite for spec in self.specs.values()}),
            "options": options,
            "models": [[spec.suite, spec.name] for spec in self.specs.values()],
        }


class _Sweep:
    """One sweep while it runs. ``_rows`` mirrors the row files."""

    def __init__(
        self,
        plan: _Plan,
        *,
        folder: ResultsFolder,
        executor: Executor,
        interrupts: Interrupts,
        on_event: Callable[[Event], None],
        environment_key: str,
    ) -> None:
        self._plan = plan
        self._folder = folder
        self._executor = executor
        self._interrupts = interrupts
        self._on_event = on_event
        self._environment_key = environment_key
        self._rows: dict[str, Row] = {}
        self._resumed = 0
        self._damaged = 0
        self._began = time.monotonic()

    def open(self, environment: Mapping[str, Any]) -> None:
        """Take over the rows that are there; write what must be there before the first row."""
        manifest = self._plan.manifest()
        if self._folder.in_use:
            _refuse_other_sweep(self._folder, manifest)
        try:
            self._rows, self._damaged = self._folder.read_rows(self._plan.specs, mode=self._plan.options.mode)
            self._resumed = len(self._rows)
            self._folder.write_manifest(manifest)
            self._folder.write_environment(environment)
            self._folder.rebuild_csv(self._ordered_rows())
        except OSError as error:
            raise self._storage_error(error) from error
        self._on_event(SweepOpened(total=len(self._plan.specs), done=self._resumed, damaged=self._damaged))

    def run(self) -> SweepResult:
        """Run what has no row yet."""
        try:
            try:
                self._run_models()
            finally:
                self._executor.close()
                self._trust_only_files()
        except KeyboardInterrupt:
            raise SweepInterrupted(
                done=len(self._rows), total=len(self._plan.specs), output=self._folder.path
            ) from None
        except OSError as error:
            raise self._storage_error(error) from error
        self._refuse_gaps()
        return SweepResult(
            rows=self._ordered_rows(), output=self._folder.path, resumed=self._resumed, damaged=self._damaged
        )

    def _run_models(self) -> None:
        mode = self._plan.options.mode
        missing = [key for key in self._plan.specs if key not in self._rows]
        if any(not self._plan.specs[key].skip_reason(mode) for key in missing):
            with self._interrupts.allowed():
                self._executor.start(target=self._plan.target)
        queue, running = deque(missing), 0
        while queue or running:
            while queue and running < self._executor.capacity:
                running += self._begin(queue.popleft())
            with self._interrupts.allowed():
                ended = self._executor.wait()
            for worker in ended:
                self._end(worker)
            running -= len(ended)

    def _begin(self, key: str) -> int:
        """Start a worker for ``key``, or settle it without one; returns how many workers were started."""
        spec = self._plan.specs[key]
        reason = spec.skip_reason(self._plan.options.mode)
        if reason:
            self._add(key, self._own_row(spec, accuracy="pass_due_to_skip", error=reason))
            return 0
        self._on_event(ModelStarted(name=spec.name))
        self._executor.submit(
            Task(
                key=key,
                spec=spec,
                options=self._plan.options,
                target=self._plan.target,
                row_path=str(self._folder.row_path(key)),
                log_path=str(self._folder.log_path(key)),
                timeout=self._plan.timeout,
            )
        )
        return 1

    def _end(self, worker: Ended) -> None:
        key, spec = worker.task.key, worker.task.spec
        row = self._folder.read_row(key, spec, mode=self._plan.options.mode)
        if row is None:
            row = self._row_of_the_dead(worker)
        overhead = None if row.seconds is None else max(0.0, worker.wall_seconds - row.seconds)
        self._add(key, replace(row, overhead_seconds=overhead, env=row.env or self._environment_key))
        log = self._folder.log_path(key)
        if log.exists() and not log.stat().st_size:
            log.unlink()

    def _row_of_the_dead(self, worker: Ended) -> Row:
        if worker.storage_error:
            raise OSError(worker.storage_error)
        log = self._folder.log_path(worker.task.key)
        if worker.timed_out:
            error = f"no result after {worker.task.timeout:g} s; logs/{log.name} shows where it was"
            return self._own_row(worker.task.spec, accuracy="timeout", error=error)
        error = " | ".join([describe_end(worker.exit_code), *last_words(log)])
        return self._own_row(worker.task.spec, accuracy="crashed", error=error)

    def _own_row(self, spec: ModelSpec, *, accuracy: str, error: str) -> Row:
        """A row for a model that could not make one: what was asked for, and what happened."""
        options = self._plan.options
        return Row(
            dev=options.device,
            name=spec.name,
            batch_size=options.batch_size or spec.batch_size,
            accuracy=accuracy,
            suite=spec.suite,
            mode=options.mode,
            dtype=options.dtype_column,
            env=self._environment_key,
            error=error,
        )

    def _add(self, key: str, row: Row) -> None:
        self._folder.write_row(key, row)
        self._rows[key] = row
        self._folder.append_to_csv(row)
        done, total = len(self._rows), len(self._plan.specs)
        pace = (time.monotonic() - self._began) / (done - self._resumed)
        self._on_event(ModelFinished(row=row, done=done, total=total, eta_seconds=pace * (total - done)))

    def _trust_only_files(self) -> None:
        """Rebuild the CSV from the row files: with the rows of workers that ended just as the sweep did, in order."""
        self._rows, _ = self._folder.read_rows(self._plan.specs, mode=self._plan.options.mode)
        self._folder.rebuild_csv(self._ordered_rows())

    def _refuse_gaps(self) -> None:
        lost = len(self._plan.specs) - len(self._rows)
        if lost:
            raise HashbenchError(
                f"{lost} files in {self._folder.rows} were damaged or removed while the sweep ran",
                consequence="accuracy.csv lacks their models",
                tip="Run the same command with --resume.",
            )

    def _ordered_rows(self) -> tuple[Row, ...]:
        return tuple(self._rows[key] for key in self._plan.specs if key in self._rows)

    def _storage_error(self, error: OSError) -> HashbenchError:
        return HashbenchError(
            f"cannot write into {self._folder.path}",
            consequence=f"{error.strerror or error}; {len(self._rows)} of {len(self._plan.specs)} rows are safe",
            tip="Free space, then run the same command with --resume.",
        )


# -------------------------------------------------------------------------------------------------- decisions


def _ignore(_event: Event) -> None:
    pass


def _threads(options: RunOptions, jobs: int) -> int | None:
    """Two jobs that each use all cores take many times longer than one after the other."""
    if options.threads is not None or jobs <= 1:
        return options.threads
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // jobs)


def _by_key(specs: Sequence[ModelSpec], mode: str) -> dict[str, ModelSpec]:
    keyed: dict[str, ModelSpec] = {}
    for spec in specs:
        key = file_key(suite=spec.suite, mode=mode, name=spec.name)
        if key in keyed:
            raise HashbenchError(
                f"the selection holds {spec.name} of {spec.suite} twice",
                consequence="a sweep has one row for each model",
                tip="Name it once.",
            )
        keyed[key] = spec
    return keyed


def _refuse_other_sweep(folder: ResultsFolder, manifest: Mapping[str, Any]) -> None:
    differences = describe_differences(folder.read_manifest(), manifest)
    if differences:
        raise HashbenchError(
            f"cannot resume {folder.path}",
            consequence=f"it holds another sweep ({'; '.join(differences)})",
            tip="Repeat the command that began it, or choose another --output.",
        )


def describe_differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What keeps a sweep with the manifest ``now`` from resuming one with ``before``; empty when nothing does."""
    if before.get("schema") != now["schema"]:
        return [f"sweep.json has version {before.get('schema')!r}, this hashbench writes {now['schema']!r}"]
    old_options, new_options = before.get("options") or {}, now["options"]
    differences = [
        f"{name} was {old_options.get(name)!r} and is {new_options.get(name)!r}{_HINTS.get(name, '')}"
        for name in sorted(old_options.keys() | new_options.keys())
        if old_options.get(name) != new_options.get(name)
    ]
    if before.get("suites") != now["suites"]:
        differences.append(f"suites were {before.get('suites')} and are {now['suites']}")
    elif before.get("models") != now["models"]:
        differences.append(_model_differences(before.get("models") or [], now["models"]))
    return differences


_HINTS = {"threads": " (--jobs sets it, too)"}


def _model_differences(before: Sequence[Sequence[str]], now: Sequence[Sequence[str]]) -> str:
    old, new = {tuple(model)[-1] for model in before}, {tuple(model)[-1] for model in now}
    phrases = (("no longer", old - new), ("now", new - old))
    changes = [f"{phrase} {a_few(sorted(names), 3)}" for phrase, names in phrases if names]
    return f"models: {', '.join(changes)}" if changes else "the models come in another order"
