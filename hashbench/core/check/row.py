"""The row of an outcome: a line of ``accuracy.csv``, and what is written down of it before experiments are made."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch

from hashbench.core.catalog import Status
from hashbench.core.diagnose.causes import cut_short, stats, with_more_time
from hashbench.core.extensions import facts_kinds
from hashbench.core.io import replace_file
from hashbench.core.processes import peak_memory_mib, send_draft
from hashbench.core.records import Diagnosis, Divergence, ModelSpec, Rate, Row, RowEvidence, RunOptions, Trace, op_of
from hashbench.core.results.folder import ResultsFolder, file_key
from hashbench.core.results.rows import row_to_json
from hashbench.core.run.outcome import FoundColumns, Outcome, peak_mib
from hashbench.core.text import join_limited
from hashbench.core.trace import file

BUDGET_FLAG = "--diagnose-budget"
"""What gives experiments more time, in a sweep and under PyTorch's own harness."""


def row_of(
    spec: ModelSpec, options: RunOptions, outcome: Outcome, *, seconds: float | None, budget_flag: str = BUDGET_FLAG
) -> Row:
    """Return the row of an outcome.

    Traces are written to the results folder: of runs that differ or failed, and of others if requested. A trace that
    cannot be written, because the model changed the limits of this process or the disk is full, is an error of the row.

    Args:
        spec: the model.
        options: of the sweep.
        outcome: of its check.
        seconds: of the model's load, runs and experiments, if they have ended.
        budget_flag: the flag or setting that gives the experiments more time.
    """
    traces: list[str] = []
    errors = [outcome.failure.error] if outcome.failure is not None else []
    if options.output and (outcome.accuracy != Status.PASS or options.keep_traces):
        key = file_key(suite=spec.suite, mode=options.mode, name=spec.name)
        for number, trace in enumerate(outcome.traces, start=1):
            name = f"traces/{key}.run{number}.log.gz"
            try:
                file.write(trace, Path(options.output) / name)
            except OSError as error:
                errors.append(f"its worker could not write {name}: {error.strerror or error}")
                break
            traces.append(name)
        traces += _written(outcome.process_traces, options, key, errors)
    divergence = outcome.verdict.divergence if outcome.verdict is not None else None
    difference = outcome.difference
    on_device = peak_mib(torch.device(options.device))
    row = Row(
        dev=options.device,
        name=spec.name,
        batch_size=options.batch_size_of(spec),
        suite=spec.suite,
        mode=options.mode,
        dtype=options.dtype_column,
        runs=outcome.runs or None,
        threads=(options.threads or torch.get_num_threads()) if outcome.runs else None,
        benign=None if outcome.benign is None else len(outcome.benign),
        benign_ops=_op_names(outcome.benign or ()),
        settings_changed="; ".join(outcome.settings_changed),
        not_compared=join_limited(outcome.not_compared),
        second_build=outcome.second_build,
        deterministic_ops=join_limited(outcome.deterministic_ops),
        backend=options.backend,
        compiled=f"ran eagerly: {join_limited(outcome.compiled)}" if outcome.compiled else "",
        traces=" ".join(traces),
        seconds=None if seconds is None else round(max(0.0, seconds), 3),  # a model may have set its clock back
        peak_memory_mib=round(peak_memory_mib() + outcome.beside_mib, 1),
        device_memory_mib=None if on_device is None else round(on_device, 1),
        error="; ".join(errors),
        source="" if outcome.failure is None else outcome.failure.source,
        facts=tuple(facts for kind in facts_kinds() if (facts := outcome.of(kind)) != kind()),
        **_same(outcome, _OF_OUTCOME),
    )
    if difference is not None:
        row = replace(
            row,
            differing_results=join_limited(difference.names),
            differing_elements=difference.elements,
            max_abs_diff=stats.significant(difference.max_abs),
            mean_relative_variability=stats.significant(difference.mean_relative),
            count_variability=stats.significant(difference.share),
            **_same(difference, ("max_ulp", "representation")),
        )
    row = _with_rate(row, stats.rate_of_runs(outcome.run_counts))
    if outcome.diagnosis is not None:
        row = _with_diagnosis(row, outcome.diagnosis, budget_flag)
    if divergence is not None:
        row = _with_divergence(row, divergence)
    return _with_finding(row, outcome.finding, budget_flag)


def _written(runs: Sequence[Mapping[int, Trace]], options: RunOptions, key: str, errors: list[str]) -> list[str]:
    """Write the traces of all processes, a folder for each run; return the folders, and add to the errors."""
    folders: list[str] = []
    for number, by_rank in enumerate(runs, start=1):
        name = f"traces/{key}.run{number}"
        try:
            for rank, trace in by_rank.items():
                file.write(trace, Path(options.output) / name / f"rank{rank}.log.gz")
        except OSError as error:
            errors.append(f"its worker could not write {name}: {error.strerror or error}")
            break
        folders.append(name)
    return folders


_OF_OUTCOME = (
    *("accuracy", "iterations", "deterministic", "nondeterministic_op", "ops"),
    *("confirmed", "untraced", "tracer", "perturbed_ops"),
)

_OF_DIAGNOSIS = ("deterministic_doc", "deterministic_here", "repro", "reproduced")


def _same(source: object, names: Sequence[str]) -> dict[str, Any]:
    """Return the fields that are columns of the same name."""
    return {name: getattr(source, name) for name in names}


def keep_draft(spec: ModelSpec | None, options: RunOptions, outcome: Outcome) -> None:
    """Write down what is known by now of a model that has a name, or send it where no file can be written: a further
    run that ends this process must not take it along."""
    folder = ResultsFolder(Path(options.output))
    if spec is None or not options.output or not folder.rows.is_dir():
        return
    key = file_key(suite=spec.suite, mode=options.mode, name=spec.name)
    row = row_of(spec, options, outcome, seconds=None)
    text = json.dumps(row_to_json(row))
    try:
        replace_file(folder.draft_path(key), text, links=False)
    except OSError:
        send_draft(text)


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


def _with_diagnosis(row: Row, diagnosis: Diagnosis, budget_flag: str) -> Row:
    facts, price, decision = diagnosis.evidence.call, diagnosis.deterministic_price, diagnosis.decision
    limited = cut_short(diagnosis.evidence.arms, decision.confidence)
    return replace(
        _with_rate(row, diagnosis.rate),
        **asdict(replace(decision, advice=with_more_time(decision.advice, limited, flag=budget_flag))),
        evidence=RowEvidence.of(diagnosis.evidence.arms),
        other_sources="; ".join(diagnosis.other_sources),
        capture=facts.limits if facts is not None else "",
        deterministic_price=stats.significant(price),
        **_same(diagnosis, _OF_DIAGNOSIS),
    )


def _with_finding(row: Row, finding: FoundColumns, budget_flag: str) -> Row:
    """Add what an extension found in the core's columns; what it left empty stays."""
    found = {field.name: getattr(finding, field.name) for field in fields(finding) if field.name != "limited"}
    found["advice"] = with_more_time(finding.advice, finding.limited, flag=budget_flag)
    return replace(row, **{name: value for name, value in found.items() if value})


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
    known = {**_same(divergence, _OF_DIVERGENCE), "source": divergence.source or row.source}
    return replace(row, **known, detail=detail[:500], steered_by=steered)


def _op_names(nodes: Sequence[str]) -> str:
    """Count the ops of record ids, most common first."""
    counts = Counter(map(op_of, nodes))
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return join_limited([f"{name} ×{count}" if count > 1 else name for name, count in ordered])  # noqa: RUF001
