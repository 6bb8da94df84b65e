"""Where models run: an executor starts isolated workers, enforces the time limit and says how each one ended.

A worker leaves its row in the file that its task names, or sends it where it cannot write that file. An executor of
several machines brings that file, the log, traces and repros into the results folder before it says that the task
ended. Which task runs when is the sweep's decision (:mod:`hashbench.core.sweep.schedule`), within the
:class:`Resources` that the executor offers; one that places tasks itself offers neither cores nor memory and looks at
``Task.memory_mib`` and ``Task.alone``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from hashbench.core.devices.visibility import DeviceAssignment
from hashbench.core.records import ModelSpec, RunOptions


@dataclass(frozen=True, slots=True)
class Task:
    """One model for one worker.

    ``target`` names the function ``(spec, options) -> Row`` as ``module:function``. The worker writes the row as JSON
    to ``row_path`` and everything the model prints to ``log_path``. ``timeout`` is in seconds, from start to end.
    ``cpus`` are the cores that the worker may use (empty: any); ``memory_mib`` is the peak to expect (``None``: not
    known). ``alone``: no other task may run on the same machine meanwhile. ``variables`` are in the worker's
    environment before anything of the target is imported or an accelerator is used: the device that it may see.
    """

    key: str
    spec: ModelSpec
    options: RunOptions
    target: str
    row_path: str
    log_path: str
    timeout: float
    cpus: tuple[int, ...] = ()
    memory_mib: float | None = None
    alone: bool = False
    variables: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Resources:
    """What the workers of an executor have, as far as the sweep shares it out.

    ``threads`` is what each worker gets where ``--threads`` does not say (``None``: torch's own choice); it is the same
    for all, since results of different thread counts are not comparable. ``slots`` holds the cores of each worker
    (empty: nothing is pinned). ``memory_mib`` is what all workers together may take (``None``: the sweep does not look
    at memory). ``isolates``: the executor itself keeps a task that is ``alone`` from all others. ``devices`` are the
    accelerators that workers are given in turn (empty: none, or the executor gives them itself).
    """

    threads: int | None = None
    slots: tuple[tuple[int, ...], ...] = ()
    memory_mib: float | None = None
    isolates: bool = False
    devices: tuple[DeviceAssignment, ...] = ()


@dataclass(frozen=True, slots=True)
class TaskResult:
    """How the worker of ``task`` ended. It is gone, with every process it had started.

    ``wall_seconds`` counts from the request for a worker until it was reaped. ``exit_code`` is negative for a signal.
    ``timed_out`` says that the executor ended it, ``storage_error`` that the worker could not write into the results
    folder before its model began: a fault of the machine, not of the model. ``row`` and ``draft`` are the JSON that the
    worker could not write to its files, since its model has used up or changed what a process needs for that: the
    sweep writes the row. ``lost`` says what became of the machine or process that ran the
    worker: how that ended by itself is not known then, and without a row nothing is said of the model. ``environment``
    is the environment of the machine where it is not the sweep's own; the row gets its ``key``.
    """

    task: Task
    wall_seconds: float
    exit_code: int
    timed_out: bool = False
    storage_error: str = ""
    row: str = ""
    draft: str = ""
    lost: str = ""
    environment: Mapping[str, Any] | None = None


class Executor(Protocol):
    """What a sweep asks of the place where its models run."""

    @property
    def capacity(self) -> int:
        """How many tasks may run at once; asked again before every task, it may change."""

    @property
    def resources(self) -> Resources:
        """What there is to share out; asked once, before :meth:`start`."""

    def start(self, *, target: str) -> None:
        """Get ready to run tasks of ``target``; may take seconds.

        Raises:
            HashbenchError: workers cannot be started, or cannot import ``target``.
        """

    def submit(self, task: Task) -> None:
        """Start a worker for ``task``. The caller keeps to :attr:`capacity`."""

    def wait(self) -> tuple[TaskResult, ...]:
        """Block until at least one running task ends, by itself or by its time limit. Empty if none is running, or
        when :attr:`capacity` grew."""

    def phase(self, key: str) -> str:
        """Return what the task of this key is doing, in a few words; empty if not known. Called once a second, from any
        thread."""

    def close(self) -> None:
        """End every running worker and all it started, without a result. Can be called more than once."""


@dataclass(frozen=True, slots=True)
class RayCluster:
    """What ``executor="ray"`` is asked for.

    ``address`` is ``HOST:PORT`` of a cluster that runs, or ``auto`` for the one that runs here; empty: the one that
    ``RAY_ADDRESS`` names, else one of this machine is started. ``gpus`` is what a task asks of Ray's resource ``GPU``
    (``None``: 1 unless the device is ``cpu``), ``resources`` are custom ones by name. ``patience`` is how many seconds
    to wait for a machine that can run a task.
    """

    address: str = ""
    gpus: float | None = None
    resources: Mapping[str, float] = field(default_factory=dict)
    patience: float = 30.0
