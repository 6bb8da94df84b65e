"""What a rank prints is kept beside its trace, and goes where it went."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import pytest

from hashbench.extensions.ranks.printing import compare_prints, keeping_prints, printed_path


def _printed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Print in all ways that Python has; return what came where standard output goes."""
    with (folder.parent / "stdout").open("w", encoding="utf-8") as file:
        monkeypatch.setattr(sys, "stdout", file)
        with keeping_prints(folder, 1):
            print("loss", 0.5)
            sys.stdout.write("ä\n")
            sys.stdout.flush()
            sys.stdout.buffer.write(b"bytes\n")
            assert sys.stdout.fileno() == file.fileno()
            sys.stdout.flush()
            child = os.fork()
            if not child:
                print("a child, whose lines come at any time", flush=True)
                os._exit(0)
            os.waitpid(child, 0)  # another child of this process may end meanwhile
        assert sys.stdout is file
        print("behind it")
        monkeypatch.undo()
    return (folder.parent / "stdout").read_text(encoding="utf-8")


def test_what_is_printed_is_kept_and_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = "loss 0.5\nä\nbytes\n"
    child = "a child, whose lines come at any time\n"
    assert _printed(tmp_path / "run", monkeypatch) == f"{kept}{child}behind it\n"
    assert printed_path(tmp_path / "run", 1).read_text(encoding="utf-8") == kept


def test_a_full_disk_ends_the_file_and_not_the_printing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Lines after a gap would differ from those of another run."""

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with (tmp_path / "stdout").open("w", encoding="utf-8") as file:
        monkeypatch.setattr(sys, "stdout", file)
        with keeping_prints(tmp_path / "run", 0):
            print("first", flush=True)
            with monkeypatch.context() as patched:
                patched.setattr(os, "write", full)
                print("second", flush=True)
            print("third", flush=True)
        monkeypatch.undo()
    assert (tmp_path / "stdout").read_text() == "first\nsecond\nthird\n"
    assert printed_path(tmp_path / "run", 0).read_text() == "first\n"
    assert capsys.readouterr().err.count("what is printed from now on is not kept") == 1


def test_a_program_without_standard_output_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    with keeping_prints(tmp_path / "run", 0):
        assert sys.stdout is None


@pytest.mark.parametrize(
    ("texts", "found"),
    [
        (("loss 1\n", "loss 1\n"), 0),
        (("loss 1\n", "loss 2\n"), 1),
        (("done\n", "done\n"), None),
        (("done\n", "failed\n"), 1),
        (("loss 1\n", None), None),
        (("", ""), None),
    ],
    ids=["equal", "another number", "no number", "another word", "not kept in one run", "nothing"],
)
def test_two_runs(texts: tuple[str | None, str | None], found: int | None, tmp_path: Path) -> None:
    folders = tmp_path / "a", tmp_path / "b"
    for folder, text in zip(folders, texts, strict=True):
        folder.mkdir()
        if text is not None:
            printed_path(folder, 0).write_text(text, encoding="utf-8")
    printed = compare_prints(*folders, [0])
    assert (None if printed is None else len(printed)) == found
