"""Check what each change of ``docs/extending*.md`` shows, one test for each: ``test_extending.py`` runs them in a copy
of hashbench that has all of the changes."""

from __future__ import annotations

import csv
import dataclasses
import json
import re
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from command_helpers import Main

from hashbench import HashDebugTrace, cli, find_divergence
from hashbench.core.check.row import row_of
from hashbench.core.devices.ledger import chosen
from hashbench.core.diagnose import replay
from hashbench.core.diagnose.causes import decide
from hashbench.core.diagnose.repro import report
from hashbench.core.extensions import failure, shown
from hashbench.core.native.library import NATIVE_KEY
from hashbench.core.processes import Budget
from hashbench.core.records import CallFacts, Diagnosis, Evidence, ModelSpec, Row, RowEvidence, RunOptions
from hashbench.core.report.compare import compare
from hashbench.core.report.table import sweep_table
from hashbench.core.report.text import as_json
from hashbench.core.results.rows import read_rows, row_from_json, row_to_json
from hashbench.core.run.outcome import Outcome
from hashbench.core.trace.digest import digest
from hashbench.extensions.report.exports import as_annotations, as_junit, as_markdown
from hashbench.extensions.report.page import render_html
from tests.core.report.rows import sweep, write_rows
from tests.experiment_texts import result
from tests.extensions.report.histories import DIAGNOSED, failed, judged, passing
from tests.flat_rows import changed
from tests.repro_helpers import aten, captured
from tests.test_extending import CHANGES

NIGHTS = Path(__file__).parent / "golden" / "inputs" / "nights"
ZOO = """
import os, sys, torch, hashbench

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
def looks_ahead():
    class LooksAhead(torch.nn.Module):
        def forward(self, input_ids):
            return input_ids - input_ids.float().mean(1, keepdim=True)
    return LooksAhead(), {"input_ids": torch.arange(24).view(2, 12)}

@hashbench.model
def switches():
    class Switches(torch.nn.Module):
        def forward(self, x):
            return x * (sys.getswitchinterval() > 1e-3)
    return Switches(), (torch.ones(4),)

@hashbench.model
def not_finite():
    return torch.nn.Identity(), (torch.tensor([1.0, float("nan")]),)
"""
FLUSHED = "with denormal numbers flushed to zero"


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``ZOO``, and the results of it and of the new suite in ``out``."""
    folder = tmp_path_factory.mktemp("swept")
    (folder / "zoo.py").write_text(ZOO, encoding="utf-8")
    suites = ("--suite", "zoo.py", "perceptrons", "--models", "all")
    flags = ("--inference", "--threads", "1", "--replays", "4", "--diagnose-budget", "20", "--output", "out")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert cli.main(["sweep", *suites, *flags]) == 0
    return folder


def lines_of(output: Path) -> dict[str, dict[str, str]]:
    """The lines of ``accuracy.csv`` by the names of models."""
    with (output / "accuracy.csv").open(newline="", encoding="utf-8") as file:
        return {row["name"]: row for row in csv.DictReader(file)}


def outputs(row: Row, folder: Path) -> dict[str, str]:
    """Everything that shows a row which passed on the night before; its files come back as it was."""
    path = folder / "accuracy.csv"
    write_rows(path, [row])
    assert read_rows(path) == [row]
    assert row_from_json(json.loads(json.dumps(row_to_json(row)))) == row
    night = judged([passing(row)], [row])
    return {
        "csv": path.read_text(encoding="utf-8"),
        "table": sweep_table([row]),
        "compared": as_json(compare(sweep(passing(row)), sweep(row))),
        "page": render_html(night),
        "junit": as_junit(night),
        "markdown": as_markdown(night),
        "annotations": as_annotations(night),
        "pytest": str(failure(row, folder=Path("kept"))),
    }


def silent(texts: Mapping[str, str], *words: str) -> set[str]:
    """The outputs that have none of these words."""
    return {name for name, text in texts.items() if not any(word in text for word in words)}


def test_a_csv_column(swept: Path, tmp_path: Path, main: Main) -> None:
    row = lines_of(swept / "out")["not_finite"]
    (document,) = (swept / "out" / "rows").glob("*.not_finite.json")
    assert float(row["processor_seconds"]) > 0
    assert json.loads(document.read_text(encoding="utf-8"))["processor_seconds"] == float(row["processor_seconds"])
    assert "processor_seconds" in main("compare", "out", "out", "--format", "json", cwd=swept).stdout
    made = row_of(ModelSpec("zoo", "net"), RunOptions(), Outcome("pass", "on"), seconds=None)
    assert made.processor_seconds > 0
    texts = outputs(dataclasses.replace(DIAGNOSED, processor_seconds=12.625), tmp_path)
    assert not silent(texts, "12.625") & {"csv", "compared", "page"}
    assert "Processor seconds" in texts["page"]


def test_a_cause(tmp_path: Path) -> None:
    results = (result("call/repeat 20/20~5"),)
    evidence = Evidence("kernel", call=CallFacts("aten.topk.default", tied_places=True), arms=results)
    decision = decide(evidence)
    assert (decision.cause, decision.confidence) == ("tie_breaking", "likely")
    assert decision.advice.startswith("Sort by a second key")
    said = dataclasses.asdict(decision)
    texts = outputs(dataclasses.replace(DIAGNOSED, **said, evidence=RowEvidence.of(results)), tmp_path)
    assert not silent(texts, "tie_breaking", "tie breaking")
    assert " tie_breaking, likely" in texts["pytest"]
    assert "which of them is chosen is unspecified" in texts["page"]
    assert silent(texts, "Sort by a second key") == {"annotations"}
    call = captured(aten.add.Tensor, torch.ones(3), torch.ones(3))
    assert "**tie breaking**, likely" in report(call, Diagnosis(decision, evidence), here={})


def test_an_experiment(swept: Path, tmp_path: Path, main: Main) -> None:
    row = lines_of(swept / "out")["differs"]
    assert "call/flush_denormal 4/4" in row["evidence"]
    assert FLUSHED in (swept / "out" / row["repro"] / "REPORT.md").read_text(encoding="utf-8")
    replayed = main("replay", f"out/{row['repro']}", "--replays", "4", "--import", "zoo.py", cwd=swept)
    assert (replayed.returncode, FLUSHED in replayed.stdout) == (1, True)

    results = tuple(map(result, ("call/repeat 20/20", "call/flush_denormal 0/20")))
    evidence = Evidence("kernel", call=CallFacts("op"), arms=results)
    decision = decide(evidence)
    assert (decision.cause, decision.confidence) == ("algorithm_selection", "likely")
    assert decision.because.startswith(f"20 of 20 unmodified replays differ; 0 of 20 {FLUSHED}")
    texts = outputs(dataclasses.replace(DIAGNOSED, evidence=RowEvidence.of(results)), tmp_path)
    assert silent(texts, "call/flush_denormal 0/20") == {"table", "page", "annotations"}
    assert FLUSHED in texts["page"]
    call = captured(aten.add.Tensor, torch.ones(3), torch.ones(3))
    assert FLUSHED in report(call, Diagnosis(decision, evidence), here={})
    made = replay.experiments(call, replays=3, budget=Budget(60.0), arms=("flush_denormal",))
    assert made.arm("flush_denormal").trials == 3


def test_a_status(swept: Path, tmp_path: Path) -> None:
    assert lines_of(swept / "out")["not_finite"]["accuracy"] == "results_not_finite"
    texts = outputs(failed("net", "results_not_finite", "3 of 4"), tmp_path)
    assert silent(texts, "results_not_finite") == {"pytest"}
    assert "the results hold a NaN or an infinity" in texts["page"]
    assert ">N<" in texts["page"]


def test_an_invariance(swept: Path, tmp_path: Path, main: Main) -> None:
    (command,) = re.findall(r"^\$ hashbench (.+)$", CHANGES["An invariance"], re.MULTILINE)
    flags = ("--threads", "1", "--diagnose-budget", "20", "--output", "prefix")
    assert main(*shlex.split(command), *flags, cwd=swept).returncode == 0
    row = lines_of(swept / "prefix")["looks_ahead"]
    assert (row["mode"], row["accuracy"]) == ("prefix-invariance", "fail_prefix_invariance")
    assert (row["kernel"], row["compared_with"]) == ("aten.mean.dim", "6 tokens alone, and as the first of 12")
    assert row["cause"], row["because"]
    texts = outputs(
        dataclasses.replace(DIAGNOSED, mode="prefix-invariance", accuracy="fail_prefix_invariance"), tmp_path
    )
    assert silent(texts, "fail_prefix_invariance") == {"pytest"}
    assert "later tokens change the results of earlier ones" in texts["page"]
    assert "the same tokens differ" in texts["pytest"]
    assert "padding, decode, prefix" in main("sweep", "--help", cwd=swept).stdout


def test_a_perturbation(swept: Path, tmp_path: Path, main: Main) -> None:
    only = ("--suite", "zoo.py", "--only", "switches", "--inference", "--threads", "1", "--diagnose-budget", "0")
    assert main("sweep", *only, "--stress", "--output", "stress", cwd=swept).returncode == 0
    row = lines_of(swept / "stress")["switches"]
    assert (row["accuracy"], row["latent"], row["latent_kernel"]) == ("pass", "switching", "aten.mul.Tensor")
    assert "switching" in row["stressed"]
    flaky = changed(DIAGNOSED, accuracy="pass", latent="switching", latent_rate=1.0, stressed="switching 4/4")
    assert silent(outputs(flaky, tmp_path), "switching") == {"junit", "pytest", "annotations"}, "they show it as told"
    assert "(Python threads that take turns more often)" in failure(shown(flaky), folder=Path("kept")).headline


def test_a_suite(swept: Path, main: Main) -> None:
    assert "wide" in main("list", "--suite", "perceptrons", cwd=swept).stdout
    rows = [row for row in lines_of(swept / "out").values() if row["suite"] == "perceptrons"]
    assert {row["name"]: row["accuracy"] for row in rows} == {"narrow": "pass", "wide": "pass"}
    assert "perceptrons" in main("list", cwd=swept).stdout


def nan(bits: int) -> torch.Tensor:
    return torch.tensor([bits], dtype=torch.int16).view(torch.bfloat16)


def test_a_digest_for_a_dtype() -> None:
    one, other, number = nan(0x7FC0), nan(0x7FC1), nan(0x3F80)
    assert digest(one) == digest(other) != digest(number)
    traces = []
    for value in (one, other):
        with HashDebugTrace() as trace:
            value.clone()
        traces.append(trace.finish())
    assert not find_divergence(*traces).divergence


def test_a_kind_of_device() -> None:
    kind, accumulate = chosen(torch.device("mps"))
    assert (kind.name, accumulate.__module__) == ("mps", "hashbench.core.devices.mps")


def test_a_usual_op_of_the_native_tracer() -> None:
    with HashDebugTrace(tracer="native") as trace:
        values = [torch.zeros(2).exp() for _ in range(2)]
    records = [record for record in trace.finish().records if record.op == "aten.exp.default"]
    assert [record.outputs for record in records] == [(digest(value),) for value in values]
    unboxed = {op: torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{op}", NATIVE_KEY) for op in ("exp", "cos")}
    assert unboxed == {"exp": True, "cos": False}


def test_a_report_form(tmp_path: Path, main: Main) -> None:
    shutil.copytree(NIGHTS, tmp_path / "nights")
    main("report", "nights", "--summary", "s.txt", cwd=tmp_path)
    lines = (tmp_path / "s.txt").read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith("2026-11-22")
    assert "--summary" in main("report", "--help", cwd=tmp_path).stdout


def test_a_file_format(swept: Path, main: Main) -> None:
    rows = [json.loads(path.read_bytes()) for path in sorted((swept / "out" / "rows").glob("*.json"))]
    joined = {"joined": rows, "twice": [*rows, rows[0]], "damaged": [{}]}
    for name, content in joined.items():
        (swept / f"{name}.json").write_text(json.dumps({"rows": content}), encoding="utf-8")
    compared = main("compare", "joined.json", "out", cwd=swept)
    assert (compared.returncode, compared.stderr) == (0, "")
    assert "Nothing got worse" in compared.stdout
    assert "In all: 1 still differs, 1 still fails, 4 unchanged" in compared.stdout
    for damaged in ("twice.json", "damaged.json"):
        refused = main("compare", damaged, "out", cwd=swept)
        assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
        assert damaged in refused.stderr


def test_an_executor(swept: Path, main: Main) -> None:
    models = ("--suite", "zoo.py", "--only", "not_finite", "--inference", "--threads", "1")
    said = main("sweep", *models, "--output", "threads", "--executor", "thread", cwd=swept)
    assert said.returncode == 0, said.stderr
    assert lines_of(swept / "threads")["not_finite"]["accuracy"] == "results_not_finite"
    assert "thread" in main("sweep", "--help", cwd=swept).stdout


def test_an_extension(swept: Path, main: Main) -> None:
    models = (
        "--suite",
        "zoo.py",
        "--only",
        "differs",
        "switches",
        "--inference",
        "--threads",
        "1",
        "--diagnose-budget",
        "0",
    )
    said = main("sweep", *models, "--output", "volume", "--volume", cwd=swept)
    assert said.returncode == 0, said.stderr
    lines = lines_of(swept / "volume")
    assert (lines["differs"]["output_elements"], int(lines["switches"]["output_elements"]) > 0) == ("", True)
    assert "output_elements" not in lines_of(swept / "out")["differs"]
    assert "--volume" in said.stdout
