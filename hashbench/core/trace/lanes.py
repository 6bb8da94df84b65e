"""Order the records of several threads independently of scheduling. Pure: no torch.

Every thread that the program starts, and every task that it submits to a pool, has its own *lane*: its records in
order. A lane is placed where it was started, before its starter's next record, and after everything it reads. Two runs
of a program whose threads wait for their inputs thus have the same order, whichever thread ran first.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from hashbench.core.trace.build import IndexedTrace, RawLeaf, RawRecord


class LaneStart(NamedTuple):
    """Start of a lane. Lane 0 is the main thread.

    Attributes:
        parent: the lane that started it.
        position: number of records at that moment.
        caller: number of the enclosing op's record (-1: none).
        context: number of the context with its module and iteration.
    """

    parent: int
    position: int
    caller: int
    context: int


def in_schedule_independent_order(
    raw: IndexedTrace, lane_of: Sequence[int], lanes: Sequence[LaneStart], names: Mapping[int, str]
) -> IndexedTrace:
    """Return the trace in schedule-independent order; ``names`` are the lanes' names."""
    return part_in_order(raw, lane_of, lanes, names, first=0, first_leaf=0)[0]


def part_in_order(
    raw: IndexedTrace,
    lane_of: Sequence[int],
    lanes: Sequence[LaneStart],
    names: Mapping[int, str],
    *,
    first: int,
    first_leaf: int,
) -> tuple[IndexedTrace, dict[int, int]]:
    """Put a part of a trace in schedule-independent order.

    Args:
        raw: the part from record ``first`` and leaf ``first_leaf`` on; numbers count from the start of the trace.
        lane_of: number of each record's lane.
        lanes: all lanes.
        names: the lanes' names.
        first: number of records before the part.
        first_leaf: number of leaves before the part.

    Returns:
        the part in order, and the new numbers of its records and leaves by their old ones.
    """
    records = raw.records
    order = _in_order(records, lane_of, lanes, raw.callers, first)
    moved = {first + place: first + at for at, place in enumerate(order)}
    leaves, leaf_numbers = _leaves_in_order([records[place] for place in order], raw.leaves, first, first_leaf)
    moved |= leaf_numbers
    own = [first + place for place, lane in enumerate(lane_of) if not lane]
    marks = [(bisect_left(own, mark.position), mark) for mark in raw.marks]
    end = first + len(records)

    def new(node: int) -> int:
        return moved.get(node, node)

    return raw._replace(
        records=[records[place].renumbered(new) for place in order],
        leaves=leaves,
        results=[(label, value, None if node is None else new(node)) for label, value, node in raw.results],
        marks=[replace(mark, position=moved[own[at]] if at < len(own) else end) for at, mark in marks],
        notes={new(place): kept for place, kept in raw.notes.items()},
        callers={new(place): new(caller) for place, caller in raw.callers.items()},
        threads={moved[first + place]: names[lane] for place, lane in enumerate(lane_of) if lane},
    ), moved


def callers_of(numbers: Sequence[int], lane_of: Sequence[int], lanes: Sequence[LaneStart]) -> dict[int, int]:
    """Return, by record number, the number of the op inside which its lane was started, if that op finished later."""
    found: dict[int, int] = {}
    for number, lane in zip(numbers, lane_of, strict=True):
        at = lane
        while at and lanes[at].caller < 0:
            at = lanes[at].parent
        if at and number < lanes[at].caller:
            found[number] = lanes[at].caller
    return found


def _in_order(
    records: Sequence[RawRecord],
    lane_of: Sequence[int],
    lanes: Sequence[LaneStart],
    callers: Mapping[int, int],
    first: int,
) -> list[int]:
    """Return the indices of ``records`` in trace order; ``lane_of`` is the lane of each. Their numbers are indices plus
    ``first``."""
    rows: list[list[int]] = [[] for _ in lanes]
    for place, lane in enumerate(lane_of):
        rows[lane].append(place)
    index = {place: at for row in rows for at, place in enumerate(row)}
    starts = [bisect_left(rows[lane.parent], lane.position - first) for lane in lanes]
    paths: list[tuple[tuple[int, int, int], ...]] = [()]
    for number in range(1, len(lanes)):
        paths.append((*paths[lanes[number].parent], (starts[number], 0, number)))
    followers: dict[int, list[int]] = {}
    missing = [0] * len(records)

    def follows(place: int, earlier: int) -> None:
        if 0 <= earlier < place and lane_of[earlier] != lane_of[place]:
            followers.setdefault(earlier, []).append(place)
            missing[place] += 1

    for number in range(1, len(lanes)):
        if rows[number] and starts[number]:
            follows(rows[number][0], rows[lanes[number].parent][starts[number] - 1])
    for place, record in enumerate(records):
        for earlier in set(record.reads[1::3]):
            follows(place, earlier - first if earlier >= 0 else earlier)
        if first + place in callers:
            follows(callers[first + place] - first, place)
    waiting: list[tuple[tuple[tuple[int, int, int], ...], int]] = []

    def offer(place: int) -> None:
        """Make a record a candidate for the next place, if it is the first one left in its lane."""
        at, lane = index[place], lane_of[place]
        if not missing[place] and taken[lane] == at:
            heapq.heappush(waiting, ((*paths[lane], (at, 1, 0)), place))

    taken = [0] * len(lanes)
    for row in rows:
        if row:
            offer(row[0])
    order: list[int] = []
    while waiting:
        _, place = heapq.heappop(waiting)
        order.append(place)
        lane = lane_of[place]
        taken[lane] += 1
        for later in followers.get(place, ()):
            missing[later] -= 1
            offer(later)
        if taken[lane] < len(rows[lane]):
            offer(rows[lane][taken[lane]])
    return order


def _leaves_in_order(
    records: Iterable[RawRecord], leaves: Sequence[RawLeaf], first: int, first_leaf: int
) -> tuple[list[RawLeaf], dict[int, int]]:
    """Order leaves by their first read in ``records``; return them and the new number by old number. An unnamed leaf
    belongs to the module that reads it first."""
    found: list[RawLeaf] = []
    numbers: dict[int, int] = {}
    for place, record in enumerate(records, first):
        for node in record.reads[1::3]:
            if node < -first_leaf and node not in numbers:
                kind, name, digest, _, registered = leaves[-1 - node - first_leaf]
                numbers[node] = -1 - first_leaf - len(found)
                found.append((kind, record.module if kind == "other" else name, digest, place, registered))
    for number, leaf in enumerate(leaves, first_leaf):
        if -1 - number not in numbers:
            numbers[-1 - number] = -1 - first_leaf - len(found)
            found.append(leaf)
    return found, numbers
