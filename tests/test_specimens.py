"""The planted faults, through the command line: every row must say what the specimen's own truth says.

The truth is in ``models/specimens.csv``, in the columns that begin with ``truth_``; an empty cell leaves that open.
"""

from __future__ import annotations

import csv
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

import hashbench
from hashbench.records import MODES, ORIGINS, Row
from hashbench.report.csvfile import read_rows
from hashbench.suites.data import data_folder

PACKAGE = Path(hashbench.__file__).parent
TRUTH = "truth_"


def specimens() -> dict[str, dict[str, str]]:
    with (data_folder() / "specimens.csv").open(newline="", encoding="utf-8") as file:
        return {line["name"]: line for line in csv.DictReader(file)}


SPECIMENS = specimens()
RUNNABLE = [(name, mode) for name, line in SPECIMENS.items() for mode in MODES if not line[f"skip_{mode}"]]
SKIPPED = [(name, mode) for name, line in SPECIMENS.items() for mode in MODES if line[f"skip_{mode}"]]


def in_words(pairs: list[tuple[str, str]]) -> list[str]:
    return [f"{name} in {mode}" for name, mode in pairs]


@pytest.fixture(scope="session")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Row]:
    """The rows of one sweep a mode over the whole suite, by name and mode."""
    found = {}
    for mode in MODES:
        folder = tmp_path_factory.mktemp("specimens") / mode
        sweep(folder, mode=mode)
        found.update({(row.name, row.mode): row for row in read_rows(folder / "accuracy.csv")})
    return found


def sweep(folder: Path, *, mode: str) -> None:
    command = [sys.executable, "-m", "hashbench", "sweep", "--suite", "specimens", f"--{mode}", "--output", str(folder)]
    # The races need a second thread, whatever number of cores this machine has.
    done = subprocess.run([*command, "--threads", "2"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def untrue(row: Row, truth: Mapping[str, str]) -> dict[str, tuple[str, object]]:
    """Columns of ``row`` that are not as ``truth`` says, each with what was expected and what was found."""
    said = {column.removeprefix(TRUTH): text for column, text in truth.items() if column.startswith(TRUTH) and text}
    return {
        column: (text, getattr(row, column)) for column, text in said.items() if not agrees(getattr(row, column), text)
    }


def agrees(found: object, text: str) -> bool:
    if text == ">0":
        return isinstance(found, int) and found > 0
    return str(found) == text


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mode"), RUNNABLE, ids=in_words(RUNNABLE))
def test_row_says_the_truth(name: str, mode: str, rows: dict[tuple[str, str], Row]) -> None:
    row = rows[name, mode]
    assert untrue(row, SPECIMENS[name]) == {}, f"{row.detail} {row.error}".strip()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mode"), SKIPPED, ids=in_words(SKIPPED))
def test_skipped_mode_gives_its_reason(name: str, mode: str, rows: dict[tuple[str, str], Row]) -> None:
    row = rows[name, mode]
    assert row.accuracy == "pass_due_to_skip"
    assert SPECIMENS[name][f"skip_{mode}"] in row.error


@pytest.mark.slow
def test_operator_without_deterministic_kernel_is_named_and_run_with_warnings(
    rows: dict[tuple[str, str], Row],
) -> None:
    row = rows["voxel_grid", "inference"]
    assert (row.deterministic, row.nondeterministic_op) == ("warn", "aten.put_.default")


@pytest.mark.parametrize("origin", ORIGINS)
def test_every_origin_has_a_specimen(origin: str) -> None:
    assert any(line[f"{TRUTH}origin"] == origin for line in SPECIMENS.values())


@pytest.mark.parametrize("name", [name for name in SPECIMENS if not name.endswith("_twin")])
def test_every_specimen_has_a_clean_twin_that_runs_in_the_same_modes(name: str) -> None:
    twin = SPECIMENS[f"{name}_twin"]
    assert twin[f"{TRUTH}accuracy"] == "pass"
    assert [twin[f"skip_{mode}"] for mode in MODES] == [SPECIMENS[name][f"skip_{mode}"] for mode in MODES]


def test_no_twin_is_without_its_specimen() -> None:
    assert all(name.removesuffix("_twin") in SPECIMENS for name in SPECIMENS)


def test_every_specimen_says_whether_it_differs_and_why() -> None:
    silent = [name for name, line in SPECIMENS.items() if not (line["note"] and line[f"{TRUTH}accuracy"])]
    blameless = [
        name
        for name, line in SPECIMENS.items()
        if (line[f"{TRUTH}accuracy"] == "eager_two_runs_differ") != bool(line[f"{TRUTH}origin"])
    ]
    assert (silent, blameless) == ([], [])


def test_truth_columns_are_columns_of_a_row() -> None:
    truths = {column.removeprefix(TRUTH) for column in SPECIMENS["message_passing"] if column.startswith(TRUTH)}
    assert truths <= set(Row.__dataclass_fields__)


def test_hashbench_knows_no_specimen_by_name() -> None:
    # An installed wheel holds the zoo inside the package; its own files may name what they define.
    source = "\n".join(path.read_text() for path in PACKAGE.rglob("*.py") if "models" not in path.parts)
    assert [name for name in SPECIMENS if name in source] == []
