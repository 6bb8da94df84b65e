"""What runs in a worker process: one model, its row into one file, nothing else leaves.

A worker is disposable. It leads its own process group, so that it can be ended with everything it started; it
leaves Ctrl-C to its parent; it dies with its parent, even when that was killed; it prints into its own log. Its
row appears under its final name only when it is whole and on disk.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import faulthandler
import gc
import importlib
import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Never

from hashbench.devices.visibility import WORKSPACE_VARIABLE, workspace_config, workspace_conflict
from hashbench.io import replace_file
from hashbench.processes import end_with, exit_at_once, uncollected
from hashbench.records import ModelSpec, Row, RunOptions
from hashbench.results.rows import row_to_json
from hashbench.sweep.executors import Task

SAFE_PATH_MARK = "hashbench"
"""Value of ``PYTHONSAFEPATH`` in a fork server whose parent had not set it; the worker removes it again."""

PRELOAD_VARIABLE = "HASHBENCH_PRELOAD"
"""Names in the environment of a new fork server what it imports; neither its parent nor its workers have it."""

NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


def _preload() -> None:
    """Import what a fork server is to have, as far as that can be: an exception would end the server, where a worker's
    reaches a row or the user."""
    names = os.environ.pop(PRELOAD_VARIABLE, "").split()
    with uncollected():
        for name in names:
            with contextlib.suppress(Exception):
                importlib.import_module(name)
    if names:
        # The 500 000 objects of these modules live as long as the workers do. Frozen, they are neither searched by the
        # collector (0.2 s a time) nor copied with the pages that it would touch in every worker.
        gc.collect()
        gc.freeze()
        # What is frozen when the server ends counts as leaked: triton's bindings would print a page about it.
        atexit.register(gc.unfreeze)


_preload()


def run(task: Task, reports: Connection) -> Never:
    """Run ``task`` and end the process: with code 0 once its row is on disk.

    A row or log that cannot be written, or a full disk under the target, is told through ``reports`` as a text; any
    other exception of the target ends up in the log, with exit code 1.
    """
    _join_no_terminal()
    _die_with_parent()
    if os.environ.get("PYTHONSAFEPATH") == SAFE_PATH_MARK:
        del os.environ["PYTHONSAFEPATH"]
    try:
        _redirect_output(Path(task.log_path))
    except OSError as error:
        _end_with_storage_error(reports, error)
    _set_variables(task.variables)
    _keep_to(task.cpus)
    faulthandler.enable(file=2)
    # Shortly before the parent ends this process, the log gets the stack where it hangs.
    faulthandler.dump_traceback_later(max(0.9 * task.timeout, task.timeout - 2.0), file=2)
    _run_target(task, reports)
    exit_at_once(0)


def probe(target: str, reports: Connection) -> None:
    """Import ``target`` and send the error as a text, or an empty one."""
    _join_no_terminal()
    _die_with_parent()
    try:
        load_target(target)
    except Exception as error:
        reports.send_bytes(f"{type(error).__name__}: {error}".encode(errors="replace"))
    else:
        reports.send_bytes(b"")


def load_target(target: str) -> Callable[[ModelSpec, RunOptions], Row]:
    """The function that ``module:function`` names. Raises whatever its import raises."""
    module, _, function = target.partition(":")
    run_model: Callable[[ModelSpec, RunOptions], Row] = getattr(importlib.import_module(module), function)
    return run_model


def _run_target(task: Task, reports: Connection) -> None:
    try:
        row = load_target(task.target)(task.spec, task.options)
    except OSError as error:
        if error.errno in NO_SPACE:
            _end_with_storage_error(reports, error)
        raise
    text = json.dumps(row_to_json(row))
    try:
        replace_file(Path(task.row_path), text)
    except OSError as error:
        _end_with_storage_error(reports, error)


def _join_no_terminal() -> None:
    """A session of its own: no Ctrl-C from the terminal, and a process group that can be ended as a whole."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _redirect_output(log: Path) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    os.close(descriptor)
    # What was printed before a crash must not be lost in a buffer.
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def _set_variables(wanted: Mapping[str, str]) -> None:
    """What CUDA and cuBLAS read when they start. In time: the fork server has loaded torch, and started neither."""
    given = os.environ.get(WORKSPACE_VARIABLE)
    conflict = workspace_conflict(given)
    if conflict:
        print(f"hashbench: {conflict}")
    os.environ[WORKSPACE_VARIABLE] = workspace_config(given)
    os.environ.update(wanted)


def _keep_to(cpus: Sequence[int]) -> None:
    """Pin this process and all threads and processes that it will start. OpenMP and MKL counted the cores when the fork
    server loaded them and do not count again: the number of threads is the runner's to set."""
    if not cpus or not hasattr(os, "sched_setaffinity"):
        return
    try:
        os.sched_setaffinity(0, cpus)
    except OSError as error:  # taken away since the sweep looked
        print(f"hashbench: cannot keep to the cores {', '.join(map(str, cpus))} ({error.strerror})")


def _die_with_parent() -> None:
    """End this process group when the parent is gone: only the parent holds the write end of the pipe behind
    ``sentinel``."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker is started by hashbench.sweep.executors.local"
    end_with(int(parent.sentinel))


def _end_with_storage_error(reports: Connection, error: OSError) -> Never:
    reports.send_bytes((error.strerror or str(error)).encode(errors="replace"))
    exit_at_once(1)
