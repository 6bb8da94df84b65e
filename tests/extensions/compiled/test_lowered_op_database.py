"""The IR of torch's own op database, in a process of its own: importing that changes torch's global flags for good."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def judge(dtype: str, *, every: int, number: int) -> str:
    words = [sys.executable, "-m", "tests.extensions.compiled.op_database_lowered", dtype, str(every), str(number)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
def test_a_sample_of_ops_agrees() -> None:
    assert "agrees" in judge("float64", every=40, number=1)


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", ["float32", "float64", "int64"])
def test_all_ops_agree(dtype: str) -> None:
    assert "agrees" in judge(dtype, every=1, number=2)
