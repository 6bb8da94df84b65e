"""The audit's own process: which ops wait, which worker runs them, what becomes of those whose worker died.

Imports no torch. An op that has a file is done; ``audit.csv`` is made from these files. A group of ops shares one
process, since to start one costs more than to run ten ops. Where it dies, the op that it was at runs again alone, so
that only what kills a process of its own is blamed, and the others go on in a new group.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hashbench.devices.visibility import DeviceAssignment, freest
from hashbench.errors import HashbenchError
from hashbench.io import replace_file, to_json
from hashbench.processes import Interrupts, describe_end, last_words
from hashbench.records import ModelSpec, RunOptions
from hashbench.results.audit_table import AUDIT_FILE, AUDIT_ROWS, MANIFEST_FILE, AuditRow
from hashbench.results.folder import ResultsFolder
from hashbench.sweep.executors import Executor, Task, TaskResult
from hashbench.sweep.executors.local import LocalExecutor
from hashbench.tools.audit.choice import groups_of
from hashbench.tools.audit.task import CATALOG_TARGET, GROUP_TARGET, SUITE, catalog_file, op_file

GROUP_SIZE = 40
STARTING_SECONDS = 120.0
"""What a worker may take on a loaded machine until its first op."""

Op = tuple[str, str]
"""``(source, name)``."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Told after every worker: so many ops of all are done; ``told`` is what became of one that killed its process."""

    done: int
    total: int
    told: str = ""


@dataclass(frozen=True, slots=True)
class Asked:
    """What an audit is asked for: ``options`` as plain values (see ``rows.AuditOptions``), which ops as a function of
    all there are, the ``seconds`` that one op may take, and rows that real models' sweeps add."""

    options: Mapping[str, Any]
    choose: Callable[[Sequence[Op]], Sequence[Op]]
    seconds: float
    sweep_rows: tuple[AuditRow, ...] = ()


def audit(
    asked: Asked,
    *,
    output: Path,
    environment: Mapping[str, Any],
    jobs: int = 1,
    resume: bool = False,
    executor: Executor | None = None,
    on_progress: Callable[[Progress], None] = lambda _: None,
    target: str = GROUP_TARGET,
) -> tuple[AuditRow, ...]:
    """Run what is asked for and has no file in ``output`` yet; returns all rows, which are in ``audit.csv`` then.
    ``target`` is what workers call for a group of ops, as ``module:function``.

    Raises:
        HashbenchError: the folder cannot be used for this audit, nothing is to be run, or the disk is full.
    """
    folder = ResultsFolder(output)
    _refuse_used(folder.path, resume=resume)
    with Interrupts() as interrupts, folder.claimed(resume=resume):
        workers = executor or LocalExecutor(jobs=jobs)
        devices = workers.resources.devices
        conductor = _Conductor(asked, folder, workers, devices, on_progress, interrupts, target)
        try:
            return conductor.run(environment)
        except OSError as error:
            raise HashbenchError(
                f"cannot write into {folder.path}",
                consequence=f"{error.strerror or error}; what is written is safe",
                tip="Free space, then run the same command with --resume.",
            ) from error


def _refuse_used(path: Path, *, resume: bool) -> None:
    if (path / MANIFEST_FILE).exists() and not resume:
        raise HashbenchError(
            f"{path} already holds an audit",
            consequence="nothing in it was touched",
            tip="Add --resume to complete it, or choose another --output.",
        )
    if (path / "sweep.json").exists():
        raise HashbenchError(
            f"{path} holds a sweep", consequence="nothing in it was touched", tip="Choose another --output."
        )


@dataclass
class _Conductor:
    asked: Asked
    folder: ResultsFolder
    executor: Executor
    devices: tuple[DeviceAssignment, ...]
    on_progress: Callable[[Progress], None]
    interrupts: Interrupts
    target: str
    waiting: list[tuple[Op, ...]] = field(default_factory=list)
    ops: tuple[Op, ...] = ()
    started: int = 0
    running: dict[str, int | None] = field(default_factory=dict)
    """By a task's key, the number of its device among ``devices``; ``None`` where there are none."""
    ready: bool = False

    def run(self, environment: Mapping[str, Any]) -> tuple[AuditRow, ...]:
        """From the choice of ops to ``audit.csv``, which is written on Ctrl-C too."""
        path = self.folder.path
        (path / "ops").mkdir(exist_ok=True)
        try:
            with self.interrupts.allowed():
                chosen = tuple(self.asked.choose(self._catalog()))
            self.ops = tuple(dict.fromkeys([*self._asked_before(), *chosen]))
            self._note_manifest()
            self.folder.write_environment(environment)
            missing = [op for op in self.ops if rows_in(op_file(path, *op)) is None]
            for op in missing:
                op_file(path, *op).unlink(missing_ok=True)  # damaged
            if missing:
                self._start()
                self.waiting = groups_of(missing, size=self._group_size(len(missing)))
                self._work()
        finally:
            self.executor.close()
            rows = self._rows()
            if self.ops:
                replace_file(path / AUDIT_FILE, AUDIT_ROWS.text(rows))
        return rows

    def _start(self) -> None:
        """Get the executor ready, once, and only where something is to be run: that takes seconds."""
        if not self.ready:
            with self.interrupts.allowed():
                self.executor.start(target=self.target)
            self.ready = True

    def _group_size(self, count: int) -> int:
        """Small enough that every worker gets some."""
        return max(1, min(GROUP_SIZE, -(-count // self.executor.capacity)))

    def _catalog(self) -> list[Op]:
        """Every op there is, as a worker of this audit or of its earlier part found."""
        path = catalog_file(self.folder.path)
        if not path.exists():
            self._start()
            self._submit("catalog", (), target=CATALOG_TARGET, timeout=STARTING_SECONDS)
            for ended in self.executor.wait():
                del self.running[ended.task.key]
                if not path.exists():
                    raise HashbenchError(
                        "cannot read torch's op database",
                        consequence=f"nothing was run ({self._end_of(ended)})",
                        tip="It needs the package expecttest: pip install expecttest.",
                    )
        return [(str(source), str(op)) for source, op in json.loads(path.read_bytes())]

    def _asked_before(self) -> list[Op]:
        """The ops of the audit that is resumed; none where this is a new one.

        Raises:
            HashbenchError: it was asked for with other options, or nobody can tell.
        """
        path = self.folder.path / MANIFEST_FILE
        if not path.exists():
            return []
        try:
            found = json.loads(path.read_bytes())
            ops = [(str(source), str(op)) for source, op in found["ops"]]
        except (ValueError, TypeError, KeyError):
            found, ops = {}, []
        if found.get("options") != dict(self.asked.options):
            raise HashbenchError(
                f"cannot resume {self.folder.path}",
                consequence="it holds an audit that was asked for otherwise, or its audit.json is damaged",
                tip="Repeat the command that began it, or choose another --output.",
            )
        return ops

    def _note_manifest(self) -> None:
        wanted = {
            "schema": 1,
            "options": dict(self.asked.options),
            "ops": self.ops,
            "sweeps": bool(self.asked.sweep_rows),
        }
        replace_file(self.folder.path / MANIFEST_FILE, json.dumps(wanted, indent=1) + "\n")

    # ------------------------------------------------------------------------------------------------ workers

    def _work(self) -> None:
        while self.waiting or self.running:
            while self.waiting and len(self.running) < self.executor.capacity:
                ops = self.waiting.pop(0)
                self._submit(f"group {self.started}", ops, target=self.target, timeout=self._time_for(ops))
            with self.interrupts.allowed():
                ended = self.executor.wait()
            for worker in ended:
                del self.running[worker.task.key]
                told = self._end(worker)
                done = sum(op_file(self.folder.path, *op).exists() for op in self.ops)
                self.on_progress(Progress(done, len(self.ops), told))

    def _time_for(self, ops: Sequence[Op]) -> float:
        return STARTING_SECONDS + self.asked.seconds * len(ops)

    def _submit(self, name: str, ops: tuple[Op, ...], *, target: str, timeout: float) -> None:
        key = name.replace(" ", "_")
        self.started += 1
        device = freest(len(self.devices), self.running.values())
        self.running[key] = device
        values = self.asked.options
        self.executor.submit(
            Task(
                key=key,
                spec=ModelSpec(SUITE, name, arguments={"ops": ops, "options": values, "seconds": self.asked.seconds}),
                options=RunOptions(
                    device=values["device"],
                    threads=values["threads"],
                    seed=values["seed"],
                    output=str(self.folder.path),
                ),
                target=target,
                row_path=str(self.folder.path / "rows" / f"{key}.done"),
                log_path=str(self.folder.log_path(key)),
                timeout=timeout,
                variables={} if device is None else self.devices[device].variables,
            )
        )

    def _end(self, worker: TaskResult) -> str:
        """What follows from the end of a worker; a text where one op killed its process."""
        if worker.storage_error:
            raise OSError(worker.storage_error)
        ops: tuple[Op, ...] = worker.task.spec.arguments["ops"]
        left = [op for op in ops if rows_in(op_file(self.folder.path, *op)) is None]
        if not left:
            return ""
        guilty, others = left[0], tuple(left[1:])
        if others:
            self.waiting.insert(0, others)
        if len(ops) > 1:
            self.waiting.insert(0, (guilty,))
            return ""
        row = self._row_of_the_dead(guilty, worker)
        replace_file(op_file(self.folder.path, *guilty), json.dumps([to_json(row)]))
        return f"{guilty[1]}: {row.verdict}"

    def _row_of_the_dead(self, op: Op, worker: TaskResult) -> AuditRow:
        """The one row of an op that ended its own process: by what it did, or by taking longer than it may."""
        late = worker.timed_out or worker.wall_seconds >= self.asked.seconds
        return AuditRow(
            dev=self.asked.options["device"],
            source=op[0],
            op=op[1],
            dtype="",
            sample="",
            phase="forward",
            verdict="timeout" if late else "crashed",
            error=f"no result after {self.asked.seconds:g} s" if late else self._end_of(worker),
        )

    def _end_of(self, worker: TaskResult) -> str:
        return " | ".join([describe_end(worker.exit_code), *last_words(self.folder.log_path(worker.task.key))])[:300]

    def _rows(self) -> tuple[AuditRow, ...]:
        found = [row for op in self.ops for row in rows_in(op_file(self.folder.path, *op)) or ()]
        return unique([*found, *self.asked.sweep_rows])


def unique(rows: Iterable[AuditRow]) -> tuple[AuditRow, ...]:
    """The rows; of those with one key (two models' rows of one sweep folder named twice) the first."""
    kept: dict[tuple[str, ...], AuditRow] = {}
    for row in rows:
        kept.setdefault(AUDIT_ROWS.key_of(row), row)
    return tuple(kept.values())


def rows_in(path: Path) -> tuple[AuditRow, ...] | None:
    """The rows in an op's file; ``None`` where there is none, or it is damaged. An op may have no rows at all: none
    of the dtypes that were asked for."""
    try:
        content = json.loads(path.read_bytes())
        return tuple(map(AUDIT_ROWS.from_json, content)) if isinstance(content, list) else None
    except (OSError, ValueError, RecursionError):
        return None
