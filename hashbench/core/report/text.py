"""Comparisons as text, Markdown, JSON and CSV. Every exporter returns a string and writes nothing."""

from __future__ import annotations

import html
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import inf
from typing import Any

from tabulate import tabulate

from hashbench.core.extensions import written
from hashbench.core.finding import Finding
from hashbench.core.finding import as_json as finding_json
from hashbench.core.records import ROW_KEY, Row, value_of
from hashbench.core.report.compare import Became, Comparison, ModelChange, new_in_words
from hashbench.core.report.sentence import (
    Clause,
    changes_in_words,
    data_of,
    facts_of,
    next_of,
    notes_of,
    sentence,
)
from hashbench.core.results.rows import ROWS, csv_text
from hashbench.core.text import count, one_line, shorten

COUNTED_ONLY = frozenset({Became.UNCHANGED, Became.STILL_SKIPPED, Became.NOT_SELECTED})
"""Outcomes whose models are only counted: they need no attention."""

_LONGEST_NOTE = 60

LISTED_ALIKE = 5
"""Minimum number of models not comparable for the same reason that share a line."""


def _table(headers: Sequence[str], lines: Iterable[Sequence[str]], style: str = "simple") -> str:
    # Without disable_numparse tabulate rewrites names that look like numbers: 1e5 becomes 100000.
    return tabulate(list(lines), headers=headers, tablefmt=style, disable_numparse=True)


# ------------------------------------------------------------------------------------------------ a comparison

ENVIRONMENT_HEADERS = ("environment", "base", "new")
CHANGE_HEADERS = ("outcome", "model", "mode", "base", "new", "note")


def as_text(comparison: Comparison[Row], clauses: Sequence[Clause] = ()) -> str:
    """Return the comparison as plain text of any width: the verdict with its ``clauses``, changes of models with the
    worst first, changes of the environment, and a line of counts."""
    title = f"{one_line(comparison.base)} → {one_line(comparison.new)}"
    return "\n\n".join([title, *_sections(comparison, clauses, style="simple", cell=one_line, bold=str)]) + "\n"


def as_markdown(comparison: Comparison[Row], clauses: Sequence[Clause] = ()) -> str:
    """Return the same as GitHub's Markdown; texts from models (names, errors) are escaped."""
    title = f"## hashbench compare: {escape_markdown(comparison.base)} → {escape_markdown(comparison.new)}"
    sections = _sections(comparison, clauses, style="pipe", cell=escape_markdown, bold="**{}**".format)
    return "\n\n".join([title, *sections]) + "\n"


def finding_of(comparison: Comparison[Row], clauses: Sequence[Clause] = ()) -> Finding:
    """Return the comparison for a terminal: the verdict, the models that got worse, and what to run next."""
    return Finding(
        headline=one_line(headline(comparison, clauses)),
        facts=(
            *facts_of(clauses),
            ("compared", f"{one_line(comparison.base)} -> {one_line(comparison.new)}"),
            ("environment", one_line(changes_in_words(comparison.environment))),
            ("in all", totals(comparison)),
        ),
        notes=(*notes_of(clauses), *map(one_line, comparison.remarks)),
        next=next_of(clauses),
        equal=not comparison.got_worse,
        differs=comparison.got_worse,
        data=_content(comparison, clauses),
    )


def escape_markdown(text: str) -> str:
    """Escape ``text`` for a cell of a Markdown table."""
    escaped = html.escape(one_line(text), quote=False)
    # Underscores count only at the edges of words, and nearly every model has some inside.
    return re.sub(r"([\\`*\[\]|~])|(?<![^\W_])_|_(?![^\W_])", lambda match: f"\\{match.group()}", escaped)


Cell = Callable[[str], str]


def _sections(
    comparison: Comparison[Row], clauses: Sequence[Clause], *, style: str, cell: Cell, bold: Cell
) -> Iterator[str]:
    listed, collapsed = _split(comparison.changes)
    yield bold(cell(headline(comparison, clauses)))
    if listed:
        yield _table(CHANGE_HEADERS, [[*map(cell, _change_cells(change))] for change in listed], style)
    if collapsed:
        yield "\n".join(f"- {cell(line)}" for line in collapsed)
    if comparison.environment:
        lines = [
            [cell(shorten(text, 50)) for text in (change.key, change.base, change.new)]
            for change in comparison.environment
        ]
        yield _table(ENVIRONMENT_HEADERS, lines, style)
    if remarks := (*notes_of(clauses), *comparison.remarks):
        yield "\n".join(f"- {cell(remark)}" for remark in remarks)
    yield f"In all: {totals(comparison)}"
    if commands := next_of(clauses):
        yield "\n".join(f"Next: {cell(command)}" for command in commands)


def headline(comparison: Comparison[Row], clauses: Sequence[Clause] = ()) -> str:
    """Return the verdict in one sentence: rows in trouble that are new, then which models got worse and why."""
    found = new_in_words(comparison.changes)
    said = sentence(clauses, new=found)
    if clauses:
        return said
    verdict = _verdict(comparison)
    if comparison.unpaired != (0, 0) and not comparison.got_worse:
        verdict += f" in the {count(comparison.compared, 'row')} that both have"
    return f"{found}; {verdict[:1].lower()}{verdict[1:]}" if found else verdict


def totals(comparison: Comparison[Row]) -> str:
    """Return one line: the number of rows with each outcome, the worst first, and the number without a partner."""
    counts = ", ".join(f"{number} {outcome}" for outcome, number in comparison.counts.items()) or "no models"
    base, new = comparison.unpaired
    unmatched = ", ".join(f"{count(rows, 'row')} of {side}" for rows, side in ((base, "BASE"), (new, "NEW")) if rows)
    return f"{counts}; without a partner: {unmatched}" if unmatched else counts


def _verdict(comparison: Comparison[Row]) -> str:
    worse = {outcome for outcome in comparison.counts if outcome.worse}
    if worse == {Became.NOT_COMPARABLE}:
        return "Whether anything got worse is not known"
    return "Worse" if worse else "Nothing got worse"


def _change_cells(change: ModelChange) -> list[str]:
    key = dict(zip(ROW_KEY, change.key, strict=True))
    base, new = (row.accuracy if row else "" for row in (change.base, change.new))
    return [change.outcome, shorten(key["name"], 30), key["mode"], base, new, _note(change)]


def _note(change: ModelChange) -> str:
    """Return the note in 60 characters, or in those of its kernel, which is never cut."""
    note, row = one_line(change.note), change.new or change.base
    if row is not None and row.kernel and row.module and len(note) > _LONGEST_NOTE:
        note = note.removesuffix(f" in {row.module}")
    return note if row is not None and row.kernel and row.kernel in note else shorten(note, _LONGEST_NOTE)


def _split(changes: Iterable[ModelChange]) -> tuple[list[ModelChange], list[str]]:
    """Split the changes into those that are listed and a line for each group of the others."""
    groups: dict[tuple[str, ...], list[ModelChange]] = {}
    for change in changes:
        groups.setdefault((change.outcome, *_shared(change)), []).append(change)
    listed: list[ModelChange] = []
    lines: list[str] = []
    for (outcome, kind, *why), group in groups.items():
        if not kind or (kind == "alike" and len(group) < LISTED_ALIKE):
            listed += group
        elif kind != "counted":
            counts = Counter(row.accuracy for change in group if (row := change.new or change.base))
            statuses = ", ".join(f"{number} {status}" for status, number in counts.most_common())
            what = f"{'whole group ' * (kind == 'group')}{', '.join(why)}"
            lines.append(f"{outcome}: {what} ({count(len(group), 'model')}: {statuses})")
    return listed, lines


def _shared(change: ModelChange) -> tuple[str, ...]:
    """Return what a change has in common with those that share its line: the kind of line, then the reason."""
    *group, _ = change.key
    if change.outcome is Became.NOT_SELECTED:
        return "selection", "NEW was not asked to run them"
    if change.outcome in COUNTED_ONLY:
        return ("counted",)
    if change.whole_group:
        return "group", *filter(None, group)
    if change.outcome in (Became.NOT_COMPARABLE, Became.PASSES_ELSEWHERE):
        return "alike", change.note, *filter(None, group)
    return ("",)


# ------------------------------------------------------------------------------------------- for other programs


def as_json(comparison: Comparison[Row], clauses: Sequence[Clause] = ()) -> str:
    """Return one JSON object with every model, also the unchanged ones; empty fields of rows are left out."""
    return finding_json(finding_of(comparison, clauses), command="hashbench compare") + "\n"


def _content(comparison: Comparison[Row], clauses: Sequence[Clause]) -> dict[str, Any]:
    return {
        "base": comparison.base,
        "new": comparison.new,
        "worse": comparison.got_worse,
        "classes": data_of(clauses),
        "compared": comparison.compared,
        "without_partner": dict(zip(("base", "new"), comparison.unpaired, strict=True)),
        "counts": {str(outcome): number for outcome, number in comparison.counts.items()},
        "environment": [
            {"key": change.key, "base": change.base, "new": change.new} for change in comparison.environment
        ],
        "changes": [
            {
                **dict(zip(ROW_KEY, change.key, strict=True)),
                "outcome": str(change.outcome),
                "worse": change.outcome.worse,
                "note": change.note,
                "base": filled(change.base),
                "new": filled(change.new),
            }
            for change in comparison.changes
        ],
    }


def filled(row: Row | None) -> dict[str, object] | None:
    """Return the fields of a row that are not empty; numbers that JSON lacks (infinity, NaN) as their names."""
    if row is None:
        return None
    row = written(row)
    values = {column: value_of(row, column) for column in ROWS.columns}
    known = {column: value for column, value in values.items() if value is not None and str(value)}
    numbers = {column: value for column, value in known.items() if isinstance(value, (int, float)) and abs(value) < inf}
    return {column: numbers.get(column, str(value)) for column, value in known.items()}


def as_csv(comparison: Comparison[Row]) -> str:
    """Return one line for each model, also unchanged ones: outcome, key, note, and status and place in both rows."""
    of_facts = (name for name, (_, _, column) in ROWS.columns.items() if column.place)
    columns = ("accuracy", "origin", "kernel", "module", "error", *of_facts)
    sides = [f"{side}_{column}" for side in ("base", "new") for column in columns]
    lines = []
    for change in comparison.changes:
        worse = "yes" if change.outcome.worse else "no"
        rows = [value_of(row, column) for row in (change.base, change.new) for column in columns]
        lines.append((change.outcome, worse, *change.key, change.note, *rows))
    return csv_text(["outcome", "worse", *ROW_KEY, "note", *sides], lines)
