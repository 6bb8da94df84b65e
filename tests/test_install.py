"""The wheel: an installed hashbench has its zoo, and finds it outside the checkout."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

import hashbench
from hashbench.core.suites.registry import SUITES, catalog

pytest.importorskip("hatchling", reason="building the wheel without network needs hatchling, see the extra test")

CHECKOUT = Path(hashbench.__file__).parents[1]
if not (CHECKOUT / "pyproject.toml").exists():
    pytest.skip("hashbench is installed, there is no checkout to build", allow_module_level=True)

LOOK = """
import hashbench, json
from hashbench.core.suites import csv_file
from hashbench.core.suites.registry import SUITES, catalog
print(json.dumps({
    "package": hashbench.__file__,
    "data": str(csv_file.data_folder()),
    "models": {suite: len(catalog(suite)) for suite in SUITES},
}))
"""

BUILD = """
import inspect, json
from hashbench.core.suites.registry import catalog, load
spec = next(spec for spec in catalog("specimens") if not spec.skip_inference)
print(json.dumps({"source": inspect.getfile(type(load(spec, mode="inference").module))}))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    options = "--no-deps --no-build-isolation --disable-pip-version-check --quiet"
    command = [sys.executable, "-m", "pip", "wheel", *options.split(), "--wheel-dir", folder, CHECKOUT]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (made,) = folder.glob("hashbench-*.whl")
    return made


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def names(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [
        "hashbench/py.typed",
        "hashbench/extensions/fingerprint/__init__.py",
        "hashbench/core/trace/mode_dependent_ops.csv",
        "hashbench/core/native/recorder.cpp",
        "hashbench/models/torchvision.csv",
        "hashbench/models/specimens.csv",
        "hashbench/extensions/report/templates/night.md.jinja",
        "hashbench/extensions/report/templates/report.html",
        "hashbench/core/finding/templates/finding.html",
        "hashbench/core/diagnose/repro/templates/REPORT.md.jinja",
        "hashbench/core/diagnose/repro/templates/experiments/repeat.py.jinja",
        "hashbench/models/specimens/races.py",
        "hashbench/docs/zoo.md",
    ],
)
def test_wheel_holds(path: str, wheel: Path) -> None:
    assert path in names(wheel)


def test_wheel_holds_every_data_file_and_source_of_the_checkout(wheel: Path) -> None:
    package = {path.relative_to(CHECKOUT) for path in (CHECKOUT / "hashbench").rglob("*")}
    zoo = {Path("hashbench") / path.relative_to(CHECKOUT) for path in (CHECKOUT / "models").rglob("*")}
    wanted = {path.as_posix() for path in package | zoo if path.suffix and "__pycache__" not in path.parts}
    assert wanted - set(names(wheel)) == set()


def test_wheel_holds_no_leftovers(wheel: Path) -> None:
    assert [name for name in names(wheel) if "__pycache__" in name or name.endswith((".pyc", ".log"))] == []
    assert {name.split("/")[0] for name in names(wheel) if ".dist-info" not in name} == {"hashbench"}


def test_wheel_has_the_command(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (entry,) = [name for name in archive.namelist() if name.endswith("entry_points.txt")]
        assert "hashbench = hashbench.cli:main" in archive.read(entry).decode()


def test_the_wheels_description_links_absolutely(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (entry,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata, _, description = archive.read(entry).decode().partition("\n\n")
    links = re.findall(r"\]\(([^)]+)\)", description)
    assert {"Project-URL: Documentation", "Classifier: Framework", "Author: the"} <= {
        " ".join(line.split()[:2]).rstrip(",") for line in metadata.splitlines()
    }
    assert len(links) > 20
    assert [link for link in links if not link.startswith(("https://", "#"))] == []


@pytest.mark.slow
def test_installed_hashbench_lists_its_own_zoo(installed: Path, tmp_path: Path) -> None:
    found = said_by(LOOK, installed=installed, cwd=tmp_path)
    assert Path(found["package"]).is_relative_to(installed)
    assert Path(found["data"]) == installed / "hashbench" / "models"
    assert found["models"] == {suite: len(catalog(suite)) for suite in SUITES}
    assert {"torchvision", "timm", "huggingface", "huggingface_tiny", "specimens"} <= set(found["models"])


@pytest.mark.slow
def test_installed_hashbench_builds_its_own_specimens(installed: Path, tmp_path: Path) -> None:
    found = said_by(BUILD, installed=installed, cwd=tmp_path)
    assert Path(found["source"]).is_relative_to(installed / "hashbench" / "models" / "specimens")


def test_installed_hashbench_shows_its_documentation(installed: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    command = [sys.executable, "-m", "hashbench", "docs"]
    listed = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert sorted(re.findall(r"^  +(\w+)  ", listed.stdout, re.MULTILINE)) == sorted(
        {page.stem for page in (CHECKOUT / "docs").glob("*.md")} - {"index"}
    )
    assert str(installed / "hashbench" / "docs") in listed.stdout


def said_by(code: str, *, installed: Path, cwd: Path) -> dict[str, Any]:
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found
