"""Draw two implementations as two columns of ops, those that hold the same joined by lines. No torch."""

from __future__ import annotations

import functools
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise, zip_longest
from typing import Any

from jinja2 import Environment
from markupsafe import Markup

from hashbench.core.finding.page import bundled, environment
from hashbench.extensions.implementations.pair.finding import NAMES
from hashbench.extensions.implementations.pair.verdict import ImplementationsVerdict, PartedPlace

HOME = "hashbench.extensions.implementations"
"""The package that has the templates of this page."""

FEWEST_ROWS, MOST_ROWS = 4, 60
"""Rows of a block: shorter ones are merged, longer ones cut."""

FEW_BLOCKS = 2
"""Of so few blocks all are open."""

JOINED, LONE, FIRST, LATER = "joined", "lone", "first", "later"
"""Kinds of an op: the other side holds the same; it does not; the two part here first, or here as well."""

_LAYER = re.compile(r"(?:.*?\.)??\d+(?=\.|$)")

Row = tuple[int | None, int | None]


@dataclass(frozen=True, slots=True)
class ColumnOp:
    """One op in its column: its number, its text, its kind."""

    number: int
    text: str
    kind: str


@dataclass(frozen=True, slots=True)
class ColumnLine:
    """A line between two rows of a block: of the left, of the right; :data:`JOINED` or :data:`FIRST`."""

    left: int
    right: int
    kind: str


@dataclass(frozen=True, slots=True)
class ColumnBlock:
    """Consecutive rows of both columns.

    Attributes:
        title: modules of both sides.
        counts: ops of each side, and how many of these the other has.
        left, right: the columns; ``None`` where a row has no op on that side.
        lines: between ops of this block.
        first: the first parting is in it.
        shown: it is open.
    """

    title: str
    counts: tuple[str, str]
    left: tuple[ColumnOp | None, ...]
    right: tuple[ColumnOp | None, ...]
    lines: tuple[ColumnLine, ...]
    first: bool
    shown: bool


def figures_of(verdict: ImplementationsVerdict, names: tuple[str, str] = NAMES) -> dict[str, Any]:
    """Return both columns and their style, for :func:`~hashbench.core.finding.page.as_html`; empty without ops."""
    blocks = blocks_of(verdict)
    if not blocks:
        return {}
    drawn = _environment().get_template("columns.html").render(blocks=blocks, names=names, parted=verdict.parted)
    return {"figures": Markup(drawn), "style": bundled("columns.css", HOME)}


def blocks_of(verdict: ImplementationsVerdict) -> list[ColumnBlock]:
    """Return both columns in blocks of a module each, joined ops beside each other where order allows it."""
    places = [{name: at for at, (name, _) in enumerate(column)} for column in verdict.columns]
    joined = [(places[0][a], places[1][b]) for a, b in verdict.joined if a in places[0] and b in places[1]]
    kinds = [_kinds(verdict.parted, side, places[side], {pair[side] for pair in joined}) for side in (0, 1)]
    ends = _first_ends(verdict.parted, places)
    rows = _rows(_chain_through(joined, ends), len(places[0]), len(places[1]))
    cut = list(_cut(rows, verdict))
    return [_block(block, verdict, joined, kinds, ends, few=len(cut) <= FEW_BLOCKS) for block in cut]


def _kinds(parted: Sequence[PartedPlace], side: int, places: dict[str, int], joined: set[int]) -> list[str]:
    kinds = [JOINED if at in joined else LONE for at in range(len(places))]
    for number, each in reversed(list(enumerate(parted))):
        place = (each.a, each.b)[side]
        for name in place.ids if place is not None else ():
            if name in places:
                kinds[places[name]] = LATER if number else FIRST
    return kinds


def _first_ends(parted: Sequence[PartedPlace], places: Sequence[dict[str, int]]) -> Row:
    """Return the first op of the first parting on each side."""
    sides = (parted[0].a, parted[0].b) if parted else (None, None)
    a, b = (
        next((at[name] for name in place.ids if name in at), None) if place is not None else None
        for place, at in zip(sides, places, strict=True)
    )
    return a, b


def _rows(chain: Iterable[tuple[int, int]], a: int, b: int) -> list[Row]:
    """Return the rows of both columns: the ops of the chain, and what is between them side by side."""
    rows: list[Row] = []
    for (i, j), (k, m) in pairwise([(-1, -1), *chain, (a, b)]):
        rows += zip_longest(range(i + 1, k), range(j + 1, m))
        rows.append((k, m))
    return rows[:-1]


def _chain_through(joined: Sequence[tuple[int, int]], ends: Row) -> list[tuple[int, int]]:
    """Return a long chain of joined ops that stand in the same order on both sides; the first parting is one of it."""
    a, b = ends
    if a is None or b is None:
        return _chain(joined)
    before = _chain(pair for pair in joined if pair[0] < a and pair[1] < b)
    return [*before, (a, b), *_chain(pair for pair in joined if pair[0] > a and pair[1] > b)]


def _chain(joined: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return a longest chain of pairs in which both numbers grow."""
    ends: list[int] = []
    links: list[Any] = []
    for pair in sorted(joined, key=lambda pair: (pair[0], -pair[1])):
        at = bisect_left(ends, pair[1])
        ends[at : at + 1], links[at : at + 1] = [pair[1]], [(pair, links[at - 1] if at else None)]
    chain: list[tuple[int, int]] = []
    link = links[-1] if links else None
    while link is not None:
        pair, link = link
        chain.append(pair)
    return chain[::-1]


def _cut(rows: Sequence[Row], verdict: ImplementationsVerdict) -> Iterator[list[Row]]:
    """Cut rows where the layer of the side that has modules changes; small blocks are merged, large ones cut."""
    side = 0 if any(_module(text) for _, text in verdict.columns[0]) else 1
    layer = ""
    named = []
    for row in rows:
        at = row[side]
        layer = _layer(verdict.columns[side][at][1]) if at is not None else layer
        named.append((layer, row))
    waiting: list[Row] = []
    for _, group in groupby(named, key=lambda each: each[0]):
        block = [row for _, row in group]
        if len(block) < FEWEST_ROWS:
            waiting += block
            continue
        yield from _pieces(waiting)
        yield from _pieces(block)
        waiting = []
    yield from _pieces(waiting)


def _pieces(rows: list[Row]) -> Iterator[list[Row]]:
    yield from (rows[at : at + MOST_ROWS] for at in range(0, len(rows), MOST_ROWS))


def _module(text: str) -> str:
    return text.partition(" in ")[2]


def _layer(text: str) -> str:
    """Return the module of an op up to its first number: ``model.layers.0`` of ``model.layers.0.attn``."""
    module = _module(text)
    numbered = _LAYER.match(module)
    return numbered[0] if numbered else module


def _block(
    rows: Sequence[Row],
    verdict: ImplementationsVerdict,
    joined: Iterable[tuple[int, int]],
    kinds: Sequence[Sequence[str]],
    ends: Row,
    *,
    few: bool,
) -> ColumnBlock:
    def op_of(side: int, at: int | None) -> ColumnOp | None:
        return None if at is None else ColumnOp(at, verdict.columns[side][at][1], kinds[side][at])

    sides = [[op_of(side, row[side]) for row in rows] for side in (0, 1)]
    place = [{op.number: at for at, op in enumerate(ops) if op is not None} for ops in sides]
    lines = [ColumnLine(place[0][i], place[1][j], JOINED) for i, j in joined if i in place[0] and j in place[1]]
    a, b = ends
    if a in place[0] and b in place[1]:
        lines.append(ColumnLine(place[0][a], place[1][b], FIRST))
    ops = [[op for op in column if op is not None] for column in sides]
    titles = [" … ".join(dict.fromkeys((_layer(each[0].text), _layer(each[-1].text)))) for each in ops if each]
    first = any(op.kind == FIRST for each in ops for op in each)
    return ColumnBlock(
        title=" / ".join(filter(None, dict.fromkeys(titles))),
        counts=(_joined_of(ops[0]), _joined_of(ops[1])),
        left=tuple(sides[0]),
        right=tuple(sides[1]),
        lines=tuple(lines),
        first=first,
        shown=few or first,
    )


def _joined_of(ops: Sequence[ColumnOp]) -> str:
    return f"{sum(op.kind == JOINED for op in ops)} of {len(ops)}"


@functools.cache
def _environment() -> Environment:
    return environment(HOME)
