"""The fingerprints of many models: each is recorded by a worker of its own, all become one file."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hashbench.errors import HashbenchError
from hashbench.fingerprint import document
from hashbench.fingerprint.document import Fingerprints, ModelFingerprint
from hashbench.io import read_json
from hashbench.processes import Interrupts, describe_end, last_words
from hashbench.records import ModelSpec, RunOptions
from hashbench.results.folder import file_key
from hashbench.results.rows import row_from_json
from hashbench.sweep.executors import Executor, Task, TaskResult

TARGET = "hashbench.check.fingerprint:record_model"


@dataclass(frozen=True, slots=True)
class Recording:
    """The fingerprints that were recorded, and for each model without one the reason, by name."""

    fingerprints: Fingerprints
    failures: Mapping[str, str]


def record(
    specs: Sequence[ModelSpec],
    options: RunOptions,
    *,
    executor: Executor,
    environment: Mapping[str, Any],
    timeout: float,
    on_progress: Callable[[str], object] = lambda _: None,
    target: str = TARGET,
) -> Recording:
    """Record one model after the other on the executor, which is closed at the end.

    Args:
        specs: the models; one that cannot run in this mode on this device is left out.
        options: how they run.
        executor: where.
        environment: the fingerprint of the machine.
        timeout: seconds for one model.
        on_progress: told what became of each model, a sentence each.
        target: ``module:function`` that a worker calls.

    Raises:
        HashbenchError: no model has a fingerprint.
    """
    models: list[ModelFingerprint] = []
    failures: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="hashbench-") as name, Interrupts() as interrupts:
        folder = Path(name)
        try:
            with interrupts.allowed():
                executor.start(target=target)
            for spec in specs:
                skipped = spec.skip_reason(options.mode, device=options.device)
                if skipped:
                    failures[spec.name] = skipped
                    continue
                executor.submit(_task(spec, replace(options, output=str(folder)), folder, timeout, target))
                with interrupts.allowed():
                    (result,) = executor.wait()
                made, problem = _made(result, folder)
                models += made
                failures |= {spec.name: problem} if problem else {}
                on_progress(f"[{len(models) + len(failures)}/{len(specs)}] {spec.name}: {problem or 'recorded'}")
        finally:
            executor.close()
    if not models:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in list(failures.items())[:3])
        raise HashbenchError("no model has a fingerprint", consequence=f"nothing was written ({reasons})")
    return Recording(Fingerprints(environment, tuple(models)), failures)


def _task(spec: ModelSpec, options: RunOptions, folder: Path, timeout: float, target: str) -> Task:
    key = file_key(suite=spec.suite, mode=options.mode, name=spec.name)
    return Task(
        key=key,
        spec=spec,
        options=options,
        target=target,
        row_path=str(folder / f"{key}.row"),
        log_path=str(folder / f"{key}.log"),
        timeout=timeout,
    )


def _made(result: TaskResult, folder: Path) -> tuple[tuple[ModelFingerprint, ...], str]:
    """What a worker left, or why it left nothing."""
    task = result.task
    path = document.path_in(folder, (task.spec.suite, task.spec.name, task.options.mode))
    if path.exists():
        return document.read(path).models, ""
    if result.timed_out:
        return (), f"no result after {task.timeout:g} s"
    try:
        return (), row_from_json(read_json(Path(task.row_path))).error or "no result"
    except (OSError, ValueError):
        words = last_words(Path(task.log_path))
        return (), " | ".join([result.lost or describe_end(result.exit_code), *words])[:300]
