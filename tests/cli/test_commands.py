"""The command line: what it says, where it says it, and with which exit code. Sweeps are real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from command_helpers import CHECKOUT, Main, Said, run
from sweep_helpers import snapshot

from hashbench.cli import reading

NO_TORCH = """
import sys
from importlib.machinery import ModuleSpec
class Refuses:
    def find_spec(self, name, path=None, target=None):  # to ask whether a package is there is no import
        return ModuleSpec(name, self) if name.partition(".")[0] in ("torch", "torchvision") else None
    def create_module(self, spec):
        raise RuntimeError(f"{spec.name} is imported")
    def exec_module(self, module):
        pass
sys.meta_path.insert(0, Refuses())
"""


# ------------------------------------------------------------------------------------------------- without torch


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        "--help",
        "--version",
        "sweep --help",
        "list --suite torchvision specimens",
        "diff whole.log whole.log",
        "compare out out",
        "compare out out --format json",
        "sweep --inference --only nothing",
    ],
)
def test_torch_is_not_imported_for(arguments: str, folder: Path) -> None:
    (folder / "first").mkdir()
    (folder / "first" / "sitecustomize.py").write_text(NO_TORCH)
    done = run(*arguments.split(), cwd=folder, path=folder / "first")
    assert "is imported" not in done.stderr
    assert done.returncode == (2 if "nothing" in arguments else 0), done.stderr


def test_that_check_would_see_an_import(folder: Path) -> None:
    (folder / "sitecustomize.py").write_text(NO_TORCH)
    assert "torch is imported" in run(cwd=folder, path=folder, code="import hashbench.core.check.model").stderr


# --------------------------------------------------------------------------------------------------- bad input


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "what", "tip"),
    [
        ("sweep --inference --output new --only resnet81", "unknown model 'resnet81'", "resnet18"),
        ("sweep --inference --output new -d cuda:99", "the device cuda:99 does not exist here", "--device"),
        ("sweep --inference --output new -d nonsense", "'nonsense' is not a device", "--device"),
        ("swep", "unknown command 'swep'", "Did you mean sweep?"),
        pytest.param("replay none", "No such file", "hashbench sweep", marks=pytest.mark.exhaustive),  # imports torch
    ],
)
def test_a_process_says_it_in_one_line_and_in_the_same_words(
    arguments: str, what: str, tip: str, main: Main, folder: Path
) -> None:
    """What else is said of bad input, and that nothing is written, is held by the golden file ``errors.txt``."""
    before = snapshot(folder)
    done = run(*arguments.split(), cwd=folder)
    assert Said(done.returncode, done.stdout, done.stderr) == main(*arguments.split(), cwd=folder)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert what in done.stderr
    assert tip in done.stderr
    assert snapshot(folder) == before


@pytest.mark.parametrize("command", [(), ("pipeline",)], ids=str)
def test_without_a_command_help_is_shown_with_code_2(command: tuple[str, ...], main: Main, tmp_path: Path) -> None:
    done = main(*command, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == main(*command, "--help", cwd=tmp_path).stdout


# -------------------------------------------------------------------------------------------------- other endings


def test_fault_of_hashbench_shows_its_trace(main: Main, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_listed", lambda _: 1 / 0)
    done = main("list", cwd=tmp_path)
    assert done.returncode == 70
    assert "ZeroDivisionError" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("hashbench: internal error in hashbench")


def test_ctrl_c_is_no_fault(main: Main, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_listed", lambda _: signal.raise_signal(signal.SIGINT))
    done = main("list", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (130, "hashbench: stopped\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device here is always full")
@pytest.mark.parametrize(("command", "buffered"), [("list --suite torchvision", True), ("sweep --help", False)])
def test_full_output_is_an_error_of_one_line(command: str, buffered: bool, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT), **({} if buffered else {"PYTHONUNBUFFERED": "1"})}
    with open("/dev/full", "w") as full:  # noqa: PTH123 – a device
        done = subprocess.run(
            [sys.executable, "-m", "hashbench", *command.split()],
            cwd=tmp_path,
            env=environment,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith("hashbench: cannot write: No space left on device, so the output is not whole.")


@pytest.mark.parametrize("closed", ["1", "2"])
def test_a_standard_stream_that_is_closed_is_no_fault(closed: str, tmp_path: Path) -> None:
    command = f"{sys.executable} -m hashbench list --suite torchvison {closed}>&-"
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", int(closed == "1"))


def test_reader_that_goes_away_is_no_fault(tmp_path: Path) -> None:
    command = f"{sys.executable} -m hashbench list | head -n 1"
    done = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(CHECKOUT)}, capture_output=True
    )
    assert done.stderr == b""


# ------------------------------------------------------------------------------------------------------ the work
