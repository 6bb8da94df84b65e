"""Build a trace part by part while it is recorded: each part costs what is new in it, and waits for nothing.

A part holds the records that are complete. A call in progress in another thread has its record in a later part, as has
a call that a thread recorded meanwhile: within a part, the order is that of :mod:`~hashbench.core.trace.lanes`. Digests
of collectives that have not arrived are ``pending`` in their part and amended by a later one.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from types import MappingProxyType
from typing import Any, NamedTuple

from hashbench.core.records import PENDING, SettingsMark, TensorDigest, Trace
from hashbench.core.trace.build import IndexedTrace, RawLeaf, RawRecord, RawResult, TraceBuilder
from hashbench.core.trace.digest import RawDigest, readable
from hashbench.core.trace.lanes import LaneStart, callers_of, part_in_order


@dataclass(frozen=True, slots=True)
class TraceSegment:
    """The part of a trace since an earlier one.

    Attributes:
        trace: its records, leaves, results, marks and early reads; positions count from the start of the whole trace.
        first: number of records of earlier segments.
        arrived: digests of records of earlier segments that were ``pending`` there, by record id.
    """

    trace: Trace
    first: int
    arrived: Mapping[str, tuple[TensorDigest, ...]] = field(default_factory=dict)


class RawSegment(NamedTuple):
    """New raw parts of a trace, with the numbers under which they were recorded.

    Attributes:
        records: raw records, in any order.
        made: number of records made in Python so far, of earlier segments too.
        leaves: raw leaves, in the order of their numbers.
        results: raw results.
        marks: settings marks.
        notes: notes by record number.
        early_results: as for :func:`~hashbench.core.trace.build.build_trace`.
        callers: number of the enclosing record, by record number; also of records of earlier segments.
        lanes: all lanes so far.
        lane_of: return the number of a record's lane.
        names: names of the lanes.
        writer: maps a number among the reads to the actual writer.
    """

    records: Sequence[RawRecord]
    made: int
    leaves: Sequence[RawLeaf]
    results: Sequence[RawResult]
    marks: Sequence[SettingsMark]
    notes: Mapping[int, Mapping[str, Any]]
    early_results: Mapping[str, str]
    callers: Mapping[int, int] = MappingProxyType({})
    lanes: Sequence[LaneStart] = ()
    lane_of: Callable[[int], int] = int
    names: Mapping[int, str] = MappingProxyType({})
    writer: Callable[[int], int] | None = None


class TracePlaces:
    """Index in the trace of every record and leaf so far, by the number under which it was recorded.

    Attributes:
        records: number of records.
        leaves: number of leaves.
    """

    def __init__(self) -> None:
        self.records, self.leaves = 0, 0
        self._record_places: array[int] | None = None  # None: each number is its index
        self._leaf_places: array[int] | None = None

    def add(self, numbers: Sequence[int], leaves: int) -> None:
        """Give the next indices to records of these numbers, sorted, and to this many leaves."""
        first, self.records = self.records, self.records + len(numbers)
        places = self._record_places
        if places is None and list(numbers) != list(range(first, self.records)):
            self._record_places = places = array("q", range(first))
        if places is not None:
            places.extend([-1] * (max(numbers, default=-1) + 1 - len(places)))
            for index, number in enumerate(numbers, first):
                places[number] = index
        if self._leaf_places is not None:
            self._leaf_places.extend(range(self.leaves, self.leaves + leaves))
        self.leaves += leaves

    def move(self, numbers: Sequence[int], leaves: int, moved: Mapping[int, int]) -> None:
        """Change the indices of these records and of the last leaves; ``moved`` has the new by the old ones."""
        if all(old == new for old, new in moved.items()):
            return
        places = self._record_places = self._record_places or array("q", range(self.records))
        for number in numbers:
            places[number] = moved[places[number]]
        leaf_places = self._leaf_places = self._leaf_places or array("q", range(self.leaves))
        for number in range(self.leaves - leaves, self.leaves):
            leaf_places[number] = -1 - moved[-1 - leaf_places[number]]

    def has(self, number: int) -> bool:
        """Return True if the record of this number is in the trace."""
        places = self._record_places
        return number < self.records if places is None else number < len(places) and places[number] >= 0

    @property
    def are_numbers(self) -> bool:
        """True if the number of each record and leaf is its index."""
        return self._record_places is None and self._leaf_places is None

    def __call__(self, number: int) -> int:
        """Return the index of a record or, counted from -1 down, of a leaf. A record that was dropped because its
        digest failed maps to the next one, or else to the last."""
        if number < 0:
            return number if self._leaf_places is None else -1 - self._leaf_places[-1 - number]
        if self._record_places is None:
            return min(number, self.records - 1)
        for place in self._record_places[number:]:
            if place >= 0:
                return place
        return self.records - 1


class TraceSegments:
    """Segments of one trace in the making.

    Attributes:
        made: number of records made in Python so far.
        results: number of raw results so far.
        marks: number of settings marks so far.
    """

    def __init__(self, first_sequence: int, *, hashed_inputs: bool) -> None:
        self.made = self.results = self.marks = 0
        self._places = TracePlaces()
        self._builder = TraceBuilder(first_sequence, hashed_inputs=hashed_inputs)
        self._in_flight: dict[int, tuple[str, Sequence[RawDigest | TensorDigest]]] = {}

    @property
    def leaves(self) -> int:
        """Number of leaves so far."""
        return self._places.leaves

    def add(self, raw: RawSegment, is_in_flight: Callable[[int], bool]) -> TraceSegment:
        """Return the next segment.

        Args:
            raw: what is new.
            is_in_flight: return whether the outputs of a collective, by record number, may still arrive.
        """
        places, first, first_leaf = self._places, self._places.records, self._places.leaves
        arrived = self._arrived(is_in_flight)
        records = sorted(raw.records, key=attrgetter("number"))
        numbers = [record.number for record in records]
        lane_of = [raw.lane_of(number) for number in numbers] if len(raw.lanes) > 1 else []
        places.add(numbers, len(raw.leaves))
        part = self._indexed(raw, records, numbers, lane_of)
        if lane_of:
            lanes = [lane._replace(position=first + bisect_left(numbers, lane.position)) for lane in raw.lanes]
            part, moved = part_in_order(part, lane_of, lanes, raw.names, first=first, first_leaf=first_leaf)
            places.move(numbers, len(raw.leaves), moved)
        trace = self._builder.add(part, raw.early_results)
        for record in records:
            if record.plan.collective and _is_pending(record.written):
                self._in_flight[record.number] = trace.records[places(record.number) - first].id, record.written
        self.made, self.results, self.marks = raw.made, self.results + len(raw.results), self.marks + len(raw.marks)
        return TraceSegment(trace, first, arrived)

    def _arrived(self, is_in_flight: Callable[[int], bool]) -> dict[str, tuple[TensorDigest, ...]]:
        """Return the digests that have arrived since the last segment; forget those that never will."""
        arrived = {}
        for number, (identity, written) in list(self._in_flight.items()):
            if is_in_flight(number):
                continue
            del self._in_flight[number]
            if not _is_pending(written):
                arrived[identity] = tuple(map(readable, written))
        return arrived

    def _indexed(
        self, raw: RawSegment, records: Sequence[RawRecord], numbers: Sequence[int], lane_of: Sequence[int]
    ) -> IndexedTrace:
        """Replace the numbers of sorted records by their indices."""
        places, writer = self._places, raw.writer
        first = places.records - len(records)
        callers = dict(raw.callers)
        if lane_of:
            callers |= callers_of(numbers, lane_of, raw.lanes)
        part = {*numbers}
        inner = {places(at): places(to) for at, to in callers.items() if to in part and places.has(at)}
        results, notes = list(raw.results), dict(raw.notes)
        if not places.are_numbers or writer is not None:
            known = int if writer is None else writer

            def node(number: int) -> int:
                return places(known(number))

            records = [_renumbered(record, node, at) for at, record in enumerate(records, first)]
            results = [(name, digest, None if at is None else node(at)) for name, digest, at in results]
            notes = {places(number): kept for number, kept in notes.items()}
        leaves = [(*leaf[:3], first + bisect_left(numbers, leaf[3]), leaf[4]) for leaf in raw.leaves]
        marks = [replace(mark, position=first + bisect_left(numbers, mark.position)) for mark in raw.marks]
        return IndexedTrace(records, leaves, results, marks, notes, inner)


def _renumbered(record: RawRecord, node: Callable[[int], int], index: int) -> RawRecord:
    """Return a copy with its index, and with those of its writers, all of which come before it."""
    reads = iter(record.reads)
    found: list[Any] = []
    for argument, number, offset in zip(reads, reads, reads, strict=True):
        writer = min(node(number), index - 1)
        if writer >= 0 or number < 0:
            found += argument, writer, offset
    return record._replace(reads=tuple(found), number=index)


def _is_pending(written: Sequence[RawDigest | TensorDigest]) -> bool:
    return any(readable(digest).value == PENDING for digest in written)
