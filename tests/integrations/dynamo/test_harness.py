"""What is refused before the harness runs, its flags, and how it ends."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hashbench.cli import main
from hashbench.integrations.dynamo import harness
from tests.integrations.dynamo.command_helpers import read, refusal, stop_model, wait_for
from tests.integrations.dynamo.dynamo_helpers import SCRIPT, STANDIN


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("absent.py", "does not exist"),
        (__file__, "is not a suite"),
        (STANDIN / "common.py", "is not a suite"),
        (STANDIN / "standin_ops.py", "is not a suite"),
        (STANDIN, "does not exist"),
        ("garbage.py", "it is not Python"),
    ],
)
def test_what_is_no_suite_is_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, script: str | Path, said: str
) -> None:
    (tmp_path / "garbage.py").write_bytes(b"\x00\xff")
    error = refusal(capsys, tmp_path / script, "--accuracy")
    assert said in error
    assert "nothing was run" in error


@pytest.mark.parametrize(
    ("old", "new", "missing"),
    [
        ("class BenchmarkRunner", "class Runner", "class BenchmarkRunner"),
        ("def check_accuracy", "def check_it", "BenchmarkRunner.check_accuracy"),
        ("def run_n_iterations", "def run_n_times", "BenchmarkRunner.run_n_iterations"),
        ("def deepcopy_and_maybe", "def maybe", "BenchmarkRunner.deepcopy_and_maybe_parallelize"),
        ("reset_rng_state()\n", "reset()\n", "call of reset_rng_state"),
        ("not same(", "not alike(", "call of same"),
    ],
)
def test_unsupported_harness_is_refused_by_name(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, old: str, new: str, missing: str
) -> None:
    folder = shutil.copytree(STANDIN, tmp_path / "newer")
    source = (folder / "common.py").read_text()
    assert old in source
    (folder / "common.py").write_text(source.replace(old, new))
    error = refusal(capsys, folder / "zoo.py", "--accuracy", "--output", tmp_path / "a.csv")
    assert f"has no {missing}" in error
    assert not (tmp_path / "a.hashbench").exists()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--output", "/x/a.csv"], "/x/a.csv"),
        (["--output=a.csv", "--output-directory=/x"], "/x/a.csv"),
        (["--output", "a.csv"], ""),  # in a folder of torch's, which only the harness knows
        (["--output", "/x/a.csv", "--disable-output"], ""),
        (["--output"], ""),
        ([], ""),
    ],
)
def test_csv_path_is_read_from_flags(arguments: list[str], expected: str) -> None:
    assert harness.read_flags(arguments).csv == expected


@pytest.mark.slow
@pytest.mark.parametrize(("number", "to_all", "code"), [(signal.SIGINT, True, 6), (signal.SIGTERM, False, 143)])
def test_signal_ends_harness_as_without_us(
    miniature: Path, tmp_path: Path, number: int, to_all: bool, code: int
) -> None:
    """Ctrl-C reaches all processes of a terminal, and the harness not a second time while it ends."""
    stop_model(miniature, tmp_path, number=number, to_all=to_all, code=code)
    assert not (tmp_path / "a.hashbench").exists()


@pytest.mark.slow
@pytest.mark.parametrize("named", [(), ("hashbench", "dynamo")], ids=["the harness alone", "hashbench"])
def test_ctrl_c_keeps_the_harness_exit_code(tmp_path: Path, named: tuple[str, ...]) -> None:
    """With ``torch._dynamo`` CPython ends with 1 after an unhandled ``KeyboardInterrupt``, not by SIGINT: tabulate,
    which torch imports at its exit, makes namedtuples by ``eval``."""
    flags = ["--accuracy", "--inference", "--only=waiting", f"--output={tmp_path / 'a.csv'}"]
    command = [sys.executable, *(["-m", *named] if named else []), str(SCRIPT), *flags]
    environment = {**os.environ, "READY": str(tmp_path / "ready")}
    started = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True)
    wait_for((tmp_path / "ready").exists)
    os.killpg(started.pid, signal.SIGINT)
    told = started.communicate(timeout=300)[1]
    assert "KeyboardInterrupt" in told
    assert started.returncode == 1
    assert [path.name for path in tmp_path.iterdir()] == ["ready"]


def test_death_of_the_only_model_is_described(
    miniature: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["dynamo", str(miniature), "--accuracy", f"--output={tmp_path / 'a.csv'}", "--only=killed"]
    assert main(command) == 128 + signal.SIGKILL
    (row,) = read(tmp_path / "a.hashbench" / "hashbench.csv").values()
    assert row["accuracy"] == "crashed"
    assert "killed by SIGKILL" in row["error"]
    assert capsys.readouterr().out.endswith(f"The harness's own: none, it wrote no {tmp_path / 'a.csv'}\n")
