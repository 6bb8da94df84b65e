"""``hashbench pipeline`` as its users call it: new interpreters, real workers, and what ends them."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from hashbench import cli
from tests.tools.pipeline.pipeline_helpers import is_alive

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "docs" / "examples" / "pipeline"


@pytest.mark.slow
def test_the_example_of_the_documentation_repeats_and_its_page_shows_what_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = cli.main(
        ["pipeline", "check", "--config", str(EXAMPLE / "training.yaml"), "--output-dir", str(tmp_path / "a")]
    )

    said = capsys.readouterr().out
    page = (ROOT / "docs" / "pipeline.md").read_text(encoding="utf-8")
    assert code == 0, said
    assert said.partition("\n\nCheck:")[0] in page
    files = {path.name for path in (tmp_path / "a").iterdir()}
    assert files == set(re.findall(r"^\| `([\w./]+)`", page.partition("## How it knows")[0], re.MULTILINE)) | {
        "check.json"
    }


HANGS = """
import os, time, torch
class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        with open({pids!r}, "a") as file:
            file.write(f"{{os.getpid()}} {{os.getppid()}}\\n")
        time.sleep(600)
def make_loader(seed):
    return torch.utils.data.DataLoader(Slow(), num_workers=2)
"""


@pytest.mark.slow
def test_a_loader_that_hangs_leaves_no_process_behind_when_the_command_ends(tmp_path: Path) -> None:
    commands = {}
    for ended_by in (signal.SIGINT, signal.SIGKILL):
        folder = tmp_path / ended_by.name
        folder.mkdir()
        (folder / "slow.py").write_text(HANGS.format(pids=str(folder / "pids")), encoding="utf-8")
        arguments = ["pipeline", "check", "--config", "slow.py", "--output-dir", "check"]
        commands[ended_by] = subprocess.Popen(
            [sys.executable, "-m", "hashbench", *arguments], cwd=folder, stderr=subprocess.DEVNULL
        )

    for ended_by, command in commands.items():
        pids = tmp_path / ended_by.name / "pids"
        _until(lambda pids=pids: pids.exists() and pids.read_text().count("\n") >= 2)
        workers = {int(pid) for pid in pids.read_text().split()}
        assert all(map(psutil.pid_exists, workers))
        command.send_signal(ended_by)
        assert command.wait() == {signal.SIGINT: 130, signal.SIGKILL: -signal.SIGKILL}[ended_by]
        _until(lambda workers=workers: not any(is_alive(pid) for pid in workers))
        assert not (tmp_path / ended_by.name / "check").exists()


def _until(condition: object) -> None:
    assert callable(condition)
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
