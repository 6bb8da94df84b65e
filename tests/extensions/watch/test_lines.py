"""The file of a recording while its program goes on, forks, ends and runs out of disk."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from hashbench.extensions.watch.lines import WaitingLines


def opened(path: Path) -> WaitingLines:
    return WaitingLines.create(path, tip="Give another folder.")


def test_lines_that_a_program_leaves_are_written_when_it_exits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at_exit: list[Callable[[], None]] = []
    monkeypatch.setattr("atexit.register", at_exit.append)
    lines = opened(tmp_path / "rank0.jsonl")
    lines.put("step", {"step": 0})
    assert (tmp_path / "rank0.jsonl").read_text() == ""
    (left,) = at_exit
    left()
    assert (tmp_path / "rank0.jsonl").read_text().startswith('{"line":"step","step":0')
    lines.close({"steps": 1, "ended": ""})


def test_a_fork_of_the_program_writes_nothing(tmp_path: Path) -> None:
    lines = opened(tmp_path / "rank0.jsonl")
    lines.put("step", {"step": 0})
    child = os.fork()
    if not child:
        lines.put("step", {"step": 1})
        lines.close({"steps": 2, "ended": ""})
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    lines.close({"steps": 1, "ended": ""})
    assert [line[:24] for line in (tmp_path / "rank0.jsonl").read_text().splitlines()] == [
        '{"line":"step","step":0,',
        '{"line":"end","steps":1,',
    ]


def test_a_full_disk_ends_the_recording_and_not_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where it has room again: steps would be missing in between."""
    path = tmp_path / "rank0.jsonl"
    lines = opened(path)
    lines.write("step", {"step": 0})
    with monkeypatch.context() as patched:
        patched.setattr("hashbench.core.trace.rank_file.os.write", full)
        lines.write("step", {"step": 1})
    lines.write("step", {"step": 2})
    lines.close({"ended": ""})
    said = f"hashbench: cannot write {path}: No space left on device; no further step is recorded\n"
    assert capsys.readouterr().err == said
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [0]


def full(*_: object) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
