"""From what was found out about a model to its row."""

from __future__ import annotations

import resource
import sys
from collections.abc import Sequence
from dataclasses import replace

import torch

from hashbench.causes import stats
from hashbench.devices import memory
from hashbench.records import Diagnosis, Divergence, ModelSpec, Rate, Row, RowEvidence, RunOptions, op_of
from hashbench.run.outcome import Outcome
from hashbench.text import a_few


def make_row(
    spec: ModelSpec,
    options: RunOptions,
    outcome: Outcome,
    *,
    iterations: int | None,
    traces: str,
    seconds: float | None,
) -> Row:
    """The row of a model. ``traces`` are paths in the results folder, ``seconds`` the model's own load, runs
    and experiments, where they have ended."""
    found = outcome.verdict.divergence if outcome.verdict is not None else None
    difference = outcome.difference
    on_device = memory.peak_mib(torch.device(options.device))
    row = Row(
        dev=options.device,
        name=spec.name,
        batch_size=options.batch_size or spec.batch_size,
        accuracy=outcome.accuracy,
        suite=spec.suite,
        mode=options.mode,
        dtype=options.dtype_column,
        iterations=iterations,
        runs=outcome.runs or None,
        threads=(options.threads or torch.get_num_threads()) if outcome.runs else None,
        deterministic=outcome.deterministic,
        nondeterministic_op=outcome.nondeterministic_op,
        ops=outcome.ops,
        benign=None if outcome.benign is None else len(outcome.benign),
        benign_ops=_op_names(outcome.benign or ()),
        confirmed=outcome.confirmed,
        untraced=outcome.untraced,
        perturbed_ops=outcome.perturbed_ops,
        settings_changed="; ".join(outcome.settings_changed),
        traces=traces,
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
            max_abs_diff=difference.max_abs,
            max_ulp=difference.max_ulp,
            mean_relative_variability=difference.mean_relative,
            count_variability=difference.share,
            representation=difference.representation,
        )
    row = _with_rate(row, stats.rate_of_runs(outcome.run_counts))
    if outcome.diagnosis is not None:
        row = _with_diagnosis(row, outcome.diagnosis)
    return row if found is None else _with_divergence(row, found)


def _with_rate(row: Row, rate: Rate | None) -> Row:
    if rate is None:
        return row
    return replace(
        row,
        distinct=rate.distinct,
        trials=rate.trials,
        rate_of=rate.of,
        rate=rate.share,
        rate_low=rate.low,
        rate_high=rate.high,
    )


def _with_diagnosis(row: Row, found: Diagnosis) -> Row:
    decision, facts = found.decision, found.evidence.call
    return replace(
        _with_rate(row, found.rate),
        cause=decision.cause,
        confidence=decision.confidence,
        because=decision.because,
        advice=decision.advice,
        evidence=RowEvidence.of(found.evidence.arms),
        other_sources="; ".join(found.other_sources),
        capture=facts.limits if facts is not None else "",
        deterministic_doc=found.deterministic_doc,
        deterministic_here=found.deterministic_here,
        deterministic_price=None if found.deterministic_price is None else round(found.deterministic_price, 3),
        repro=found.repro,
        reproduced=found.reproduced,
    )


def _with_divergence(row: Row, found: Divergence) -> Row:
    steering = found.steered_by
    steered = ""
    if steering is not None:
        steered = f"{steering.record}: {steering.first} and {steering.second}"
        steered += f", from {steering.kernel}" if steering.kernel else ""
    detail = f"{found.detail}: {found.first} and {found.second}" if found.first or found.second else found.detail
    return replace(
        row,
        origin=found.origin,
        kernel=found.kernel,
        op_index=found.op_index,
        phase=found.phase,
        iteration=found.iteration,
        module=found.module,
        forward_op=found.forward_op,
        source=found.source,
        detail=detail[:500],
        steered_by=steered,
    )


def _op_names(nodes: Sequence[str]) -> str:
    """Names and counts of the ops of record ids, commonest first."""
    counts: dict[str, int] = {}
    for node in nodes:
        name = op_of(node)
        counts[name] = counts.get(name, 0) + 1
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return a_few([f"{name} ×{count}" if count > 1 else name for name, count in ordered])  # noqa: RUF001


def peak_memory_mib() -> float:
    """Largest resident memory of this process so far, in MiB."""
    usage = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return usage / (2**20 if sys.platform == "darwin" else 2**10)
