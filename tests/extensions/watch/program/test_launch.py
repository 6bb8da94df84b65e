"""Standard input: each run reads all of it from the beginning."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from hashbench.extensions.watch.program.launch import StandardInput


def read_all(source: StandardInput, most: int = -1) -> bytes:
    """Return what a run reads of its standard input."""
    with source.fed() as descriptor, os.fdopen(os.dup(descriptor), "rb") as opened:
        return opened.read(most)


def test_a_pipe_is_read_anew_by_each_run(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    text = b"line\n" * 50_000
    with os.fdopen(reading) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        source = StandardInput()
        if not os.fork():
            with os.fdopen(writing, "wb") as opened:
                opened.write(text)
            os._exit(0)
        os.close(writing)
        assert read_all(source, 10) == text[:10]
        assert read_all(source) == text
        assert read_all(source) == text
        os.wait()


def test_a_file_is_read_from_where_it_stood(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "in").write_text("read\nleft\n")
    with (tmp_path / "in").open() as stdin:
        os.lseek(stdin.fileno(), 5, os.SEEK_SET)
        monkeypatch.setattr(sys, "stdin", stdin)
        source = StandardInput()
        assert [read_all(source), read_all(source)] == [b"left\n", b"left\n"]
