"""Effects of single calls on the rows of items, between two runs of different batches. Pure: no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from hashbench.batch.match import Agreement, CallRows, Match
from hashbench.records import OpRecord, Trace


@dataclass(frozen=True, slots=True)
class RowRun:
    """One run by rows.

    Attributes:
        trace: its trace.
        calls: id of a record → what the call read and wrote.
        views: record → argument → the ops through which it reads a view, in order.
    """

    trace: Trace
    calls: Mapping[str, CallRows]
    views: Mapping[str, Mapping[str, tuple[str, ...]]] = field(default_factory=dict)


class RowEffect(Enum):
    """Effect of a call on the rows of the items."""

    SAME = "nothing that it wrote differs"
    PROPAGATED = "what it wrote differs, and so does what it read"
    ORIGIN = "what it wrote differs, and nothing that it read does"
    UNKNOWN = "it cannot be told"


@dataclass(frozen=True, slots=True)
class Judged:
    """One call of the smaller run, compared with its counterpart.

    Attributes:
        effect: its effect on the rows.
        reference: id of the counterpart; "" without one.
        read: argument → match.
        written: matches of what it wrote.
        coupled: in words, what else came from the batch, if no tensor did.
        redrawn: whether both calls drew random numbers, from generators in different states.
    """

    effect: RowEffect
    reference: str = ""
    read: Mapping[str, Match] = field(default_factory=dict)
    written: tuple[Match, ...] = ()
    coupled: str = ""
    redrawn: bool = False


def reads_by_view(
    record: OpRecord, judged: Mapping[str, Judged], records: Mapping[str, OpRecord], unit: Callable[[str], str]
) -> tuple[str, ...]:
    """Return the arguments in which a call reads other rows although whatever wrote their memory left equal ones, at
    the places of their items: a view shows it other memory.

    Args:
        record: the call, which has a counterpart.
        judged: all calls, by id.
        records: all records, by id.
        unit: maps the id of a record to that of the program's own op inside which it was made.
    """

    def is_equal(source: str) -> bool:
        waiting, seen = [source], set[str]()
        while waiting:
            written = waiting.pop()
            node = unit(written)
            if node not in judged:
                if not written.startswith("input/"):
                    return False
            elif node not in seen:
                seen.add(node)
                one = judged[node]
                if one.effect is not RowEffect.SAME or not all(match.strictly_equal for match in one.written):
                    return False
                waiting += [ref.source for ref in records[node].inputs if ref.written]
        return True

    read = judged[record.id].read
    differ = (ref for ref in record.inputs if ref.argument in read)
    return tuple(
        ref.argument for ref in differ if read[ref.argument].agreement is Agreement.DIFFERENT and is_equal(ref.source)
    )
