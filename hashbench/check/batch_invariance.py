"""Compare the items of a batch with those of smaller batches: one model run at N, N/2 … 1 items, as
``check_batch_invariance`` of PyTorch's ``benchmarks/dynamo`` does with ``--accuracy --batch-invariant``; and tokens in
the two runs of a :class:`~hashbench.check.token_invariance.Pair`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

from hashbench.batch.call_pair import diagnose
from hashbench.batch.cause import DRAW_APART, ItemEvidence, advice_for, decide
from hashbench.batch.finding import BatchFinding
from hashbench.batch.item_call import ItemCall
from hashbench.batch.layout import ItemSubset
from hashbench.batch.locate import PlainRuns, RowsCompared, compare_rows, finding_of
from hashbench.batch.neighbours import RunBeside, diagnose_runs
from hashbench.batch.repro import run_item_repro, write_item_repro, write_part_repro
from hashbench.batch.rows import ShapeNotes
from hashbench.catalog import Confidence, Origin, Status
from hashbench.check.batch_items import compare_items, differing_earlier, halves, outputs_of
from hashbench.check.pair import with_facts
from hashbench.check.row import keep_draft
from hashbench.check.token_invariance import Pair
from hashbench.errors import HashbenchError, named_line
from hashbench.processes import older_objects_uncollected, tell_phase
from hashbench.records import (
    Decision,
    Diagnosis,
    Divergence,
    Evidence,
    Failure,
    ModelSpec,
    RunOptions,
    Trace,
    Verdict,
)
from hashbench.repro import REPRO_SECONDS
from hashbench.results.folder import file_key
from hashbench.run import outputs
from hashbench.run.outcome import BatchFacts, Outcome, Run, log_error
from hashbench.trace.callbacks import TraceCallback

RunAt = RunBeside
"""Makes one run of the first ``size`` items from the reset state; see :class:`~hashbench.run.outcome.Attempt`."""


@dataclass(frozen=True, slots=True)
class BatchCheck:
    """Compares single items in batches of several sizes, or tokens in the two runs of a pair.

    Args:
        run_at: makes one run.
        batch: the items of the full batch, 2 or more.
        options: the budget of the diagnosis.
        level: the deterministic level in force.
        runs: how often a run that seems to differ is made at each of the two sizes: a model that differs from itself
            shows nothing about the batch.
        iterations: of each run, for the row.
        sizes: batch sizes that are compared with the full batch, in this order; none: its halves.
        outputs: returns what a run returned, by name; a cache is not compared.
        spec: the model, if a draft is kept before the kernel is looked for.
        pair: the two runs of tokens; ``batch`` and ``sizes`` then count tokens.
        runs_of: makes the runs of another pair of this model.
    """

    run_at: RunAt
    batch: int
    options: RunOptions
    level: str
    runs: int = 2
    iterations: int | None = None
    sizes: tuple[int, ...] = ()
    outputs: Callable[[Run], Mapping[str, Any]] = outputs_of
    spec: ModelSpec | None = None
    pair: Pair | None = None
    runs_of: Callable[[Pair], RunAt] | None = None

    def run(self) -> Outcome:
        """Return the outcome: the largest smaller batch whose items differ, if any."""
        with older_objects_uncollected():
            return self._checked()

    def _checked(self) -> Outcome:
        outcome = Outcome(Status.PASS, self.level, iterations=self.iterations, batch=self._facts())
        noted = ShapeNotes()
        reference = self._run(self.batch, noted)
        if isinstance(reference, Failure):
            return replace(outcome, accuracy=_failed(reference, Status.REFERENCE_FAIL), failure=reference)
        outcome = replace(with_facts(outcome, reference), tracer=reference.tracer)
        if self.pair is not None and (why_not := self.pair.why_not(reference.results)):
            return _skipped(outcome, why_not)
        known, left_out, compared = self._compared(reference), dict.fromkeys(outcome.not_compared), 0
        largest: tuple[int, Run] | None = None
        for size in self.sizes or halves(self.batch):
            small = self._run(size)
            if isinstance(small, Failure):
                fails = Status.BATCH_RUN_FAIL.at(size) if self.pair is None else Status.INVARIANCE_RUN_FAIL
                return replace(outcome, accuracy=_failed(small, fails), failure=small)
            try:
                rows = None if self.pair is None else self.pair.rows
                found = compare_items(known, self._compared(small), batch=self.batch, size=size, rows=rows)
            except torch.OutOfMemoryError as error:
                log_error("comparing two batches failed")
                return replace(outcome, accuracy=Status.OOM, failure=Failure(str(error), out_of_memory=True))
            compared += found.compared
            left_out.update(dict.fromkeys(found.left_out))
            sizes = (*(outcome.batch.sizes if outcome.batch else ()), size)
            outcome = replace(
                outcome,
                runs=outcome.runs + 1,
                not_compared=tuple(left_out),
                batch=self._facts(sizes),
            )
            if found.difference is not None:
                return self._differs(outcome, reference, small, noted, found.difference)
            largest = max(largest, (size, small), key=itemgetter(0)) if largest is not None else (size, small)
        if not compared or largest is None:
            of_tokens = self.pair is not None and self.pair.subset.together
            missing = "a dimension of tokens" if of_tokens else f"the batch of {self.batch} as its first dimension"
            return _skipped(outcome, f"no output has {missing}")
        return self._with_benign(outcome, largest[0], _plain_runs(reference, largest[1], noted))

    def _facts(self, sizes: tuple[int, ...] = ()) -> BatchFacts:
        if self.pair is None:
            return BatchFacts(self.batch, sizes)
        return BatchFacts(0 if self.pair.subset.together else self.batch, compared=self.pair.words)

    def _compared(self, run: Run) -> Mapping[str, Any]:
        """Return the compared results of a run, by name."""
        return self.outputs(run) if self.pair is None else self.pair.without_cache(self.outputs(run))

    def _subset(self, size: int) -> ItemSubset:
        return ItemSubset(self.batch, size) if self.pair is None else self.pair.subset

    @property
    def _unit(self) -> str:
        return "items" if self.pair is None else self.pair.unit

    # ---------------------------------------------------------------------------------------- which kernel, and why

    def _differs(self, outcome: Outcome, reference: Run, small: Run, noted: ShapeNotes, difference: Any) -> Outcome:
        """Explain a smaller batch that differs: skip the model if two runs of one size differ, else find the kernel and
        the cause.

        A failed search is part of the outcome. The first iteration in which an output differs is looked at, too.

        Raises:
            OSError: the results folder cannot be written to, which ends a sweep.
        """
        assert outcome.batch is not None
        size = outcome.batch.sizes[-1] if self.pair is None else self.pair.subset.asked
        names: Sequence[str] = difference.names
        if self.pair is None:
            names = differing_earlier(names, reference, small, batch=self.batch, size=size)
        tell_phase("looking for the kernel")
        rows: RowsCompared | Failure
        try:
            plain = _plain_runs(reference, small, noted)
            rows = compare_rows(self._watched, self._subset(size), names, plain=plain)
        except Exception as error:
            log_error("comparing what kernels left failed")
            rows = Failure(f"looking for the kernel failed: {named_line(error)}")
        again = () if isinstance(rows, Failure) else rows.runs
        outcome, why_not = self._repeated(outcome, ((reference, self.batch), (small, size)), again)
        if why_not:
            return _skipped(outcome, why_not)
        kept = (reference, small) if self.options.keep_traces else ()
        traces = tuple(run.trace for run in kept if run.trace is not None)
        accuracy = Status.BATCH_DIFFERS.at(size) if self.pair is None else self.pair.differs
        outcome = replace(outcome, accuracy=accuracy, difference=difference, traces=traces)
        if self.spec is not None:
            keep_draft(self.spec, self.options, outcome)
        if isinstance(rows, Failure):
            return _unexplained(outcome, rows.error)
        try:
            found = self._earlier(finding_of(self._watched, rows))
            if isinstance(found, Failure):
                return _unexplained(outcome, f"a further run failed: {found.error}")
            outcome = with_finding(outcome, found, reference.trace, unit=self._unit)
            return self._by_padding(self._diagnosed(outcome, found, rows), reference, small)
        except Exception as error:
            log_error("looking for the kernel failed")
            return _unexplained(outcome, f"looking for the kernel failed: {named_line(error)}")

    def _earlier(self, found: BatchFinding | Failure) -> BatchFinding | Failure:
        """Return the finding; if it names no kernel, the one by which the cache that the other run started from
        differs."""
        before = None if self.pair is None else self.pair.before
        if isinstance(found, Failure) or found.kernel or before is None or self.runs_of is None:
            return found
        run_before = self.runs_of(before)

        def watched(size: int, watcher: TraceCallback) -> Run | Failure:
            return run_before(size, watcher=watcher)

        rows = compare_rows(watched, before.subset)
        if isinstance(rows, Failure):
            return found
        whole, part = map(self.outputs, rows.runs)
        at = before.subset
        difference = compare_items(whole, part, batch=at.batch, size=at.size, rows=before.rows).difference
        if difference is None:
            return found
        comparison = replace(rows.comparison, differing=difference.names)
        earlier = finding_of(watched, replace(rows, comparison=comparison))
        if isinstance(earlier, Failure) or not earlier.kernel:
            return found
        where = f"in the run of {earlier.size} tokens that made the cache"
        return replace(earlier, detail="; ".join(filter(None, (where, earlier.detail))))

    def _by_padding(self, outcome: Outcome, reference: Run, small: Run) -> Outcome:
        """Add the effect of other tokens in the padding to the outcome.

        For a kernel whose experiments show nothing it decides the cause: if they change the unmasked tokens, they leak
        into them (by the mask, or by sorting by expert); if not, a kernel of equal inputs rounds by their number.
        """
        pair, diagnosis = self.pair, outcome.diagnosis
        if pair is None or pair.filled is None or self.runs_of is None or diagnosis is None:
            return outcome
        filled = self.runs_of(replace(pair, reference=pair.filled))(pair.subset.batch)
        if isinstance(filled, Failure):
            return outcome
        outcome = replace(outcome, runs=outcome.runs + 1)
        known, cause = diagnosis.decision, diagnosis.decision.cause
        difference = outputs.compare(
            *(pair.kept(self._compared(run), self._compared(small)) for run in (reference, filled))
        )
        if difference is None:
            seen, found = "other tokens in the padding change nothing", "shape_dependent_kernel"
        else:
            by = f" by at most {difference.max_abs:.3g}" if difference.max_abs is not None else ""
            seen, found = f"other tokens in the padding change the others{by}", "batch_coupling"
        decision = replace(known, because="; ".join(filter(None, (known.because, seen))))
        if cause == "unknown" and outcome.verdict is not None:
            decision = replace(decision, cause=found, confidence=Confidence.LIKELY, advice=advice_for(found))
        return replace(outcome, diagnosis=replace(diagnosis, decision=decision))

    def _repeated(self, outcome: Outcome, runs: Sequence[tuple[Run, int]], again: Sequence[Run]) -> tuple[Outcome, str]:
        """Repeat the two runs; return the outcome, with the runs counted, and why no batch can be blamed: runs of one
        size differ, or fail. ``again`` are further runs that were made anyhow, one of each size."""
        for place, (first, items) in enumerate(runs):
            for number in range(self.runs - 1):
                further = again[place] if again and not number else self._run(items)
                if isinstance(further, Failure):
                    return outcome, f"a further run of {abs(items)} {self._unit} failed: {further.error}"
                outcome = replace(outcome, runs=outcome.runs + 1)
                both = self._compared(first), self._compared(further)
                rows = None if self.pair is None else lambda *tensors: tensors
                if compare_items(*both, batch=items, size=items, rows=rows).difference is not None:
                    blamed = "batch" if self.pair is None or self.pair.subset.turned else "context"
                    return outcome, (
                        f"two runs of the same {abs(items)} {self._unit} differ, so that the {blamed} cannot be "
                        "blamed: sweep it without --batch-invariant"
                    )
        return outcome, ""

    def _diagnosed(self, outcome: Outcome, found: BatchFinding, rows: RowsCompared) -> Outcome:
        """Add the cause, if there is a budget to look for it."""
        if self.options.diagnose_budget <= 0 or outcome.batch is None or not found.kernel:
            return outcome
        together = self.pair is not None and self.pair.subset.together
        if (told := _proven_by_record(found, together=together)) is not None:
            return replace(outcome, diagnosis=told)
        if found.entry is not None:
            tell_phase("experiments on whole runs")
            repeated, budget = 2 * (self.runs - 1), self.options.diagnose_budget
            return _with_runs(outcome, diagnose_runs(self.run_at, rows, found.entry, repeated=repeated, budget=budget))
        tell_phase("experiments on the kernel's call")
        evidence = diagnose(found.call, found.pair, budget=self.options.diagnose_budget)
        coupled = found.coupled and (self.pair is None or self.pair.subset.turned)
        if evidence is None:
            why, no_repro = found.detail or "the call could not be captured", "no repro: it cannot be made again alone"
            return _unexplained(outcome, why, coupled=coupled, reproduced=no_repro)
        decision = decide(replace(evidence, moved=self._subset(found.size).turned))
        if decision.cause == "unknown" and coupled and not evidence.explained:
            decision = _seems_coupled(decision.because)
        diagnosis = Diagnosis(
            decision,
            Evidence(origin=Origin.KERNEL, arms=evidence.arms),
            other_sources=found.sources[1:] if self.options.all_sources else (),
        )
        diagnosis = self._with_repro(diagnosis, found)
        return replace(outcome, diagnosis=diagnosis, batch=replace(outcome.batch, smallest=evidence.smallest_batch))

    def _with_repro(self, diagnosis: Diagnosis, found: BatchFinding) -> Diagnosis:
        """Write a repro of the call in both batches, for torch alone, and run it once in a fresh process; see
        :mod:`hashbench.batch.repro`."""
        if self.spec is None or not self.options.output:
            return diagnosis
        name = f"repro/{file_key(suite=self.spec.suite, mode=self.options.mode, name=self.spec.name)}"
        folder = Path(self.options.output) / name
        seen_in = f"in the model {self.spec.name}"
        call: ItemCall | None = found.call
        as_parts = found.pair or call
        try:
            if as_parts is not None and (call is None or call.watched is not None):
                sizes = found.size, found.batch
                write_part_repro(folder, as_parts, diagnosis.decision, sizes=sizes, unit=self._unit, seen_in=seen_in)
            elif call is not None:
                chosen = range(found.size)[:: -1 if self._subset(found.size).turned else 1]
                first = None if found.pair is None else replace(found.pair.other, axes=call.axes)
                write_item_repro(folder, call, diagnosis.decision, chosen=chosen, first=first, seen_in=seen_in)
        except HashbenchError as error:  # OSError ends the sweep: its folder takes no more
            return replace(diagnosis, reproduced=f"no repro: {error}")
        tell_phase("running the repro")
        return replace(diagnosis, repro=name, reproduced=run_item_repro(folder, timeout=REPRO_SECONDS))

    def _with_benign(self, outcome: Outcome, size: int, plain: PlainRuns) -> Outcome:
        """Add the kernels that differ without effect on an output, for a model whose outputs agree."""
        tell_phase("kernels that differ")
        try:
            rows = compare_rows(self._watched, self._subset(size), plain=plain)
        except Exception:
            log_error("comparing what kernels left failed")
            return outcome
        return outcome if isinstance(rows, Failure) else replace(outcome, benign=rows.comparison.benign)

    def _watched(self, size: int, watcher: TraceCallback) -> Run | Failure:
        return self.run_at(size, watcher=watcher)

    def _run(self, size: int, watcher: TraceCallback | None = None) -> Run | Failure:
        tell_phase(f"a batch of {size}" if self.pair is None else f"{abs(size)} {self._unit}")
        return self.run_at(size, watcher=watcher)


def _plain_runs(reference: Run, small: Run, noted: ShapeNotes) -> PlainRuns:
    assert reference.trace is not None, "runs are traced"
    assert small.trace is not None, "runs are traced"
    return PlainRuns(reference.trace, small.trace, noted.shapes)


def _failed(failure: Failure, otherwise: str) -> str:
    if failure.not_comparable:
        return Status.NOT_COMPARABLE
    return Status.OOM if failure.out_of_memory else otherwise


def _skipped(outcome: Outcome, why: str) -> Outcome:
    return replace(outcome, accuracy=Status.SKIPPED, failure=Failure(why))


def skipped(level: str, why: str, *, batch: int | None, iterations: int | None) -> Outcome:
    """Return the outcome of a model that cannot be run with a smaller batch."""
    facts = None if batch is None else BatchFacts(batch)
    return _skipped(Outcome(Status.SKIPPED, level, iterations=iterations, batch=facts), why)


def with_finding(outcome: Outcome, found: BatchFinding, reference: Trace | None, *, unit: str = "items") -> Outcome:
    """Add a finding, as a divergence between the batch and a smaller one. ``reference`` is the trace of the batch."""
    facts = outcome.batch or BatchFacts(found.batch)
    facts = replace(facts, shapes=found.shapes, reference_shapes=found.reference_shapes)
    outcome = replace(outcome, batch=replace(facts, not_attributable=found.not_attributable), benign=found.benign)
    if not found.kernel:
        return _unexplained(outcome, found.detail)
    records = reference.records if reference is not None else ()
    place = next((place for place, record in enumerate(records) if record.id == found.record), None)
    divergence = Divergence(
        origin=Origin.KERNEL,
        node=found.record,
        kernel=found.kernel,
        op_index=place,
        phase="forward",
        iteration=None if place is None else records[place].iteration,
        module=found.module,
        forward_op="",
        detail="; ".join(filter(None, ("" if found.drawn or _is_view(found) else _how_far(found, unit), found.detail))),
        source=found.source_line,
    )
    names = outcome.difference.names if outcome.difference is not None else ()
    return replace(outcome, verdict=Verdict(names, divergence, found.benign))


def _proven_by_record(found: BatchFinding, *, together: bool) -> Diagnosis | None:
    """Return the diagnosis that the record of the call proves; ``None`` if experiments are needed."""
    if together and not found.shapes:
        decision = Decision("batch_coupling", Confidence.PROVEN, found.detail, advice_for("batch_coupling"))
        no_repro = "no repro: it reads no tensor, and its arguments are others"
    elif found.drawn:  # the states of the generators show it
        decision = Decision("batch_coupling", Confidence.PROVEN, found.detail, DRAW_APART)
        no_repro = "no repro: the kernel gives each item the same from one state of the generator, which is another"
    else:
        return None
    return Diagnosis(decision, Evidence(origin=Origin.KERNEL), reproduced=no_repro)


def _with_runs(outcome: Outcome, evidence: ItemEvidence) -> Outcome:
    """Add the cause that experiments on whole runs show."""
    assert outcome.batch is not None
    diagnosis = Diagnosis(
        decide(evidence),
        Evidence(origin=Origin.KERNEL, arms=evidence.arms),
        reproduced="no repro: it takes whole runs to show it",
    )
    return replace(outcome, diagnosis=diagnosis, batch=replace(outcome.batch, smallest=evidence.smallest_batch))


def _is_view(found: BatchFinding) -> bool:
    return found.entry is not None and not found.entry.node


def _how_far(found: BatchFinding, unit: str) -> str:
    """Format ``equal inputs of the same 4 items, and outputs that are at most 2 ULP, 1.2e-07 apart``."""
    by = found.difference
    ulp = f"{by.max_ulp} ULP" if by.max_ulp is not None else ""
    far = ", ".join(filter(None, (ulp, f"{by.max_abs:.3g}" if by.max_abs is not None else "")))
    apart = f"are at most {far} apart" if far else "differ"
    return f"equal inputs of the same {found.size} {unit}, and outputs that {apart}"


_LOOK = "Look at the line that calls it: what it leaves of an item may be computed from others on purpose"


def _unexplained(outcome: Outcome, why: str, *, coupled: bool = False, reproduced: str = "") -> Outcome:
    decision = _seems_coupled(why) if coupled else Decision("unknown", Confidence.OPEN, why, _LOOK)
    return replace(outcome, diagnosis=Diagnosis(decision, Evidence(origin=""), reproduced=reproduced))


def _seems_coupled(why: str) -> Decision:
    """Return a likely coupling that no experiment shows, but the call's inputs and outputs do: it reduces or reorders
    items, or is given their number."""
    because = f"by what it computes an item's rows follow from others, or from how many there are ({why})"
    return Decision("batch_coupling", Confidence.LIKELY, because, advice_for("batch_coupling"))
