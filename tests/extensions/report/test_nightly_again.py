"""``hashbench nightly`` asked for a night that is there already: complete, or with a zoo file that has changed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hashbench.cli import main

ZOO = """
import torch

def built():
    return torch.nn.Linear(3, {width}), (torch.ones(2, 3),)

MODELS = {{"a": built}}
"""


@pytest.mark.slow
def test_a_night_runs_again_only_what_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["nightly", "--output", "nights", "--label", "x", "--suite", "zoo.py", "--modes", "inference"]

    def night(width: int) -> str:
        Path("zoo.py").write_text(ZOO.format(width=width))
        assert main(command) == 0
        return capsys.readouterr().err

    assert "nothing was run" not in night(2)
    assert re.search(r"this night is complete since \d{4}-\d\d-\d\d \d\d:\d\d, nothing was run", night(2))
    mended = night(4)
    assert "the file of zoo has changed: 1 row of an earlier version runs again" in mended
    assert "nothing was run" not in mended
