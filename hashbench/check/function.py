"""A plain Python function in place of a model: run more than once from the reset state, compared, and diagnosed.

Everything but one run is :class:`~hashbench.check.model.BenchmarkRunner`'s. A function is run as it is: under the
gradient mode of its caller, on devices and in dtypes of its own choosing, and, unless a deterministic level is asked
for, under its caller's settings of torch.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hashbench.check.function_copy import FunctionCall, fresh_copy, parts_of
from hashbench.check.model import BenchmarkRunner
from hashbench.errors import HashbenchError
from hashbench.records import Failure, ModelSpec, Result, Row, RunOptions, TensorDigest, Trace
from hashbench.run import outputs
from hashbench.run.outcome import Outcome, Run, failure_of
from hashbench.run.outputs import Difference
from hashbench.run.settings import preserved, preserved_rng, reset_rng_state, settings
from hashbench.run.workload import Workload
from hashbench.trace.api import HashDebugTrace
from hashbench.trace.arguments import named_tensors
from hashbench.trace.callbacks import TraceCallback

SUITE = "pytest"
_NOT_EVEN_ONE = (KeyboardInterrupt, SystemExit, GeneratorExit)
"""What ends a diagnosis as well."""


class FunctionRunner(BenchmarkRunner):
    """Runs one function ``options.runs`` times and says whether, and if not why, the runs agree.

    Compared are what it returns, the gradients and final content of tensors passed to it, the gradients and state of
    modules and optimizers passed to it, and, with ``every_op`` or where it returns ``None``, what every op left.

    Args:
        call: the function and its arguments, which are copied for every run.
        options: ``runs``, ``seed``, ``replays``, ``diagnose_budget``, ``output`` and ``device`` are used. An empty
            ``deterministic`` leaves torch's settings as they are.
        every_op: also compare what every op left.
        allow_empty: a function that returns nothing and runs no op passes.
    """

    def __init__(
        self, call: FunctionCall, options: RunOptions, *, every_op: bool = False, allow_empty: bool = False
    ) -> None:
        super().__init__(options)
        self.call, self.every_op, self.allow_empty = call, every_op, allow_empty
        self.runs = max(2, options.runs or 2)
        self.first_value: Any = None
        self._made = 0
        self._failed_op = ""

    def examine(self, name: str) -> Row:
        """Run the function called ``name``, compare, find the cause; all of it in one row.

        Settings, random state and the working directory of the caller are restored. An exception in one of the runs
        that are compared is raised as it is, with a note that says in which.

        Raises:
            HashbenchError: nothing was there to compare, or an argument or a result is of a kind that cannot be.
        """
        started = time.perf_counter()
        # Not to be written as JSON, so that no fresh process tries to build what only lives here.
        spec = ModelSpec(SUITE, name, arguments={"function": self.call.function})
        workload = Workload(torch.nn.Identity(), inputs=())
        with preserved(), preserved_rng():
            level = self.options.deterministic
            if level:
                outcome = self.check_accuracy(workload, deterministic=level, spec=spec)
            else:
                outcome = self._check(workload, settings()["deterministic_algorithms"], "", self.runs)
                outcome = self._diagnose(workload, outcome, "", spec)
        return self._row(spec, outcome, workload.iterations, seconds=time.perf_counter() - started)

    def check_accuracy(self, *args: Any, **kwargs: Any) -> Outcome:
        """As the runner's; where torch refused an op and all is run again, these runs are the first ones again."""
        self._made = 0
        return super().check_accuracy(*args, **kwargs)

    def pick_grad(self) -> contextlib.AbstractContextManager[Any]:
        """As the caller has it."""
        return contextlib.nullcontext()

    def _compare(self, outcome: Outcome, first: Run, other: Run, number: int) -> Outcome:
        """Results of another structure are a difference here: the function is to do the same every time."""
        found = super()._compare(outcome, first, other, number)
        if found.accuracy != "results_not_comparable" or found.failure is None:
            return found
        what = f"their structure: {found.failure.error.rpartition('compared: ')[2]}"
        return replace(found, accuracy="eager_two_runs_differ", failure=None, difference=Difference((what,)))

    # ------------------------------------------------------------------------------------------------ one run

    def _attempt(
        self,
        workload: Workload,  # noqa: ARG002 – there is a function in its place
        optimizer: str,  # noqa: ARG002
        *,
        traced: bool = True,
        diagnosing: bool = False,
        watcher: TraceCallback | None = None,
    ) -> Run | Failure:
        self._made += 1
        if self._made <= self.runs:
            return self._compared_run()
        with _quiet():
            try:
                return self._run(traced=traced, diagnosing=diagnosing, watcher=watcher)[0]
            except _NOT_EVEN_ONE:
                raise
            except BaseException as error:
                return _failure_of(error, self._failed_op)

    def _compared_run(self) -> Run | Failure:
        """One of the runs that are compared: what it raises is for the caller to see."""
        number = self._made
        try:
            run, value = self._run(traced=True, diagnosing=False, watcher=None)
        except outputs.NotComparableError as error:
            raise HashbenchError(
                f"cannot compare runs: {error}",
                consequence="nothing is known of whether they agree",
                tip="Return tensors, arrays, plain values, or lists, dicts and dataclasses of these.",
            ) from None
        except BaseException as error:
            failure = _failure_of(error, self._failed_op)
            if failure.nondeterministic_op and self.options.deterministic == "on":
                return failure  # all is run again with warnings in place of refusals
            agreed = ", the runs before it did not raise" if number > 1 else ""
            error.add_note(f"(hashbench: raised in run {number} of {self.runs}{agreed})")
            raise
        if number == 1:
            self.first_value = value
        return run

    def _run(self, *, traced: bool, diagnosing: bool, watcher: TraceCallback | None) -> tuple[Run, Any]:
        """One run from the reset state, and what the function returned."""
        with _place_of_the_caller(), preserved(), torch.compiler.set_stance("force_eager"):
            call = fresh_copy(self.call)
            reset_rng_state(self.options.seed)
            trace = None
            if traced:
                trace = HashDebugTrace(
                    model=_modules_of(call),
                    inputs=dict(named_tensors(call.named())),
                    settings=settings,
                    hash_inputs=diagnosing,
                    source_lines=True,
                    watcher=watcher,
                )
            with trace if trace is not None else contextlib.nullcontext():
                try:
                    value = call()
                finally:
                    self._failed_op = trace.failed_op if trace is not None else ""
            found: dict[str, Any] = {}
            with torch.no_grad():
                for name, result in _results_of(value, call):
                    _note(found, trace, name, result)
        finished = None if trace is None else trace.finish()
        if finished is not None:
            finished = self._with_ops(finished, found, returned=value is not None)
        return Run(finished, found), value

    def _with_ops(self, trace: Trace, found: dict[str, Any], *, returned: bool) -> Trace:
        """The trace with what every op left among its results, where that is compared; ``found`` gets it too."""
        if not returned and not trace.records and not self.allow_empty and self._made == 1:
            raise HashbenchError(
                "nothing to compare",
                consequence="the function returned None and ran no op of torch in this thread",
                tip="Return what must be equal, or say allow_empty=True.",
            )
        added = list(_left_by_ops(trace)) if self.every_op or not returned else []
        if not (trace.records or trace.results or added):
            added = [Result("nothing", TensorDigest("None", (), (), "none"))]
        found.update({result.name: result.digest.value for result in added})
        return replace(trace, results=(*trace.results, *added))


# --------------------------------------------------------------------------------------------------- helpers


def _results_of(value: Any, call: FunctionCall) -> Iterator[tuple[str, Any]]:
    """Everything by which two runs are compared, with its name."""
    if value is not None:
        yield from outputs.flatten(value, "output")
    for name, tensor in named_tensors(call.named()):
        if tensor.is_leaf and tensor.grad is not None:
            yield f"input_grad.{name}", tensor.grad
        yield f"input.{name}", tensor
    for name, part in parts_of(call):
        if isinstance(part, torch.nn.Module):
            for kind, result in outputs.state_results(part, None):
                yield f"{kind.partition('.')[0]}.{name}.{kind.partition('.')[2]}", result
        elif state := part.state_dict()["state"]:
            yield from outputs.flatten(state, f"optimizer.{name}")


def _note(found: dict[str, Any], trace: HashDebugTrace | None, name: str, value: Any) -> None:
    """Keep a result and note its digest. Two of one name (the keys ``1`` and ``"1"`` of a dict) are both kept."""
    while name in found:
        name += "'"
    if trace is not None:
        trace.add_result(name, value)
    found[name] = value.detach().clone() if isinstance(value, torch.Tensor) else value


def _left_by_ops(trace: Trace) -> Iterator[Result]:
    """One result for each record that wrote or returned something."""
    for record in trace.records:
        left = " ".join([*(digest.word() for digest in record.outputs), record.scalar])
        if left.strip():
            yield Result(f"what {record.id} left", TensorDigest("op", (), (), left), record.id)


def _modules_of(call: FunctionCall) -> torch.nn.Module | None:
    """The one module among the arguments; several of them under one that is called as the function is."""
    modules = {name: part for name, part in parts_of(call) if isinstance(part, torch.nn.Module)}
    if len(modules) <= 1:
        return next(iter(modules.values()), None)
    holder: torch.nn.Module = type(getattr(call.function, "__name__", "call"), (torch.nn.Module,), {})()
    for name, module in modules.items():
        holder.add_module(re.sub(r"\W", "_", name), module)
    return holder


def _failure_of(error: BaseException, op: str) -> Failure:
    """An exception as a value; what skips or fails a test is no ``Exception``."""
    if isinstance(error, Exception):
        return failure_of(error, op=op)
    return Failure(f"{type(error).__name__}: {error}", op=op)


def device_of(call: FunctionCall) -> str:
    """The type of the first device that is not the CPU on which an argument lies; else ``cpu``."""
    modules = [part for _, part in parts_of(call) if isinstance(part, torch.nn.Module)]
    tensors = [tensor for _, tensor in named_tensors(call.named())]
    tensors += [tensor for module in modules for tensor in module.parameters()]
    return next((tensor.device.type for tensor in tensors if tensor.device.type != "cpu"), "cpu")


@contextlib.contextmanager
def _place_of_the_caller() -> Iterator[None]:
    """Put the working directory back on leaving."""
    place = Path.cwd()
    try:
        yield
    finally:
        os.chdir(place)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """What the function says in its runs that are compared is enough."""
    unheard = io.StringIO()
    with contextlib.redirect_stdout(unheard), contextlib.redirect_stderr(unheard), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
