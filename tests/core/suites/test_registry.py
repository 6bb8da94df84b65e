"""``hashbench list``, and what ``--suite`` stands for."""

from __future__ import annotations

import csv
import dataclasses
import io
import json

import pytest

from hashbench.cli import main
from hashbench.cli.reading import count
from hashbench.core.errors import HashbenchError
from hashbench.core.suites import csv_file, registry

ZOO = """
import hashbench

@hashbench.model(task="toy", batch_size=3, skip_training="no parameters", note="a note")
def sized(batch_size): ...

@hashbench.model(name="never", skip_training="for show", skip_inference="for show", default=False)
def never(): ...
"""


@pytest.fixture
def zoo(tmp_path, monkeypatch):
    (tmp_path / "zoo.py").write_text(ZOO)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("zoo")
def test_a_model_is_listed_with_its_facts_and_why_what_is_skipped(capsys):
    assert main(["list", "--suite", "zoo.py"]) == 0
    headers, _, never, sized, _, total = capsys.readouterr().out.splitlines()
    assert headers.split() == ["suite", "name", "task", "parameters", "batch", "size", "input", "default", "notes"]
    assert never.split(maxsplit=2) == ["zoo", "never", "no training or inference: for show"]
    assert sized.split(maxsplit=5) == ["zoo", "sized", "toy", "3", "yes", "a note; no training: no parameters"]
    assert total == "2 models"


def test_a_model_of_an_accelerator_says_what_it_needs_in_every_format(capsys, monkeypatch, tmp_path):
    (tmp_path / "specimens.csv").write_text("name,devices,note\nraces,cuda xpu,a note\nruns,,\n")
    monkeypatch.setattr(csv_file, "data_folder", lambda: tmp_path)
    assert main(["list", "--suite", "specimens"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if " races " in line]
    assert line.endswith(" a note; needs cuda or xpu")
    assert main(["list", "--suite", "specimens", "--format", "csv"]) == 0
    assert [row["devices"] for row in csv.DictReader(io.StringIO(capsys.readouterr().out))] == ["cuda xpu", ""]
    assert main(["list", "--suite", "specimens", "--format", "json"]) == 0
    assert [row["devices"] for row in json.loads(capsys.readouterr().out)] == [["cuda", "xpu"], []]


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (None, ""),
        (999, "999"),
        (999_499, "999 k"),
        (999_600, "1.00 M"),
        (11_689_512, "11.7 M"),
        (345_000_000, "345 M"),
        (1_235_814_400, "1.24 B"),
    ],
)
def test_a_count_is_short(number, text):
    assert count(number) == text


@pytest.mark.parametrize("form", ["csv", "json"])
@pytest.mark.usefixtures("zoo")
def test_other_formats_have_every_fact_and_nothing_else(form, capsys, zoo):
    assert main(["list", "--suite", "zoo.py", "--format", form]) == 0
    text = capsys.readouterr().out
    _, sized = json.loads(text) if form == "json" else csv.DictReader(io.StringIO(text))
    assert (sized["name"], str(sized["batch_size"]), sized["note"]) == ("sized", "3", "a note")
    assert sized["source"] == str(zoo / "zoo.py")


def test_a_suite_that_is_not_installed_is_listed_with_what_to_do(capsys, monkeypatch):
    timm = dataclasses.replace(registry.BUNDLED["timm"], package="no_such_package")
    monkeypatch.setattr(registry, "BUNDLED", {**registry.BUNDLED, "timm": timm})
    assert main(["list", "--suite", "timm"]) == 0
    said = capsys.readouterr()
    assert "lcnet_050" in said.out
    assert said.err == "hashbench: timm is not installed: pip install 'hashbench[timm]'\n"


def test_all_says_what_it_leaves_out(capsys):
    pytest.importorskip("transformers", reason="comes with the extra huggingface")
    pytest.importorskip("timm", reason="comes with the extra timm")
    assert main(["list", "--suite", "all", "--tiny"]) == 0
    said = capsys.readouterr()
    assert {line.split()[0] for line in said.out.splitlines()[2:-2]} == {"huggingface_tiny", "timm", "torchvision"}
    assert "hashbench: specimens is left out: its models differ on purpose\n" in said.err
    assert "hashbench: timm has no small variant: its models have their full size\n" in said.err


@pytest.mark.slow
def test_a_broken_package_does_not_hide_the_other_suites(capsys, monkeypatch, tmp_path):
    metadata = tmp_path / "broken-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[hashbench.suites]\nbroken = no_such_module\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    assert main(["list"]) == 0
    said = capsys.readouterr()
    assert " resnet18 " in said.out
    assert "cannot use broken of the package broken as a suite: its import raised ModuleNotFoundError" in said.err
    assert main(["list", "--suite", "broken"]) == 2


def test_a_note_that_a_spreadsheet_would_execute_is_defused(capsys, tmp_path):
    path = tmp_path / "strange.py"
    path.write_text(
        "import hashbench\n@hashbench.model(name='=1+1', note='@SUM(A1)')\ndef model(): raise NotImplementedError\n"
    )
    assert main(["list", "--suite", str(path), "--format", "csv"]) == 0
    (row,) = csv.DictReader(io.StringIO(capsys.readouterr().out))
    assert (row["name"], row["note"]) == ("'=1+1", "'@SUM(A1)")


def test_docs_lists_the_pages_and_prints_one(capsys):
    assert main(["docs"]) == 0
    assert "  zoo                    your own models" in capsys.readouterr().out
    for name in ("zoo", "zoo.md", "docs/zoo.md"):
        assert main(["docs", name]) == 0
        assert capsys.readouterr().out.startswith("# Your own models\n")
    assert main(["docs", "../README"]) == 2
    assert "the documentation has no page '../README'" in capsys.readouterr().err


def test_without_torchvision_its_suite_says_how_to_get_it_and_others_run(monkeypatch):
    monkeypatch.setattr(registry, "_importable", lambda module: module != "torchvision")
    with pytest.raises(HashbenchError, match="pip install the torchvision of this torch"):
        registry.require(["torchvision"])
    assert "torchvision" not in registry.choose(["all"], tiny=False).suites


def test_a_digest_follows_the_zoo_file(zoo):
    path = zoo / "zoo.py"
    first = registry.digests(["zoo.py"])
    assert list(first) == ["zoo"]
    assert registry.digests([str(path)]) == first
    path.write_text(ZOO + "\n")
    assert registry.digests(["zoo.py"])["zoo"] != first["zoo"]


def test_a_digest_follows_the_csv_of_a_suite(tmp_path, monkeypatch):
    names = ["specimens", "torchvision"]
    first = registry.digests(names)
    assert list(first) == names
    for name in names:
        (tmp_path / f"{name}.csv").write_text("name\n")
    monkeypatch.setattr(csv_file, "data_folder", lambda: tmp_path)
    assert all(digest != first[name] for name, digest in registry.digests(names).items())


def test_a_zoo_file_is_listed_once_until_it_changes(zoo, monkeypatch):
    listed = []
    monkeypatch.setattr(registry.FileSuite, "catalog", lambda suite: listed.append(suite.name) or ())
    with registry.listed_once():
        for _ in range(2):
            registry.catalog("zoo.py")
            with registry.listed_once():
                registry.catalog("zoo.py")
        assert listed == ["zoo"]
        (zoo / "zoo.py").write_text(ZOO + "\n")
        registry.catalog("zoo.py")
    registry.catalog("zoo.py")
    assert listed == ["zoo"] * 3
