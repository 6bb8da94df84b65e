"""The audit's own process: which ops wait, which worker runs them, what becomes of those whose worker died.

Imports no torch. An op that has a file is done; ``audit.csv`` is made from these files. A group of ops shares one
process, since to start one costs more than to run ten ops. Where it dies, the op that it was at runs again alone, so
that only what kills a process of its own is blamed, and the others go on in a new group.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hashbench.devices.visibility import freest
from hashbench.errors import HashbenchError
from hashbench.io import replace_file, to_json
from hashbench.processes import Interrupts, describe_end, last_words
from hashbench.records import ModelSpec, RunOptions
from hashbench.results.audit_table import (
    AUDIT_FILE,
    AUDIT_ROWS,
    MANIFEST_FILE,
    AuditManifest,
    AuditOptions,
    AuditRow,
    AuditVerdict,
    Op,
    catalog_file,
    op_file,
    read_manifest,
    read_op,
    write_op,
)
from hashbench.results.folder import ResultsFolder
from hashbench.suites.selection import pattern_of, unknown_name
from hashbench.sweep.executors import Executor, Task, TaskResult

GROUP_TARGET = "hashbench.tools.audit.worker:run_group"
CATALOG_TARGET = "hashbench.tools.audit.worker:write_catalog"
SUITE = "audit"

GROUP_SIZE = 40
STARTING_SECONDS = 120.0
"""What a worker may take on a loaded machine until its first op."""


@dataclass(frozen=True, slots=True)
class AuditRequest:
    """What an audit is asked for: how ops are run, the names of ``only`` these or regular expressions that they match
    (neither: all), the ``seconds`` that one op may take, and rows that real models' sweeps add."""

    options: AuditOptions
    only: tuple[str, ...] = ()
    filters: tuple[str, ...] = ()
    seconds: float = 120.0
    sweep_rows: tuple[AuditRow, ...] = ()


def chosen_ops(known: Sequence[Op], *, only: Collection[str], filters: Sequence[str]) -> tuple[Op, ...]:
    """The ops that are named or that match one of the regular expressions; all where neither says.
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
    """The ops in groups of about ``size``, dealt like cards: neighbours, which take equally long, are spread."""
    count = max(1, -(-len(ops) // size))
    return [tuple(ops[start::count]) for start in range(count)]


def audit(
    request: AuditRequest,
    *,
    output: Path,
    environment: Mapping[str, Any],
    executor: Executor,
    resume: bool = False,
    on_progress: Callable[[int, int, str], None] = lambda *_: None,
    target: str = GROUP_TARGET,
) -> tuple[AuditRow, ...]:
    """Run what is asked for and has no file in the folder ``output`` yet; returns all rows, which are in ``audit.csv``
    then. The executor is closed at the end. ``environment`` is the fingerprint of this machine; ``on_progress`` is told
    after every worker how many ops of all are done, and what became of one that killed its process; ``target`` is what
    workers call for a group of ops, as ``module:function``.

    Raises:
        HashbenchError: the folder cannot be used for this audit, nothing is to be run, or the disk is full.
    """
    folder = ResultsFolder(output)
    _refuse_used(folder.path, resume=resume)
    with Interrupts() as interrupts, folder.claimed(resume=resume):
        try:
            return _AuditDriver(request, folder, executor, interrupts, on_progress, target).run(environment)
        except OSError as error:
            raise HashbenchError(
                f"cannot write into {folder.path}",
                consequence=f"{error.strerror or error}; what is written is safe",
                tip="Free space, then run the same command with --resume.",
            ) from error


def _refuse_used(path: Path, *, resume: bool) -> None:
    holds, tip = "", "Choose another --output."
    if (path / MANIFEST_FILE).exists() and not resume:
        holds, tip = "already holds an audit", "Add --resume to complete it, or choose another --output."
    elif (path / "sweep.json").exists():
        holds = "holds a sweep"
    if holds:
        raise HashbenchError(f"{path} {holds}", consequence="nothing in it was touched", tip=tip)


class _AuditDriver:
    """One audit: the ops that wait, and the workers that run, by the key of their task with the number of their
    device (``None`` where there are none)."""

    def __init__(
        self,
        request: AuditRequest,
        folder: ResultsFolder,
        executor: Executor,
        interrupts: Interrupts,
        on_progress: Callable[[int, int, str], None],
        target: str,
    ) -> None:
        self.request, self.folder, self.executor = request, folder, executor
        self.interrupts, self.on_progress, self.target = interrupts, on_progress, target
        self.devices = executor.resources.devices
        self.ops: tuple[Op, ...] = ()
        self.waiting: list[tuple[Op, ...]] = []
        self.running: dict[str, int | None] = {}
        self.submitted = 0
        self.ready = False

    def run(self, environment: Mapping[str, Any]) -> tuple[AuditRow, ...]:
        """From the choice of ops to ``audit.csv``, which is written on Ctrl-C too."""
        path, request = self.folder.path, self.request
        (path / "ops").mkdir(exist_ok=True)
        try:
            with self.interrupts.allowed():
                chosen = chosen_ops(self._catalog(), only=request.only, filters=request.filters)
            self.ops = tuple(dict.fromkeys([*self._ops_before(), *chosen]))
            manifest = AuditManifest(1, request.options, self.ops, sweeps=bool(request.sweep_rows))
            replace_file(path / MANIFEST_FILE, json.dumps(to_json(manifest), indent=1) + "\n")
            self.folder.write_environment(environment)
            missing = self._missing(self.ops)
            for op in missing:
                op_file(path, op).unlink(missing_ok=True)  # damaged
            if missing:
                self._start()
                per_worker = -(-len(missing) // self.executor.capacity)
                self.waiting = groups_of(missing, size=max(1, min(GROUP_SIZE, per_worker)))
                self._work()
        finally:
            self.executor.close()
            of_ops = [row for op in self.ops for row in read_op(path, op) or ()]
            rows = _unique([*of_ops, *request.sweep_rows])
            if self.ops:
                replace_file(path / AUDIT_FILE, AUDIT_ROWS.text(rows))
        return rows

    def _missing(self, ops: Iterable[Op]) -> list[Op]:
        return [op for op in ops if read_op(self.folder.path, op) is None]

    def _start(self) -> None:
        """Get the executor ready, once, and only where something is to be run: that takes seconds."""
        if not self.ready:
            with self.interrupts.allowed():
                self.executor.start(target=self.target)
            self.ready = True

    def _catalog(self) -> list[Op]:
        """Every op there is, as a worker of this audit or of its earlier part wrote it down."""
        path = catalog_file(self.folder.path)
        if not path.exists():
            self._start()
            self._submit("catalog", (), target=CATALOG_TARGET)
            for result in self.executor.wait():
                del self.running[result.task.key]
                if not path.exists():
                    raise HashbenchError(
                        "cannot read torch's op database",
                        consequence=f"nothing was run ({self._end_of(result)})",
                        tip="It needs the package expecttest: pip install expecttest.",
                    )
        return [(str(source), str(op)) for source, op in json.loads(path.read_bytes())]

    def _ops_before(self) -> tuple[Op, ...]:
        """The ops of the audit that is resumed, which must have been asked for with the same options; none where this
        is a new one."""
        path = self.folder.path / MANIFEST_FILE
        if not path.exists():
            return ()
        try:
            manifest = read_manifest(path)
        except HashbenchError:
            manifest = None
        if manifest is None or manifest.options != self.request.options:
            raise HashbenchError(
                f"cannot resume {self.folder.path}",
                consequence="it holds an audit that was asked for otherwise, or its audit.json is damaged",
                tip="Repeat the command that began it, or choose another --output.",
            )
        return manifest.ops

    # ------------------------------------------------------------------------------------------------ workers

    def _work(self) -> None:
        while self.waiting or self.running:
            while self.waiting and len(self.running) < self.executor.capacity:
                self._submit(f"group_{self.submitted}", self.waiting.pop(0), target=self.target)
            with self.interrupts.allowed():
                results = self.executor.wait()
            for result in results:
                del self.running[result.task.key]
                note = self._end(result)
                done = sum(op_file(self.folder.path, op).exists() for op in self.ops)
                self.on_progress(done, len(self.ops), note)

    def _submit(self, key: str, ops: tuple[Op, ...], *, target: str) -> None:
        self.submitted += 1
        device = freest(len(self.devices), self.running.values())
        self.running[key] = device
        options, seconds = self.request.options, self.request.seconds
        arguments = {"ops": ops, "options": to_json(options), "seconds": seconds}
        path = self.folder.path
        self.executor.submit(
            Task(
                key=key,
                spec=ModelSpec(SUITE, key, arguments=arguments),
                options=RunOptions(device=options.device, threads=options.threads, seed=options.seed, output=str(path)),
                target=target,
                row_path=str(path / "rows" / f"{key}.done"),
                log_path=str(self.folder.log_path(key)),
                timeout=STARTING_SECONDS + seconds * len(ops),
                variables={} if device is None else self.devices[device].variables,
            )
        )

    def _end(self, result: TaskResult) -> str:
        """What follows from the end of a worker; a text where one op killed its process."""
        if result.storage_error:
            raise OSError(result.storage_error)
        ops: tuple[Op, ...] = result.task.spec.arguments["ops"]
        left = self._missing(ops)
        if not left:
            return ""
        guilty, others = left[0], tuple(left[1:])
        if others:
            self.waiting.insert(0, others)
        if len(ops) > 1:
            self.waiting.insert(0, (guilty,))
            return ""
        row = self._row_of_the_dead(guilty, result)
        write_op(self.folder.path, guilty, [row])
        return f"{row.op}: {row.verdict}"

    def _row_of_the_dead(self, op: Op, result: TaskResult) -> AuditRow:
        """The one row of an op that ended its own process: by what it did, or by taking longer than it may."""
        seconds = self.request.seconds
        if result.timed_out or result.wall_seconds >= seconds:
            verdict, error = AuditVerdict.TIMEOUT, f"no result after {seconds:g} s"
        else:
            verdict, error = AuditVerdict.CRASHED, self._end_of(result)
        return AuditRow(self.request.options.device, *op, "", "", "forward", verdict, error=error)

    def _end_of(self, result: TaskResult) -> str:
        return " | ".join([describe_end(result.exit_code), *last_words(self.folder.log_path(result.task.key))])[:300]


def _unique(rows: Iterable[AuditRow]) -> tuple[AuditRow, ...]:
    """The rows; of those with one key (two models' rows of one sweep folder named twice) the first."""
    kept: dict[tuple[str, ...], AuditRow] = {}
    for row in rows:
        kept.setdefault(AUDIT_ROWS.key_of(row), row)
    return tuple(kept.values())
