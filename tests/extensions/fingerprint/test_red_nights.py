"""Planted red nights: the reason of each model, as ``compare`` and a report of both nights say it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from hashbench import cli
from hashbench.core.report.reasons import Reason
from hashbench.core.report.text import escape_markdown
from hashbench.extensions import EXTENSIONS
from tests.extensions.fingerprint.red_nights import PLANTED, UNKNOWN, Night

NIGHTS = {**PLANTED, **UNKNOWN}
REPORTS = pytest.mark.skipif("report" not in {each.name for each in EXTENSIONS}, reason="nothing reports on nights")


def test_each_reason_is_planted_twice() -> None:
    planted = Counter(reason for night in PLANTED.values() for reason in {*night.reasons.values()})
    assert planted.keys() == {*Reason} - {Reason.UNKNOWN}
    assert min(planted.values()) >= 2
    assert sum(len({*night.reasons.values()}) > 1 for night in PLANTED.values()) == 2


@pytest.mark.parametrize("night", NIGHTS.values(), ids=NIGHTS)
def test_compare_says_the_reason(night: Night, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, new = map(str, night.write(tmp_path))
    assert cli.main(["compare", base, new, "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert {model["name"]: clause["class"] for clause in document["classes"] for model in clause["models"]} == {
        name: str(reason) for name, reason in night.reasons.items()
    }
    assert cli.main(["compare", base, new]) == 1
    text = capsys.readouterr().out
    assert document["headline"] in text
    for words in night.said:
        assert words in text


@REPORTS
@pytest.mark.parametrize("night", NIGHTS.values(), ids=NIGHTS)
def test_a_report_of_both_nights_says_the_reason(
    night: Night, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    night.write(tmp_path)
    assert cli.main(["report", str(tmp_path), "--json", "--strict"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert {model["name"]: clause["class"] for clause in document["classes"] for model in clause["models"]} == {
        name: str(reason) for name, reason in night.reasons.items()
    }
    assert cli.main(["report", str(tmp_path)]) == 0
    (headline,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("**")]
    for words in night.said:
        assert escape_markdown(words) in headline or words in "".join(document["next"])
