"""The harness's two eager runs, watched from inside its ``check_accuracy``.

Every version of the harness resets the random state before eager run 1, before eager run 2, and before it compiles:
counting these calls tells the phases. From the first to the third, and no longer, ``run_n_iterations`` is an attribute
of the runner *instance* that puts a trace around the real one, so that nothing of ours is there when Dynamo looks.
``same`` is listened to: whether it said no, or raised, is what the harness's one word ``eager_two_runs_differ`` hides.

Nothing of ours may raise in here, since the harness takes any exception for the model's. A traced run that fails is
made again without a trace, and only if that fails too has the model failed. Digests are kept, never tensors.
"""

from __future__ import annotations

import gc
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch.utils._python_dispatch import _disable_current_modes

from hashbench.integrations.dynamo.session import tell
from hashbench.records import Failure
from hashbench.run import outputs
from hashbench.run.outcome import Run, failure_of
from hashbench.run.settings import settings
from hashbench.trace.api import HashDebugTrace

log = logging.getLogger(__name__)

_RESET, _COMPARE, _RUN = "reset_rng_state", "same", "run_n_iterations"
COMPILING = 3
"""The phase in which the harness compiles: the third reset of the random state."""


class EagerRuns:
    """What is seen of one ``check_accuracy``.

    Args:
        harness: the harness's runner.
        names: the globals of its module, in which two functions are replaced while this watches.
        model, inputs: as the harness has them; only used to make a run again that failed under the trace.
        traced: put a trace around the two runs; otherwise only listen to their comparison.

    Attributes:
        phase: how many resets were seen: 0 nothing ran, 1 and 2 the eager runs, 3 compiling.
        runs: the traced runs that succeeded, without their tensors.
        answer: what ``same`` said of the two runs; ``None`` where it was not asked or raised.
        compare_error: what ``same`` raised; empty where it did not.
        found: results of both runs by name, for as long as they are compared; see ``on_compared``.
        failure: the exception of the model that ended an eager run.
        problems: faults of ours.
    """

    def __init__(self, harness: Any, names: MutableMapping[str, Any], *, model: Any, inputs: Any, traced: bool) -> None:
        self.harness, self.names, self.model, self.inputs, self.traced = harness, names, model, inputs, traced
        self.phase = 0
        self.runs: list[Run] = []
        self.answer: bool | None = None
        self.compare_error = ""
        self.failure: Failure | None = None
        self.problems: list[str] = []
        self.on_compared: Callable[[Mapping[str, Any], Mapping[str, Any]], None] = lambda *_: None
        self._compared = False
        self._real = {name: names[name] for name in (_RESET, _COMPARE)}

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch until the end of the context; everything is then as it was."""
        self.names.update({_RESET: self._reset, _COMPARE: self._same})
        try:
            yield
        finally:
            self.names.update(self._real)
            self._stop_tracing()

    # ------------------------------------------------------------------------------------- in the harness's place

    def _reset(self, *arguments: Any, **named: Any) -> Any:
        self.phase += 1
        if self.phase == 1 and self.traced:
            vars(self.harness)[_RUN] = self._run_n_iterations
        if self.phase == COMPILING:
            self._stop_tracing()
        return self._real[_RESET](*arguments, **named)

    def _stop_tracing(self) -> None:
        vars(self.harness).pop(_RUN, None)

    def _same(self, *arguments: Any, **named: Any) -> Any:
        if self.phase != COMPILING - 1 or self._compared:
            return self._real[_COMPARE](*arguments, **named)
        self._compared = True
        self._stop_tracing()
        try:
            answer = self._real[_COMPARE](*arguments, **named)
        except Exception as error:
            self.compare_error = f"{type(error).__name__}: {error}"
            raise
        self.answer = bool(answer)
        self._guarded(lambda: self._tell_compared(arguments))
        return answer

    def _run_n_iterations(self, mod: Any, inputs: Any, *rest: Any, **named: Any) -> Any:
        real = getattr(type(self.harness), _RUN).__get__(self.harness)
        trace = self._guarded(lambda: HashDebugTrace(model=mod, inputs=inputs, settings=settings))
        if trace is None:
            return real(mod, inputs, *rest, **named)
        try:
            with trace:
                found = real(mod, inputs, *counting(rest, trace), **named)
        except Exception as error:
            failure = failure_of(error, op=trace.failed_op)
        else:
            self._guarded(lambda: self._keep(trace, found))
            return found
        return self._run_again(failure, real, rest, named)

    def _run_again(self, failure: Failure, real: Callable[..., Any], rest: Any, named: Any) -> Any:
        """The run that failed under the trace once more without one, from the same state."""
        gc.collect()
        self._real[_RESET]()
        model, inputs = self.harness.maybe_cast(self.model, self.inputs)
        copy = self.harness.deepcopy_and_maybe_parallelize(model)
        self.harness.init_optimizer(*optimizer_arguments(self.names, copy))
        try:
            found = real(copy, self.names["clone_inputs"](inputs), *rest, **named)
        except Exception as error:
            self.failure = failure_of(error, op=failure.op)
            raise
        self._problem(f"the run failed only under the trace: {failure.error}")
        return found

    # ------------------------------------------------------------------------------------------------ what is kept

    def _keep(self, trace: HashDebugTrace, found: Any) -> None:
        try:
            for name, value in named_results(found).items():
                trace.add_result(name, value)
        except outputs.NotComparableError as error:
            log.info("results are not noted: %s", error)
        finished = trace.finish()
        self.runs.append(Run(finished, {result.name: result.digest.word() for result in finished.results}))

    def _tell_compared(self, arguments: Sequence[Any]) -> None:
        one, two = (named_results(found) for found in arguments[:2])
        self.on_compared(one, two)

    def _guarded(self, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except Exception as error:
            log.exception("watching the harness failed")
            self._problem(f"{type(error).__name__}: {error}")
            return None

    def _problem(self, text: str) -> None:
        self.problems.append(text)
        tell(text)


def optimizer_arguments(names: Mapping[str, Any], model: Any) -> tuple[Any, ...]:
    """What the harness gives its ``init_optimizer``."""
    return names.get("current_name"), names.get("current_device"), model.parameters()


def counting(rest: Sequence[Any], trace: HashDebugTrace | None) -> tuple[Any, ...]:
    """The further arguments of ``run_n_iterations``: the function that makes one iteration, which tells the trace which
    one it is. Harnesses before 2025 take it from the runner, and have only one iteration as far as the trace knows."""
    if trace is None or not rest or not callable(rest[0]):
        return tuple(rest)
    step, number = rest[0], iter(range(2**31))

    def iteration(*arguments: Any, **named: Any) -> Any:
        trace.iteration = next(number)
        trace.mark(f"iteration {trace.iteration}")
        return step(*arguments, **named)

    return (iteration, *rest[1:])


def step_of(harness: Any) -> tuple[Any, ...]:
    """What this version's ``run_n_iterations`` takes beside a model and inputs."""
    takes = inspect.signature(getattr(type(harness), _RUN)).parameters
    return (harness.model_iter_fn,) if len(takes) > COMPILING else ()


def named_results(found: Any) -> dict[str, Any]:
    """What ``run_n_iterations`` returned, flat and by name.

    Raises:
        NotComparableError: there is a value of a type that nobody knows how to compare.
    """
    with _disable_current_modes():
        return dict(outputs.flatten(found, "result"))
