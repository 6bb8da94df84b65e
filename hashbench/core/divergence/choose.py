"""Choose the difference that reached the results: of all that entered in their backward slice, the first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from hashbench.core.catalog import Origin
from hashbench.core.divergence.align import PairedRuns
from hashbench.core.divergence.describe import entered_at
from hashbench.core.divergence.introduce import (
    Differences,
    Source,
    contents_in_words,
    layouts_differ,
    opaque_source,
    unwritten_memory,
)
from hashbench.core.divergence.slice import backward_slice
from hashbench.core.records import Result, Steering, op_of

_RANK: Mapping[str, int] = {Origin.INPUT: 0, Origin.STATE: 1}
"""Origins that lie before the first op, wherever the tensor is first read."""


@dataclass(frozen=True, slots=True)
class ChosenSource:
    """The difference that reached the results.

    Attributes:
        source: where it entered; ``None`` if no result differs.
        reached: the nodes on its ways to the results.
        steered_by: the scalar by which the runs went on with other ops or arguments.
    """

    source: Source | None = None
    reached: frozenset[str] = frozenset()
    steered_by: Steering | None = None


def choose_source(differences: Differences, differing: Sequence[str], *, draws_first: bool = True) -> ChosenSource:
    """Choose the difference that reached the results that differ; without any results, that of all records.

    With ``draws_first``, that of numbers which Python may have read comes before an order or a value from outside torch
    behind them.
    """
    runs = differences.runs
    old, new = ({result.name: result for result in run.results} for run in (runs.first, runs.second))
    pairs = [(old.get(name), new.get(name)) for name in differing]
    if (old or new) and not pairs:
        return ChosenSource()
    reached = _slice(differences, roots(differences, pairs) if old or new else sorted(differences.differs))
    source = first_source(differences, reached)
    if source is None and pairs and runs.opaque:
        source = opaque_source(runs, runs.opaque)
    elif source is None and pairs:
        viewed = _slice(differences, odd_views(differences, *pairs[0]))
        reached = reached + viewed
        source = first_source(differences, viewed) or written_after_the_last_record(
            differences, differing[0], *pairs[0]
        )
    if source is None:
        return ChosenSource(None, frozenset(reached))
    if source.origin in (Origin.SEQUENCE, Origin.OUTSIDE, Origin.RANKS):
        reached = reached + _slice(differences, _scalars_that_chose(differences, source))
    if source.origin not in (Origin.SEQUENCE, Origin.OUTSIDE):
        return ChosenSource(source, frozenset(reached))
    steered_by = steering(differences, source)
    draw = unread_draw(differences, source) if draws_first else ""
    if draw:
        drawn = _slice(differences, [draw])
        source, reached = _behind_a_draw(differences, draw, earliest(differences, drawn), source), reached + drawn
    return ChosenSource(source, frozenset(reached), steered_by)


def unread_draw(differences: Differences, source: Source) -> str:
    """Return the first draw before a source that differs since its RNG state differed, and that no record
    read, or ``""``: Python may have read it, as the order of a DataLoader."""
    runs = differences.runs
    draws = {
        node: None
        for node, (a, b) in runs.records.items()
        if node in differences.differs and runs.position[node] < source.position and a and b and a.rng != b.rng
    }
    for node in runs.records if draws and not source.opaque_producer else ():
        if runs.wrote(node):
            for read, ref in runs.reads(node):
                if not ref.written:
                    draws.pop(read, None)
    return "" if source.opaque_producer else next(iter(draws), "")


def _behind_a_draw(differences: Differences, draw: str, drawn: Source | None, source: Source) -> Source:
    """Return where the numbers of a draw came to differ, with the doubt whether ``source`` follows from them.

    A clock behind an order that reaches no result (``randperm(9).tolist()``, then ``x * time()``) looks the same.
    """
    if drawn is None:
        return source
    detail = (
        f"{drawn.detail}. No op reads what {op_of(draw)} drew, so Python may have: "
        f"{entered_at(differences.runs, source)} behind it may follow from that, or from something "
        f"else outside torch ({source.detail}: {source.first} and {source.second})"
    )
    return replace(drawn, detail=detail)


def _slice(differences: Differences, starts: Iterable[str]) -> tuple[str, ...]:
    """Return the nodes that lead to these by what differs."""
    suspects = differences.differs | differences.tainted
    return tuple(backward_slice(filter(suspects.__contains__, starts), differences.came_from, lambda _: True).reached)


def roots(differences: Differences, pairs: Iterable[tuple[Result | None, Result | None]]) -> Iterator[str]:
    """Yield the nodes that wrote the results; for a result that is a Python value, the records that returned it."""
    for a, b in pairs:
        if a is not None and a.source:
            yield a.source
        if b is not None and b.source:
            yield differences.runs.node_of[b.source]
        values = [result.digest.value for result in (a, b) if result is not None and not result.source]
        for node in differences.scalars if values else ():
            if any(record is not None and record.scalar in values for record in differences.runs.records[node]):
                yield node


def first_source(differences: Differences, reached: Iterable[str]) -> Source | None:
    """Return the first introduction in a slice; a setting that changed before all of them takes their place."""
    first, settings = earliest(differences, reached), settings_source(differences.runs)
    if settings is None or (first is not None and (first.origin in _RANK or first.position < settings.position)):
        return first
    return replace(settings, first_visible_at=(first or settings).node)


def earliest(differences: Differences, nodes: Iterable[str]) -> Source | None:
    """Return the earliest introduction: inputs and state before any op, then by position; node order breaks ties."""
    return min(
        (differences.sources[node] for node in nodes if node in differences.sources),
        key=lambda source: (_RANK.get(source.origin, 2), source.position, differences.runs.order.get(source.node, 0)),
        default=None,
    )


def settings_source(runs: PairedRuns) -> Source | None:
    """Return the first global torch setting in which the runs differ; its position is where it was last known equal."""
    position = 0
    for a, b in zip(runs.first.marks, runs.second.marks, strict=False):
        old, new = dict(a.settings), dict(b.settings)
        changed = [name for name in sorted({*old, *new}) if old.get(name) != new.get(name)]
        if changed:
            name = changed[0]
            detail = f"the runs differ in torch's global settings at {a.label}: {', '.join(changed)}"
            shown = (f"{name}={old.get(name, 'absent')}", f"{name}={new.get(name, 'absent')}")
            return Source(Origin.SETTINGS, f"setting:{name}", position, detail, *shown)
        position = a.position
    return None


def odd_views(differences: Differences, a: Result | None, b: Result | None) -> Iterator[str]:
    """Yield the views of a result's writer that the two runs took differently: the result may be another view of it."""
    if a is None or b is None or not a.source or unwritten_memory(differences.runs, a.source) is not None:
        return
    for node, records in differences.runs.records.items():
        view = (
            node in differences.differs
            and not differences.runs.wrote(node)
            and not any(r and r.opaque for r in records)
        )
        if view and a.source in differences.runs.read_by(node):
            yield node


def written_after_the_last_record(differences: Differences, name: str, a: Result | None, b: Result | None) -> Source:
    """Return the source of a result that differs although every record agrees: it was written without torch."""
    runs, writer = differences.runs, a.source if a is not None else ""
    memory = unwritten_memory(runs, writer)
    if memory is not None:
        return differences.traceable(writer, memory)
    if a is None or b is None:
        detail = f"the result {name} exists in one run only"
    elif writer:
        detail = f"the result {name} was modified outside the dispatcher after its last recorded write"
    else:
        detail = f"the result {name} was not computed by any recorded op"
    at = runs.position.get(writer, max(0, len(runs.first.records) - 1))
    old, new = ("absent" if x is None else x.digest.value for x in (a, b))
    if a is not None and b is not None and layouts_differ([a.digest], [b.digest]):
        old, new = contents_in_words([a.digest], [b.digest])
    hidden = bool(writer) and a is not None and b is not None
    return differences.traceable(writer, Source(Origin.OUTSIDE, writer, at, detail, old, new, opaque_producer=hidden))


def _scalars_that_chose(differences: Differences, chosen: Source) -> list[str]:
    """List the scalars read out before the runs diverge: they reach the results by choosing what is run."""
    last = chosen.position if chosen.origin == Origin.OUTSIDE else len(differences.runs.first.records)
    return [
        node
        for node in (*differences.scalars, *differences.unmatched_scalars)
        if differences.runs.position[node] <= last
    ]


def steering(differences: Differences, source: Source) -> Steering | None:
    """Return the last differing scalar before ``source`` and the kernel where its difference entered."""
    earlier = [node for node in differences.scalars if differences.runs.position[node] <= source.position]
    if not earlier:
        return None
    name = earlier[-1]
    old, new = differences.runs.records[name]
    chosen = earliest(differences, _slice(differences, [name]))
    kernel = "" if chosen is None else entered_at(differences.runs, chosen)
    return Steering(name, old.scalar if old else "", new.scalar if new else "", kernel)
