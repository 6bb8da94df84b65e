"""The column ``evidence`` for a reader, and where its results come from."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from hashbench.causes.evidence import effect
from hashbench.causes.stats import Effect
from hashbench.io import to_json
from hashbench.records import Evidence, ExperimentResult, RowEvidence
from hashbench.report.history import load_history
from hashbench.report.html.evidence import ArmRead, read_evidence, reasons
from hashbench.report.html.models import model_views
from hashbench.results.load import load_sweep
from hashbench.results.rows import read_rows, row_from_json, row_to_json
from tests.experiment_texts import evidence
from tests.report.histories import DIAGNOSED
from tests.report.rows import write_sweep

MOVES = ((None, 4), (1, 8))
RICH = RowEvidence.of(
    (
        ExperimentResult("repeat", "call", trials=33, differing=33, distinct=34, seconds=0.25),
        ExperimentResult(
            "moved", "call", 8, 2, 2, found="all by 4 bytes; memory 1 by 8 bytes", moves=((None, 4), (1, 8))
        ),
        ExperimentResult("busy", "call", note="raises: no; really (not) today", raised=True),
        ExperimentResult("fresh_process", "process", note="budget"),
    )
)
WRITTEN = to_json(DIAGNOSED.evidence)


# ------------------------------------------------------------------------------------------- where they come from


def test_a_row_file_keeps_all_of_them() -> None:
    row = dataclasses.replace(DIAGNOSED, evidence=RICH)
    back = row_from_json(json.loads(json.dumps(row_to_json(row))))
    assert back.evidence.results == RICH.results
    assert back.evidence.text == RICH.text


def test_a_csv_has_their_text() -> None:
    assert RICH.text == (
        "call/repeat 33/33; call/moved 2/8 [all by 4 bytes; memory 1 by 8 bytes]; "
        "call/busy not run (raises: no; really (not) today); process/fresh_process not run (budget)"
    )


def test_a_sweep_has_them_where_its_row_files_lie(tmp_path: Path) -> None:
    folder = write_sweep(tmp_path / "sweep", dataclasses.replace(DIAGNOSED, evidence=RICH))
    assert load_sweep(folder).rows[0].evidence.results == RICH.results
    assert read_rows(folder / "accuracy.csv")[0].evidence == RICH
    assert read_rows(folder / "accuracy.csv")[0].evidence.results == ()


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"evidence": to_json(RICH)}, id="other results"),
        pytest.param({"evidence": {**WRITTEN, "results": to_json(RICH.results)}}, id="a text of other results"),
        pytest.param({"evidence": {**WRITTEN, "results": [{**WRITTEN["results"][0], "trials": 0}]}}, id="bad counts"),
        pytest.param({"evidence": {**WRITTEN, "results": [{"name": "repeat"}]}}, id="no result of an experiment"),
        pytest.param({"evidence": 7}, id="a number"),
        pytest.param({"name": "another"}, id="another model"),
        pytest.param({"dtype": "bfloat16"}, id="another dtype"),
        pytest.param({}, id="not JSON"),
    ],
)
def test_a_row_file_that_says_something_else_is_not_believed(tmp_path: Path, change: dict[str, object]) -> None:
    folder = write_sweep(tmp_path / "sweep", DIAGNOSED)
    (file,) = (folder / "rows").iterdir()
    file.write_text(json.dumps(row_to_json(DIAGNOSED) | change) if change else "{")
    (row,) = load_sweep(folder).rows
    assert row == DIAGNOSED
    assert row.evidence.results == ()


def test_a_bare_csv_is_shown_as_the_text_that_it_is(tmp_path: Path) -> None:
    write_sweep(tmp_path / "with", DIAGNOSED)
    write_sweep(tmp_path / "bare", dataclasses.replace(DIAGNOSED, evidence=RowEvidence(DIAGNOSED.evidence.text)))
    whole, bare = (model_views(load_history([tmp_path / name]), {})[0] for name in ("with", "bare"))
    assert whole.arms
    assert ("Evidence", DIAGNOSED.evidence.text) not in whole.facts
    assert not bare.arms
    assert ("Evidence", DIAGNOSED.evidence.text) in bare.facts


# ------------------------------------------------------------------------------------------------- what they say


def read(*texts: str) -> dict[str, ArmRead]:
    row = dataclasses.replace(DIAGNOSED, evidence=evidence(*texts))
    return {one.arm.name: one for one in read_evidence(row)}


@pytest.mark.parametrize(
    ("texts", "arm", "words"),
    [
        (("call/repeat 33/33", "call/one_thread 0/20"), "one_thread", "gone"),
        (("call/repeat 1/20", "call/one_thread 0/20"), "one_thread", "gone, but too few trials to be sure"),
        (("call/repeat 33/33", "call/one_thread 20/20"), "one_thread", "still differs"),
        (("call/repeat 33/33", "call/one_thread 2/20"), "one_thread", "rarer, still there"),
        (("call/repeat 0/20", "call/busy 3/20"), "busy", "brings it about"),
        (("call/repeat 0/20", "call/busy 0/20"), "busy", "agrees too"),
        (("call/repeat 20/20", "call/poison 20/20"), "poison", "depends on uninitialised memory"),
        (("call/repeat 20/20", "call/poison 0/20"), "poison", "does not depend on it"),
        (("call/one_thread 3/20",), "one_thread", "differs"),
        (("call/repeat 20/20",), "repeat", ""),
    ],
)
def test_an_experiment_is_said_to_be(texts: tuple[str, ...], arm: str, words: str) -> None:
    assert read(*texts)[arm].effect == words


@pytest.mark.parametrize(
    ("texts", "place", "rule", "words"),
    [
        pytest.param(
            ("pair/pair 0/20", "process/within_process 0/4", "process/fresh_process 20/20", "process/fixed_order 0/20"),
            ("fixed_order", "process"),
            Effect.ABSENT,
            "agrees too",
            id="processes differ from each other and not in themselves",
        ),
        pytest.param(
            ("call/repeat 20/20~2", "call/one_thread 0/20"),
            ("one_thread", "call"),
            Effect.SEEMS,
            "gone, but too few trials to be sure",
            id="one odd outcome among 21, which happened to be the first",
        ),
    ],
)
def test_the_page_and_the_rules_agree(
    texts: tuple[str, ...], place: tuple[str, str], rule: Effect, words: str, tmp_path: Path
) -> None:
    found = evidence(*texts)
    assert effect(Evidence("kernel", arms=found.results), *place) is rule

    folder = write_sweep(tmp_path / "sweep", dataclasses.replace(DIAGNOSED, evidence=found))
    (view,) = model_views(load_history([folder]), {})
    shown = {one.arm.name: one.effect for kind in view.arms for one in kind.arms}
    assert shown[place[0]] == words


def test_bounds_are_those_of_the_counts() -> None:
    found = read("call/repeat 10/20")["repeat"]
    assert found.share == 0.5
    assert found.low == pytest.approx(0.272, abs=0.001)
    assert found.high == pytest.approx(0.728, abs=0.001)


def test_counts_that_no_experiment_reaches_are_not_computed_with() -> None:
    assert read("call/repeat 999999999/999999999", "call/one_thread 1/999999999")["one_thread"].effect == ""


def test_the_base_comes_first_and_what_was_not_run_last() -> None:
    found = read("call/busy (why)", "call/one_thread 0/20", "call/repeat 20/20", "pair/pair 8/8")
    assert list(found) == ["repeat", "one_thread", "pair", "busy"]


def test_experiments_that_were_not_run_share_their_reason() -> None:
    row = dataclasses.replace(DIAGNOSED, evidence=evidence("call/busy (x)", "call/moved (y)", "call/poison (x)"))
    told = [(note, [one.arm.name for one in arms]) for note, arms in reasons(read_evidence(row))]
    assert told == [("x", ["busy", "poison"]), ("y", ["moved"])]


def test_an_experiment_of_a_later_version_is_named_by_its_name() -> None:
    found = RowEvidence.of((ExperimentResult("blue_moon", "call", 20, 3, 4),))
    (one,) = read_evidence(dataclasses.replace(DIAGNOSED, evidence=found))
    assert (one.phrase, one.effect) == ("blue moon", "differs")
