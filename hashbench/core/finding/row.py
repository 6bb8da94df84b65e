"""Report on a row as a failed test shows it: what differs, where, why, the evidence, what to do and what to run."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

from hashbench.core.catalog import CAUSES, Confidence, Limit, Origin
from hashbench.core.commands import replay_command
from hashbench.core.finding import Facts, Finding
from hashbench.core.records import Row
from hashbench.core.text import bounds, count, cut_line, in_brackets, is_replayable, rate, ulps


def row_finding(
    row: Row, *, folder: Path, headline: str = "", facts: Facts | None = None, reader: str = "diff"
) -> Finding:
    """Return the report of a row.

    Args:
        row: of runs that differ.
        folder: has repro and traces.
        headline: what differs, in place of the usual words.
        facts: what is known, in place of first divergence, cause and evidence.
        reader: the command that takes its traces.
    """
    known = (first_divergence(row), cause(row), evidence(row)) if facts is None else facts
    return Finding(
        headline=cut_line(headline or what_differs(row)),
        facts=tuple((label, cut_line(text)) for label, text in (*known, *_remedy(row))),
        next=tuple(_commands(row, folder, reader)),
    )


def what_differs(row: Row, runs: str = "runs") -> str:
    """Return what differs, how far, and how often."""
    often = ", ".join(filter(None, (f"{rate(row)} differed from the first", bounds(row))))
    what = row.differing_results or row.error or row.accuracy
    eager = f"; compiled code {row.compiled}" if row.compiled else ""
    return (
        f"{row.name}: {runs} differ in {what}{how_far(row)}; {often if rate(row) else 'how often is not known'}{eager}"
    )


def how_far(row: Row) -> str:
    """Return how far apart results are, in brackets."""
    return in_brackets(
        count(row.differing_elements, "element") if row.differing_elements is not None else "",
        f"by at most {row.max_abs_diff:.3g}" if row.max_abs_diff is not None else "",
        ulps(row.max_ulp),
        f"only in {row.representation}" if row.representation else "",
    )


def first_divergence(row: Row, at: str = "") -> tuple[str, str]:
    """Return where runs diverge first; ``at`` says more of the place."""
    named = row.origin in (Origin.KERNEL, Origin.COLLECTIVE)
    what = row.kernel if named else row.origin or "not in any op that was traced"
    if row.origin and not named and row.origin != Origin.RANKS:  # no op behind a collective is named
        what += f", reached {row.kernel or 'no op'}"
    return "first divergence", f"{what}{position(row, at)}: {row.detail}" if row.origin else what


def position(row: Row, at: str = "") -> str:
    """Return phase, op, module and line, in brackets."""
    op = f"op {row.op_index + 1} of {row.ops}" if row.op_index is not None else ""
    return in_brackets(at, row.phase, op, *place(row))


def place(row: Row) -> tuple[str, str]:
    """Return module and line."""
    return f"in {row.module}" if row.module else "", f"at {row.source}" if row.source else ""


def cause(row: Row) -> tuple[str, str]:
    """Return the cause."""
    return "cause", f"{row.cause}, {row.confidence}: {row.because}" if row.cause else "not looked for"


def evidence(row: Row) -> tuple[str, str]:
    """Return the results of experiments."""
    if not row.evidence:
        return "evidence", f"none gathered; seen again in a further pair: {row.confirmed or 'not tried'}"
    ran = [result.word() for result in row.evidence.results if result.ran]  # one that does not apply says nothing
    late = ", ".join(result.place for result in row.evidence.results if result.lacked_time)
    parts = [*ran, *([f"not run for lack of time: {late}"] if late else [])]
    return "evidence", f"outcomes that differ: {'; '.join(parts) or row.evidence.text}"


def _remedy(row: Row) -> Facts:
    """Return what to do, and what the repro does."""
    known = CAUSES.get(row.cause)
    advice = (known.pytest_advice if known is not None else "") or row.advice or "let the diagnosis run (diagnose=True)"
    limited = row.confidence != Confidence.PROVEN and any(result.is_cut_short for result in row.evidence.results)
    if limited and advice != row.advice:
        advice = f"{Limit.BUDGET.remedy.format(flag='diagnose_budget')}. {advice}"
    return ("to do", f"{advice.rstrip('.')}."), ("repro", row.reproduced)


def _commands(row: Row, folder: Path, reader: str) -> Iterator[str]:
    """Yield the command that repeats the difference, and the one that reads the traces."""
    if row.repro:
        repro = folder / row.repro
        yield replay_command(repro) if is_replayable(row) else shlex.join(["python", f"{repro}/repro.py"])
    if row.traces:
        yield shlex.join(["hashbench", *reader.split(), *(str(folder / name) for name in row.traces.split())])
