"""A night as Markdown, JUnit XML and GitHub annotations: whole, in order, and harmless whatever models are called."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from hashbench.cli import main
from hashbench.core.extensions import shown
from hashbench.core.records import RowEvidence
from hashbench.extensions.report import exports
from hashbench.extensions.report.expectations import JudgedNight, assess
from hashbench.extensions.report.expected_rows import expect_from
from hashbench.extensions.report.exports import LIMIT, as_annotations, as_junit, as_markdown, as_summary
from hashbench.extensions.report.nightly import html_of
from tests.core.report.rows import differing, row, write_night
from tests.extensions.compiled.compiled_rows import INACCURATE, ROUNDED, WHY
from tests.extensions.report.histories import judged
from tests.flat_rows import changed

EVIL = "a|b\n<script>`x`</script> [l](javascript:1) *b* ::error::"
NAMES = ["steady", "drifts", "moved", "flaky", "gone", "broken", "skipped"]


@pytest.fixture(scope="module")
def night(tmp_path_factory: pytest.TempPathFactory) -> JudgedNight:
    """A night of seven models, each in another way from what was expected, and a suite that did not end."""
    root = tmp_path_factory.mktemp("nights")
    before = [
        row("steady", seconds=1.25),
        differing("drifts"),
        differing("moved"),
        differing("flaky", rate=0.2),
        row("gone"),
        row("broken"),
        row("skipped", "pass_due_to_skip", error="no CUDA"),
    ]
    first = write_night(root / "nights", "2026-11-01", *before)
    expect_from([first], output=root / "expected", link="https://example.org/7", today="2026-11-01")
    write_night(
        root / "nights",
        "2026-11-02",
        row("steady", seconds=1.25),
        differing("drifts"),
        differing("moved", kernel="aten.dot.default"),
        row("flaky"),
        row("broken", "crashed", error=EVIL),
        row("skipped", "pass_due_to_skip", error="no CUDA"),
        row("new"),
        differing("new and evil" + EVIL, module="\N{RIGHT-TO-LEFT OVERRIDE}x\ud800\x07"),
        environment={"schema": 1, "key": "e2", "cpu": "Y"},
    )
    manifest = root / "nights" / "2026-11-02" / "torchvision_training" / "sweep.json"
    manifest.write_text(manifest.read_text().replace('"models": [', '"models": [["torchvision", "gone"], '))
    parts = '{"parts": [{"suite": "timm", "mode": "training", "error": "no <b>timm"}]}'
    (root / "nights" / "2026-11-02" / "night.json").write_text(parts)
    return assess([root / "nights"], expected=root / "expected")


# ---------------------------------------------------------------------------------------------------- Markdown


def test_markdown_begins_with_what_is_new_and_what_got_worse(night):
    text = as_markdown(night)
    headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert headings == [
        "What went wrong with this night",
        "New, and does not pass",
        "Worse",
        "What changed since 2026-11-01",
        "What changed in the environment",
        "Totals",
        "Everything that does not pass",
        "Expectations",
        "Diagnoses",
    ]
    verdict = "worse: 1 broken, 1 moved, 1 missing, 1 problem of the night itself"
    assert " is new and differs; 3 models got worse: " in text.splitlines()[2]
    assert text.splitlines()[2].endswith("; 1 more row had nothing to compare with: 1 passes**")
    assert f" is new and differs; {verdict}; 1 more row" in text.partition("## Totals")[2]
    assert "- timm in training: no &lt;b&gt;timm" in text
    assert as_summary(night) == text[: text.index("\n## Everything")]


def test_names_and_errors_stay_inside_their_cells(night):
    text = as_markdown(night)
    tables = [line for line in text.splitlines() if line.startswith("|")]
    widths = {len(re.split(r"(?<!\\)\|", line)) for line in tables if "evil" in line}
    headers = {len(line.split("|")) for line in tables if set(line) <= set("|:-")}
    assert widths <= headers
    assert "<script>" not in text
    assert not re.search(r"(?<!\\)\]\(javascript", text)
    assert not re.search(r"^\s*(::|##\[)", text, re.MULTILINE)


def test_a_link_that_is_none_is_not_one():
    assert exports._link("https://example.org/7") == "[link](https://example.org/7)"
    assert exports._link("javascript:alert(1)") == ""


@pytest.mark.slow
def test_markdown_of_many_failures_fits(tmp_path):
    long = "模" * 1000
    rows = [
        differing(f"m{number}", because=long, advice=long, error=long, evidence=RowEvidence(long))
        for number in range(1500)
    ]
    write_night(tmp_path, "2026-11-01", row("m0"))
    write_night(tmp_path, "2026-11-02", *rows)
    found = assess([tmp_path])
    text = as_markdown(found)
    assert len(text.encode()) <= LIMIT < 1024 * 1024
    assert "more are not shown here." in text
    assert "1 of the night" not in text
    assert len(text) > 100_000


# -------------------------------------------------------------------------------------------------- JUnit XML


def cases(night: JudgedNight) -> dict[str, ElementTree.Element]:
    root = ElementTree.fromstring(as_junit(night))
    return {case.get("name", ""): case for case in root.iter("testcase")}


def test_junit_has_a_case_for_every_model_with_what_it_means(night):
    kinds = {name: sorted(child.tag for child in case) for name, case in cases(night).items() if "evil" not in name}
    assert kinds == {
        "steady": [],
        "new": [],
        "drifts": ["skipped", "system-out"],
        "moved": ["failure"],
        "flaky": ["system-out"],
        "gone": ["failure"],
        "broken": ["failure"],
        "skipped": ["skipped"],
        "timm in training: no <b>timm": ["failure"],
    }


def test_junit_counts_what_it_holds(night):
    root = ElementTree.fromstring(as_junit(night))
    assert root.tag == "testsuites"
    for suite in root:
        assert suite.tag == "testsuite"
        assert int(suite.attrib["tests"]) == len(suite.findall("testcase"))
        assert int(suite.attrib["failures"]) == len(suite.findall("testcase/failure"))
        assert int(suite.attrib["skipped"]) == len(suite.findall("testcase/skipped"))
    for name in ("tests", "failures", "skipped", "errors"):
        assert int(root.attrib[name]) == sum(int(suite.attrib[name]) for suite in root)
    assert root.attrib["failures"] == "4"


def test_junit_holds_no_character_that_xml_cannot(tmp_path):
    everything = "".join(map(chr, [*range(1, 32), 0xD800, 0xFFFE, 0x1F600]))
    write_night(tmp_path, "2026-11-01", row("a", "crashed"))
    found = assess([tmp_path])
    night = replace(found.night, label=everything, problems=(everything,))
    text = as_junit(replace(found, history=replace(found.history, nights=(night,))))
    assert ElementTree.fromstring(text.encode()).get("name", "").count("\N{GRINNING FACE}") == 1


# ------------------------------------------------------------------------------------------------ annotations


def test_annotations_are_escaped_as_github_asks():
    assert exports._annotation("error", "a,b:c%", "x:y,z%0A") == "::error title=a%2Cb%3Ac%25::x:y,z%250A\n"
    assert exports._annotation("error", "a\r\nb", "c\r\nd") == "::error title=a b::c d\n"


def test_a_quiet_night_has_none(tmp_path):
    for label in ("2026-11-01", "2026-11-02"):
        write_night(tmp_path, label, row("a"))
    assert as_annotations(assess([tmp_path])) == ""


# ------------------------------------------------------------------------------------------- one sweep alone


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> JudgedNight:
    """The first night of all: a model that differs in one mode, one that fails, one that was skipped."""
    root = tmp_path_factory.mktemp("first")
    skipped = row("skipped", "pass_due_to_skip", error="no CUDA")
    rows = (differing("drifts"), row("drifts", mode="inference"), row("broken", "crashed", error=EVIL), skipped)
    write_night(root, "2026-11-01", *rows)
    return assess([root])


HEADLINE = "Of 4 rows of 3 models, 1 differs, 1 fails, 1 passes and 1 was skipped"
COMPARING = re.compile(r"worse|better|no expectation|as expected|expected:|as last night|new difference", re.IGNORECASE)


@pytest.mark.parametrize("form", [as_markdown, as_summary, as_junit, as_annotations, html_of])
def test_one_sweep_alone_compares_nothing(alone, form):
    text = form(alone)
    assert ("Of 4 rows of 3 models, drifts differs, broken fails" if form is html_of else HEADLINE) in text
    told = re.sub(r"<(style|script).*?</\1>| class=\"[^\"]*\"", "", text, flags=re.DOTALL)
    assert not COMPARING.search(told), COMPARING.search(told)


@pytest.mark.parametrize(("made", "code"), [(differing, 1), (row, 0)], ids=["that differs", "that passes"])
def test_who_is_strict_is_told_of_one_sweep_alone(tmp_path, made, code, capsys):
    night = write_night(tmp_path, "2026-11-01", made("a"))
    assert main(["report", str(night), "--strict"]) == code
    assert main(["report", str(night)]) == 0
    assert "worse" not in capsys.readouterr().out


def test_one_sweep_alone_lists_differing_and_failing(alone):
    headings = re.findall(r"^## (.*)$", as_markdown(alone), re.MULTILINE)
    assert headings == ["What differs", "What fails", "Totals", "Diagnoses"]
    root = ElementTree.fromstring(as_junit(alone))
    told = {
        (case.get("classname", ""), case.get("name", "")): [child.tag for child in case]
        for case in root.iter("testcase")
    }
    assert told == {
        ("torchvision.training.float32.cpu", "drifts"): ["failure"],
        ("torchvision.inference.float32.cpu", "drifts"): [],
        ("torchvision.training.float32.cpu", "broken"): ["failure"],
        ("torchvision.training.float32.cpu", "skipped"): ["skipped"],
    }
    assert {failure.get("type") for failure in root.iter("failure")} == {"differs", "fails"}
    assert as_annotations(alone).splitlines()[0] == f"::notice title=hashbench 2026-11-01::{HEADLINE}"


@pytest.mark.parametrize("damaged", ["2026-11-01", "2026-11-02"])
@pytest.mark.parametrize("file", ["night.json", "torchvision_training/sweep.json"])
def test_damaged_json_is_named_and_stops_no_report(tmp_path, damaged, file):
    for label in ("2026-11-01", "2026-11-02"):
        write_night(tmp_path, label, row("a"))
    (tmp_path / damaged / file).write_text("{garbage")
    found = assess([tmp_path])
    night = next(one for one in found.history.nights if one.label == damaged)
    assert any("it is not JSON" in problem for problem in night.problems)
    assert found.got_worse == (damaged == "2026-11-02")


def test_models_of_a_lost_sweep_are_missing(tmp_path):
    for label in ("2026-11-01", "2026-11-02"):
        night = write_night(tmp_path, label, row("a"), row("a", mode="inference"))
        modes = [{"suite": "torchvision", "mode": mode, "error": ""} for mode in ("training", "inference")]
        (night / "night.json").write_text(json.dumps({"parts": modes}))
    shutil.rmtree(tmp_path / "2026-11-02" / "torchvision_inference")
    assert "1 missing" in as_markdown(assess([tmp_path]))


# ------------------------------------------------------------------------------------------------ compiled models


def compiled_night() -> JudgedNight:
    passing = row("suspicious", backend="inductor", beyond_rounding=40.0, checked=1.0)
    return judged([replace(INACCURATE, name="wrong"), replace(ROUNDED, name="rounds"), passing])


def test_markdown_tells_stage_kernel_and_measurements_of_compiled_models():
    text = as_markdown(compiled_night())
    line = next(line for line in text.splitlines() if line.startswith("|") and "| wrong" in line)
    assert [cell.strip() for cell in line.split("|")][1:3] == ["fail_accuracy", "wrong"]
    assert "cpp_fused_relu_0" in line
    assert "codegen (proven)" in line
    assert "| stage " in text
    assert "| cause " not in text
    assert "report the code generated for aten.relu.default" in line
    assert f"- stage: codegen (proven): {WHY}" in text
    assert "- where: cpp_fused_relu_0 (aten.relu.default) in Net.act, net.py:18 forward, forward" in text
    assert "- stage: rounding (proven): no kernel is to blame; beyond the tolerance" in text
    assert "- suspicious (training): suspicious: 40x the rounding bound" in text
    assert "what differs: beyond" not in text


def test_junit_and_annotations_tell_stage_and_op():
    facts = cases(compiled_night())["wrong"].find("failure")
    assert facts.get("message") == (
        "fail_accuracy (cpp_fused_relu_0, codegen); codegen: cpp_fused_relu_0 (aten.relu.default) in Net.act"
    )
    lines = facts.text.splitlines()
    for fact in ("stage: codegen", "op: aten.relu.default", "source: net.py:18 forward", "beyond_rounding: 22000000.0"):
        assert fact in lines
    before = changed(INACCURATE, accuracy="pass", stage="", kernel="", op="")
    (line,) = as_annotations(judged([before], [INACCURATE])).splitlines()
    assert line.startswith("::error")
    assert "codegen: cpp_fused_relu_0 (aten.relu.default) in Net.act" in line


def test_a_flaky_model_is_no_pass_with_a_remark():
    flaky = row("flaky", stressed="threads 3/5", latent="threads", latent_kernel="aten.sum.default", latent_rate=0.6)
    suspicious = row("doubted", backend="inductor", beyond_rounding=40.0)
    _, listed = as_markdown(judged([], [shown(flaky), suspicious])).split("## Passes, with a remark")
    assert "doubted (training): suspicious" in listed
    assert "flaky" not in listed
