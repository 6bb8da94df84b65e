"""What there is to judge from of the models that got worse in a night: the nights before, their machines and kernels.

Reads the results folders of the nights that it compares.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from hashbench.core.catalog import Kind, kind_of
from hashbench.core.extensions import kernels_of, shown
from hashbench.core.records import Row
from hashbench.core.report.compare import RowChange, environment_changes
from hashbench.core.report.sentence import Explained, WorsenedRow, explained, link_of
from hashbench.core.results.load import Sweep
from hashbench.core.results.rows import row_key
from hashbench.extensions.report.history import History, ModelHistory, sweep_of

_MOST_NIGHTS = 30
"""Maximum nights of one build that are counted."""


@dataclass(slots=True)
class _Nights:
    """The full rows of nights, read when they are asked for."""

    history: History
    _sweeps: dict[int, tuple[Sweep, dict[tuple[str, ...], Row]]] = field(default_factory=dict)

    def sweep(self, night: int) -> Sweep:
        return self._read(night)[0]

    def row(self, night: int | None, key: tuple[str, ...]) -> Row | None:
        return None if night is None else self._read(night)[1].get(key)

    def files(self, night: int | None) -> tuple[Path, ...]:
        return () if night is None else self.history.nights[night].files

    def _read(self, night: int) -> tuple[Sweep, dict[tuple[str, ...], Row]]:
        if night not in self._sweeps:
            found = sweep_of(self.history.nights[night])
            self._sweeps[night] = found, {row_key(row): shown(row) for row in found.rows}
        return self._sweeps[night]


def explain(changes: Sequence[RowChange[Row]], history: History, *, before: int | None) -> tuple[Explained, ...]:
    """Explain why models got worse, from the night in which their present trouble began and the one before it.

    Args:
        changes: of the models to explain, in the last night of ``history``.
        history: with the night as its last one.
        before: index of the night before it with rows; ``None``: there is none.
    """
    nights, models = _Nights(history), {model.key: model for model in history.models}
    spans: defaultdict[tuple[int | None, int], list[RowChange[Row]]] = defaultdict(list)
    for change in changes:
        spans[_span(models.get(change.key), len(history.nights) - 1, before)].append(change)
    found = {}
    for (old, began), members in spans.items():
        for case in _cases(nights, members, models, old=old, began=began):
            found[case.change.key] = explained(case)
    last = nights.sweep(len(history.nights) - 1)
    return tuple(_of_tonight(found[change.key], change, last) for change in changes)


def _of_tonight(found: Explained, change: RowChange[Row], last: Sweep) -> Explained:
    link = link_of(change.new, last.folders.get(change.key)) if change.new is not None else ""
    return replace(found, change=change, link=link)


def _span(model: ModelHistory | None, last: int, before: int | None) -> tuple[int | None, int]:
    """Return the last night before a model's present trouble in which it has a row, and that in which it began."""
    standing = model.standing if model is not None and model.newest is not None else None
    if model is None or standing is None:
        return before, last
    earlier = [interval.last for interval in model.intervals if interval.last < standing.first]
    return max(earlier, default=None), standing.first


def _cases(
    nights: _Nights,
    changes: Sequence[RowChange[Row]],
    models: dict[tuple[str, ...], ModelHistory],
    *,
    old: int | None,
    began: int,
) -> Iterator[WorsenedRow]:
    new = nights.sweep(began)
    base = nights.sweep(old) if old is not None else None
    rows = [
        (nights.row(old, change.key) if old is not None else None, nights.row(began, change.key)) for change in changes
    ]
    files = {
        "base": nights.history.nights[old].files if old is not None else (),
        "new": nights.history.nights[began].files,
    }
    kernels = kernels_of([pair for pair in rows if all(pair)], **files)
    for change, (before, now) in zip(changes, rows, strict=True):
        of_build = _nights_of_build(nights, models.get(change.key), began)
        case = WorsenedRow(change=replace(change, new=now), new=new, before=before, base=base, nights=of_build)
        yield replace(case, kernels=kernels[change.key]) if change.key in kernels else case


def _nights_of_build(nights: _Nights, model: ModelHistory | None, began: int) -> tuple[int, int] | None:
    """Return in how many of how many nights of one build a model differed up to ``began``, if it passed in between."""
    now = nights.row(began, model.key) if model is not None else None
    if model is None or now is None or not _is_flaky(model, began):
        return None
    sweep, differed, counted = nights.sweep(began), 0, 0
    passed_between = False
    for night in range(began, max(-1, began - _MOST_NIGHTS), -1):
        row = nights.row(night, model.key)
        if row is None:
            continue
        if not _same_build(row, nights.sweep(night), now, sweep):
            break
        differs = kind_of(row.accuracy).has_cause
        if not differs and kind_of(row.accuracy) is not Kind.PASS:
            continue
        passed_between = passed_between or (differs and counted > differed)
        differed, counted = differed + differs, counted + 1
    return (differed, counted) if passed_between else None


def _is_flaky(model: ModelHistory, night: int) -> bool:
    """Return True if a model differs in ``night``, passed before that, and differed before that."""
    kinds = [kind_of(interval.accuracy) for interval in model.intervals if interval.first <= night]
    fine = [index for index, kind in enumerate(kinds) if kind.is_fine]
    return bool(fine and kinds[-1].has_cause and any(kind.has_cause for kind in kinds[: fine[-1]]))


def _same_build(old: Row, before: Sweep, now: Row, sweep: Sweep) -> bool:
    """Return True if two rows are known to be of the same files on the same machine with the same libraries."""
    machines = before.environments.get(old.env), sweep.environments.get(now.env)
    files = before.digest_of(old), sweep.digest_of(now)
    if machines[0] is None or machines[1] is None or not all(files):
        return False
    return files[0] == files[1] and not environment_changes([machines[0]], [machines[1]])
