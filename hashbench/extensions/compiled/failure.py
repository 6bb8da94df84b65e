"""Report on a compiled model that is not what eager mode computes, as a failed test shows it. Pure."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hashbench.core.catalog import Status
from hashbench.core.finding import Finding
from hashbench.core.finding.row import place, row_finding, what_differs
from hashbench.core.records import Row
from hashbench.core.text import cut_line, in_brackets
from hashbench.extensions.compiled.facts import CompiledFacts
from hashbench.extensions.compiled.text import beyond, blames, has_ratio

_RUNS_DIFFER = (Status.TWO_RUNS_DIFFER, Status.COMPILED_RUNS_DIFFER)
_OPINIONS = {
    "yes": "it computes something else in float64, too, where rounding is out of the way",
    "no": "nothing differs in float64: it is rounding",
    "unknown": "whether float64 shows it, too, is not known",
}


def is_wrong(row: Row) -> bool:
    """Return whether a compiled model is not what eager mode computes: by its status, or, within the tolerance, because
    something in it is wrong in float64, or, where that does not run, makes a result that was accepted be far off."""
    facts = row.of(CompiledFacts)
    far = facts.semantic == "unknown" and blames(row) and bool(facts.reference)
    return row.accuracy != Status.PASS or facts.semantic == "yes" or far


def accuracy_finding(row: Row, *, folder: Path) -> Finding:
    """Return what differs, where it comes from, why, the evidence, and what to do; of a model that was not compiled or
    did not run, the headline alone.

    Args:
        row: of a compiled model that :func:`is_wrong`.
        folder: has repro and traces.
    """
    if row.accuracy in _RUNS_DIFFER:
        whose = "compiled" if row.accuracy == Status.COMPILED_RUNS_DIFFER else "eager"
        return row_finding(row, folder=folder, headline=what_differs(row, f"{whose} runs"))
    if row.accuracy not in (Status.PASS, Status.FAIL_ACCURACY):
        return Finding(headline=cut_line(_not_compared(row)))
    facts = (("stage", _where(row)), ("why", _why(row)), ("evidence", _evidence(row)))
    without_traces = replace(row, traces="")  # they are of runs that agree
    return row_finding(without_traces, folder=folder, headline=_what(row), facts=facts)


def _not_compared(row: Row) -> str:
    facts = row.of(CompiledFacts)
    place = f" in {facts.stage}" if facts.stage else ""
    place += f", at {facts.op}" if facts.op else ""
    return f"{row.name}: {row.accuracy} with backend {row.backend}{place}: {row.error}"


def _what(row: Row) -> str:
    if row.accuracy == Status.PASS:
        return f"{row.name}: torch's rule accepts it, and what {row.backend} made of it computes something else"
    return f"{row.name}: what {row.backend} made of it is not what eager mode computes ({beyond(row) or row.error})"


def _where(row: Row) -> str:
    facts = row.of(CompiledFacts)
    if not facts.stage:
        return "none was found"
    what = f"kernel {row.kernel}, {facts.op}" if row.kernel and facts.op else row.kernel or facts.op or "no op is named"
    if row.kernel == facts.op:
        what = facts.op or what
    return f"{facts.stage}: {what}{in_brackets(row.phase, *place(row))}"


def _why(row: Row) -> str:
    facts = row.of(CompiledFacts)
    words = [row.detail]
    if has_ratio(row):
        own = f", eager mode's own {facts.eager_rounding:.3g}" if facts.eager_rounding is not None else ""
        words.append(f"its largest error is {facts.beyond_rounding:.3g}x the rounding bound{own}")
    words += [_OPINIONS.get(facts.semantic, ""), row.because, facts.reference]
    return "; ".join(filter(None, words)) or "not looked for"


def _evidence(row: Row) -> str:
    facts = row.of(CompiledFacts)
    trials = row.evidence.results if row.evidence else ()
    ran = [trial.word() for trial in trials if trial.ran]
    late = ", ".join(trial.name for trial in trials if trial.lacked_time)
    unrun = f"; not tried for lack of time (diagnose_budget): {late}" if late else ""
    if not ran:
        return f"no compilation with a change was tried{unrun}"
    cured = f"; gone if {facts.cured_by}" if facts.cured_by else ""
    words = f"{'; '.join(ran)}{cured}{unrun}"
    return f"{row.confidence}; compilations with a change in which it is there: {words}"
