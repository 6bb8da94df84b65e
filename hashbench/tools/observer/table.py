"""Mismatches as text. Pure; names and lines of code come from a file that somebody else may have written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tabulate import tabulate

from hashbench.results.environments import EnvironmentChange
from hashbench.text import a_few, one_line, shorten
from hashbench.tools.observer.recording import Mismatch

_SHOWN = 50
_WIDTHS = {"kind": 12, "index": 15, "name": 44, "where": 40, "what": 60, "now": 44, "reference": 44}


def table(
    mismatches: Sequence[Mismatch],
    *,
    observed: int,
    expected: int,
    changes: Sequence[EnvironmentChange] = (),
    put_back: Sequence[tuple[str, bool, str]] = (),
) -> str:
    """The first mismatches as a table, how many there are, the environment's changes, and which values were put back
    (name, whether its own value differed, devices where it changed device)."""
    return "\n".join(_lines(mismatches, observed, expected, changes, put_back))


def _lines(
    mismatches: Sequence[Mismatch],
    observed: int,
    expected: int,
    changes: Sequence[EnvironmentChange],
    put_back: Sequence[tuple[str, bool, str]],
) -> Iterator[str]:
    count = {0: "no mismatches", 1: "1 mismatch"}.get(len(mismatches), f"{len(mismatches)} mismatches")
    yield f"{count} in {observed} observations (the reference has {expected})"
    if mismatches:
        cells = [
            [shorten(cell, width) for cell, width in zip(_row(one), _WIDTHS.values(), strict=True)]
            for one in mismatches[:_SHOWN]
        ]
        yield tabulate(cells, headers=list(_WIDTHS), disable_numparse=True)
    if len(mismatches) > _SHOWN:
        yield f"and {len(mismatches) - _SHOWN} more"
    if changes:
        yield "this environment is not that of the reference:"
        yield from (f"  {one_line(c.key)}: {_side(c.base)} in the reference, {_side(c.new)} now" for c in changes)
    differed = [one_line(name) for name, other, _ in put_back if other]
    if put_back:
        yield f"values put back: {len(put_back)}, other than this run's: {len(differed)}" + (
            f": {a_few(differed)}" if differed else ""
        )
    moved = [f"{one_line(name)} ({device})" for name, _, device in put_back if device]
    if moved:
        yield f"values put back on another device than they were saved from: {a_few(moved)}"


def _row(one: Mismatch) -> list[str]:
    index = " / ".join("-" if place is None else str(place) for place in (one.index, one.reference_index))
    where = ", ".join(part for part in (one.phase, one.module, one.source) if part)
    return [one_line(text) for text in (one.kind, index, one.name, where, one.detail, one.current, one.reference)]


def _side(text: str) -> str:
    return shorten(one_line(text), 60) or "absent"
