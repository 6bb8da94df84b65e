"""What a second sweep into the same folder does: refuse, or complete what is there and nothing else."""

from __future__ import annotations

import json
import shutil

import pytest
from sweep_helpers import NoExecutor, names_in_csv, snapshot, sweep
from sweep_targets import ran, spec

from hashbench.errors import HashbenchError
from hashbench.records import ROW_SCHEMA, RunOptions
from hashbench.results.rows import read_rows
from hashbench.sweep.run import ModelFinished, SweepOpened, describe_differences


def test_a_folder_with_results_is_refused_and_not_touched(output):
    sweep([spec("a")], output)
    before = snapshot(output)
    with pytest.raises(HashbenchError, match=r"already holds the results of a sweep.*--resume"):
        sweep([spec("a")], output)
    assert snapshot(output) == before


@pytest.mark.parametrize("name", ["accuracy.csv", "sweep.json", "rows/fake.inference.a.json"])
def test_somebody_elses_results_are_refused_and_get_no_lock_file(output, name):
    (output / name).parent.mkdir(parents=True)
    (output / name).write_text("dev,name\n")
    before = snapshot(output)
    with pytest.raises(HashbenchError, match="already holds"):
        sweep([spec("a")], output)
    assert snapshot(output) == before


def test_resume_without_a_sweep_json_is_refused(output):
    output.mkdir()
    (output / "accuracy.csv").write_text("dev,name\n")
    with pytest.raises(HashbenchError, match=r"sweep\.json is missing"):
        sweep([spec("a")], output, resume=True)
    assert (output / "accuracy.csv").read_text() == "dev,name\n"


def test_resume_in_a_new_folder_simply_starts(output):
    assert len(sweep([spec("a")], output, resume=True).rows) == 1


@pytest.mark.parametrize("name", ["results", "moved"])
def test_resume_of_a_complete_sweep_runs_nothing_wherever_its_folder_was_moved(output, name):
    first = sweep([spec("a"), spec("b")], output)
    moved = output.rename(output.with_name(name))
    assert sweep([spec("a"), spec("b")], moved, resume=True, executor=NoExecutor()).rows == first.rows


def cut(path):
    path.write_bytes(path.read_bytes()[:-20])


def drop_a_field(path):
    row = json.loads(path.read_text())
    del row["kernel"]
    path.write_text(json.dumps(row))


@pytest.mark.parametrize(
    ("damage", "damaged"),
    [
        pytest.param(cut, 1, id="cut off"),
        pytest.param(lambda path: path.write_bytes(b""), 1, id="empty"),
        pytest.param(lambda path: path.write_bytes(b"\xff\xfe\x00"), 1, id="not text"),
        pytest.param(lambda path: path.write_text("[" * 100_000), 1, id="nested without end"),
        pytest.param(lambda path: path.write_text("[]"), 1, id="not an object"),
        pytest.param(drop_a_field, 1, id="a field is missing"),
        pytest.param(lambda path: shutil.copy(path.with_name("fake.inference.a.json"), path), 1, id="of another model"),
        pytest.param(lambda path: path.unlink(), 0, id="gone"),
    ],
)
def test_a_damaged_row_is_made_again(output, damage, damaged):
    models = [spec("a"), spec("b"), spec("c")]
    sweep(models, output)
    row_file = output / "rows" / "fake.inference.b.json"
    damage(row_file)
    events = []

    def note(event):
        events.append(event)
        assert not (isinstance(event, SweepOpened) and row_file.exists()), "somebody could trust it"

    again = sweep(models, output, resume=True, on_event=note)
    assert ran(output) == ["a", "b", "c", "b"]
    assert [row.name for row in again.rows] == names_in_csv(output) == ["a", "b", "c"]
    assert events[0] == SweepOpened(total=3, done=2, damaged=damaged)


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda path: path.unlink(), id="gone"),
        pytest.param(cut, id="cut off"),
        pytest.param(lambda path: path.write_text(path.read_text() * 2), id="doubled"),
    ],
)
def test_the_csv_is_rebuilt_from_the_rows(output, damage):
    first = sweep([spec("a"), spec("b")], output)
    damage(output / "accuracy.csv")
    sweep([spec("a"), spec("b")], output, resume=True)
    assert read_rows(output / "accuracy.csv") == list(first.rows)


def test_a_row_that_vanishes_while_the_sweep_runs_is_missed(output):
    def remove_row(event):
        if isinstance(event, ModelFinished) and event.row.name == "a":
            (output / "rows" / "fake.inference.a.json").unlink()

    with pytest.raises(HashbenchError, match=r"1 files in .*rows were damaged or removed"):
        sweep([spec("a"), spec("b")], output, on_event=remove_row)
    assert names_in_csv(output) == ["b"]


def test_leftovers_of_killed_workers_are_cleared_away(output):
    sweep([spec("a")], output)
    leftover = output / "rows" / ".fake.inference.b.json.123.tmp"
    leftover.write_text("{")
    sweep([spec("a")], output, resume=True)
    assert not leftover.exists()


def test_resume_of_another_sweep_says_what_differs(output):
    sweep([spec("a"), spec("b")], output)
    before = snapshot(output)
    with pytest.raises(HashbenchError, match=r"mode was 'inference' and is 'training'.*no longer b, now c"):
        sweep([spec("a"), spec("c")], output, options=RunOptions(mode="training"), resume=True)
    assert snapshot(output) == before


@pytest.mark.parametrize("fields", [{"schema": 2}, {"schema": 99}, {"rows": 99}, {"schema": None}])
def test_a_folder_of_another_schema_is_named_and_not_touched(output, fields):
    """Its rows lack fields or mean something else; taken for damaged ones, they would be thrown away."""
    sweep([spec("a")], output)
    path = output / "sweep.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    before = snapshot(output)
    with pytest.raises(HashbenchError, match=r"cannot resume .*(sweep\.json has version|its rows have schema)"):
        sweep([spec("a")], output, resume=True)
    assert snapshot(output) == before


MANIFEST = {
    "schema": 1,
    "rows": 1,
    "suites": ["s"],
    "options": {"seed": 1},
    "partition": {"id": 0, "total": 1},
    "models": [["s", "a"], ["s", "b"]],
}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        pytest.param({}, [], id="the same"),
        pytest.param({"schema": 2}, ["sweep.json has version 2, this hashbench writes 1"], id="another version"),
        pytest.param(
            {"rows": 99}, [f"its rows have schema 99, this hashbench writes {ROW_SCHEMA}"], id="rows of another version"
        ),
        pytest.param({"rows": ROW_SCHEMA - 1}, [], id="rows of an older version, which lack columns"),
        pytest.param({"partition": {"id": 1, "total": 4}}, ["it was partition 1 of 4 and is 0 of 1"], id="a shard"),
        pytest.param({"options": {"seed": 2}}, ["seed was 2 and is 1"], id="another option"),
        pytest.param(
            {"options": {"seed": 1, "threads": 4}}, ["threads was 4 and is absent (--jobs sets it, too)"], id="jobs"
        ),
        pytest.param(
            {"options": {"seed": 1, "tracer": "native"}}, ["tracer was 'native' and is 'python'"], id="another tracer"
        ),
        pytest.param({"options": {"seed": 1, "tracer": "python"}}, [], id="the tracer of sweeps that name none"),
        pytest.param({"options": None}, ["seed was absent and is 1"], id="damaged"),
        pytest.param({"suites": ["t"]}, ["suites were ['t'] and are ['s']"], id="another suite"),
        pytest.param({"models": [["s", "a"]]}, ["models: now b"], id="a model more"),
        pytest.param({"models": [["s", "b"], ["s", "a"]]}, ["the models come in another order"], id="another order"),
        pytest.param(
            {"models": [["s", x] for x in "abcdefg"]}, ["models: no longer c, d, e and 2 more"], id="fewer models"
        ),
    ],
)
def test_what_differs_between_two_sweeps(change, said):
    assert describe_differences({**MANIFEST, **change}, MANIFEST) == said


def test_a_resumed_sweep_keeps_the_environment_of_its_earlier_rows(output):
    models = [spec("a"), spec("b")]
    sweep(models, output, environment={"key": "e1", "torch": "2.15"})
    (output / "rows" / "fake.inference.b.json").unlink()
    for _ in range(2):
        again = sweep(models, output, environment={"key": "e2", "torch": "2.16"}, resume=True)
    assert [row.env for row in again.rows] == ["e1", "e2"]
    content = json.loads((output / "environment.json").read_text())
    assert (content["key"], content["previous"]) == ("e2", [{"key": "e1", "torch": "2.15"}])


def test_a_sweep_is_resumed_by_the_tracer_that_traced_whatever_was_asked_for(output):
    models = [spec("a")]
    for wanted in ("auto", "python"):
        options = RunOptions(tracer=wanted)
        sweep(models, output, options=options, environment={"key": "e1", "tracer": "python"}, resume=True)
    with pytest.raises(HashbenchError, match="tracer was 'python' and is 'native'"):
        sweep(models, output, environment={"key": "e2", "tracer": "native"}, resume=True)
    manifest = output / "sweep.json"
    manifest.write_text(manifest.read_text().replace('"tracer": "python"', '"tracer": "auto"'))
    sweep(models, output, resume=True)  # on a cluster, where each machine has its own
