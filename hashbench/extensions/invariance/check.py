"""Check an invariance: compare the items or tokens of a reference run with those of its variants. With
``batch-invariance`` these are smaller and smaller batches, as in ``check_batch_invariance`` of PyTorch's
``benchmarks/dynamo`` (``--accuracy --batch-invariant``)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

import torch

from hashbench.core.catalog import INVARIANCES, InvarianceKind, Status
from hashbench.core.check.pair import with_facts
from hashbench.core.check.row import keep_draft
from hashbench.core.check.subject import Subject
from hashbench.core.errors import log_error, named_line
from hashbench.core.processes import older_objects_uncollected, tell_phase
from hashbench.core.records import BATCH_INVARIANCE, Failure, RunOptions
from hashbench.core.run.outcome import Outcome, Run
from hashbench.core.trace.callbacks import TraceCallback
from hashbench.extensions.invariance import invariance_cause
from hashbench.extensions.invariance.batch_items import differing_earlier
from hashbench.extensions.invariance.facts import BatchFacts
from hashbench.extensions.invariance.invariance_cause import VariantRuns
from hashbench.extensions.invariance.locate import RowsCompared, compare_rows, finding_of
from hashbench.extensions.invariance.rows import ShapeNotes
from hashbench.extensions.invariance.variants import NotApplicableError, Variant, variants_of

if TYPE_CHECKING:
    from hashbench.core.check.model import BenchmarkRunner
    from hashbench.core.run.workload import Workload

_Found = TypeVar("_Found")


def check_invariance(subject: Subject, options: RunOptions, level: str) -> Outcome:
    """Check the invariance of ``options`` at the deterministic ``level`` that is in force; a subject on which it cannot
    be checked is skipped."""
    try:
        variants = variants_of(subject, options.invariance)
    except NotApplicableError as error:
        counted = options.mode == BATCH_INVARIANCE and subject.batch is not None
        outcome = Outcome(Status.SKIPPED, level, iterations=subject.iterations, failure=Failure(str(error)))
        return outcome.having(batch_size=subject.batch) if counted else outcome
    return InvarianceCheck(subject, options, level, variants).run()


def check_model(
    runner: BenchmarkRunner,
    workload: Workload,  # noqa: ARG001 – the subject has all that is needed
    subject: Subject,
    level: str,
    optimizer: str,  # noqa: ARG001
) -> Outcome:
    """Check the invariance of a loaded model; a :class:`~hashbench.core.extensions.Check`."""
    return check_invariance(subject, runner.options, level)


@dataclass(frozen=True, slots=True)
class InvarianceCheck:
    """Compares a reference run with its variants, and finds out why one differs.

    Args:
        subject: what is run. ``subject.runs()`` is also how often a run that seems to differ is made at each of the two
            sizes: a model that differs from itself shows nothing about its variants.
        options: the mode, and the budget of the diagnosis.
        level: the deterministic level in force.
        variants: in the order in which they are compared, the largest first, all of one reference.
    """

    subject: Subject
    options: RunOptions
    level: str
    variants: Sequence[Variant]

    def run(self) -> Outcome:
        """Return the outcome: the first variant that differs, if any."""
        with older_objects_uncollected():
            return self._checked()

    @property
    def _invariance(self) -> InvarianceKind:
        return INVARIANCES[self.options.mode]

    def _checked(self) -> Outcome:
        first, noted = self.variants[0], ShapeNotes()
        batch = first.subset.batch
        outcome = Outcome(Status.PASS, self.level, iterations=self.subject.iterations)
        outcome = outcome.having(
            BatchFacts(compared_with=first.words), batch_size=None if first.subset.together else batch
        )
        reference = self._compared_run(first, batch, noted)
        if isinstance(reference, Failure):
            return replace(outcome, accuracy=_failed(reference, Status.REFERENCE_FAIL), failure=reference)
        outcome = replace(with_facts(outcome, reference), tracer=reference.tracer)
        if why_not := first.why_not(reference.results):
            return _skipped(outcome, why_not)
        compared, first_runs = 0, None
        for variant in self.variants:
            size = variant.subset.asked
            other = self._compared_run(variant, size)
            if isinstance(other, Failure):
                return replace(outcome, accuracy=_failed(other, self._invariance.fails.at(size)), failure=other)
            runs = VariantRuns(self.subject, self.options, variant, reference, other, noted.shapes)
            try:
                found = variant.compare(*runs.outputs)
            except torch.OutOfMemoryError as error:
                log_error("comparing two batches failed")
                return replace(outcome, accuracy=Status.OOM, failure=Failure(str(error), out_of_memory=True))
            compared += found.compared
            left_out = tuple(dict.fromkeys((*outcome.not_compared, *found.left_out)))
            outcome = replace(outcome, runs=outcome.runs + 1, not_compared=left_out)
            if not variant.words:
                facts = outcome.of(BatchFacts)
                outcome = outcome.having(replace(facts, batch_sizes=f"{facts.batch_sizes} {size}".lstrip()))
            if found.difference is not None:
                return self._explained(replace(outcome, difference=found.difference), runs)
            first_runs = first_runs or runs
        if not compared or first_runs is None:
            missing = (
                "a dimension of tokens" if first.subset.together else f"the batch of {batch} as its first dimension"
            )
            return _skipped(outcome, f"no output has {missing}")
        return _with_benign(outcome, first_runs)

    def _compared_run(self, variant: Variant, size: int, watcher: TraceCallback | None = None) -> Run | Failure:
        """Make a run whose results are compared; what it raises is told which run it was."""
        tell_phase(variant.said(size))
        try:
            return self.subject.attempt(variant.given(size), number=1, watcher=watcher)
        except Exception as error:
            run = f"comparing {variant.words}" if variant.words else f"with {size} of {variant.subset.batch} items"
            error.add_note(f"(hashbench: {run})")
            raise

    def _explained(self, outcome: Outcome, runs: VariantRuns) -> Outcome:
        """Explain a variant that differs: skip the model if two runs of one size differ, else find the kernel and the
        cause. A failed search is part of the outcome.

        Raises:
            OSError: the results folder cannot be written to, which ends a sweep.
        """
        assert outcome.difference is not None
        subset = runs.variant.subset
        names = differing_earlier(outcome.difference.names, runs.reference, runs.other, runs.variant.rows)
        tell_phase("looking for the kernel")
        rows = _rows(runs, names)
        outcome, why_not = self._repeated(outcome, runs, () if isinstance(rows, Failure) else rows.runs)
        if why_not:
            return _skipped(replace(outcome, difference=None), why_not)
        kept = (runs.reference, runs.other) if self.options.keep_traces else ()
        traces = tuple(run.trace for run in kept if run.trace is not None)
        outcome = replace(outcome, accuracy=self._invariance.differs.at(subset.asked), traces=traces)
        keep_draft(self.subject.spec, self.options, outcome)
        if isinstance(rows, Failure):
            return invariance_cause.unexplained(outcome, rows.error)
        found = _searched(lambda: invariance_cause.earlier(runs, finding_of(runs.watched, rows)))
        if isinstance(found, Failure):
            return invariance_cause.unexplained(outcome, found.error)
        outcome = invariance_cause.with_finding(outcome, found, runs)
        explained = _searched(lambda: invariance_cause.explained(outcome, runs, rows, found))
        return invariance_cause.unexplained(outcome, explained.error) if isinstance(explained, Failure) else explained

    def _repeated(self, outcome: Outcome, runs: VariantRuns, again: Sequence[Run]) -> tuple[Outcome, str]:
        """Repeat the two runs; return the outcome, with the runs counted, and why no variant can be blamed: runs of one
        size differ, or fail. ``again`` are further runs that were made anyhow, one of each size."""
        subset = runs.variant.subset
        for place, (first, size) in enumerate(((runs.reference, subset.batch), (runs.other, subset.asked))):
            same = f"{abs(size)} {runs.variant.unit}"
            for number in range(self.subject.runs() - 1):
                further = again[place] if again and not number else runs.made_again(size)
                if isinstance(further, Failure):
                    return outcome, f"a further run of {same} failed: {further.error}"
                outcome = replace(outcome, runs=outcome.runs + 1)
                each, other = (self.subject.outputs(run) for run in (first, further))
                if runs.variant.compare_alike(each, other, size).difference is not None:
                    blamed = "context" if subset.together else "batch"
                    return outcome, (
                        f"two runs of the same {same} differ, whatever the {blamed}: run the model without "
                        "--batch-invariant first"
                    )
        return outcome, ""


def _with_benign(outcome: Outcome, runs: VariantRuns) -> Outcome:
    """Add the kernels that differ without effect on an output, for a model whose outputs agree."""
    tell_phase("kernels that differ")
    rows = _rows(runs)
    return outcome if isinstance(rows, Failure) else replace(outcome, benign=rows.comparison.benign)


def _rows(runs: VariantRuns, names: Sequence[str] = ()) -> RowsCompared | Failure:
    search = functools.partial(compare_rows, runs.watched, runs.variant.subset, names, plain=runs.plain)
    return _searched(search, "comparing what kernels left")


def _searched(search: Callable[[], _Found | Failure], what: str = "looking for the kernel") -> _Found | Failure:
    """Return what a search finds; a :class:`Failure` if it raises."""
    try:
        return search()
    except Exception as error:
        log_error(f"{what} failed")
        return Failure(f"looking for the kernel failed: {named_line(error)}")


def _failed(failure: Failure, otherwise: str) -> str:
    if failure.not_comparable:
        return Status.NOT_COMPARABLE
    return Status.OOM if failure.out_of_memory else otherwise


def _skipped(outcome: Outcome, why: str) -> Outcome:
    return replace(outcome, accuracy=Status.SKIPPED, failure=Failure(why))
