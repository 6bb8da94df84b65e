"""A compiled row in words, the same in every report: where, why, what it misses, what to do. Pure; imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from hashbench.core.catalog import Confidence, Status
from hashbench.core.extensions import RowWords
from hashbench.core.records import Row
from hashbench.core.text import count, duration, one_line, percent
from hashbench.extensions.compiled.experiments import COMPILATION
from hashbench.extensions.compiled.facts import NOT_SEEN, CompiledFacts, FurtherCompilations

SUSPICIOUS = 16.0
"""Times what rounding explains, above which a kernel of a passing row is reported: ``compiled.rounding.LIMIT``."""

SEMANTIC = {
    "yes": "in float64 too: a mistake, not rounding",
    "no": "not in float64: rounding, not a mistake",
    "unknown": "float64 does not separate a mistake from rounding",
}
"""The column ``semantic`` in words."""


def blames(row: Row) -> bool:
    """Return True if a part of the compiler is to blame: a stage other than ``rounding``."""
    return row.of(CompiledFacts).stage not in ("", "rounding")


def _what(row: Row) -> str:
    facts = row.of(CompiledFacts)
    what = f"{row.kernel} ({facts.op})" if row.kernel and facts.op else row.kernel or facts.op
    return " ".join(filter(None, (what, f"in {row.module}" if row.module else "")))


def _measured(row: Row) -> Iterator[str]:
    facts = row.of(CompiledFacts)
    found = (row.detail.rstrip("."), beyond(row))
    yield from ("no kernel is to blame", *reversed(found)) if facts.stage == "rounding" else found
    if row.accuracy == Status.COMPILATIONS_DIFFER:
        yield f"compilations: {facts.compilations}" if facts.compilations else ""
        return
    if has_ratio(row):
        yield ratio(row)
    yield SEMANTIC.get(facts.semantic, facts.semantic)
    if facts.cured_by:
        yield f"fixed by: {facts.cured_by}{_compilations(row)}"
    yield row.because
    yield facts.reference


def beyond(row: Row) -> str:
    """Return the results of an inaccurate model that are beyond the tolerance; empty if they are not known."""
    inaccurate = row.accuracy == Status.FAIL_ACCURACY and row.differing_results
    return f"beyond the tolerance: {row.differing_results}" if inaccurate else ""


def has_ratio(row: Row) -> bool:
    """Return whether the largest error of a kernel says something of what is blamed: beside a mistake elsewhere, it is
    that of innocent kernels."""
    facts = row.of(CompiledFacts)
    if facts.beyond_rounding is None:
        return False
    if blames(row):
        return bool(row.kernel) and facts.beyond_rounding > SUSPICIOUS
    return bool(facts.semantic) or facts.beyond_rounding > SUSPICIOUS


def ratio(row: Row) -> str:
    """Return ``2.2e+07x the rounding bound (eager mode 0.5)``; empty if no kernel was checked."""
    facts = row.of(CompiledFacts)
    if facts.beyond_rounding is None:
        return ""
    eager = "" if facts.eager_rounding is None else f" (eager mode {facts.eager_rounding:.2g})"
    return f"{facts.beyond_rounding:.2g}x the rounding bound{eager}"


def program(row: Row) -> str:
    """Return ``inductor: 1 graph, 0 graph breaks, compiled in 7.8 s; 16 kernel calls, 100 % of their buffers checked``;
    empty for an eager row."""
    facts = row.of(CompiledFacts)
    if not row.backend:
        return ""
    counts = ((facts.graphs, "graph"), (facts.graph_breaks, "graph break"))
    parts = [count(number, word) for number, word in counts if number is not None]
    parts += [f"compiled in {duration(facts.compile_seconds)}"] if facts.compile_seconds is not None else []
    kernels = count(facts.kernels, "kernel call") if facts.kernels is not None else ""
    kernels += f", {percent(facts.checked)} of their buffers checked" if kernels and facts.checked is not None else ""
    program_words = "; ".join(filter(None, (", ".join(parts), kernels)))
    return f"{row.backend}: {program_words}" if program_words else row.backend


def _compilations(row: Row) -> str:
    made = [result for result in row.evidence.results if result.on == COMPILATION and result.ran]
    if made:
        return f" ({sum(not each.differing for each in made)} of {count(len(made), 'compilation')})"
    return f" ({row.evidence.text})" if row.evidence else ""  # of a CSV


class CompiledWords(RowWords):
    """Describes rows of models that were compiled."""

    def tells(self, row: Row) -> bool:
        """Return True if a row that does not pass says something of a compiled program, not only of differing runs."""
        of_program = row.accuracy in (Status.FAIL_ACCURACY, Status.COMPILATIONS_DIFFER)
        return bool(row.backend) and (of_program or bool(row.of(CompiledFacts).stage))

    def where(self, row: Row) -> str:
        """Return ``cpp_fused_relu_0 (aten.relu.default) in Net.act, net.py:18 forward``; empty if none is to blame."""
        if not (row.kernel or blames(row)):
            return ""
        return one_line(", ".join(filter(None, (_what(row), row.source))))

    def why(self, row: Row) -> str:
        """Return what was measured of a compiled program that differs, fails or is suspicious; empty if nothing was.

        ``buf1: relative error 0.48; 2.2e+07x the rounding bound (eager mode 0.5); in float64 too: a mistake, not
        rounding; fixed by: aten.relu.default runs eagerly (1 of 5 compilations)``.
        """
        return one_line("; ".join(filter(None, _measured(row))))

    def why_with_stage(self, row: Row) -> str:
        """Return :meth:`why` after the stage, ``codegen (proven): …``, for where the row's cells are not shown."""
        facts = row.of(CompiledFacts)
        if not facts.stage:
            return self.why(row)
        sure = f" ({row.confidence})" if row.confidence else ""
        text = self.why(row)
        return f"{facts.stage}{sure}{f': {text}' if text else ''}"

    def place(self, row: Row) -> str:
        """Return the stage and where, as comparisons tell them: ``codegen: cpp_fused_relu_0 (aten.relu.default) in
        Net.act``."""
        facts = row.of(CompiledFacts)
        if facts.stage == "rounding":
            return "rounding, no kernel is to blame"
        return one_line(": ".join(filter(None, (facts.stage, _what(row)))))

    def mechanism(self, row: Row) -> str:
        """Return the stage of the compiler to blame."""
        return row.of(CompiledFacts).stage

    def blamed(self, row: Row) -> str:
        """Return the op of a stage without kernels."""
        return row.of(CompiledFacts).op if blames(row) else ""

    def facts(self, row: Row) -> Iterator[tuple[str, str]]:
        """Yield the error of the kernel, and what was compiled."""
        yield "Error of the kernel", ratio(row)
        yield "Compiled by", program(row)

    def remarks(self, row: Row) -> Iterator[str]:
        """Yield what a passing row of a compiled model says beside its status."""
        facts = row.of(CompiledFacts)
        if row.accuracy != Status.PASS:
            return
        if blames(row) or (facts.beyond_rounding is not None and facts.beyond_rounding > SUSPICIOUS):
            found = self.where(row)
            text = self.why_with_stage(row)
            yield one_line(f"suspicious{f' at {found}' if found else ''}: {text}")
        elif facts.reference:
            yield one_line(facts.reference)
        if NOT_SEEN in row.detail:
            yield one_line(row.detail)
        if lacking := str(FurtherCompilations.parse(facts.compilations).not_compared):
            yield one_line(f"compilations: {lacking}")

    def remedy(self, row: Row) -> str:
        """Return what to do about a difference or failure of a compiled model; empty if the usual words do."""
        facts = row.of(CompiledFacts)
        if row.advice or not row.backend:
            return row.advice
        match row.accuracy:
            case Status.COMPILATIONS_DIFFER:
                return "let all runs use one compilation: one cache folder, the same compile threads, no max_autotune"
            case Status.FAIL_ACCURACY if facts.semantic == "unknown" and not facts.stage:
                return (
                    "let the model run in float64 (no tensor of a fixed dtype), which separates a mistake from rounding"
                )
            case Status.FAIL_ACCURACY if row.confidence == Confidence.OPEN:
                return "see its log, and report the failed diagnosis"
            case Status.REFERENCE_FAIL if "InvalidCxxCompiler" in row.error:
                return "install a C++ compiler, or name one by CXX; --backend aot_eager needs none"
            case Status.REFERENCE_FAIL if "@" in row.backend:
                return "leave --as out, which compiles for the CPU, to see whether that fails, too"
            case Status.REFERENCE_FAIL:
                backend = "" if row.backend == "inductor" else f"backend={row.backend!r}"
                return f"compile it in plain Python (torch.compile({backend})), where it should raise the same"
            case _:
                return ""

    def speaks_of(self, row: Row) -> bool:
        """Return True if a row is of a sweep with ``--backend``."""
        return bool(row.backend)

    def what_passing_means(self, rows: Sequence[Row], *, bound: float) -> str:
        """Return what passing rows of a sweep with ``--backend`` prove, and what they may have missed; empty for none.

        Args:
            rows: all that pass.
            bound: largest share of runs in which a difference may show that two equal runs miss (95 % confidence).
        """
        passing = [row for row in rows if self.speaks_of(row) and row.accuracy == Status.PASS]
        if not passing:
            return ""
        runs = max((row.runs for row in passing if row.runs is not None), default=2)
        eager = "two" if runs == 2 else str(runs)
        made_for = sorted({row.backend.partition("@")[2] for row in passing} - {""})
        compiled = (
            f"Triton code for {', '.join(made_for)}, interpreted on the CPU," if made_for else "the compiled model"
        )
        text = (
            f"Passed means: {eager} eager runs were equal, {eager} runs of {compiled} were equal, and its "
            "results are eager mode's within torch's tolerance"
        )
        known = [row.of(CompiledFacts) for row in passing]
        if any(facts.reference for facts in known):
            text += ", but for what the remarks say"
        shares = [facts.checked for facts in known if facts.checked is not None]
        if shares:
            suspicious = sum((facts.beyond_rounding or 0.0) > SUSPICIOUS for facts in known)
            none = f"in all but {count(suspicious, 'model')} none" if suspicious else "none"
            text += (
                f"; {percent(median(shares))} of the buffers that its kernels write were checked (median), {none} is "
                "beyond what rounding explains"
            )
        else:
            text += "; no kernel was checked"
        missed = f"a difference between compiled runs that shows in up to {percent(bound)} of them (95 % confidence)"
        return f"{text}. That can miss {missed}."

    def moved(self, base: Row, new: Row) -> tuple[str, ...]:
        """Return the stage, if both rows have one."""
        return ("stage",) if all(row.of(CompiledFacts).stage for row in (base, new)) else ()


WORDS = CompiledWords()
