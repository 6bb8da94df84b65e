"""What runs on a machine of a cluster: one model as on this machine, and all that it left as plain data.

A request is JSON, an answer a dict of text, numbers and bytes. The model runs in a worker of its own
(:mod:`hashbench.core.sweep.executors.local`) whose results folder is a temporary one on that machine; nothing has to be
shared with the machine that asks.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from hashbench import __version__
from hashbench.core.errors import HashbenchError
from hashbench.core.io import file_digest, from_json, read_file
from hashbench.core.records import ModelSpec, RunOptions
from hashbench.core.results.folder import ResultsFolder, file_key
from hashbench.core.suites import registry
from hashbench.core.sweep.executors import Task, TaskResult
from hashbench.core.sweep.executors.local import LocalExecutor
from hashbench.core.workers import WORKER_VARIABLES
from hashbench.extensions.ray.phase_board import reporting_phases


def prepare(request: str) -> dict[str, Any]:
    """Find out whether models can run here: the same hashbench, the same zoo files, a target that can be imported.

    The answer has ``environment``, the environment of this machine, or ``problem``.
    """
    asked = json.loads(request)
    try:
        _check(asked)
        with contextlib.closing(LocalExecutor(preload=asked["preload"])) as executor:
            executor.start(target=asked["target"])
        return {"environment": _environment(asked)}
    except (HashbenchError, OSError) as error:
        return _problem(error)


def run(request: str, tell: Callable[[str], object] = str) -> dict[str, Any]:
    """Run one model and return how its worker ended and every file that it left, ``files`` by their path in the
    results folder; with ``environment``, unless this machine (``node``) is among those that are ``known``. ``tell`` is
    called with what the model is doing."""
    asked = json.loads(request)
    try:
        _check(asked)
        with tempfile.TemporaryDirectory(prefix="hashbench-", ignore_cleanup_errors=True) as temporary:
            ended, files = _run(asked, ResultsFolder(Path(temporary, "results")), tell)
        fields = ("wall_seconds", "exit_code", "timed_out", "storage_error", "row", "draft", "lost")
        answer: dict[str, Any] = {"ended": {name: getattr(ended, name) for name in fields}, "files": files}
        if asked["node"] not in asked["known"]:
            answer["environment"] = _environment(asked)
    except (HashbenchError, OSError) as error:
        return _problem(error)
    return answer


def confirm(request: str) -> dict[str, Any]:  # noqa: ARG001 – called as the others
    """Say that this machine is still there."""
    return {}


def _check(asked: Mapping[str, Any]) -> None:
    if asked["version"] != __version__:
        raise HashbenchError(
            f"it has hashbench {__version__}, this sweep is one of {asked['version']}",
            tip="Install the same version everywhere.",
        )
    unknown = [suite for suite in asked["suites"] if suite not in (*registry.SUITES, *registry.names())]
    if unknown:
        tip = "Install the package that brings it on every machine."
        raise HashbenchError(f"it has no suite {unknown[0]!r}", tip=tip)
    registry.require(asked["suites"])
    for path, digest in asked["zoo_files"].items():
        digest_here = file_digest(path)
        if digest_here != digest:
            raise HashbenchError(
                f"it has {'another' if digest_here else 'no'} {path}",
                tip="Copy a zoo file and all that it imports to the same path on every machine.",
            )
    # OpenMP reads it in the fork server and in whatever collects the environment; Ray sets it to the CPUs of a task.
    os.environ["OMP_NUM_THREADS"] = str(asked["threads"])


def _problem(error: HashbenchError | OSError) -> dict[str, Any]:
    if isinstance(error, OSError):
        return {"problem": {"what": f"its temporary folder cannot be used ({error.strerror or error})", "tip": ""}}
    what = f"{error.what}: {error.consequence}" if error.consequence else error.what
    return {"problem": {"what": what, "tip": error.tip}}


def _environment(asked: Mapping[str, Any]) -> dict[str, Any]:
    environment: dict[str, Any] = resolve_name(asked["fingerprint"])(
        device=asked["device"], variables=WORKER_VARIABLES, tracer=asked["tracer"]
    )
    return environment


def _run(
    asked: Mapping[str, Any], folder: ResultsFolder, tell: Callable[[str], object]
) -> tuple[TaskResult, dict[str, bytes]]:
    with folder.claimed(resume=False):
        task = _task(asked, folder)
        with contextlib.closing(LocalExecutor(preload=asked["preload"])) as executor:
            executor.start(target=task.target)
            executor.submit(task)
            with reporting_phases(functools.partial(executor.phase, task.key), tell):
                (ended,) = executor.wait()
        files = (path for path in sorted(folder.path.rglob("*")) if path.is_file() and not path.name.startswith("."))
        return ended, {path.relative_to(folder.path).as_posix(): read_file(path) for path in files}


def _task(asked: Mapping[str, Any], folder: ResultsFolder) -> Task:
    spec = from_json(ModelSpec, asked["spec"])
    options = from_json(RunOptions, {**asked["options"], "output": str(folder.path)})
    key = file_key(suite=spec.suite, mode=options.mode, name=spec.name)
    return Task(
        key=key,
        spec=spec,
        options=options,
        target=asked["target"],
        row_path=str(folder.row_path(key)),
        log_path=str(folder.log_path(key)),
        timeout=asked["timeout"],
    )
