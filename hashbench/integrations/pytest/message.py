"""A row as the five lines that a failed test shows. Pure: imports no torch, reads no files."""

from __future__ import annotations

from pathlib import Path

from hashbench.catalog import CAUSES, Origin
from hashbench.records import Row
from hashbench.text import bounds, rate

_LONGEST = 500
"""Letters of one line; names and texts come from the code under test."""


def five_lines(row: Row, *, folder: Path) -> str:
    """What differs, where it began, why, by which evidence, and what to do. ``folder`` has its repro and traces."""
    lines = (_what(row), _where(row), _why(row), _evidence(row), _remedy(row, folder))
    return "\n".join(_one_line(line) for line in lines)


def _what(row: Row) -> str:
    numbers = _in_brackets(
        f"{row.differing_elements} elements" if row.differing_elements is not None else "",
        f"by at most {row.max_abs_diff:.3g}" if row.max_abs_diff is not None else "",
        f"{row.max_ulp} ULP" if row.max_ulp is not None else "",
        f"only in {row.representation}" if row.representation else "",
    )
    how_often = ", ".join(filter(None, (f"{rate(row)} differed from the first", bounds(row))))
    what = row.differing_results or row.error or row.accuracy
    return f"{row.name}: runs differ in {what}{numbers}; {how_often if rate(row) else 'how often is not known'}"


def _where(row: Row) -> str:
    if not row.origin:
        return "first divergence: not in any op that was traced"
    what = row.kernel if row.origin == Origin.KERNEL else f"{row.origin}, reached {row.kernel or 'no op'}"
    position = _in_brackets(
        row.phase,
        f"op {row.op_index + 1} of {row.ops}" if row.op_index is not None else "",
        f"in {row.module}" if row.module else "",
        f"at {row.source}" if row.source else "",
    )
    return f"first divergence: {what}{position}: {row.detail}"


def _why(row: Row) -> str:
    return f"cause: {row.cause}, {row.confidence}: {row.because}" if row.cause else "cause: not looked for"


def _evidence(row: Row) -> str:
    if not row.evidence:
        return f"evidence: none gathered; seen again in a further pair: {row.confirmed or 'not tried'}"
    ran = [result.word() for result in row.evidence.results if result.ran]  # one that does not apply says nothing
    late = ", ".join(result.place for result in row.evidence.results if result.lacked_time)
    parts = [*ran, *([f"not run for lack of time: {late}"] if late else [])]
    return f"evidence (outcomes that differ): {'; '.join(parts) or row.evidence.text}"


def _remedy(row: Row, folder: Path) -> str:
    repro = f"repro: {folder / row.repro} ({row.reproduced})" if row.repro else row.reproduced
    traces = f"traces: {folder / 'traces'}" if row.traces else ""
    cause = CAUSES.get(row.cause)
    advice = (cause.pytest_advice if cause is not None else "") or row.advice or "let the diagnosis run (diagnose=True)"
    return f"to do: {advice.rstrip('.')}. {'; '.join(filter(None, (repro, traces)))}".rstrip()


def _in_brackets(*parts: str) -> str:
    text = ", ".join(filter(None, parts))
    return f" ({text})" if text else ""


def _one_line(text: str) -> str:
    text = " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
