"""Many models: which run, which have run, and what becomes of those that never answer.

One model at a time goes to a worker (:mod:`hashbench.sweep.executors`), which leaves its row in a file; a worker that
died or was too slow left none and gets one from here. Whatever ends a sweep early – Ctrl-C, a full disk, ``kill -9`` –
the rows on disk are whole, and a resumed sweep runs the other models. Nothing here knows of processes, and nothing
imports torch. Which model starts when is decided in :mod:`hashbench.sweep.schedule`, and which rows are believed at
once in :mod:`hashbench.sweep.retry`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hashbench.errors import HashbenchError
from hashbench.processes import Interrupts, describe_end, last_words
from hashbench.records import ModelSpec, Row, RunOptions
from hashbench.results.folder import ResultsFolder, file_key
from hashbench.results.manifest import Partition, describe_differences, manifest_of
from hashbench.sweep.estimates import EarlierSweep
from hashbench.sweep.events import Event, ModelFinished, ModelRequeued, ModelStarted, SweepOpened, SweepPlanned
from hashbench.sweep.executors import Executor, Resources, Task, TaskResult
from hashbench.sweep.executors.local import LocalExecutor
from hashbench.sweep.retry import believed, wants_repetition
from hashbench.sweep.schedule import Schedule, Start, longest_first

__all__ = [
    "Event",
    "ModelFinished",
    "ModelRequeued",
    "ModelStarted",
    "SweepInterrupted",
    "SweepOpened",
    "SweepPlanned",
    "SweepResult",
    "describe_differences",
    "run_sweep",
]

DEFAULT_TARGET = "hashbench.check.model:run_model"


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
    partition: Partition = Partition(),  # noqa: B008 – frozen
    earlier: EarlierSweep | None = None,
    memory_mib: float | None = None,
    retries: int = 1,
) -> SweepResult:
    """Run every model of ``specs`` in a process of its own and leave one row each in ``output``.

    Args:
        specs: the models, each at most once.
        options: how to run them. Where ``jobs`` is above 1, workers share the cores; each has as many ``threads`` as
            cores where that is not set.
        output: the results folder; created with its parents.
        environment: content of ``environment.json``; its ``key`` becomes the ``env`` of rows that have none.
        timeout: seconds that one model may take, with the start of its process.
        jobs: how many models run at once.
        resume: keep the rows that are in ``output`` and run the others. An empty folder is filled from the start.
        on_event: told what happens, in this thread.
        target: the function ``(ModelSpec, RunOptions) -> Row`` that workers call, as ``module:function``.
        executor: where models run; by default ``jobs`` processes of this machine.
        partition: which part of which selection ``specs`` are.
        earlier: what an earlier sweep tells of their times and memory; where several run at once, the longest starts
            first.
        memory_mib: what all workers may be expected to take together of the machine's memory; by default what the
            executor offers. What they take of an accelerator's is bounded by the executor's ``devices``.
        retries: how often a model that was killed, crashed or ran out of memory beside others runs again, alone.

    Raises:
        HashbenchError: the folder cannot be used for this sweep, or the disk is full; the rows on disk are safe.
        SweepInterrupted: Ctrl-C.
    """
    folder = ResultsFolder(output)
    workers = executor or LocalExecutor(jobs=jobs)
    resources = workers.resources
    if memory_mib is not None:
        resources = replace(resources, memory_mib=memory_mib)
    threads = resources.threads if options.threads is None else options.threads
    options = replace(options, output=str(folder.path), threads=threads)
    plan = _SweepPlan(
        specs=_by_key(specs, options.mode),
        options=options,
        target=target,
        timeout=timeout,
        partition=partition,
        resources=resources,
        earlier=earlier or EarlierSweep(),
        retries=retries,
    )
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
class _SweepPlan:
    """What a sweep is to do; ``specs`` by key, in the order of the selection."""

    specs: Mapping[str, ModelSpec]
    options: RunOptions
    target: str
    timeout: float
    partition: Partition
    resources: Resources
    earlier: EarlierSweep
    retries: int


class _Sweep:
    """One sweep while it runs. ``_rows`` mirrors the row files, ``_firsts`` the rows that wait for a second attempt."""

    def __init__(
        self,
        plan: _SweepPlan,
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
        self._firsts: dict[str, Row] = {}
        self._repetitions: Counter[str] = Counter()
        self._environments = {environment_key}
        self._schedule = Schedule(())
        self._resumed = 0
        self._damaged = 0
        self._began = time.monotonic()

    def open(self, environment: Mapping[str, Any]) -> None:
        """Take over the rows that are there; write what must be there before the first row."""
        manifest = manifest_of(self._plan.specs.values(), self._plan.options, self._plan.partition)
        if self._folder.in_use:
            _refuse_other_sweep(self._folder, manifest)
        try:
            self._rows, self._damaged = self._folder.read_rows(self._plan.specs, mode=self._plan.options.mode)
            self._judge_what_a_killed_sweep_did_not()
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

    def _judge_what_a_killed_sweep_did_not(self) -> None:
        """Rows that a worker left while the sweep ended so suddenly that nobody looked at them."""
        self._firsts = self._folder.read_firsts(self._plan.specs, mode=self._plan.options.mode)
        self._repetitions.update(self._firsts.keys())
        for key, row in list(self._rows.items()):
            if key in self._firsts:
                first = self._firsts.pop(key)
                self._rows[key] = row if row.retried else believed(first, row)
                self._folder.write_row(key, self._rows[key])
            elif wants_repetition(row, died=False) and row.overhead_seconds is None and row.seconds is not None:
                self._folder.remove_row(key)
                del self._rows[key]

    def _run_models(self) -> None:
        mode, device = self._plan.options.mode, self._plan.options.device
        reasons = {key: spec.skip_reason(mode, device=device) for key, spec in self._plan.specs.items()}
        missing = [key for key in self._plan.specs if key not in self._rows]
        skipped = [key for key in missing if reasons[key]]
        to_run = [key for key in missing if not reasons[key]]
        if to_run:
            with self._interrupts.allowed():
                self._executor.start(target=self._plan.target)
            self._make_schedule(to_run)
        self._start_workers()
        for key in skipped:  # while the first workers run
            with self._interrupts.allowed():
                spec = self._plan.specs[key]
            self._add(key, self._own_row(spec, accuracy="pass_due_to_skip", error=reasons[key]))
        while self._schedule.unfinished:
            with self._interrupts.allowed():
                ended = self._executor.wait()
            for worker in ended:
                self._end(worker)
            self._start_workers()

    def _make_schedule(self, keys: Sequence[str]) -> None:
        """One worker runs the models in their own order; several in the order that ends soonest."""
        plan, resources, workers = self._plan, self._plan.resources, self._executor.capacity
        mode, device = plan.options.mode, plan.options.device
        jobs = [plan.earlier.job(key, plan.specs[key], mode=mode, device=device) for key in keys]
        again = [job for job in jobs if job.key in self._firsts]
        jobs = [job for job in jobs if job.key not in self._firsts]
        self._schedule = Schedule(
            longest_first(jobs) if workers > 1 else jobs,
            again=again,
            memory_mib=resources.memory_mib if workers > 1 else None,
            workers=workers,
            isolates=resources.isolates,
            devices=[device.memory_mib for device in resources.devices],
        )
        if workers > 1:
            self._on_event(
                SweepPlanned(
                    workers=workers,
                    threads=plan.options.threads,
                    pinned=bool(resources.slots),
                    memory_mib=resources.memory_mib,
                    waiting=len(keys),
                    known=sum(job.seconds is not None for job in jobs),
                    times_from=plan.earlier.label,
                    devices=len(resources.devices),
                )
            )

    def _start_workers(self) -> None:
        while (start := self._schedule.next(capacity=self._executor.capacity)) is not None:
            self._begin(start)

    def _begin(self, start: Start) -> None:
        key, slots, devices = start.job.key, self._plan.resources.slots, self._plan.resources.devices
        spec = self._plan.specs[key]
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
                cpus=slots[start.slot] if slots else (),
                memory_mib=start.job.memory_mib,
                alone=start.alone,
                variables={} if start.device is None else devices[start.device].variables,
            )
        )

    def _end(self, worker: TaskResult) -> None:
        key = worker.task.key
        job, beside_others = self._schedule.end(key)
        row, died = self._row_of(worker)
        log = self._folder.log_path(key)
        if log.exists() and not log.stat().st_size:
            log.unlink()
        again = beside_others or key in self._firsts
        if again and wants_repetition(row, died=died) and self._repetitions[key] < self._plan.retries:
            self._repetitions[key] += 1
            self._firsts.setdefault(key, row)
            self._folder.put_off(key, self._firsts[key])
            self._schedule.repeat(job)
            self._on_event(ModelRequeued(row=row))
            return
        first = self._firsts.pop(key, None)
        self._add(key, row if first is None else believed(first, row))

    def _row_of(self, worker: TaskResult) -> tuple[Row, bool]:
        """The row that ``worker`` left, or the one that is made for it, and whether it died without one. A row that
        it did not leave because its time was up is not a sudden death."""
        task = worker.task
        row = self._folder.read_row(task.key, task.spec, mode=self._plan.options.mode)
        died = row is None and not worker.timed_out
        if row is None:
            row = replace(self._row_of_the_dead(worker), env="")
        overhead = None if row.seconds is None else max(0.0, worker.wall_seconds - row.seconds)
        environment = self._environment_of(worker)
        return replace(row, overhead_seconds=overhead, env=row.env or environment, retried=worker.retried), died

    def _environment_of(self, worker: TaskResult) -> str:
        """The key of the environment of ``worker``, which is kept when it is seen for the first time."""
        if worker.environment is None:
            return self._environment_key
        key = str(worker.environment.get("key", ""))
        if key and key not in self._environments:
            self._folder.add_environment(worker.environment)
            self._environments.add(key)
        return key

    def _row_of_the_dead(self, worker: TaskResult) -> Row:
        if worker.storage_error:
            raise OSError(worker.storage_error)
        task = worker.task
        log = self._folder.log_path(task.key)
        error = " | ".join([describe_end(worker.exit_code), *last_words(log)])
        if worker.timed_out:
            error = f"no result after {task.timeout:g} s; logs/{log.name} shows where it was"
        draft = self._folder.read_draft(task.key, task.spec, mode=self._plan.options.mode)
        if draft is not None:
            return replace(draft, error=f"the diagnosis did not end: {error}")
        return self._own_row(task.spec, accuracy="timeout" if worker.timed_out else "crashed", error=error)

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
