"""A file that a program appends to: while its disk fills up, it forks, or it closes what it did not open."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hashbench.core.trace.rank_file import RankFile


@contextmanager
def room(monkeypatch: pytest.MonkeyPatch, size: int) -> Iterator[None]:
    """Let so many bytes be written, and then none."""
    real, left = os.write, [size]

    def write(descriptor: int, content: memoryview) -> int:
        if not left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, content[: left.pop()])

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", write)
        yield


def test_an_earlier_file_is_replaced_and_not_written_by_who_has_it_open(tmp_path: Path) -> None:
    path = tmp_path / "made" / "rank0.log.gz"
    earlier, file = (RankFile(path, replaces=True) for _ in range(2))
    assert earlier.append(b"earlier", "")
    assert file.append(b"mine", "")
    assert earlier.append(b"late", "")
    assert path.read_bytes() == b"mine"


def test_an_earlier_file_is_refused_where_it_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("earlier")
    with pytest.raises(FileExistsError):
        RankFile(tmp_path / "a").open()
    assert (tmp_path / "a").read_text() == "earlier"


def test_what_cannot_be_written_whole_leaves_nothing_and_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The disk fills up in the middle of a write, and has room again later."""
    file = RankFile(tmp_path / "a")
    assert file.append(b"first ", "")
    for _ in range(2):
        with room(monkeypatch, 7):
            assert not file.append(b"second " * 99, "steps are lost")
    assert (tmp_path / "a").read_bytes() == b"first "
    assert (file.size, file.lost) == (6, "No space left on device")
    assert capsys.readouterr().err.count("steps are lost") == 1
    assert file.append(b"third", "")
    assert (tmp_path / "a").read_bytes() == b"first third"


def test_a_file_that_cannot_be_made_is_lost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    file = RankFile(tmp_path / "file" / "made" / "a")
    assert not file.append(b"text", "no step is recorded")
    assert file.lost == "Not a directory"
    assert "cannot write" in capsys.readouterr().err
    file.close()


def test_a_fork_writes_and_closes_nothing(tmp_path: Path) -> None:
    file = RankFile(tmp_path / "a")
    file.open()
    child = os.fork()
    if not child:
        file.append(b"child", "")
        file.close()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert file.append(b"parent", "")
    assert (tmp_path / "a").read_bytes() == b"parent"


@pytest.mark.parametrize("end", [RankFile.close, lambda file: file.append(b"text", "")], ids=["close", "append"])
def test_a_file_of_the_program_under_the_same_number_is_left_alone(
    tmp_path: Path, end: Callable[[RankFile], object]
) -> None:
    """As where a program closes all descriptors that it does not know."""
    file = RankFile(tmp_path / "a")
    file.open()
    with (tmp_path / "b").open("wb") as other:
        number = file._descriptor
        os.dup2(other.fileno(), number)
        end(file)
        os.write(number, b"own")
        os.close(number)
    assert (tmp_path / "b").read_bytes() == b"own"
