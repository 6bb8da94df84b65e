"""Run the harness's model as it compiles it, under other backends and in float64, to explain a ``fail_accuracy``.

Only what the harness's own pieces do is repeated: its cast, copy, optimizer, inputs, iterations and step, and its
``optimize_ctx``. What it prints of dynamo's counters afterwards is as it left them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from hashbench.core.catalog import Status
from hashbench.core.check.subject import Subject
from hashbench.core.records import Failure, RunOptions
from hashbench.core.run.outcome import Given, Outcome, Prepared, RunMaker, prepared_runs
from hashbench.extensions.compiled.accuracy import Tolerance
from hashbench.extensions.compiled.check import CompiledCheck
from hashbench.extensions.compiled.program import CompiledModel
from hashbench.integrations.dynamo.eager_runs import prepared_run, takes_step

_ELSEWHERE = ("export", "export_aot_inductor", "aot_precompile", "cpp_wrapper", "nothing")
"""Flags of the harness with which it does not call what ``optimize_ctx`` makes of its step."""
_COUNTED = (
    ("torch._dynamo.utils", ("counters", "compilation_time_metrics", "graph_break_reasons", "guard_failures")),
    ("torch.utils._stats", ("simple_call_counter",)),
)
"""What dynamo counts, by module: dicts and lists that the harness prints after its check."""
_NUMBERS = ("torch._dynamo.utils", ("op_count",))


def backend_of(args: Any) -> str:
    """Return the backend that the harness's flags choose; empty if it does not compile its step as it is."""
    if any(getattr(args, name, False) for name in _ELSEWHERE):
        return ""
    if getattr(args, "inductor", False):
        return "inductor"
    backend = getattr(args, "backend", None)
    return backend if isinstance(backend, str) else ""


@dataclass(frozen=True, slots=True)
class HarnessPieces:
    """What the harness makes a run with.

    Attributes:
        harness: its runner.
        names: the globals of its module.
        model: as it built it, and cast it.
        inputs: likewise.
        optimize_ctx: its compiler: takes a function, and returns it compiled.
        options: what its flags mean.
    """

    harness: Any
    names: Mapping[str, Any]
    model: Any
    inputs: Any
    optimize_ctx: Callable[..., Any]
    options: RunOptions

    def program(self, *, backend: Any = None, dtype: torch.dtype | None = None) -> RunMaker:
        """Return what runs it under a backend (``None``: eager mode) in a dtype (``None``: as the flags say)."""
        step = functools.cache(functools.partial(self._step, backend))

        def prepare(given: Given | None) -> Prepared:
            return prepared_run(self.harness, self.names, self.model, self.inputs, given, step=step(), dtype=dtype)

        return prepared_runs(prepare, self.options, compiled=backend is not None)

    def _step(self, backend: Any) -> Any:
        """Return the step, compiled; of harnesses before 2025 the whole ``run_n_iterations``."""
        if backend is None:
            return None
        own = isinstance(backend, str) and backend == self.options.backend
        compiler = self.optimize_ctx if own else functools.partial(torch.compile, backend=backend)
        return compiler(self.harness.model_iter_fn if takes_step(self.harness) else self.harness.run_n_iterations)


def explained(
    pieces: HarnessPieces,
    subject: Subject,
    outcome: Outcome,
    *,
    compared: Mapping[str, Any],
) -> tuple[Outcome, str]:
    """Compile the model again, and return ``outcome`` with what is wrong with it, and why nothing is known, or "".

    Args:
        pieces: what the harness makes a run with; its options name the backend.
        subject: of its eager runs.
        outcome: of the eager runs that it compared.
        compared: how it compared a compiled run, by the names of the arguments of ``same``.
    """
    status = outcome.accuracy
    eager = pieces.program()(traced=False)
    if isinstance(eager, Failure):
        return outcome, f"the eager run, repeated, failed: {eager.error}"
    root = type(pieces.model).__name__
    model = CompiledModel(pieces.program, lambda run: run.results, _tolerance(compared), root)
    check = CompiledCheck(model, subject, pieces.options, outcome.deterministic, harness_status=status)
    with preserved_counters():
        found = check.compared(replace(outcome, accuracy=Status.PASS), eager)
    if found.failure is not None:
        return replace(
            outcome, facts=found.facts, finding=found.finding
        ), f"compiled again, it failed: {found.failure.error}"
    return replace(found, accuracy=status), ""


def _tolerance(compared: Mapping[str, Any]) -> Tolerance:
    options = dict(compared)
    tolerance = options.pop("tol", 1e-4)
    return Tolerance(tolerance, options.pop("cos_similarity", False), options)


@contextlib.contextmanager
def preserved_counters() -> Iterator[None]:
    """Restore what dynamo has counted."""
    kept = [(value, _copy_of(value)) for value in _counted()]
    module = importlib.import_module(_NUMBERS[0])
    numbers = {name: getattr(module, name) for name in _NUMBERS[1] if hasattr(module, name)}
    try:
        yield
    finally:
        for value, before in kept:
            value.clear()
            value.update(before) if isinstance(value, MutableMapping) else value.extend(before)
        for name, number in numbers.items():
            setattr(module, name, number)


def _counted() -> Iterator[Any]:
    for name, attributes in _COUNTED:
        module = importlib.import_module(name)
        found = (getattr(module, attribute, None) for attribute in attributes)
        yield from (value for value in found if isinstance(value, (MutableMapping, list)))


def _copy_of(value: Any) -> Any:
    if isinstance(value, MutableMapping):
        return {key: each.copy() if hasattr(each, "copy") else each for key, each in value.items()}
    return list(value)
