"""A rank's file: members that are whole, one run's, and nothing else's."""

from __future__ import annotations

import errno
import gzip
import os
from pathlib import Path

import pytest

from hashbench.extensions.ranks.step_file import StepFile, rank_path, run_id, run_of, without_run

RUN = "0123456789abcdef"


def test_each_text_is_a_member(tmp_path: Path) -> None:
    path = rank_path(tmp_path / "made", 3)
    assert path.name == "rank3.log.gz"
    file = StepFile(path, RUN)
    sizes = []
    for text in ("first\n", "", "é" * 1000):
        file.add(text)
        sizes.append(path.stat().st_size)
    file.close()
    content = path.read_bytes()
    assert gzip.decompress(content).decode() == "first\n" + "é" * 1000
    assert [gzip.decompress(content[: sizes[0]]), gzip.decompress(content[sizes[0] : sizes[1]])] == [b"first\n", b""]
    assert run_of(path) == RUN


def test_an_earlier_file_is_replaced_and_not_written_by_who_has_it_open(tmp_path: Path) -> None:
    path = tmp_path / "rank0.log.gz"
    earlier = StepFile(path, "earlier")
    earlier.add("earlier\n")
    file = StepFile(path, RUN)
    file.add("mine\n")
    earlier.add("late\n")
    assert gzip.decompress(path.read_bytes()) == b"mine\n"
    assert run_of(path) == RUN


def test_equal_texts_are_equal_bytes_but_for_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contents = []
    for number, (text, now) in enumerate([("text\n", 1.0), ("text\n", 1e9), ("texd\n", 1e9)]):
        monkeypatch.setattr("time.time", lambda now=now: now)
        file = StepFile(tmp_path / str(number), f"{number:016x}")
        file.add(text)
        file.add(text)
        file.close()
        contents.append((tmp_path / str(number)).read_bytes())
    assert contents[0] != contents[1]
    assert without_run(contents[0]) == without_run(contents[1]) != without_run(contents[2])
    assert without_run(gzip.compress(b"text")) == gzip.compress(b"text")


def test_what_cannot_be_written_whole_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk fills up in the middle of a write."""
    file = StepFile(tmp_path / "a", RUN)
    file.add("first\n")
    before = (tmp_path / "a").read_bytes()
    real, room = os.write, [7]

    def write(descriptor: int, content: memoryview) -> int:
        if not room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, content[: room.pop()])

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", write)
        with pytest.raises(OSError, match="No space left"):
            file.add("second\n" * 99)
    assert (tmp_path / "a").read_bytes() == before
    file.add("third\n")
    assert gzip.decompress((tmp_path / "a").read_bytes()) == b"first\nthird\n"


@pytest.mark.parametrize(
    "content",
    [b"", b"plain text", gzip.compress(b"text"), b"\x1f\x8b\x08\x10", bytes(99)],
    ids=["empty", "text", "gzip without comment", "cut header", "zeros"],
)
def test_other_files_are_of_no_run(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(content)
    assert run_of(tmp_path / "a") == ""


def test_ranks_of_a_run_share_its_id_and_no_others() -> None:
    """Ranks 0 and 1 of one torchrun; then a restart, another run, another port, and two nodes of one run."""
    elastic = {"TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500", "WORLD_SIZE": "2"}
    elastic |= {"TORCHELASTIC_RESTART_COUNT": "0", "LOCAL_WORLD_SIZE": "2"}
    first = run_id({**elastic, "RANK": "0"}, parent=7)
    assert run_id({**elastic, "RANK": "1"}, parent=7) == first
    assert len({first, run_id(elastic, parent=8), run_id({**elastic, "MASTER_PORT": "1"}, parent=7)}) == 3
    assert run_id({**elastic, "TORCHELASTIC_RESTART_COUNT": "1"}, parent=7) != first
    nodes = {**elastic, "WORLD_SIZE": "4"}
    assert run_id(nodes, parent=7) == run_id(nodes, parent=8)
    steps = {"SLURM_JOB_ID": "5", "SLURM_STEP_ID": "0"}
    assert run_id(steps, parent=7) == run_id(steps, parent=8) != run_id({**steps, "SLURM_STEP_ID": "1"}, parent=7)
