"""``REPORT.md`` of a repro: everything about one difference, as a text that can be pasted into a bug report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hashbench.catalog import CAUSES, EXPERIMENTS, REPEATED, Confidence
from hashbench.records import Decision, Diagnosis, ExperimentResult
from hashbench.repro.templates import render

OUTPUT_HEADING = "## Last output of repro.py"
NOT_RUN = "It was not run yet."


def report(
    *,
    op: str,
    place: str,
    facts: Sequence[tuple[str, str]],
    inputs: Sequence[str],
    diagnosis: Diagnosis,
    environment: Sequence[tuple[str, str]],
    usage: str,
) -> str:
    """The whole text. ``place`` says where in the model the call stood; ``facts`` and ``environment`` are names and
    values; ``inputs`` describes the arguments, one a line; ``usage`` is a sentence on how the repro is run."""
    decision = diagnosis.decision
    price = diagnosis.deterministic_price
    documented = [
        ("torch documents", diagnosis.deterministic_doc),
        ("it did here", diagnosis.deterministic_here),
        ("time with the flag / without", "" if price is None else f"{price:.2g}"),
    ]
    return render(
        "REPORT.md.jinja",
        op=op,
        place=place,
        how_often=how_often(diagnosis),
        facts=facts,
        inputs=inputs,
        cause=CAUSES[decision.cause].words,
        decision=decision,
        confidence=Confidence(decision.confidence).meaning,
        evidence=[_evidence(arm) for arm in diagnosis.evidence.arms],
        documented=documented if any(value for _, value in documented) else [],
        environment=environment,
        usage=usage,
        output_heading=OUTPUT_HEADING,
        not_run=NOT_RUN,
    )


def with_output(text: str, output: str) -> str:
    """The report with another last output."""
    head, heading, _ = text.partition(OUTPUT_HEADING)
    fence = "```"
    while fence in output:
        fence += "`"
    return f"{head}{heading}\n\n{fence}\n{output.strip()}\n{fence}\n"


def how_often(diagnosis: Diagnosis) -> str:
    """``20 of 20 replays differed from the first (83 % to 100 %, 95 % interval); 21 distinct outcomes.``"""
    rate = diagnosis.rate
    if rate is None:
        return ""
    interval = f"{100 * rate.low:.3g} % to {100 * rate.high:.3g} %, 95 % interval"
    return (
        f"{rate.differing} of {rate.trials} {rate.of} differed from the first ({interval}); {rate.distinct} distinct."
    )


def _evidence(arm: ExperimentResult) -> tuple[object, ...]:
    """An experiment's row in the table of the evidence."""
    phrase, distinct = EXPERIMENTS[arm.name].phrase, arm.distinct if arm.ran else ""
    return arm.name, REPEATED[arm.on].short, phrase, count(arm), distinct, remarks(arm)


def count(arm: ExperimentResult) -> str:
    """``3 of 20``, or that the arm was not run."""
    return f"{arm.differing} of {arm.trials}" if arm.ran else "not run"


def remarks(arm: ExperimentResult) -> str:
    """What the arm singled out, and why it has fewer trials than others."""
    return "; ".join(part for part in (arm.found, arm.note) if part)


def summary(decision: Decision) -> list[str]:
    """The decision, one thing a line."""
    named: dict[str, Any] = {
        "cause": f"{decision.cause}, {decision.confidence}",
        "because": decision.because,
        "advice": decision.advice,
    }
    return [f"{name}: {value}" for name, value in named.items() if value]
