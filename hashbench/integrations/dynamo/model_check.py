"""Judge the two eager runs of one model that the harness runs, and diagnose why they differ.

What follows the harness's own row is as in ``hashbench sweep``; only a run is made as the harness makes one. Output of
such runs goes to a file: the terminal is the harness's.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from hashbench.core.catalog import Kind, Status, kind_of
from hashbench.core.check import pipeline
from hashbench.core.check.pair import PairCheck, compared
from hashbench.core.check.row import row_of
from hashbench.core.check.subject import Subject
from hashbench.core.divergence import find as find_divergence
from hashbench.core.io import read_json_object, replace_file
from hashbench.core.processes import printing_to
from hashbench.core.records import BATCH_INVARIANCE, DTYPES, Failure, ModelSpec, RunCounts, RunOptions
from hashbench.core.results.folder import file_key
from hashbench.core.run import environment, outputs
from hashbench.core.run.leaves import LeftOut
from hashbench.core.run.outcome import Given, Outcome, Prepared, Run, prepared_runs
from hashbench.core.run.settings import claim_workspace, settings
from hashbench.core.trace.digest import untraced
from hashbench.extensions.fingerprint import document
from hashbench.extensions.fingerprint.calls import KernelCollector
from hashbench.extensions.fingerprint.check import SECONDS, fingerprint_from
from hashbench.extensions.fingerprint.document import Fingerprints
from hashbench.extensions.invariance.check import check_invariance
from hashbench.integrations.dynamo.compiled_runs import HarnessPieces, backend_of, explained
from hashbench.integrations.dynamo.eager_runs import (
    EagerRuns,
    prepared_run,
    unsupported_reason,
)
from hashbench.integrations.dynamo.session import CANNOT_FOLLOW, Session, amend_note, chosen_model, tell

FRESH_TARGET = "hashbench.integrations.dynamo.fresh:FreshHarness"
"""The builder of the model in a fresh process."""
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
_COMPILATIONS = 8
"""Time limit of looking for the cause of an inaccurate compiled model, in times of the harness's own check: a ladder of
backends in float64, and runs whose kernels are judged, without the experiments."""
_STRESSED_RUNS = 4
"""Time limit of stressed runs and of naming the perturbation, in times of the harness's two runs."""


def preparing(
    harness: Any, names: Mapping[str, Any], model: Any, inputs: Any, *, step: Any = None
) -> Callable[..., Prepared]:
    """Return a factory for runs of the harness's model, which is cast once, when the first run is made.

    ``step``: one iteration, in ``eval`` mode; ``None``: the harness's own step. The rest is as for
    :func:`~hashbench.integrations.dynamo.eager_runs.prepared_run`.
    """
    cast = functools.cache(lambda: harness.maybe_cast(model, inputs))

    def prepare(given: Given | None = None) -> Prepared:
        cast_model, cast_inputs = cast()
        return prepared_run(harness, names, cast_model, cast_inputs, given, step=step, optimizer=step is None)

    return prepare


def _compared(outcome: Outcome, first: Run, second: Run) -> Outcome:
    with untraced():
        outcome = compared(outcome, first, second)
    differing = int(outcome.accuracy != Status.PASS)
    return replace(outcome, run_counts=RunCounts(1, differing, distinct=1 + differing))


def _further_pair(outcome: Outcome, subject: Subject) -> Outcome:
    first, second = (subject.attempt() for _ in range(2))
    if isinstance(first, Failure) or isinstance(second, Failure):
        return replace(outcome, confirmed=pipeline.FURTHER_RUN_FAILED)
    return _compared(outcome, first, second)


@dataclass(frozen=True, slots=True)
class HarnessModel:
    """One model that the harness checks.

    Attributes:
        session: of this command.
        harness: the harness's runner.
        names: the globals of its module.
        model: as the harness built it.
        inputs: likewise.
        optimize_ctx: what the harness compiles with.
        options: what the harness's flags mean.
        spec: names it, and says how a fresh process builds it.
        unsupported: why this harness is unsupported, or "".
    """

    session: Session
    harness: Any
    names: dict[str, Any]
    model: Any
    inputs: Any
    optimize_ctx: Any
    options: RunOptions
    spec: ModelSpec
    unsupported: str

    @classmethod
    def begun(
        cls,
        session: Session,
        harness: Any,
        names: dict[str, Any],
        *,
        name: str,
        model: Any,
        inputs: Any,
        optimize_ctx: Any,
        generators: Mapping[str, Sequence[int]],
    ) -> HarnessModel:
        """Return the model whose check begins, and describe the machine once.

        ``generators``: states of the global random generators before the harness built it, by name.
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
        return cls(session, harness, names, model, inputs, optimize_ctx, options, spec, unlike)

    def subject(self, *, step: Any = None) -> Subject:
        """Return it as a check runs it; ``step`` as in :func:`preparing`."""
        prepare = preparing(self.harness, self.names, self.model, self.inputs, step=step)
        return Subject(
            prepared_runs(prepare, self.options),
            self.spec,
            target=FRESH_TARGET,
            iterations=self.options.iterations,
            inputs=self.inputs,
            batch=self.spec.batch_size,
            outputs=lambda each: each.results,
        )

    def seconds_left(self) -> float:
        """Return the seconds that the diagnosis may take. Only a child of the harness's sweep is ended by its
        ``--timeout``."""
        if chosen_model(self.session.arguments):
            return math.inf
        return _TIME_SHARE * (float(getattr(self.harness.args, "timeout", 2000)) - _age())

    def within(self, left: float) -> RunOptions:
        """Return options whose diagnosis ends within ``left`` seconds."""
        return replace(self.options, diagnose_budget=min(self.session.budget, left))

    def write_row(
        self, status: str, began: float, judged: Callable[[], tuple[Outcome, str]], *, why_not: str, problem: str = ""
    ) -> None:
        """Write our row beside the harness's ``status``.

        ``judged`` returns the outcome and an error; it is called in the harness's gradient mode, its output in a file,
        unless ``why_not`` says why the runs cannot be repeated.
        """
        key = file_key(suite=self.spec.suite, mode=self.options.mode, name=self.spec.name)
        csv = str(self.names.get("output_filename") or "")
        amend_note(self.session, self.spec.name, status=status, csv=csv, problem=problem, key=key)
        with contextlib.ExitStack() as stack:
            if not why_not:
                stack.enter_context(printing_to(self.session.results.log_path(key)))
                stack.enter_context(self.harness.pick_grad(self.spec.name, self.harness.args.training))
            outcome, error = judged()
        row = row_of(self.spec, self.options, outcome, seconds=time.perf_counter() - began)
        self.session.results.write_row(key, replace(row, error="; ".join(filter(None, (row.error, error)))))


class ModelCheck:
    """One model from the call of ``check_accuracy`` to our row."""

    def __init__(self, case: HarnessModel) -> None:
        self.case = case
        self.began = time.perf_counter()
        session, harness = case.session, case.harness
        self.subject = case.subject()
        traced = session.trace == "always" and not case.unsupported
        tracer = session.tracer if traced else ""
        self.eager = EagerRuns(harness, case.names, model=case.model, inputs=case.inputs, tracer=tracer)
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
        why_not = self.case.unsupported or self._unrecognised(status)
        problem = "; ".join(self.eager.problems)[:500]

        def judged() -> tuple[Outcome, str]:
            return self._not_judged(status, why_not) if why_not else self._judged(status)

        self.case.write_row(status, self.began, judged, why_not=why_not, problem=problem)

    def _judged(self, status: str) -> tuple[Outcome, str]:
        outcome, error = self._eager_outcome(status)
        if outcome.accuracy == Status.TWO_RUNS_DIFFER:
            outcome = self._diagnose(outcome)
        elif outcome.accuracy == Status.PASS and status == Status.FAIL_ACCURACY:
            outcome, why_not = self._explain(outcome)
            error = "; ".join(filter(None, (error, why_not)))
        elif outcome.accuracy == Status.PASS:
            outcome = self._stress(outcome)
        return outcome, "; ".join(filter(None, (error, self._record_kernels(outcome))))

    def _eager_outcome(self, status: str) -> tuple[Outcome, str]:
        """Return the outcome of the two eager runs, and an explanation if the harness wrote something else."""
        eager = self.eager
        if eager.pair is None and status in _FAILED_RUNS:
            return self._failed(status), ""
        if eager.pair is None and not eager.runs and status == Status.SKIPPED:
            return replace(self.outcome, accuracy=Status.SKIPPED), "the harness ran no eager pair"
        if eager.compare_error:
            return self._not_compared()
        outcome = self.outcome if eager.answer is not None else self._compare_unasked()
        if eager.answer is False and outcome.difference is None:
            return outcome, "same() of the harness said no to two runs of equal bits (a NaN equals nothing there)"
        if outcome.accuracy == Status.TWO_RUNS_DIFFER and outcome.verdict is None:
            outcome = self._reproduce_traced(outcome)
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
        wrong = status in (*_FAILED_RUNS, Status.TWO_RUNS_DIFFER, Status.FAIL_ACCURACY)
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

    def _compare_unasked(self) -> Outcome:
        """Compare a pair that the harness ran and did not compare: its list says that they differ."""
        if self.traced_runs:
            return _compared(self._begun(), *self.traced_runs)
        return _further_pair(replace(self.outcome, runs=2), self.subject)

    def _reproduce_traced(self, outcome: Outcome) -> Outcome:
        """Reproduce, in traced pairs, a difference of two untraced runs."""

        def differing(_: int) -> Outcome | None:
            further = _further_pair(replace(outcome, accuracy=Status.PASS), self.subject)
            return further if further.accuracy != Status.PASS else None

        return pipeline.in_further_pairs(outcome, differing)

    def _diagnose(self, outcome: Outcome) -> Outcome:
        left = self.case.seconds_left()
        if self.case.session.budget <= 0 or left < _CONFIRMING_RUNS * max(run.seconds for run in self.eager.runs):
            asked = self.case.session.budget > 0
            why = "the harness's --timeout is too near" if asked else "no experiments were asked for"
            return replace(outcome, confirmed=f"not tried: {why}")
        check = PairCheck(self.subject, self.case.within(left), outcome.deterministic)
        return pipeline.explained(check, outcome)

    def _explain(self, outcome: Outcome) -> tuple[Outcome, str]:
        """Return the outcome of a model that the harness found inaccurate, and why its cause was not looked for, or
        ""."""
        case, compared = self.case, self.eager.compared_compiled
        backend = backend_of(case.harness.args)
        outcome = replace(outcome, accuracy=Status.FAIL_ACCURACY, traces=()).having(backend=backend)
        seconds = max(time.perf_counter() - self.began - sum(run.seconds for run in self.eager.runs), 0.0)
        left = case.seconds_left()
        if case.session.budget <= 0:
            return outcome, "no cause was looked for: no experiments were asked for"
        if not backend or compared is None or case.optimize_ctx is None:
            return outcome, "no cause was looked for: the harness does not compile its step as it is"
        if left < _COMPILATIONS * seconds:
            return outcome, "no cause was looked for: the harness's --timeout is too near"
        options = replace(case.within(left - _COMPILATIONS * seconds), backend=backend)
        model, inputs = case.harness.maybe_cast(case.model, case.inputs)
        pieces = HarnessPieces(case.harness, case.names, model, inputs, case.optimize_ctx, options)
        return explained(pieces, self.subject, outcome, compared=compared)

    def _stress(self, outcome: Outcome) -> Outcome:
        """Rerun pairs under perturbations, if asked for and if the harness's ``--timeout`` leaves the time."""
        seconds, left = sum(run.seconds for run in self.eager.runs), self.case.seconds_left()
        if not self.case.options.stress or left < _STRESSED_RUNS * seconds:
            return outcome
        first = self.subject.attempt()
        if isinstance(first, Failure):
            return outcome
        check = PairCheck(self.subject, self.case.within(left), outcome.deterministic)
        return check.extend(replace(outcome, first=first), seconds=seconds)

    def _record_kernels(self, outcome: Outcome) -> str:
        """Write the fingerprint of the model's kernels if asked for; return why there is none, or ""."""
        session = self.case.session
        if not session.fingerprints or kind_of(outcome.accuracy) not in (Kind.PASS, Kind.DIFFER):
            return ""
        seconds, left = sum(run.seconds for run in self.eager.runs), self.case.seconds_left()
        if left < _FINGERPRINT_RUNS * seconds:
            return "no kernel fingerprint: the harness's --timeout is too near"
        kernels = KernelCollector()
        run = self.subject.attempt(watcher=kernels)
        if isinstance(run, Failure):
            return f"no kernel fingerprint: {run.error}"
        limit = min(SECONDS, left / 2)
        model = fingerprint_from(kernels, self.case.spec, self.case.options, level=outcome.deterministic, seconds=limit)
        machine = read_json_object(session.machine)
        document.write(document.path_in(Path(session.folder), model.key), Fingerprints(machine, (model,)))
        return ""


class BatchModelCheck:
    """One model from the call of ``check_batch_invariance`` to our row.

    What the harness compared is compared again without its compiler, and the kernel is named.
    """

    def __init__(self, case: HarnessModel) -> None:
        self.case, self.seconds = case, 0.0

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
        why_not, level = self._why_not(status), settings()["deterministic_algorithms"]

        def judged() -> tuple[Outcome, str]:
            if why_not:
                return Outcome(status, level, iterations=self.case.options.iterations), why_not
            options = self.case.within(self.case.seconds_left() - _BATCH_RUNS * self.seconds)
            outcome = check_invariance(self.case.subject(step=self.case.harness.forward_pass), options, level)
            return outcome, "" if outcome.accuracy == status else f"the harness wrote {status}"

        self.case.write_row(status, time.perf_counter(), judged, why_not=why_not)

    def _why_not(self, status: str) -> str:
        """Return why the harness's runs cannot be repeated, or ""."""
        args = self.case.harness.args
        if self.case.unsupported:
            return self.case.unsupported
        if status == Status.SKIPPED:
            return "the harness ran nothing"
        if not getattr(args, "nothing", False) and args.backend not in _EAGER:
            return (
                f"only outputs were compared, by the harness: no kernel inside of what --backend {args.backend} "
                "compiled can be named"
            )
        if self.case.seconds_left() < _BATCH_RUNS * self.seconds:
            return "no kernel was looked for: the harness's --timeout is too near"
        return ""


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
