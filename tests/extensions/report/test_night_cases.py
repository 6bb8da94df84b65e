"""From which nights the reasons of a model are judged: that in which its trouble began, the one before, and those of
one build."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hashbench.core.records import Row
from hashbench.core.report.reasons import Reason
from hashbench.extensions.report.expectations import assess
from hashbench.extensions.report.verdict import headline
from tests.core.report.rows import differing, row, write_night, write_rows

TORCH = {"schema": 1, "key": "e1", "packages": {"torch": "2.14.0"}}
NEXT_TORCH = {"schema": 1, "key": "e1", "packages": {"torch": "2.15.0"}}

PASSES, DIFFERS = row("a"), differing("a")
RARELY = replace(DIFFERS, rate=0.2, trials=20)


def add_night(
    root: Path, day: int, one: Row, *, machine: Mapping[str, Any] = TORCH, digest: str | None = "as it was"
) -> Path:
    """Write a night with one model; ``digest`` of the files of its suite."""
    folder = write_night(root, f"2026-11-{day:02}", one, environment=dict(machine))
    manifest = folder / "torchvision_training" / "sweep.json"
    if digest is not None:
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"digests": {"torchvision": digest}}))
    return folder


def reason(root: Path) -> tuple[Reason, str]:
    (clause,) = assess(
        [root], expected=root.parent / "expected.csv" if (root.parent / "expected.csv").exists() else None
    ).clauses
    return clause.reason, clause.because


def test_a_model_that_comes_and_goes_in_one_build_is_a_flake(tmp_path: Path) -> None:
    for day, one in enumerate((PASSES, DIFFERS, PASSES, PASSES, DIFFERS), start=1):
        add_night(tmp_path, day, one)
    assert reason(tmp_path) == (Reason.FLAKE, "2 of 5 nights of this build")
    assert "1 model got worse: a (flake: 2 of 5 nights of this build, aten.index_put_.default)" in headline(
        assess([tmp_path])
    )


@pytest.mark.parametrize("last", [{"machine": NEXT_TORCH}, {"digest": "edited"}, {"digest": None}])
def test_nights_of_another_build_do_not_count(tmp_path: Path, last: dict[str, Any]) -> None:
    for day, one in enumerate((PASSES, DIFFERS, PASSES), start=1):
        add_night(tmp_path, day, one)
    add_night(tmp_path, 4, DIFFERS, **last)
    assert reason(tmp_path)[0] is not Reason.FLAKE


def test_what_changed_later_is_not_blamed(tmp_path: Path) -> None:
    add_night(tmp_path / "nights", 1, PASSES)
    add_night(tmp_path / "nights", 2, DIFFERS, digest="edited")
    add_night(tmp_path / "nights", 3, DIFFERS, digest="edited", machine=NEXT_TORCH)
    expect_a_pass(tmp_path)
    assert reason(tmp_path / "nights") == (Reason.MODEL, "the file of torchvision changed")


def test_what_changed_earlier_is_not_blamed(tmp_path: Path) -> None:
    add_night(tmp_path / "nights", 1, PASSES)
    add_night(tmp_path / "nights", 2, PASSES, machine=NEXT_TORCH)
    add_night(tmp_path / "nights", 3, DIFFERS, machine=NEXT_TORCH, digest="edited")
    expect_a_pass(tmp_path)
    assert reason(tmp_path / "nights") == (Reason.MODEL, "the file of torchvision changed")


def expect_a_pass(folder: Path) -> None:
    write_rows(folder / "expected.csv", [PASSES])


def test_a_rate_tells_a_flake_without_any_night_before(tmp_path: Path) -> None:
    add_night(tmp_path / "nights", 1, RARELY)
    expect_a_pass(tmp_path)
    assert reason(tmp_path / "nights") == (Reason.FLAKE, "4 of 20 replays of this build")


def test_a_model_without_a_row_although_it_was_asked_for_is_of_the_harness(tmp_path: Path) -> None:
    add_night(tmp_path, 1, PASSES)
    folder = add_night(tmp_path, 2, PASSES) / "torchvision_training"
    header = (folder / "accuracy.csv").read_text().splitlines()[0]
    (folder / "accuracy.csv").write_text(f"{header}\n")
    assert reason(tmp_path) == (Reason.MACHINE, "it was asked for and left no row")
