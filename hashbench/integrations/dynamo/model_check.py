"""One model that the harness runs: its two eager runs are watched, and our row says what became of them and why.

Every version of the harness resets the random state before eager run 1, before eager run 2, and before it compiles:
counting these calls tells the phases. Between the first and the third alone, ``run_n_iterations`` is an attribute of
the runner *instance* that puts a trace around the real one, so that nothing of ours is there when Dynamo looks. Nothing
of ours may raise meanwhile, since the harness takes any exception for the model's. What follows the harness's own row
is as in ``hashbench sweep``; only a run is made as the harness makes one.
"""

from __future__ import annotations

import functools
import gc
import inspect
import logging
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import psutil
import torch
from torch.utils._python_dispatch import _disable_current_modes

from hashbench.catalog import Status
from hashbench.check.pair import PairCheck, compared, row_of
from hashbench.integrations.dynamo.session import Session, amend_note, tell
from hashbench.records import DTYPES, Failure, ModelSpec, RunCounts, RunOptions
from hashbench.results.folder import file_key
from hashbench.run import leaves, outputs
from hashbench.run.outcome import Attempt, Outcome, Prepared, Run, add_result, attempt, failure_of
from hashbench.run.settings import claim_workspace, settings
from hashbench.trace.api import HashDebugTrace

log = logging.getLogger(__name__)

_RESET, _COMPARE, _RUN = "reset_rng_state", "same", "run_n_iterations"
COMPILING = 3
"""The phase in which the harness compiles: the third reset of the random state."""
FRESH_TARGET = "hashbench.integrations.dynamo.hook:FreshHarness"
"""What builds the model again in a fresh process."""
PAIRS_ON_DEMAND = 3
"""Own pairs that look for a difference which the harness has seen."""
_TIME_SHARE = 0.7
"""Part of what is left of the harness's ``--timeout`` that the diagnosis may take. A child that is ended then has two
rows in the harness's CSV, which the harness's own tools take for none."""
_FAILED_RUNS = (Status.FIRST_RUN_FAIL, Status.FIRST_RUN_OOM, Status.SECOND_RUN_FAIL, Status.SECOND_RUN_OOM)
_CONFIRMING_RUNS = 12
"""Runs, in times of a traced one, that must fit in before looking for a cause makes sense."""


class EagerRuns:
    """What is seen of one ``check_accuracy``. Digests are kept, never tensors.

    Args:
        harness: the harness's runner.
        names: the globals of its module, in which two functions are replaced while this watches.
        model, inputs: as the harness has them, to make a run again that failed under the trace: only if it fails
            without one too has the model failed.
        traced: put a trace around the two runs; otherwise only listen to their comparison.

    ``phase`` counts the resets: 0 nothing ran, 1 and 2 the eager runs, 3 compiling. ``runs`` are the traced runs that
    succeeded, ``failure`` the exception of the model that ended one. ``answer`` is what ``same`` said of the two
    (``None``: it was not asked or raised), ``compare_error`` what it raised. ``problems`` are faults of ours.
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
        self._guarded(lambda: self.on_compared(*map(named_results, arguments[:2])))
        return answer

    def _run_n_iterations(self, mod: Any, inputs: Any, *rest: Any, **named: Any) -> Any:
        real = getattr(type(self.harness), _RUN).__get__(self.harness)
        trace = self._guarded(lambda: HashDebugTrace(model=mod, inputs=inputs, settings=settings))
        if trace is None:
            return real(mod, inputs, *rest, **named)
        try:
            with trace:
                returned = real(mod, inputs, *counting(rest, trace), **named)
        except Exception as error:
            failure = failure_of(error, op=trace.failed_op)
        else:
            self._guarded(lambda: self._keep(trace, returned))
            return returned
        return self._run_again(failure, real, rest, named)

    def _run_again(self, failure: Failure, real: Callable[..., Any], rest: Any, named: Any) -> Any:
        """The run that failed under the trace once more without one, from the same state."""
        gc.collect()
        self._real[_RESET]()
        model, inputs = self.harness.maybe_cast(self.model, self.inputs)
        copy = self.harness.deepcopy_and_maybe_parallelize(model)
        self.harness.init_optimizer(*optimizer_arguments(self.names, copy))
        try:
            returned = real(copy, self.names["clone_inputs"](inputs), *rest, **named)
        except Exception as error:
            self.failure = failure_of(error, op=failure.op)
            raise
        self._problem(f"the run failed only under the trace: {failure.error}")
        return returned

    # ------------------------------------------------------------------------------------------------ what is kept

    def _keep(self, trace: HashDebugTrace, returned: Any) -> None:
        try:
            for name, value in named_results(returned).items():
                trace.add_result(name, value)
        except leaves.NotComparableError as error:
            log.info("results are not noted: %s", error)
        finished = trace.finish()
        self.runs.append(Run(finished, {result.name: result.digest.word() for result in finished.results}))

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


def named_results(returned: Any) -> dict[str, Any]:
    """What ``run_n_iterations`` returned, flat and by name.

    Raises:
        NotComparableError: there is a value of a type that nobody knows how to compare.
    """
    with _disable_current_modes():
        return dict(leaves.flatten(returned, "result"))


# --------------------------------------------------------------------------------------------------------- our row


def preparing(harness: Any, names: Mapping[str, Any], model: Any, inputs: Any) -> Callable[[], Prepared]:
    """What makes the copies for one run of the harness's model exactly as the harness does, within its settings.

    ``names`` are the globals of the harness's module.
    """

    def prepare() -> Prepared:
        copied = harness.deepcopy_and_maybe_parallelize(model)
        harness.init_optimizer(*optimizer_arguments(names, copied))
        cloned = names["clone_inputs"](inputs)
        return Prepared(copied, cloned, functools.partial(_iterate, harness, copied, cloned))

    return prepare


def _iterate(harness: Any, model: Any, inputs: Any, trace: HashDebugTrace | None) -> dict[str, Any]:
    """The harness's iterations, and what the harness compares: the results of the last one."""
    with trace if trace is not None else nullcontext():
        returned = harness.run_n_iterations(model, inputs, *counting(step_of(harness), trace))
    results: dict[str, Any] = {}
    for name, value in named_results(returned).items():
        add_result(results, trace, name, value, copied=False)
    return results


def _compared(outcome: Outcome, first: Run, second: Run) -> Outcome:
    """The outcome of two runs, as in a sweep."""
    with _disable_current_modes(), torch.no_grad():
        outcome = compared(outcome, first, second)
    differing = int(outcome.accuracy != Status.PASS)
    return replace(outcome, run_counts=RunCounts(1, differing, distinct=1 + differing))


def _further_pair(outcome: Outcome, make: Attempt) -> Outcome:
    """The outcome of one more pair of traced runs."""
    first, second = (make() for _ in range(2))
    if isinstance(first, Failure) or isinstance(second, Failure):
        return replace(outcome, confirmed="no: a further run failed")
    return _compared(outcome, first, second)


class ModelCheck:
    """One model from the call of ``check_accuracy`` with ``name``, ``model`` and ``inputs`` to our row. ``harness`` is
    the harness's runner, ``names`` the globals of its module."""

    def __init__(
        self, session: Session, harness: Any, names: dict[str, Any], *, name: str, model: Any, inputs: Any
    ) -> None:
        self.session, self.harness, self.names, self.name = session, harness, names, name
        self.began = time.perf_counter()
        self.options = options_of(session, harness.args, device=str(names.get("current_device", "cpu")))
        self.spec = ModelSpec(
            suite=session.suite,
            name=name,
            batch_size=_whole(names.get("current_batch_size")),
            arguments={"script": session.script, "arguments": list(session.arguments), "only": harness.args.only},
        )
        claim_workspace(self.options.device)
        self.model, self.inputs = model, inputs
        self.eager = EagerRuns(harness, names, model=model, inputs=inputs, traced=session.trace == "always")
        self.eager.on_compared = self._look
        self.outcome = Outcome(Status.PASS, settings()["deterministic_algorithms"], iterations=harness.args.iterations)
        amend_note(session, name, device=self.options.device, mode=self.options.mode)

    def _look(self, first: Mapping[str, Any], second: Mapping[str, Any]) -> None:
        """While the harness still holds both results: how they differ, in numbers."""
        if len(self.eager.runs) == 2:
            runs = [
                replace(run, results=results) for run, results in zip(self.eager.runs, (first, second), strict=True)
            ]
            self.outcome = _compared(self._begun(), *runs)
        elif not self.eager.answer:
            with _disable_current_modes(), torch.no_grad():
                difference = outputs.compare(first, second)
            differ = replace(self._begun(), accuracy=Status.TWO_RUNS_DIFFER, run_counts=RunCounts(1, 1, 2))
            self.outcome = replace(differ, difference=difference)

    def _begun(self) -> Outcome:
        traces = [run.trace for run in self.eager.runs if run.trace is not None]
        return replace(self.outcome, runs=2, ops=len(traces[0].records) if traces else None)

    # ------------------------------------------------------------------------------ when the harness has its own row

    def conclude(self, status: str) -> None:
        """Write our row. ``status`` is the harness's word."""
        key = file_key(suite=self.spec.suite, mode=self.options.mode, name=self.name)
        csv, problem = str(self.names.get("output_filename") or ""), "; ".join(self.eager.problems)[:500]
        amend_note(self.session, self.name, status=status, csv=csv, problem=problem, key=key)
        with self.harness.pick_grad(self.name, self.harness.args.training):
            model, inputs = self.harness.maybe_cast(self.model, self.inputs)
            prepare = preparing(self.harness, self.names, model, inputs)
            make = functools.partial(attempt, prepare, self.options)
            outcome, error = self._happened(make, status)
            if outcome.accuracy == Status.TWO_RUNS_DIFFER:
                outcome = self._explained(make, outcome)
        row = row_of(self.spec, self.options, outcome, seconds=time.perf_counter() - self.began)
        self.session.results.write_row(key, replace(row, error="; ".join(filter(None, (row.error, error)))))

    def _happened(self, make: Attempt, status: str) -> tuple[Outcome, str]:
        """What became of the two eager runs, and words for where that is not what the harness wrote."""
        eager = self.eager
        if eager.phase == 0:
            return replace(self.outcome, accuracy=Status.SKIPPED), "the harness ran no eager pair"
        if eager.phase < COMPILING and status in _FAILED_RUNS:
            return replace(self.outcome, accuracy=status, failure=eager.failure, runs=eager.phase), ""
        if eager.compare_error:
            return self._not_compared()
        outcome = self.outcome if eager.answer is not None else self._unasked(make)
        if eager.answer is False and outcome.difference is None:
            return outcome, "same() of the harness said no to two runs of equal bits (a NaN equals nothing there)"
        if outcome.accuracy == Status.TWO_RUNS_DIFFER and outcome.verdict is None:
            outcome = self._found_again(make, outcome)
        hidden = outcome.accuracy == Status.TWO_RUNS_DIFFER != status
        return outcome, f"the harness wrote {status}" if hidden else ""

    def _not_compared(self) -> tuple[Outcome, str]:
        said = f"same() of the harness raised {self.eager.compare_error}"
        outcome = replace(self.outcome, accuracy=Status.NOT_COMPARABLE, failure=Failure(said))
        if len(self.eager.runs) != 2:
            return outcome, ""
        bits = _compared(replace(self._begun(), accuracy=Status.PASS), *self.eager.runs)
        if not self.eager.runs[0].results:
            return replace(outcome, ops=bits.ops, runs=2), ""
        agree = "agree" if bits.accuracy == Status.PASS else "do not agree"
        return (
            replace(bits, accuracy=Status.NOT_COMPARABLE, failure=Failure(said), difference=None),
            f"bit by bit the two runs {agree}",
        )

    def _unasked(self, make: Attempt) -> Outcome:
        """The harness made both runs and did not compare them: its list says that they differ."""
        if len(self.eager.runs) == 2:
            return _compared(self._begun(), *self.eager.runs)
        return _further_pair(replace(self.outcome, runs=2), make)

    def _found_again(self, make: Attempt, outcome: Outcome) -> Outcome:
        """A difference of two runs that were not traced, in further pairs that are."""
        for _ in range(PAIRS_ON_DEMAND):
            further = _further_pair(replace(outcome, accuracy=Status.PASS), make)
            if further.accuracy != Status.PASS:
                return further
        return replace(outcome, confirmed=f"no: {PAIRS_ON_DEMAND} further pairs agreed")

    def _explained(self, make: Attempt, outcome: Outcome) -> Outcome:
        left = _TIME_SHARE * (float(getattr(self.harness.args, "timeout", 2000)) - _age())
        if self.session.budget <= 0 or left < _CONFIRMING_RUNS * (time.perf_counter() - self.began):
            why = "no experiments were asked for" if self.session.budget <= 0 else "the harness's --timeout is too near"
            return replace(outcome, confirmed=f"not tried: {why}")
        options = replace(self.options, diagnose_budget=min(self.session.budget, left))
        check = PairCheck(make, options, outcome.deterministic, spec=self.spec, target=FRESH_TARGET)
        return check.diagnose(check.confirm(outcome))


def options_of(session: Session, args: Any, *, device: str) -> RunOptions:
    """What the harness's flags mean in our words."""
    return RunOptions(
        mode="training" if args.training else "inference",
        device=device,
        dtype=next((dtype for dtype in DTYPES if getattr(args, dtype, False)), ""),
        iterations=_whole(getattr(args, "iterations", None)),
        runs=2,
        diagnose_budget=session.budget,
        output=session.folder,
    )


def _age() -> float:
    """Seconds since this process began: the harness counts from there."""
    return time.time() - psutil.Process().create_time()


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
