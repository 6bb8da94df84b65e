"""Commands ``hashbench dynamo`` of the tests, and what they leave."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hashbench.cli import main


def read(path: Path) -> dict[str, dict[str, str]]:
    with path.open() as file:
        return {line["name"]: line for line in csv.DictReader(file)}


def refusal(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main(["dynamo", *map(str, arguments)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


def stop_model(
    miniature: Path, tmp_path: Path, *, number: int = signal.SIGINT, to_all: bool = True, code: int = 6
) -> None:
    flags = ["--accuracy", f"--output={tmp_path / 'a.csv'}", "--only=interrupted"]
    command = [sys.executable, "-m", "hashbench", "dynamo", str(miniature), *flags]
    environment = {**os.environ, "READY": str(tmp_path / "ready")}
    ours = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True)
    wait_for((tmp_path / "ready").exists)
    (os.killpg if to_all else os.kill)(ours.pid, number)
    assert ours.communicate(timeout=300)[1] == "hashbench: stopped\n"
    assert ours.returncode == code


def wait_for(there: Callable[[], bool]) -> None:
    ends = time.monotonic() + 300
    while not there():
        assert time.monotonic() < ends
        time.sleep(0.01)
