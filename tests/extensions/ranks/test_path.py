"""How a difference came to other ranks: hops in the order in which they happened, and their text. No torch here."""

from __future__ import annotations

import pytest

from hashbench.core.divergence.collective_calls import CollectiveCall
from hashbench.extensions.ranks.verdict import RankHop
from tests.core.divergence.rank_runs import judge_ranks

CHAIN = """
rank 0:
    x = put input/0 -> b|B
    send x peer=1
rank 1:
    x = recv !input/1 peer=0 -> b|B
    y = mul x (2) -> m|M
    send y peer=2 tag=3
rank 2:
    x = recv !input/1 peer=1 tag=3 -> m|M
    sum x => r|R
"""


def test_hops_are_in_the_order_in_which_they_happened() -> None:
    (found,) = judge_ranks(CHAIN).first
    group = (0, 1, 2)
    assert found.hops == (
        RankHop(0, (1,), "recv", CollectiveCall(group, 0, 1, 0, 1)),
        RankHop(1, (2,), "recv", CollectiveCall(group, 0, 1, 1, 2, 3)),
    )
    assert found.through == (
        "rank 0: aten.put -> recv #1 from rank 0 to rank 1 in group 0-1-2 -> rank 1; "
        "rank 1: recv #1 from rank 1 to rank 2 with tag 3 in group 0-1-2 -> rank 2"
    )


@pytest.mark.parametrize(
    ("op", "word"),
    [
        ("all_reduce !x", "all_reduce"),
        ("all_gather !input/9 x", "all_gather_base"),
        ("broadcast !x root=1", "broadcast"),
    ],
)
def test_collectives_have_the_names_of_torch(op: str, word: str) -> None:
    lines = {
        rank: f"rank {rank}:\n x = {made}\n x = {op} -> s|S\n sum x => r|R\n"
        for rank, made in enumerate(["relu input/0 -> a", "put input/0 -> b|B"])
    }
    (found,) = judge_ranks("".join(lines.values())).first
    assert found.through == f"rank 1: aten.put -> {word} #1 of group 0-1 -> rank 0"


def test_a_difference_that_entered_in_a_collective_comes_to_all_that_received_it() -> None:
    lines = "".join(f"rank {rank}:\n x = all_reduce !input/0 -> s|S\n sum x => r|R\n" for rank in range(3))
    (found,) = judge_ranks(lines).first
    assert found.hops == (RankHop(None, (0, 1, 2), "all_reduce", CollectiveCall((0, 1, 2), 0, 1)),)
    assert found.through == "all_reduce #1 of group 0-1-2 -> ranks 0, 1, 2"


def test_a_difference_that_stays_on_its_rank_has_no_hops() -> None:
    (found,) = judge_ranks("rank 0:\n relu input/0 => r\nrank 1:\n put input/0 => r|R\n").first
    assert (found.hops, found.through) == ((), "")


def test_no_more_than_six_hops_are_told() -> None:
    ranks = 9
    lines = "rank 0:\n x = put input/0 -> b|B\n send x peer=1\n"
    for rank in range(1, ranks):
        lines += f"rank {rank}:\n x = recv !input/1 peer={rank - 1} -> b|B\n"
        lines += f" send x peer={rank + 1}\n" if rank < ranks - 1 else " sum x => r|R\n"
    (found,) = judge_ranks(lines).first
    assert len(found.hops) == ranks - 1
    assert found.through.count(";") == 6
    assert found.through.endswith("; and 2 more")


def test_a_tensor_without_a_name_is_called_by_the_op_that_read_it_first() -> None:
    (found,) = judge_ranks(CHAIN.replace("put input/0", "mul other/net#0=p|P")).first
    assert found.through.startswith("rank 0: aten.mul -> recv #1 ")
    (named,) = judge_ranks(CHAIN.replace("put input/0", "mul input/0=p|P")).first
    assert named.through.startswith("rank 0: input/0 -> recv #1 ")


def test_another_op_came_to_other_ranks_by_the_first_call_that_one_run_alone_makes() -> None:
    (found,) = judge_ranks("""
rank 0:
    x = all_reduce !input/0 -> s|S
    sum x => r|R
rank 1:
    1: x = relu input/1 -> a
    1: y = all_reduce !input/2 -> s module=left
    2: y = all_reduce !input/3 -> S module=right
    1: x = sum x -> b
    2: x = sum input/1 -> B
    result x b|B
""").first
    assert (found.kernel, found.through) == (
        "aten.relu.default",
        "rank 1: aten.relu -> all_reduce #1 of group 0-1 -> rank 0",
    )


def test_a_decision_that_all_ranks_follow_came_by_the_collective_that_told_them() -> None:
    (found,) = judge_ranks("""
rank 0:
    n = mul other/t=p|P -> p|P
    n = broadcast !n root=0 -> p|P
    _local_scalar_dense n scalar=3|4
    relu|gelu input/0 => r|R
rank 1:
    n = broadcast !input/8 root=0 -> p|P
    _local_scalar_dense n scalar=3|4
    sin|cos input/0 => r|R
""").first
    assert (found.rank, found.kernel) == (0, "aten.relu.default")
    assert found.through == "rank 0: aten.mul -> broadcast #1 of group 0-1 -> rank 1"
