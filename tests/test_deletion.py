"""The wall, tried: hashbench without the folders of its extensions."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hashbench.extensions import EXTENSIONS

ROOT = Path(__file__).parents[1]
FOLDERS = [each.name for each in EXTENSIONS if not each.folder]

ZOO = """
import itertools, torch, hashbench

COUNT = itertools.count()

class Counts(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x) + next(COUNT)

@hashbench.model
def counts():
    return Counts(4, 4), (torch.ones(2, 4),)

@hashbench.model
def steady():
    return torch.nn.Linear(4, 4), (torch.ones(2, 4),)
"""

USE = """
import sys
from hashbench.cli import main
sweep = ("sweep", "--suite", "zoo.py", "--inference", "--diagnose-budget", "0")
traces = [f"out/traces/zoo.inference.counts.run{number}.log.gz" for number in (1, 2)]
codes = [main([*sweep, "--output", "out"]), main(["diff", *traces]), main(["compare", "out", "out"])]
codes.append(main([*sweep, "--stress", "--output", "stressed"]))
codes.append(main(["report", "out"]))
main(["numeric", "--kernel", "kernels.py:mean", "--reference", "kernels.py:plain"])
try:
    __import__("hashbench.testing").testing.assert_within_rounding(len, len)
except AssertionError as error:
    print(error)
main(["--help"])
print("exit codes", codes)
"""
"""A sweep, a diff and a comparison; then flags, a command and a check of extensions."""


def copied(folder: Path, *deleted: str, tests: bool = False) -> Path:
    """A copy of hashbench without the folders of some extensions, and without their tests."""
    names = ("hashbench", "models", *(("docs", "tests", "benchmarks", "results/expected") if tests else ()))
    for name in names:
        shutil.copytree(ROOT / name, folder / name)
    for name in deleted:
        shutil.rmtree(folder / "hashbench" / "extensions" / name)
        shutil.rmtree(folder / "tests" / "extensions" / name, ignore_errors=True)
    return folder


def ran(folder: Path, *command: str) -> str:
    """Run Python in ``folder``, whose hashbench is imported; return what it prints."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "COLUMNS": "100", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    return done.stdout + done.stderr


def used(folder: Path) -> str:
    (folder / "zoo.py").write_text(ZOO, encoding="utf-8")
    return ran(folder, "-c", USE)


@pytest.mark.slow
def test_without_any_extension_models_are_swept_and_compared(tmp_path: Path) -> None:
    said = used(copied(tmp_path, *FOLDERS))
    assert "exit codes [0, 1, 0, 2, 2]" in said, said
    assert "1 eager_two_runs_differ, 1 pass" in said
    assert "kernel:           aten.add.Tensor" in said
    assert "unknown flag --stress" in said
    assert "unknown command 'report'" in said
    assert "unknown flag --kernel" in said
    assert "within_rounding needs hashbench/extensions/kernels, and this folder is missing." in said
    assert "  watch " not in said
    header = (tmp_path / "out" / "accuracy.csv").read_text(encoding="utf-8").splitlines()[0]
    assert header.startswith("dev,name,batch_size,accuracy,")


@pytest.mark.exhaustive
@pytest.mark.parametrize("deleted", FOLDERS)
def test_without_one_extension_models_are_swept_and_compared(deleted: str, tmp_path: Path) -> None:
    said = used(copied(tmp_path, deleted))
    assert f"exit codes [0, 1, 0, {2 if deleted == 'stress' else 0}, {2 if deleted == 'report' else 0}]" in said, said


@pytest.mark.exhaustive
def test_without_any_extension_the_tests_of_the_core_pass(tmp_path: Path) -> None:
    folder = copied(tmp_path, *FOLDERS, tests=True)
    for name in ("pyproject.toml", "Makefile", "README.md", "CHANGELOG.md"):
        shutil.copy(ROOT / name, folder / name)
    quick = ("-m", "not slow and not exhaustive", "-p", "no:cacheprovider", "-p", "no:xdist")
    said = ran(folder, "-m", "pytest", "-q", *quick, "tests/core")
    closing = re.findall(r"^.*\d+ passed.*$", said, re.MULTILINE)  # torch may warn behind it
    assert len(closing) == 1, said[-3000:]
    assert not re.search("failed|error", closing[0]), said[-3000:]
    assert " failed" not in said.splitlines()[-1], said[-3000:]
