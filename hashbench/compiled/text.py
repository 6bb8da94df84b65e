"""A compiled row in words, the same in every report: where, why, what it misses, what to do. Pure; imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from statistics import median

from hashbench.catalog import Confidence, Status
from hashbench.records import Row
from hashbench.text import count, duration, one_line, percent

SUSPICIOUS = 16.0
"""Times what rounding explains, above which a kernel of a passing row is reported: ``compiled.rounding.LIMIT``."""

SEMANTIC = {
    "yes": "in float64 too: a mistake, not rounding",
    "no": "not in float64: rounding, not a mistake",
    "unknown": "float64 does not tell a mistake from rounding",
}
"""The column ``semantic`` in words."""

_COMPILATION = re.compile(r"(?:^|; )compilation/\w+ (\d+)/\d+")


def mechanism(row: Row) -> str:
    """Return the cause of a difference, or the stage of the compiler to blame; empty if neither is known."""
    return row.cause or row.stage


def tells(row: Row) -> bool:
    """Return True if a row that does not pass says something of a compiled program, not only of runs that differ."""
    return bool(row.backend) and (bool(row.stage) or row.accuracy in (Status.FAIL_ACCURACY, Status.COMPILATIONS_DIFFER))


def speaks_of(row: Row) -> bool:
    """Return True if a row is of a sweep with ``--backend``."""
    return bool(row.backend)


def blames(row: Row) -> bool:
    """Return True if a part of the compiler is to blame: a stage other than ``rounding``."""
    return bool(row.stage) and row.stage != "rounding"


def blamed(row: Row) -> str:
    """Return the kernel to blame, or the op of a stage without kernels; empty if there is neither."""
    return row.kernel or (row.op if blames(row) else "")


def where(row: Row) -> str:
    """Return ``cpp_fused_relu_0 (aten.relu.default) in Net.act, net.py:18 forward``; empty if nothing is to blame."""
    if not (row.kernel or blames(row)):
        return ""
    return one_line(", ".join(filter(None, (_what(row), row.source))))


def _what(row: Row) -> str:
    what = f"{row.kernel} ({row.op})" if row.kernel and row.op else row.kernel or row.op
    return " ".join(filter(None, (what, f"in {row.module}" if row.module else "")))


def why(row: Row) -> str:
    """Return what was measured of a row whose compiled program differs, fails or is suspicious; empty if nothing was.

    ``buf1 is 0.48 off; 2.2e+07 times what rounding explains (eager mode 0.5); in float64 too: a mistake, not rounding;
    gone with: aten.relu.default runs eagerly (1 of 5 compilations)``.
    """
    return one_line("; ".join(filter(None, _measured(row))))


def _measured(row: Row) -> Iterator[str]:
    if row.stage == "rounding":
        yield "no kernel is to blame"
    yield row.detail.rstrip(".")
    if row.accuracy == Status.COMPILATIONS_DIFFER:
        yield f"compilations: {row.compilations.replace('; ', ', ')}" if row.compilations else ""
        return
    if has_ratio(row):
        yield ratio(row)
    yield SEMANTIC.get(row.semantic, row.semantic)
    if row.cured_by:
        yield f"gone with: {row.cured_by}{_compilations(row)}"
    yield row.because
    yield row.reference


def has_ratio(row: Row) -> bool:
    """Return whether the largest error of a kernel says something of what is blamed: beside a mistake elsewhere, it is
    that of innocent kernels."""
    if row.beyond_rounding is None:
        return False
    if blames(row):
        return bool(row.kernel) and row.beyond_rounding > SUSPICIOUS
    return bool(row.semantic) or row.beyond_rounding > SUSPICIOUS


def ratio(row: Row) -> str:
    """Return ``2.2e+07 times what rounding explains (eager mode 0.5)``; empty if no kernel was checked."""
    if row.beyond_rounding is None:
        return ""
    eager = "" if row.eager_rounding is None else f" (eager mode {row.eager_rounding:.2g})"
    return f"{row.beyond_rounding:.2g} times what rounding explains{eager}"


def program(row: Row) -> str:
    """Return ``inductor: 1 graph, 0 graph breaks, compiled in 7.8 s; 16 kernel calls, 100 % of their buffers checked``;
    empty for an eager row."""
    if not row.backend:
        return ""
    counts = ((row.graphs, "graph"), (row.graph_breaks, "graph break"))
    parts = [count(number, word) for number, word in counts if number is not None]
    parts += [f"compiled in {duration(row.compile_seconds)}"] if row.compile_seconds is not None else []
    kernels = count(row.kernels, "kernel call") if row.kernels is not None else ""
    kernels += f", {percent(row.checked)} of their buffers checked" if kernels and row.checked is not None else ""
    told = "; ".join(filter(None, (", ".join(parts), kernels)))
    return f"{row.backend}: {told}" if told else row.backend


def _compilations(row: Row) -> str:
    differing = [int(number) for number in _COMPILATION.findall(row.evidence.text)]
    return f" ({differing.count(0)} of {count(len(differing), 'compilation')})" if differing else ""


def why_with_stage(row: Row) -> str:
    """Return :func:`why` after the stage, ``codegen (proven): …``, for where the row's cells are not shown."""
    if not row.stage:
        return why(row)
    sure = f" ({row.confidence})" if row.confidence else ""
    text = why(row)
    return f"{row.stage}{sure}{f': {text}' if text else ''}"


def place(row: Row) -> str:
    """Return the stage and where, as comparisons tell them: ``codegen: cpp_fused_relu_0 (aten.relu.default) in
    Net.act``."""
    if row.stage == "rounding":
        return "rounding, no kernel is to blame"
    return one_line(": ".join(filter(None, (row.stage, _what(row)))))


def remarks(row: Row) -> Iterator[str]:
    """Yield what a passing row of a compiled model says beside its status."""
    if row.accuracy != Status.PASS:
        return
    if blames(row) or (row.beyond_rounding is not None and row.beyond_rounding > SUSPICIOUS):
        found = where(row)
        text = why_with_stage(row)
        yield one_line(f"suspicious{f' at {found}' if found else ''}: {text}")
    elif row.reference:
        yield one_line(row.reference)
    other = [part for part in row.compilations.split("; ") if ": not compared" in part]
    if other:
        yield one_line(f"compilations: {'; '.join(other)}")


def remedy(row: Row) -> str:
    """Return what to do about a difference or failure of a compiled model; empty if the usual words do."""
    if row.advice or not row.backend:
        return row.advice
    match row.accuracy:
        case Status.COMPILATIONS_DIFFER:
            return "let all runs use one compilation: one cache folder, the same compile threads, no max_autotune"
        case Status.FAIL_ACCURACY if row.semantic == "unknown" and not row.stage:
            return "let the model run in float64 (no tensor of a fixed dtype), which tells a mistake from rounding"
        case Status.FAIL_ACCURACY if row.confidence == Confidence.OPEN:
            return "see its log, and report the failed diagnosis"
        case Status.REFERENCE_FAIL if "InvalidCxxCompiler" in row.error:
            return "install a C++ compiler, or name one by CXX; --backend aot_eager needs none"
        case Status.REFERENCE_FAIL:
            backend = "" if row.backend == "inductor" else f"backend={row.backend!r}"
            return f"compile it in plain Python (torch.compile({backend})), where it should raise the same"
        case _:
            return ""


def what_passing_means(passing: Sequence[Row], *, bound: float) -> str:
    """Return what passing rows of a sweep with ``--backend`` prove, and what they may have missed; empty for none.

    Args:
        passing: the rows.
        bound: largest share of runs in which a difference may show that two equal runs miss (95 % confidence).
    """
    if not passing:
        return ""
    runs = max((row.runs for row in passing if row.runs is not None), default=2)
    eager = "two" if runs == 2 else str(runs)
    text = (
        f"Passed means: {eager} eager runs were equal, {eager} runs of the compiled model were equal, and its results "
        "are eager mode's within torch's tolerance"
    )
    if any(row.reference for row in passing):
        text += ", but for what the remarks say"
    shares = [row.checked for row in passing if row.checked is not None]
    if shares:
        suspicious = sum(row.beyond_rounding is not None and row.beyond_rounding > SUSPICIOUS for row in passing)
        none = f"in all but {count(suspicious, 'model')} none" if suspicious else "none"
        text += (
            f"; {percent(median(shares))} of the buffers that its kernels write were checked (median), {none} is "
            "beyond what rounding explains"
        )
    else:
        text += "; no kernel was checked"
    missed = f"a difference between compiled runs that shows in up to {percent(bound)} of them (95 % confidence)"
    return f"{text}. That can miss {missed}."
