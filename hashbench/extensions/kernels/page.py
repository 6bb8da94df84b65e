"""Draw the error of a kernel over the positions of its results, for its page. No torch."""

from __future__ import annotations

import functools
import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from jinja2 import Environment
from markupsafe import Markup

from hashbench.core.finding.page import bundled, environment
from hashbench.core.text import count, in_brackets
from hashbench.extensions.kernels.finding import number
from hashbench.extensions.kernels.verdict import JudgedOutput, RoundingVerdict

HOME = "hashbench.extensions.kernels"
"""The package that has the templates of this page."""

LEVELS = (0.0, 1.0, 4.0, 16.0, 256.0)
"""Upper bounds of the colours in units; what is larger, and NaN, has one of its own."""

WITHIN = 16.0
"""Largest error that is rounding, in units (``hashbench.core.run.rounding.LIMIT``)."""

LEGEND = ("equal", "up to 1 unit", "up to 4", "up to 16", "beyond rounding, up to 256", "more, or NaN")
"""Words for the colours."""

SIDE = 640
"""Pixels of a picture's longer side, at most."""

CELL = (7, 24)
"""Pixels of a cell's side, at least and at most."""


@dataclass(frozen=True, slots=True)
class Picture:
    """The error of one result over its positions.

    Attributes:
        title: dtype, name and shape.
        text: what it shows, in words.
        columns, rows: cells.
        width, height: pixels.
        paths: class and outline of the cells of each colour that occurs.
        worst: column and row of the cell with the largest error; ``None`` where all are equal.
    """

    title: str
    text: str
    columns: int
    rows: int
    width: int
    height: int
    paths: tuple[tuple[str, str], ...]
    worst: tuple[int, int] | None


def figures_of(verdicts: Mapping[str, RoundingVerdict]) -> dict[str, Any]:
    """Return pictures and their style, for :func:`~hashbench.core.finding.page.as_html`; empty without any.

    Args:
        verdicts: by what their pictures are called beside the result, such as ``bfloat16``.
    """
    drawn = [picture_of(each, name) for name, verdict in verdicts.items() for each in verdict.outputs if each.picture]
    if not drawn:
        return {}
    legend = [(f"e{level}", words) for level, words in enumerate(LEGEND)]
    text = _environment().get_template("errors.html").render(pictures=drawn, legend=legend)
    return {"figures": Markup(text), "style": bundled("errors.css", HOME)}


def picture_of(output: JudgedOutput, of: str = "") -> Picture:
    """Return the picture of one result; ``of``: what else its title says."""
    levels = [[level_of(units) for units in row] for row in output.picture]
    rows, columns = len(levels), max(map(len, levels))
    paths = tuple((f"e{level}", path) for level in range(len(LEGEND)) if (path := "".join(_runs(levels, level))))
    return Picture(
        title=f"{f'{of}: ' if of else ''}{output.name}, {output.dtype}{list(output.shape)}",
        text=_words(output, levels),
        columns=columns,
        rows=rows,
        width=columns * _side(columns),
        height=rows * _side(rows),
        paths=paths,
        worst=_worst(output),
    )


def level_of(units: float) -> int:
    """Return the number of the colour of an error."""
    return len(LEVELS) if math.isnan(units) else bisect_left(LEVELS, units)


def _side(cells: int) -> int:
    least, most = CELL
    return max(least, min(most, SIDE // cells))


def _runs(levels: list[list[int]], wanted: int) -> list[str]:
    """Return the outlines of all cells of a colour: a rectangle for each run in a row."""
    outlines = []
    for y, row in enumerate(levels):
        x = 0
        for level, run in groupby(row):
            length = len(list(run))
            if level == wanted:
                outlines.append(f"M{x} {y}h{length}v1h-{length}z")
            x += length
    return outlines


def _worst(output: JudgedOutput) -> tuple[int, int] | None:
    """Return the cell with the largest error."""
    found = [(_order(units), -y, -x) for y, row in enumerate(output.picture) for x, units in enumerate(row)]
    units, y, x = max(found)
    return (-x, -y) if units else None


def _order(units: float) -> float:
    return math.inf if math.isnan(units) else units


def _words(output: JudgedOutput, levels: list[list[int]]) -> str:
    """Return what a picture shows to those who do not see it."""
    cells = [level for row in levels for level in row]
    beyond = sum(level > LEVELS.index(WITHIN) for level in cells)
    last = output.shape[-1] if output.shape else 1
    others = math.prod(output.shape[:-1])
    across = f"across: {count(last, 'position')} of the last dimension"
    down = f"; down: {count(others, 'row')} of all others" if others > 1 else ""
    said = f"{beyond} of {count(len(cells), 'cell')} beyond rounding" if beyond else "no cell beyond rounding"
    return f"{said}; largest error {number(output.ratio)} units{in_brackets(across + down)}"


@functools.cache
def _environment() -> Environment:
    return environment(HOME)
