"""What a user may name becomes a sweep: CSVs, results folders, expected CSVs, dynamo's files."""

from __future__ import annotations

import json

import pytest

from hashbench.errors import HashbenchError
from hashbench.records import Row
from hashbench.results.load import Selection, kind_of_csv, load_sweep

from .rows import PLAIN, row, write_rows, write_sweep

ENVIRONMENT = {"schema": 1, "key": "e1", "torch": "2.15.0"}


def test_a_results_folder_and_its_csv_are_the_same_sweep(tmp_path):
    folder = write_sweep(tmp_path / "r", PLAIN, environment=ENVIRONMENT)
    from_folder, from_file = load_sweep(folder), load_sweep(folder / "accuracy.csv")
    assert from_folder.rows == from_file.rows == (PLAIN,)
    assert from_folder.environments == {"e1": ENVIRONMENT}
    assert (from_folder.kind, from_folder.label) == ("hashbench", str(folder))


def test_subfolders_make_one_sweep(tmp_path):
    for mode in ("training", "inference"):
        selection = {
            "models": [["torchvision", "resnet18"]],
            "options": {"mode": mode, "device": "cpu", "dtype": "amp", "threads": 2},
        }
        write_sweep(tmp_path / mode, row(mode=mode), environment=ENVIRONMENT, selection=selection)
    loaded = load_sweep(tmp_path)
    assert {one.mode for one in loaded.rows} == {"training", "inference"}
    assert set(loaded.selections) == {
        Selection(frozenset({("torchvision", "resnet18")}), mode=mode, device="cpu", dtype="amp")
        for mode in ("training", "inference")
    }


def test_expected_csvs_bring_their_own_environments(tmp_path):
    for number, mode in enumerate(("training", "inference")):
        write_rows(tmp_path / f"{mode}.csv", [row(mode=mode, env=f"e{number}")])
        content = {"schema": 1, "key": f"e{number}", "threads": number}
        (tmp_path / f"{mode}.environment.json").write_text(json.dumps(content))
    environments = load_sweep(tmp_path).environments
    assert {key: environment["threads"] for key, environment in environments.items()} == {"e0": 0, "e1": 1}


def test_a_resumed_sweep_has_the_environments_of_all_its_parts(tmp_path):
    content = {"key": "e2", "torch": "2.15", "previous": [{"key": "e1", "torch": "2.14"}]}
    loaded = load_sweep(write_sweep(tmp_path / "r", PLAIN, environment=content))
    assert loaded.environments == {"e2": {"key": "e2", "torch": "2.15"}, "e1": {"key": "e1", "torch": "2.14"}}


def test_a_user_folder_without_json_loads(tmp_path):
    loaded = load_sweep(write_sweep(tmp_path / "r", PLAIN))
    assert (loaded.environments, loaded.selections) == ({}, ())


@pytest.mark.parametrize("make", [lambda _: None, lambda path: path.mkdir()], ids=["nothing there", "an empty folder"])
def test_a_path_without_csv_is_refused(tmp_path, make):
    make(tmp_path / "r")
    with pytest.raises(HashbenchError, match=r"accuracy\.csv"):
        load_sweep(tmp_path / "r")


def test_the_same_model_in_two_files_is_refused(tmp_path):
    for part in ("a", "b"):
        write_sweep(tmp_path / part, PLAIN)
    with pytest.raises(HashbenchError, match="twice"):
        load_sweep(tmp_path)


@pytest.mark.parametrize("schema", [0, 99, "2", None, []])
def test_a_selection_of_another_schema_is_named_and_refused(tmp_path, schema):
    asked = {"mode": "training", "device": "cpu", "dtype": ""}
    selection = {"schema": schema, "options": asked, "models": [["torchvision", "resnet18"]]}
    with pytest.raises(HashbenchError, match=r"sweep\.json has schema .* and this hashbench reads schema 1"):
        load_sweep(write_sweep(tmp_path / "r", PLAIN, selection=selection))


@pytest.mark.parametrize(
    "selection",
    [
        {},
        {"models": [["t", "a"]]},
        {"models": ["resnet18"], "options": {"mode": "training", "device": "cpu", "dtype": ""}},
        {"models": 3, "options": {"mode": "training", "device": "cpu", "dtype": ""}},
        {"models": [], "options": []},
    ],
    ids=["says nothing", "no options", "models without suites", "models that are no list", "options that are a list"],
)
def test_a_damaged_selection_is_refused(tmp_path, selection):
    with pytest.raises(HashbenchError, match=r"sweep\.json"):
        load_sweep(write_sweep(tmp_path / "r", PLAIN, selection=selection))


# -------------------------------------------------------------------------------------------------- dynamo

DYNAMO = """\
dev,name,batch_size,accuracy,calls_captured,unique_graphs,graph_breaks,compilation_latency
cpu,resnet18,4,pass,100,1,0,12.345678
cpu,vgg11,0,model_fail_to_load,0,0,0,0
cpu,swin,0,eager_fail_to_run
cpu,alexnet,4,fail_accuracy,8,1,0,1.0
"""

EXPECTED = "name,accuracy,graph_breaks\n\n\n\nresnet18,pass,0\n\n\n\nvgg11,eager_two_runs_differ,7\n"


def test_dynamos_accuracy_csv_is_read_with_its_own_words(tmp_path):
    (tmp_path / "inductor.csv").write_text(DYNAMO.replace("\n", "\r\n"), newline="")
    loaded = load_sweep(tmp_path / "inductor.csv")
    assert loaded.kind == "dynamo"
    assert loaded.rows == (
        Row("cpu", "resnet18", 4, "pass"),
        Row("cpu", "vgg11", None, "model_fail_to_load"),
        Row("cpu", "swin", None, "eager_fail_to_run"),
        Row("cpu", "alexnet", 4, "fail_accuracy"),
    )


def test_dynamos_tag_column_holds_the_status_of_a_padded_row(tmp_path):
    text = "dev,name,batch_size,tag,accuracy,calls_captured\ncpu,a,4,nightly,pass,3\ncpu,b,0,timeout,0,0\n"
    (tmp_path / "d.csv").write_text(text)
    assert [one.accuracy for one in load_sweep(tmp_path / "d.csv").rows] == ["pass", "timeout"]


def test_dynamos_expected_csv_is_read(tmp_path):
    (tmp_path / "inductor_torchbench_training.csv").write_text(EXPECTED)
    loaded = load_sweep(tmp_path)
    assert loaded.kind == "dynamo_expected"
    assert loaded.rows == (Row("", "resnet18", None, "pass"), Row("", "vgg11", None, "eager_two_runs_differ"))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("dev,name,batch_size,accuracy,x\ncpu,a,4,0,0\n", "'0' as accuracy"),
        ("dev,name,batch_size,accuracy,x\ncpu,a,4,1.234,0\n", "as accuracy"),
        ("dev,name,batch_size,accuracy,x\ncpu,a,4,pass,0,9\n", "Expected 5 fields in line 2, saw 6"),
        ("dev,name,batch_size,speedup\ncpu,a,4,1.1\n", "lacks the columns accuracy"),
        ("name,accuracy\na,pass\na,pass\n", "twice: lines 2 and 3"),
        ("name,accuracy\na\n", "'' as accuracy"),
    ],
    ids=["no status", "a number", "too many cells", "a performance run", "the same model twice", "a cut row"],
)
def test_a_damaged_dynamo_file_is_refused(tmp_path, text, says):
    (tmp_path / "d.csv").write_text(text)
    with pytest.raises(HashbenchError, match=says):
        load_sweep(tmp_path / "d.csv")


def test_files_of_two_kinds_make_no_sweep(tmp_path):
    (tmp_path / "a.csv").write_text(DYNAMO)
    (tmp_path / "b.csv").write_text(EXPECTED)
    with pytest.raises(HashbenchError, match="mixes files of dynamo and dynamo_expected"):
        load_sweep(tmp_path)


@pytest.mark.parametrize(
    ("header", "kind"),
    [
        ("dev,name,batch_size,accuracy,suite,mode", "hashbench"),
        ("dev,name,batch_size,accuracy,suite,mode,a_newer_column", "hashbench"),
        ("dev,name,batch_size,accuracy,calls_captured", "dynamo"),
        ("dev,name,batch_size,accuracy", "dynamo"),
        ("name,accuracy", "dynamo_expected"),
        ("x,y", "hashbench"),
    ],
)
def test_the_header_tells_who_wrote_a_csv(header, kind):
    assert kind_of_csv(header.split(",")) == kind
