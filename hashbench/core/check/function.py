"""Check a plain Python function in place of a model: run it several times from the reset state, compare, and diagnose.

It runs in its caller's gradient mode and, unless a deterministic level is requested, with its caller's torch settings.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch

from hashbench.core.check.pair import PairCheck, retried_with_warnings
from hashbench.core.check.row import row_of
from hashbench.core.check.subject import Subject
from hashbench.core.errors import HashbenchError
from hashbench.core.records import Failure, ModelSpec, Result, Row, RunOptions, TensorDigest, Trace
from hashbench.core.run import leaves, outputs
from hashbench.core.run.outcome import Given, Outcome, Run, add_result, failure_of
from hashbench.core.run.rng import GENERATORS, preserved_rng, random_states, reset_rng_state, states_differ
from hashbench.core.run.settings import claim_workspace, deterministic_settings, preserved, settings
from hashbench.core.run.workload import clone_inputs
from hashbench.core.trace.api import HashDebugTrace
from hashbench.core.trace.arguments import items_of, named_tensors
from hashbench.core.trace.callbacks import TraceCallback
from hashbench.core.trace.compiled import kept_eager
from hashbench.core.trace.tracer import choose

SUITE = "pytest"
_ALWAYS_RAISED = (KeyboardInterrupt, SystemExit, GeneratorExit)
"""Exceptions that end a diagnosis, too."""

QUICK_SECONDS = 0.05
"""A function whose first run takes less is quick; see ``quick_runs`` of :func:`check_function`."""

_CARRIES_STATE = (torch.Tensor, torch.nn.Module, torch.optim.Optimizer, np.ndarray, *GENERATORS)
_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """A function with its arguments by name, positional ones by their place (``0``).

    ``wholly``: everything among the arguments is copied for a run. Otherwise, as for fixtures of a test, only
    tensors, modules, optimizers, arrays and random generators are, also those in lists, tuples and dictionaries.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] | None = None
    wholly: bool = True

    @classmethod
    def of(
        cls, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], *, wholly: bool = True
    ) -> FunctionCall:
        """Return the call of a function with what ``functools.partial`` has bound among the arguments."""
        if isinstance(function, functools.partial):
            args, kwargs = (*function.args, *args), {**function.keywords, **kwargs}
            function = function.func
        return cls(function, tuple(args), kwargs, wholly)

    def named(self) -> dict[str, Any]:
        """Return the arguments by name, and the function itself if it is a module or a method of one."""
        owner = getattr(self.function, "__self__", None)
        module = self.function if isinstance(self.function, torch.nn.Module) else owner
        modules = {"<function>": module} if isinstance(module, torch.nn.Module) else {}
        return modules | {str(position): value for position, value in enumerate(self.args)} | dict(self.kwargs or {})

    def __call__(self) -> Any:
        return self.function(*self.args, **(self.kwargs or {}))


def fresh_copy(call: FunctionCall) -> FunctionCall:
    """Copy a call; arguments that shared memory or referred to each other still do.

    Raises:
        HashbenchError: an argument cannot be copied.
    """
    memo: dict[int, Any] = {}
    for _, tensor in named_tensors(call.named()):
        # torch copies leaves only, so that the gradient ends here, and none whose rows or columns are compressed
        if tensor.grad_fn is not None or tensor.layout in _COMPRESSED:
            memo[id(tensor)] = clone_inputs(tensor)
    copied = {name: _copy(value, memo, name, wholly=call.wholly) for name, value in call.named().items()}
    function = call.function
    if "<function>" in copied:
        function = _copy(function, memo, "the function", wholly=True)
    args = tuple(copied[str(index)] for index in range(len(call.args)))
    return FunctionCall(function, args, {name: copied[name] for name in call.kwargs or {}}, call.wholly)


def _copy(value: Any, memo: dict[int, Any], name: str, *, wholly: bool) -> Any:
    if wholly or isinstance(value, _CARRIES_STATE):
        try:
            return copy.deepcopy(value, memo)
        except Exception as error:
            kind = f"{type(value).__module__}.{type(value).__qualname__}"
            raise HashbenchError(
                f"cannot copy argument {name}, a {kind} ({type(error).__name__}: {error})",
                consequence="a second run would see what the first one changed in it",
                tip="Make it inside the function.",
            ) from error
    if type(value) in (list, tuple):
        return type(value)(_copy(item, memo, f"{name}.{index}", wholly=False) for index, item in enumerate(value))
    if type(value) is dict:
        return {key: _copy(item, memo, f"{name}.{key}", wholly=False) for key, item in value.items()}
    return value


def parts_of(call: FunctionCall) -> Iterator[tuple[str, Any]]:
    """Yield the modules and optimizers among the arguments, with their path (``0``, ``nets.1``)."""
    waiting = list(call.named().items())
    while waiting:
        name, value = waiting.pop(0)
        if isinstance(value, (torch.nn.Module, torch.optim.Optimizer)):
            yield name, value
        else:
            waiting = [(f"{name}.{key}", item) for key, item in items_of(value) or ()] + waiting


# ---------------------------------------------------------------------------------------------------- the check


def check_function(
    call: FunctionCall,
    name: str,
    options: RunOptions,
    *,
    every_op: bool = False,
    allow_empty: bool = False,
    quick_runs: int = 2,
    on_draw_in_eval: Callable[[], None] = lambda: None,
) -> tuple[Row, Any]:
    """Run a function ``options.runs`` times, compare the runs, and find out why they differ.

    Compared are what it returns, the gradients and final content of tensors passed to it, the gradients and state of
    modules and optimizers passed to it, and, with ``every_op`` or where it returns ``None``, what every op wrote.
    Settings, random state and the working directory of the caller are restored. An exception in one of the runs that
    are compared is raised as it is, with a note that says in which.

    Args:
        call: the function and its arguments, which are copied for every run.
        name: what the row calls it.
        options: ``runs``, ``seed``, ``replays``, ``diagnose_budget``, ``tracer``, ``output`` and ``device`` are used.
            An empty ``deterministic`` leaves torch's settings as they are.
        every_op: also compare what every op wrote.
        allow_empty: a function that returns nothing and runs no op passes.
        quick_runs: how often to run, if ``options.runs`` is ``None`` and the first run takes less than
            :data:`QUICK_SECONDS`.
        on_draw_in_eval: called if a run drew from a global generator of torch although a module among the arguments is
            in ``eval()``: two calls in a row differ, and runs from one reset state do not.

    Returns:
        The row, and what the first run returned.

    Raises:
        HashbenchError: nothing was there to compare, an argument or a result is of a kind that cannot be, or the tracer
            that is asked for cannot be used.
    """
    # Not to be written as JSON, so that no fresh process tries to build what only lives here.
    spec = ModelSpec(SUITE, name, arguments={"function": call.function})
    runs = FunctionRuns(call, options, every_op=every_op, allow_empty=allow_empty, quick_runs=quick_runs)
    subject = Subject(runs, spec, runs=lambda: runs.count, same_structure=True)
    row = row_of_check(spec, options, lambda level: PairCheck(subject, options, level).run())
    if runs.drew and _is_in_eval(call):
        on_draw_in_eval()
    return row, runs.first_value


def _is_in_eval(call: FunctionCall) -> bool:
    modules = [part for _, part in parts_of(call) if isinstance(part, torch.nn.Module)]
    return any(not module.training for module in modules)


def row_of_check(spec: ModelSpec, options: RunOptions, check: Callable[[str], Outcome]) -> Row:
    """Return the row of a check under the caller's settings, or those that its options request."""
    choose(options.tracer)
    started = perf_counter()
    claim_workspace(options.device)

    def outcome_of(level: str) -> Outcome:
        with requested_settings(options, level):
            return check(level)

    with preserved(), preserved_rng():
        outcome = retried_with_warnings(outcome_of, options.deterministic or settings()["deterministic_algorithms"])
    seconds = perf_counter() - started
    return row_of(spec, options, outcome, seconds=seconds, budget_flag="diagnose_budget")


def requested_settings(options: RunOptions, level: str) -> contextlib.AbstractContextManager[Any]:
    """Set the deterministic level if the options request one, else leave torch's settings as they are."""
    if not options.deterministic:
        return contextlib.nullcontext()
    return deterministic_settings(level, threads=options.threads)


def inputs_of(call: FunctionCall) -> Any:
    """Return the arguments as ``given`` of a subject maps them: by name, else positional ones and those by name."""
    return (call.args, dict(call.kwargs or {})) if call.args else dict(call.kwargs or {})


class FunctionRuns:
    """Runs of one function.

    ``first_value`` is the return value of the first compared run, ``drew`` whether any run left a global generator
    of torch in another state. ``count`` runs are made; that of a quick function is
    known after its first run.
    """

    def __init__(
        self, call: FunctionCall, options: RunOptions, *, every_op: bool, allow_empty: bool, quick_runs: int = 2
    ) -> None:
        self.call, self.options, self.every_op, self.allow_empty = call, options, every_op, allow_empty
        self.count = max(2, options.runs or 2)
        self._quick_count = self.count if options.runs else max(self.count, quick_runs)
        self.first_value: Any = None
        self.drew = False
        self._failed_op = ""

    def __call__(self, given: Given | None = None, *, number: int | None = None, **how: Any) -> Run | Failure:
        """Make a run. Output and exceptions of those that are not compared are hidden."""
        if number is not None:
            return self._compared(number, given, **how)
        with quiet():
            try:
                return self._run(given, **how)[0]
            except _ALWAYS_RAISED:
                raise
            except BaseException as error:
                return failure_of(error, op=self._failed_op)

    def _compared(self, number: int, given: Given | None, **how: Any) -> Run | Failure:
        began = perf_counter()
        try:
            run, value = self._run(given, **how)
            if number == 1 and value is None and not self.allow_empty:
                _require_ops(run)
        except leaves.NotComparableError as error:
            raise HashbenchError(
                f"cannot compare runs: {error}",
                consequence="nothing is known of whether they agree",
                tip="Return tensors, arrays, plain values, or lists, dicts and dataclasses of these.",
            ) from None
        except BaseException as error:
            failure = failure_of(error, op=self._failed_op)
            if failure.nondeterministic_op and self.options.deterministic == "on":
                return failure  # all is run again with warnings in place of refusals
            agreed = ", the runs before it did not raise" if number > 1 else ""
            error.add_note(f"(hashbench: raised in run {number} of {self.count}{agreed})")
            raise
        if number == 1:
            self.first_value = value
            if perf_counter() - began < QUICK_SECONDS:
                self.count = self._quick_count
        return run

    def collected_by(self, watcher: TraceCallback) -> None:
        """Make a run with ``watcher``; exceptions propagate."""
        with contextlib.suppress(leaves.NotComparableError):  # of what it returned, when all has run
            self._run(watcher=watcher)

    def _run(
        self,
        given: Given | None = None,
        *,
        traced: bool = True,
        diagnosing: bool = False,
        watcher: TraceCallback | None = None,
    ) -> tuple[Run, Any]:
        """Make one run from the reset state; return it with the function's return value."""
        with contextlib.chdir(Path.cwd()), preserved(), kept_eager() as compiled:
            call = fresh_copy(self.call)
            reset_rng_state(self.options.seed)
            if given is not None:
                call = _with_inputs(call, given(call.function, inputs_of(call)))
            trace = None
            if traced:
                trace = HashDebugTrace(
                    model=_modules_of(call),
                    inputs=dict(named_tensors(call.named())),
                    settings=settings,
                    hash_inputs=diagnosing,
                    source_lines=True,
                    watcher=watcher,
                    tracer=self.options.tracer,
                )
            before = random_states(None, outside_torch=False)
            with trace or contextlib.nullcontext():
                try:
                    value = call()
                finally:
                    self._failed_op = trace.failed_op if trace is not None else ""
            self.drew = self.drew or states_differ(before, random_states(None, outside_torch=False))
            results: dict[str, Any] = {}
            with torch.no_grad():
                for name, result in _results_of(value, call):
                    add_result(results, trace, name, result, copied=True)
        finished = None if trace is None else trace.finish()
        if finished is not None:
            added = list(_written_by_ops(finished)) if self.every_op or value is None else []
            if not (finished.records or finished.results):
                added = [Result("nothing", TensorDigest("None", (), (), "none"))]
            results.update({result.name: result.digest.value for result in added})
            finished = replace(finished, results=(*finished.results, *added))
        return Run(finished, results, compiled=tuple(compiled)), value


def _with_inputs(call: FunctionCall, inputs: Any) -> FunctionCall:
    args, kwargs = inputs if call.args else ((), inputs)
    return replace(call, args=tuple(args), kwargs=kwargs)


def _results_of(value: Any, call: FunctionCall) -> Iterator[tuple[str, Any]]:
    """Yield everything by which two runs are compared, with its name."""
    if value is not None:
        yield from leaves.flatten(value, "output")
    for name, tensor in named_tensors(call.named()):
        if tensor.is_leaf and tensor.grad is not None:
            yield f"input_grad.{name}", tensor.grad
        yield f"input.{name}", tensor
    for name, part in parts_of(call):
        if isinstance(part, torch.nn.Module):
            for kind, result in outputs.state_results(part, None):
                yield f"{kind.partition('.')[0]}.{name}.{kind.partition('.')[2]}", result
        elif state := part.state_dict()["state"]:
            yield from leaves.leaves(state, f"optimizer.{name}")


def _require_ops(run: Run) -> None:
    if run.trace is not None and not run.trace.records:
        raise HashbenchError(
            "nothing to compare",
            consequence="the function returned None and ran no op of torch in this thread",
            tip="Return what must be equal, or say allow_empty=True.",
        )


def _written_by_ops(trace: Trace) -> Iterator[Result]:
    """Yield one result for each record that wrote or returned something."""
    for record in trace.records:
        left = " ".join([*(digest.word() for digest in record.outputs), record.scalar])
        if left.strip():
            yield Result(f"what {record.id} left", TensorDigest("op", (), (), left), record.id)


def _modules_of(call: FunctionCall) -> torch.nn.Module | None:
    """Return the module among the arguments; several as children of one that is named as the function."""
    modules = {name: part for name, part in parts_of(call) if isinstance(part, torch.nn.Module)}
    if len(modules) <= 1:
        return next(iter(modules.values()), None)
    holder: torch.nn.Module = type(getattr(call.function, "__name__", "call"), (torch.nn.Module,), {})()
    for name, module in modules.items():
        holder.add_module(re.sub(r"\W", "_", name), module)
    return holder


def device_of(call: FunctionCall) -> str:
    """Return the type of the first device other than the CPU that holds an argument, else ``cpu``."""
    modules = [part for _, part in parts_of(call) if isinstance(part, torch.nn.Module)]
    tensors = [tensor for _, tensor in named_tensors(call.named())]
    tensors += [tensor for module in modules for tensor in module.parameters()]
    return next((tensor.device.type for tensor in tensors if tensor.device.type != "cpu"), "cpu")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress warnings and output, which the first runs have already printed."""
    unheard = io.StringIO()
    with contextlib.redirect_stdout(unheard), contextlib.redirect_stderr(unheard), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
