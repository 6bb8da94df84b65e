"""A night: its sweeps one after the other, what is kept when some of them fail or the night is killed, its reports."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from xml.etree import ElementTree

import pytest
from core.report.rows import differing, row, selection, write_sweep

from hashbench import cli
from hashbench.cli.parser import OneLineParser
from hashbench.core.errors import HashbenchError
from hashbench.core.sweep.request import SweepRequest
from hashbench.extensions.report import cli as report_commands
from hashbench.extensions.report import nightly
from hashbench.extensions.report.expected_rows import expect_from
from hashbench.extensions.report.nightly import Part

MODES = ("training", "inference")


def planned(
    root: Path, label: str = "2026-11-20", suites: tuple[str, ...] = ("torchvision", "timm")
) -> tuple[Part, ...]:
    return nightly.plan(suites, MODES, folder=root / label)


def leaves(*names: str, **values):
    """A sweeper whose sweeps find ``names`` passing, as a real one leaves them."""

    def sweep(part: Part) -> None:
        rows = [row(name, suite=part.suite, mode=part.mode, **values) for name in names]
        write_sweep(part.folder, *rows, selection=selection(*rows))

    return sweep


def a_night(root: Path, label: str, sweep) -> None:
    nightly.sweep_all(planned(root, label), folder=root / label, sweep=sweep)


def errors_in(folder: Path) -> list[str]:
    return [part["error"] for part in json.loads((folder / "night.json").read_text())["parts"]]


def test_a_plan_has_every_suite_in_every_mode(tmp_path):
    parts = planned(tmp_path, suites=("timm", "some/where/zoo.py"))
    assert [(part.name, part.mode, part.folder.name) for part in parts] == [
        ("timm", "training", "timm_training"),
        ("timm", "inference", "timm_inference"),
        ("zoo", "training", "zoo_training"),
        ("zoo", "inference", "zoo_inference"),
    ]


def test_two_suites_of_one_name_are_refused(tmp_path):
    with pytest.raises(HashbenchError, match="two suites are called zoo"):
        planned(tmp_path, suites=("a/zoo.py", "b/zoo.py"))


@pytest.mark.parametrize("label", ["", "..", "a/b", "-x", "a\nb"])
def test_a_label_that_is_no_folder_of_the_root_is_refused(tmp_path, label):
    with pytest.raises(HashbenchError, match="not a valid label"):
        nightly.night_folder(tmp_path, label)


def test_a_suite_that_cannot_be_swept_stops_no_other_and_is_reported(tmp_path):
    def sweep(part: Part) -> None:
        if part.suite == "torchvision":
            raise HashbenchError("cannot import torchvision", consequence="no model can be run")
        leaves("a")(part)

    folder = tmp_path / "2026-11-20"
    a_night(tmp_path, folder.name, sweep)
    assert errors_in(folder) == ["cannot import torchvision: no model can be run."] * 2 + [""] * 2
    judged = nightly.report(tmp_path, folder=folder, expected=None)
    assert judged.got_worse
    assert judged.night.problems[0] == "torchvision in training: cannot import torchvision: no model can be run."
    assert judged.history.nights[0].counts == {"pass": 2}


def test_a_night_that_was_killed_is_not_taken_for_a_whole_one(tmp_path):
    def sweep(part: Part) -> None:
        if part.mode == "inference":
            raise KeyboardInterrupt
        leaves("a")(part)

    folder = tmp_path / "2026-11-20"
    with pytest.raises(KeyboardInterrupt):
        a_night(tmp_path, folder.name, sweep)
    assert errors_in(folder) == ["", *["its sweep did not end"] * 3]
    assert nightly.report(tmp_path, folder=folder, expected=None).got_worse
    a_night(tmp_path, folder.name, leaves("a"))
    assert not nightly.report(tmp_path, folder=folder, expected=None).got_worse


def test_a_suite_that_is_gone_since_last_night_is_missing_only_where_it_was_asked_for(tmp_path):
    a_night(tmp_path, "2026-11-19", leaves("a"))
    fewer = nightly.plan(("torchvision",), MODES, folder=tmp_path / "2026-11-20")
    nightly.sweep_all(fewer, folder=tmp_path / "2026-11-20", sweep=leaves("a"))
    assert not nightly.report(tmp_path, folder=tmp_path / "2026-11-20", expected=None).got_worse
    broken = nightly.plan(("torchvision", "timm"), MODES, folder=tmp_path / "2026-11-21")
    broken = tuple(
        part if part.suite == "torchvision" else Part(part.suite, part.mode, part.folder, error="gone")
        for part in broken
    )
    nightly.sweep_all(broken, folder=tmp_path / "2026-11-21", sweep=leaves("a"))
    judged = nightly.report(tmp_path, folder=tmp_path / "2026-11-21", expected=None)
    assert [problem for problem in judged.night.problems if "timm" in problem] == [
        "timm in training: gone",
        "timm in inference: gone",
    ]


def test_the_reports_of_a_night_lie_in_its_folder_and_say_the_same(tmp_path):
    def sweep(part: Part) -> None:
        drifts = differing("drifts", suite=part.suite, mode=part.mode)
        write_sweep(part.folder, drifts, selection=selection(drifts))

    nights, expected = tmp_path / "nights", tmp_path / "expected"
    a_night(nights, "2026-11-19", leaves("drifts"))
    expect_from([nights / "2026-11-19"], output=expected, today="2026-11-19")
    a_night(nights, "2026-11-20", sweep)
    judged = nightly.report(nights, folder=nights / "2026-11-20", expected=expected)
    assert judged.got_worse
    files = {name: (nights / "2026-11-20" / name).read_text() for name in ("report.html", "report.md", "junit.xml")}
    assert "\n**2 models got worse: drifts (not known: " in files["report.md"]
    assert "\nWorse: 4 new difference.\n" in files["report.md"]
    assert ElementTree.fromstring(files["junit.xml"]).get("failures") == "4"
    assert "aten.index_put_.default" in files["report.html"]


def test_later_nights_do_not_judge_an_earlier_one(tmp_path):
    a_night(tmp_path, "2026-11-19", leaves("a"))
    a_night(tmp_path, "2026-11-21", leaves("b"))
    judged = nightly.report(tmp_path, folder=tmp_path / "2026-11-19", expected=None)
    assert (judged.night.label, len(judged.history.nights)) == ("2026-11-19", 1)


def test_a_damaged_night_json_is_a_problem_and_no_whole_night(tmp_path):
    a_night(tmp_path, "2026-11-20", leaves("a"))
    (tmp_path / "2026-11-20" / "night.json").write_text('{"parts": [{}]}')
    judged = nightly.report(tmp_path, folder=tmp_path / "2026-11-20", expected=None)
    assert judged.got_worse
    assert "night.json" in judged.history.nights[-1].problems[0]
    with pytest.raises(HashbenchError, match=r"night\.json"):
        nightly.assess([tmp_path / "2026-11-20"])


def test_stress_is_a_flag_of_a_night_and_leaves_batches_alone() -> None:
    parser = OneLineParser(prog="hashbench nightly")
    report_commands._add_nightly(parser)
    parsed = parser.parse_args(["--stress", "--modes", "training", "inference", "batch-invariance"])
    stressed = {mode: request.options.stress for mode, request in report_commands._sweep_requests(parsed).items()}
    assert stressed == {"training": True, "inference": True, "batch-invariance": False}
    after = parser.parse_args(["--modes", "training", "--", "--stress"])
    assert report_commands._sweep_requests(after)["training"].options.stress


def test_the_sweeps_of_a_night_share_one_server_of_repros(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server each would import torch once more for every suite and mode."""
    happened: list[object] = []

    @contextmanager
    def noted(requests: Iterable[SweepRequest]) -> Iterator[None]:
        happened.append(sorted(request.options.mode for request in requests))
        yield
        happened.append("ended")

    def swept(*_: object, **__: object) -> None:
        happened.append("swept")

    monkeypatch.setattr("hashbench.core.sweep.request.diagnosis_servers", noted)
    monkeypatch.setattr(nightly, "sweep_all", swept)
    assert cli.main(["nightly", "--suite", "torchvision", "--output", str(tmp_path)]) == 2, "nothing to report"
    assert happened == [["inference", "training"], "swept", "ended"]
