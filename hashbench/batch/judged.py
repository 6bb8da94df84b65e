"""What was found out about single calls of two runs of different batches. Pure: no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from hashbench.batch.match import Agreement, CallRows, Match
from hashbench.records import OpRecord, Trace


@dataclass(frozen=True, slots=True)
class RowRun:
    """One run: its trace, and what each call read and wrote, by the id of its record. ``views`` are the ops through
    which it read an argument that is a view, in order, by record and argument."""

    trace: Trace
    calls: Mapping[str, CallRows]
    views: Mapping[str, Mapping[str, tuple[str, ...]]] = field(default_factory=dict)


class Guilt(Enum):
    """What a call did with the items."""

    CLEAN = "nothing that it wrote differs"
    PASSED_ON = "what it wrote differs, and so does what it read"
    GUILTY = "what it wrote differs, and nothing that it read does"
    NOT_ATTRIBUTABLE = "it cannot be told"


@dataclass(frozen=True, slots=True)
class Judged:
    """One call of the smaller run beside its counterpart ``reference`` (an id), by what was read and written.
    ``coupled``: in words, what else came from the batch, where no tensor did. ``redrawn``: both calls drew random
    numbers, from generators in different states."""

    guilt: Guilt
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
                if one.guilt is not Guilt.CLEAN or not all(match.strictly_equal for match in one.written):
                    return False
                waiting += [ref.source for ref in records[node].inputs if ref.written]
        return True

    read = judged[record.id].read
    differ = (ref for ref in record.inputs if ref.argument in read)
    return tuple(
        ref.argument for ref in differ if read[ref.argument].agreement is Agreement.DIFFERENT and is_equal(ref.source)
    )
