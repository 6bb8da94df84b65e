"""Folders of rank traces: what is there is read, what is missing is said, ranks of two runs are refused."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from hashbench.core.errors import HashbenchError
from hashbench.core.trace import file
from hashbench.core.trace.step_file import member, rank_path
from hashbench.extensions.ranks.folder import read_both, read_ranks
from tests.extensions.ranks.rank_traces import rank_trace, traces, write


def test_traces_come_by_rank_with_nothing_to_say(tmp_path: Path) -> None:
    read = read_ranks(write(tmp_path, traces(3)))
    assert (dict(read.traces), read.world_size, read.missing, read.notes) == (traces(3), 3, (), ())


def test_a_missing_rank_is_named(tmp_path: Path) -> None:
    write(tmp_path, traces(4))
    for rank in (1, 3):
        rank_path(tmp_path, rank).unlink()
    read = read_ranks(tmp_path)
    assert (list(read.traces), read.world_size, read.missing) == ([0, 2], 4, (1, 3))
    assert read.notes == (f"{tmp_path}: no trace of ranks 1, 3",)


def test_how_a_rank_ended_is_told(tmp_path: Path) -> None:
    read = read_ranks(write(tmp_path, {**traces(), 1: rank_trace(1, ended="SIGTERM")}))
    assert read.notes == (f"{tmp_path}: rank 1 did not end by itself: SIGTERM",)


def test_plain_and_compressed_files_are_read(tmp_path: Path) -> None:
    write(tmp_path, traces())
    packed = rank_path(tmp_path, 1)
    (tmp_path / "rank1.log").write_bytes(gzip.decompress(packed.read_bytes()))
    with pytest.raises(HashbenchError, match=r"two traces of rank 1, rank1\.log and rank1\.log\.gz"):
        read_ranks(tmp_path)
    packed.unlink()
    assert dict(read_ranks(tmp_path).traces) == traces()


def test_a_damaged_file_leaves_its_rank_without_a_trace(tmp_path: Path) -> None:
    write(tmp_path, traces())
    text = gzip.decompress(rank_path(tmp_path, 1).read_bytes()).decode()
    rank_path(tmp_path, 1).write_bytes(gzip.compress(text.replace("float32", "float64", 1).encode()))
    read = read_ranks(tmp_path)
    assert (list(read.traces), read.missing) == ([0], (1,))
    assert len(read.notes) == 1
    assert "the trace of rank 1 cannot be read: it has no whole step" in read.notes[0]


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (lambda at: at.rmdir(), "cannot read the folder"),
    "nothing in it": (Path.exists, "no traces of ranks in"),
    "only a damaged one": (lambda at: rank_path(at, 0).write_bytes(b"no trace"), "no readable trace of a rank"),
    "a trace of one process": (
        lambda at: write(at, {0: replace(rank_trace(0), rank=None)}),
        "the trace in the file of rank 0 is that of a program of one process",
    ),
    "ranks in each other's files": (
        lambda at: write(at, {0: rank_trace(1), 1: rank_trace(0)}),
        "the file of rank 0 holds the trace of rank 1",
    ),
    "another world size": (
        lambda at: write(at, {**traces(), 1: rank_trace(1, 4)}),
        "two runs: rank 0 is one of 2, rank 1 one of 4",
    ),
    "a rank too many": (
        lambda at: (write(at, traces()), rank_path(at, 5).write_bytes(b"")),
        "two runs: there is a rank 5, and the run has 2",
    ),
    "another tracer": (
        lambda at: write(at, {0: rank_trace(0), 1: replace(rank_trace(1), tracer="python")}),
        "two runs: ranks 0 and 1 have another tracer",
    ),
    "hashed inputs on one": (
        lambda at: write(at, {0: rank_trace(0), 1: replace(rank_trace(1), hashed_inputs=True)}),
        "two runs: ranks 0 and 1 have another kind of trace",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_folder_is_refused_in_one_line(what: str, tmp_path: Path) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    make, words = REFUSED[what]
    make(folder)
    with pytest.raises(HashbenchError, match=words) as refused:
        read_ranks(folder)
    assert "\n" not in str(refused.value)


def test_ranks_that_were_not_launched_together_are_refused(tmp_path: Path) -> None:
    for rank, run in enumerate(("one", "another")):
        rank_path(tmp_path, rank).write_bytes(member(file.dumps(rank_trace(rank)), run))
    with pytest.raises(HashbenchError, match="two runs: ranks 0 and 1 were not launched together"):
        read_ranks(tmp_path)


def test_a_cut_file_is_read_up_to_its_last_whole_step(tmp_path: Path) -> None:
    write(tmp_path, traces())
    text = gzip.decompress(rank_path(tmp_path, 1).read_bytes()).decode()
    rank_path(tmp_path, 1).write_bytes(gzip.compress(text[: text.index("\nstep\t2")].encode()))
    read = read_ranks(tmp_path)
    assert [step.number for step in read.traces[1].steps] == [0, 1]
    assert read.notes == (f"{tmp_path}: the trace of rank 1 is cut; its whole steps were read",)


def test_two_folders_share_what_is_equal(tmp_path: Path) -> None:
    first, second = write(tmp_path / "a", traces(3)), write(tmp_path / "b", traces(3, guilty=1, run=1))
    file.write(rank_trace(2, 3), rank_path(tmp_path / "b", 2))
    one, other = read_both(first, second)
    assert (dict(one.traces), one.path, other.path) == (traces(3), first, second)
    assert dict(other.traces) == {**traces(3, guilty=1, run=1), 2: rank_trace(2, 3)}
    assert one.traces[2] is other.traces[2]
    assert one.traces[0].records[0] is other.traces[0].records[0]


def test_ranks_that_only_one_folder_has_stay_there(tmp_path: Path) -> None:
    write(tmp_path / "a", traces(3))
    write(tmp_path / "b", traces(3))
    rank_path(tmp_path / "a", 0).unlink()
    rank_path(tmp_path / "b", 1).unlink()
    one, other = read_both(tmp_path / "a", tmp_path / "b")
    assert (list(one.traces), list(other.traces)) == ([1, 2], [0, 2])
    assert (one.missing, other.missing) == ((0,), (1,))


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (traces(3), "the runs have 2 and 3 ranks"),
        ({rank: replace(trace, tracer="python") for rank, trace in traces().items()}, "of different tracers"),
    ],
)
def test_runs_that_cannot_be_compared_are_refused(other: dict[int, object], words: str, tmp_path: Path) -> None:
    write(tmp_path / "a", traces())
    write(tmp_path / "b", other)
    with pytest.raises(HashbenchError, match=words):
        read_both(tmp_path / "a", tmp_path / "b")
