"""What makes two runs on ranks equal, and a divergence with its rank. No torch here."""

from __future__ import annotations

from dataclasses import fields

import pytest

from hashbench.core.catalog import Origin
from hashbench.core.records import Divergence
from hashbench.extensions.ranks.verdict import RankDivergence, RankResult, RanksVerdict
from tests.core.divergence.rank_runs import judge_ranks

FOUND = judge_ranks("rank 0:\n relu input/0 => r\nrank 1:\n put input/0 => r|R\n").first[0]


@pytest.mark.parametrize(
    ("verdict", "equal"),
    [
        (RanksVerdict(2), True),
        (RanksVerdict(2, benign={0: 3}), True),
        (RanksVerdict(2, first=(FOUND,)), False),
        (RanksVerdict(2, differing=(RankResult(0, "w", 1),)), False),
        (RanksVerdict(2, missing=(1,)), False),
        (RanksVerdict(2, unknown=("Rank 1 ended early: SIGKILL.",)), False),
    ],
)
def test_equal_is_what_is_known_to_be(verdict: RanksVerdict, equal: bool) -> None:
    assert verdict.equal is equal


def test_a_divergence_keeps_all_that_is_known_of_it() -> None:
    plain = Divergence(**{one.name: getattr(FOUND, one.name) for one in fields(Divergence)})
    told = RankDivergence.of(plain, 3, through="to rank 1", missing=(2,))
    assert (told.rank, told.through, told.missing, told.hops) == (3, "to rank 1", (2,), ())
    assert (told.origin, told.kernel) == (Origin.KERNEL, "aten.put.default")
    assert all(getattr(told, one.name) == getattr(plain, one.name) for one in fields(Divergence))
