"""A night as GitHub's Markdown, for the summary of a CI job: what changed first, then totals, then everything else.

Names and errors come from models and are escaped. A summary may have 1 MiB; what does not fit is counted, and nothing
is cut in the middle.
"""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tabulate import tabulate

from hashbench.catalog import Kind, kind_of
from hashbench.records import Row
from hashbench.report.describe import count, rate, seen
from hashbench.report.expectations import STALE_AFTER, ExpectationStatus, Judged, Judgement
from hashbench.report.history import History, ModelHistory
from hashbench.report.text import escape_markdown
from hashbench.results.environments import EnvironmentChange
from hashbench.results.load import is_link
from hashbench.text import one_line, shorten

LIMIT = 900_000
"""Bytes of UTF-8; GitHub shows no summary of a step that has more than 1 MiB."""


@dataclass(frozen=True, slots=True)
class _Room:
    """How much of everything is shown."""

    lines: int
    details: int


_ROOMS = (_Room(500, 100), _Room(200, 30), _Room(60, 8), _Room(15, 0))
_NAME, _CELL, _SENTENCE = 60, 90, 700

Thing = TypeVar("Thing")


def as_markdown(history: History, judged: Judged) -> str:
    """The summary of the last night; at most :data:`LIMIT` bytes."""
    for room in _ROOMS:
        text = "\n\n".join(_sections(history, judged, room)) + "\n"
        if len(text.encode()) <= LIMIT:
            return text
    return "\n\n".join(_head(history, judged)) + "\n"


def as_summary(history: History, judged: Judged) -> str:
    """The beginning of it, for a terminal: what changed, and the totals."""
    room = _Room(40, 0)
    parts = (_head(history, judged), _problems(judged, room), _worse(judged, room), _changed(history, judged, room))
    rest = (_environment(judged, room), _totals(judged))
    return "\n\n".join(section for part in (*parts, *rest) for section in part) + "\n"


def _sections(history: History, judged: Judged, room: _Room) -> Iterator[str]:
    yield from _head(history, judged)
    yield from _problems(judged, room)
    yield from _worse(judged, room)
    yield from _changed(history, judged, room)
    yield from _environment(judged, room)
    yield from _totals(judged)
    yield from _not_passing(history, judged, room)
    yield from _expectations(judged, room)
    yield from _older_problems(history, room)
    yield from _details(judged, room)


# ------------------------------------------------------------------------------------------------ what changed


def _head(history: History, judged: Judged) -> Iterator[str]:
    yield f"# hashbench: {_text(judged.night, _NAME)}"
    yield f"**{verdict(judged)}**"
    since = f", compared with {_text(judged.last, _NAME)}" if judged.last else ""
    began = f", began {history.nights[-1].when}" if history.nights[-1].when else ""
    yield f"{count(len(history.nights), 'night')} of history{since}{began}."
    if judged.remarks:
        yield _bullets(judged.remarks)


def verdict(judged: Judged) -> str:
    """One line: whether anything got worse, and what."""
    worse = Counter(str(one.status) for one in judged.judgements if one.worse)
    parts = [f"{number} {word}" for word, number in worse.items()]
    if judged.problems:
        parts.append(count(len(judged.problems), "problem") + " of the night itself")
    return f"Worse: {', '.join(parts)}" if parts else "Nothing got worse"


def _problems(judged: Judged, room: _Room) -> Iterator[str]:
    if judged.problems:
        yield "## What went wrong with this night"
        yield _bullets(judged.problems, most=room.lines)


def _worse(judged: Judged, room: _Room) -> Iterator[str]:
    worse = [one for one in judged.judgements if one.worse]
    if worse:
        yield "## Worse"
        yield _table(("what", *_MODEL, "expected", "now", "why", "link"), worse, _worse_cells, room.lines)


def _worse_cells(one: Judgement) -> list[str]:
    before, now = (row.accuracy if row else "no row" for row in (one.base, one.new))
    expected = f"{before} since {one.since}" if one.since else f"{before}{'' if one.expected else ' (last night)'}"
    return [_text(one.word), *_model_cells(one.key), _text(expected), _text(now), _text(one.note), _link(one.link)]


def _changed(history: History, judged: Judged, room: _Room) -> Iterator[str]:
    """Models that did something else last night than the night before, whatever is expected of them."""
    last = len(history.nights) - 1
    if judged.before is None:
        return
    before = judged.before
    moves = ((model.key, seen(model.at(before)), seen(model.at(last))) for model in history.models)
    changes = [move for move in moves if move[1] != move[2]]
    yield f"## What changed since {_text(judged.last, _NAME)}"
    if not changes:
        yield "Nothing: every model did what it did the night before."
        return
    changes.sort(key=lambda change: (change[2] == "pass", change[0]))
    yield _table((*_MODEL, "before", "now"), changes, _changed_cells, room.lines)


def _changed_cells(change: tuple[tuple[str, ...], str, str]) -> list[str]:
    key, before, now = change
    return [*_model_cells(key), _text(before), _text(now)]


def _environment(judged: Judged, room: _Room) -> Iterator[str]:
    if judged.environment:
        yield "## What changed in the environment"
        yield _table(("what", "before", "now"), judged.environment, _environment_cells, room.lines)


def _environment_cells(one: EnvironmentChange) -> list[str]:
    return [_text(one.key), _text(one.base), _text(one.new)]


# ---------------------------------------------------------------------------------------------------- totals


def _totals(judged: Judged) -> Iterator[str]:
    rows = [one.new for one in judged.judgements if one.new]
    yield "## Totals"
    if not rows:
        yield "This night has no rows."
        return
    statuses = [status for status, _ in Counter(row.accuracy for row in rows).most_common()]
    groups = sorted({_group(row) for row in rows})
    counts = Counter((_group(row), row.accuracy) for row in rows)
    lines = [[*map(_text, group), *(str(counts[group, status]) for status in statuses)] for group in groups]
    if len(groups) > 1:
        lines.append(["all", "", "", "", *(str(sum(row.accuracy == status for row in rows)) for status in statuses)])
    yield _table(("suite", "mode", "dtype", "device", *map(_text, statuses)), lines, list, 200)


def _group(row: Row) -> tuple[str, ...]:
    return row.suite, row.mode, row.dtype, row.dev


def _not_passing(history: History, judged: Judged, room: _Room) -> Iterator[str]:
    found = [one for one in judged.judgements if one.new and not kind_of(one.new.accuracy).is_fine]
    if not found:
        return
    models = {model.key: model for model in history.models}
    labels = [night.label for night in history.nights]
    headers = ("status", *_MODEL, "kernel", "cause", "module", "rate", "expected", "for nights", "what to do")
    yield "## Everything that does not pass"
    yield _table(headers, found, lambda one: _row_cells(one, models.get(one.key), labels), room.lines)
    skipped = sum(one.new is not None and kind_of(one.new.accuracy) is Kind.SKIP for one in judged.judgements)
    if skipped:
        yield f"{skipped} more were skipped."


def _row_cells(one: Judgement, model: ModelHistory | None, labels: Sequence[str]) -> list[str]:
    row = one.new
    if row is None:
        return []
    cause = f"{row.cause} ({row.confidence})" if row.cause and row.confidence else row.cause
    return [
        _text(row.accuracy),
        *_model_cells(one.key),
        _text(row.kernel or row.origin),
        _text(cause),
        _text(row.module),
        _text(rate(row)),
        _text(one.word) + (f" ({_link(one.link)})" if one.link else ""),
        _text(_since(model, labels)),
        _text(row.advice or row.error, 2 * _CELL),
    ]


def _since(model: ModelHistory | None, labels: Sequence[str]) -> str:
    if model is None or not model.intervals:
        return ""
    interval = model.intervals[-1]
    return f"{interval.nights}, since {labels[interval.first]}"


# ----------------------------------------------------------------------------------------------- expectations

_EXPECTATION_HEADINGS = {
    ExpectationStatus.STALE: f"Not seen in {STALE_AFTER} nights or more: take the expectation out if the difference "
    "is gone",
    ExpectationStatus.FIXED: "Passes and was expected not to",
    ExpectationStatus.NOT_SEEN: "Differs only now and then, and did not tonight",
    ExpectationStatus.UNEXPECTED: "New, and does not pass",
    ExpectationStatus.NOT_ASKED: "Expected, and this night was not asked to run it",
}


def _expectations(judged: Judged, room: _Room) -> Iterator[str]:
    lots = {status: [one for one in judged.judgements if _concerns(one, status)] for status in _EXPECTATION_HEADINGS}
    if not any(lots.values()):
        return
    yield "## Expectations"
    for status, lot in lots.items():
        if status is ExpectationStatus.NOT_ASKED and lot:
            yield f"{_EXPECTATION_HEADINGS[status]}: {count(len(lot), 'model')}."
        elif lot:
            yield f"{_EXPECTATION_HEADINGS[status]}:"
            yield _table(
                (*_MODEL, "expected", "nights not seen", "last seen", "link"), lot, _expected_cells, room.lines
            )


def _concerns(one: Judgement, status: ExpectationStatus) -> bool:
    if one.status is not status or one.worse:
        return False
    passes = one.new is None or kind_of(one.new.accuracy).is_fine
    return not (status is ExpectationStatus.UNEXPECTED and passes)


def _expected_cells(one: Judgement) -> list[str]:
    before = one.base.accuracy if one.base else ""
    since = f"{before} since {one.since}" if one.since else before
    return [*_model_cells(one.key), _text(since), str(one.unseen or ""), _text(one.seen), _link(one.link)]


def _older_problems(history: History, room: _Room) -> Iterator[str]:
    lines = [f"{night.label}: {problem}" for night in history.nights[:-1] for problem in night.problems]
    if lines:
        yield "## Earlier nights that could not be read wholly"
        yield _bullets(lines[::-1], most=room.lines)


# --------------------------------------------------------------------------------------------------- details


def _details(judged: Judged, room: _Room) -> Iterator[str]:
    rows = [one.new for one in judged.judgements if one.new and (one.new.because or one.new.detail)]
    if rows and room.details:
        yield "## Diagnoses"
    for row in rows[: room.details]:
        facts = [f"- {label}: {_text(value, _SENTENCE)}" for label, value in _facts(row) if value]
        title = " ".join(filter(None, (row.name, row.mode, row.kernel)))
        # Up to the blank line this is HTML, where Markdown's backslashes would be seen.
        summary = f"<summary>{html.escape(one_line(shorten(title, _CELL)))}</summary>"
        yield "\n\n".join([f"<details>{summary}", "\n".join(facts), "</details>"])
    if len(rows) > room.details:
        yield f"{len(rows) - room.details} more diagnoses are in accuracy.csv and in the HTML report."


def _facts(row: Row) -> list[tuple[str, str]]:
    return [
        ("what differs", row.detail),
        ("where", ", ".join(filter(None, (row.module, row.phase, row.source)))),
        ("cause", ", ".join(filter(None, (row.cause, row.confidence)))),
        ("because", row.because),
        ("evidence", row.evidence.text),
        ("under deterministic algorithms", row.deterministic_here),
        ("what to do", row.advice),
        ("repro", ": ".join(filter(None, (row.repro, row.reproduced)))),
        ("error", row.error),
    ]


# ---------------------------------------------------------------------------------------------------- pieces

_MODEL = ("model", "suite", "mode", "dtype", "device")


def _model_cells(key: Sequence[str]) -> list[str]:
    suite, mode, dtype, dev, name = key
    return [_text(name, _NAME), *map(_text, (suite, mode, dtype, dev))]


def _text(text: str, width: int = _CELL) -> str:
    return escape_markdown(shorten(text, width))


def _link(link: str) -> str:
    return f"[link]({link})" if link and is_link(link) else ""


def _bullets(lines: Sequence[str], *, most: int = 50) -> str:
    shown = [f"- {_text(line, _SENTENCE)}" for line in lines[:most]]
    return "\n".join([*shown, *([f"- and {len(lines) - most} more"] if len(lines) > most else [])])


def _table(headers: Sequence[str], things: Sequence[Thing], cells: Callable[[Thing], Sequence[str]], most: int) -> str:
    """A table with a line for each thing, at most ``most``, without the columns that are empty throughout."""
    shown = [cells(thing) for thing in things[:most]]
    used = [place for place in range(len(headers)) if any(line[place] for line in shown)]
    body = [[line[place] for place in used] for line in shown]
    text = tabulate(body, headers=[headers[place] for place in used], tablefmt="pipe", disable_numparse=True)
    return text if len(things) <= most else f"{text}\n\n{len(things) - most} more are not shown here."
