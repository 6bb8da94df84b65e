"""Order of the records of several threads: independent of scheduling, after their writers, inside their callers."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from hashbench.core.records import SettingsMark
from hashbench.core.trace.build import IndexedTrace, RawRecord
from hashbench.core.trace.lanes import LaneStart, callers_of, in_schedule_independent_order

NAMES = {1: "t0.", 2: "t1."}
MAIN = LaneStart(-1, 0, -1, 0)


def raw(number: int, name: str, reads: Sequence[int] = ()) -> RawRecord:
    """A record that is recognized by its ``others``."""
    fields: dict[str, Any] = dict.fromkeys(RawRecord._fields)
    read = tuple(itertools.chain.from_iterable((f"{at}", node, 0) for at, node in enumerate(reads)))
    return RawRecord(**{**fields, "number": number, "reads": read, "others": name, "module": "Net", "written": ()})


def recorded(records: Sequence[RawRecord], **more: Any) -> IndexedTrace:
    given: dict[str, Any] = {"leaves": (), "results": (), "marks": (), "notes": {}, "callers": {}, **more}
    return IndexedTrace(records, **given)


def order(found: IndexedTrace) -> list[str]:
    return [str(record.others) for record in found.records]


def test_lane_comes_where_it_was_started() -> None:
    """Main records a, starts a lane, records b; the lane's x may be recorded before or after b."""
    lanes = [MAIN, LaneStart(0, 1, -1, 0)]
    late = recorded([raw(0, "a"), raw(1, "b"), raw(2, "x")])
    early = recorded([raw(0, "a"), raw(1, "x"), raw(2, "b")])
    found = [
        in_schedule_independent_order(late, [0, 0, 1], lanes, NAMES),
        in_schedule_independent_order(early, [0, 1, 0], lanes, NAMES),
    ]
    assert [order(one) for one in found] == [["a", "x", "b"]] * 2
    assert [one.threads for one in found] == [{1: "t0."}] * 2


def test_lanes_come_in_the_order_they_were_started() -> None:
    lanes = [MAIN, LaneStart(0, 0, -1, 0), LaneStart(0, 0, -1, 0)]
    for interleaved in set(itertools.permutations([1, 1, 2, 2])):
        counts = {1: itertools.count(), 2: itertools.count()}
        records = [raw(at, f"{lane}{next(counts[lane])}") for at, lane in enumerate(interleaved)]
        found = in_schedule_independent_order(recorded(records), interleaved, lanes, NAMES)
        assert order(found) == ["10", "11", "20", "21"]


def test_record_comes_after_what_it_reads() -> None:
    """The first lane waits for what the second one wrote."""
    lanes = [MAIN, LaneStart(0, 0, -1, 0), LaneStart(0, 0, -1, 0)]
    records = [raw(0, "1a"), raw(1, "2a"), raw(2, "1b", reads=[1]), raw(3, "2b")]
    found = in_schedule_independent_order(recorded(records), [1, 2, 1, 2], lanes, NAMES)
    assert order(found) == ["1a", "2a", "1b", "2b"]
    assert found.records[2].reads == ("0", 1, 0)


def test_numbers_follow_their_records() -> None:
    lanes = [MAIN, LaneStart(0, 1, -1, 0)]
    mark = SettingsMark(2, "end", ())
    given = recorded(
        [raw(0, "a"), raw(1, "b", reads=[0]), raw(2, "x", reads=[0])],
        results=[("loss", None, 1), ("number", None, None)],
        marks=[mark],
        notes={1: {"source": "b"}, 2: {"source": "x"}},
    )
    found = in_schedule_independent_order(given, [0, 0, 1], lanes, NAMES)
    assert order(found) == ["a", "x", "b"]
    assert [record.number for record in found.records] == [0, 1, 2]
    assert list(found.results) == [("loss", None, 2), ("number", None, None)]
    assert found.notes == {2: {"source": "b"}, 1: {"source": "x"}}
    assert list(found.marks) == [dataclasses.replace(mark, position=3)]


def test_leaves_are_numbered_by_their_first_read() -> None:
    lanes = [MAIN, LaneStart(0, 1, -1, 0)]
    leaves = [("other", "Elsewhere", "p", 0, None), ("input", "x", "q", 1, None), ("other", "Kept", "r", 2, None)]
    given = recorded([raw(0, "a"), raw(1, "b", reads=[-1]), raw(2, "x", reads=[-2])], leaves=leaves)
    found = in_schedule_independent_order(given, [0, 0, 1], lanes, NAMES)
    assert [(leaf[1], leaf[2], leaf[3]) for leaf in found.leaves][:2] == [("x", "q", 1), ("Net", "p", 2)]
    assert [record.reads for record in found.records] == [(), ("0", -1, 0), ("0", -2, 0)]
    assert len(found.leaves) == 3


def test_callers_of_lanes_started_inside_an_op() -> None:
    """Lane 1 was started inside op 3, lane 2 by lane 1, lane 3 outside of any."""
    lanes = [MAIN, LaneStart(0, 0, 3, 0), LaneStart(1, 1, -1, 0), LaneStart(0, 0, -1, 0)]
    assert callers_of([0, 1, 2, 3, 4], [1, 2, 3, 0, 1], lanes) == {0: 3, 1: 3}
