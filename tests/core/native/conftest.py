"""Fixtures of the tests of the native library: a stand-in for a compiler, a source, and private folders."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from hashbench.core.native import cache
from tests.core.native.build_helpers import FakeCompiler


@pytest.fixture
def private(tmp_path: Path) -> Path:
    """A folder that fulfils what the cache asks for, also where pytest's own could be written by a group."""
    tmp_path.chmod(0o700)
    return tmp_path


@pytest.fixture
def compiler(private: Path, monkeypatch: pytest.MonkeyPatch) -> FakeCompiler:
    fake = FakeCompiler(private)
    monkeypatch.setenv("CXX", f"'{fake.program}'")
    return fake


@pytest.fixture
def source(private: Path) -> Path:
    path = private / "answer.cpp"
    path.write_text('extern "C" int answer() { return 42; }\n')
    return path


@pytest.fixture
def folder(private: Path) -> Path:
    return private / "cache"


@pytest.fixture
def places(private: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """The user's cache folder and the private one among temporary files."""
    home, temporary = private / "home", private / "temporary"
    home.mkdir()
    temporary.mkdir(mode=0o700)
    temporary.chmod(0o1777)
    for name in (cache.VARIABLE, "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    return home / ".cache" / "hashbench" / "native", temporary / f"hashbench-{os.geteuid()}" / "native"
