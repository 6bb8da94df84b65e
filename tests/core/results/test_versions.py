"""What another version of hashbench wrote: rows that lack a column are kept, rows with one too many are refused, and
nothing is ever deleted. The other version is a copy of hashbench with the CSV column of docs/extending_checks.md."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from sweep_helpers import snapshot

from hashbench import __version__
from tests.test_extending import apply, copy_into

NEWER = "9.8.7"
BOTH = f"hashbench {NEWER} wrote it (schema 1), this is hashbench {__version__} (schema 1)"
ZOO = """
import os, torch, hashbench

@torch.library.custom_op("versions::noise", mutates_args=())
def noise(x: torch.Tensor) -> torch.Tensor:
    return x + int.from_bytes(os.urandom(4), "little") * 1e-9

@hashbench.model
def differs():
    class Noise(torch.nn.Module):
        def forward(self, x):
            return noise(x)
    return Noise(), (torch.ones(4),)

@hashbench.model
def passes():
    return torch.nn.Identity(), (torch.ones(4),)
"""
EVIDENCE = """
import sys
from pathlib import Path
from hashbench.core.results.load import load_sweep
print(*(len(row.evidence.results) for row in load_sweep(Path(sys.argv[1])).rows))
"""
FLAGS = ("--inference", "--threads", "1", "--replays", "4", "--diagnose-budget", "20")


@dataclasses.dataclass(frozen=True)
class Versions:
    """A folder with ``ZOO``, and by name the folder of each version of hashbench."""

    folder: Path
    code: dict[str, Path]

    def python(self, version: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run Python with this version of hashbench."""
        environment = {**os.environ, "PYTHONPATH": str(self.code[version])}
        command = [sys.executable, "-P", *arguments]
        return subprocess.run(
            command, cwd=self.folder, env=environment, capture_output=True, text=True, check=False, timeout=300
        )

    def run(self, version: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run ``hashbench`` of this version."""
        return self.python(version, "-m", "hashbench", *arguments)

    def sweep(self, version: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Sweep the zoo, or resume."""
        return self.run(version, "sweep", "--suite", "zoo.py", "--models", "all", *FLAGS, "--output", "out", *arguments)

    def rows(self) -> dict[str, bytes]:
        """All that lies among the row files."""
        return {path.name: path.read_bytes() for path in (self.folder / "out" / "rows").iterdir()}

    def evidence(self, version: str) -> str:
        """How many results of experiments each row of a report has."""
        return self.python(version, "-c", EVIDENCE, "out").stdout


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    newer = copy_into(tmp_path_factory.mktemp("newer"))
    apply("A CSV column", newer)
    module = newer / "hashbench" / "__init__.py"
    module.write_text(module.read_text().replace(f'"{__version__}"', f'"{NEWER}"'))
    return {"here": copy_into(tmp_path_factory.mktemp("here")), "newer": newer}


@pytest.fixture
def versions(tmp_path: Path, code: dict[str, Path]) -> Versions:
    (tmp_path / "zoo.py").write_text(ZOO)
    return Versions(tmp_path, code)


def alternating(first: str, second: str) -> list[str]:
    """The versions that resume one after the other; ``VERSION_CHANGES`` says how many do."""
    changes = int(os.environ.get("VERSION_CHANGES", "2"))
    return ([first, second] * changes)[:changes]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_no_row_is_lost_or_deleted_where_versions_change(versions: Versions) -> None:
    assert versions.sweep("here").returncode == 0
    rows, seen = versions.rows(), versions.evidence("here")
    assert max(map(int, seen.split())) > 3
    for version in alternating("newer", "here"):
        done = versions.sweep(version, "--resume")
        assert done.returncode == 0, done.stderr
        assert "2 of 2 rows are there already\n" in done.stderr
        assert versions.rows() == rows
    assert versions.evidence("newer") == seen

    (passing,) = (versions.folder / "out" / "rows").glob("*.passes.json")
    passing.unlink()
    assert versions.sweep("newer", "--resume").returncode == 0
    assert json.loads(passing.read_text())["processor_seconds"] > 0
    rows = versions.rows()
    for version in alternating("here", "newer"):
        before = snapshot(versions.folder / "out")
        done = versions.sweep(version, "--resume")
        assert versions.rows() == rows
        assert (done.returncode, BOTH in done.stderr) == ((2, True) if version == "here" else (0, False)), done.stderr
        if version == "here":
            assert done.stderr.count("\n") == 1
            assert "processor_seconds" in done.stderr
            assert "Use the hashbench that wrote it, or choose another --output." in done.stderr
            assert snapshot(versions.folder / "out") == before


@pytest.mark.slow
def test_what_reads_a_newer_sweep_names_both_versions_and_advises_nothing_that_loses_rows(versions: Versions) -> None:
    assert versions.sweep("newer", "--diagnose-budget", "0").returncode == 0
    before = snapshot(versions.folder / "out")
    for command in (("merge", "whole", "out"), ("compare", "out", "out"), ("report", "out")):
        refused = versions.run("here", *command)
        assert (refused.returncode, refused.stderr.count("\n")) == (2, 1), refused.stderr
        assert BOTH in refused.stderr
        assert "--resume" not in refused.stderr
        assert versions.run("newer", *command).returncode in (0, 1)
    assert snapshot(versions.folder / "out") == before
