"""An audit as tables: how many samples had each verdict, and a line for each op about which there is something to say.
Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from tabulate import tabulate

from hashbench.results.audit_table import VERDICTS, AuditRow
from hashbench.text import a_few, one_line

COLUMNS = ("verdict", "op", "pass", "dtypes", "samples", "kernel", "cause", "documented")
_WIDTH = 60


def counts(rows: Iterable[AuditRow]) -> list[tuple[str, int, int]]:
    """``(verdict, ops, samples)`` in the order of the verdicts. An op may be in several."""
    kept = list(rows)
    samples = Counter(row.verdict for row in kept)
    ops = Counter(verdict for verdict, _, _ in {(row.verdict, row.source, row.op) for row in kept})
    return [(word, ops[word], samples[word]) for word in VERDICTS if samples[word]]


def findings(rows: Sequence[AuditRow]) -> list[dict[str, str]]:
    """One line for each verdict but ``as documented``, source, op and pass. ``documented but never seen here`` only
    where no sample of the op shows what is documented."""
    seen = {(row.op, row.phase) for row in rows if _confirms(row)}
    unseen = "documented but never seen here"
    return _lines(
        row
        for row in rows
        if row.verdict != "as documented" and not (row.verdict == unseen and (row.op, row.phase) in seen)
    )


def confirmed(rows: Sequence[AuditRow]) -> list[dict[str, str]]:
    """One line for each op that differs or is refused as torch documents it."""
    return _lines(row for row in rows if _confirms(row))


def _confirms(row: AuditRow) -> bool:
    return row.verdict == "as documented" and ("differs" in (row.off, row.unfilled) or row.on == "raises")


def _lines(rows: Iterable[AuditRow]) -> list[dict[str, str]]:
    groups: dict[tuple[str, str, str], list[AuditRow]] = {}
    for row in rows:
        groups.setdefault((row.verdict, row.op, row.phase), []).append(row)
    return [_line(key, groups[key]) for key in sorted(groups, key=lambda key: (VERDICTS.index(key[0]), *key[1:]))]


def _line(key: tuple[str, str, str], rows: Sequence[AuditRow]) -> dict[str, str]:
    verdict, op, phase = key
    said = "; ".join(dict.fromkeys(row.documented for row in rows if row.documented))
    errors = "; ".join(dict.fromkeys(row.error for row in rows if row.error))
    return {
        "verdict": verdict,
        "op": op,
        "pass": phase,
        "dtypes": ", ".join(dict.fromkeys(row.dtype for row in rows if row.dtype)),
        "samples": str(len(rows)),
        "kernel": a_few(list(dict.fromkeys(row.kernel for row in rows if row.kernel)), limit=2),
        "cause": ", ".join(dict.fromkeys(row.cause for row in rows if row.cause)),
        "documented": _short(errors if verdict in ("fails", "crashed", "timeout", "not comparable") else said),
    }


def _short(text: str) -> str:
    text = one_line(text)
    return text if len(text) <= _WIDTH else f"{text[: _WIDTH - 1]}…"


def summary(rows: Sequence[AuditRow]) -> str:
    """For a terminal: the findings, then the counts."""
    found = [line for line in findings(rows) if line["verdict"] not in ("documented but never seen here",)]
    parts = [tabulate([[line[name] for name in COLUMNS] for line in found], headers=COLUMNS)] if found else []
    parts.append(tabulate(counts(rows), headers=("verdict", "ops", "samples")) if rows else "No op was run.")
    return "\n\n".join(parts)


def as_markdown(rows: Sequence[AuditRow]) -> str:
    """For a page of documentation: the counts, the findings, then what is as documented because it was seen."""
    tables = [tabulate(counts(rows), headers=("verdict", "ops", "samples"), tablefmt="github")]
    for said, found in (("", findings(rows)), ("Seen as torch documents it:", confirmed(rows))):
        lines = [[line[name].replace("|", "/") for name in COLUMNS] for line in found]
        tables += [*filter(None, [said]), tabulate(lines, headers=COLUMNS, tablefmt="github")] if lines else []
    return "\n\n".join(tables) + "\n"
