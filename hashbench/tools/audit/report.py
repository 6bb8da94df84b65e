"""An audit as tables, and two audits compared, as text, Markdown, JSON and CSV. Pure: reads no file, prints nothing."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from tabulate import tabulate

from hashbench.core.errors import last_line
from hashbench.core.finding import Finding
from hashbench.core.finding import as_json as finding_json
from hashbench.core.report.audits import AuditKind, by_verdict, table_of_counts, values_of
from hashbench.core.report.compare import Became, Comparison, RowChange, environment_changes, worst_first
from hashbench.core.results.rows import csv_text
from hashbench.core.text import cut, join_limited, one_line
from hashbench.core.trace.file import OTHER_OPS
from hashbench.tools.audit.audit_table import (
    DETERMINISM,
    KEY,
    UNMEASURED,
    VARYING,
    Audit,
    AuditRow,
    AuditVerdict,
    Shown,
    kinds,
)

# ------------------------------------------------------------------------------------------------ one audit

COLUMNS = ("verdict", "op", "pass", "dtypes", "samples", "kernel", "cause", "documented")
_WIDTH = 60


def findings(rows: Sequence[AuditRow]) -> list[dict[str, str]]:
    """Format one line for each verdict but ``as documented``, op and pass. ``documented but never seen here`` only
    where no sample of the op shows what is documented."""
    seen = {(row.op, row.phase) for row in rows if _confirms(row)}
    unseen = AuditVerdict.NEVER_SEEN
    return _lines(
        row
        for row in rows
        if row.verdict != AuditVerdict.AS_DOCUMENTED and not (row.verdict == unseen and (row.op, row.phase) in seen)
    )


def confirmed(rows: Iterable[AuditRow]) -> list[dict[str, str]]:
    """Format one line for each op that differs or is refused as torch documents it."""
    return _lines(filter(_confirms, rows))


def _confirms(row: AuditRow) -> bool:
    shown = Shown.DIFFERS in (row.off, row.unfilled) or row.on == Shown.RAISES
    return row.verdict == AuditVerdict.AS_DOCUMENTED and shown


def _lines(rows: Iterable[AuditRow]) -> list[dict[str, str]]:
    grouped = by_verdict(rows, list(AuditVerdict), lambda row: (row.verdict, row.op, row.phase))
    return [_line(key, same) for key, same in grouped]


def _line(key: tuple[str, ...], rows: Sequence[AuditRow]) -> dict[str, str]:
    verdict, op, phase = key
    values = functools.partial(values_of, rows)
    said = one_line("; ".join(values("error" if verdict in UNMEASURED else "documented")))
    cells = (
        verdict,
        op,
        phase,
        ", ".join(values("dtype")),
        str(len(rows)),
        join_limited(values("kernel"), limit=2),
        ", ".join(values("cause")),
        cut(said, _WIDTH),
    )
    return dict(zip(COLUMNS, cells, strict=True))


def summary(rows: Sequence[AuditRow]) -> str:
    """Format for a terminal: the findings, then the counts."""
    listed = [[*line.values()] for line in findings(rows) if line["verdict"] != AuditVerdict.NEVER_SEEN]
    parts = [tabulate(listed, headers=COLUMNS)] if listed else []
    parts.append(table_of_counts(rows, AuditVerdict) if rows else "No op was run.")
    return "\n\n".join(parts)


def tables_as_markdown(rows: Sequence[AuditRow]) -> str:
    """Format for a page of documentation: the counts, the findings, then what is as documented because it was seen."""
    parts = [table_of_counts(rows, AuditVerdict, style="github")]
    for title, lines in (("", findings(rows)), ("Seen as torch documents it:", confirmed(rows))):
        if lines:
            cells = [[cell.replace("|", "/") for cell in line.values()] for line in lines]
            parts += [*filter(None, [title]), tabulate(cells, headers=COLUMNS, tablefmt="github")]
    return "\n\n".join(parts) + "\n"


# ------------------------------------------------------------------------------------------------ two audits


def kind_of(row: AuditRow) -> str:
    """Classify a row: ``differs``, ``differs under the flag``, ``raises`` under it, ``unmeasured`` or ``agrees``, as
    far as results go; what is documented plays no part, so that a new sentence in torch's documentation fixes nothing.
    """
    if row.verdict in UNMEASURED:
        return "unmeasured"
    if row.verdict == AuditVerdict.UNDER_THE_FLAG:
        return "differs under the flag"
    differing = (AuditVerdict.UNDOCUMENTED, AuditVerdict.DOES_NOT_RAISE)
    if row.verdict in differing or row.off in VARYING or row.on in VARYING:
        return "differs"
    return "raises" if row.on == Shown.RAISES else "agrees"


def decide(base: str, new: str) -> Became:
    """Return the outcome of a sample of kind ``base`` (see :func:`kind_of`) that is now of kind ``new``."""
    if base == new:
        return Became.UNCHANGED
    if new == "unmeasured":
        return Became.NOT_MEASURED
    if base == "unmeasured":
        return Became.BECAME_NONDETERMINISTIC if new.startswith("differs") else Became.MEASURED_NOW
    if new == "differs under the flag" or (new == "differs" and base in ("agrees", "raises")):
        return Became.BECAME_NONDETERMINISTIC
    return Became.NOW_RAISES if new == "raises" else Became.FIXED


def compare(base: Audit, new: Audit, kind: AuditKind = DETERMINISM) -> Comparison[Any]:
    """Compare two audits of a kind, sample by sample. A change of torch's version is said first."""
    if kind is not DETERMINISM:
        return compared(base, new, kind, kind.reports().judged)
    named = (change for change in environment_changes(base.environments, new.environments) if change.key == "tracer")
    tracers = next((f"{change.base} → {change.new}" for change in named if change.base and change.new), "")
    remarks = [f"the tracer is another ({tracers}): {OTHER_OPS}, so kernels are not compared"] if tracers else []
    return compared(base, new, kind, functools.partial(judged, tracers=tracers), remarks=remarks)


def judged(base: AuditRow, new: AuditRow, *, tracers: str = "") -> tuple[Became, str]:
    """Return outcome and note of a sample in two audits; ``tracers``: their two tracers, if these differ."""
    outcome = decide(kind_of(base), kind_of(new))
    if outcome is not Became.UNCHANGED:
        return outcome, f"{base.verdict} → {new.verdict}"
    moved = base.kernel and new.kernel and base.kernel != new.kernel
    if tracers:
        return outcome, f"tracer {tracers}, so kernels are not compared" if moved else ""
    if moved:
        return Became.DIFFERS_DIFFERENTLY, f"{base.kernel} → {new.kernel}"
    if base.documented != new.documented:
        return Became.DOCUMENTED_DIFFERENTLY, f"{base.documented} → {new.documented}"
    return outcome, ""


def compared(
    base: Audit,
    new: Audit,
    kind: AuditKind,
    judged: Callable[[Any, Any], tuple[Became, str]],
    *,
    remarks: Iterable[str] = (),
) -> Comparison[Any]:
    """Compare two audits of a kind; ``judged`` gives outcome and note of a sample that both have under the same
    conditions."""

    def change(key: tuple[str, ...]) -> RowChange[Any]:
        before, after = old.get(key), now.get(key)
        if before is None or after is None:
            asked = new.asked is None or before is None or new.asked.covers(before)
            gone = Became.MISSING if asked else Became.NOT_ASKED
            return RowChange(key, Became.NEW if before is None else gone, before, after)
        values = ((name, getattr(before, name), getattr(after, name)) for name in kind.conditions)
        others = (f"{name}: {was} → {is_}" for name, was, is_ in values if was and is_ and was != is_)
        if other := next(others, ""):
            return RowChange(key, Became.NOT_COMPARABLE, before, after, other)
        outcome, note = judged(before, after)
        return RowChange(key, outcome, before, after, note)

    old, now = ({kind.rows.key_of(row): row for row in audit.rows} for audit in (base, new))
    machines = environment_changes(base.environments, new.environments)
    unknown = [
        f"nothing says on which machine {audit.label} was made" for audit in (base, new) if not audit.environments
    ]
    return Comparison(
        base.label,
        new.label,
        tuple(sorted(machines, key=lambda change: change.key != "packages.torch")),
        worst_first(map(change, old | now)),
        (*unknown, *remarks),
    )


COUNTED_ONLY = frozenset({Became.UNCHANGED, Became.NOT_ASKED, Became.NEW})
"""Outcomes whose samples are not listed."""
MOST_LISTED = 200
"""Samples listed of one outcome; their number is always said."""


def as_text(comparison: Comparison[Any]) -> str:
    """Format for a terminal; what is different between the machines comes first, torch's version before all."""
    machines = [one_line(str(change)) for change in comparison.environment]
    counted = ", ".join(f"{count} {outcome}" for outcome, count in comparison.counts.items()) or "no samples"
    title = f"{one_line(comparison.base)} → {one_line(comparison.new)}"
    blocks = [[title], machines, list(comparison.remarks), *_listed(comparison), [counted]]
    return "\n\n".join("\n".join(lines) for lines in blocks if lines)


def _listed(comparison: Comparison[Any]) -> Iterator[list[str]]:
    """Yield for each outcome that asks for attention a title and its samples."""
    for outcome, count in comparison.counts.items():
        if outcome not in COUNTED_ONLY:
            changes = [change for change in comparison.changes if change.outcome is outcome][:MOST_LISTED]
            lines = [one_line(f"{' '.join(change.key[1:])}  {change.note}".rstrip()) for change in changes]
            lines += [f"and {count - MOST_LISTED} more"] if count > MOST_LISTED else []
            yield [f"{outcome} ({count})", *(f"  {line}" for line in lines)]


def as_markdown(comparison: Comparison[Any]) -> str:
    """Format for a pull request."""
    return "```text\n" + as_text(comparison).replace("```", "'''") + "\n```"


def as_json(comparison: Comparison[Any]) -> str:
    """Format everything but what is unchanged, for another program."""
    content = {
        "base": comparison.base,
        "new": comparison.new,
        "environment": [dataclasses.asdict(change) for change in comparison.environment],
        "counts": dict(comparison.counts),
        "worse": comparison.got_worse,
        "changes": [
            {**_fields(change), "note": change.note}
            for change in comparison.changes
            if change.outcome != Became.UNCHANGED
        ],
    }
    found = Finding(
        headline=last_line(as_text(comparison)),
        notes=tuple(comparison.remarks),
        equal=not comparison.got_worse,
        differs=comparison.got_worse,
        data=content,
    )
    return finding_json(found, command="hashbench compare")


def as_csv(comparison: Comparison[Any]) -> str:
    """Format one line for each sample, the worst first."""
    columns = next((_columns(change) for change in comparison.changes), KEY)
    lines = [(*_fields(change).values(), change.note) for change in comparison.changes]
    return csv_text([*columns, "outcome", "base", "new", "note"], lines)


def _fields(change: RowChange[Any]) -> Mapping[str, str | None]:
    """Return the key, the outcome and both verdicts (``None``: no row) of a sample, by column."""
    verdicts = (None if row is None else row.verdict for row in (change.base, change.new))
    columns = (*_columns(change), "outcome", "base", "new")
    return dict(zip(columns, (*change.key, change.outcome, *verdicts), strict=True))


def _columns(change: RowChange[Any]) -> tuple[str, ...]:
    row = change.base if change.base is not None else change.new
    return next(kind.rows.key for kind in kinds() if isinstance(row, kind.rows.kind))
