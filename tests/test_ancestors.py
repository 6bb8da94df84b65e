"""Every line of docs/ancestors.md runs, and the examples that the ancestors' documentation shows do what it says."""

from __future__ import annotations

import random
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hashbench import cli
from hashbench.core.run.rng import preserved_rng
from hashbench.core.run.settings import preserved
from hashbench.tools.numeric import numeric_check_if_enabled

PAGE = (Path(__file__).parents[1] / "docs" / "ancestors.md").read_text(encoding="utf-8")
LINES = re.findall(r"\| `([^`]+)` \|$", PAGE, re.MULTILINE)
COMMANDS = [line for line in LINES if line.startswith("hashbench ")]
PYTHON = [line for line in LINES if not line.startswith("hashbench ")]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    with preserved(), preserved_rng():
        yield


def test_every_row_has_a_line() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("|") and not line.startswith(("|---", "| there"))]
    assert len(rows) == len(LINES) > 35


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_parses(command: str) -> None:
    assert callable(cli._parser().parse_args(shlex.split(command)[1:]).command)


def test_every_line_of_python_runs() -> None:
    block = re.search(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert block is not None
    names: dict[str, Any] = {}
    exec(compile(block[1], "docs/ancestors.md", "exec"), names)
    for line in PYTHON:
        exec(compile(line, line, "exec"), names)


# ------------------------------------------------------------------------------------------ what their pages show
# (the observer's and the bitwise mode's: tools/observer, tools/bitwise)


def test_numeric_check_runs_as_torchs_own_is_called() -> None:
    before = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    after = torch.fx.GraphModule(before, before.graph)
    assert numeric_check_if_enabled(before, after, [torch.randn(2, 4)], 2, 1e-4)
    with torch.no_grad():
        next(before.parameters()).add_(random.Random(0).uniform(1, 2))
        changed = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    assert not numeric_check_if_enabled(before, changed, [torch.randn(2, 4)], 1, 1e-4)
