"""Two audits in, what became of every sample out. Pure: reads no file, prints nothing.

:func:`decide` is the rule, over two verdicts; the rest finds which rows belong together.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from typing import Any

from hashbench.report.compare import Became, Change, Comparison, worst_first
from hashbench.results.audit_table import AUDIT_ROWS, KEY, Audit, AuditRow
from hashbench.results.environments import environment_changes
from hashbench.results.table import csv_line, defuse
from hashbench.text import one_line


class AuditOutcome(Became):
    """What became of one sample, the worst first."""

    BECAME_NONDETERMINISTIC = "became nondeterministic", True
    NOW_RAISES = "now raises", True
    NOT_MEASURED = "not measured any more", True  # a difference could hide there
    MISSING = "missing", True  # absent is never equal
    NOT_COMPARABLE = "not comparable", True
    MOVED = "differs otherwise"
    FIXED = "fixed"
    MEASURED_NOW = "measured now"
    NEW = "new"
    NOT_ASKED = "not asked for"
    OTHERWISE_DOCUMENTED = "documented otherwise"
    UNCHANGED = "unchanged"


_DIFFERING = frozenset({"undocumented nondeterminism", "differs under the flag", "does not raise"})
_UNMEASURED = frozenset({"fails", "not comparable", "timeout", "crashed"})


def kind_of(row: AuditRow) -> str:
    """``differs``, ``raises`` under the flag, ``unmeasured`` or ``agrees``, as far as results go; what is documented
    plays no part, so that a new sentence in torch's documentation fixes nothing."""
    if row.verdict in _UNMEASURED:
        return "unmeasured"
    if row.verdict in _DIFFERING or "differs" in (row.off, row.on) or "follows memory" in (row.off, row.on):
        return "differs under the flag" if row.verdict == "differs under the flag" else "differs"
    return "raises" if row.on == "raises" else "agrees"


def decide(base: str, new: str, *, asked: bool = True) -> AuditOutcome:
    """What became of a sample of kind ``base`` (see :func:`kind_of`) that is now of kind ``new``; empty: no row.

    Raises:
        ValueError: neither audit has it.
    """
    if not base and not new:
        raise ValueError("neither audit has this sample")
    if not new:
        return AuditOutcome.MISSING if asked else AuditOutcome.NOT_ASKED
    if not base:
        return AuditOutcome.NEW
    if base == new:
        return AuditOutcome.UNCHANGED
    if new == "unmeasured":
        return AuditOutcome.NOT_MEASURED
    if base == "unmeasured":
        return AuditOutcome.BECAME_NONDETERMINISTIC if new.startswith("differs") else AuditOutcome.MEASURED_NOW
    if new == "differs under the flag" or (new == "differs" and base in ("agrees", "raises")):
        return AuditOutcome.BECAME_NONDETERMINISTIC
    return AuditOutcome.NOW_RAISES if new == "raises" else AuditOutcome.FIXED


AuditChange = Change[AuditRow, AuditOutcome]
AuditComparison = Comparison[AuditRow, AuditOutcome]


def compare(base: Audit, new: Audit) -> AuditComparison:
    """Compare two audits, sample by sample. A change of torch's version is said first."""
    old, now = ({AUDIT_ROWS.key_of(row): row for row in audit.rows} for audit in (base, new))
    every = [*old, *(key for key in now if key not in old)]
    changes = [_change(key, old.get(key), now.get(key), new.asked) for key in every]
    found = environment_changes(base.environments, new.environments)
    return Comparison(
        base.label,
        new.label,
        tuple(sorted(found, key=lambda change: change.key != "packages.torch")),
        worst_first(changes),
        tuple(
            f"nothing says on which machine {audit.label} was made" for audit in (base, new) if not audit.environments
        ),
    )


def _change(key: tuple[str, ...], base: AuditRow | None, new: AuditRow | None, asked: Mapping[str, Any]) -> AuditChange:
    note = _conditions(base, new) if base is not None and new is not None else ""
    if note:
        return Change(key, AuditOutcome.NOT_COMPARABLE, base, new, note)
    kinds = ["" if row is None else kind_of(row) for row in (base, new)]
    outcome = decide(kinds[0], kinds[1], asked=new is not None or base is None or _was_asked(base, asked))
    if base is None or new is None:
        return Change(key, outcome, base, new)
    if outcome is AuditOutcome.UNCHANGED:
        outcome, note = _finer(base, new)
    else:
        note = f"{base.verdict} → {new.verdict}"
    return Change(key, outcome, base, new, note)


def _finer(base: AuditRow, new: AuditRow) -> tuple[AuditOutcome, str]:
    """What else changed where the results are of one kind."""
    if base.kernel and new.kernel and base.kernel != new.kernel:
        return AuditOutcome.MOVED, f"{base.kernel} → {new.kernel}"
    if base.documented != new.documented:
        return AuditOutcome.OTHERWISE_DOCUMENTED, f"{base.documented} → {new.documented}"
    return AuditOutcome.UNCHANGED, ""


def _conditions(base: AuditRow, new: AuditRow) -> str:
    """Why two rows of one key are not about the same; empty where they are."""
    for name in ("inputs", "threads"):
        old, now = getattr(base, name), getattr(new, name)
        if old and now and old != now:
            return f"{name}: {old} → {now}"
    return ""


def _was_asked(row: AuditRow, asked: Mapping[str, Any]) -> bool:
    """Whether an audit with this manifest was to have a row like this; without one, it was."""
    if not asked:
        return True
    if row.source == "sweep":
        return bool(asked.get("sweeps"))
    options, ops = asked.get("options"), asked.get("ops")
    if not isinstance(options, dict) or not isinstance(ops, list):
        return True
    dtypes = options.get("dtypes")
    known = not row.dtype or not isinstance(dtypes, list) or row.dtype in dtypes
    return known and options.get("device") == row.dev and [row.source, row.op] in ops


# ------------------------------------------------------------------------------------------------ as text

COUNTED_ONLY = frozenset({AuditOutcome.UNCHANGED, AuditOutcome.NOT_ASKED, AuditOutcome.NEW})
MOST_LISTED = 200
"""Samples listed of one outcome; their number is always said."""


def _lines(found: AuditComparison) -> Iterable[tuple[AuditOutcome, list[str]]]:
    for outcome in found.counts:
        listed = [change for change in found.changes if change.outcome is outcome]
        if outcome in COUNTED_ONLY:
            continue
        shown = [one_line(f"{' '.join(change.key[1:])}  {change.note}".rstrip()) for change in listed[:MOST_LISTED]]
        more = len(listed) - len(shown)
        yield outcome, [*shown, *([f"and {more} more"] if more else [])]


def as_text(found: AuditComparison) -> str:
    """For a terminal; what is different between the machines comes first, torch's version before all."""
    parts = [f"{one_line(found.base)} → {one_line(found.new)}"]
    parts += [
        "\n".join(f"{one_line(c.key)}: {one_line(c.base) or '(none)'} → {one_line(c.new) or '(none)'}" for c in shown)
        for shown in [found.environment]
        if shown
    ]
    parts += ["\n".join(found.remarks)] if found.remarks else []
    parts += ["\n".join([f"{outcome} ({found.counts[outcome]})", *(f"  {line}" for line in lines)])
              for outcome, lines in _lines(found)]  # fmt: skip
    parts.append(", ".join(f"{count} {outcome}" for outcome, count in found.counts.items()) or "no samples")
    return "\n\n".join(parts)


def as_markdown(found: AuditComparison) -> str:
    """For a pull request."""
    return "```text\n" + as_text(found).replace("```", "'''") + "\n```"


def as_json(found: AuditComparison) -> str:
    """Everything, for another program."""
    return json.dumps(
        {
            "base": found.base,
            "new": found.new,
            "environment": [dataclasses.asdict(change) for change in found.environment],
            "counts": dict(found.counts),
            "got_worse": found.got_worse,
            "remarks": found.remarks,
            "changes": [
                {
                    **dict(zip(KEY, change.key, strict=True)),
                    "outcome": change.outcome,
                    "base": None if change.base is None else change.base.verdict,
                    "new": None if change.new is None else change.new.verdict,
                    "note": change.note,
                }
                for change in found.changes
                if change.outcome is not AuditOutcome.UNCHANGED
            ],
        },
        indent=1,
    )


def as_csv(found: AuditComparison) -> str:
    """One line for each sample, the worst first."""
    lines = [csv_line([*KEY, "outcome", "base", "new", "note"])]
    for change in found.changes:
        verdicts = ["" if row is None else row.verdict for row in (change.base, change.new)]
        cells = (*change.key, change.outcome, *verdicts, change.note)
        lines.append(csv_line(defuse(one_line(cell)) for cell in cells))
    return "".join(lines)
