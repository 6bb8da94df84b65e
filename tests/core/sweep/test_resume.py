"""What a second sweep into the same folder does: refuse, or complete what is there and nothing else."""

from __future__ import annotations

import json
import os
import shutil

import pytest
from sweep_helpers import NoExecutor, names_in_csv, snapshot, sweep
from sweep_targets import ran, spec

from hashbench import __version__
from hashbench.core.errors import HashbenchError
from hashbench.core.records import ROW_SCHEMA, RunOptions
from hashbench.core.results.rows import read_rows
from hashbench.core.sweep.run import ModelFinished, SweepOpened, describe_differences


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
    del row["accuracy"]
    path.write_text(json.dumps(row))


def be_a_pipe(path):
    path.unlink()
    os.mkfifo(path)


def be_a_folder(path):
    path.unlink()
    path.mkdir()


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
        pytest.param(be_a_pipe, 1, id="a pipe"),
        pytest.param(be_a_folder, 1, id="a folder"),
        pytest.param(lambda path: path.unlink(), 0, id="gone"),
    ],
)
def test_a_damaged_row_is_set_aside_and_made_again(output, damage, damaged):
    models = [spec("a"), spec("b"), spec("c")]
    sweep(models, output)
    row_file = output / "rows" / "fake.inference.b.json"
    damage(row_file)
    bad = row_file.read_bytes() if row_file.is_file() else b""
    aside = [f"rows/{row_file.name}.unreadable"] * damaged
    events = []

    def note(event):
        events.append(event)
        assert not (isinstance(event, SweepOpened) and row_file.exists()), "somebody could trust it"

    again = sweep(models, output, resume=True, on_event=note)
    assert ran(output) == ["a", "b", "c", "b"]
    assert [row.name for row in again.rows] == names_in_csv(output) == ["a", "b", "c"]
    assert events[0] == SweepOpened(total=3, done=2, unreadable=tuple(aside))
    assert [str(path.relative_to(output)) for path in row_file.parent.glob("*.unreadable*")] == aside
    for name in aside:
        assert (output / name).is_fifo() or (output / name).is_dir() or (output / name).read_bytes() == bad


def test_what_was_set_aside_is_never_overwritten(output):
    sweep([spec("a")], output)
    row_file = output / "rows" / "fake.inference.a.json"
    for number in range(3):
        row_file.write_text(f"damaged {number}")
        sweep([spec("a")], output, resume=True)
    found = sorted((path.name, path.read_text()) for path in row_file.parent.glob("*.unreadable*"))
    names = [f"{row_file.name}.unreadable{ending}" for ending in ("", ".2", ".3")]
    assert found == [(name, f"damaged {number}") for number, name in enumerate(names)]
    assert ran(output) == ["a"] * 4


@pytest.mark.parametrize("content", ["{", "[]", '{"key": "e1", "previous": 1}', '{"previous": [1]}'])
def test_an_environment_that_cannot_be_read_is_set_aside_and_said(output, content):
    sweep([spec("a")], output)
    (output / "environment.json").write_text(content)
    events = []
    sweep([spec("a")], output, environment={"key": "e2"}, resume=True, on_event=events.append)
    assert events == [SweepOpened(total=1, done=1, unreadable=("environment.json.unreadable",))]
    assert (output / "environment.json.unreadable").read_text() == content
    assert json.loads((output / "environment.json").read_text()) == {"key": "e2"}


@pytest.mark.parametrize(
    "change", [{"newer": 1}, {"accuracy": "newer"}, {"schema": ROW_SCHEMA + 1}, {"evidence": {"newer": 1}}], ids=str
)
@pytest.mark.parametrize("ending", ["json", "first"])
def test_a_row_of_another_version_is_refused_and_nothing_is_touched(output, change, ending):
    sweep([spec("a"), spec("b")], output)
    path = output / "rows" / "fake.inference.b.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "hashbench": "9.8.7", **change}))
    path.rename(path.with_suffix(f".{ending}"))
    (output / "rows" / "fake.inference.a.json").write_text("damaged")
    (output / "rows" / "fake.inference.b.draft").write_text("kept")
    before = snapshot(output)
    with pytest.raises(
        HashbenchError, match=rf"hashbench 9\.8\.7 wrote it .* this is hashbench {__version__} "
    ) as caught:
        sweep([spec("a"), spec("b")], output, resume=True, executor=NoExecutor())
    assert "Use the hashbench that wrote it, or choose another --output." in str(caught.value)
    assert snapshot(output) == before


def test_a_row_that_lacks_fields_is_kept(output):
    sweep([spec("a")], output)
    path = output / "rows" / "fake.inference.a.json"
    row = {name: value for name, value in json.loads(path.read_text()).items() if value not in ("", None)}
    for name in ("evidence", "schema", "hashbench"):
        del row[name]
    path.write_text(json.dumps(row))
    before = path.read_bytes()
    assert [one.name for one in sweep([spec("a")], output, resume=True, executor=NoExecutor()).rows] == ["a"]
    assert path.read_bytes() == before


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


@pytest.mark.parametrize(
    "fields",
    [
        {"schema": 2},
        {"schema": 99},
        {"rows": 99},
        {"rows": 0},
        {"schema": None},
        {"newer": 1},
        {"options": {"newer": 1}},
        {"options": {"mode": "newer"}},
    ],
    ids=str,
)
def test_a_folder_of_another_schema_is_named_and_not_touched(output, fields):
    sweep([spec("a")], output)
    path = output / "sweep.json"
    manifest = json.loads(path.read_text())
    options = {**manifest["options"], **fields.get("options", {})}
    path.write_text(json.dumps({**manifest, **fields, "options": options}))
    before = snapshot(output)
    with pytest.raises(
        HashbenchError, match=r"cannot resume .*(sweep\.json has|its rows have schema).* this is hashbench"
    ):
        sweep([spec("a")], output, resume=True)
    assert snapshot(output) == before


HERE = f"this is hashbench {__version__} (schema 1)"
MANIFEST = {
    "schema": 1,
    "hashbench": "9.8.7",
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
        pytest.param(
            {"schema": 2},
            [f"sweep.json has schema 2; hashbench 9.8.7 wrote it (schema 2), {HERE}"],
            id="another version",
        ),
        pytest.param(
            {"rows": 99},
            [f"its rows have schema 99, this hashbench reads 1; hashbench 9.8.7 wrote it (schema 1), {HERE}"],
            id="rows of another version",
        ),
        pytest.param({"partition": {"id": 1, "total": 4}}, ["it was partition 1 of 4 and is 0 of 1"], id="a shard"),
        pytest.param({"options": {"seed": 2}}, ["seed was 2 and is 1"], id="another option"),
        pytest.param(
            {"options": {"seed": 1, "threads": 4}}, ["threads was 4 and is None (--jobs sets it, too)"], id="jobs"
        ),
        pytest.param(
            {"options": {"seed": 1, "tracer": "native"}}, ["tracer was 'native' and is 'auto'"], id="another tracer"
        ),
        pytest.param(
            {"options": {"seed": 1, "backend": "inductor"}}, ["backend was 'inductor' and is ''"], id="another backend"
        ),
        pytest.param({"options": {"seed": 1, "stress": False}}, [], id="an option that one of them lacks"),
        pytest.param({"options": None}, ["seed was 1337 and is 1"], id="damaged"),
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


@pytest.mark.parametrize(
    ("before", "now", "again"),
    [
        pytest.param({"fake": "1"}, {"fake": "2"}, 2, id="changed"),
        pytest.param({"fake": "1"}, {"fake": "1"}, 0, id="unchanged"),
        pytest.param({}, {"fake": "2"}, 0, id="not known before"),
        pytest.param({"other": "1"}, {"other": "2"}, 0, id="another suite's"),
    ],
)
def test_models_of_a_changed_file_run_again(output, before, now, again):
    specs = [spec("a"), spec("b")]
    sweep(specs, output, digests=before)
    events = []
    executor = None if again else NoExecutor()
    result = sweep(specs, output, resume=True, digests=now, on_event=events.append, executor=executor)
    (opened,) = (event for event in events if isinstance(event, SweepOpened))
    assert (opened.done, sum(opened.outdated.values()), result.ran) == (2 - again, again, again)
    assert names_in_csv(output) == ["a", "b"]
    assert len(list(output.glob("rows/*.outdated"))) == again
    assert json.loads((output / "sweep.json").read_text()).get("digests", {}) == now
    sweep(specs, output, resume=True, digests=now, executor=NoExecutor())  # once is enough
