"""docs/extending.md: each change on that page is applied to a copy of hashbench, and seen where it should show."""

from __future__ import annotations

import csv
import json
import re
import shutil
import subprocess
import sys
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
    """A copy of hashbench with the changes of the page, and what can be asked of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def python(self, code: str, *arguments: str) -> str:
        """What a script prints that imports the copy."""
        return self._run([sys.executable, "-c", code, *arguments], exits=0)

    def hashbench(self, *arguments: str, exits: int = 0) -> str:
        """What a command of the copy prints."""
        return self._run([sys.executable, "-m", "hashbench", *arguments], exits=exits)

    def sweep(self, output: str, *arguments: str) -> dict[str, dict[str, str]]:
        """The lines of ``accuracy.csv`` by the names of models; the results lie in ``output``."""
        self.hashbench("sweep", "--inference", "--threads", "1", "--output", output, *arguments)
        with (self.folder / output / "accuracy.csv").open(newline="", encoding="utf-8") as file:
            return {row["name"]: row for row in csv.DictReader(file)}

    def reports(self, night: str) -> dict[str, str]:
        """Every form of the report of a folder."""
        forms = {"html": f"{night}.html", "markdown": f"{night}.md", "junit": f"{night}.xml"}
        self.hashbench("report", night, *(word for form, name in forms.items() for word in (f"--{form}", name)))
        texts = {form: (self.folder / name).read_text(encoding="utf-8") for form, name in forms.items()}
        return {**texts, "annotations": self.hashbench("report", night, "--annotations")}

    def _run(self, command: list[str], *, exits: int) -> str:
        environment = {"PYTHONPATH": str(self.folder), "PATH": "/usr/bin:/bin", "HOME": str(self.folder)}
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=self.folder, env=environment, timeout=300
        )
        assert done.returncode == exits, done.stdout + done.stderr
        return done.stdout


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
def changed(tmp_path_factory: pytest.TempPathFactory) -> Changed:
    """A copy with all changes, which have nothing to do with each other."""
    folder = copy_into(tmp_path_factory.mktemp("changed"))
    for title in CHANGES:
        apply(title, folder)
    (folder / "zoo.py").write_text(ZOO, encoding="utf-8")
    return Changed(folder)


@pytest.fixture(scope="module")
def rows(changed: Changed) -> dict[str, dict[str, str]]:
    """The rows of ``ZOO`` and of the new suite; the results lie in ``out``."""
    flags = ("--replays", "4", "--diagnose-budget", "20")
    return changed.sweep("out", "--suite", "zoo.py", "perceptrons", "--models", "all", *flags)


@pytest.fixture(scope="module")
def reports(changed: Changed, rows: dict[str, dict[str, str]]) -> dict[str, str]:
    """Every form of the report of that sweep."""
    assert rows
    shutil.copytree(changed.folder / "out", changed.folder / "night")
    return changed.reports("night")


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
def test_a_column(changed: Changed, rows: dict[str, dict[str, str]]) -> None:
    row = rows["not_finite"]
    (document,) = (changed.folder / "out" / "rows").glob("*.not_finite.json")
    assert float(row["processor_seconds"]) > 0
    assert json.loads(document.read_text(encoding="utf-8"))["processor_seconds"] == float(row["processor_seconds"])
    assert "processor_seconds" in changed.hashbench("compare", "out", "out", "--format", "json")


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


SCRIPTS = {
    "a cause": """
from hashbench.causes import decide
from hashbench.records import CallFacts, Evidence, ExperimentResult
from hashbench.text import five_lines
from hashbench.records import Row
from pathlib import Path
facts = CallFacts("aten.topk.default", tied_places=True)
results = (ExperimentResult("repeat", "call", trials=20, differing=20, distinct=5),)
said = decide(Evidence(origin="kernel", call=facts, arms=results))
print(said.cause, said.confidence, said.advice, sep="|")
row = Row("cpu", "a", 1, "eager_two_runs_differ", cause=said.cause, confidence=said.confidence, advice=said.advice)
print(five_lines(row, folder=Path("out")))
""",
    "a digest": """
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
""",
    "a device": """
import torch
from hashbench.devices.ledger import chosen
print(chosen(torch.device("mps"))[0].name, chosen(torch.device("mps"))[1].__module__)
""",
}
EACH = """
import contextlib, io, json, sys, traceback
said = {}
for name, script in json.loads(sys.argv[1]).items():
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            exec(script, {})
        except Exception:
            traceback.print_exc(file=printed)
    said[name] = printed.getvalue()
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def said(changed: Changed) -> dict[str, str]:
    """What each of ``SCRIPTS`` prints, in one process, which imports torch once."""
    printed: dict[str, str] = json.loads(changed.python(EACH, json.dumps(SCRIPTS)))
    return printed


@pytest.mark.slow
def test_a_cause(changed: Changed, said: dict[str, str]) -> None:
    assert said["a cause"].startswith("tie_breaking|likely|Sort by a second key")
    assert "cause: tie_breaking, likely" in said["a cause"]
    night_with(changed.folder / "tied", cause="tie_breaking")
    texts = changed.reports("tied")
    assert {form for form, text in texts.items() if "tie_breaking" in text or "tie breaking" in text} == set(texts)
    assert "which of them is chosen is left to chance" in texts["html"]


@pytest.mark.slow
def test_an_experiment(changed: Changed, rows: dict[str, dict[str, str]], reports: dict[str, str]) -> None:
    row = rows["differs"]
    assert "call/flush_denormal 4/4" in row["evidence"]
    report = (changed.folder / "out" / row["repro"] / "REPORT.md").read_text(encoding="utf-8")
    assert "with denormal numbers flushed to zero" in report
    assert "with denormal numbers flushed to zero" in reports["html"]
    replayed = changed.hashbench("replay", f"out/{row['repro']}", "--replays", "4", "--import", "zoo.py", exits=1)
    assert "with denormal numbers flushed to zero" in replayed


@pytest.mark.slow
def test_a_status(rows: dict[str, dict[str, str]], reports: dict[str, str]) -> None:
    assert rows["not_finite"]["accuracy"] == "results_not_finite"
    assert "results_not_finite" in reports["markdown"]
    assert "results_not_finite" in reports["junit"]
    assert "the results hold a NaN or an infinity" in reports["html"]
    assert "results_not_finite" in reports["annotations"]


@pytest.mark.slow
def test_a_suite(changed: Changed, rows: dict[str, dict[str, str]]) -> None:
    assert "wide" in changed.hashbench("list", "--suite", "perceptrons")
    new = {(row["name"], row["accuracy"]) for row in rows.values() if row["suite"] == "perceptrons"}
    assert new == {("narrow", "pass"), ("wide", "pass")}
    assert "perceptrons" in changed.hashbench("list")


@pytest.mark.slow
def test_a_digest_for_a_dtype(said: dict[str, str]) -> None:
    assert said["a digest"] == "True True False\n"


@pytest.mark.slow
def test_a_kind_of_device(said: dict[str, str]) -> None:
    assert said["a device"] == "mps hashbench.devices.mps\n"


@pytest.mark.slow
def test_a_report_form(changed: Changed) -> None:
    shutil.copytree(NIGHTS, changed.folder / "nights")
    changed.hashbench("report", "nights", "--summary", "s.txt")
    lines = (changed.folder / "s.txt").read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith("2026-11-22")
    assert "--summary" in changed.hashbench("report", "--help")


@pytest.mark.slow
def test_an_executor(changed: Changed) -> None:
    rows = changed.sweep("threads", "--suite", "zoo.py", "--only", "not_finite", "--executor", "thread")
    assert rows["not_finite"]["accuracy"] == "results_not_finite"
    assert "thread" in changed.hashbench("sweep", "--help")
