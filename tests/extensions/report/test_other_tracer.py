"""Rows of different tracers: results are compared, kernels are not, and every report says so."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from hashbench.core.report import text
from hashbench.core.report.compare import Became, compare
from hashbench.extensions.report.expectations import ExpectationStatus, JudgedNight, assess, unseen_nights
from hashbench.extensions.report.expected_rows import expect_from
from hashbench.extensions.report.exports import as_annotations, as_junit, as_markdown
from hashbench.extensions.report.history import load_history
from hashbench.extensions.report.page import render_html
from tests.core.report.rows import differing, row, sweep, write_night

PYTHON, UNTOLD = differing(tracer="python"), differing(ops=352)
NATIVE = dataclasses.replace(PYTHON, tracer="native", kernel="aten.add_.Tensor", module="layer2.0", cause="alignment")
SAID = (
    "The tracer of 1 row is another (python → native): the Python dispatch mode changes which ops run, and the native "
    "tracer does not, so their kernels and causes are not compared."
)
NOTE = "tracer python → native, so kernels are not compared"


@pytest.mark.parametrize(
    ("base", "new", "outcome"),
    [
        pytest.param(PYTHON, NATIVE, Became.STILL_DIFFERS, id="another kernel of another tracer"),
        pytest.param(PYTHON, dataclasses.replace(NATIVE, tracer="python"), Became.MOVED, id="of the same tracer"),
        pytest.param(UNTOLD, NATIVE, Became.MOVED, id="one that nothing says"),
        pytest.param(row(tracer="python"), NATIVE, Became.REGRESSED, id="passed under another tracer"),
        pytest.param(PYTHON, row(tracer="native"), Became.FIXED, id="passes under another tracer"),
    ],
)
def test_a_kernel_that_another_tracer_names_has_not_moved(base, new, outcome) -> None:
    (change,) = compare(sweep(base), sweep(new)).changes
    assert change.outcome is outcome
    assert (NOTE in change.note) is (outcome is Became.STILL_DIFFERS)


@pytest.mark.parametrize("form", ["text", "markdown", "json", "csv"])
def test_every_form_of_a_comparison_says_so_in_one_line(form: str) -> None:
    for new, times in ((NATIVE, 1), (dataclasses.replace(NATIVE, tracer="python"), 0)):
        written = getattr(text, f"as_{form}")(compare(sweep(PYTHON), sweep(new)))
        said = {"csv": NOTE, "json": json.dumps(SAID)}.get(form, SAID)
        assert written.count(said) == times
    assert NOTE in json.loads(text.as_json(compare(sweep(PYTHON), sweep(NATIVE))))["changes"][0]["note"]


# ----------------------------------------------------------------------------------------------------- nights


def nights(folder: Path, *rows) -> Path:
    for day, one in enumerate(rows, start=1):
        environment = {"schema": 1, "key": one.tracer, "tracer": one.tracer}
        write_night(folder, f"2026-11-0{day}", one, row("other", tracer=one.tracer), environment=environment)
    return folder


@pytest.fixture
def judged(tmp_path: Path) -> JudgedNight:
    return assess([nights(tmp_path, PYTHON, PYTHON, NATIVE, NATIVE)], until=tmp_path / "2026-11-03")


def test_nights_tell_a_change_of_tracer_and_not_a_changed_kernel(judged: JudgedNight) -> None:
    one = next(one for one in judged.judgements if one.key[-1] == "resnet18")
    assert (one.status, one.worse) == (ExpectationStatus.MET, False)
    said = SAID.replace("1 row", "2 rows")
    markdown = as_markdown(judged)
    assert said in markdown
    assert "Nothing: every model" in markdown.partition("## What changed since")[2].partition("##")[0]
    assert "| tracer | python | native |" in " ".join(markdown.split())
    assert "3, since 2026-11-01" in markdown
    page = render_html(judged, title="a night")
    assert said in page
    assert "another tracer: native" in page
    assert NOTE in as_junit(judged)
    assert "The environment changed::tracer: python → native" in as_annotations(judged)


def test_a_kernel_that_changes_later_under_the_same_tracer_is_told(tmp_path: Path) -> None:
    other = dataclasses.replace(NATIVE, kernel="aten.dot.default")
    judged = assess([nights(tmp_path, PYTHON, NATIVE, other)])
    one = next(one for one in judged.judgements if one.key[-1] == "resnet18")
    assert one.outcome is Became.MOVED
    model = next(model for model in judged.history.models if model.key[-1] == "resnet18")
    assert [(found.tracer, found.retraced) for found in model.intervals] == [
        ("python", False),
        ("native", True),
        ("native", False),
    ]
    assert model.standing == model.intervals[-1]
    assert "aten.dot.default" in as_markdown(judged).partition("## What changed since")[2].partition("##")[0]


def test_an_interval_goes_on_where_two_tracers_name_the_same(tmp_path: Path) -> None:
    history = load_history([nights(tmp_path, PYTHON, dataclasses.replace(PYTHON, tracer="native"))])
    assert [len(model.intervals) for model in history.models] == [1, 1]
    assert history.models[0].intervals[0].tracer == "native"


def test_what_is_expected_by_one_tracer_is_seen_by_another(tmp_path: Path) -> None:
    folder = nights(tmp_path / "nights", PYTHON, NATIVE, NATIVE)
    expect_from([folder / "2026-11-01"], output=tmp_path / "expected", link="", today="2026-11-01")
    judged = assess([folder], expected=tmp_path / "expected")
    one = next(one for one in judged.judgements if one.key[-1] == "resnet18")
    assert (one.status, one.unseen) == (ExpectationStatus.MET, 0)
    model = next(model for model in judged.history.models if model.key[-1] == "resnet18")
    assert unseen_nights(model, dataclasses.replace(PYTHON, tracer="native")) == 2
