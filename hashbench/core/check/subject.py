"""``Subject``: what a check runs again and again. Models, functions and PyTorch's own harness differ in how one run is
made; everything after that is the same for all of them: a new kind is one function that returns a ``Subject``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from hashbench.core.diagnose.fresh_process import DEFAULT_TARGET
from hashbench.core.records import Failure, ModelSpec, RunOptions
from hashbench.core.run.outcome import Prepared, Run, attempt, outputs_of
from hashbench.core.run.workload import Tokens
from hashbench.core.trace.callbacks import TraceCallback

Given = Callable[[Callable[..., Any], Any], Any]
"""Maps a run's copies of the model and of the example inputs to the inputs of the run."""


class RunMaker(Protocol):
    """Makes one run from the reset state."""

    def __call__(
        self,
        given: Given | None = None,
        *,
        number: int | None = None,
        traced: bool = True,
        diagnosing: bool = False,
        watcher: TraceCallback | None = None,
    ) -> Run | Failure:
        """Make one run.

        Args:
            given: makes the inputs of this run; ``None``: the example inputs.
            number: from 1, of a run whose results are compared; ``None``: a run of an experiment. A function raises its
                own exceptions in the former.
            traced: record it.
            diagnosing: hash every input before each call.
            watcher: called around every call.
        """
        ...


def prepared_runs(prepare: Callable[[Given | None], Prepared], options: RunOptions) -> RunMaker:
    """Return the maker of runs of a model, whose copies ``prepare`` makes; exceptions of a run are values."""

    def run(given: Given | None = None, *, number: int | None = None, **how: Any) -> Run | Failure:  # noqa: ARG001
        return attempt(functools.partial(prepare, given), options, **how)

    return run


@dataclass(frozen=True, slots=True)
class Subject:
    """A model or function as a check sees it.

    Attributes:
        attempt: makes a run.
        spec: names it; a fresh process builds it again from ``spec`` and ``target``
            (:func:`~hashbench.core.diagnose.fresh_process.fresh_traces`). ``None``: no draft is kept, no process builds
            it.
        target: see ``spec``.
        runs: returns the number of compared runs; called again when the first has ended.
        compiled: the runs are those of one compilation, which no other process and no other setting shares.
        iterations: of one run, for the row.
        same_structure: results of another structure are a difference, not results that cannot be compared.
        model: called with ``inputs``; its parameters show how tokens are passed.
        inputs: example inputs, as ``given`` maps them.
        batch: items among them; ``None`` if unknown.
        tokens: the names of token arguments; ``None``: those of transformers.
        outputs: returns by name what the same items or tokens are compared by.
    """

    attempt: RunMaker
    spec: ModelSpec | None = None
    target: str = DEFAULT_TARGET
    runs: Callable[[], int] = lambda: 2
    compiled: bool = False
    iterations: int | None = None
    same_structure: bool = False
    model: Callable[..., Any] | None = None
    inputs: Any = None
    batch: int | None = None
    tokens: Tokens | None = None
    outputs: Callable[[Run], Mapping[str, Any]] = outputs_of
