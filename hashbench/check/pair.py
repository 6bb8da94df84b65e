"""Repeated runs of one thing, compared bit by bit and, where they differ, diagnosed; and the row of their outcome."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Protocol, TypeVar

import torch

from hashbench.catalog import Confidence, Status
from hashbench.causes import stats
from hashbench.check.stress import Stress, latent_outcome
from hashbench.diagnose import driver, fresh_process
from hashbench.divergence import find as find_divergence
from hashbench.errors import ran_out_of_memory
from hashbench.io import replace_file
from hashbench.processes import peak_memory_mib, tell_phase
from hashbench.records import (
    Decision,
    Diagnosis,
    Divergence,
    Evidence,
    ExperimentResult,
    Failure,
    ModelSpec,
    Rate,
    Row,
    RowEvidence,
    RunCounts,
    RunOptions,
    op_of,
)
from hashbench.results.folder import ResultsFolder, file_key
from hashbench.results.rows import row_to_json
from hashbench.run import outputs
from hashbench.run.leaves import NotComparableError
from hashbench.run.outcome import (
    Attempt,
    Outcome,
    Run,
    confirmation,
    difference_between,
    failed_status,
    failure_of,
    fingerprint,
    log_error,
    peak_mib,
    replaces,
    results_that_differ,
)
from hashbench.text import a_few
from hashbench.trace import file
from hashbench.trace.op_schema import mode_dependent
from hashbench.trace.tracer import choose

CONFIRMING_PAIRS = 3
"""How often a difference is looked for again with inputs hashed before it is called rare."""


def _as_it_is(outcome: Outcome) -> Outcome:
    return outcome


@dataclass(frozen=True, slots=True)
class PairCheck:
    """Compares repeated runs and finds out why they differ.

    It serves models, functions and PyTorch's own harness, which differ in how one run is made. Each stage takes the
    outcome so far and returns the outcome with what it found out.

    Args:
        attempt: makes one run from the reset state.
        options: the budget of the diagnosis, and whether an untraced pair is compared too.
        level: the deterministic level that is in force.
        runs: how many are compared with the first.
        numbered: makes the run of this number, from 1, among those that are compared; default: ``attempt``.
        spec, target: how a fresh process builds the same thing again; see
            :func:`~hashbench.diagnose.fresh_process.fresh_traces`.
        iterations: of each run, for the row.
        same_structure: results of another structure are a difference, not results that cannot be compared.
        loading_seconds: what it took to make what is run, which is part of what a stressed check is measured by.
        drafted: what is written down of an outcome before the cause is looked for.
    """

    attempt: Attempt
    options: RunOptions
    level: str
    runs: int = 2
    numbered: Callable[[int], Run | Failure] | None = None
    spec: ModelSpec | None = None
    target: str = fresh_process.DEFAULT_TARGET
    iterations: int | None = None
    same_structure: bool = False
    loading_seconds: float = 0.0
    drafted: Callable[[Outcome], Outcome] = _as_it_is

    def run(self) -> Outcome:
        """All stages in their order."""
        began = time.perf_counter()
        outcome = self.repeat()
        outcome = self.stress(outcome, seconds=self.loading_seconds + time.perf_counter() - began)
        outcome = self.confirm(outcome)
        outcome = self.compare_untraced(outcome)
        return self.diagnose(outcome)

    # ------------------------------------------------------------------------------------------------- stages

    def repeat(self) -> Outcome:
        """The outcome of ``runs`` traced runs, each compared with the first."""
        tracer = choose(self.options.tracer).tracer
        outcome = Outcome(Status.PASS, self.level, iterations=self.iterations, tracer=tracer)
        first = self._numbered(1)
        if isinstance(first, Failure):
            return replace(outcome, accuracy=failed_status(first, number=1), failure=first)
        outcome = with_facts(outcome, first)
        if self.options.stress:
            outcome = replace(outcome, first=first)
        fingerprints = [fingerprint(first)]
        for number in range(2, self.runs + 1):
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
                    same_structure=self.same_structure,
                    keep_traces=self.options.keep_traces,
                )
            except Exception as error:
                if not ran_out_of_memory(error):
                    raise
                log_error("comparing two runs failed")
                return _ended(outcome, failure_of(error), number)
        differing = sum(other != fingerprints[0] for other in fingerprints)
        return replace(outcome, run_counts=RunCounts(len(fingerprints) - 1, differing, distinct=len(set(fingerprints))))

    def confirm(self, outcome: Outcome) -> Outcome:
        """The outcome with the verdict of pairs with every input hashed around every op, which shows what bypassed the
        dispatcher.

        Their verdict replaces a plain one that blames a kernel, since it can tell a kernel from memory that was changed
        under it, and one that blames a view or a tensor where what was read through it turns out equal. Any other plain
        verdict rests on what both runs show directly, and on the first run of the process, which is special where a
        state survives: it stays.
        """
        if outcome.accuracy != Status.TWO_RUNS_DIFFER:
            return outcome
        self._keep_draft(outcome)
        for number in range(1, CONFIRMING_PAIRS + 1):
            tell_phase(f"confirming pair {number}")
            first, second = (self.attempt(diagnosing=True) for _ in range(2))
            if isinstance(first, Failure) or isinstance(second, Failure) or first.trace is None or second.trace is None:
                return replace(outcome, confirmed="no: a further run failed")
            try:
                names = results_that_differ(first, second)
            except NotComparableError as error:
                return replace(outcome, confirmed=f"yes, in another way: {error}")
            if not names:
                continue
            traces = (first.trace, second.trace)
            verdict = find_divergence(*traces, differing=names)
            confirmed = confirmation(outcome.verdict, verdict, pairs=number)
            if not replaces(verdict, outcome.verdict, traces):
                return replace(outcome, confirmed=confirmed)
            return replace(outcome, verdict=verdict, confirmed=confirmed, benign=verdict.benign, traces=traces)
        return replace(outcome, confirmed=f"no: {CONFIRMING_PAIRS} further pairs agreed")

    def stress(self, outcome: Outcome, *, seconds: float) -> Outcome:
        """The outcome with what pairs under circumstances that must not matter say, where that is asked for and the
        plain pair, which took so many ``seconds``, agrees. It still passes where one of them differs."""
        first = outcome.first
        outcome = replace(outcome, first=None)
        if not self.options.stress or outcome.accuracy != Status.PASS or first is None or first.recorded is None:
            return outcome
        self._keep_draft(outcome)
        stress = Stress(
            self.attempt,
            self.options,
            self.level,
            first=first,
            seconds=seconds,
            spec=self.spec,
            target=self.target,
        )
        provoked = stress.look()
        outcome = replace(outcome, stressed=stress.results())
        if provoked is None:
            return outcome

        def drafted(latent: Outcome) -> Outcome:
            return self.drafted(replace(outcome, circumstance=provoked.name, latent=latent))

        def explain(make: Attempt, again: Attempt, found: Outcome) -> Outcome:
            check = replace(self, attempt=make, drafted=drafted)
            confirmed = found if found.between_processes else check.confirm(found)
            return replace(check, attempt=again).diagnose(confirmed)

        circumstance, latent = latent_outcome(outcome, provoked, stress, explain)
        return replace(outcome, circumstance=circumstance, latent=latent)

    def compare_untraced(self, outcome: Outcome) -> Outcome:
        """The outcome with what two untraced runs say, where that is asked for and all runs succeeded."""
        if not self.options.untraced_pair or outcome.run_counts is None:
            return outcome
        tell_phase("untraced pair")
        first, second = (self.attempt(traced=False) for _ in range(2))
        traced = self.attempt()
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

    def diagnose(self, outcome: Outcome) -> Outcome:
        """The outcome with the cause of the difference, where there is one and a budget to look for it. A diagnosis
        that fails is part of the outcome.

        Raises:
            OSError: the results folder cannot be written to, which ends a sweep.
        """
        if outcome.accuracy != Status.TWO_RUNS_DIFFER or self.options.diagnose_budget <= 0:
            return outcome
        self._keep_draft(outcome)
        case = driver.Case(self.attempt, self.options, outcome, spec=self.spec, target=self.target)
        try:
            return replace(outcome, diagnosis=driver.diagnose(case))
        except OSError:
            raise
        except Exception as error:
            log_error("the diagnosis failed")
            failed = Decision("unknown", Confidence.OPEN, f"the diagnosis failed: {type(error).__name__}: {error}", "")
            return replace(outcome, diagnosis=Diagnosis(failed, Evidence(origin="")))

    def _keep_draft(self, outcome: Outcome) -> None:
        if self.spec is not None:
            keep_draft(self.spec, self.options, self.drafted(outcome))

    def _numbered(self, number: int) -> Run | Failure:
        tell_phase(f"run {number} of {self.runs}")
        return self.attempt() if self.numbered is None else self.numbered(number)


def keep_draft(spec: ModelSpec, options: RunOptions, outcome: Outcome) -> None:
    """Write down what is known by now: a further run that ends this process must not take it along."""
    folder = ResultsFolder(Path(options.output))
    if not options.output or not folder.rows.is_dir():
        return
    key = file_key(suite=spec.suite, mode=options.mode, name=spec.name)
    row = row_of(spec, options, outcome, seconds=None)
    replace_file(folder.draft_path(key), json.dumps(row_to_json(row)))


def compared(
    outcome: Outcome,
    first: Run,
    other: Run,
    *,
    number: int = 2,
    same_structure: bool = False,
    keep_traces: bool = False,
) -> Outcome:
    """The outcome with run ``number`` compared with the first. The first pair that differs is described; with
    ``same_structure``, results of another structure are a difference, too. The traces of runs that are known to agree
    are made only where they are to be kept."""
    changed = tuple(dict.fromkeys((*outcome.settings_changed, *other.settings_changed)))
    compiled = tuple(dict.fromkeys((*outcome.compiled, *other.compiled)))
    outcome = replace(outcome, runs=number, settings_changed=changed, compiled=compiled)
    if outcome.accuracy != Status.PASS or first.recorded is None or other.recorded is None:
        return outcome
    outcome = replace(outcome, tracer=first.tracer)
    difference, incomparable = None, None
    try:
        difference = difference_between(first, other)
    except NotComparableError as error:
        incomparable = error
    if difference is None and incomparable is None and not keep_traces and first.agrees_with(other):
        return replace(outcome, benign=outcome.benign or ())
    assert first.trace is not None
    assert other.trace is not None
    traces = (first.trace, other.trace)
    if incomparable is not None:
        verdict = find_divergence(*traces)
        outcome = replace(outcome, verdict=verdict, benign=verdict.benign, traces=traces)
        if same_structure:
            difference = outputs.Difference((f"their structure: {incomparable}",))
            return replace(outcome, accuracy=Status.TWO_RUNS_DIFFER, difference=difference)
        failure = Failure(f"the results of two runs cannot be compared: {incomparable}")
        return replace(outcome, accuracy=Status.NOT_COMPARABLE, failure=failure)
    verdict = find_divergence(*traces, differing=() if difference is None else difference.names)
    if difference is None:
        benign = tuple(dict.fromkeys((*(outcome.benign or ()), *verdict.benign)))
        return replace(outcome, benign=benign, traces=traces)
    outcome = replace(outcome, verdict=verdict, benign=verdict.benign, traces=traces)
    return replace(outcome, accuracy=Status.TWO_RUNS_DIFFER, difference=difference)


def retried_with_warnings(check: Callable[[str], Outcome], level: str) -> Outcome:
    """The outcome of ``check`` at deterministic ``level``. Where torch refuses an op at level ``on`` for having no
    deterministic implementation, that at level ``warn``, which names the op."""
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
    """What ``make`` gives at deterministic ``level``, or, where torch refuses an op at level ``on``, at level ``warn``;
    and this op, or nothing."""
    made = make(level)
    refused = made.failure.nondeterministic_op if made.failure is not None else ""
    if not refused or made.deterministic != "on":
        return made, ""
    return make("warn"), refused


def with_facts(outcome: Outcome, first: Run) -> Outcome:
    """The outcome with what its first run says of itself."""
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
    return replace(outcome, ops=first.ops, perturbed_ops=a_few(dependent))


def _ended(outcome: Outcome, failure: Failure, number: int) -> Outcome:
    return replace(outcome, accuracy=failed_status(failure, number=2), runs=number, failure=failure)


# ------------------------------------------------------------------------------------------------------- the row


def row_of(spec: ModelSpec, options: RunOptions, outcome: Outcome, *, seconds: float | None) -> Row:
    """The row of an outcome; ``seconds`` are those of the model's load, runs and experiments, where they have ended.

    Traces are written to the results folder: of runs that differ or failed, and of others where that is asked for.
    """
    traces: list[str] = []
    if options.output and (outcome.accuracy != Status.PASS or options.keep_traces):
        key = file_key(suite=spec.suite, mode=options.mode, name=spec.name)
        for number, trace in enumerate(outcome.traces, start=1):
            traces.append(f"traces/{key}.run{number}.log")
            file.write(trace, Path(options.output) / traces[-1])
    divergence = outcome.verdict.divergence if outcome.verdict is not None else None
    difference = outcome.difference
    on_device = peak_mib(torch.device(options.device))
    row = Row(
        dev=options.device,
        name=spec.name,
        batch_size=options.batch_size_of(spec),
        accuracy=outcome.accuracy,
        suite=spec.suite,
        mode=options.mode,
        dtype=options.dtype_column,
        iterations=outcome.iterations,
        runs=outcome.runs or None,
        threads=(options.threads or torch.get_num_threads()) if outcome.runs else None,
        deterministic=outcome.deterministic,
        nondeterministic_op=outcome.nondeterministic_op,
        ops=outcome.ops,
        benign=None if outcome.benign is None else len(outcome.benign),
        benign_ops=_op_names(outcome.benign or ()),
        confirmed=outcome.confirmed,
        untraced=outcome.untraced,
        tracer=outcome.tracer,
        perturbed_ops=outcome.perturbed_ops,
        settings_changed="; ".join(outcome.settings_changed),
        not_compared=a_few(outcome.not_compared),
        compiled=f"ran eagerly: {a_few(outcome.compiled)}" if outcome.compiled else "",
        traces=" ".join(traces),
        seconds=None if seconds is None else round(seconds, 3),
        peak_memory_mib=round(peak_memory_mib(), 1),
        device_memory_mib=None if on_device is None else round(on_device, 1),
        error=outcome.failure.error if outcome.failure is not None else "",
    )
    if difference is not None:
        row = replace(
            row,
            differing_results=a_few(difference.names),
            differing_elements=difference.elements,
            max_abs_diff=stats.significant(difference.max_abs),
            max_ulp=difference.max_ulp,
            mean_relative_variability=stats.significant(difference.mean_relative),
            count_variability=stats.significant(difference.share),
            representation=difference.representation,
        )
    row = _with_rate(row, stats.rate_of_runs(outcome.run_counts))
    if outcome.diagnosis is not None:
        row = _with_diagnosis(row, outcome.diagnosis)
    if (batch := outcome.batch) is not None:
        row = replace(
            row,
            batch_size=batch.batch or row.batch_size,
            company=batch.company,
            batch_sizes=" ".join(map(str, batch.sizes)),
            smallest_batch=batch.smallest,
            shapes=batch.shapes,
            reference_shapes=batch.reference_shapes,
            not_attributable=batch.not_attributable,
        )
    if outcome.stressed:
        row = replace(row, stressed=_stressed_text(outcome.stressed))
    if outcome.latent is not None:
        row = _with_latent(row, outcome.circumstance, outcome.latent)
    return row if divergence is None else _with_divergence(row, divergence)


def _with_rate(row: Row, rate: Rate | None) -> Row:
    if rate is None:
        return row
    return replace(
        row,
        distinct=rate.distinct,
        trials=rate.trials,
        rate_of=rate.of,
        rate=stats.significant(rate.share, stats.RATE_DIGITS),
        rate_low=stats.significant(rate.low),
        rate_high=stats.significant(rate.high),
    )


def _with_diagnosis(row: Row, diagnosis: Diagnosis) -> Row:
    facts, price = diagnosis.evidence.call, diagnosis.deterministic_price
    return replace(
        _with_rate(row, diagnosis.rate),
        **asdict(diagnosis.decision),
        evidence=RowEvidence.of(diagnosis.evidence.arms),
        other_sources="; ".join(diagnosis.other_sources),
        capture=facts.limits if facts is not None else "",
        deterministic_doc=diagnosis.deterministic_doc,
        deterministic_here=diagnosis.deterministic_here,
        deterministic_price=stats.significant(price),
        repro=diagnosis.repro,
        reproduced=diagnosis.reproduced,
    )


def _stressed_text(results: Sequence[ExperimentResult]) -> str:
    """``threads 0/4; process not run (timeout)``"""
    return "; ".join(result.word().partition("/")[2] for result in results)


def _with_latent(row: Row, circumstance: str, latent: Outcome) -> Row:
    """The row with what a stressed pair that differs showed: in columns of its own, and in those that only a diagnosis
    fills (evidence, advice, repro)."""
    divergence = latent.verdict.divergence if latent.verdict is not None else None
    (counts,) = latent.stressed
    row = replace(
        row,
        latent=circumstance,
        latent_kernel="" if divergence is None else divergence.kernel,
        latent_module="" if divergence is None else divergence.module,
        latent_phase="" if divergence is None else divergence.phase,
        latent_rate=stats.significant(counts.differing / counts.trials),
        confirmed=latent.confirmed,
    )
    diagnosis = latent.diagnosis
    if diagnosis is None:
        return row
    return replace(
        row,
        latent_cause=diagnosis.decision.cause,
        latent_confidence=diagnosis.decision.confidence,
        because=diagnosis.decision.because,
        advice=diagnosis.decision.advice,
        evidence=RowEvidence.of(diagnosis.evidence.arms),
        repro=diagnosis.repro,
        reproduced=diagnosis.reproduced,
    )


_OF_DIVERGENCE = ("origin", "kernel", "op_index", "phase", "iteration", "module", "forward_op", "source")
"""Columns that are fields of a divergence."""


def _with_divergence(row: Row, divergence: Divergence) -> Row:
    detail, steered, steering = divergence.detail, "", divergence.steered_by
    if divergence.inside:
        detail = f"inside {divergence.inside}: {detail}"
    if divergence.first or divergence.second:
        detail += f": {divergence.first} and {divergence.second}"
    if steering is not None:
        steered = f"{steering.record}: {steering.first} and {steering.second}"
        steered += f", from {steering.kernel}" if steering.kernel else ""
    same = {name: getattr(divergence, name) for name in _OF_DIVERGENCE}
    return replace(row, **same, detail=detail[:500], steered_by=steered)


def _op_names(nodes: Sequence[str]) -> str:
    """Names and counts of the ops of record ids, commonest first."""
    counts = Counter(map(op_of, nodes))
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return a_few([f"{name} ×{count}" if count > 1 else name for name, count in ordered])  # noqa: RUF001
