"""``hashbench nightly``, ``report`` and ``expect``: what they say, write and end with. A night is a real process."""

from __future__ import annotations

import html
import json
import re
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import pytest
from command_helpers import ZOO, run
from core.report.rows import differing, row, write_night, write_rows
from sweep_helpers import snapshot

from hashbench import cli
from hashbench.core.results.rows import read_rows
from hashbench.extensions.report import nightly

pytestmark = pytest.mark.slow

NIGHT = ("nightly", "--output", "nights", "--suite", "zoo.py", "--modes", "inference")


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A folder with ``zoo.py`` and its first night, of two models, one of which differs."""
    folder = tmp_path_factory.mktemp("nightly")
    (folder / "zoo.py").write_text(ZOO)
    return folder, run(*NIGHT, "--label", "2026-11-19", "--annotations", "--", "--diagnose-budget", "0", cwd=folder)


def test_first_night_reports_what_differs(first):
    folder, done = first
    assert done.returncode == 0, done.stderr
    night = folder / "nights" / "2026-11-19"
    rows = read_rows(night / "zoo_inference" / "accuracy.csv")
    assert [(row.name, row.accuracy) for row in rows] == [("drifting", "eager_two_runs_differ"), ("steady", "pass")]
    assert {path.name for path in night.iterdir()} == {
        *("zoo_inference", "night.json", "report.html", "report.md", "junit.xml", ".lock")
    }
    assert done.stdout.startswith("# hashbench: 2026-11-19\n\n**Of 2 models, drifting differs**\n")
    assert "\nNext: hashbench sweep --inference --suite zoo.py --only drifting\n" in done.stdout
    assert (done.stdout.count("Passed means: two runs were equal."), "Passed means" in done.stderr) == (1, False)
    assert "where: zoo.py:17 forward" in done.stderr
    notice, warning = done.stdout.splitlines()[-2:]
    assert notice == "::notice title=hashbench 2026-11-19::Of 2 models, 1 differs and 1 passes"
    assert warning.startswith("::warning title=drifting (zoo%2C inference)%3A differs::eager_two_runs_differ")
    assert "2 models in inference" in done.stderr
    assert "began" in json.loads((night / "zoo_inference" / "sweep.json").read_text())


def test_night_completes_only_the_lost_row(first):
    folder, _ = first
    night = folder / "nights" / "2026-11-19" / "zoo_inference"
    before = read_rows(night / "accuracy.csv")
    (lost,) = (night / "rows").glob("*steady.json")
    lost.unlink()
    done = run(*NIGHT, "--label", "2026-11-19", "--", "--diagnose-budget", "0", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "1 of 2 rows are there already" in done.stderr
    after = read_rows(night / "accuracy.csv")
    assert (after[0], after[1].accuracy) == (before[0], "pass")


def test_second_process_leaves_a_running_night_alone(first):
    folder, _ = first
    night = folder / "nights" / "2026-11-19"
    before = snapshot(night)
    with nightly.claimed(night):
        done = run(*NIGHT, "--label", "2026-11-19", "--", "--diagnose-budget", "0", cwd=folder)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert "another process is sweeping the night nights/2026-11-19: nothing was run" in line
    assert snapshot(night) == before


EXPECTED_NOW = """\
expected/zoo_inference_cpu.csv: 2 rows: 2 new
  drifting: new -> eager_two_runs_differ (outside: aten.add.Tensor in Drifts) is expected now
"""


def test_what_a_night_found_is_expected_from_then_on(main, first):
    folder, _ = first
    night = folder / "nights" / "2026-11-19"
    done = main("expect", night, "--output", "expected", "--link", "https://example.org/1", cwd=folder)
    assert (done.returncode, done.stdout) == (0, EXPECTED_NOW), done.stderr
    report = main("report", night, "--expected", "expected", "--strict", cwd=folder)
    assert report.returncode == 0, report.stderr
    assert "as expected ([link](https://example.org/1))" in report.stdout


WRONG = {
    "a suite that is none": (("--suite", "torchvisoin"), "torchvision"),
    "a model that is none": (("--only", "stedy"), "steady"),
    "a label that is none": (("--label", "../x"), "not a valid label"),
    "expectations that are not there": (("--expected", "nowhere"), "nowhere does not exist"),
    "a flag that sweeps lack": (("--", "--rnus", "3"), "--rnus"),
    "a value that sweeps refuse": (("--", "--runs", "1"), "--runs"),
    "a device that is none": (("--", "-d", "nonsense"), "nonsense"),
    "another output for sweeps": (("--", "--output", "elsewhere"), "--output"),
    "a backend of the compiler that is none": (("--backend", "inductr"), "Did you mean inductor?"),
    "compiled models in a batch": (
        ("--backend", "inductor", "--modes", "batch-invariance"),
        "--modes batch-invariance",
    ),
    "compiled models under stress": (("--backend", "inductor", "--", "--stress"), "--stress"),
    "another suite for sweeps": (("--", "--suite", "timm"), "--suite"),
}


@pytest.mark.parametrize(("flags", "said"), WRONG.values(), ids=WRONG.keys())
def test_nothing_is_run_for(main, first, flags, said):
    folder, _ = first
    before = sorted((folder / "nights").iterdir())
    done = main(*NIGHT, *flags, cwd=folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert sorted((folder / "nights").iterdir()) == before


# ------------------------------------------------------------------------------------------------------ report


@pytest.fixture(scope="module")
def worse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two nights, ``nights``, the second of which got worse; and folders that are none."""
    folder = tmp_path_factory.mktemp("worse")
    write_night(folder / "nights", "2026-11-19", row("a"), row("b"))
    write_night(folder / "nights", "2026-11-20", row("a"), differing("b"))
    write_night(folder, "schema", row("a"), environment={"schema": 99, "key": "e"})
    (folder / "empty").mkdir()
    return folder


@pytest.mark.parametrize(("flags", "code"), [((), 0), (("--strict",), 1)], ids=["without --strict", "with --strict"])
def test_report_prints_markdown(main, worse, flags, code):
    done = main("report", "nights", *flags, cwd=worse)
    assert done.returncode == code, done.stderr
    assert done.stdout.startswith("# hashbench: 2026-11-20\n\n**1 model got worse: b (not known: ")
    assert "## Everything that does not pass" in done.stdout


def test_csvs_without_a_common_model_are_one_night(main, tmp_path):
    (tmp_path / "big").mkdir()
    write_rows(tmp_path / "big" / "timm.csv", [row("a", suite="timm"), differing("b", suite="timm")])
    write_rows(tmp_path / "big" / "torchvision.csv", [row("a"), row("c")])
    done = main("report", "big/timm.csv", "big/torchvision.csv", "--strict", cwd=tmp_path)
    assert (done.returncode, "missing" in done.stdout) == (1, False), done.stderr
    assert done.stdout.startswith("# hashbench: big\n\n**Of 4 models, b differs**\n\n1 night of history")
    write_rows(tmp_path / "big" / "later.csv", [row("a"), differing("c")])
    done = main("report", "big/torchvision.csv", "big/later.csv", cwd=tmp_path)
    assert "2 nights of history" in done.stdout


SENTENCE = "1 model got worse: b (not known: nothing that is recorded changed, aten.index_put_.default)"


def test_report_writes_files_and_prints_a_line(main, worse):
    done = main("report", "nights", "--html", "o/p.html", "--markdown", "o/s.md", "--junit", "o/j.xml", cwd=worse)
    assert (done.returncode, done.stdout) == (0, f"2026-11-20: {SENTENCE}\n"), done.stderr
    assert {path.name for path in (worse / "o").iterdir()} == {"p.html", "s.md", "j.xml"}
    assert ElementTree.parse(worse / "o" / "j.xml").getroot().get("failures") == "1"


def test_a_terminal_gets_no_markdown_and_no_line_beyond_its_width(worse, monkeypatch, capfd):
    monkeypatch.chdir(worse)
    monkeypatch.setenv("COLUMNS", "70")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert cli.main(["report", "nights"]) == 0
    said = capfd.readouterr().out
    *lines, command = said.splitlines()
    assert " ".join(said.split()).startswith(SENTENCE)
    assert [line for line in lines if len(line) > 70 or line.startswith(("#", "|", "**"))] == []
    assert command.startswith("Next: hashbench sweep --suite torchvision --training --runs 60 --only b ")


def test_the_document_of_a_report_has_the_sentence_and_the_classes(main, worse):
    done = main("report", "nights", "--json", "--strict", cwd=worse)
    document = json.loads(done.stdout)
    assert (done.returncode, document["headline"], document["worse"]) == (1, SENTENCE, True)
    ((clause, model),) = [(clause, model) for clause in document["classes"] for model in clause["models"]]
    assert (clause["class"], model["name"], model["kernel"]) == ("not known", "b", "aten.index_put_.default")
    assert document["next"] == [clause["next"]]
    assert [(one["name"], one["verdict"]) for one in document["models"]] == [
        ("b", "new difference"),
        ("a", "as last night"),
    ]


@pytest.mark.parametrize(
    ("folder", "said"),
    [("nowhere", "nowhere does not exist"), ("empty", "holds no accuracy.csv"), ("schema", "schema 99")],
)
def test_report_refuses_on_one_line_what_is_no_results(main, worse, folder, said):
    done = main("report", folder, cwd=worse)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


ANOTHER_NIGHT = """
import os


def net(activated):
    import torch

    elsewhere = os.environ.get("MKL_CBWR") == "COMPATIBLE"
    if elsewhere:
        net.library = torch.library.Library("aten", "IMPL")
        net.library.impl("silu", lambda x: x * 0.5, "CPU")

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.copies = torch.nn.Parameter(torch.ones(4)), 0

        def __deepcopy__(self, memo):
            self.copies += elsewhere
            other = Net()
            other.copies = self.copies
            return other

        def forward(self, x):
            x = x * self.weight
            return (torch.nn.functional.silu(x) if activated else x) + self.copies

    return Net(), torch.ones(2, 4)


MODELS = {"activated": lambda: net(True), "plain": lambda: net(False)}
"""
"""Where this variable is set, both models differ from run to run, and one kernel, which one of them calls, is another
one: the environment is recorded with it, and no processor does anything else for these ops."""


def test_night_names_kernels_that_changed(tmp_path, monkeypatch):
    (tmp_path / "zoo.py").write_text(ANOTHER_NIGHT)
    flags = ("--", "--fingerprints", "--diagnose-budget", "0")
    monkeypatch.delenv("MKL_CBWR", raising=False)
    done = run(*NIGHT, "--label", "2026-11-19", *flags, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    done = run(*NIGHT, "--label", "2026-11-20", *flags, cwd=tmp_path)
    assert done.returncode == 1, done.stderr

    with_what = r"kernels? changed with MKL_CBWR none -> COMPATIBLE"
    for said in (done.stdout, (tmp_path / "nights" / "2026-11-20" / "report.md").read_text()):
        said = " ".join(html.unescape(said).split())
        assert re.search(rf"activated \(inference\): 1 of \d {with_what}: aten.silu.default \(ATen native\)\.", said)
        assert re.search(rf"plain \(inference\): none of \d {with_what}\.", said)
