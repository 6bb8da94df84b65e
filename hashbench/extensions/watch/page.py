"""Plot two recordings of a training loop for their page: which parts agree over the steps. Pure."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from jinja2 import Environment
from markupsafe import Markup

from hashbench.core.finding.page import bundled, environment
from hashbench.extensions.watch.compare import RankVerdict, range_words
from hashbench.extensions.watch.file import PARTS
from hashbench.extensions.watch.text import NAMES, first_step_words
from hashbench.extensions.watch.traced import LoopVerdict

HOME = "hashbench.extensions.watch"
"""The package that has the templates of this page."""

MOST_COLUMNS = 800
"""Maximum columns of a plot: of more steps, several share one."""

MOST_RANKS = 64
"""Maximum ranks that have a plot."""

EQUAL, DIFFERENT, UNREAD = "pass", "differ", ""
"""Kinds of a column, as in the report's style."""


@dataclass(frozen=True, slots=True)
class Bar:
    """Consecutive columns of one kind.

    Attributes:
        kind: :data:`EQUAL` or :data:`DIFFERENT`.
        at, width: columns.
        words: steps and kind, for the title.
    """

    kind: str
    at: int
    width: int
    words: str


@dataclass(frozen=True, slots=True)
class Strip:
    """The steps of one part.

    Attributes:
        part: in words.
        bars: from left to right, with gaps where it was not read.
    """

    part: str
    bars: tuple[Bar, ...]


@dataclass(frozen=True, slots=True)
class Plot:
    """The steps of one rank.

    Attributes:
        rank: of both recordings.
        columns: number of columns.
        first, last: steps at the ends, in words.
        strips: one for each part that was compared.
        mark: column of the first difference; ``None``: none.
    """

    rank: int
    columns: int
    first: str
    last: str
    strips: tuple[Strip, ...]
    mark: int | None


def plot_of(verdict: RankVerdict) -> Plot:
    """Draw the steps of a rank: a column is a step, or several of which one that differs counts as different."""
    numbers = list(verdict.seen)
    per_column = max(1, -(-len(numbers) // MOST_COLUMNS))
    columns = [numbers[at : at + per_column] for at in range(0, len(numbers), per_column)]
    parts = [part for part in PARTS if any(part in seen for seen in verdict.seen.values())]
    mark = None if verdict.step is None else numbers.index(verdict.step) // per_column
    strips = tuple(Strip(NAMES[part], tuple(_bars(verdict, part, columns))) for part in parts)
    first = "start" if numbers[0] < verdict.steps[0] else f"step {numbers[0]}"
    return Plot(verdict.rank, len(columns), first, f"step {numbers[-1]}", strips, mark)


def _bars(verdict: RankVerdict, part: str, columns: list[list[int]]) -> Iterator[Bar]:
    kinds = [_kind([verdict.seen[number].get(part) for number in column]) for column in columns]
    at = 0
    for kind, run in groupby(kinds):
        width = len(list(run))
        if kind:
            steps = _steps_words(columns[at][0], columns[at + width - 1][-1], start=verdict.steps[0])
            yield Bar(kind, at, width, f"{steps}: {'agree' if kind == EQUAL else 'differ'}")
        at += width


def _steps_words(first: int, last: int, *, start: int) -> str:
    """Return ``steps 3 to 9``, ``step 3``, or with the state before the first step ``start to step 9``."""
    if first < start:
        return f"start to step {last}" if last >= start else "start"
    return range_words(range(first, last + 1))


def _kind(seen: list[bool | None]) -> str:
    if False in seen:
        return DIFFERENT
    return EQUAL if True in seen else UNREAD


def figures_of(verdict: LoopVerdict) -> dict[str, Any]:
    """Return the plots of two recordings and their style, for :func:`~hashbench.core.finding.page.as_html`."""
    first = verdict.first
    plots = (
        _environment()
        .get_template("training_loop.html")
        .render(
            first_step="" if first is None else first_step_words(first),
            plots=[plot_of(rank) for rank in verdict.ranks[:MOST_RANKS]],
            omitted=len(verdict.ranks[MOST_RANKS:]),
            several=len(verdict.ranks) > 1,
        )
    )
    return {"figures": Markup(plots), "style": bundled("training_loop.css", HOME)}


@functools.cache
def _environment() -> Environment:
    return environment(HOME)
