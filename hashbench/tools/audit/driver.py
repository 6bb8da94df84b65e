"""The audit's own process: which ops wait, which worker runs them, what becomes of those whose worker died.

Imports no torch. An op that has a file is done; ``audit.csv`` is made from these files. A group of ops shares one
process, since to start one costs more than to run ten ops. Where it dies, the op that it was at runs again alone, so
that only what kills a process of its own is blamed, and the others go on in a new group.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hashbench.core.catalog import Status
from hashbench.core.devices.visibility import freest
from hashbench.core.diagnose import fresh_process
from hashbench.core.errors import HashbenchError
from hashbench.core.io import from_json, read_json, replace_file, set_aside, to_json
from hashbench.core.processes import Interrupts, describe_end, last_words, python_calling
from hashbench.core.processes import run as run_process
from hashbench.core.records import ModelSpec, RunOptions
from hashbench.core.report.audits import AuditKind, Op
from hashbench.core.results.folder import ResultsFolder, left_row
from hashbench.core.suites.selection import pattern_of, unknown_name
from hashbench.core.sweep.executors import Executor, Task, TaskResult
from hashbench.core.text import count, join_limited
from hashbench.core.workers import WORKER_VARIABLES
from hashbench.tools.audit.audit_table import (
    CATALOG_FILE,
    DETERMINISM,
    MANIFEST_FILE,
    AuditManifest,
    AuditOptions,
    AuditRow,
    manifest_text,
    op_file,
    read_manifest,
    read_op,
    write_op,
)

CATALOG_TARGET, TARGET = "hashbench.tools.audit.rows:write_catalog", "hashbench.tools.audit.rows:run_group"

GROUP_SIZE = 40
STARTING_SECONDS = 120.0
"""What a worker may take on a loaded machine until its first op."""

_LOSSES = 3
"""How many workers in a row may be lost together with their fork server before the audit ends."""


@dataclass(frozen=True, slots=True)
class AuditRequest:
    """What an audit is asked for: how ops are run, the names of ``only`` these or regular expressions that they match
    (neither: all), the ``seconds`` that one op may take, rows that real models' sweeps add, and what is measured."""

    options: AuditOptions
    only: tuple[str, ...] = ()
    filters: tuple[str, ...] = ()
    seconds: float = 120.0
    sweep_rows: tuple[AuditRow, ...] = ()
    kind: AuditKind = DETERMINISM


def chosen_ops(known: Sequence[Op], *, only: Collection[str], filters: Sequence[str]) -> tuple[Op, ...]:
    """Choose the ops that are named or that match one of the regular expressions; all where neither says.
    :class:`HashbenchError` where a name is unknown, an expression is invalid, or nothing is left."""
    names = {name for _, name in known}
    for name in only:
        if name not in names:
            raise unknown_name("op", name, names, tip="Names are those of torch's op database.")
    pattern = pattern_of(filters, flags=re.NOFLAG)
    if not only and pattern is None:
        return tuple(known)
    chosen = tuple(op for op in known if op[1] in only or (pattern is not None and pattern.search(op[1])))
    if not chosen:
        raise HashbenchError("no op matches", consequence="nothing was run", tip="Check --ops and -k.")
    return chosen


def groups_of(ops: Sequence[Op], *, size: int) -> list[tuple[Op, ...]]:
    """Split the ops into groups of about ``size``, dealt like cards: neighbours, which take equally long, are
    spread."""
    number = max(1, -(-len(ops) // size))
    return [tuple(ops[start::number]) for start in range(number)]


def audit(
    request: AuditRequest,
    *,
    output: Path,
    environment: Mapping[str, Any],
    executor: Executor,
    resume: bool = False,
    on_progress: Callable[[int, int, str], None] = lambda *_: None,
    target: str = TARGET,
) -> tuple[Any, ...]:
    """Run what is asked for and has no file in the folder ``output`` yet; returns all rows, which are then in the file
    of the request's kind. The executor is closed at the end. ``environment`` is the environment of this machine;
    ``on_progress`` is told after every worker how many ops of all are done, and what became of one that killed its
    process; ``target`` is what workers call for a group of ops, as ``module:function``.

    Raises:
        HashbenchError: the folder cannot be used for this audit, nothing is to be run, or the disk is full.
    """
    folder = ResultsFolder(output)
    refuse_unusable(output, resume=resume)
    with Interrupts() as interrupts, folder.claimed(resume=resume), _repros_served(request):
        try:
            return _AuditRun(request, folder, executor, interrupts, on_progress, target).run(environment)
        except OSError as error:
            raise HashbenchError(
                f"cannot write into {folder.path}",
                consequence=f"{error.strerror or error}; what is written is safe",
                tip="Free space, then run the same command with --resume.",
            ) from error


def _repros_served(request: AuditRequest) -> AbstractContextManager[None]:
    """Serve repros on the CPU as forks of one Python that has loaded torch, as in a sweep."""
    if not request.kind.runs_repros or request.options.device != "cpu":
        return contextlib.nullcontext()
    return fresh_process.served(fresh_process.TORCH_ALONE, environment=WORKER_VARIABLES, at_once=False)


def refuse_unusable(output: Path, *, resume: bool) -> None:
    """Refuse a folder that cannot be used for an audit, as far as that shows without touching anything.

    Raises:
        HashbenchError: it holds other results, or cannot be written.
    """
    folder = ResultsFolder(output)
    path = folder.path
    holds, tip = "", "Choose another --output."
    if (path / MANIFEST_FILE).exists() and not resume:
        holds, tip = "already holds an audit", "Add --resume to complete it, or choose another --output."
    elif (path / "sweep.json").exists():
        holds = "holds a sweep"
    if holds:
        raise HashbenchError(f"{path} {holds}", consequence="nothing in it was touched", tip=tip)
    folder.refuse_unusable(resume=resume)


@dataclass(slots=True)
class _AuditRun:
    """One audit: the ops that wait, and the workers that run, by the key of their task with the number of their
    device (``None`` where there are none)."""

    request: AuditRequest
    folder: ResultsFolder
    executor: Executor
    interrupts: Interrupts
    on_progress: Callable[[int, int, str], None]
    target: str
    ops: tuple[Op, ...] = ()
    waiting: list[tuple[Op, ...]] = field(default_factory=list)
    running: dict[str, int | None] = field(default_factory=dict)
    submitted: int = 0
    losses: int = 0

    def run(self, environment: Mapping[str, Any]) -> tuple[Any, ...]:
        """Run the audit and write its table, on Ctrl-C too."""
        path, request = self.folder.path, self.request
        (path / "ops").mkdir(exist_ok=True)
        try:
            with self.interrupts.allowed():
                known = [op for op in _catalog(path) if op[0] in request.kind.sources]
                chosen = chosen_ops(known, only=request.only, filters=request.filters)
            self.ops = tuple(dict.fromkeys([*self._ops_before(), *chosen]))
            missing = self._missing(self.ops)
            self.folder.clear_leftovers()
            unreadable = [set_aside(op_file(path, op)) for op in missing if os.path.lexists(op_file(path, op))]
            manifest = AuditManifest(request.options, self.ops, sweeps=bool(request.sweep_rows))
            replace_file(path / MANIFEST_FILE, manifest_text(manifest))
            unreadable += self.folder.write_environment(environment)
            if unreadable:
                names = join_limited([str(file.relative_to(path)) for file in unreadable], 3)
                note = f"{count(len(unreadable), 'file')} cannot be read, set aside as {names}"
                self.on_progress(len(self.ops) - len(missing), len(self.ops), note)
            if missing:
                self._work(missing)
        finally:
            self.executor.close()
            rows: dict[tuple[str, ...], Any] = {}
            written = (row for op in self.ops for row in read_op(path, op, request.kind.rows) or ())
            for row in [*written, *request.sweep_rows]:
                rows.setdefault(request.kind.rows.key_of(row), row)  # a sweep folder may be named twice
            if self.ops:
                replace_file(path / request.kind.file, request.kind.rows.text(rows.values()))
        return tuple(rows.values())

    def _missing(self, ops: Sequence[Op]) -> list[Op]:
        return [op for op in ops if read_op(self.folder.path, op, self.request.kind.rows) is None]

    def _ops_before(self) -> tuple[Op, ...]:
        """Return the ops of the audit that is resumed, which must have been asked for with the same options; none where
        this is a new one."""
        path = self.folder.path / MANIFEST_FILE
        if not path.exists():
            return ()
        manifest = read_manifest(path)
        if manifest.options != self.request.options:
            raise HashbenchError(
                f"cannot resume {self.folder.path}",
                consequence="it holds an audit with different options",
                tip="Repeat the command that began it, or choose another --output.",
            )
        return manifest.ops

    def _work(self, missing: Sequence[Op]) -> None:
        """Run these ops in groups."""
        with self.interrupts.allowed():
            self.executor.start(target=self.target)
        per_worker = -(-len(missing) // self.executor.capacity)
        self.waiting = groups_of(missing, size=max(1, min(GROUP_SIZE, per_worker)))
        while self.waiting or self.running:
            while self.waiting and len(self.running) < self.executor.capacity:
                self._submit(self.waiting.pop(0))
            with self.interrupts.allowed():
                results = self.executor.wait()
            for result in results:
                del self.running[result.task.key]
                note = self._end(result)
                done = sum(op_file(self.folder.path, op).exists() for op in self.ops)
                self.on_progress(done, len(self.ops), note)

    def _submit(self, ops: tuple[Op, ...]) -> None:
        key, devices = f"group_{self.submitted}", self.executor.resources.devices
        self.submitted += 1
        device = self.running[key] = freest(len(devices), self.running.values())
        path, options, seconds = self.folder.path, self.request.options, self.request.seconds
        row_path = path / "rows" / f"{key}.done"
        row_path.unlink(missing_ok=True)  # of the audit that this one resumes
        measure = self.request.kind.measure
        arguments = {"ops": ops, "options": to_json(options), "seconds": seconds, "measure": measure}
        self.executor.submit(
            Task(
                key=key,
                spec=ModelSpec("audit", key, arguments=arguments),
                options=RunOptions(device=options.device, threads=options.threads, seed=options.seed, output=str(path)),
                target=self.target,
                row_path=str(row_path),
                log_path=str(self.folder.log_path(key)),
                timeout=STARTING_SECONDS + seconds * len(ops),
                variables={} if device is None else devices[device].variables,
            )
        )

    def _end(self, result: TaskResult) -> str:
        """Handle the end of a worker; return a text where one op killed its process."""
        task = result.task
        row = left_row(Path(task.row_path), result.row, task.spec, mode="")
        unwritten = result.storage_error or (row.error if row is not None and row.accuracy != Status.PASS else "")
        if unwritten:
            raise OSError(unwritten)
        self.losses = self.losses + 1 if result.lost else 0
        if self.losses > _LOSSES:
            raise HashbenchError(
                f"the audit in {self.folder.path} has no more workers",
                consequence=f"{_LOSSES + 1} times in a row, {result.lost}, which says nothing of an op",
                tip="What is written is safe: run the same command with --resume.",
            )
        ops: tuple[Op, ...] = result.task.spec.arguments["ops"]
        left = self._missing(ops)
        if not left:
            return ""
        if result.lost:
            self.waiting.insert(0, tuple(left))
            return result.lost
        guilty, others = left[0], tuple(left[1:])
        if others:
            self.waiting.insert(0, others)
        if len(ops) > 1:
            self.waiting.insert(0, (guilty,))
            return ""
        row = self._row_without_answer(guilty, result)
        write_op(self.folder.path, guilty, [row])
        return f"{row.op}: {row.verdict}"

    def _row_without_answer(self, op: Op, result: TaskResult) -> Any:
        """Make the one row of an op that ended its own process: by what it did, or by taking longer than it may."""
        seconds = self.request.seconds
        timed_out = result.timed_out or result.wall_seconds >= seconds
        if timed_out:
            error = f"no result after {seconds:g} s"
        else:
            words = last_words(self.folder.log_path(result.task.key))
            error = " | ".join([describe_end(result.exit_code), *words])[:300]
        return self.request.kind.died(self.request.options.device, op, timed_out=timed_out, error=error)


def _catalog(folder: Path) -> list[Op]:
    """List every op, as a process of this audit or of its earlier part wrote it down: only a process of its own may
    import torch's test helpers."""
    path = folder / CATALOG_FILE
    known = _read_catalog(path)
    if known:
        return known
    done = run_process(python_calling(CATALOG_TARGET, str(path)), seconds=STARTING_SECONDS)
    known = _read_catalog(path)
    if not known:
        raise HashbenchError(
            "cannot read torch's op database",
            consequence=f"nothing was run ({done.last_line})",
            tip="It needs the package expecttest: pip install expecttest.",
        )
    return known


def _read_catalog(path: Path) -> list[Op]:
    """Read the ops in the file; empty where there is none, or it is damaged."""
    with contextlib.suppress(OSError, ValueError):
        return list(from_json(tuple[tuple[str, str], ...], read_json(path)))
    return []
