"""The folder of a check: what was written is read back; what is missing, damaged or hostile is refused in one line."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fuzzing import altered, damaged

from hashbench import cli
from hashbench.core.errors import HashbenchError
from hashbench.core.finding import as_json, as_text
from hashbench.core.io import file_digest
from hashbench.tools.pipeline import observed
from hashbench.tools.pipeline.comparing import compare, finding_of
from hashbench.tools.pipeline.observed import RepeatResult, Weights
from tests.tools.pipeline.pipeline_helpers import seen

DOCUMENTS = (
    *("environment.json", "rng.json", "loader.json", "batch_info.json", "model_weights.json", "predictions.json"),
    *("model_inspection.csv", "trace.log.gz", "check.json"),
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "check1"
    made.mkdir()
    observed.write_run(seen(), made)
    observed.seal(made, RepeatResult(True, "", None, 2))
    return made


def rewrite(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    manifest = json.loads((folder / "check.json").read_text())
    change(manifest)
    (folder / "check.json").write_text(json.dumps(manifest))


WRITTEN = {
    "all": (seen(), RepeatResult(True, "", None, 2)),
    "no model": (seen(layers=None, trace=None), None),
}


@pytest.mark.parametrize(("content", "repetition"), WRITTEN.values(), ids=WRITTEN)
def test_a_folder_is_read_back_as_it_was_written(
    content: observed.Observed, repetition: RepeatResult | None, tmp_path: Path
) -> None:
    observed.write_run(content, tmp_path)
    observed.seal(tmp_path, repetition)
    assert observed.read(tmp_path) == observed.CheckRecord(str(tmp_path), content, repetition)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_file_that_is_missing_or_unnamed_is_not_passed_over(name: str, folder: Path) -> None:
    if name != "check.json":
        rewrite(folder, lambda manifest: manifest["files"].pop(name))
        with pytest.raises(HashbenchError, match=f"says nothing of {name}"):
            observed.read(folder)
        observed.seal(folder, None)
    (folder / name).unlink()
    with pytest.raises(HashbenchError, match=f"has no {name}"):
        observed.read(folder)


def test_another_version_is_refused_and_a_pipe_does_not_hang(folder: Path) -> None:
    rewrite(folder, lambda manifest: manifest.update(schema=99))
    with pytest.raises(HashbenchError, match="schema version 99, this hashbench reads 1"):
        observed.read(folder)
    rewrite(folder, lambda manifest: manifest.update(schema=1))
    (folder / "rng.json").unlink()
    os.mkfifo(folder / "rng.json")
    with pytest.raises(HashbenchError, match=r"has no rng\.json"):
        observed.read(folder)


@pytest.mark.parametrize("bad", ["no folder", "an empty folder", "a file"])
def test_what_is_no_check_is_one_line_and_exit_code_2(
    bad: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "check2"
    if bad == "an empty folder":
        other.mkdir()
    if bad == "a file":
        other.write_text("{}")

    code = cli.main(["pipeline", "compare", str(folder), str(other)])
    assert code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_two_folders_that_agree_are_exit_code_0_and_others_1(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "check2"
    other.mkdir()
    observed.write_run(seen(weights=Weights(None, None)), other)
    observed.seal(other, None)
    assert cli.main(["pipeline", "compare", str(folder), str(folder)]) == 0
    assert "agree" in capsys.readouterr().out
    assert cli.main(["pipeline", "compare", str(folder), str(other), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["first"] == "initial weights"


# ------------------------------------------------------------------------------------------------------ fuzzing


def survives(folder: Path) -> bool:
    """Whether the folder is refused in one line; else whether it is compared without a fault."""
    try:
        read, whole = observed.read(folder), observed.CheckRecord("whole", seen(), None)
        for pair in ((read, whole), (whole, read)):
            verdict = compare(*pair)
            finding = finding_of(verdict, names=("a", "b"), folders=(folder, folder))
            as_json(finding)
            as_text(finding).encode()
    except HashbenchError as error:
        return "\n" not in str(error)
    return True


def fit(folder: Path) -> None:
    """Do what somebody would who wants the damage to be believed."""
    rewrite(folder, lambda manifest: manifest["files"].update({n: file_digest(folder / n) for n in manifest["files"]}))


@pytest.mark.parametrize("name", DOCUMENTS)
def test_damage_is_refused_and_where_it_fits_the_digests_refused_or_compared(name: str, folder: Path) -> None:
    for what, bad in damaged((folder / name).read_bytes(), flips=8, cuts=4):
        (folder / name).write_bytes(bad)
        if name == "check.json":  # a bit in its white space changes nothing
            assert survives(folder), what
            continue
        with pytest.raises(HashbenchError, match=f"{name} is truncated, changed"):
            observed.read(folder)
        sealed = (folder / "check.json").read_text()
        fit(folder)
        assert survives(folder), what
        (folder / "check.json").write_text(sealed)


@pytest.mark.parametrize("name", [name for name in DOCUMENTS if name.endswith(".json")])
def test_a_sender_who_fits_the_digests_can_neither_break_nor_hang_it(name: str, folder: Path) -> None:
    for what, document in altered(json.loads((folder / name).read_text()), most=60):
        (folder / name).write_text(json.dumps(document))
        if name != "check.json":
            fit(folder)
        assert survives(folder), what
