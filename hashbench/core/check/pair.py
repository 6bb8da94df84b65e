"""Repeated runs of one thing, compared bit by bit and, where they differ, diagnosed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Protocol, TypeVar

from hashbench.core.catalog import Status
from hashbench.core.check import pipeline, row
from hashbench.core.check.subject import Subject
from hashbench.core.diagnose import driver
from hashbench.core.diagnose.repro.torch_docs import deterministic_by_flag
from hashbench.core.divergence import find as find_divergence
from hashbench.core.errors import log_error, ran_out_of_memory
from hashbench.core.extensions import stages_for
from hashbench.core.processes import tell_phase
from hashbench.core.records import Failure, RunCounts, RunOptions
from hashbench.core.run import outputs
from hashbench.core.run.distance import Difference
from hashbench.core.run.leaves import NotComparableError
from hashbench.core.run.outcome import (
    Outcome,
    Run,
    difference_between,
    failed_status,
    failure_of,
    fingerprint,
    results_that_differ,
)
from hashbench.core.text import join_limited
from hashbench.core.trace.op_schema import mode_dependent
from hashbench.core.trace.tracer import choose


@dataclass(frozen=True, slots=True)
class PairCheck:
    """Compares repeated runs and finds out why they differ; the :class:`~hashbench.core.check.pipeline.Runs` of a
    subject.

    Each stage takes the outcome so far and returns the outcome with what it found out.

    Args:
        subject: what is run.
        options: the budget of the diagnosis, and whether an untraced pair is compared too.
        level: the deterministic level that is in force.
        loading_seconds: what it took to build the subject, part of the time by which a stressed check is limited.
        drafted: what is written down of an outcome before the cause is looked for.
    """

    subject: Subject
    options: RunOptions
    level: str
    loading_seconds: float = 0.0
    drafted: Callable[[Outcome], Outcome] = lambda outcome: outcome

    def run(self) -> Outcome:
        """Run all stages in their order."""
        began = perf_counter()
        outcome = self.repeat()
        outcome = self.extend(outcome, seconds=self.loading_seconds + perf_counter() - began)
        outcome = pipeline.confirm(self, outcome)
        outcome = self.compare_untraced(outcome)
        return pipeline.diagnose(self, outcome)

    # ------------------------------------------------------------------------------------------------- stages

    def repeat(self) -> Outcome:
        """Make the runs of the subject, traced, and compare each with the first."""
        tracer = choose(self.options.tracer).tracer
        outcome = Outcome(Status.PASS, self.level, iterations=self.subject.iterations, tracer=tracer)
        first = self._numbered(1)
        if isinstance(first, Failure):
            return replace(outcome, accuracy=failed_status(first, number=1), failure=first)
        outcome = replace(with_facts(outcome, first), first=first)
        fingerprints = [fingerprint(first)]
        for number in range(2, self.subject.runs() + 1):
            other = self._numbered(number)
            if isinstance(other, Failure):
                return _ended(outcome, other, number)
            try:
                fingerprints.append(fingerprint(other))
                outcome = compared(
                    outcome,
                    first,
                    other,
                    number=number,
                    same_structure=self.subject.same_structure,
                    keep_traces=self.options.keep_traces,
                )
            except Exception as error:
                if not ran_out_of_memory(error):
                    raise
                log_error("comparing two runs failed")
                return _ended(outcome, failure_of(error), number)
        differing = sum(other != fingerprints[0] for other in fingerprints)
        if outcome.accuracy == Status.PASS and self.level != "off":
            by_flag = deterministic_by_flag(first.op_names, device=self.options.device)
            outcome = replace(outcome, deterministic_ops=by_flag)
        return replace(outcome, run_counts=RunCounts(len(fingerprints) - 1, differing, distinct=len(set(fingerprints))))

    def further_pair(self, outcome: Outcome, *, number: int) -> Outcome | None:
        """Make two further runs with every input hashed around every op; return which verdict stands."""
        first, second = (self.subject.attempt(diagnosing=True) for _ in range(2))
        if isinstance(first, Failure) or isinstance(second, Failure) or first.trace is None or second.trace is None:
            return replace(outcome, confirmed=pipeline.FURTHER_RUN_FAILED)
        try:
            names = results_that_differ(first, second)
        except NotComparableError as error:
            return replace(outcome, confirmed=f"yes, in another way: {error}")
        if not names:
            return None
        traces = (first.trace, second.trace)
        verdict = find_divergence(*traces, differing=names, draws_first=False)
        hashed = replace(outcome, verdict=verdict, benign=verdict.benign, traces=traces)
        return pipeline.confirmed_by(hashed, outcome, traces, number=number)

    def extend(self, outcome: Outcome, *, seconds: float) -> Outcome:
        """Add what the requested stages of extensions find out, if the runs, which took ``seconds``, agree."""
        first = outcome.first
        outcome = replace(outcome, first=None)
        if outcome.accuracy == Status.PASS and first is not None and first.recorded is not None:
            for stage in stages_for(self.options):
                outcome = stage(self, outcome, first, seconds=seconds)
        return outcome

    def compare_untraced(self, outcome: Outcome) -> Outcome:
        """Add the result of two untraced runs, if requested and all runs succeeded."""
        if not self.options.untraced_pair or outcome.run_counts is None:
            return outcome
        tell_phase("untraced pair")
        first, second = (self.subject.attempt(traced=False) for _ in range(2))
        traced = self.subject.attempt()
        if isinstance(first, Failure) or isinstance(second, Failure) or isinstance(traced, Failure):
            return replace(outcome, untraced="failed")
        try:
            difference = outputs.compare(first.results, second.results)
            by_tracing = outputs.compare(first.results, traced.results)
        except NotComparableError:
            return replace(outcome, untraced="not comparable")
        outcome = replace(outcome, untraced="agree" if difference is None else "differ")
        if difference is not None and outcome.accuracy == Status.PASS:
            return replace(outcome, accuracy=Status.TWO_RUNS_DIFFER, difference=difference)
        if difference is None and by_tracing is not None:
            known = outcome.perturbed_ops or "unknown"
            return replace(outcome, perturbed_ops=f"{known} (results differ from those of an untraced run)")
        return outcome

    def search(self, outcome: Outcome) -> pipeline.Search | None:
        """Return what runs the experiments; ``None`` if no two runs differ, or there is no budget."""
        if outcome.accuracy != Status.TWO_RUNS_DIFFER or self.options.diagnose_budget <= 0:
            return None
        return functools.partial(self._diagnosed, outcome)

    def _diagnosed(self, outcome: Outcome) -> Outcome:
        subject = self.subject
        case = driver.DiagnosisCase(
            subject.attempt,
            self.options,
            outcome,
            spec=subject.spec,
            target=subject.target,
            compiled=subject.compiled,
        )
        return replace(outcome, diagnosis=driver.diagnose(case))

    def keep_draft(self, outcome: Outcome) -> None:
        """Write down an outcome before what may end the process."""
        row.keep_draft(self.subject.spec, self.options, self.drafted(outcome))

    def _numbered(self, number: int) -> Run | Failure:
        tell_phase(f"run {number} of {self.subject.runs()}")
        return self.subject.attempt(number=number)


def compared(
    outcome: Outcome,
    first: Run,
    other: Run,
    *,
    number: int = 2,
    same_structure: bool = False,
    keep_traces: bool = False,
) -> Outcome:
    """Compare run ``number`` with the first, and add the first pair that differs to the outcome.

    With ``same_structure``, results of another structure are a difference, too. Traces of runs that agree are made only
    to be kept.
    """
    changed = tuple(dict.fromkeys((*outcome.settings_changed, *other.settings_changed)))
    compiled = tuple(dict.fromkeys((*outcome.compiled, *other.compiled)))
    outcome = replace(outcome, runs=number, settings_changed=changed, compiled=compiled)
    if outcome.accuracy != Status.PASS or first.recorded is None or other.recorded is None:
        return outcome
    outcome = replace(outcome, tracer=first.tracer)
    difference, names, error = None, None, ""
    try:
        difference = difference_between(first, other)
        names = () if difference is None else difference.names
    except NotComparableError as caught:
        if same_structure:
            difference = Difference((f"their structure: {caught}",))
        else:
            error = f"the results of two runs cannot be compared: {caught}"
    if names == () and not keep_traces and first.agrees_with(other):
        return replace(outcome, benign=outcome.benign or ())
    assert first.trace is not None
    assert other.trace is not None
    traces = (first.trace, other.trace)
    verdict = find_divergence(*traces, differing=names, draws_first=False)
    if names == () and verdict.early_reads and verdict.divergence is not None:
        error = f"the results are not those of an untraced run: {verdict.divergence.detail}"
    if difference is None and not error:
        benign = tuple(dict.fromkeys((*(outcome.benign or ()), *verdict.benign)))
        return replace(outcome, benign=benign, traces=traces)
    outcome = replace(outcome, verdict=verdict, benign=verdict.benign, traces=traces)
    if error:
        return replace(outcome, accuracy=Status.NOT_COMPARABLE, failure=Failure(error))
    return replace(outcome, accuracy=Status.TWO_RUNS_DIFFER, difference=difference)


def retried_with_warnings(check: Callable[[str], Outcome], level: str) -> Outcome:
    """Return the outcome of ``check`` at deterministic ``level``, or at level ``warn`` if torch refuses an op at level
    ``on``.

    The outcome then names the op, which has no deterministic implementation.
    """
    outcome, refused = again_with_warnings(check, level)
    return replace(outcome, nondeterministic_op=refused) if refused else outcome


class _AtLevel(Protocol):
    """What came of something at a deterministic level."""

    @property
    def failure(self) -> Failure | None: ...

    @property
    def deterministic(self) -> str: ...


_Made = TypeVar("_Made", bound=_AtLevel)


def again_with_warnings(make: Callable[[str], _Made], level: str) -> tuple[_Made, str]:
    """Call ``make`` at deterministic ``level``, or at level ``warn`` if torch refuses an op at level ``on``; return its
    result and this op, or ""."""
    made = make(level)
    refused = made.failure.nondeterministic_op if made.failure is not None else ""
    if not refused or made.deterministic != "on":
        return made, ""
    return make("warn"), refused


def with_facts(outcome: Outcome, first: Run) -> Outcome:
    """Add the facts of the first run to the outcome."""
    outcome = replace(
        outcome,
        runs=1,
        settings_changed=first.settings_changed,
        compiled=first.compiled,
        not_compared=first.not_compared,
    )
    if first.recorded is None:
        return outcome
    dependent = () if first.tracer == "native" or first.trace is None else mode_dependent(first.trace)
    return replace(outcome, ops=first.ops, perturbed_ops=join_limited(dependent))


def _ended(outcome: Outcome, failure: Failure, number: int) -> Outcome:
    return replace(outcome, accuracy=failed_status(failure, number=2), runs=number, failure=failure)
