"""Ranks of the pool: real processes, which are replaced when they die, and of which none is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from hashbench.core.processes import wait_for_end, watched
from tests.extensions.ranks.pool import RankPool

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ranks 0")]

DOUBLED = "tests.extensions.ranks.pool:doubled"
ENDED_SECONDS = 20.0


def dies(rank: int, _ranks: int, guilty: int) -> int:
    """End at once on one rank, by a signal."""
    if rank == guilty:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    return os.getpid()


def raises(rank: int, _ranks: int, guilty: int) -> int:
    """Raise on one rank; the others have nothing to wait for."""
    if rank == guilty:
        raise ValueError("planted")
    return os.getpid()


def hangs(rank: int, _ranks: int, guilty: int) -> int:
    """Never return on one rank."""
    while rank == guilty:
        time.sleep(0.1)
    return os.getpid()


def unpicklable(_rank: int, _ranks: int) -> object:
    """Return what cannot be sent back."""
    return lambda: None


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(3, preload=("torch", "tests.extensions.ranks.test_pool")) as pool:
        yield pool


def test_every_rank_answers_in_a_group_of_its_own_for_each_call(pool: RankPool, tmp_path: Path) -> None:
    for turn, ranks in enumerate((2, 3, 2)):
        outcomes = pool.call(DOUBLED, 21, ranks=ranks, folder=tmp_path / str(turn))
        assert [outcome.value for outcome in outcomes] == [(rank, ranks, 42) for rank in range(ranks)]


def test_processes_serve_for_many_calls(pool: RankPool, tmp_path: Path) -> None:
    pool.call(DOUBLED, 1, ranks=2, folder=tmp_path / "a")
    before = pool.pids
    pool.call(DOUBLED, 1, ranks=2, folder=tmp_path / "b")
    assert pool.pids == before


def test_folder_of_another_call_is_refused(pool: RankPool, tmp_path: Path) -> None:
    pool.call(DOUBLED, 1, ranks=2, folder=tmp_path)
    with pytest.raises(FileExistsError):
        pool.call(DOUBLED, 1, ranks=2, folder=tmp_path)


@pytest.mark.parametrize("guilty", [0, 1])
def test_killed_rank_is_told_by_its_signal_and_replaced(pool: RankPool, tmp_path: Path, guilty: int) -> None:
    pool.call(DOUBLED, 1, ranks=2, folder=tmp_path / "before")
    before = pool.pids
    outcomes = pool.call("tests.extensions.ranks.test_pool:dies", guilty, ranks=2, folder=tmp_path / "killed")
    assert outcomes[guilty].status == -signal.SIGKILL
    assert outcomes[1 - guilty].error  # of its barrier
    outcomes = pool.call(DOUBLED, 4, ranks=2, folder=tmp_path / "after")
    assert [outcome.value[2] for outcome in outcomes] == [8, 8]
    assert pool.pids[guilty] != before[guilty]


def test_rank_that_raises_gives_its_traceback_and_the_others_their_values(pool: RankPool, tmp_path: Path) -> None:
    outcomes = pool.call("tests.extensions.ranks.test_pool:raises", 1, ranks=2, folder=tmp_path / "raised")
    assert "ValueError: planted" in outcomes[1].error
    assert outcomes[0].value == pool.pids[0]
    assert not pool.call(DOUBLED, 1, ranks=2, folder=tmp_path / "after")[1].error


def test_rank_that_hangs_is_killed_in_time_and_replaced(pool: RankPool, tmp_path: Path) -> None:
    pool.call(DOUBLED, 1, ranks=2, folder=tmp_path / "before")
    hanging = watched(pool.pids[1])
    outcomes = pool.call("tests.extensions.ranks.test_pool:hangs", 1, ranks=2, folder=tmp_path / "hangs", seconds=2)
    assert outcomes[1].error == "no answer in time"
    assert outcomes[0].value
    assert wait_for_end(hanging, ENDED_SECONDS)
    assert not pool.call(DOUBLED, 1, ranks=2, folder=tmp_path / "after")[1].error


def test_value_that_cannot_be_sent_is_an_error(pool: RankPool, tmp_path: Path) -> None:
    outcomes = pool.call("tests.extensions.ranks.test_pool:unpicklable", ranks=2, folder=tmp_path)
    assert all("pickle" in outcome.error for outcome in outcomes)


def test_rank_that_died_between_calls_is_replaced(pool: RankPool, tmp_path: Path) -> None:
    pool.call(DOUBLED, 1, ranks=2, folder=tmp_path / "before")
    dead = watched(pool.pids[1])
    assert dead is not None
    dead.kill()
    assert wait_for_end(dead, ENDED_SECONDS)
    assert not pool.call(DOUBLED, 1, ranks=2, folder=tmp_path / "after")[1].error


ORPHANS = """
import sys, time
from pathlib import Path
from tests.extensions.ranks.pool import RankPool
pool = RankPool(2, preload=("torch",))
pool.call("tests.extensions.ranks.pool:doubled", 1, ranks=2, folder=Path(sys.argv[1]))
print(pool.server_pid, *pool.pids.values(), flush=True)
time.sleep(600)
"""


def test_nothing_is_left_of_a_pool_whose_process_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ORPHANS, str(tmp_path / "call")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3]) as owner:
        assert owner.stdout is not None
        members = [watched(int(pid)) for pid in owner.stdout.readline().split()]
        assert len(members) == 3
        assert all(isinstance(member, psutil.Process) for member in members)
        owner.kill()
    assert all(wait_for_end(member, ENDED_SECONDS) for member in members)


def test_nothing_is_left_of_a_pool_that_ends(tmp_path: Path) -> None:
    with RankPool(2, preload=("torch",)) as pool:
        pool.call(DOUBLED, 1, ranks=2, folder=tmp_path)
        members = [watched(pid) for pid in (pool.server_pid, *pool.pids.values())]
    assert all(wait_for_end(member, ENDED_SECONDS) for member in members)
