"""Explain why the items or tokens of a variant differ: the kernel, the cause, the repro. Each function takes the two
runs and the outcome so far, and returns the outcome with what it found out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from hashbench.core.catalog import Confidence, Origin
from hashbench.core.check.subject import Subject
from hashbench.core.diagnose.repro import REPRO_SECONDS
from hashbench.core.errors import HashbenchError
from hashbench.core.processes import tell_phase
from hashbench.core.records import Decision, Diagnosis, Divergence, Evidence, Failure, RunOptions, Verdict
from hashbench.core.results.folder import file_key
from hashbench.core.run import outputs
from hashbench.core.run.outcome import Outcome, Run
from hashbench.core.trace.callbacks import TraceCallback
from hashbench.extensions.invariance.call_pair import diagnose
from hashbench.extensions.invariance.cause import DRAW_APART, DRAW_IN_EVAL, ItemEvidence, advice_for, decide
from hashbench.extensions.invariance.facts import BatchFacts
from hashbench.extensions.invariance.finding import BatchFinding, find_sources
from hashbench.extensions.invariance.locate import PlainRuns, RowsCompared, compare_rows, finding_of
from hashbench.extensions.invariance.neighbours import Neighbours, diagnose_runs
from hashbench.extensions.invariance.repro import run_item_repro, write_item_repro, write_part_repro
from hashbench.extensions.invariance.rows import NodeShapes
from hashbench.extensions.invariance.variants import Variant


@dataclass(frozen=True, slots=True)
class VariantRuns:
    """The reference run and one variant of it.

    Attributes:
        subject: what was run.
        options: the budget, and the results folder.
        variant: what the other run is.
        reference, other: the two runs, traced.
        shapes: at the calls of the reference.
    """

    subject: Subject
    options: RunOptions
    variant: Variant
    reference: Run
    other: Run
    shapes: NodeShapes

    @property
    def plain(self) -> PlainRuns:
        """Both as runs without row digests."""
        assert self.reference.trace is not None, "runs are traced"
        assert self.other.trace is not None, "runs are traced"
        return PlainRuns(self.reference.trace, self.other.trace, self.shapes)

    @property
    def outputs(self) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """The outputs of both."""
        return self.subject.outputs(self.reference), self.subject.outputs(self.other)

    def made_again(self, size: int) -> Run | Failure:
        """Make one of the two runs again."""
        tell_phase(self.variant.said(size))
        return self.subject.attempt(self.variant.given(size))

    def watched(
        self, size: int, watcher: TraceCallback | None = None, beside: Neighbours | None = None
    ) -> Run | Failure:
        """Make a run of ``size`` with a callback around every call; ``beside``: some items have other content."""
        return self.subject.attempt(self.variant.given(size, beside), watcher=watcher)


def earlier(runs: VariantRuns, found: BatchFinding | Failure) -> BatchFinding | Failure:
    """Return the finding; if it names no kernel, the one by which the cache that the other run started from differs."""
    before = runs.variant.before
    if isinstance(found, Failure):
        return Failure(f"a further run failed: {found.error}")
    if found.kernel or before is None:
        return found
    runs = replace(runs, variant=before)
    rows = compare_rows(runs.watched, before.subset)
    if isinstance(rows, Failure):
        return found
    difference = before.compare(*map(runs.subject.outputs, rows.runs)).difference
    if difference is None:
        return found
    comparison = find_sources(rows.comparison.runs, difference.names)
    first = finding_of(runs.watched, replace(rows, comparison=comparison))
    if isinstance(first, Failure) or not first.kernel:
        return found
    where = f"in the run of {first.size} tokens that made the cache"
    return replace(first, detail="; ".join(filter(None, (where, first.detail))))


def with_finding(outcome: Outcome, found: BatchFinding, runs: VariantRuns) -> Outcome:
    """Add a finding, as a divergence between the reference and the variant."""
    facts = replace(
        outcome.of(BatchFacts),
        shapes=found.shapes,
        reference_shapes=found.reference_shapes,
        not_attributable=found.not_attributable,
    )
    outcome = replace(outcome, benign=found.benign).having(facts)
    if not found.kernel:
        return unexplained(outcome, found.detail)
    records = runs.plain.reference.records
    place = next((place for place, record in enumerate(records) if record.id == found.record), None)
    how_far = "" if found.drawn or found.may_be_drawn or _is_view(found) else _how_far(found, runs.variant.unit)
    divergence = Divergence(
        origin=Origin.KERNEL,
        node=found.record,
        kernel=found.kernel,
        op_index=place,
        phase="forward",
        iteration=None if place is None else records[place].iteration,
        module=found.module,
        forward_op="",
        detail="; ".join(filter(None, (how_far, found.detail))),
        source=found.source_line,
    )
    names = outcome.difference.names if outcome.difference is not None else ()
    return replace(outcome, verdict=Verdict(names, divergence, found.benign))


def explained(outcome: Outcome, runs: VariantRuns, rows: RowsCompared, found: BatchFinding) -> Outcome:
    """Add the cause, if there is a budget to look for it, and what other tokens in the padding change."""
    outcome = _by_padding(_diagnosed(outcome, runs, rows, found), runs)
    diagnosis, model = outcome.diagnosis, runs.subject.model
    in_eval = isinstance(model, torch.nn.Module) and not model.training
    if diagnosis is None or diagnosis.decision.advice != DRAW_APART or not in_eval:
        return outcome
    return replace(outcome, diagnosis=replace(diagnosis, decision=replace(diagnosis.decision, advice=DRAW_IN_EVAL)))


def _diagnosed(outcome: Outcome, runs: VariantRuns, rows: RowsCompared, found: BatchFinding) -> Outcome:
    options, variant = runs.options, runs.variant
    if options.diagnose_budget <= 0 or not found.kernel:
        return outcome
    if (proven := _proven_by_record(found, together=variant.subset.together)) is not None:
        return replace(outcome, diagnosis=proven)
    if found.entry is not None:
        tell_phase("experiments on whole runs")
        repeated = 2 * (runs.subject.runs() - 1)
        evidence = diagnose_runs(runs.watched, rows, found.entry, repeated=repeated, budget=options.diagnose_budget)
        reproduced = "no repro: it takes whole runs to show it"
        return _with_diagnosis(outcome, evidence, Diagnosis(decide(evidence), _seen(evidence), reproduced=reproduced))
    tell_phase("experiments on the kernel's call")
    of_call = diagnose(found.call, found.pair, budget=options.diagnose_budget)
    coupled = found.coupled and not variant.subset.together
    if of_call is None:
        why, no_repro = found.detail or "the call could not be captured", "no repro: it cannot be made again alone"
        return unexplained(outcome, why, coupled=coupled, reproduced=no_repro)
    decision = decide(replace(of_call, moved=variant.subset.turned))
    if decision.cause == "unknown" and coupled and not of_call.explained:
        decision = _seems_coupled(decision.because)
    others = found.sources[1:] if options.all_sources else ()
    diagnosis = Diagnosis(decision, _seen(of_call), other_sources=others)
    return _with_diagnosis(outcome, of_call, _with_repro(diagnosis, runs, found))


def _with_diagnosis(outcome: Outcome, evidence: ItemEvidence, diagnosis: Diagnosis) -> Outcome:
    facts = replace(outcome.of(BatchFacts), smallest_batch=evidence.smallest_batch)
    return replace(outcome, diagnosis=diagnosis).having(facts)


def _seen(evidence: ItemEvidence) -> Evidence:
    return Evidence(origin=Origin.KERNEL, arms=evidence.arms)


def _with_repro(diagnosis: Diagnosis, runs: VariantRuns, found: BatchFinding) -> Diagnosis:
    """Write a repro of the call in both runs, for torch alone, and run it once in a fresh process; see
    :mod:`hashbench.extensions.invariance.repro`."""
    spec, options, turned = runs.subject.spec, runs.options, runs.variant.subset.turned
    if spec is None or not options.output:
        return diagnosis
    name = f"repro/{file_key(suite=spec.suite, mode=options.mode, name=spec.name)}"
    folder, seen_in = Path(options.output) / name, f"in the model {spec.name}"
    call, as_parts = found.call, found.pair or found.call
    try:
        if as_parts is not None and (call is None or call.watched is not None):
            sizes, unit = (found.size, found.batch), runs.variant.unit
            write_part_repro(folder, as_parts, diagnosis.decision, sizes=sizes, unit=unit, seen_in=seen_in)
        elif call is not None:
            chosen = range(found.size)[:: -1 if turned else 1]
            first = None if found.pair is None else replace(found.pair.other, axes=call.axes)
            write_item_repro(folder, call, diagnosis.decision, chosen=chosen, first=first, seen_in=seen_in)
    except HashbenchError as error:  # OSError ends the sweep: its folder takes no more
        return replace(diagnosis, reproduced=f"no repro: {error}")
    tell_phase("running the repro")
    return replace(diagnosis, repro=name, reproduced=run_item_repro(folder, timeout=REPRO_SECONDS))


def _by_padding(outcome: Outcome, runs: VariantRuns) -> Outcome:
    """Add the effect of other tokens in the padding to the outcome.

    For a kernel whose experiments show nothing it decides the cause: if they change the unmasked tokens, they leak into
    them (by the mask, or by sorting by expert); if not, a kernel of equal inputs rounds by their number.
    """
    diagnosis, variant = outcome.diagnosis, runs.variant
    if variant.filled is None or diagnosis is None:
        return outcome
    filled = runs.subject.attempt(variant.filled)
    if isinstance(filled, Failure):
        return outcome
    outcome = replace(outcome, runs=outcome.runs + 1)
    reference, other = runs.outputs
    difference = outputs.compare(variant.kept(reference, other), variant.kept(runs.subject.outputs(filled), other))
    if difference is None:
        seen, found = "other tokens in the padding change nothing", "shape_dependent_kernel"
    else:
        by = f" by at most {difference.max_abs:.3g}" if difference.max_abs is not None else ""
        seen, found = f"other tokens in the padding change the others{by}", "batch_coupling"
    known = diagnosis.decision
    decision = replace(known, because="; ".join(filter(None, (known.because, seen))))
    if known.cause == "unknown" and outcome.verdict is not None:
        decision = replace(decision, cause=found, confidence=Confidence.LIKELY, advice=advice_for(found))
    return replace(outcome, diagnosis=replace(diagnosis, decision=decision))


def _proven_by_record(found: BatchFinding, *, together: bool) -> Diagnosis | None:
    """Return the diagnosis that the record of the call proves; ``None`` if experiments are needed."""
    if together and not found.shapes:
        advice, no_repro = advice_for("batch_coupling"), "it reads no tensor, and its arguments are others"
    elif found.drawn or found.may_be_drawn:  # the states of the generators show it
        advice = DRAW_APART
        no_repro = "the kernel gives each item the same from one state of the generator, which is another"
    else:
        return None
    confidence = Confidence.LIKELY if found.may_be_drawn else Confidence.PROVEN
    decision = Decision("batch_coupling", confidence, found.detail, advice)
    return Diagnosis(decision, Evidence(origin=Origin.KERNEL), reproduced=f"no repro: {no_repro}")


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


def unexplained(outcome: Outcome, why: str, *, coupled: bool = False, reproduced: str = "") -> Outcome:
    """Add why no cause is known; ``coupled``: the call's inputs and outputs alone make a coupling likely."""
    decision = _seems_coupled(why) if coupled else Decision("unknown", Confidence.OPEN, why, _LOOK)
    return replace(outcome, diagnosis=Diagnosis(decision, Evidence(origin=""), reproduced=reproduced))


def _seems_coupled(why: str) -> Decision:
    """Return a likely coupling that no experiment shows, but the call's inputs and outputs do: it reduces or reorders
    items, or is given their number."""
    because = f"by what it computes an item's rows follow from others, or from how many there are ({why})"
    return Decision("batch_coupling", Confidence.LIKELY, because, advice_for("batch_coupling"))
