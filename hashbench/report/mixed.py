"""What a comparison has to say where one sweep ran on several machines, or in parts under several settings.

Then the environments of two sweeps may be the same taken together while a model ran on another machine in each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from hashbench.records import Row
from hashbench.results.environments import environment_changes
from hashbench.results.load import Sweep
from hashbench.text import a_few

_SHOWN = 4


def remarks(base: Sweep, new: Sweep, pairs: Sequence[tuple[Row, Row]]) -> Iterator[str]:
    """Sentences on the rows of ``pairs`` (BASE's and NEW's of one model each); none where each side is of one
    environment, since what differs between the two is shown by itself."""
    sides = (("BASE", base, [row for row, _ in pairs]), ("NEW", new, [row for _, row in pairs]))
    several = False
    for side, sweep, rows in sides:
        kinds = _kinds(sweep.environments, rows)
        if len(kinds) > 1:
            several = True
            where = a_few(_differing_entries(kinds), _SHOWN)
            yield f"{side} mixes {len(kinds)} environments, which differ in {where}."
        yield from _unknown(side, sweep, rows)
    if several:
        yield from _moved(base, new, pairs)


def _kinds(environments: Mapping[str, Mapping[str, Any]], rows: Iterable[Row]) -> list[Mapping[str, Any]]:
    """The environments of ``rows``, those that differ in what matters."""
    kinds: list[Mapping[str, Any]] = []
    for key in dict.fromkeys(row.env for row in rows):
        found = environments.get(key)
        if found is not None and all(environment_changes([found], [kind]) for kind in kinds):
            kinds.append(found)
    return kinds


def _differing_entries(kinds: Sequence[Mapping[str, Any]]) -> list[str]:
    entries = {change.key for kind in kinds[1:] for change in environment_changes([kinds[0]], [kind])}
    return sorted(entries)


def _unknown(side: str, sweep: Sweep, rows: Sequence[Row]) -> Iterator[str]:
    """Rows of a task that was lost with its machine, for one."""
    names = [row.name for row in rows if row.env not in sweep.environments]
    if sweep.environments and names:
        yield f"{side} does not tell in which environment {a_few(names, _SHOWN)} ran."


def _moved(base: Sweep, new: Sweep, pairs: Sequence[tuple[Row, Row]]) -> Iterator[str]:
    known: dict[tuple[str, str], bool] = {}
    names = []
    for old, now in pairs:
        if old.env not in base.environments or now.env not in new.environments:
            continue
        both = (old.env, now.env)
        if both not in known:
            known[both] = bool(environment_changes([base.environments[old.env]], [new.environments[now.env]]))
        if known[both]:
            names.append(now.name)
    if names:
        count = f"{len(names)} of {len(pairs)} models"
        yield f"{count} ran in another environment than in BASE, which may be why they changed: {a_few(names, _SHOWN)}."
