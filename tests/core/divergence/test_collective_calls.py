"""Which calls of different ranks meet, on records written by hand."""

from __future__ import annotations

import pytest

from hashbench.core.divergence.collective_calls import (
    PENDING,
    CollectiveCall,
    calls_in_channels,
    contributed_by,
    contributors_of,
    equalizes,
    exchanges,
    nodes_of_call,
    number_calls,
)
from hashbench.core.records import Collective, OpRecord, Trace
from tests.core.divergence.rank_runs import rank_traces

BOTH = (0, 1)


def numbered(lines: str) -> dict[int, list[str]]:
    """What each rank's calls take part in, in order."""
    return {
        rank: [call.word() for call in calls.by_record.values()]
        for rank, calls in number_calls(rank_traces(lines)).items()
    }


def test_collectives_are_counted_by_group_and_ordinal() -> None:
    lines = """
    rank 0:
        all_reduce !input/0 -> s
        all_reduce !input/0 ordinal=1 -> t
        all_gather !input/1 input/0 -> u
        all_reduce !input/0 ordinal=1 -> v
    rank 1:
        all_reduce !input/0 ordinal=1 -> t
        all_reduce !input/0 -> s
        all_reduce !input/0 ordinal=1 -> v
        all_gather !input/1 input/0 -> u
    """
    group, second = "of group 0-1", "of second group 0-1"
    assert numbered(lines) == {
        0: [f"#1 {group}", f"#1 {second}", f"#2 {group}", f"#2 {second}"],
        1: [f"#1 {second}", f"#1 {group}", f"#2 {second}", f"#2 {group}"],
    }


def test_messages_are_counted_by_source_destination_and_tag() -> None:
    lines = """
    rank 0:
        send input/0 peer=1
        send input/0 peer=1 tag=4
        send input/0 peer=1
        recv !input/1 peer=1 -> m
    rank 1:
        recv !input/1 peer=0 tag=4 -> a
        recv !input/1 peer=0 -> b
        send input/0 peer=0
        recv !input/1 peer=0 -> c
    """
    there, back = "from rank 0 to rank 1", "from rank 1 to rank 0"
    within = "in group 0-1"
    assert numbered(lines) == {
        0: [f"#1 {there} {within}", f"#1 {there} with tag 4 {within}", f"#2 {there} {within}", f"#1 {back} {within}"],
        1: [f"#1 {there} with tag 4 {within}", f"#1 {there} {within}", f"#1 {back} {within}", f"#2 {there} {within}"],
    }


def test_calls_inside_a_collective_have_no_number() -> None:
    lines = """
    rank 0:
        c = clone input/0 -> a in=_c10d_functional.all_reduce.default
        c = all_reduce !c -> pending in=_c10d_functional.all_reduce.default
        functional_all_reduce input/0 inside=c -> s
        all_reduce !input/0 -> t
    """
    calls = number_calls(rank_traces(lines))[0]
    assert list(calls.by_record) == []  # in a group of one rank
    calls = number_calls(rank_traces(f"{lines}rank 1:\n    all_reduce !input/0 -> t"))[0]
    outer = "forward.0/Net/_c10d_functional.all_reduce.default#0"
    assert list(calls.by_record) == [outer, "forward.0/Net/c10d.allreduce_.default#1"]
    assert calls.inside == {
        "forward.0/Net/aten.clone.default#0": outer,
        "forward.0/Net/c10d.allreduce_.default#0": outer,
    }


def test_a_receive_from_any_source_takes_the_message_that_it_received() -> None:
    lines = """
    rank 0:
        recv_any !input/0 -> c
        recv !input/0 peer=1 -> a
        recv_any !input/0 -> b
        recv_any !input/0 -> d
    rank 1:
        x = relu input/0 -> a
        send x peer=0
        y = relu input/0 -> b
        send y peer=0
    rank 2:
        x = relu input/0 -> c
        send x peer=0
        y = relu input/0 -> d
        send y peer=0
    """
    assert [word.partition(" to")[0] for word in numbered(lines)[0]] == [
        "#1 from rank 2",
        "#1 from rank 1",
        "#2 from rank 1",
        "#2 from rank 2",
    ]


@pytest.mark.parametrize(("content", "present"), [("z", True), ("pending", True), ("a", False)])
def test_a_message_that_cannot_be_told_may_be_any_that_was_under_way(content: str, present: bool) -> None:
    lines = f"""
    rank 0:
        recv_any !input/0 -> {content}
        recv_any !input/0 -> b
    rank 1:
        x = relu input/0 -> a
        send x peer=0
        send x peer=0
        send x peer=0
    rank 2:
        x = relu input/0 -> b
        send x peer=0
    """
    traces = dict(rank_traces(lines))
    if not present:
        del traces[1]
    calls = number_calls(traces)[0]
    group = (0, 1, 2)
    first, second = calls.possible.values()
    assert calls.by_record == {}
    assert first == (CollectiveCall(group, 0, 1, 1, 0), CollectiveCall(group, 0, 1, 2, 0))
    assert CollectiveCall(group, 0, 2, 1, 0) in second
    assert CollectiveCall(group, 0, 3, 1, 0) not in second


def test_unknown_exchanges_have_no_number() -> None:
    calls = number_calls(rank_traces("rank 0:\n mystery !input/0 -> a\nrank 1:\n relu input/0 -> a"))[0]
    assert (calls.by_record, calls.unknown) == ({}, ["forward.0/Net/symm_mem.memcpy_to_multicast_.default#0"])


def test_an_unknown_exchange_is_told_by_the_collectives_inside() -> None:
    inside = "in=symm_mem.memcpy_to_multicast_.default"
    lines = (
        f"rank 0:\n c = all_reduce !input/0 -> a {inside}\n c = relu c -> b {inside}\n mystery !input/1 inside=c -> b"
    )
    calls = number_calls(rank_traces(f"{lines}\nrank 1:\n all_reduce !input/0 -> a"))[0]
    assert list(calls.by_record.values()) == [CollectiveCall(BOTH, 0, 1)]
    assert (calls.unknown, calls.inside) == ([], {})
    assert calls.judged_inside == {"forward.0/Net/symm_mem.memcpy_to_multicast_.default#0"}


def test_calls_are_counted_by_channel() -> None:
    lines = "rank 0:\n all_reduce !input/0 -> a\n all_reduce !input/0 -> a\nrank 1:\n send input/0 peer=0"
    calls = number_calls(rank_traces(lines))
    assert calls_in_channels(calls[0]) == {CollectiveCall(BOTH, 0, 0): 2}
    assert calls_in_channels(calls[1]) == {CollectiveCall(BOTH, 0, 0, 1, 0): 1}


@pytest.mark.parametrize(
    ("collective", "givers", "equal"),
    [
        (Collective("combine", BOTH), BOTH, True),
        (Collective("combine", BOTH, root=1), BOTH, False),
        (Collective("gather", BOTH), BOTH, True),
        (Collective("reduce_scatter", BOTH), BOTH, False),
        (Collective("all_to_all", BOTH), BOTH, False),
        (Collective("broadcast", BOTH, root=1), (1,), True),
        (Collective("scatter", BOTH, root=1), (1,), False),
        (Collective("receive", BOTH, peer=1), (1,), False),
        (Collective("receive", BOTH), BOTH, False),
        (Collective("send", BOTH, peer=1), (), False),
        (Collective("barrier", BOTH), (), False),
    ],
    ids=lambda value: f"{value.kind} root={value.root}" if isinstance(value, Collective) else None,
)
def test_who_gives_and_who_has_the_same_afterwards(
    collective: Collective, givers: tuple[int, ...], equal: bool
) -> None:
    assert (contributors_of(collective), equalizes(collective)) == (givers, equal)


def test_what_is_given_and_whether_anything_is_exchanged() -> None:
    lines = """
    rank 0:
        x = all_gather !input/1 input/0=a -> u
        all_reduce !x group=0 -> s
    rank 1:
        relu input/0 -> a
    """
    gather, alone = rank_traces(lines)[0].records
    assert [(ref.source, ref.digest) for ref in contributed_by(gather)] == [("input/0", "a")]
    assert (exchanges(gather), exchanges(alone)) == (True, False)
    assert contributed_by(rank_traces(lines)[1].records[0]) == ()


@pytest.mark.slow
def test_pending_is_the_word_of_the_trace() -> None:
    from hashbench.core.trace.digest import PENDING as WORD

    assert PENDING == WORD


def test_a_call_that_a_rank_has_not_made_is_not_repeated() -> None:
    alone = OpRecord("a", "forward", None, "", "c10d.allreduce_.default", collective=Collective("combine", (0, 1)))
    traces = {0: Trace((alone,)), 1: Trace(())}

    assert nodes_of_call(traces, 0, "a") == {}
    assert nodes_of_call({0: Trace((alone,)), 1: Trace((alone,))}, 0, "a") == {0: "a", 1: "a"}
    assert nodes_of_call(traces, 0, "other") == {}
