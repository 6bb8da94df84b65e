"""docs/extending.md: its changes are applied to a copy of hashbench, and seen in every output that should show them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
CHANGES = dict(re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
FILES = re.compile(r"^\+\+\+ (hashbench/\S+)", re.MULTILINE)
CHECKS = Path(__file__).with_name("extending_checks.py")


def copy_into(folder: Path) -> Path:
    for name in ("hashbench", "models"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def apply(title: str, folder: Path, *flags: str) -> None:
    """Apply the diff of a section to a copy."""
    (diff,) = re.findall(r"^```diff\n(.*?)^```", CHANGES[title], re.MULTILINE | re.DOTALL)
    command = ["git", "apply", "-p0", *flags, "-"]
    applied = subprocess.run(command, input=diff, text=True, capture_output=True, check=False, cwd=folder)
    assert applied.returncode == 0, f"the diff of {title!r} does not fit any more: {applied.stderr}"


@pytest.fixture(scope="module")
def unchanged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_into(tmp_path_factory.mktemp("unchanged"))


@pytest.fixture(scope="module")
def problems(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """By name of a check what is wrong with it, or nothing: all run in one process, whose hashbench has all changes."""
    folder = copy_into(tmp_path_factory.mktemp("changed"))
    for title in CHANGES:  # which have nothing to do with each other
        apply(title, folder)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (folder, ROOT)))}
    options = ["-p", "no:cacheprovider", "-p", "no:xdist", "-c", str(ROOT / "pyproject.toml"), "--junitxml=checks.xml"]
    options += ["-o", f"pythonpath={CHECKS.parent}"]  # the hashbench of the copy, not the one of ROOT
    done = subprocess.run(
        [sys.executable, "-P", "-m", "pytest", *options, str(CHECKS)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert (folder / "checks.xml").exists(), done.stdout + done.stderr
    cases = ElementTree.parse(folder / "checks.xml").iter("testcase")
    return {case.attrib["name"]: "\n".join(filter(None, case.itertext())) for case in cases}


def test_there_are_nine_changes() -> None:
    assert list(CHANGES) == [
        "A CSV column",
        "A cause",
        "An experiment",
        "A status",
        "A suite",
        "A digest for a dtype",
        "A kind of device",
        "A report form",
        "An executor",
    ]


@pytest.mark.parametrize("title", CHANGES)
def test_a_change_is_in_two_files_of_the_product_at_most(title: str) -> None:
    assert 1 <= len(set(FILES.findall(CHANGES[title]))) <= 2


@pytest.mark.parametrize("title", CHANGES)
def test_a_change_fits_without_the_others(title: str, unchanged: Path) -> None:
    apply(title, unchanged, "--check")


@pytest.mark.slow
@pytest.mark.parametrize("title", CHANGES)
def test_a_change_is_seen_wherever_it_should_be(title: str, problems: Mapping[str, str]) -> None:
    problem = problems[f"test_{title.lower().replace(' ', '_')}"]
    assert not problem, problem
