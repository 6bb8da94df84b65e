"""Fills of parts of one memory that two runs make in another order, such as the zeros that DDP writes for parameters
without a gradient, in the order of their addresses: they leave the same. Pure.

Fills that leave the same are taken to be the same. That hides a cause: where two runs zero buckets in a different
order, as their parameters were handed over in a different order, the difference shows at the first sum alone."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hashbench.core.records import OpRecord, Ref

Pair = tuple[int | None, int | None]


@dataclass(frozen=True, slots=True)
class PairedFills:
    """The pairs of two runs, with fills paired that follow each other in one memory.

    Attributes:
        pairs: of indices; those of such fills may decrease on the side of the second run.
        reordered: by id of a fill of the first run whose partner is elsewhere in the memory: for the last of a series,
            after which both runs have filled the same, the first of it; otherwise ``""``.
    """

    pairs: Sequence[Pair]
    reordered: Mapping[str, str]


def pair_fills(
    first: Sequence[OpRecord],
    second: Sequence[OpRecord],
    pairs: Sequence[Pair],
    is_fill: Callable[[OpRecord, Ref], bool],
) -> PairedFills:
    """Pair the fills of each memory that both runs fill alike but for the order.

    Args:
        first, second: the records of the runs.
        pairs: their pairs, in order.
        is_fill: whether a record overwrites an argument.
    """
    partner = {a: b for a, b in pairs if a is not None and b is not None}
    owner = {b: a for a, b in partner.items()}
    alike: dict[object, list[list[int]]] = {}
    for series in fill_series(second, is_fill):
        if owner.keys() >= {*series}:
            alike.setdefault(_left(second, series), []).append(series)
    node_of = {record.id: "" for record in second} | {second[b].id: first[a].id for b, a in owner.items()}
    taken: dict[int, int] = {}
    reordered: dict[str, str] = {}
    for series in fill_series(first, is_fill) if alike else ():
        if not partner.keys() >= {*series}:
            continue
        others = alike.get(_left(first, series), ())
        roots = (_root(second, other) for other in others)
        before = _root(first, series)
        same = [node_of.get(root, root) == before for root in roots]
        for a, b in zip(series, next(itertools.compress(others, same), ()), strict=False):
            taken[a] = b
            node_of[second[b].id] = first[a].id
            if _write(first[a]) != _write(second[b]):
                reordered[first[a].id] = first[series[0]].id if a == series[-1] else ""
    if {owner[b] for b in taken.values()} != {*taken}:
        return PairedFills(pairs, {})
    return PairedFills([(a, taken.get(a, b) if a is not None else b) for a, b in pairs], reordered)


def fill_series(records: Sequence[OpRecord], is_fill: Callable[[OpRecord, Ref], bool]) -> list[list[int]]:
    """List the indices of fills that follow each other in one memory, by one op with the same arguments, unread."""
    last: dict[str, list[int]] = {}
    found: list[list[int]] = []
    for index, record in enumerate(records):
        series = [last.pop(ref.source, []) for ref in record.inputs] if record.outputs or record.scalar else []
        if len(series) != 1 or record.rng or not is_fill(record, record.inputs[0]):
            continue  # whatever else reads or writes the memory ends the series
        if not series[0] or _kind(records[series[0][0]]) != _kind(record):
            series[0] = []
            found.append(series[0])
        series[0].append(index)
        last[record.id] = series[0]
    return found


def _kind(record: OpRecord) -> object:
    return record.phase, record.iteration, record.module, record.op, record.arguments


def _write(record: OpRecord) -> object:
    return record.inputs[0].offset, record.outputs


def _root(records: Sequence[OpRecord], series: Sequence[int]) -> str:
    return records[series[0]].inputs[0].source


def _left(records: Sequence[OpRecord], series: Sequence[int]) -> object:
    """Return what a series leaves, whatever its order."""
    return _kind(records[series[0]]), frozenset(Counter(_write(records[index]) for index in series).items())
