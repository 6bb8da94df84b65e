"""A file is replaced whole; what is no file is never replaced by one."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from hashbench.io import replace_file


def test_a_file_gets_its_content_and_no_temporary_one_is_left(tmp_path: Path) -> None:
    (tmp_path / "report").write_text("old")
    replace_file(tmp_path / "report", "new")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("report", "new")]


def test_what_is_no_file_is_written_to_and_stays(tmp_path: Path) -> None:
    # As root a rename onto /dev/null replaces the device of the whole machine.
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    reader.start()
    replace_file(pipe, "through")
    reader.join(120)
    assert read == ["through"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    target, link = tmp_path / "kept" / "report", tmp_path / "report"
    link.symlink_to(target)
    replace_file(link, "new")
    assert (link.is_symlink(), target.read_text()) == (True, "new")


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        replace_file(tmp_path, "text")
    assert list(tmp_path.iterdir()) == []
