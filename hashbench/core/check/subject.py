"""``Subject``: what a check runs again and again. Models, functions and PyTorch's own harness differ in how one run is
made; everything after that is the same for all of them: a new kind is one function that returns a ``Subject``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hashbench.core.diagnose.fresh_process import DEFAULT_TARGET
from hashbench.core.records import ModelSpec
from hashbench.core.run.outcome import Run, RunMaker, outputs_of
from hashbench.core.run.workload import Tokens


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
