"""Judge the two eager runs of one model that the harness runs, and diagnose why they differ.

What follows the harness's own row is as in ``hashbench sweep``; only a run is made as the harness makes one. Output of
such runs goes to a file: the terminal is the harness's.
"""

from __future__ import annotations

import functools
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from hashbench.batch.neighbours import Neighbours
from hashbench.catalog import Kind, Status, kind_of
from hashbench.check import batch_items
from hashbench.check.batch_invariance import BatchCheck
from hashbench.check.fingerprint import SECONDS, fingerprint_from
from hashbench.check.pair import PairCheck, compared
from hashbench.check.row import row_of
from hashbench.divergence import find as find_divergence
from hashbench.fingerprint import document
from hashbench.fingerprint.calls import KernelCollector
from hashbench.fingerprint.document import Fingerprints
from hashbench.integrations.dynamo.eager_runs import (
    EagerRuns,
    named_results,
    optimizer_arguments,
    run_once,
    unsupported_reason,
)
from hashbench.integrations.dynamo.session import CANNOT_FOLLOW, Session, amend_note, chosen_model, tell
from hashbench.io import read_json_object, replace_file
from hashbench.processes import printing_to
from hashbench.records import BATCH_INVARIANCE, DTYPES, Failure, ModelSpec, RunCounts, RunOptions
from hashbench.results.folder import file_key
from hashbench.run import environment, outputs
from hashbench.run.leaves import LeftOut
from hashbench.run.outcome import Attempt, Outcome, Prepared, Run, add_result, attempt
from hashbench.run.settings import claim_workspace, settings
from hashbench.trace.api import HashDebugTrace
from hashbench.trace.digest import untraced

FRESH_TARGET = "hashbench.integrations.dynamo.fresh:FreshHarness"
"""The builder of the model in a fresh process."""
PAIRS_ON_DEMAND = 3
"""Traced pairs run to reproduce a difference that the harness has seen."""
_TIME_SHARE = 0.7
"""Share of the rest of the harness's ``--timeout`` that the diagnosis may take. A child killed then would have two rows
in the harness's CSV, which the harness's own tools read as none."""
_FAILED_RUNS = (Status.FIRST_RUN_FAIL, Status.FIRST_RUN_OOM, Status.SECOND_RUN_FAIL, Status.SECOND_RUN_OOM)
_CONFIRMING_RUNS = 12
"""Traced runs that must fit into the time left for a diagnosis to begin."""
_FINGERPRINT_RUNS = 4
"""Time limit of recording the model's kernels, in times of the harness's two runs."""
_EAGER = ("eager",)
"""Backends that run the model's own ops."""
_BATCH_RUNS = 4
"""Time limit of our batch-invariance check, in times of the harness's."""
_STRESSED_RUNS = 4
"""Time limit of stressed runs and of naming the perturbation, in times of the harness's two runs."""


def preparing(
    harness: Any,
    names: Mapping[str, Any],
    model: Any,
    inputs: Any,
    *,
    step: Any = None,
    part: Callable[[Any], Any] = lambda cloned: cloned,
) -> Callable[[], Prepared]:
    """Return a factory for one run of the harness's model, exactly as the harness makes it, within its settings.

    The model is cast once, when the first run is made.

    Args:
        harness: the harness's runner.
        names: the globals of its module.
        model: as the harness has it.
        inputs: likewise.
        step: one iteration, in ``eval`` mode; ``None``: the harness's own step.
        part: selects the inputs of the run.
    """
    cast = functools.cache(lambda: harness.maybe_cast(model, inputs))

    def prepare() -> Prepared:
        its_model, its_inputs = cast()
        copied = harness.deepcopy_and_maybe_parallelize(its_model)
        if step is None:
            harness.init_optimizer(*optimizer_arguments(names, copied))
        else:
            copied.eval()
        cloned = part(names["clone_inputs"](its_inputs))
        return Prepared(copied, cloned, functools.partial(_iterate, harness, copied, cloned, step))

    return prepare


def _iterate(harness: Any, model: Any, inputs: Any, step: Any, trace: HashDebugTrace | None) -> dict[str, Any]:
    """Run the harness's iterations and return what the harness compares: the results of the last one."""
    returned = run_once(harness, model, inputs, trace, step=step)
    results: dict[str, Any] = {}
    for name, value in named_results(returned).items():
        add_result(results, trace, name, value, copied=False)
    return results


def _compared(outcome: Outcome, first: Run, second: Run) -> Outcome:
    """Compare two runs as in a sweep."""
    with untraced():
        outcome = compared(outcome, first, second)
    differing = int(outcome.accuracy != Status.PASS)
    return replace(outcome, run_counts=RunCounts(1, differing, distinct=1 + differing))


def _further_pair(outcome: Outcome, make: Attempt) -> Outcome:
    """Compare one more pair of traced runs."""
    first, second = (make() for _ in range(2))
    if isinstance(first, Failure) or isinstance(second, Failure):
        return replace(outcome, confirmed="no: a further run failed")
    return _compared(outcome, first, second)


class ModelCheck:
    """One model from the call of ``check_accuracy`` to our row.

    Args:
        session: of this command.
        harness: the harness's runner.
        names: the globals of its module.
        name: of the model.
        model: as the harness built it.
        inputs: likewise.
        generators: states of the global random generators before it built the model, by name.
    """

    def __init__(
        self,
        session: Session,
        harness: Any,
        names: dict[str, Any],
        *,
        name: str,
        model: Any,
        inputs: Any,
        generators: Mapping[str, Sequence[int]],
    ) -> None:
        self.session, self.harness, self.names, self.name = session, harness, names, name
        self.began = time.perf_counter()
        self.options, self.spec, self.unsupported = _begun(session, harness, names, name, generators)
        self.model, self.inputs = model, inputs
        traced = session.trace == "always" and not self.unsupported
        self.eager = EagerRuns(harness, names, model=model, inputs=inputs, tracer=session.tracer if traced else "")
        self.eager.on_compared = self._measure_difference
        self.outcome = Outcome(Status.PASS, settings()["deterministic_algorithms"], iterations=harness.args.iterations)

    def watched(self) -> AbstractContextManager[None]:
        """Return the context of the harness's check of the model."""
        return self.eager.watched()

    @property
    def traced_runs(self) -> list[Run]:
        """The two runs that were compared, if both were traced."""
        runs = [run.run for run in self.eager.pair or self.eager.runs]
        return [run for run in runs if run is not None] if len(runs) == 2 and all(runs) else []

    def _measure_difference(self, first: Mapping[str, Any], second: Mapping[str, Any]) -> None:
        """Measure the difference while the harness still holds both results."""
        if self.traced_runs:
            both = zip(self.traced_runs, (first, second), strict=True)
            self.outcome = _compared(self._begun(), *(replace(run, results=results) for run, results in both))
        elif not self.eager.answer:
            with untraced():
                difference = outputs.compare(first, second)
            differ = replace(self._begun(), accuracy=Status.TWO_RUNS_DIFFER, run_counts=RunCounts(1, 1, 2))
            self.outcome = replace(differ, difference=difference)

    def _begun(self) -> Outcome:
        traces = [run.trace for run in self.traced_runs if run.trace is not None]
        apart = next((run.not_compared for run in self.traced_runs), ())
        outcome = replace(self.outcome, runs=2, not_compared=apart)
        return replace(outcome, ops=len(traces[0].records), tracer=traces[0].tracer) if traces else outcome

    # ------------------------------------------------------------------------------ when the harness has its own row

    def conclude(self, status: str) -> None:
        """Write our row. ``status`` is the harness's word."""
        key = file_key(suite=self.spec.suite, mode=self.options.mode, name=self.name)
        csv, problem = str(self.names.get("output_filename") or ""), "; ".join(self.eager.problems)[:500]
        amend_note(self.session, self.name, status=status, csv=csv, problem=problem, key=key)
        if why := self.unsupported or self._unrecognised(status):
            outcome, error = self._not_judged(status, why)
        else:
            printed = printing_to(self.session.results.log_path(key))
            with printed, self.harness.pick_grad(self.name, self.harness.args.training):
                prepare = preparing(self.harness, self.names, self.model, self.inputs)
                make = functools.partial(attempt, prepare, self.options)
                outcome, error = self._judged(make, status)
                error = "; ".join(filter(None, (error, self._record_kernels(make, outcome))))
        row = row_of(self.spec, self.options, outcome, seconds=time.perf_counter() - self.began)
        self.session.results.write_row(key, replace(row, error="; ".join(filter(None, (row.error, error)))))

    def _judged(self, make: Attempt, status: str) -> tuple[Outcome, str]:
        outcome, error = self._eager_outcome(make, status)
        if outcome.accuracy == Status.TWO_RUNS_DIFFER:
            return self._diagnose(make, outcome), error
        return (self._stress(make, outcome) if outcome.accuracy == Status.PASS else outcome), error

    def _eager_outcome(self, make: Attempt, status: str) -> tuple[Outcome, str]:
        """Return the outcome of the two eager runs, and an explanation if the harness wrote something else."""
        eager = self.eager
        if eager.pair is None and status in _FAILED_RUNS:
            return self._failed(status), ""
        if eager.pair is None and not eager.runs and status == Status.SKIPPED:
            return replace(self.outcome, accuracy=Status.SKIPPED), "the harness ran no eager pair"
        if eager.compare_error:
            return self._not_compared()
        outcome = self.outcome if eager.answer is not None else self._compare_unasked(make)
        if eager.answer is False and outcome.difference is None:
            return outcome, "same() of the harness said no to two runs of equal bits (a NaN equals nothing there)"
        if outcome.accuracy == Status.TWO_RUNS_DIFFER and outcome.verdict is None:
            outcome = self._reproduce_traced(make, outcome)
        hidden = outcome.accuracy == Status.TWO_RUNS_DIFFER != status
        return outcome, f"the harness wrote {status}" if hidden else ""

    def _unrecognised(self, status: str) -> str:
        """Return why the pair cannot be judged (``same`` compared other values than two eager runs returned), or ""."""
        eager = self.eager
        ended = status in _FAILED_RUNS or (status == Status.SKIPPED and not eager.runs)
        known = eager.pair is not None or (not eager.strange and (ended or len(eager.runs) == 2))
        return "" if known else f"{CANNOT_FOLLOW}: its two eager runs were not recognised"

    def _failed(self, status: str) -> Outcome:
        failure = self.eager.failure
        refused = "" if failure is None else failure.nondeterministic_op
        runs = len(self.eager.runs) + 1
        return replace(self.outcome, accuracy=status, failure=failure, nondeterministic_op=refused, runs=runs)

    def _not_judged(self, status: str, why: str) -> tuple[Outcome, str]:
        """Repeat the harness's word if it says that something is wrong, else skip: its pass is not ours to confirm."""
        wrong = status in _FAILED_RUNS or status == Status.TWO_RUNS_DIFFER
        confirmed = "no: nothing was run again" if status == Status.TWO_RUNS_DIFFER else ""
        accuracy = status if wrong else Status.SKIPPED
        return replace(self.outcome, accuracy=accuracy, confirmed=confirmed), f"{why}; the harness wrote {status}"

    def _not_compared(self) -> tuple[Outcome, str]:
        said = f"same() of the harness raised {self.eager.compare_error}"
        outcome = replace(self._begun(), accuracy=Status.NOT_COMPARABLE, failure=Failure(said))
        if not self.traced_runs:
            return outcome, "nothing of the two runs was recorded (--trace on-demand)"
        first, second = self.traced_runs
        if not all(isinstance(value, LeftOut) for run in self.traced_runs for value in run.results.values()):
            bits = _compared(replace(self._begun(), accuracy=Status.PASS), first, second)
            differ, what = bits.accuracy != Status.PASS, "bit by bit the two runs"
        else:
            assert first.trace is not None
            assert second.trace is not None
            verdict = find_divergence(replace(first.trace, results=()), replace(second.trace, results=()))
            bits = replace(outcome, verdict=verdict, traces=(first.trace, second.trace))
            differ, what = verdict.divergence is not None, "the recorded ops of the two runs"
        bits = replace(bits, accuracy=Status.NOT_COMPARABLE, failure=Failure(said), difference=None)
        return bits, f"{what} {'do not agree' if differ else 'agree'}"

    def _compare_unasked(self, make: Attempt) -> Outcome:
        """Compare a pair that the harness ran and did not compare: its list says that they differ."""
        if self.traced_runs:
            return _compared(self._begun(), *self.traced_runs)
        return _further_pair(replace(self.outcome, runs=2), make)

    def _reproduce_traced(self, make: Attempt, outcome: Outcome) -> Outcome:
        """Reproduce, in traced pairs, a difference of two untraced runs."""
        for _ in range(PAIRS_ON_DEMAND):
            further = _further_pair(replace(outcome, accuracy=Status.PASS), make)
            if further.accuracy != Status.PASS:
                return further
        return replace(outcome, confirmed=f"no: {PAIRS_ON_DEMAND} further pairs agreed")

    def _diagnose(self, make: Attempt, outcome: Outcome) -> Outcome:
        left = _seconds_left(self.session, self.harness.args)
        if self.session.budget <= 0 or left < _CONFIRMING_RUNS * max(run.seconds for run in self.eager.runs):
            why = "no experiments were asked for" if self.session.budget <= 0 else "the harness's --timeout is too near"
            return replace(outcome, confirmed=f"not tried: {why}")
        check = self._check(make, outcome, left)
        return check.diagnose(check.confirm(outcome))

    def _stress(self, make: Attempt, outcome: Outcome) -> Outcome:
        """Rerun pairs under perturbations, if asked for and if the harness's ``--timeout`` leaves the time."""
        seconds, left = sum(run.seconds for run in self.eager.runs), _seconds_left(self.session, self.harness.args)
        if not self.options.stress or left < _STRESSED_RUNS * seconds:
            return outcome
        first = make()
        if isinstance(first, Failure):
            return outcome
        return self._check(make, outcome, left).stress(replace(outcome, first=first), seconds=seconds)

    def _check(self, make: Attempt, outcome: Outcome, left: float) -> PairCheck:
        """Return a check whose diagnosis ends within ``left`` seconds."""
        options = replace(self.options, diagnose_budget=min(self.session.budget, left))
        return PairCheck(make, options, outcome.deterministic, spec=self.spec, target=FRESH_TARGET)

    def _record_kernels(self, make: Attempt, outcome: Outcome) -> str:
        """Write the fingerprint of the model's kernels if asked for; return why there is none, or ""."""
        if not self.session.fingerprints or kind_of(outcome.accuracy) not in (Kind.PASS, Kind.DIFFER):
            return ""
        seconds, left = sum(run.seconds for run in self.eager.runs), _seconds_left(self.session, self.harness.args)
        if left < _FINGERPRINT_RUNS * seconds:
            return "no kernel fingerprint: the harness's --timeout is too near"
        kernels = KernelCollector()
        run = make(watcher=kernels)
        if isinstance(run, Failure):
            return f"no kernel fingerprint: {run.error}"
        model = fingerprint_from(
            kernels, self.spec, self.options, level=outcome.deterministic, seconds=min(SECONDS, left / 2)
        )
        machine = read_json_object(self.session.machine)
        document.write(document.path_in(Path(self.session.folder), model.key), Fingerprints(machine, (model,)))
        return ""


# ------------------------------------------------------------------------------------------------ batch invariance


class BatchModelCheck:
    """One model from the call of ``check_batch_invariance`` to our row.

    What the harness compared is compared again without its compiler, and the kernel is named. The arguments are those
    of :class:`ModelCheck`.
    """

    def __init__(
        self,
        session: Session,
        harness: Any,
        names: dict[str, Any],
        *,
        name: str,
        model: Any,
        inputs: Any,
        generators: Mapping[str, Sequence[int]],
    ) -> None:
        self.session, self.harness, self.names, self.name = session, harness, names, name
        self.model, self.inputs, self.seconds = model, inputs, 0.0
        self.options, self.spec, self.unsupported = _begun(session, harness, names, name, generators)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Time the harness's check of the model."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds = time.perf_counter() - began

    def conclude(self, status: str) -> None:
        """Write our row. ``status`` is the harness's word."""
        began, key = time.perf_counter(), file_key(suite=self.spec.suite, mode=self.options.mode, name=self.name)
        amend_note(self.session, self.name, status=status, csv=str(self.names.get("output_filename") or ""), key=key)
        level = settings()["deterministic_algorithms"]
        outcome, error = Outcome(status, level, iterations=self.options.iterations), self._why_not(status)
        if not error:
            printed = printing_to(self.session.results.log_path(key))
            with printed, self.harness.pick_grad(self.name, self.harness.args.training):
                outcome = self._compared(level)
            error = "" if outcome.accuracy == status else f"the harness wrote {status}"
        row = row_of(self.spec, self.options, outcome, seconds=time.perf_counter() - began)
        self.session.results.write_row(key, replace(row, error="; ".join(filter(None, (row.error, error)))))

    def _why_not(self, status: str) -> str:
        """Return why the harness's runs cannot be repeated, or ""."""
        args = self.harness.args
        if self.unsupported:
            return self.unsupported
        if status == Status.SKIPPED:
            return "the harness ran nothing"
        if not getattr(args, "nothing", False) and args.backend not in _EAGER:
            return (
                f"only outputs were compared, by the harness: no kernel inside of what --backend {args.backend} "
                "compiled can be named"
            )
        if _seconds_left(self.session, args) < _BATCH_RUNS * self.seconds:
            return "no kernel was looked for: the harness's --timeout is too near"
        return ""

    def _compared(self, level: str) -> Outcome:
        batch = self.spec.batch_size or 0

        def run_at(size: int, *, beside: Neighbours | None = None, **more: Any) -> Run | Failure:
            prepare = preparing(
                self.harness,
                self.names,
                self.model,
                self.inputs,
                step=self.harness.forward_pass,
                part=functools.partial(batch_items.first_items, size=size, batch=batch, beside=beside),
            )
            return attempt(prepare, self.options, **more)

        left = _seconds_left(self.session, self.harness.args) - _BATCH_RUNS * self.seconds
        options = replace(self.options, diagnose_budget=min(self.session.budget, left))
        iterations = self.options.iterations
        return BatchCheck(run_at, batch, options, level, iterations=iterations, outputs=_results, spec=self.spec).run()


def _results(run: Run) -> Mapping[str, Any]:
    return run.results


def _begun(
    session: Session, harness: Any, names: Mapping[str, Any], name: str, generators: Mapping[str, Sequence[int]]
) -> tuple[RunOptions, ModelSpec, str]:
    """Return the options that the harness's flags mean, the model's spec, and why this harness is unsupported (or "").

    Describes the machine once.
    """
    options = options_of(session, harness.args, device=str(names.get("current_device", "cpu")))
    spec = ModelSpec(
        suite=session.suite,
        name=name,
        batch_size=_whole(names.get("current_batch_size")),
        arguments={
            "script": session.script,
            "arguments": list(session.arguments),
            "only": harness.args.only,
            "generators": generators,
        },
    )
    claim_workspace(options.device)
    unlike = unsupported_reason(harness, names)
    amend_note(session, name, device=options.device, mode=options.mode)
    if not session.machine.exists():
        replace_file(session.machine, json.dumps(environment.collect(options.device, tracer=session.tracer)))
    if unlike:
        tell(unlike)
    return options, spec, unlike


def _seconds_left(session: Session, args: Any) -> float:
    """Return the seconds that the diagnosis may take. Only a child of the harness's sweep is ended by its
    ``--timeout``."""
    if chosen_model(session.arguments):
        return math.inf
    return _TIME_SHARE * (float(getattr(args, "timeout", 2000)) - _age())


def options_of(session: Session, args: Any, *, device: str) -> RunOptions:
    """Translate the harness's flags into run options."""
    mode = "training" if args.training else "inference"
    return RunOptions(
        mode=BATCH_INVARIANCE if getattr(args, "batch_invariant", False) else mode,
        device=device,
        dtype=next((dtype for dtype in DTYPES if getattr(args, dtype, False)), ""),
        iterations=_whole(getattr(args, "iterations", None)),
        runs=2,
        tracer=session.tracer,
        stress=session.stress,
        diagnose_budget=session.budget,
        output=session.folder,
    )


def _age() -> float:
    """Return the seconds since this process began: the harness counts from there."""
    return time.time() - psutil.Process().create_time()


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
