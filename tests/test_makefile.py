"""The Makefile's promises: what `make help` lists works, with one line where something is missing."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import versions

import hashbench
from hashbench.core.results.rows import read_rows

CHECKOUT = Path(hashbench.__file__).parents[1]
STAMP = Path(".venv", ".installed")

pytestmark = [
    pytest.mark.skipif(shutil.which("make") is None, reason="there is no make here"),
    pytest.mark.skipif(not (CHECKOUT / "Makefile").exists(), reason="hashbench is installed, there is no Makefile"),
]
needs_environment = pytest.mark.skipif(
    not (CHECKOUT / STAMP).exists(), reason="there is no .venv in the checkout; `make setup` makes it"
)


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    """``make`` in the checkout. It takes .venv as it is (``-o``), since tests install nothing, and no variable of the
    make that may have started the tests (``make test FLAGS=-x`` puts its own into the environment)."""
    given = re.findall(r"^(\w+) *\?=", (CHECKOUT / "Makefile").read_text(), re.MULTILINE)
    started_by = {"MAKEFLAGS", "MAKELEVEL", "MFLAGS", "MAKEOVERRIDES", *given} - {"PYTHON"}
    environment = {name: value for name, value in os.environ.items() if name not in started_by}
    command = ["make", "--no-print-directory", "-o", str(STAMP), *arguments]
    return subprocess.run(
        command, cwd=CHECKOUT, env=environment, capture_output=True, text=True, timeout=900, check=False
    )


@pytest.mark.parametrize("arguments", [(), ("help",)], ids=["make", "make help"])
def test_help_lists_the_targets(arguments: tuple[str, ...]) -> None:
    done = make(*arguments)
    assert (done.returncode, done.stderr) == (0, "")
    listed = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("  make ")]
    assert listed[:16] == [
        *("help", "setup", "sweep", "compare", "nightly", "audit", "report", "bench", "gpu"),
        *("test", "quick", "exhaustive", "test-machines", "test-versions", "check", "clean"),
    ]


@needs_environment
@pytest.mark.parametrize("arguments", [(), ("BASE=results/expected",), ("NEW=results/mine",)], ids=str)
def test_compare_without_both_says_so_on_one_line(arguments: tuple[str, ...]) -> None:
    done = make("compare", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    said, make_itself = done.stderr.splitlines()
    assert said == "make compare needs both: make compare BASE=results/expected NEW=results/mine"
    assert make_itself.startswith("make: ***")


def test_versions_are_those_of_the_project_without_its_extras() -> None:
    oldest, newest = map(versions.requirements, versions.VERSIONS)
    bounds = dict(one.split("==") for one in oldest if one != "expecttest")
    assert bounds.keys() == {one.partition(">=")[0] for one in newest} - {"expecttest"}
    assert (bounds["torch"], bounds["shtab"]) == ("2.11", "1.9.1")
    assert bounds.keys().isdisjoint({"timm", "transformers", "pyyaml", "ruff"})


def test_resuming_no_folder_says_so_and_runs_nothing(tmp_path: Path) -> None:
    done = make("sweep", "FLAGS=--runs 2 --resume", f"BIN={tmp_path}")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("make sweep FLAGS=--resume needs the folder of the sweep to complete: OUTPUT=")


def test_old_python_is_refused_with_what_to_do(tmp_path: Path) -> None:
    old = tmp_path / "python3"
    old.write_text(f'#!/bin/sh\nexec {sys.executable} -c "import sys; sys.version_info = (3, 9, 1); $2"\n')
    old.chmod(0o755)
    shutil.copy(CHECKOUT / "Makefile", tmp_path)
    shutil.copy(CHECKOUT / "pyproject.toml", tmp_path)
    command = ["make", "--no-print-directory", "setup", f"PYTHON={old}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines()[0] == (
        f"hashbench needs Python 3.11 or newer, {old} is 3.9. Say which with make PYTHON=python3.12."
    )
    assert not (tmp_path / ".venv").exists()


@pytest.mark.parametrize("status", [0, 2])
def test_setup_says_what_it_does_and_compiles_the_native_tracer_which_need_not_succeed(
    tmp_path: Path, status: int
) -> None:
    (tmp_path / STAMP).parent.mkdir()
    installs = 'case "$*" in *install*) echo "python $*";; esac'
    for name, body in (("python", installs), ("hashbench", f'echo "hashbench $*"; exit {status}')):
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\n{body}\n")
        program.chmod(0o755)
    shutil.copy(CHECKOUT / "Makefile", tmp_path)
    shutil.copy(CHECKOUT / "pyproject.toml", tmp_path)
    command = ["make", "--no-print-directory", "setup", f"PYTHON={tmp_path}/python", f"BIN={tmp_path}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    first, packages, pip, native, compiled, end = done.stdout.splitlines()
    assert first.startswith("make setup: installs torch")
    assert "minutes" in first
    assert (packages[:19], native[:19], end[:16]) == ("make setup: 1 of 2,", "make setup: 2 of 2,", "make setup: done")
    assert pip.startswith("python -m pip install --quiet")
    assert compiled == "hashbench native"
    assert (tmp_path / STAMP).exists()


@pytest.mark.slow
@needs_environment
def test_sweep_of_one_model_then_compare(tmp_path: Path) -> None:
    output = tmp_path / "mine"
    flags = "FLAGS=--batch-size 1 --iterations 1"
    done = make("sweep", "ONLY=squeezenet1_1", "MODES=inference", f"OUTPUT={output}", flags)
    assert done.returncode == 0, done.stderr
    (row,) = read_rows(output / "inference" / "accuracy.csv")
    assert (row.name, row.accuracy, row.mode, row.batch_size) == ("squeezenet1_1", "pass", "inference", 1)
    assert done.stdout.splitlines()[-1] == f"All results of this sweep: {output}"
    compared = make("compare", f"BASE={output}/inference", f"NEW={output}/inference")
    assert compared.returncode == 0, compared.stderr
