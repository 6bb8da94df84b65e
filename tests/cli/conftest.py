"""A zoo that was swept once, for all tests of the command line."""

from __future__ import annotations

import gzip
import shutil
import subprocess
from pathlib import Path

import pytest
from command_helpers import ZOO, run

from tests.cli.cli_helpers import ZOO_SWEEP, trace_of


@pytest.fixture(scope="session")
def swept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A folder with ``zoo.py``, and in ``out`` the strict sweep of its two models, one of which differs."""
    folder = tmp_path_factory.mktemp("swept")
    (folder / "zoo.py").write_text(ZOO)
    done = run(*ZOO_SWEEP, "--output", "out", "--strict", cwd=folder)
    return folder, done


@pytest.fixture
def folder(tmp_path: Path, swept: tuple[Path, subprocess.CompletedProcess[str]]) -> Path:
    """A copy of that folder, and the text of a trace."""
    here = tmp_path / "here"
    shutil.copytree(swept[0], here)
    trace = gzip.decompress(trace_of(here, "steady").read_bytes()).decode()
    (here / "whole.log").write_text(trace)
    return here
