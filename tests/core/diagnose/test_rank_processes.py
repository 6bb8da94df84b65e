"""Ranks as real processes: they meet, their ends are told apart, and none is left behind."""

from __future__ import annotations

from pathlib import Path

import pytest
from sweep_helpers import alive, wait_until

from hashbench.core.diagnose import rank_processes
from hashbench.core.diagnose.rank_processes import RankEnd, backend_for, started

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("shared_servers")]


def test_ranks_meet_in_groups_one_after_the_other(tmp_path: Path) -> None:
    with started("rank_targets:meets", (2,), world_size=3, folder=tmp_path) as ranks:
        ends = ranks.wait()

    assert [(end.rank, end.status, end.died) for end in ends] == [(rank, 0, False) for rank in range(3)]
    assert [(tmp_path / f"told{rank}").read_text() for rank in range(3)] == [
        f"{rank}/3: 6 {rank}; {rank}/3: 6 {rank}" for rank in range(3)
    ]


@pytest.mark.parametrize(
    ("how", "words", "last"),
    [
        ("killed", "rank 1 killed by SIGKILL", "the last words of rank 1"),
        ("raises", "rank 1 ended with exit code 1", "ValueError: no data"),
    ],
)
def test_a_rank_that_dies_is_named_and_the_others_are_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, words: str, last: str
) -> None:
    monkeypatch.setattr(rank_processes, "GRACE_SECONDS", 0.2)

    with started("rank_targets:one_dies", (how,), world_size=2, folder=tmp_path) as ranks:
        ends = ranks.wait()

    assert [end.died for end in ends] == [False, True]
    assert ends[0].status is None
    assert ends[1].in_words().startswith(words)
    assert ends[1].in_words().endswith(last)
    wait_until(lambda: not any(map(alive, ranks.pids)))


def test_ranks_that_go_on_are_killed_when_the_time_is_up_or_the_context_is_left(tmp_path: Path) -> None:
    with started("rank_targets:waits", (), world_size=2, folder=tmp_path) as ranks:
        wait_until(lambda: all((tmp_path / f"pid{rank}").exists() for rank in range(2)))
        ends = ranks.wait(0.1)
        assert [end.in_words() for end in ends] == ["rank 0 did not end", "rank 1 did not end"]
        assert all(map(alive, ranks.pids))

    wait_until(lambda: not any(map(alive, ranks.pids)))


def test_a_lost_rank_is_said_to_be_lost(tmp_path: Path) -> None:
    assert RankEnd(0, rank_processes.LOST, 1.0, tmp_path / "none").in_words() == (
        "rank 0 was lost: its fork server ended"
    )


def test_groups_of_the_cpu_use_gloo() -> None:
    assert backend_for("cpu", 2) == "gloo"
