"""``REPORT.md`` of a repro: everything about one difference, as a text that can be pasted into a bug report."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tabulate import tabulate

from hashbench.catalog import CAUSES, EXPERIMENTS, REPEATED, Confidence
from hashbench.records import Decision, Diagnosis, ExperimentResult

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
    return "\n".join(
        [
            f"# {op} gives different results from equal inputs",
            "",
            f"{place} {how_often(diagnosis)}".strip(),
            "",
            _facts(facts),
            "",
            "The call, with `t` for its tensors:",
            "",
            "```python",
            *inputs,
            "```",
            "",
            "## Cause",
            "",
            f"**{CAUSES[decision.cause].words}**, {decision.confidence}: {Confidence(decision.confidence).meaning}.",
            "",
            *(f"{text}\n" for text in (decision.because, decision.advice) if text),
            "## Evidence",
            "",
            _evidence(diagnosis.evidence.arms),
            "",
            "A comparison is one with the first outcome of the same row.",
            "",
            *_documented(diagnosis),
            "## Environment",
            "",
            _facts(environment),
            "",
            "## How to see it",
            "",
            f"{usage} `hashbench replay` on the folder repeats the evidence.",
            "",
            OUTPUT_HEADING,
            "",
            NOT_RUN,
            "",
        ]
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


def _evidence(arms: Iterable[ExperimentResult]) -> str:
    rows = [
        (
            arm.name,
            REPEATED[arm.on].short,
            EXPERIMENTS[arm.name].phrase,
            count(arm),
            arm.distinct if arm.ran else "",
            remarks(arm),
        )
        for arm in arms
    ]
    headers = ("arm", "repeated", "what is changed", "differ", "distinct", "found")
    return _markdown(headers, rows)


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


def _documented(diagnosis: Diagnosis) -> list[str]:
    facts = [
        ("torch documents", diagnosis.deterministic_doc),
        ("it did here", diagnosis.deterministic_here),
        ("time with the flag / without", _price(diagnosis.deterministic_price)),
    ]
    shown = [(name, value) for name, value in facts if value]
    if not shown:
        return []
    return ["## Under torch.use_deterministic_algorithms(True)", "", _facts(shown), ""]


def _price(price: float | None) -> str:
    return "" if price is None else f"{price:.2g}"


def _facts(rows: Iterable[tuple[str, str]]) -> str:
    """Names and values, those without a value left out."""
    return _markdown(("what", ""), [row for row in rows if row[1]])


def _markdown(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    escaped = [[str(cell).replace("|", "\\|") for cell in row] for row in rows]
    return tabulate(escaped, headers=headers, tablefmt="github", disable_numparse=True)
