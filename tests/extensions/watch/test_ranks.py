"""Recordings of two real ranks (gloo)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from forked_ranks import run_ranks

from hashbench.extensions.watch import file
from hashbench.extensions.watch.traced import compare_folders

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def recorded(shared_servers: None, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: ARG001
    folder = tmp_path_factory.mktemp("ranks")
    end = run_ranks([sys.executable, Path(__file__).parent / "ranked.py", folder])
    assert not end.problem
    return folder


def test_equal_runs_agree_on_both_ranks(recorded: Path) -> None:
    verdict = compare_folders(recorded / "clean", recorded / "twin")
    assert verdict.equal
    assert [one.rank for one in verdict.ranks] == [0, 1]
    header = file.read(recorded / "clean" / "rank1.jsonl").header
    assert (header.rank, header.world_size, header.parameter[0]) == (1, 2, "first.weight")


@pytest.mark.parametrize(
    ("fault", "step", "part", "elsewhere"),
    [("kernel", 5, "loss", "gradient"), ("batch", 5, "batch", "gradient"), ("replica", 6, "loss", "gradient")],
)
def test_the_rank_at_fault_is_the_first(recorded: Path, fault: str, step: int, part: str, elsewhere: str) -> None:
    verdict = compare_folders(recorded / "clean", recorded / fault)
    first = verdict.first
    assert first is not None
    assert (first.rank, first.step, first.differing[0].part) == (1, step, part)
    other = verdict.ranks[0]
    assert (other.step, other.differing[0].part) == (step, elsewhere)


def test_a_rank_that_is_missing_is_no_agreement(recorded: Path, tmp_path: Path) -> None:
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "rank0.jsonl").write_bytes((recorded / "twin" / "rank0.jsonl").read_bytes())
    verdict = compare_folders(recorded / "clean", tmp_path / "half")
    assert not verdict.equal
    assert verdict.notes == (f"Only {recorded / 'clean'} has a recording of rank 1.",)
