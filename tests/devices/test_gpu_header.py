"""``pytest -m gpu`` says on what it runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.slow


def collected(*arguments: str) -> list[str]:
    """The lines about an accelerator that pytest prints for the tests of this folder."""
    command = [sys.executable, "-m", "pytest", "--collect-only", str(Path(__file__).with_name("test_on_gpu.py"))]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:]
    return [line for line in done.stdout.splitlines() if line.startswith("accelerator: ")]


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_without_an_accelerator_it_says_how_many_are_skipped() -> None:
    (line,) = collected("-m", "gpu")
    assert line.startswith(f"accelerator: no accelerator, torch {torch.__version__.partition('+')[0]}")
    assert line.endswith(" tests marked gpu will be skipped")
    assert int(line.rpartition(": ")[2].partition(" ")[0]) > 40


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
def test_an_accelerator_is_named() -> None:
    (line,) = collected("-m", "gpu")
    assert torch.get_device_module().get_device_name() in line


def test_other_runs_do_not_ask() -> None:
    assert collected("-m", "not gpu") == []
