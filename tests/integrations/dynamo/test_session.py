"""``hashbench dynamo``: its session, and the tables made of what the harness leaves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hashbench.cli import main, tools
from hashbench.core.records import HarnessRow
from hashbench.core.run import environment
from hashbench.integrations.dynamo import harness
from hashbench.integrations.dynamo.session import (
    Note,
    Session,
    chosen_model,
    collect,
    name_of,
    read_harness_rows,
    write,
    write_note,
)
from tests.integrations.dynamo.command_helpers import read, refusal, stop_model
from tests.integrations.dynamo.dynamo_helpers import SCRIPT, a_session


def test_unwritable_folder_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "cannot write" in refusal(capsys, "--results", tmp_path / "file", SCRIPT, "--accuracy")


# --------------------------------------------------------------------------------------------------------- flags


@pytest.mark.usefixtures("no_environment")
def test_only_harness_flags_are_passed_through(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[Session] = []

    def run_harness(session: Session, **_: Any) -> int:
        seen.append(session)
        return 5

    monkeypatch.setattr(harness, "run_harness", run_harness)
    ours = ["--tracer", "python", "--stress", "--fingerprints", "--trace", "on-demand", "--diagnose-budget", "3"]
    theirs = ["--accuracy", "--training", "-d", "cpu", "--trace", "x", "-k", "a b", "--output", str(tmp_path / "a.csv")]
    assert main(["dynamo", *ours, str(SCRIPT), *theirs]) == 5
    (session,) = seen
    assert session.arguments == tuple(theirs)
    assert (session.trace, session.tracer, session.budget) == ("on-demand", "python", 3.0)
    assert session.stress
    assert session.fingerprints
    assert session.mode == "training"
    assert session.folder == str(tmp_path / "a.hashbench")
    assert Session.of(session.environment()) == session


def test_fallback_to_python_tracer_is_said_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = {"key": "e1", "tracer": "python", "tracer_reason": "no C++ compiler was found"}
    asked: list[str] = []
    monkeypatch.setattr(environment, "collect_in_child", lambda **more: asked.append(more["tracer"]) or dict(told))
    ours = Session(folder=str(tmp_path), script=str(SCRIPT), tracer="auto")
    assert tools._write_environment(ours) == "e1"
    assert asked == ["auto"]
    assert capsys.readouterr().err.count("no C++ compiler was found") == 1
    assert json.loads(ours.results.environment.read_text())["tracer"] == "python"


@pytest.mark.parametrize(
    ("chosen", "name"), [("path:/x/m.py,class:Net", "Net"), ("class:Net,path:/x", "Net"), ("a:b", "a:b"), ("", "")]
)
def test_model_of_a_file_is_called_by_its_class(chosen: str, name: str) -> None:
    assert name_of(chosen) == name


@pytest.mark.parametrize(
    ("arguments", "model"), [("x.py --only a --only=b", "b"), ("x.py --only=a --only b", "b"), ("x.py --only", "")]
)
def test_last_model_named_counts(arguments: str, model: str) -> None:
    assert chosen_model(arguments.split()) == model


@pytest.mark.slow
def test_later_command_keeps_row_of_dead_model(miniature: Path, tmp_path: Path) -> None:
    flags = [str(miniature), "--accuracy", f"--output={tmp_path / 'a.csv'}"]
    main(["dynamo", *flags])
    before = read(tmp_path / "a.hashbench" / "hashbench.csv")
    assert len(before) == 3
    assert main(["dynamo", *flags, "--only=slow"]) == 0
    assert read(tmp_path / "a.hashbench" / "hashbench.csv") == before


def test_help_of_the_harness_leaves_nothing(miniature: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(miniature.parent)
    before = sorted(tmp_path.rglob("*.csv")), sorted(miniature.parent.glob("results"))
    assert main(["dynamo", str(miniature), "--accuracy", f"--output={tmp_path / 'a.csv'}", "--help"]) == 0
    assert main(["dynamo", str(miniature), "--help"]) == 0
    assert (sorted(tmp_path.rglob("*.csv")), sorted(miniature.parent.glob("results"))) == before
    assert not (tmp_path / "a.hashbench").exists()


@pytest.mark.slow
def test_ctrl_c_keeps_rows_so_far(miniature: Path, tmp_path: Path) -> None:
    ours = tmp_path / "a.hashbench"
    assert main(["dynamo", str(miniature), "--accuracy", f"--output={tmp_path / 'a.csv'}", "--only=slow"]) == 0
    before = (ours / "hashbench.csv").read_text()
    stop_model(miniature, tmp_path)
    assert sorted(path.name for path in ours.iterdir()) == [
        ".lock",
        "accuracy.csv",
        "environment.json",
        "hashbench.csv",
        "notes",
    ]
    assert {name: row["env"] for name, row in read(ours / "hashbench.csv").items()} == {"slow": "e1"}
    assert main(["dynamo", str(miniature), "--accuracy", f"--output={tmp_path / 'a.csv'}", "--only=slow"]) == 0
    assert (ours / "hashbench.csv").read_text() == before


# ------------------------------------------------------------------------------------------------ both tables


def collected(tmp_path: Path, note: Note, theirs: str, *, ended: str = "") -> list[HarnessRow]:
    session = a_session(tmp_path / "ours")
    session.prepare(anew=True)
    path = tmp_path / "a.csv"
    path.write_text("dev,name,batch_size,accuracy\n" + theirs)
    write_note(session, Note(note.name, status=note.status, csv=str(path), problem=note.problem))
    return collect(session, ended=ended)


@pytest.mark.parametrize(
    ("word", "ours"),
    [
        ("pass", "pass"),
        ("fail_accuracy", "fail_accuracy"),
        ("fail_to_run", "pass"),
        ("OOM", "pass"),
        ("timeout", "timeout"),
        ("model_fail_to_load", "model_fail_to_load"),
        ("infra_error", "crashed"),
        ("fail_to_run_at_batch_4", "pass_due_to_skip"),
    ],
)
def test_word_of_a_row_that_only_the_harness_has(tmp_path: Path, word: str, ours: str) -> None:
    (row,) = collected(tmp_path, Note("m"), f"cpu,m,0,{word}\n")
    assert (row.accuracy, row.harness_accuracy, row.batch_size) == (ours, word, None)


def test_timeout_after_row_shows_both_words(tmp_path: Path) -> None:
    (row,) = collected(tmp_path, Note("m", status="pass"), "cpu,m,4,pass\ncpu,m,0,timeout\n")
    assert (row.accuracy, row.harness_accuracy) == ("pass", "pass, timeout")


def test_status_in_the_tag_column_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("dev,name,batch_size,tag,accuracy\ncpu,m,0,eager_fail_to_run,0\ncpu,n,4,t,pass\n")
    found = read_harness_rows(tmp_path / "a.csv")
    assert [(row.name, row.accuracy) for row in found] == [("m", "eager_fail_to_run"), ("n", "pass")]


def test_model_that_still_runs_is_not_called_dead(tmp_path: Path) -> None:
    assert collected(tmp_path, Note("m"), "") == []
    (row,) = collected(tmp_path, Note("m"), "", ended="it died")
    assert (row.accuracy, row.error) == ("crashed", "it died")


def test_texts_of_models_are_defused(tmp_path: Path) -> None:
    rows = collected(tmp_path, Note("=cmd()", status="=evil()"), "")
    path = write(a_session(tmp_path / "ours"), rows)
    assert "'=cmd()" in path.read_text()
    assert path.read_text().splitlines()[1].endswith(",'=evil()")


def test_sweep_begins_anew_and_only_adds(tmp_path: Path) -> None:
    session = a_session(tmp_path / "ours")
    session.prepare(anew=True)
    write_note(session, Note("m", status="pass"))
    session.prepare(anew=False)
    assert len(collect(session)) == 1
    session.prepare(anew=True)
    assert collect(session) == []
