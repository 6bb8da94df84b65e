"""Number the collectives and messages of one run, so that the calls of its ranks that meet are known. Pure.

Numbers count from 1, as ``collective_seq_id`` and ``p2p_seq_id`` of torch's flight recorder do, in a channel:

* collectives: the process group, which is its global ranks and, among the groups of the same ranks, its ordinal.
* messages: the process group, source, destination and tag. They arrive in the order in which they were sent.
* a receive from any source takes the next message of one of the sources: that whose content it received.

A call inside another collective (``c10d.allreduce_`` inside ``_c10d_functional.all_reduce``) has no number. It has one
inside an op of which it is not known what it exchanges: that op is told by the calls inside. In a group of one rank
nothing is exchanged: a collective is an op like any other there.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from hashbench.core.records import PENDING, Collective, OpRecord, Ref, Trace
from hashbench.core.trace.collective_ops import FROM_ROOT, NO_EXCHANGE, RECEIVE, UNKNOWN

_EQUALIZING = frozenset({"broadcast", "combine", "gather"})


class CollectiveCall(NamedTuple):
    """A collective, or a message, that several ranks take part in.

    Attributes:
        process_group: global ranks of the process group.
        ordinal: number of that group among those of the same ranks, from 0.
        number: of the call in its channel, from 1.
        source: global rank that sends a message; -1: no message, or from any source.
        destination: global rank that receives it; -1: no message.
        tag: tag of the message.
    """

    process_group: tuple[int, ...]
    ordinal: int
    number: int
    source: int = -1
    destination: int = -1
    tag: int = 0

    def word(self) -> str:
        """Format as ``#7 of group 0-1``; a message as ``#2 from rank 0 to rank 1 in group 0-1``."""
        path = f" from rank {self.source} to rank {self.destination}" if self.source >= 0 else ""
        tag = f" with tag {self.tag}" if self.tag else ""
        return f"#{self.number}{path}{tag} {'in' if path else 'of'} {group_word(self.process_group, self.ordinal)}"


def group_word(process_group: Sequence[int], ordinal: int = 0) -> str:
    """Format a process group by its global ranks: ``group 0-1``, ``group 0-1-…-63``, ``second group 0-1``.

    >>> group_word((0, 1)), group_word(range(64)), group_word((0, 2), 1), group_word((0, 2), 4)
    ('group 0-1', 'group 0-1-…-63', 'second group 0-2', 'group 0-2 (number 5)')
    """
    ranks = [str(rank) for rank in process_group]
    word = f"group {'-'.join(ranks if len(ranks) <= 8 else [*ranks[:2], '…', ranks[-1]])}"
    return f"second {word}" if ordinal == 1 else f"{word} (number {ordinal + 1})" if ordinal else word


def exchanges(record: OpRecord) -> bool:
    """Return True if a record may exchange data with other ranks: not in a group of one rank, nor by waiting."""
    collective = record.collective
    return collective is not None and len(collective.process_group) != 1 and collective.kind not in NO_EXCHANGE


def equalizes(collective: Collective) -> bool:
    """Return True if all ranks of the group have the same output."""
    return collective.kind in _EQUALIZING and (collective.root is None or collective.kind == "broadcast")


def is_from_any_source(collective: Collective) -> bool:
    """Return True if a receive names no source."""
    return collective.kind == RECEIVE and collective.peer is None


def contributors_of(collective: Collective) -> tuple[int, ...]:
    """Return the global ranks whose data a call may receive, the caller's included."""
    if collective.kind in ("send", "barrier"):
        return ()
    if collective.kind == RECEIVE and collective.peer is not None:
        return (collective.peer,)
    if collective.kind in FROM_ROOT and collective.root is not None:
        return (collective.root,)
    return collective.process_group


def has_pending(*records: OpRecord) -> bool:
    """Return True if what came back in any of these calls was not there when the trace ended, or was left to the
    program."""
    return any(digest.value == PENDING for record in records for digest in record.outputs)


def contributed_by(record: OpRecord) -> tuple[Ref, ...]:
    """Return the tensors whose content a record contributes."""
    collective = record.collective
    if collective is None:
        return ()
    return tuple(ref for ref in record.inputs if ref.argument in collective.contributed)


@dataclass(frozen=True, slots=True)
class RankCalls:
    """The calls of one rank in one run by which it exchanged data.

    Attributes:
        by_record: id of a record → what it takes part in, in the order of the calls.
        records: call → its record.
        inside: id of a record → the collective that called it, directly or not.
        judged_inside: ops of which it is not known what they exchange, but for the collectives that they call.
        possible: id of a receive from any source whose message is not known → the messages it may have received.
        unknown: records whose process group, or what they do, is not known.
    """

    by_record: dict[str, CollectiveCall] = field(default_factory=dict)
    records: dict[CollectiveCall, OpRecord] = field(default_factory=dict)
    inside: dict[str, str] = field(default_factory=dict)
    judged_inside: frozenset[str] = frozenset()
    possible: dict[str, tuple[CollectiveCall, ...]] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)

    def enter(self, record: OpRecord, call: CollectiveCall) -> None:
        """Add a call."""
        self.by_record[record.id] = call
        self.records[call] = record


def number_calls(traces: Mapping[int, Trace]) -> Mapping[int, RankCalls]:
    """Number the calls of all ranks of one run, whose traces are given by global rank."""
    judged = {rank: judged_inside(trace) for rank, trace in traces.items()}
    run = {
        rank: RankCalls(inside=inside_collectives(trace, judged[rank]), judged_inside=judged[rank])
        for rank, trace in traces.items()
    }
    receives: dict[int, list[OpRecord]] = {rank: [] for rank in traces}
    for rank, trace in traces.items():
        counts = Counter[CollectiveCall]()
        for record in trace.records:
            collective = record.collective
            if collective is None or not exchanges(record) or record.id in run[rank].inside:
                continue
            if record.id in run[rank].judged_inside:
                continue
            if _is_unknown(collective):
                run[rank].unknown.append(record.id)
            elif collective.kind == RECEIVE:
                receives[rank].append(record)
            else:
                channel = _channel(rank, collective)
                counts[channel] += 1
                run[rank].enter(record, channel._replace(number=counts[channel]))
    for rank, records in receives.items():
        _number_receives(rank, records, run)
    for rank, trace in traces.items():  # in the order of the calls again
        _sort(run[rank], trace)
    return run


def _sort(calls: RankCalls, trace: Trace) -> None:
    known = dict(calls.by_record)
    calls.by_record.clear()
    calls.by_record.update((record.id, known[record.id]) for record in trace.records if record.id in known)


def inside_collectives(trace: Trace, judged: Container[str]) -> dict[str, str]:
    """Map what collectives call to the outermost of them, unless that is ``told`` by what it calls
    (:func:`judged_inside`). Callers follow what they call."""
    inside: dict[str, str] = {}
    met: set[str] = set()
    for record in reversed(trace.records):
        if record.inside in inside or record.inside in met:
            inside[record.id] = inside.get(record.inside, record.inside)
        elif record.collective is not None and exchanges(record) and record.id not in judged:
            met.add(record.id)
    return inside


def judged_inside(trace: Trace) -> frozenset[str]:
    """Return the ops of which it is not known what they exchange, and which call collectives of which it is."""
    callers: dict[str, str] = {}
    unknown: set[str] = set()
    judged: set[str] = set()
    for record in reversed(trace.records):
        if unknown and record.inside:
            callers[record.id] = record.inside
        if record.collective is None or not exchanges(record):
            continue
        if _is_unknown(record.collective):
            unknown.add(record.id)
            continue
        caller = record.inside if unknown else ""
        while caller and caller not in judged:
            if caller in unknown:
                judged.add(caller)
            caller = callers.get(caller, "")
    return frozenset(judged)


def _is_unknown(collective: Collective) -> bool:
    return not collective.process_group or collective.kind in ("", UNKNOWN)


def _channel(rank: int, collective: Collective) -> CollectiveCall:
    """Return the channel of a call, as a call without a number."""
    group, ordinal = collective.process_group, collective.ordinal
    if collective.kind == "send":
        return CollectiveCall(group, ordinal, 0, rank, _known(collective.peer), collective.tag)
    if collective.kind == RECEIVE:
        return CollectiveCall(group, ordinal, 0, _known(collective.peer), rank, collective.tag)
    return CollectiveCall(group, ordinal, 0)


def _known(rank: int | None) -> int:
    return -1 if rank is None else rank


def _number_receives(rank: int, records: Sequence[OpRecord], run: Mapping[int, RankCalls]) -> None:
    """Number the receives of one rank: each takes the next message of its source, or of one of the sources."""
    taken, lost = Counter[CollectiveCall](), Counter[CollectiveCall]()
    for record in records:
        collective = record.collective
        assert collective is not None
        channel = _channel(rank, collective)
        if not is_from_any_source(collective):
            taken[channel] += 1
            run[rank].enter(record, channel._replace(number=taken[channel]))
            continue
        most = lost[channel] + 1
        following = [
            [message._replace(number=taken[message] + 1 + n) for n in range(most)]
            for message in (channel._replace(source=sender) for sender in collective.process_group if sender != rank)
        ]
        came = None if lost[channel] else _came_from(record, [messages[0] for messages in following], run)
        if came is None:
            lost[channel] += 1
            run[rank].possible[record.id] = tuple(_sent(following, run))
        else:
            taken[came._replace(number=0)] += 1
            run[rank].enter(record, came)


def _came_from(
    record: OpRecord, messages: Sequence[CollectiveCall], run: Mapping[int, RankCalls]
) -> CollectiveCall | None:
    """Return the first of the messages whose content a record received; ``None`` if it is that of none."""
    received = [digest.value for digest in record.outputs]
    for message in messages:
        sent = run[message.source].records.get(message) if message.source in run else None
        if sent is not None and PENDING not in received and received == [ref.digest for ref in contributed_by(sent)]:
            return message
    return None


def _sent(messages: Sequence[Sequence[CollectiveCall]], run: Mapping[int, RankCalls]) -> Iterator[CollectiveCall]:
    """Yield those messages that were sent, or may have been, as the trace of their source is missing."""
    for message in (sent for several in messages for sent in several):
        if message.source not in run or message in run[message.source].records:
            yield message


def calls_in_channels(calls: RankCalls) -> Mapping[CollectiveCall, int]:
    """Count the calls of a rank by channel, which is a call with the number 0."""
    counts: dict[CollectiveCall, int] = defaultdict(int)
    for call in calls.by_record.values():
        counts[call._replace(number=0)] += 1
    return counts


def nodes_of_call(traces: Mapping[int, Trace], rank: int, node: str) -> dict[int, str]:
    """Return the records by which the ranks of a group called one collective, in the order of the group.

    Empty for a message, and if the call of a rank is missing.
    """
    calls = number_calls(traces)
    call = calls[rank].by_record.get(node)
    if call is None or call.source >= 0 or call.destination >= 0:
        return {}
    members = [calls[rank].records.get(call) if rank in calls else None for rank in call.process_group]
    pairs = zip(call.process_group, members, strict=True)
    nodes = {rank: record.id for rank, record in pairs if record is not None}
    return nodes if len(nodes) == len(members) else {}
