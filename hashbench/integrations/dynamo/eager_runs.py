"""Recognise and watch the harness's two eager runs of one model.

An eager run is a call of ``run_n_iterations`` with the harness's own ``model_iter_fn`` on a model that is not the
reference in 64 bits; the pair are the arguments of the first ``same`` after it. A pair that is not recognised is not
judged. ``run_n_iterations`` is an attribute of the runner *instance* until the pair is complete, so that nothing of
ours is there when Dynamo looks. Our code must not raise meanwhile: the harness takes any exception for the model's.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import itertools
import logging
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

import hashbench
from hashbench.core.records import Failure
from hashbench.core.run import leaves
from hashbench.core.run.outcome import Given, Prepared, Run, add_result, failure_of
from hashbench.core.run.settings import settings
from hashbench.core.run.workload import cast_inputs, cast_module
from hashbench.core.trace.api import HashDebugTrace
from hashbench.core.trace.digest import unobserved
from hashbench.integrations.dynamo.session import CANNOT_FOLLOW, tell

log = logging.getLogger(__name__)

_COMPARE, _RUN = "same", "run_n_iterations"
_PACKAGE, _TORCH = (str(Path(str(module.__file__)).parent) for module in (hashbench, torch))


@dataclass(frozen=True, slots=True)
class EagerRun:
    """One eager run that succeeded.

    Attributes:
        run: its trace and results; ``None`` if not traced.
        seconds: its duration.
        returned: weak references to the tensors it returned, else the ``id`` of the value.
    """

    run: Run | None
    seconds: float
    returned: tuple[Any, ...]

    def is_of(self, value: Any) -> bool:
        """Return True if this run returned ``value``."""
        found = _references(value)
        return len(found) == len(self.returned) and all(map(_is_same, self.returned, found))


class EagerRuns:
    """Observer of one ``check_accuracy``. Keeps digests, never tensors.

    Args:
        harness: the harness's runner.
        names: the globals of its module, in which ``same`` is replaced while this watches.
        model: as the harness has it, to rerun what our trace has ended.
        inputs: likewise.
        tracer: of the traces around the runs; empty: no traces, the runs are only recognised.

    Attributes:
        runs: the eager runs that succeeded.
        pair: the two that ``same`` compared.
        failure: the exception that ended one.
        answer: what ``same`` returned for the pair; ``None`` if it was not called or raised.
        compare_error: what it raised.
        strange: whether the first call of ``same`` had other arguments than the pair.
        compared_compiled: the numbers that ``same`` was last given with another pair, that of an eager and a compiled
            run, by the names of its arguments; ``None`` if there was no other pair.
        problems: faults of ours.
    """

    def __init__(self, harness: Any, names: MutableMapping[str, Any], *, model: Any, inputs: Any, tracer: str) -> None:
        self.harness, self.names, self.model, self.inputs, self.tracer = harness, names, model, inputs, tracer
        self.runs: list[EagerRun] = []
        self.pair: tuple[EagerRun, EagerRun] | None = None
        self.answer: bool | None = None
        self.compare_error = ""
        self.strange = False
        self.compared_compiled: Mapping[str, Any] | None = None
        self.failure: Failure | None = None
        self.problems: list[str] = []
        self.on_compared: Callable[[Mapping[str, Any], Mapping[str, Any]], None] = lambda *_: None
        self._real_same = names[_COMPARE]

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch until the end of the context, then restore everything."""
        self.names[_COMPARE] = self._same
        vars(self.harness)[_RUN] = self._run_n_iterations
        try:
            yield
        finally:
            self.names[_COMPARE] = self._real_same
            self._stop()

    # ------------------------------------------------------------------------------------- in the harness's place

    def _stop(self) -> None:
        vars(self.harness).pop(_RUN, None)

    def _same(self, *arguments: Any, **named: Any) -> Any:
        if self.pair is None and not self.strange:
            self._stop()
            self.pair = self._guarded(lambda: self._pair_of(*arguments[:2]))
            self.strange = self.pair is None
            if self.pair is not None:
                return self._compare(arguments, named)
        elif self.pair is not None:
            self.compared_compiled = {name: value for name, value in named.items() if _is_plain(value)}
        return self._real_same(*arguments, **named)

    def _pair_of(self, first: Any = None, second: Any = None) -> tuple[EagerRun, EagerRun] | None:
        pairs = ((a, b) for a, b in itertools.pairwise(self.runs) if a.is_of(first) and b.is_of(second))
        return next(pairs, None)

    def _compare(self, arguments: Sequence[Any], named: Mapping[str, Any]) -> Any:
        try:
            answer = self._real_same(*arguments, **named)
        except Exception as error:
            self.compare_error = f"{type(error).__name__}: {error}"
            raise
        self.answer = bool(answer)
        self._guarded(lambda: self.on_compared(*map(named_results, arguments[:2])))
        return answer

    def _run_n_iterations(self, mod: Any, inputs: Any, *rest: Any, **named: Any) -> Any:
        real = getattr(type(self.harness), _RUN).__get__(self.harness)
        steps = [value for value in (*rest, *named.values()) if callable(value)]
        if steps and self.harness.model_iter_fn not in steps:  # it is compiled
            self._stop()
        elif not self._guarded(lambda: self._is_reference(mod, inputs)):
            return self._eager_run(real, mod, inputs, rest, named)
        return real(mod, inputs, *rest, **named)

    def _is_reference(self, mod: Any, inputs: Any) -> bool:
        """Return True if model and inputs were cast to 64 bits and are not so by themselves."""
        wide = {torch.float64, torch.complex128}
        return _dtypes(mod, inputs) <= wide and not _dtypes(self.model, self.inputs) <= wide

    def _eager_run(self, real: Callable[..., Any], mod: Any, inputs: Any, rest: Any, named: Any) -> Any:
        trace = self._trace(mod, inputs)
        began = time.perf_counter()
        try:
            returned = _under(trace, real, mod, inputs, rest, named)
        except Exception as error:
            self.failure = failure_of(error, op="" if trace is None else trace.failed_op)
            without = None
            if trace is not None:
                without = self._guarded(functools.partial(self._without_trace, error, trace, real, rest, named))
            if without is None:
                raise
            self.problem(f"the run failed only under the trace: {self.failure.error}")
            (returned,), trace, self.failure = without, None, None
        self._guarded(lambda: self._keep(trace, returned, time.perf_counter() - began))
        if not (rest or named) and len(self.runs) > 1:  # before 2025: run_n_iterations itself is compiled next
            self._stop()
        return returned

    # ------------------------------------------------------------------------------------- a run that failed

    def _without_trace(
        self, error: Exception, trace: HashDebugTrace, real: Any, rest: Any, named: Any
    ) -> tuple[Any] | None:
        """Return the result of an untraced rerun if the run failed because of our trace, else ``None``.

        It failed because of the trace if our code raised, or an op raises again in a second traced run and not without
        a trace.
        """
        if not trace.failed_op and not _raised_here(error):
            return None
        if trace.failed_op and (failure_of(error).nondeterministic_op or self._succeeds_traced(real, rest, named)):
            return None
        try:
            return (self._again(real, rest, named, traced=False),)
        except Exception as again:
            log.debug("the run fails without a trace, too: %s", again)
            return None

    def _succeeds_traced(self, real: Any, rest: Any, named: Any) -> bool:
        try:
            self._again(real, rest, named, traced=True)
        except Exception as again:
            log.debug("the run failed again: %s", again)
            return False
        return True

    def _again(self, real: Callable[..., Any], rest: Any, named: Any, *, traced: bool) -> Any:
        """Rerun from the same state."""
        gc.collect()
        self.names["reset_rng_state"]()
        model, inputs = self.harness.maybe_cast(self.model, self.inputs)
        copy = self.harness.deepcopy_and_maybe_parallelize(model)
        self.harness.init_optimizer(*optimizer_arguments(self.names, copy))
        cloned = self.names["clone_inputs"](inputs)
        return _under(self._trace(copy, cloned) if traced else None, real, copy, cloned, rest, named)

    # ------------------------------------------------------------------------------------------------ what is kept

    def _trace(self, mod: Any, inputs: Any) -> HashDebugTrace | None:
        if not self.tracer:
            return None
        trace: HashDebugTrace | None = self._guarded(
            lambda: HashDebugTrace(model=mod, inputs=inputs, settings=settings, tracer=self.tracer)
        )
        return trace

    def _keep(self, trace: HashDebugTrace | None, returned: Any, seconds: float) -> None:
        run = None
        try:
            if trace is not None:
                run = self._noted(trace, returned)
        finally:
            self.runs.append(EagerRun(run, seconds, _references(returned)))

    def _noted(self, trace: HashDebugTrace, returned: Any) -> Run:
        results = named_results(returned)
        for name, value in results.items():
            trace.add_result(name, value)
        finished = trace.finish()
        words = {result.name: result.digest.word() for result in finished.results}
        apart = {name: value for name, value in results.items() if isinstance(value, leaves.LeftOut)}
        return Run(finished, words | apart)

    def _guarded(self, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except Exception as error:
            log.debug("watching the harness failed", exc_info=True)
            self.problem(f"{type(error).__name__}: {error}")
            return None

    def problem(self, text: str) -> None:
        """Print a fault of ours and keep it for the row."""
        self.problems.append(text)
        tell(text)


def _is_plain(value: Any) -> bool:
    return isinstance(value, (bool, int, float))


def _references(value: Any) -> tuple[Any, ...]:
    """Return weak references to the tensors in a returned value; else the ``id`` of the value."""
    with unobserved():
        tensors = [weakref.ref(leaf) for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return tuple(tensors) or (id(value),)


def _is_same(first: Any, other: Any) -> bool:
    if isinstance(first, weakref.ref) and isinstance(other, weakref.ref):
        return first() is not None and first() is other()
    return bool(first == other)


def _dtypes(model: Any, inputs: Any) -> set[torch.dtype]:
    """Return the floating-point dtypes of parameters, buffers and inputs."""
    tensors = [*model.parameters(), *model.buffers(), *tree_leaves(inputs)]
    return {tensor.dtype for tensor in tensors if isinstance(tensor, torch.Tensor) and _is_floating(tensor)}


def _is_floating(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _raised_here(error: Exception) -> bool:
    """Return True if an exception was raised by our code, or by torch called from it."""
    frames = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    last = next((name for name in reversed(frames) if not name.startswith(_TORCH)), "")
    return last.startswith(_PACKAGE) and last != __file__


def _under(trace: HashDebugTrace | None, real: Callable[..., Any], mod: Any, inputs: Any, rest: Any, named: Any) -> Any:
    """Call ``run_n_iterations`` under a trace, or untraced."""
    if trace is None:
        return real(mod, inputs, *rest, **named)
    counted = [_counting(value, trace) for value in rest]
    with trace:
        return real(mod, inputs, *counted, **{name: _counting(value, trace) for name, value in named.items()})


def _counting(step: Any, trace: HashDebugTrace) -> Any:
    """Wrap the function of one iteration so that the trace counts iterations; other values pass through.

    Harnesses before 2025 take the function from the runner; the trace then sees one iteration.
    """
    if not callable(step):
        return step
    number = itertools.count()

    def iteration(*arguments: Any, **named: Any) -> Any:
        trace.iteration = next(number)
        trace.mark(f"iteration {trace.iteration}")
        return step(*arguments, **named)

    return iteration


# ------------------------------------------------------------------------------------ how the harness makes a run


def optimizer_arguments(names: Mapping[str, Any], model: Any) -> tuple[Any, ...]:
    """Return the arguments of the harness's ``init_optimizer``."""
    return names.get("current_name"), names.get("current_device"), model.parameters()


def prepared_run(
    harness: Any,
    names: Mapping[str, Any],
    model: Any,
    inputs: Any,
    given: Given | None = None,
    *,
    step: Any = None,
    optimizer: bool = True,
    dtype: torch.dtype | None = None,
) -> Prepared:
    """Prepare one run of the harness's model, exactly as the harness makes one, within its settings.

    Args:
        harness: the harness's runner.
        names: the globals of its module.
        model: cast as the harness casts it.
        inputs: likewise.
        given: maps the inputs of this run.
        step: one iteration; of harnesses before 2025 all of them; ``None``: the harness's own step.
        optimizer: the run has an optimizer; else it is in ``eval`` mode.
        dtype: of model and inputs; ``None``: as they are.
    """
    copied = harness.deepcopy_and_maybe_parallelize(model)
    if dtype is not None:
        copied, inputs = _cast(names, copied, names["clone_inputs"](inputs), dtype)
    if optimizer:
        harness.init_optimizer(*optimizer_arguments(names, copied))
    else:
        copied.eval()
    cloned = names["clone_inputs"](inputs)
    if given is not None:
        cloned = given(copied, cloned)
    return Prepared(copied, cloned, functools.partial(_executed, harness, copied, cloned, step))


def _cast(names: Mapping[str, Any], model: Any, inputs: Any, dtype: torch.dtype) -> tuple[Any, Any]:
    cast = names.get("cast_to_fp64")
    if cast is not None and dtype == torch.float64:
        model, inputs = cast(model, inputs)
        return model, inputs
    return cast_module(model, dtype), cast_inputs(inputs, dtype)


def _executed(harness: Any, model: Any, inputs: Any, step: Any, trace: HashDebugTrace | None) -> dict[str, Any]:
    """Run the harness's iterations; return the results of the last one, which alone are compared."""
    if step is None or takes_step(harness):
        returned = run_once(harness, model, inputs, trace, step=step)
    else:
        with trace or contextlib.nullcontext():
            returned = step(model, inputs)
    results: dict[str, Any] = {}
    for name, value in named_results(returned).items():
        add_result(results, trace, name, value, copied=False)
    return results


def run_once(harness: Any, model: Any, inputs: Any, trace: HashDebugTrace | None, *, step: Any = None) -> Any:
    """Call the harness's ``run_n_iterations`` for ``step``, by default its own."""
    positional, named = _step_arguments(harness, harness.model_iter_fn if step is None else step)
    return _under(trace, getattr(type(harness), _RUN).__get__(harness), model, inputs, positional, named)


def _step_arguments(harness: Any, step: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return what this version's ``run_n_iterations`` takes beside a model and inputs, positional and by name."""
    parameters = list(inspect.signature(getattr(type(harness), _RUN).__get__(harness)).parameters.values())[2:]
    needed = [parameter for parameter in parameters if parameter.default is parameter.empty]
    named = {each.name: step for each in needed if each.kind is each.KEYWORD_ONLY}
    positional = (each for each in needed if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD))
    return tuple(step for _ in positional), named


def takes_step(harness: Any) -> bool:
    """Return whether ``run_n_iterations`` is given the function of one iteration; harnesses before 2025 take it from
    the runner."""
    positional, named = _step_arguments(harness, None)
    return bool(positional or named)


def unsupported_reason(harness: Any, names: Mapping[str, Any]) -> str:
    """Return why this harness version is unsupported, or ""."""
    for name, count in _TAKES.items():
        function = names.get(name) or getattr(harness, name, None)
        try:
            inspect.signature(function).bind(*range(count))  # type: ignore[arg-type]
        except (TypeError, ValueError) as error:
            return f"{CANNOT_FOLLOW}: {name}: {error}"
    positional, named = _step_arguments(harness, harness.model_iter_fn)
    further = len(positional) + len(named)
    return f"{CANNOT_FOLLOW}: {_RUN} takes {further} things beside a model and its inputs" if further > 1 else ""


_TAKES = {
    **{"maybe_cast": 2, "pick_grad": 2, "init_optimizer": 3, "deepcopy_and_maybe_parallelize": 1},
    **{"clone_inputs": 1, "reset_rng_state": 0, _COMPARE: 2},
}
"""Number of arguments passed to each function of the harness."""


def named_results(returned: Any) -> dict[str, Any]:
    """Flatten the return value of ``run_n_iterations`` by name; values that cannot be compared become a ``LeftOut``."""
    with unobserved():
        return dict(leaves.leaves(returned, "result"))
