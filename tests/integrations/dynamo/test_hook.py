"""The hook in real processes of the harness: models that die, workers, refused flags."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hashbench.cli import main
from hashbench.core.processes import tell_phase
from hashbench.core.results.load import load_sweep
from hashbench.core.trace import tracer
from hashbench.integrations.dynamo import hook
from hashbench.integrations.dynamo.session import (
    Note,
    collect,
    write,
    write_note,
)
from tests.integrations.dynamo.command_helpers import read, wait_for
from tests.integrations.dynamo.dynamo_helpers import NOISY, SCRIPT, a_session


@pytest.mark.slow
def test_dead_child_has_a_row(
    miniature: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    users = tmp_path / "users"
    users.mkdir()
    (users / "sitecustomize.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'a').write('x')\nimport os\nassert 'HASHBENCH_DYNAMO' in os.environ\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(users))
    assert main(["dynamo", str(miniature), "--accuracy", f"--output={tmp_path / 'a.csv'}"]) == 7
    rows = read(tmp_path / "a.hashbench" / "hashbench.csv")
    words = {name: (row["accuracy"], row["harness_accuracy"]) for name, row in rows.items()}
    assert words == {"slow": ("timeout", "timeout"), "killed": ("crashed", ""), "absent": ("crashed", "")}
    assert "killed by SIGKILL" in rows["killed"]["error"]
    assert "ended without a row" in rows["absent"]["error"]
    assert (tmp_path / "ran").read_text() == "xxxx"
    assert "ended without a row" in capsys.readouterr().out


@pytest.mark.slow
def test_killed_hashbench_still_has_rows(miniature: Path, tmp_path: Path) -> None:
    go, ours = tmp_path / "go", tmp_path / "a.hashbench"
    command = [
        sys.executable,
        "-m",
        "hashbench",
        "dynamo",
        str(miniature),
        "--accuracy",
        f"--output={tmp_path / 'a.csv'}",
    ]
    killed = subprocess.Popen(command, env={**os.environ, "WAIT_FOR": str(go)}, stdout=subprocess.DEVNULL)
    wait_for(lambda: any(ours.glob("notes/*.json")))
    killed.kill()
    killed.wait()
    go.touch()
    wait_for(lambda: (ours / "hashbench.csv").exists() and len(read(ours / "hashbench.csv")) == 3)
    rows = read(ours / "hashbench.csv")
    assert {name: row["accuracy"] for name, row in rows.items()} == {
        "slow": "timeout",
        "killed": "crashed",
        "absent": "crashed",
    }
    assert "killed by SIGKILL" in rows["killed"]["error"]


@pytest.mark.slow
def test_workers_keep_the_note(miniature: Path, tmp_path: Path) -> None:
    assert main(["dynamo", str(miniature), "--accuracy", f"--output={tmp_path / 'a.csv'}", "--only=spawning"]) == 0


def test_performance_run_leaves_no_dead_model(
    miniature: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["dynamo", str(miniature), "--performance", f"--output={tmp_path / 'b.csv'}", "--only=absent"]) == 0
    assert "ran no accuracy check" in capsys.readouterr().err


WRONG = (
    ["--accuracy", "--nosuch"],
    ["--only=steady", "--iterations=x"],
    ["--accuracy", "--inferense", "--only=steady"],
)


def sampled(number: int) -> list[Any]:
    """The wrong flags: ``make test`` takes those of this number, each of which starts a process that imports torch."""
    marks = [() if place == number else (pytest.mark.exhaustive,) for place in range(len(WRONG))]
    return [pytest.param(wrong, marks=mark, id=" ".join(wrong)) for wrong, mark in zip(WRONG, marks, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("wrong", sampled(0))
def test_refused_flag_keeps_earlier_results(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], wrong: list[str]
) -> None:
    ours = tmp_path / "a.hashbench"
    session = a_session(ours, run="an earlier one")
    session.prepare(anew=True)
    write_note(session, Note("noisy", status="eager_two_runs_differ", run=session.run))
    write(session, collect(session))
    before = {path: path.read_bytes() for path in ours.rglob("*") if path.is_file()}
    assert main(["dynamo", str(SCRIPT), *wrong, f"--output={tmp_path / 'a.csv'}"]) == 2
    told = capfd.readouterr()
    assert "usage:" in told.err
    assert told.err.endswith("hashbench: the harness ran no model (exit code 2): no results.\n")
    assert told.out == ""
    after = {path: path.read_bytes() for path in ours.rglob("*") if path.is_file()}
    assert after == {**before, ours / ".lock": b""}


@pytest.mark.slow
@pytest.mark.parametrize("wrong", sampled(1))
def test_refused_flag_makes_no_folder(tmp_path: Path, wrong: list[str]) -> None:
    assert main(["dynamo", str(SCRIPT), *wrong, f"--output={tmp_path / 'b.csv'}"]) == 2
    assert not (tmp_path / "b.hashbench").exists()


@pytest.mark.slow
def test_model_dying_at_load_has_begun(tmp_path: Path) -> None:
    flags = ["--accuracy", "--inference", "--only=dying", f"--output={tmp_path / 'a.csv'}"]
    assert main(["dynamo", str(SCRIPT), *flags]) == 128 + signal.SIGKILL
    (row,) = read(tmp_path / "a.hashbench" / "hashbench.csv").values()
    assert (row["name"], row["accuracy"]) == ("dying", "crashed")


@pytest.mark.slow
def test_harness_sweep_names_kernel_in_children(tmp_path: Path) -> None:
    flags = ["--accuracy", "--inference", "-k", "^noisy$", f"--output={tmp_path / 'a.csv'}"]
    command = [sys.executable, "-m", "hashbench", "dynamo", "--diagnose-budget", "0", str(SCRIPT), *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (theirs,), (ours,) = (read(tmp_path / path).values() for path in ("a.csv", "a.hashbench/hashbench.csv"))
    assert theirs["name"] == ours["name"] == "noisy"
    assert theirs["accuracy"] == ours["accuracy"] == ours["harness_accuracy"] == "eager_two_runs_differ"
    assert (ours["kernel"], ours["module"]) == (NOISY, "Noisy.noise")
    sweep = load_sweep(tmp_path / "a.hashbench")
    assert sweep.kind == "hashbench"
    assert [(row.suite, row.env in sweep.environments) for row in sweep.rows] == [("zoo", True)]


@pytest.mark.parametrize(
    ("wanted", "said"), [("auto", "hashbench: compiling\n"), ("native", "hashbench: compiling\n"), ("python", "")]
)
def test_a_tracer_that_is_compiled_for_a_minute_is_announced(
    wanted: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tracer, "native_unavailable", lambda: tell_phase("compiling"))
    hook._begin_sweep(a_session(tmp_path, tracer=wanted))
    assert capsys.readouterr().err == said
