"""A zoo that was swept once, for all tests of the command line."""

from __future__ import annotations

import gzip
import json
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
    """A copy of that folder, and some files that are not what they should be."""
    here = tmp_path / "here"
    shutil.copytree(swept[0], here)
    (here / "raises.py").write_text("raise RuntimeError('no licence')\n")
    (here / "a_file").write_text("This is no CSV, no trace and no folder.\n")
    rows = (here / "out" / "accuracy.csv").read_text().splitlines(keepends=True)
    (here / "twice.csv").write_text("".join([*rows, rows[1]]))
    (here / "other.csv").write_text("".join(rows).replace("inference", "training"))
    shutil.copytree(here / "out", here / "future")
    environment = json.loads((here / "future" / "environment.json").read_text())
    (here / "future" / "environment.json").write_text(json.dumps({**environment, "schema": 99}))
    trace = gzip.decompress(trace_of(here, "steady").read_bytes()).decode()
    (here / "whole.log").write_text(trace)
    (here / "truncated.log").write_text(trace[: len(trace) // 2])
    (here / "damaged.log").write_text(trace.replace("float32", "float64", 1))
    return here
