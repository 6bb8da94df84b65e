"""The corpus ``models/programs/programs.csv``: ordinary programs with one planted fault, and without it (``--clean``).

``python -m tests.extensions.watch.program.test_programs [PROGRAM …]`` prints what each verdict says, and its time.
"""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

MODELS = Path(__file__).parents[4] / "models"
FOLDER = MODELS / "programs"
LEAST_NAMED = 19


@dataclass(frozen=True, slots=True)
class Planted:
    """A row of the corpus.

    Attributes:
        program: file, or the package that is run with ``-m``.
        arguments: of it.
        input: what it reads.
        fault: what differs between two runs, in words.
        origin: of the difference, as in ``docs/csv.md``; empty where no kernel is named.
        kernel: names of kernels, any of which is right, with ``|`` between them; empty: none is.
        place: in the headline, where no kernel is named.
        line: code on the line to be named.
        phase, step: of the kernel; empty: not checked.
        note: what is special about the program.
    """

    program: str
    arguments: str
    input: str
    fault: str
    origin: str
    kernel: str
    place: str
    line: str
    phase: str
    step: str
    note: str

    @property
    def files(self) -> list[Path]:
        """The source of the program."""
        package = FOLDER / self.program
        return sorted(package.glob("*.py")) if package.is_dir() else [package.with_suffix(".py")]

    def lines(self) -> list[str]:
        """Return where its line stands, as ``file:number``."""
        return [
            f"{path.name}:{number}"
            for path in self.files
            for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
            if self.line and text.strip() == self.line
        ]

    def command(self, *, clean: bool) -> list[str]:
        """Return the program as ``python`` gets it."""
        program = [str(self.files[0])] if len(self.files) == 1 else ["-m", self.program]
        return [*program, *self.arguments.split(), *(["--clean"] if clean else [])]

    def missing(self, found: dict[str, Any]) -> str:
        """Return what a verdict on the fault lacks; empty: nothing."""
        if not self.kernel:
            return "" if self.place in found["headline"] else f"{self.place} in the headline"
        divergence = found["divergence"] or {}
        (line,) = self.lines()
        wanted = {
            "origin": divergence.get("origin") == self.origin,
            "kernel": divergence.get("kernel") in self.kernel.split("|"),
            "line": str(divergence.get("source")).startswith(f"{line} "),
            "phase": self.phase in ("", divergence.get("phase")),
            "step": self.step in ("", str(divergence.get("iteration"))),
        }
        return ", ".join(name for name, right in wanted.items() if not right)


def corpus() -> list[Planted]:
    with (FOLDER / "programs.csv").open(encoding="utf-8", newline="") as file:
        return [Planted(**row) for row in csv.DictReader(file)]


PROGRAMS = {planted.program: planted for planted in corpus()}


def verdict(planted: Planted, folder: Path, *, clean: bool) -> tuple[int, dict[str, Any]]:
    """Run ``hashbench run`` as a user does, in an empty folder."""
    command = [sys.executable, "-m", "hashbench", "run", "--json", *planted.command(clean=clean)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(FOLDER), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        command, cwd=folder, env=environment, input=planted.input, capture_output=True, text=True, check=False
    )
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, json.loads(done.stdout)


def scored(names: Iterator[str]) -> Iterator[tuple[str, str, str, float]]:
    """Yield of each program and each twin its name, what is wrong with the verdict, its headline, and seconds."""
    for name in names:
        for clean in (False, True):
            began = monotonic()
            with tempfile.TemporaryDirectory() as folder:
                code, found = verdict(PROGRAMS[name], Path(folder), clean=clean)
            blamed = "blamed" if code or found["differs"] else ""
            wrong = blamed if clean else PROGRAMS[name].missing(found)
            yield f"{name}{' --clean' * clean}", wrong, found["headline"], monotonic() - began


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_is_an_ordinary_one_with_one_planted_line(name: str) -> None:
    planted = PROGRAMS[name]
    text = "\n".join(path.read_text(encoding="utf-8") for path in planted.files)
    assert "hashbench" not in text
    assert '"--clean"' in text
    assert bool(planted.kernel) == bool(planted.line) != bool(planted.place)
    assert len(planted.lines()) == bool(planted.line)


def test_there_are_twenty() -> None:
    assert len(PROGRAMS) == 20
    assert {path.stem for path in FOLDER.glob("[!_]*") if path.suffix != ".csv"} == PROGRAMS.keys()


def test_another_kernel_or_line_is_none_that_is_named() -> None:
    planted = PROGRAMS["set_reduction"]
    (line,) = planted.lines()
    right = {
        "origin": "sequence",
        "kernel": "aten.add.Tensor",
        "source": f"{line} <module>",
        "phase": "forward",
        "iteration": None,
    }
    assert planted.missing({"divergence": right}) == ""
    assert planted.missing({"divergence": {**right, "kernel": "aten.mul.Tensor"}}) == "kernel"
    assert planted.missing({"divergence": {**right, "source": f"{line}0 <module>"}}) == "line"
    assert planted.missing({"divergence": None}) == "origin, kernel, line, phase"
    assert (
        PROGRAMS["numpy_only"].missing({"headline": "The runs are equal"}) == "printed output, line 2 in the headline"
    )


@pytest.mark.slow
def test_a_sample_is_named_and_its_twin_is_not_blamed() -> None:
    assert [wrong for _, wrong, *_ in scored(iter(["set_reduction"]))] == ["", ""]


@pytest.mark.exhaustive
def test_faults_are_named_and_no_twin_is_blamed() -> None:
    found = list(scored(iter(PROGRAMS)))
    blamed = [each for each in found if each[0].endswith("--clean") and each[1]]
    missed = [each for each in found if not each[0].endswith("--clean") and each[1]]
    assert blamed == []
    assert len(PROGRAMS) - len(missed) >= LEAST_NAMED, missed


if __name__ == "__main__":
    for shown, wrong, headline, seconds in scored(iter(sys.argv[1:] or PROGRAMS)):
        print(re.sub(" +", " ", f"{shown}: {seconds:.0f} s, {wrong or 'right'}: {headline}"), flush=True)
