"""Apply the changes of ``docs/extending*.md`` to a copy of hashbench, and check every output that should show them."""

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

from hashbench.core.trace.tracer import native_unavailable

ROOT = Path(__file__).parent.parent
GUIDE, *PAGES = (
    ROOT / "docs" / f"{name}.md"
    for name in (
        *("extending", "extending_diagnosis", "extending_checks"),
        *("extending_models", "extending_output", "extending_extension"),
    )
)
SECTION = re.compile(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
CHANGES = {title: text for page in PAGES for title, text in SECTION.findall(page.read_text(encoding="utf-8"))}
FILES = re.compile(r"^\+\+\+ (\S+)", re.MULTILINE)
CHECKS = Path(__file__).with_name("extending_checks.py")


def copy_into(folder: Path) -> Path:
    """Copy the package with what Python has compiled of it, which holds for files of the same time."""
    for name in ("hashbench", "models"):
        shutil.copytree(ROOT / name, folder / name)
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
    for title in CHANGES:  # independent of each other
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
        timeout=900,  # the changed recorder is compiled once
    )
    assert (folder / "checks.xml").exists(), done.stdout + done.stderr
    cases = ElementTree.parse(folder / "checks.xml").iter("testcase")
    return {case.attrib["name"]: "\n".join(filter(None, case.itertext())) for case in cases}


def test_there_are_fourteen_changes() -> None:
    assert list(CHANGES) == [
        "A cause",
        "An experiment",
        "A status",
        "An invariance",
        "A perturbation",
        "A CSV column",
        "A suite",
        "A digest for a dtype",
        "A kind of device",
        "A usual op of the native tracer",
        "A report form",
        "A file format",
        "An executor",
        "An extension",
    ]


def test_the_guide_links_each_change_with_its_files() -> None:
    rows = re.findall(r"^\|[^|]+\| \[(.+)\]\((\S+)\) \| (.+) \|$", GUIDE.read_text(encoding="utf-8"), re.MULTILINE)
    links = [
        f"{page.name}#{title.lower().replace(' ', '-')}"
        for page in PAGES
        for title, _ in SECTION.findall(page.read_text(encoding="utf-8"))
    ]
    assert [(title, link) for title, link, _ in rows] == list(zip(CHANGES, links, strict=True))
    assert [re.findall(r"`(\S+)`", files) for *_, files in rows] == list(map(FILES.findall, CHANGES.values()))


@pytest.mark.parametrize("page", [GUIDE, *PAGES], ids=lambda page: page.stem)
def test_a_page_is_short(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    prose = re.sub(r"^```diff\n.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    assert text.count("\n") <= 160
    assert max(len(line) for line in prose.splitlines() if not line.startswith("|")) <= 160


@pytest.mark.parametrize("title", CHANGES)
def test_a_change_is_in_two_files_of_the_product_at_most(title: str) -> None:
    assert 1 <= sum(file.startswith("hashbench/") for file in FILES.findall(CHANGES[title])) <= 2


@pytest.mark.parametrize("title", CHANGES)
def test_a_change_fits_without_the_others(title: str, unchanged: Path) -> None:
    apply(title, unchanged, "--check")


@pytest.mark.slow
@pytest.mark.parametrize("title", CHANGES)
def test_a_change_is_seen_wherever_it_should_be(title: str, problems: Mapping[str, str]) -> None:
    if "native tracer" in title and native_unavailable():
        pytest.skip("the native tracer cannot be built here")
    problem = problems[f"test_{title.lower().replace(' ', '_')}"]
    assert not problem, problem
