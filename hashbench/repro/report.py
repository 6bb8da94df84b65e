"""``REPORT.md`` of a repro: everything about one difference, as a text that can be pasted into a bug report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tabulate import tabulate

from hashbench.records import Decision, Diagnosis, ExperimentResult

OUTPUT_HEADING = "## Last output of repro.py"
NOT_RUN = "It was not run yet."

_CONFIDENCE: Mapping[str, str] = {
    "proven": "an experiment shows the mechanism",
    "likely": "what was seen fits it, but an experiment that would exclude another cause is missing or too small",
    "open": "no experiment decides it",
}

ARMS: Mapping[str, str] = {
    "repeat": "the same call, inputs restored in place",
    "fresh_memory": "inputs in other memory each time",
    "one_thread": "one thread",
    "deterministic": "deterministic algorithms on, new memory not filled",
    "deterministic_fill": "deterministic algorithms on, new memory filled",
    "nondeterministic": "deterministic algorithms off",
    "poison": "new memory full of another byte",
    "moved": "inputs moved by some bytes",
    "exact_values": "small whole numbers as inputs, whose sums are exact in any order",
    "copied_sources": "arguments that share memory with the written one copied first",
    "entropy": "entropy of the system made constant",
    "clocks": "clocks made to tick alike",
    "generators": "every random generator alive put back",
    "one_worker": "thread pools of one worker",
    "busy": "all cores busy beside it",
    "onednn_off": "oneDNN off",
    "cudnn_off": "cuDNN off",
    "cudnn_benchmark": "cuDNN chooses its algorithm by timing",
    "cudnn_deterministic": "deterministic cuDNN algorithms only",
    "onednn_deterministic": "deterministic oneDNN algorithms only",
    "sdpa_math": "attention by plain matrix products",
    "sdpa_flash": "flash attention only",
    "sdpa_efficient": "memory-efficient attention only",
    "sdpa_cudnn": "cuDNN's attention only",
    "tf32_off": "TF32 off",
    "tf32_on": "TF32 on",
    "busy_stream": "another stream busy beside it",
    "pair": "two more runs of the model",
    "untraced": "two runs of the model without tracing",
    "within_process": "two runs in a fresh process",
    "fresh_process": "first runs of fresh processes",
    "fixed_order": "fresh processes with hashes and addresses fixed",
}
"""What each arm changes, in a few words; ``docs/causes.md`` has more."""

_ON: Mapping[str, str] = {"call": "call", "pair": "whole model", "process": "fresh processes"}


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
            f"**{_words(decision.cause)}**, {decision.confidence}: {_CONFIDENCE[decision.confidence]}.",
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
            _ON.get(arm.on, arm.on),
            ARMS.get(arm.name, ""),
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


def _words(cause: str) -> str:
    return cause.replace("_", " ")


def _facts(rows: Iterable[tuple[str, str]]) -> str:
    """Names and values, those without a value left out."""
    return _markdown(("what", ""), [row for row in rows if row[1]])


def _markdown(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    escaped = [[str(cell).replace("|", "\\|") for cell in row] for row in rows]
    return tabulate(escaped, headers=headers, tablefmt="github", disable_numparse=True)
