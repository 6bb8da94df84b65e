"""Run a sweep: dispatch models, collect rows, synthesise rows for dead workers.

One model at a time goes to a worker (:mod:`hashbench.core.sweep.executors`), which leaves its row in a file; a worker
that died or was too slow left none and gets one from here. Whatever ends a sweep early – Ctrl-C, a full disk,
``kill -9`` – the rows on disk are whole, and a resumed sweep runs the other models. Nothing here knows of processes,
and nothing imports torch. Which model starts when is decided in :mod:`hashbench.core.sweep.schedule`.
"""

from __future__ import annotations

import contextlib
import functools
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hashbench.core.catalog import Kind, Status, kind_of, status_of
from hashbench.core.errors import HashbenchError
from hashbench.core.extensions import facts_asked
from hashbench.core.processes import Interrupts, describe_end, last_line_of_user, last_words
from hashbench.core.records import ModelSpec, Row, RunOptions
from hashbench.core.results.folder import (
    Partition,
    ResultsFolder,
    changed_suites,
    describe_differences,
    file_key,
    manifest_of,
    sent_row,
)
from hashbench.core.sweep.executors import Executor, Resources, Task, TaskResult
from hashbench.core.sweep.schedule import EarlierSweep, Job, Schedule, Start, longest_first
from hashbench.core.text import count, join_limited

DEFAULT_TARGET = "hashbench.core.check.model:run_model"

REPETITIONS_AFTER_LOSS = 3
"""How often a model runs again whose machine, or the process that ran it, ended; from the second time on alone, so that
one that ends it each time takes no others along for ever."""

# ------------------------------------------------------------------------------------- what a sweep tells as it runs


@dataclass(frozen=True, slots=True)
class SweepOpened:
    """The sweep begins with ``done`` of ``total`` rows on disk. ``unreadable``: files that could not be read, by the
    names under which they were set aside. ``outdated``: the number of rows that run again, by the suite whose file has
    changed since they were made."""

    total: int
    done: int
    unreadable: tuple[str, ...] = ()
    outdated: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SweepPlanned:
    """Up to ``workers`` models run at once within ``resources``, with ``threads`` threads each (``None``: torch's own
    choice). Of the ``waiting`` models, ``known`` are in the order of their times in ``times_from``."""

    workers: int
    threads: int | None
    resources: Resources
    waiting: int
    known: int = 0
    times_from: str = ""


@dataclass(frozen=True, slots=True)
class ModelStarted:
    """A worker begins with model ``name``. ``phase`` tells at any moment, to any thread, what it is doing."""

    name: str
    phase: Callable[[], str] = field(default=str, compare=False)


@dataclass(frozen=True, slots=True)
class ModelFinished:
    """``row`` is on disk, as number ``done`` of ``total``. ``eta_seconds`` is the time left at the pace so far."""

    row: Row
    done: int
    total: int
    eta_seconds: float


@dataclass(frozen=True, slots=True)
class ModelRequeued:
    """``row`` is not believed, since other models ran beside it: the model runs again alone, after all others."""

    row: Row


@dataclass(frozen=True, slots=True)
class ModelLost:
    """The machine or process that ran model ``name`` ended, as ``reason`` says, which tells nothing of the model. It
    runs ``again``, or is left without a row."""

    name: str
    reason: str
    again: bool


Event = SweepOpened | SweepPlanned | ModelStarted | ModelFinished | ModelRequeued | ModelLost


@dataclass(frozen=True, slots=True)
class SweepResult:
    """The outcome of a sweep.

    Attributes:
        rows: all rows, in the order of the selection.
        output: the results folder.
        ran: the number of rows that this call made.
    """

    rows: tuple[Row, ...]
    output: Path
    ran: int = 0


class SweepInterrupted(Exception):  # noqa: N818 – not an error: the user asked for it
    """Ctrl-C ended the sweep: ``done`` of ``total`` rows are in ``output``, and no worker is left."""

    def __init__(self, *, done: int, total: int, output: Path) -> None:
        super().__init__(f"{done} of {total} rows written; continue with --resume")
        self.done, self.total, self.output = done, total, output


# ---------------------------------------------------------------------------------------------------------- the sweep


def run_sweep(
    specs: Sequence[ModelSpec],
    options: RunOptions,
    *,
    output: Path,
    environment: Mapping[str, Any],
    executor: Executor,
    timeout: float = 2000.0,
    resume: bool = False,
    on_event: Callable[[Event], object] = lambda _: None,
    target: str = DEFAULT_TARGET,
    partition: Partition = Partition(),  # noqa: B008 – frozen
    earlier: EarlierSweep = EarlierSweep(),  # noqa: B008 – frozen
    retries: int = 1,
    digests: Mapping[str, str] = MappingProxyType({}),
) -> SweepResult:
    """Run every model of ``specs`` in a process of its own and leave one row each in ``output``.

    Args:
        specs: the models, each at most once.
        options: how to run them; without ``threads``, as many as the executor gives each worker.
        output: the results folder; created with its parents.
        environment: content of ``environment.json``; its ``key`` becomes the ``env`` of rows that have none. Its
            ``tracer`` is what the sweep is resumed or merged by, where ``auto`` was asked for.
        executor: where models run; closed at the end.
        timeout: seconds that one model may take, with the start of its process.
        resume: keep the rows that are in ``output`` and run the others.
        on_event: called with what happens, in this thread.
        target: the function ``(ModelSpec, RunOptions) -> Row`` that workers call, as ``module:function``.
        partition: which part of which selection ``specs`` are.
        earlier: their times and memory in an earlier sweep; where several run at once, the longest starts first.
        retries: how often a model that was killed, crashed or ran out of memory beside others runs again, alone.
        digests: of the files of suites, by suite. A resumed sweep runs the models of a suite again whose digest has
            changed since their rows were made.

    Raises:
        HashbenchError: the folder cannot be used for this sweep, or the disk is full; the rows on disk are safe.
        SweepInterrupted: Ctrl-C.
    """
    folder = ResultsFolder(output)
    resources = executor.resources
    threads = resources.threads if options.threads is None else options.threads
    keyed = _by_key(specs, options.mode)
    with Interrupts() as interrupts, folder.claimed(resume=resume):
        options = replace(options, output=str(folder.path), threads=threads)
        sweep = _SweepRun(
            specs=keyed,
            options=options,
            folder=folder,
            executor=executor,
            resources=resources,
            interrupts=interrupts,
            on_event=on_event,
            answers=_WorkerRows(folder, options, str(environment.get("key", ""))),
            target=target,
            timeout=timeout,
            earlier=earlier,
            retries=retries,
        )
        with _storage_errors(folder, keyed):
            opened = sweep.open(environment, partition, digests)
        on_event(opened)
        try:
            with _storage_errors(folder, keyed):
                sweep.run()
        except KeyboardInterrupt:
            raise SweepInterrupted(done=len(sweep.rows), total=len(keyed), output=folder.path) from None
        _raise_if_rows_missing(sweep.rows, sweep.losses, keyed, folder)
        return SweepResult(sweep.ordered_rows(), folder.path, len(sweep.rows) - opened.done)


@dataclass(frozen=True, slots=True)
class _WorkerRow:
    """The row that a worker wrote or sent, else a synthesised one; ``died``: it ended without one, and not by its time
    limit."""

    row: Row
    died: bool


class _WorkerRows:
    """What workers leave, as rows. ``environment_key`` is that of this machine; an environment of another machine that
    is new is kept in the folder."""

    def __init__(self, folder: ResultsFolder, options: RunOptions, environment_key: str) -> None:
        self._folder, self._options, self._own_environment = folder, options, environment_key
        self._environments = {environment_key}

    def read(self, worker: TaskResult) -> _WorkerRow | None:
        """Return the answer of ``worker``; ``None`` if it is lost, since then nothing is known of the model."""
        task = worker.task
        row = self._folder.read_row(task.key, task.spec, mode=self._options.mode)
        row = row or sent_row(worker.row, task.spec, self._options.mode)
        if row is None and worker.storage_error:
            raise OSError(worker.storage_error)
        if row is None and worker.lost:
            return None
        died = not worker.timed_out and (row is None or row.accuracy == Status.CRASHED)  # it, or one of its ranks
        row = row or replace(self._without_answer(worker), env="")
        overhead = None if row.seconds is None else max(0.0, round(worker.wall_seconds - row.seconds, 3))
        return _WorkerRow(replace(row, overhead_seconds=overhead, env=row.env or self.environment_of(worker)), died)

    def draft(self, worker: TaskResult, error: str) -> Row | None:
        """Return the row that the runner kept before its diagnosis, with the ``error`` that ended that, if any."""
        spec, mode = worker.task.spec, self._options.mode
        draft = sent_row(worker.draft, spec, mode) or self._folder.read_draft(worker.task.key, spec, mode=mode)
        return None if draft is None else replace(draft, error=f"the diagnosis did not end: {error}")

    def environment_of(self, worker: TaskResult) -> str:
        """Return the key of the environment of ``worker``; keep an environment that is new."""
        if worker.environment is None:
            return self._own_environment
        key = str(worker.environment.get("key", ""))
        if key and key not in self._environments:
            self._folder.add_environment(worker.environment)
            self._environments.add(key)
        return key

    def placeholder(self, spec: ModelSpec, *, accuracy: str, error: str) -> Row:
        """Return a row for a model whose worker wrote none: the options of the sweep, the status and the error."""
        options = self._options
        return Row(
            dev=options.device,
            name=spec.name,
            batch_size=options.batch_size_of(spec),
            accuracy=accuracy,
            suite=spec.suite,
            mode=options.mode,
            dtype=options.dtype_column,
            backend=options.backend,
            env=self._own_environment,
            error=error,
        )

    def _without_answer(self, worker: TaskResult) -> Row:
        task = worker.task
        log = self._folder.log_path(task.key)
        error = " | ".join([describe_end(worker.exit_code), *last_words(log)])
        if worker.timed_out:
            error = f"no result after {task.timeout:g} s; logs/{log.name} shows where it was"
        status = Status.TIMEOUT if worker.timed_out else Status.CRASHED
        row = self.draft(worker, error)
        return row or replace(self.placeholder(task.spec, accuracy=status, error=error), source=last_line_of_user(log))


@dataclass(slots=True, kw_only=True)
class _SweepRun:
    """One sweep while it runs. ``specs`` are in the order of the selection, by key as all else. ``rows`` mirrors the
    row files, ``firsts`` the rows that wait for a second attempt; ``losses`` says why nothing is known of
    an attempt."""

    specs: Mapping[str, ModelSpec]
    options: RunOptions
    folder: ResultsFolder
    executor: Executor
    resources: Resources
    interrupts: Interrupts
    on_event: Callable[[Event], object]
    answers: _WorkerRows
    target: str
    timeout: float
    earlier: EarlierSweep
    retries: int
    rows: dict[str, Row] = field(default_factory=dict)
    firsts: dict[str, Row] = field(default_factory=dict)
    repetitions: Counter[str] = field(default_factory=Counter)
    losses: dict[str, list[str]] = field(default_factory=dict)
    schedule: Schedule = field(default_factory=lambda: Schedule(()))
    resumed: int = 0
    began: float = field(default_factory=time.monotonic)

    def open(self, environment: Mapping[str, Any], partition: Partition, digests: Mapping[str, str]) -> SweepOpened:
        """Take over the rows that are there; write what must be there before the first row."""
        tracer = str(environment.get("tracer", self.options.tracer))
        manifest = manifest_of(self.specs.values(), replace(self.options, tracer=tracer), partition, digests)
        outdated: Counter[str] = Counter()
        changed = _refuse_other_sweep(self.folder, manifest) if self.folder.in_use else frozenset[str]()
        kept = self.folder.read_rows(self.specs, mode=self.options.mode)
        self.rows, self.firsts = kept.rows, kept.firsts
        for key, spec in self.specs.items():
            if spec.suite in changed and (key in self.rows or key in self.firsts):
                self.folder.put_aside_outdated(key)
                self.rows.pop(key, None)
                self.firsts.pop(key, None)
                outdated[spec.suite] += 1
        self.folder.clear_leftovers()
        self._reconcile_orphaned_rows()
        self.resumed = len(self.rows)
        self.folder.write_manifest(manifest)
        unreadable = (*kept.unreadable, *self.folder.write_environment(environment))
        self._rebuild_csv()
        names = tuple(str(path.relative_to(self.folder.path)) for path in unreadable)
        return SweepOpened(total=len(self.specs), done=self.resumed, unreadable=names, outdated=outdated)

    def run(self) -> None:
        """Run what has no row yet."""
        try:
            self._run_models()
        finally:
            self.executor.close()
            # The row files are the truth: some are of workers that ended just as the sweep did.
            self.rows = self.folder.read_rows(self.specs, mode=self.options.mode).rows
            self._rebuild_csv()

    def _reconcile_orphaned_rows(self) -> None:
        """Decide on rows that workers wrote while a killed sweep could not: keep them, or run their models again."""
        self.repetitions.update(self.firsts.keys())
        for key, row in list(self.rows.items()):
            if key in self.firsts:
                first = self.firsts.pop(key)
                self.rows[key] = row if row.retried else believed(first, row)
                self.folder.write_row(key, self.rows[key])
            elif wants_repetition(row, died=False) and row.overhead_seconds is None and row.seconds is not None:
                self.folder.remove_row(key)
                del self.rows[key]

    def _run_models(self) -> None:
        mode, device = self.options.mode, self.options.made_for
        reasons = {key: spec.skip_reason(mode, device=device) for key, spec in self.specs.items()}
        missing = [key for key in self.specs if key not in self.rows]
        skipped = [key for key in missing if reasons[key]]
        to_run = [key for key in missing if not reasons[key]]
        if to_run:
            with self.interrupts.allowed():
                self.executor.start(target=self.target)
            self._make_schedule(to_run)
        self._start_workers()
        for key in skipped:  # while the first workers run
            with self.interrupts.allowed():
                spec = self.specs[key]
            self._add(key, self.answers.placeholder(spec, accuracy=Status.SKIPPED, error=reasons[key]))
        while self.schedule.unfinished:
            with self.interrupts.allowed():
                ended = self.executor.wait()
            for worker in ended:
                self._end(worker)
            self._start_workers()

    def _make_schedule(self, keys: Sequence[str]) -> None:
        """Create the schedule: the order of the selection for one worker, longest first for several."""
        resources, workers = self.resources, self.executor.capacity
        mode, device = self.options.mode, self.options.device
        jobs = [
            self.earlier.job(
                key,
                (spec.suite, spec.name),
                parameters=spec.parameters,
                mode=mode,
                device=device,
                ranks=spec.world_size or 1,
            )
            for key, spec in self.specs.items()
            if key in keys
        ]
        again = [job for job in jobs if job.key in self.firsts]
        jobs = [job for job in jobs if job.key not in self.firsts]
        self.schedule = Schedule(
            longest_first(jobs) if workers > 1 else jobs,
            again=again,
            memory_mib=resources.memory_mib if workers > 1 else None,
            workers=workers,
            isolates=resources.isolates,
            devices=[device.memory_mib for device in resources.devices],
        )
        if workers > 1:
            self.on_event(
                SweepPlanned(
                    workers=workers,
                    threads=self.options.threads,
                    resources=resources,
                    waiting=len(keys),
                    known=sum(job.seconds is not None for job in jobs),
                    times_from=self.earlier.label,
                )
            )

    def _start_workers(self) -> None:
        while (start := self.schedule.next(capacity=self.executor.capacity)) is not None:
            self._begin(start)

    def _begin(self, start: Start) -> None:
        key, slots, devices = start.job.key, self.resources.slots, self.resources.devices
        spec = self.specs[key]
        self.on_event(ModelStarted(name=spec.name, phase=functools.partial(self.executor.phase, key)))
        self.executor.submit(
            Task(
                key=key,
                spec=spec,
                options=self.options,
                target=self.target,
                row_path=str(self.folder.row_path(key)),
                log_path=str(self.folder.log_path(key)),
                timeout=self.timeout,
                cpus=tuple(sorted({cpu for slot in start.slots for cpu in slots[slot]})) if slots else (),
                memory_mib=start.job.memory_mib,
                alone=start.alone,
                variables={} if start.device is None else devices[start.device].variables,
            )
        )

    def _end(self, worker: TaskResult) -> None:
        key = worker.task.key
        job, beside_others = self.schedule.end(key)
        answer = self.answers.read(worker)
        if answer is None:
            self._lose(job, worker)
            return
        row = replace(answer.row, retried=_counted(self.losses.get(key, ())))
        log = self.folder.log_path(key)
        if log.exists() and not log.stat().st_size:
            log.unlink()
        again = beside_others or key in self.firsts
        if again and wants_repetition(row, died=answer.died) and self.repetitions[key] < self.retries:
            self.repetitions[key] += 1
            self.firsts.setdefault(key, row)
            self.folder.put_off(key, self.firsts[key])
            self.schedule.repeat(job)
            self.on_event(ModelRequeued(row=row))
            return
        first = self.firsts.pop(key, None)
        self._add(key, row if first is None else believed(first, row))

    def _lose(self, job: Job, worker: TaskResult) -> None:
        """Requeue a model whose machine or process ended, from the second time on alone. A draft row that already saw a
        difference is kept as that of a first attempt."""
        key = job.key
        losses = self.losses.setdefault(key, [])
        losses.append(worker.lost)
        again = len(losses) <= REPETITIONS_AFTER_LOSS
        draft = self.answers.draft(worker, worker.lost)
        if draft is not None:
            draft = replace(draft, env=self.answers.environment_of(worker))
            self.firsts.setdefault(key, draft)
            self.folder.put_off(key, self.firsts[key])
        self.on_event(ModelLost(name=worker.task.spec.name, reason=worker.lost, again=again))
        if again:
            self.schedule.repeat(job, alone=len(losses) > 1)
        elif key in self.firsts and kind_of(self.firsts[key].accuracy) is Kind.DIFFER:
            first = self.firsts.pop(key)
            self._add(key, replace(first, retried=_joined(first.retried, _counted(losses))))

    def _add(self, key: str, row: Row) -> None:
        self.folder.write_row(key, row)
        self.rows[key] = row
        if not self.folder.append_to_csv(row):
            self._rebuild_csv()
        done, total = len(self.rows), len(self.specs)
        pace = (time.monotonic() - self.began) / (done - self.resumed)
        self.on_event(ModelFinished(row=row, done=done, total=total, eta_seconds=pace * (total - done)))

    def _rebuild_csv(self) -> None:
        self.folder.rebuild_csv(self.ordered_rows(), asked=facts_asked(self.options))

    def ordered_rows(self) -> tuple[Row, ...]:
        """Return the rows in the order of the selection."""
        return tuple(self.rows[key] for key in self.specs if key in self.rows)


# --------------------------------------------------------------------------------------------------- decisions


def _raise_if_rows_missing(
    rows: Mapping[str, Row], losses: Mapping[str, Sequence[str]], specs: Mapping[str, ModelSpec], folder: ResultsFolder
) -> None:
    """Raise :class:`HashbenchError` if models have no row: their worker or machine died every time, or a file went."""
    lost = {key: reasons for key, reasons in losses.items() if key not in rows}
    if lost:
        names = join_limited([specs[key].name for key in lost], 5)
        how = _counted([reason for reasons in lost.values() for reason in reasons])
        raise HashbenchError(
            f"no result for {count(len(lost), 'model')}: {names}",
            consequence=f"their worker or machine died every time ({how})",
            tip="Run the same command with --resume.",
        )
    if gone := len(specs) - len(rows):
        raise HashbenchError(
            f"{gone} files in {folder.rows} were damaged or removed while the sweep ran",
            consequence="accuracy.csv lacks their models",
            tip="Run the same command with --resume.",
        )


@contextlib.contextmanager
def _storage_errors(folder: ResultsFolder, keys: Collection[str]) -> Iterator[None]:
    """Raise :class:`HashbenchError` in place of an ``OSError``."""
    try:
        yield
    except OSError as error:
        safe = sum(folder.row_path(key).is_file() for key in keys)
        raise HashbenchError(
            f"cannot write into {folder.path}",
            consequence=f"{error.strerror or error}; {safe} of {len(keys)} rows are safe",
            tip="Free space, or mend what is wrong there, then run the same command with --resume.",
        ) from error


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


def _refuse_other_sweep(folder: ResultsFolder, manifest: Mapping[str, Any]) -> frozenset[str]:
    """Raise where the folder holds another sweep; return the suites whose files have changed since it began."""
    before = folder.read_manifest()
    differences = describe_differences(before, manifest)
    if differences:
        raise HashbenchError(
            f"cannot resume {folder.path}",
            consequence=f"it holds another sweep ({'; '.join(differences)})",
            tip="Repeat the command that began it, or choose another --output.",
        )
    return changed_suites(before, manifest)


def wants_repetition(row: Row, *, died: bool) -> bool:
    """Return True if other workers may be the reason for ``row``: it ran out of memory, or its worker died without a
    result (``died``), perhaps because the system was out of memory. A timeout is believed: workers have their own
    cores, and a repetition alone would cost twice that time."""
    status = status_of(row.accuracy)
    return died or (status is not None and status.ran_out_of_memory)


def believed(first: Row, second: Row) -> Row:
    """Choose between ``first``, the row of an attempt beside others, and ``second``, that of the attempt alone.

    The second wins, unless the first saw two runs differ and the second did not: an observed difference is kept.
    """
    if kind_of(first.accuracy) is Kind.DIFFER is not kind_of(second.accuracy):
        return replace(first, retried=_joined(f"alone it ended with {_ending(second)}", second.retried))
    return replace(second, retried=_joined(_ending(first), second.retried))


def _ending(row: Row) -> str:
    """Format the outcome of an attempt: ``crashed: killed by SIGKILL``."""
    return textwrap.shorten(f"{row.accuracy}: {row.error}" if row.error else row.accuracy, 300)


def _counted(losses: Sequence[str]) -> str:
    """Join the reasons of losses; repeated ones are counted."""
    counts = Counter(losses)
    return "; ".join(f"{how} ({times} times)" if times > 1 else how for how, times in counts.items())


def _joined(*texts: str) -> str:
    return "; ".join(filter(None, texts))
