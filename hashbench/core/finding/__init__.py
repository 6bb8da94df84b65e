"""The report of a comparison: headline, facts, table, notes and the next command, as data; and its text, JSON and page.

Every command that compares two things which should be equal makes one :class:`Finding`. :func:`as_text`,
:func:`as_json` and :func:`~hashbench.core.finding.page.as_html` render it, so that all verdicts look alike.
"""

from __future__ import annotations

import dataclasses
import json
import math
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from hashbench.core.errors import HashbenchError
from hashbench.core.text import join_limited

SCHEMA = 1
"""Version of the JSON documents (docs/json.md): a name that goes or changes its meaning makes it one more."""

NAMES = 2
"""Maximum names in one list of a text or page; the JSON document has all."""

NOTES = 6
"""Maximum notes in a text; the JSON document and the page have all."""

WIDTH = 100
"""Characters of a line where no terminal says its width."""

_LABEL = 18
"""Least characters of a label and the space behind it."""

Facts = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Table:
    """A table, or lines that stand as they are where there are no ``headers``.

    Attributes:
        title: a line above it.
        headers: names of columns; empty: each row is one line, such as one of a unified diff.
        rows: cells.
    """

    title: str = ""
    headers: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()

    @classmethod
    def of_lines(cls, title: str, lines: Iterable[str]) -> Table:
        """Return lines under a title."""
        return cls(title, rows=tuple((line,) for line in lines))


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The verdict on two things that should be equal, ready to be rendered. All texts are plain.

    Attributes:
        headline: the verdict in one line, without a full stop.
        facts: label and text of what is known, the most important first; empty texts are left out.
        table: what was compared around the difference.
        notes: what else to know, each a sentence or two.
        next: commands to run next, in order.
        parts: findings on parts of the same comparison.
        equal: nothing differs, and all was compared.
        differs: something differs. Neither this nor ``equal``: not all was compared.
        data: the verdict as plain values, for the JSON document.
    """

    headline: str
    facts: Facts = ()
    table: Table | None = None
    notes: tuple[str, ...] = ()
    next: tuple[str, ...] = ()
    parts: tuple[Finding, ...] = ()
    equal: bool = False
    differs: bool = True
    data: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        object.__setattr__(self, "facts", tuple((name, text) for name, text in self.facts if text))

    def __str__(self) -> str:
        return as_text(self)


def as_text(finding: Finding, *, width: int = WIDTH) -> str:
    """Return a finding for a terminal of ``width`` characters. Words, table lines and commands are never broken."""
    return "\n\n".join(_blocks(finding, width))


def _blocks(finding: Finding, width: int) -> Iterator[str]:
    """Yield the paragraphs of a finding, without the empty lines between them."""
    head = [wrapped(finding.headline, width)] if finding.headline else []
    yield "\n".join([*head, *_fact_lines(finding.facts, width)])
    if finding.table is not None and finding.table.rows:
        yield _table_text(finding.table)
    if notes := finding.notes:
        more = [f"And {len(notes) - NOTES} more notes, which --json has."] if len(notes) > NOTES + 1 else notes[NOTES:]
        yield "\n".join(wrapped(note, width) for note in (*notes[:NOTES], *more))
    for part in finding.parts:
        yield from _blocks(part, width)
    if finding.next:
        yield "\n".join(f"{'Next:' if not number else '':6}{command}" for number, command in enumerate(finding.next))


def wrapped(text: str, width: int, *, first: str = "", rest: str = "") -> str:
    """Wrap a text between words; names, paths and commands stay whole.

    Args:
        text: without line breaks.
        width: characters of a line.
        first, rest: what its first line and the others begin with.
    """
    return textwrap.fill(
        text,
        max(width, len(rest) + 20),
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _fact_lines(facts: Facts, width: int) -> Iterator[str]:
    label = max([_LABEL, *(len(name) + 2 for name, _ in facts)])
    for name, text in facts:
        yield wrapped(text, width, first=f"{name + ':':{label}}", rest=" " * label)


def _table_text(table: Table) -> str:
    from tabulate import tabulate  # not at import: torch's harness exits differently once tabulate is loaded

    if not table.headers:
        lines = [cell for row in table.rows for cell in row]
    else:
        # Without disable_numparse tabulate rewrites names that look like numbers: 1e5 becomes 100000.
        made = tabulate(table.rows, headers=table.headers, tablefmt="simple", disable_numparse=True)
        lines = [line.rstrip() for line in made.splitlines()]
    return "\n".join([table.title, *lines] if table.title else lines)


def document(finding: Finding) -> dict[str, Any]:
    """Return a finding as plain values: the verdict first, then what it is made of."""
    found: dict[str, Any] = {
        "headline": finding.headline,
        "equal": finding.equal,
        "differs": finding.differs,
        **finding.data,
        "facts": _numbered(finding.facts),
        "notes": list(finding.notes),
        "next": list(finding.next),
    }
    if finding.table is not None:
        found["table"] = {"headers": list(finding.table.headers), "rows": [list(row) for row in finding.table.rows]}
    if finding.parts:
        found["parts"] = [document(part) for part in finding.parts]
    return found


def _numbered(facts: Facts) -> dict[str, str]:
    """Return facts by label; the second of the same label is ``second run 2``."""
    found: dict[str, str] = {}
    times: Counter[str] = Counter()
    for name, text in facts:
        times[name] += 1
        found[name if times[name] == 1 else f"{name} {times[name]}"] = text
    return found


def as_json(finding: Finding, *, command: str = "") -> str:
    """Return a finding as one JSON object, with the version of the schema and the command that made it."""
    return _stamped(command, document(finding))


def error_as_json(error: HashbenchError, *, command: str = "") -> str:
    """Return the document of a command that has no verdict: what, its consequence, and what to do."""
    texts = {"what": error.what, "consequence": error.consequence, "tip": error.tip}
    return _stamped(command, {"error": texts})


def _stamped(command: str, content: Mapping[str, Any]) -> str:
    return json.dumps({"schema": SCHEMA, "command": command, **content}, indent=1)


def plain(value: Any) -> Any:
    """Return a value as JSON has it: dataclasses by field, numbers that are not finite, or complex, as text."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: plain(getattr(value, each.name)) for each in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    if isinstance(value, complex) or (isinstance(value, float) and not math.isfinite(value)):
        return str(value)
    return value


def few(names: Sequence[str]) -> str:
    """Return the first names of a list, and how many more there are: ``a, b and 3 more``."""
    return join_limited(names, NAMES)
