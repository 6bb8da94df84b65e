"""Which of several differences is first, and which are told as later, or not at all. No torch here."""

from __future__ import annotations

import pytest

from hashbench.extensions.ranks.choice import choose_candidates, unpreceded
from tests.core.divergence.rank_runs import judge_ranks
from tests.extensions.ranks.test_walk import KERNEL, judged


@pytest.mark.parametrize(
    ("reached", "places", "first"),
    [
        ({0: {}, 1: {}}, {0: 5, 1: 3}, [0, 1]),
        ({0: {1: 2}, 1: {}}, {0: 5, 1: 3}, [0]),
        ({0: {1: 3}, 1: {}}, {0: 5, 1: 3}, [0, 1]),
        ({0: {1: 2}, 1: {0: 4}}, {0: 5, 1: 3}, [0, 1]),
        ({0: {1: 2, 2: 2}, 1: {2: 1}, 2: {}}, {0: 5, 1: 3, 2: 9}, [0]),
    ],
)
def test_a_rank_is_first_unless_data_of_another_had_reached_it(
    reached: dict[int, dict[int, float]], places: dict[int, float], first: list[int]
) -> None:
    assert unpreceded(reached, places) == first


def test_without_results_every_difference_counts() -> None:
    ranks = judged(KERNEL.replace(" => r|R", " -> r|R"))
    assert [(one.rank, one.kernel) for one in choose_candidates(ranks, {}).first] == [(1, "aten.put.default")]


@pytest.mark.parametrize(
    ("lines", "first", "later"),
    [
        ("x = all_reduce !x -> s|S", [1], []),
        ("barrier; x = relu x -> s|S", [1], [0]),
        ("x = index_put x -> s|S; x = all_reduce !x -> t|T", [0, 1], []),
        ("x = all_reduce !x -> s|S; y = index_put input/8 -> h|H; x = mul x y -> t|T", [1], [0]),
    ],
)
def test_differences_of_two_ranks(lines: str, first: list[int], later: list[int]) -> None:
    """What rank 0 does; rank 1 has a race in front of its first collective."""
    mine = "\n ".join(lines.split("; "))
    theirs = "\n ".join(line for line in lines.split("; ") if "all_reduce" in line or "barrier" in line)
    verdict = judge_ranks(f"""
rank 0:
 x = relu input/0 -> a
 {mine}
 sum x => r|R
rank 1:
 x = put input/0 -> b|B
 {theirs}
 sum x => q|Q
""")
    assert ([one.rank for one in verdict.first], [one.rank for one in verdict.later]) == (first, later)


def test_what_differs_and_reaches_no_result_is_benign() -> None:
    verdict = judge_ranks("rank 0:\n put input/0 -> a|A\n relu input/0 => r\nrank 1:\n relu input/0 => r\n")
    assert (verdict.equal, verdict.benign) == (True, {0: 1})
