"""The CSV of a suite: what is read, and what is refused with the line that is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from hashbench.core import io
from hashbench.core.errors import HashbenchError
from hashbench.core.records import ModelSpec
from hashbench.core.suites import csv_file


def write(folder: Path, text: str) -> Path:
    path = folder / "zoo.csv"
    path.write_text(text)
    return path


def test_every_column_reaches_the_spec(tmp_path):
    header = ",".join(csv_file.COLUMNS)
    line = 'net,classification,nets,4,3x8x9,"{""width"": 2}",yes,too big,no eval,cuda xpu,warn,sgd,3,5,2,12,a note'
    assert csv_file.read_suite(write(tmp_path, f"{header}\n{line}\n"), suite="zoo") == (
        ModelSpec(
            suite="zoo",
            name="net",
            task="classification",
            family="nets",
            batch_size=4,
            input_shape=(3, 8, 9),
            arguments={"width": 2},
            default=True,
            skip_training="too big",
            skip_inference="no eval",
            devices=("cuda", "xpu"),
            deterministic="warn",
            optimizer="sgd",
            iterations=3,
            runs=5,
            world_size=2,
            parameters=12,
            note="a note",
        ),
    )


def test_absent_cells_are_none_or_empty_and_names_are_sorted(tmp_path):
    specs = csv_file.read_suite(write(tmp_path, "name,batch_size\nb,\na,2\n"), suite="zoo")
    assert specs == (ModelSpec(suite="zoo", name="a", batch_size=2), ModelSpec(suite="zoo", name="b"))


def test_truth_columns_are_accepted_and_left_out(tmp_path):
    specs = csv_file.read_suite(write(tmp_path, "name,truth_kernel\na,aten.dot\n"), suite="zoo")
    assert specs == (ModelSpec(suite="zoo", name="a"),)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        pytest.param("name,colour\na,red\n", "line 1 has unknown columns: colour", id="unknown column"),
        pytest.param("name,name\na,b\n", "line 1 has columns twice: name", id="column twice"),
        pytest.param("task\nflow\n", "line 1 has no column 'name'", id="no name column"),
        pytest.param("", "line 1 has no column 'name'", id="empty file"),
        pytest.param("name\na\nb\na\n", "line 4 names 'a' again", id="duplicate name"),
        pytest.param("name,task\n,flow\n", "line 2 has no name", id="empty name"),
        pytest.param("name\na,b\n", "line 2 has more cells than the header", id="too many cells"),
        pytest.param('name\n"a\n', "is not CSV", id="open quote"),
        pytest.param("name,batch_size\na,four\n", "line 2 has batch_size='four'", id="batch size in words"),
        pytest.param("name,batch_size\na,0\n", "line 2 has batch_size='0'", id="batch size zero"),
        pytest.param("name,iterations\na,1.5\n", "line 2 has iterations='1.5'", id="iterations with a fraction"),
        pytest.param("name,runs\na,many\n", "line 2 has runs='many'", id="runs in words"),
        pytest.param("name,runs\na,1\n", "line 2 has runs='1': one run has nothing", id="a single run"),
        pytest.param("name,input_shape\na,3x\n", "line 2 has input_shape='3x'", id="shape that ends early"),
        pytest.param("name,arguments\na,{\n", "line 2 has arguments='{': not JSON", id="arguments not JSON"),
        pytest.param("name,arguments\na,[]\n", "line 2 has arguments='[]'", id="arguments not an object"),
        pytest.param("name,default\na,true\n", "line 2 has default='true'", id="default not yes"),
        pytest.param("name,devices\na,cuda:0\n", "line 2 has devices='cuda:0'", id="one device of a kind"),
        pytest.param('name,devices\na,"cuda,xpu"\n', "line 2 has devices='cuda,xpu'", id="devices with a comma"),
        pytest.param("name,deterministic\na,maybe\n", "line 2 has deterministic='maybe'", id="unknown determinism"),
    ],
)
def test_a_bad_file_is_refused_with_its_line(tmp_path, text, said):
    with pytest.raises(HashbenchError) as caught:
        csv_file.read_suite(write(tmp_path, text), suite="zoo")
    assert said in str(caught.value)
    assert "zoo.csv" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [None, b"\xff\xfe"], ids=["missing", "not text"])
def test_an_unreadable_file_is_refused(tmp_path, content):
    path = tmp_path / "zoo.csv"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(HashbenchError, match="cannot read"):
        csv_file.read_suite(path, suite="zoo")


def test_a_wheel_takes_its_models_from_inside_the_package(tmp_path, monkeypatch):
    package = tmp_path / "hashbench"
    for folder, name in ((package / "models", "inside.csv"), (tmp_path / "models", "beside.csv")):
        folder.mkdir(parents=True)
        (folder / name).write_text("name\n")
    monkeypatch.setattr(io, "PACKAGE_PARENT", str(tmp_path))
    assert csv_file.data_folder() == package / "models"
    (package / "models" / "inside.csv").unlink()
    assert csv_file.data_folder() == tmp_path / "models"
    (tmp_path / "models" / "beside.csv").unlink()
    with pytest.raises(HashbenchError, match="models folder"):
        csv_file.data_folder()
