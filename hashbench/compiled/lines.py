"""Describe in five lines in what a compiled model is not what eager mode computes. Pure."""

from __future__ import annotations

from pathlib import Path

from hashbench.catalog import Status
from hashbench.compiled.text import blames, has_ratio
from hashbench.records import Row
from hashbench.text import cut_line, five_lines

_RUNS_DIFFER = (Status.TWO_RUNS_DIFFER, Status.COMPILED_RUNS_DIFFER)
_OPINIONS = {
    "yes": "it computes something else in float64, too, where rounding is out of the way",
    "no": "nothing differs in float64: it is rounding",
    "unknown": "whether float64 shows it, too, is not known",
}


def is_wrong(row: Row) -> bool:
    """Return whether a compiled model is not what eager mode computes: by its status, or, within the tolerance, because
    something in it is wrong in float64, or, where that does not run, makes a result that was accepted be far off."""
    far = row.semantic == "unknown" and blames(row) and bool(row.reference)
    return row.accuracy != Status.PASS or row.semantic == "yes" or far


def accuracy_lines(row: Row, *, folder: Path) -> str:
    """Return what differs, where it comes from, why, the evidence, and what to do; of a model that was not compiled or
    did not run, one line.

    Args:
        row: of a compiled model that :func:`is_wrong`.
        folder: has repro and traces.
    """
    if row.accuracy in _RUNS_DIFFER:
        whose = "compiled" if row.accuracy == Status.COMPILED_RUNS_DIFFER else "eager"
        return five_lines(row, folder=folder).replace(": runs differ in ", f": {whose} runs differ in ", 1)
    if row.accuracy not in (Status.PASS, Status.FAIL_ACCURACY):
        return cut_line(_not_compared(row))
    lines = (_what(row), _where(row), _why(row), _evidence(row), _remedy(row, folder))
    return "\n".join(map(cut_line, lines))


def _not_compared(row: Row) -> str:
    place = f" in {row.stage}" if row.stage else ""
    place += f", at {row.op}" if row.op else ""
    return f"{row.name}: {row.accuracy} with backend {row.backend}{place}: {row.error}"


def _what(row: Row) -> str:
    if row.accuracy == Status.PASS:
        return f"{row.name}: torch's rule accepts it, and what {row.backend} made of it computes something else"
    return f"{row.name}: what {row.backend} made of it is not what eager mode computes ({_parts(row)[0] or row.error})"


def _where(row: Row) -> str:
    if not row.stage:
        return "stage: none was found"
    what = f"kernel {row.kernel}, {row.op}" if row.kernel and row.op else row.kernel or row.op or "no op is named"
    if row.kernel == row.op:
        what = row.op or what
    place = ", ".join(
        filter(
            None,
            (row.phase, f"in {row.module}" if row.module else "", f"at {row.source}" if row.source else ""),
        )
    )
    return f"stage: {row.stage}: {what}{f' ({place})' if place else ''}"


def _why(row: Row) -> str:
    words = [_parts(row)[1]]
    if has_ratio(row):
        own = f", eager mode's own {row.eager_rounding:.3g}" if row.eager_rounding is not None else ""
        words.append(f"its largest error is {row.beyond_rounding:.3g} times what rounding explains{own}")
    words += [_OPINIONS.get(row.semantic, ""), row.because, row.reference]
    return f"why: {'; '.join(filter(None, words)) or 'not looked for'}"


def _evidence(row: Row) -> str:
    trials = row.evidence.results if row.evidence else ()
    ran = [trial.word() for trial in trials if trial.ran]
    late = ", ".join(trial.name for trial in trials if trial.lacked_time)
    unrun = f"; not tried for lack of time (hashbench_diagnose_budget): {late}" if late else ""
    if not ran:
        return f"evidence: no compilation with a change was tried{unrun}"
    cured = f"; gone if {row.cured_by}" if row.cured_by else ""
    words = f"{'; '.join(ran)}{cured}{unrun}"
    return f"evidence ({row.confidence}; compilations with a change in which it is there): {words}"


def _remedy(row: Row, folder: Path) -> str:
    repro = f" repro: {folder / row.repro} ({row.reproduced})" if row.repro else ""
    return f"to do: {(row.advice or 'let the diagnosis run (diagnose=True)').rstrip('.')}.{repro}"


def _parts(row: Row) -> tuple[str, str]:
    """Return which results differ, and what else the detail says."""
    parts = row.detail.split("; ") if row.detail else []
    results = [part for part in parts if part.startswith("beyond the tolerance: ")]
    return "; ".join(results), "; ".join(part for part in parts if part not in results)
