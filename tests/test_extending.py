"""docs/extending.md: each change on that page is applied to a copy of hashbench, and seen where it should show."""

from __future__ import annotations

import csv
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
NIGHTS = ROOT / "tests" / "golden" / "inputs" / "nights"
CHANGES = dict(re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
FILES = re.compile(r"^\+\+\+ (hashbench/\S+)", re.MULTILINE)

ZOO = """
import os, torch, hashbench

@torch.library.custom_op("stranger::noise", mutates_args=())
def noise(x: torch.Tensor) -> torch.Tensor:
    return x + int.from_bytes(os.urandom(4), "little") * 1e-9

@hashbench.model
def differs():
    class Noise(torch.nn.Module):
        def forward(self, x):
            return noise(x)
    return Noise(), (torch.ones(4),)

@hashbench.model
def not_finite():
    return torch.nn.Identity(), (torch.tensor([1.0, float("nan")]),)
"""


class Changed:
    """A copy of hashbench with one change of the page, and what can be asked of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def python(self, code: str, *arguments: str, exits: int = 0) -> str:
        """What a script prints that imports the copy."""
        return self._run([sys.executable, "-c", code, *arguments], exits)

    def hashbench(self, *arguments: str, exits: int = 0) -> str:
        """What a command of the copy prints."""
        return self._run([sys.executable, "-m", "hashbench", *arguments], exits)

    def sweep(self, *models: str, flags: tuple[str, ...] = ()) -> list[dict[str, str]]:
        """The lines of ``accuracy.csv`` of models of ``ZOO``; the results lie in ``out``."""
        (self.folder / "zoo.py").write_text(ZOO, encoding="utf-8")
        chosen = ("--suite", "zoo.py", "--inference", "--only", *models)
        self.hashbench("sweep", *chosen, "--threads", "1", "--output", "out", *flags)
        with (self.folder / "out" / "accuracy.csv").open(newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))

    def _run(self, command: list[str], exits: int) -> str:
        environment = {"PYTHONPATH": str(self.folder), "PATH": "/usr/bin:/bin", "HOME": str(self.folder)}
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=self.folder, env=environment, timeout=300
        )
        assert done.returncode == exits, done.stdout + done.stderr
        return done.stdout


@pytest.fixture
def changed(tmp_path: Path) -> Callable[[str], Changed]:
    """Gives a copy of hashbench with the diff of that section."""

    def change(title: str) -> Changed:
        (diff,) = re.findall(r"^```diff\n(.*?)^```", CHANGES[title], re.MULTILINE | re.DOTALL)
        for name in ("hashbench", "models"):
            shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
        applied = subprocess.run(
            ["git", "apply", "-p0", "-"], input=diff, text=True, capture_output=True, check=False, cwd=tmp_path
        )
        assert applied.returncode == 0, f"the diff of {title!r} does not fit any more: {applied.stderr}"
        return Changed(tmp_path)

    return change


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


@pytest.mark.slow
def test_a_column(changed: Callable[[str], Changed]) -> None:
    new = changed("A CSV column")
    (row,) = new.sweep("not_finite")
    (document,) = (new.folder / "out" / "rows").glob("*.json")
    assert float(row["processor_seconds"]) > 0
    assert json.loads(document.read_text(encoding="utf-8"))["processor_seconds"] == float(row["processor_seconds"])
    assert "processor_seconds" in new.hashbench("compare", "out", "out", "--format", "json")


def night_with(folder: Path, **words: str) -> None:
    """A copy of a night of the golden copies in which each column has that word in all rows that differ."""
    shutil.copytree(NIGHTS / "2026-11-22" / "specimens_training", folder)
    path = folder / "accuracy.csv"
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows({**row, **words} if row["cause"] else row for row in rows)


def reports(new: Changed) -> dict[str, str]:
    """Every form of the report of the folder ``night``."""
    forms = {"html": "r.html", "markdown": "r.md", "junit": "r.xml"}
    new.hashbench("report", "night", *(word for form, name in forms.items() for word in (f"--{form}", name)))
    texts = {form: (new.folder / name).read_text(encoding="utf-8") for form, name in forms.items()}
    return {**texts, "annotations": new.hashbench("report", "night", "--annotations")}


DECIDED = """
from hashbench.causes import decide
from hashbench.records import CallFacts, Evidence, ExperimentResult
from hashbench.integrations.pytest.message import five_lines
from hashbench.records import Row
from pathlib import Path
facts = CallFacts("aten.topk.default", tied_places=True)
results = (ExperimentResult("repeat", "call", trials=20, differing=20, distinct=5),)
said = decide(Evidence(origin="kernel", call=facts, arms=results))
print(said.cause, said.confidence, said.advice, sep="|")
row = Row("cpu", "a", 1, "eager_two_runs_differ", cause=said.cause, confidence=said.confidence, advice=said.advice)
print(five_lines(row, folder=Path("out")))
"""


@pytest.mark.slow
def test_a_cause(changed: Callable[[str], Changed]) -> None:
    new = changed("A cause")
    said = new.python(DECIDED)
    assert said.startswith("tie_breaking|likely|Sort by a second key")
    assert "cause: tie_breaking, likely" in said
    night_with(new.folder / "night", cause="tie_breaking")
    texts = reports(new)
    assert {form for form, text in texts.items() if "tie_breaking" in text or "tie breaking" in text} == set(texts)
    assert "which of them is chosen is left to chance" in texts["html"]


@pytest.mark.slow
def test_an_experiment(changed: Callable[[str], Changed]) -> None:
    new = changed("An experiment")
    (row,) = new.sweep("differs", flags=("--replays", "4", "--diagnose-budget", "20"))
    assert "call/flush_denormal 4/4" in row["evidence"]
    report = (new.folder / "out" / row["repro"] / "REPORT.md").read_text(encoding="utf-8")
    assert "with denormal numbers flushed to zero" in report
    shutil.copytree(new.folder / "out", new.folder / "night")
    assert "with denormal numbers flushed to zero" in reports(new)["html"]
    replayed = new.hashbench("replay", f"out/{row['repro']}", "--replays", "4", "--import", "zoo.py", exits=1)
    assert "with denormal numbers flushed to zero" in replayed


@pytest.mark.slow
def test_a_status(changed: Callable[[str], Changed]) -> None:
    new = changed("A status")
    (row,) = new.sweep("not_finite")
    assert row["accuracy"] == "results_not_finite"
    shutil.copytree(new.folder / "out", new.folder / "night")
    texts = reports(new)
    assert "results_not_finite" in texts["markdown"]
    assert "results_not_finite" in texts["junit"]
    assert "the results hold a NaN or an infinity" in texts["html"]
    assert "results_not_finite" in texts["annotations"]


@pytest.mark.slow
def test_a_suite(changed: Callable[[str], Changed]) -> None:
    new = changed("A suite")
    assert "wide" in new.hashbench("list", "--suite", "perceptrons")
    new.hashbench("sweep", "--suite", "perceptrons", "--training", "--models", "all", "--output", "out")
    with (new.folder / "out" / "accuracy.csv").open(newline="", encoding="utf-8") as file:
        assert {(row["suite"], row["name"], row["accuracy"]) for row in csv.DictReader(file)} == {
            ("perceptrons", "narrow", "pass"),
            ("perceptrons", "wide", "pass"),
        }
    assert "perceptrons" in new.hashbench("list")


SAME_DIGEST = """
import torch
from hashbench import HashDebugTrace, find_divergence
from hashbench.trace.digest import digest

def nan(bits):
    return torch.tensor([bits], dtype=torch.int16).view(torch.bfloat16)

def run(bits):
    with HashDebugTrace() as trace:
        nan(bits).clone()
    return trace.finish().records[-1].outputs[0].value

one, other, number = 0x7FC0, 0x7FC1, 0x3F80
print(digest(nan(one)) == digest(nan(other)), run(one) == run(other), digest(nan(one)) == digest(nan(number)))
"""


@pytest.mark.slow
def test_a_digest_for_a_dtype(changed: Callable[[str], Changed]) -> None:
    assert changed("A digest for a dtype").python(SAME_DIGEST) == "True True False\n"


DEVICES = """
import torch
from hashbench.devices.kinds import chosen
print(chosen(torch.device("mps"))[0].name, chosen(torch.device("mps"))[1].__module__)
"""


@pytest.mark.slow
def test_a_kind_of_device(changed: Callable[[str], Changed]) -> None:
    assert changed("A kind of device").python(DEVICES) == "mps hashbench.devices.mps\n"


@pytest.mark.slow
def test_a_report_form(changed: Callable[[str], Changed]) -> None:
    new = changed("A report form")
    shutil.copytree(NIGHTS, new.folder / "nights")
    new.hashbench("report", "nights", "--summary", "s.txt")
    lines = (new.folder / "s.txt").read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith("2026-11-22")
    assert "--summary" in new.hashbench("report", "--help")


@pytest.mark.slow
def test_an_executor(changed: Callable[[str], Changed]) -> None:
    new = changed("An executor")
    (row,) = new.sweep("not_finite", flags=("--executor", "thread"))
    assert row["accuracy"] == "pass"
    assert "thread" in new.hashbench("sweep", "--help")
