"""One run from the reset state: what is in force while it lasts, and what it leaves."""

from __future__ import annotations

import contextlib
import logging
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hashbench.devices import memory
from hashbench.records import Failure, RunOptions, Trace
from hashbench.run import outputs
from hashbench.run.outcome import Attempt, Run, failure_of
from hashbench.run.rng import reset_rng_state
from hashbench.run.settings import preserved, settings
from hashbench.trace.api import HashDebugTrace
from hashbench.trace.callbacks import TraceCallback

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A copy of a model and of its inputs that one run may change, and ``execute``, which runs them, under a trace or
    none, and returns the results by name."""

    model: torch.nn.Module
    inputs: Any
    execute: Callable[[HashDebugTrace | None], dict[str, Any]]


def attempt(
    prepare: Callable[[], Prepared],
    options: RunOptions,
    *,
    traced: bool = True,
    diagnosing: bool = False,
    watcher: TraceCallback | None = None,
) -> Run | Failure:
    """One run of what ``prepare`` makes inside the reset state, or why it failed. Its memory is free again."""
    try:
        return _attempt(prepare, options, traced=traced, diagnosing=diagnosing, watcher=watcher)
    finally:
        memory.release(torch.device(options.device))  # the frame that held the copy of the model is gone


def traces_of(attempt: Attempt, *, runs: int) -> list[Trace | Failure]:
    """The traces of so many runs, or why they failed: what a fresh process does for an experiment."""
    made = (attempt() for _ in range(runs))
    traces = [run if isinstance(run, Failure) else run.trace for run in made]
    return [trace for trace in traces if trace is not None]


def _attempt(
    prepare: Callable[[], Prepared],
    options: RunOptions,
    *,
    traced: bool,
    diagnosing: bool,
    watcher: TraceCallback | None,
) -> Run | Failure:
    trace: HashDebugTrace | None = None
    try:
        with _reset_state(options.seed):
            before = settings()
            prepared = prepare()
            if traced:
                trace = HashDebugTrace(
                    model=prepared.model,
                    inputs=prepared.inputs,
                    settings=settings,
                    hash_inputs=diagnosing or options.hash_inputs,
                    source_lines=diagnosing,
                    watcher=watcher,
                )
            results = prepared.execute(trace)
            changed = tuple(_changes(before, settings()))
        return Run(None if trace is None else trace.finish(), results, changed)
    except outputs.NotComparableError as error:
        return Failure(f"the results cannot be compared: {error}", op="results")
    except Exception as error:
        log_error("a run failed")
        return failure_of(error, op=trace.failed_op if trace is not None else "")


@contextlib.contextmanager
def _reset_state(seed: int) -> Iterator[None]:
    """The state that every run begins in; what the run changes of torch's settings is put back."""
    with preserved(), torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reset_rng_state(seed)
        yield


def _changes(before: Mapping[str, str], after: Mapping[str, str]) -> Iterable[str]:
    names = sorted({*before, *after})
    return (f"{name}: {before.get(name)} to {after.get(name)}" for name in names if before.get(name) != after.get(name))


def add_result(results: dict[str, Any], trace: HashDebugTrace | None, name: str, value: Any, *, copied: bool) -> None:
    """Add a result to those of a run, and note its digest at this moment. ``copied``: a later step may change it.

    Two results of one name (the keys ``1`` and ``"1"`` of a dict) are both kept.
    """
    while name in results:
        name += "'"
    if trace is not None:
        trace.add_result(name, value)
    if isinstance(value, torch.Tensor):
        value = value.detach().clone() if copied else value.detach()
    results[name] = value


def log_error(what: str) -> None:
    """Log the exception that is handled just now, as text: a handler that keeps records would keep its traceback, and
    with that every tensor of the run that failed."""
    log.error("%s\n%s", what, traceback.format_exc().rstrip())
