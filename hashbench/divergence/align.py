"""Sequence alignment of two runs' records: which correspond, also where ops were inserted, removed or reordered.

Pure: no torch, no I/O. Records correspond when they are the same op in the same module, phase and iteration, in order.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from hashbench.divergence.unwritten import Coverage
from hashbench.records import OpRecord, Ref, Trace

EDIT_LIMIT = 400
"""Runs that differ by at most so many insertions and removals are aligned exactly, in time ``n + edits²``; others by
anchors (ids that both have) in ``n log n``."""

SECOND = "2:"
"""Before the id of a node that only the second run has."""

Pair = tuple[int | None, int | None]


def align(first: Sequence[OpRecord], second: Sequence[OpRecord]) -> list[Pair]:
    """Pairs of indices in order; ``(i, None)`` for a record that only the first run has, ``(None, j)`` for the second.

    Every index of both occurs exactly once, in increasing order on both sides.
    """
    keys_a, keys_b = [_key(record) for record in first], [_key(record) for record in second]
    head = _common(keys_a, keys_b)
    tail = _common(keys_a[head:][::-1], keys_b[head:][::-1])
    end_a, end_b = len(keys_a) - tail, len(keys_b) - tail
    pairs: list[Pair] = [(place, place) for place in range(head)]
    pairs += _middle(first, second, keys_a, keys_b, range(head, end_a), range(head, end_b))
    pairs += zip(range(end_a, len(keys_a)), range(end_b, len(keys_b)), strict=True)
    return pairs


def _key(record: OpRecord) -> Hashable:
    return record.phase, record.iteration, record.module, record.op


def _common(left: Sequence[Hashable], right: Sequence[Hashable]) -> int:
    if left == right:
        return len(left)
    return next(place for place in range(len(left) + 1) if left[place : place + 1] != right[place : place + 1])


def _middle(
    first: Sequence[OpRecord],
    second: Sequence[OpRecord],
    keys_a: Sequence[Hashable],
    keys_b: Sequence[Hashable],
    range_a: range,
    range_b: range,
) -> Iterator[Pair]:
    part_a, part_b = keys_a[range_a.start : range_a.stop], keys_b[range_b.start : range_b.stop]
    anchors = _few_edits(part_a, part_b)
    if anchors is None:
        anchors = _anchors([first[i].id for i in range_a], [second[j].id for j in range_b])
    at_a, at_b = range_a.start, range_b.start
    for anchor_a, anchor_b in [*anchors, (len(range_a), len(range_b))]:
        stop_a, stop_b = range_a.start + anchor_a, range_b.start + anchor_b
        yield from ((place, None) for place in range(at_a, stop_a))
        yield from ((None, place) for place in range(at_b, stop_b))
        if stop_a < range_a.stop and stop_b < range_b.stop:
            yield stop_a, stop_b
        at_a, at_b = stop_a + 1, stop_b + 1


def _few_edits(left: Sequence[Hashable], right: Sequence[Hashable]) -> list[tuple[int, int]] | None:
    """The longest common subsequence by Myers' greedy algorithm ("An O(ND) Difference Algorithm", 1986), as pairs of
    indices; ``None`` where it leaves more than :data:`EDIT_LIMIT` items over."""
    if abs(len(left) - len(right)) > EDIT_LIMIT:
        return None
    furthest = {1: 0}
    history: list[dict[int, int]] = []
    for edits in range(EDIT_LIMIT + 1):
        history.append(dict(furthest))
        for diagonal in range(-edits, edits + 1, 2):
            x = _step(furthest, diagonal, edits)
            while x < len(left) and x - diagonal < len(right) and left[x] == right[x - diagonal]:
                x += 1
            furthest[diagonal] = x
            if x >= len(left) and x - diagonal >= len(right):
                return _path(history, len(left), len(right))
    return None


def _step(furthest: Mapping[int, int], diagonal: int, edits: int) -> int:
    """How far in ``left`` the last edit brings us on this diagonal, before any matches."""
    if _came_down(furthest, diagonal, edits):
        return furthest[diagonal + 1]
    return furthest[diagonal - 1] + 1


def _came_down(furthest: Mapping[int, int], diagonal: int, edits: int) -> bool:
    return diagonal == -edits or (diagonal != edits and furthest[diagonal - 1] < furthest[diagonal + 1])


def _path(history: Sequence[Mapping[int, int]], x: int, y: int) -> list[tuple[int, int]]:
    matched: list[tuple[int, int]] = []
    for edits in range(len(history) - 1, -1, -1):
        start = _step(history[edits], x - y, edits)
        while x > start:
            x, y = x - 1, y - 1
            matched.append((x, y))
        x, y = (x, y - 1) if _came_down(history[edits], x - y, edits) else (x - 1, y)
    return matched[::-1]


def _anchors(ids_a: Sequence[str], ids_b: Sequence[str]) -> list[tuple[int, int]]:
    """The longest increasing chain of ids that both have (patience sorting); ids are unique within a run."""
    place_in_b = {name: place for place, name in enumerate(ids_b)}
    common = [(place, place_in_b[name]) for place, name in enumerate(ids_a) if name in place_in_b]
    tops: list[int] = []
    top_nodes: list[int] = []
    previous: list[int] = []
    for node, (_, place) in enumerate(common):
        pile = bisect_left(tops, place)
        previous.append(top_nodes[pile - 1] if pile else -1)
        tops[pile : pile + 1] = [place]
        top_nodes[pile : pile + 1] = [node]
    chain: list[tuple[int, int]] = []
    node = top_nodes[-1] if top_nodes else -1
    while node >= 0:
        chain.append(common[node])
        node = previous[node]
    return chain[::-1]


# ------------------------------------------------------------------------------------------------- two runs as one


@dataclass(frozen=True)
class PairedRuns:
    """Two runs side by side. A node is the id of a record or leaf of the first run; one that only the second run has
    is :data:`SECOND` and its id.

    ``records`` are pairs by node, in order; ``position`` is the place of a node among the records of the first run;
    ``node_of`` gives the node of an id of the second run.
    """

    first: Trace
    second: Trace
    records: Mapping[str, tuple[OpRecord | None, OpRecord | None]]
    position: Mapping[str, int]
    node_of: Mapping[str, str]

    @property
    def hashed(self) -> bool:
        """Whether both runs have the digests of what was read."""
        return self.first.hashed_inputs and self.second.hashed_inputs

    @cached_property
    def coverage(self) -> Coverage:
        """How much of its memory the first run has written; needed only where something differs."""
        return Coverage(self.first)

    @cached_property
    def other_coverage(self) -> Coverage:
        """The same of the second run."""
        return Coverage(self.second)

    @cached_property
    def order(self) -> Mapping[str, int]:
        """The place of every node, leaves before records."""
        return {node: place for place, node in enumerate([*(leaf.id for leaf in self.first.leaves), *self.records])}

    def read_by(self, node: str) -> Iterator[str]:
        """The nodes that a record read, in either run."""
        a, b = self.records.get(node, (None, None))
        if a is not None:
            yield from (ref.source for ref in a.inputs)
        if b is not None:
            yield from (self.node_of[ref.source] for ref in b.inputs)

    def same_place(self, a: Ref, b: Ref) -> bool:
        """Whether two reads show the same part of what the same node wrote."""
        return a.source == self.node_of[b.source] and a.offset == b.offset

    def same_content(self, a: Ref, b: Ref) -> bool:
        """Whether two reads of different nodes saw the same, as a reader of an extra copy does."""
        if a.digest and b.digest:
            return a.digest == b.digest
        content = self.coverage.content(a.source)
        return content is not None and content == self.other_coverage.content(b.source)

    def carries(self, a: Ref, b: Ref) -> bool:
        """Whether a difference may come in here. Memory that is also written keeps what lies beside the write."""
        if a.source == self.node_of[b.source]:
            return a.written or not self.hashed or a.digest != b.digest
        return a.offset != b.offset or not self.same_content(a, b)


def pair(first: Trace, second: Trace) -> PairedRuns:
    """Align two runs, and give every record and leaf of both its node."""
    leaves = {leaf.id: leaf.position for leaf in first.leaves}
    node_of = {leaf.id: leaf.id if leaf.id in leaves else SECOND + leaf.id for leaf in second.leaves}
    position = {**{node_of[leaf.id]: leaf.position for leaf in second.leaves}, **leaves}
    records: dict[str, tuple[OpRecord | None, OpRecord | None]] = {}
    last = 0
    for place_a, place_b in align(first.records, second.records):
        a = None if place_a is None else first.records[place_a]
        b = None if place_b is None else second.records[place_b]
        last = last if place_a is None else place_a
        node = a.id if a is not None else SECOND + b.id if b is not None else ""
        if b is not None:
            node_of[b.id] = node
        records[node] = (a, b)
        position[node] = last
    return PairedRuns(first, second, records, position, node_of)
