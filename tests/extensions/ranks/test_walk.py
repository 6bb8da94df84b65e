"""The walk over the ranks of two runs, node by node: what leads to what, and where it ends. No torch here."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from hashbench.core.catalog import Origin
from hashbench.core.divergence.align import SECOND, pair
from hashbench.core.divergence.introduce import find_differences
from hashbench.extensions.ranks.walk import JudgedRanks, RankNode, missing_words
from tests.core.divergence.rank_runs import rank_traces

SUM, PUT = "forward.0/Net/aten.sum.default#0", "forward.0/Net/aten.put.default#0"
REDUCE = "forward.0/Net/c10d.allreduce_.default#0"
BROADCAST = "forward.0/Net/c10d.broadcast_.default#0"


def judged(text: str, *, without: Sequence[int] = ()) -> JudgedRanks:
    """The ranks of two runs; ``without`` are those that left no trace."""
    first, second = (
        {rank: trace for rank, trace in rank_traces(text, second=second).items() if rank not in without}
        for second in (False, True)
    )
    known = {
        rank: find_differences(pair(first[rank], second[rank]), ranks_known=True)
        for rank in first
        if first[rank] != second[rank]
    }
    return JudgedRanks(first, second, known)


KERNEL = """
rank 0:
    x = all_reduce !input/0 -> s|S
    sum x => r|R
rank 1:
    x = put input/0 -> b|B
    x = all_reduce !x -> s|S
"""
GUILTY = KERNEL.replace("b|B", "b")
OUTSIDE = KERNEL.replace("b|B", "b").replace("!x", "!x@g|G")


@pytest.mark.parametrize(
    ("text", "without", "reached"),
    [
        (KERNEL, [], [RankNode(0, SUM), RankNode(0, REDUCE), RankNode(1, REDUCE, True), RankNode(1, PUT)]),
        (GUILTY, [], [RankNode(0, SUM), RankNode(0, REDUCE)]),
        (OUTSIDE, [], [RankNode(0, SUM), RankNode(0, REDUCE), RankNode(1, REDUCE, True)]),
        (KERNEL, [1], [RankNode(0, SUM), RankNode(0, REDUCE)]),
    ],
)
def test_what_leads_to_a_result(text: str, without: list[int], reached: list[RankNode]) -> None:
    walked = judged(text, without=without).walk([RankNode(0, SUM)])
    assert sorted(walked.reached) == sorted(reached)


@pytest.mark.parametrize(
    ("text", "without", "found"),
    [
        (KERNEL, [], (1, PUT, Origin.KERNEL, ())),
        (GUILTY, [], (0, REDUCE, Origin.COLLECTIVE, ())),
        (OUTSIDE, [], (1, REDUCE, Origin.OUTSIDE, ())),
        (KERNEL, [1], (0, REDUCE, Origin.RANKS, (1,))),
    ],
)
def test_where_a_difference_entered(text: str, without: list[int], found: tuple[object, ...]) -> None:
    ranks = judged(text, without=without)
    (one,) = ranks.candidates(ranks.walk([RankNode(0, SUM)]))
    assert (one.at.rank, one.source.node, one.source.origin, one.missing) == found


def test_what_agrees_leads_nowhere() -> None:
    assert judged(KERNEL).walk([RankNode(1, "forward.0/Net/aten.relu.default#0")]).reached == {}


def test_objects_and_scalars_lead_on_by_way_of_python() -> None:
    ranks = judged("""
rank 0:
    b = broadcast !input/0 root=1 -> p|P
    _local_scalar_dense input/1=v|V scalar=0|1
    x = mul input/2 (0|1) => r|R
rank 1:
    put input/0 -> c|C
    b = broadcast !input/1@p|P root=1 -> p|P
""")
    at = RankNode(0, "forward.0/Net/aten.mul.default#0")
    scalar = RankNode(0, "forward.0/Net/aten._local_scalar_dense.default#0")
    contribution = RankNode(1, BROADCAST, True)
    assert list(ranks.python_links(at)) == [(scalar, None), (contribution, RankNode(0, BROADCAST))]
    assert list(ranks.python_links(contribution)) == [(RankNode(1, PUT), None)]
    assert {scalar, contribution, RankNode(1, PUT)} <= {*ranks.walk_by_python(at).reached}


def test_a_node_lies_where_it_was_recorded_and_a_leaf_where_it_was_read() -> None:
    ranks = judged(
        "rank 0:\n relu input/0 -> a\n 2: sin input/1 -> b\n sum input/2=x|y => r|R\nrank 1:\n relu input/0 -> a"
    )
    nodes = ["forward.0/Net/aten.relu.default#0", SECOND + "forward.0/Net/aten.sin.default#0", SUM]
    places = [ranks.place(RankNode(0, node)) for node in nodes]
    assert places == sorted(set(places))
    assert ranks.place(RankNode(0, "input/2")) == ranks.place(RankNode(0, SUM))
    assert ranks.place(RankNode(0, "result:w")) == float("inf")


@pytest.mark.parametrize(
    ("missing", "present", "words"),
    [
        ([], [], ""),
        ([3], [], "no trace of rank 3"),
        ([3, 1], [], "no trace of ranks 1, 3"),
        ([1], [1], "no such call in the traces of rank 1"),
        ([1, 2], [2], "no trace of rank 1 and no such call in the traces of rank 2"),
    ],
)
def test_what_is_missing_is_told(missing: list[int], present: list[int], words: str) -> None:
    assert missing_words(missing, present) == words
