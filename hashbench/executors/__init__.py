"""Where models run: an executor starts isolated workers, enforces the time limit and says how each one ended.

It knows nothing of CSV files, of resuming or of what a row means: :mod:`hashbench.sweep` does. A worker
leaves its row in the file that its task names (:mod:`hashbench.worker`); only that file counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from hashbench.records import ModelSpec, RunOptions


@dataclass(frozen=True, slots=True)
class Task:
    """One model for one worker.

    ``target`` names the function ``(spec, options) -> Row`` as ``module:function``. The worker writes the row as JSON
    to ``row_path`` and everything the model prints to ``log_path``. ``timeout`` is in seconds, from start to end.
    """

    key: str
    spec: ModelSpec
    options: RunOptions
    target: str
    row_path: str
    log_path: str
    timeout: float


@dataclass(frozen=True, slots=True)
class Ended:
    """How the worker of ``task`` ended. It is gone, with every process it had started.

    ``wall_seconds`` counts from the request for a worker until it was reaped. ``exit_code`` is negative for a signal.
    ``timed_out`` says that the executor ended it. ``storage_error`` is not empty when the worker could not
    write into the results folder: that is a fault of the machine, not of the model.
    """

    task: Task
    wall_seconds: float
    exit_code: int
    timed_out: bool = False
    storage_error: str = ""


class Executor(Protocol):
    """What a sweep asks of the place where its models run."""

    @property
    def capacity(self) -> int:
        """How many tasks may run at once."""

    def start(self, *, target: str) -> None:
        """Get ready to run tasks of ``target``; may take seconds.

        Raises:
            HashbenchError: workers cannot be started, or cannot import ``target``.
        """

    def submit(self, task: Task) -> None:
        """Start a worker for ``task``. The caller keeps to :attr:`capacity`."""

    def wait(self) -> tuple[Ended, ...]:
        """Block until at least one running task ends, by itself or by its time limit. Empty if none is running."""

    def close(self) -> None:
        """End every running worker and all it started, without a result. Can be called more than once."""
