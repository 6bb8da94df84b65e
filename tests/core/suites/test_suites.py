"""The front door of the suites: names, catalogues, and no torch until a model is built."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import types

import pytest
import torch
from torch.utils._pytree import tree_leaves

from hashbench.core.errors import HashbenchError
from hashbench.core.records import ModelSpec
from hashbench.core.suites import csv_file, registry
from hashbench.core.suites.registry import SUITES, catalog, choose, how_to_install, load, names, require


@pytest.mark.parametrize("suite", SUITES)
def test_a_bundled_suite_is_listed_sorted(suite):
    names = [spec.name for spec in catalog(suite)]
    assert names
    assert names == sorted(names)


@pytest.mark.parametrize("suite", ["torchvision", "timm", "huggingface", "huggingface_tiny"])
def test_the_parameters_of_every_model_are_known_but_those_that_quantization_packs(suite):
    assert {spec.task for spec in catalog(suite) if spec.parameters is None} <= {"quantized"}


def test_listing_does_not_import_torch():
    code = (
        "import sys; from hashbench.core.suites.registry import SUITES, catalog;"
        "[catalog(suite) for suite in SUITES]; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.parametrize(
    ("suite", "said"),
    [("torchvison", "Did you mean torchvision"), ("", "Choose one of"), ("qqqq", "the path of a Python file")],
    ids=["near", "empty", "far"],
)
def test_an_unknown_suite_is_refused_with_near_names(suite, said):
    with pytest.raises(HashbenchError) as caught:
        catalog(suite)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("spec", "flags", "said"),
    [
        (ModelSpec(suite="torchvision", name="alexnet", batch_size=2), {"mode": "train"}, "unknown mode 'train'"),
        (ModelSpec(suite="torchvision", name="alexnet"), {"mode": "training"}, "batch size None"),
        (
            ModelSpec(suite="torchvision", name="alexnet", batch_size=2),
            {"mode": "training", "batch_size": 0},
            "batch size 0",
        ),
    ],
    ids=["unknown mode", "no batch size", "batch size zero"],
)
def test_load_refuses_what_does_not_apply(spec, flags, said):
    with pytest.raises(HashbenchError, match=said):
        load(spec, **flags)


def test_all_is_every_installed_suite_but_small_variants_and_the_specimens():
    pytest.importorskip("transformers", reason="comes with the extra huggingface")
    pytest.importorskip("timm", reason="comes with the extra timm")
    chosen = choose(["all"])
    assert chosen.suites == ("huggingface", "timm", "torchvision")
    assert chosen.notes[0] == "specimens is left out: its models differ on purpose"


def test_tiny_takes_the_small_variant_of_each_suite_that_has_one():
    chosen = choose(["huggingface", "torchvision"], tiny=True)
    assert chosen.suites == ("huggingface_tiny", "torchvision")
    assert chosen.notes == ("torchvision has no small variant: its models have their full size",)
    assert choose(["huggingface_tiny"], tiny=True).suites == ("huggingface_tiny",)


def test_a_small_variant_is_no_name_of_its_own():
    assert {"huggingface", "huggingface_tiny"} & set(names()) == {"huggingface"}


def test_every_csv_of_the_data_folder_is_a_bundled_suite():
    assert sorted(SUITES) == sorted(path.stem for path in csv_file.data_folder().glob("*.csv"))


def test_a_new_bundled_suite_is_an_entry_a_csv_and_a_module(tmp_path, monkeypatch):
    (tmp_path / "doubles.csv").write_text("name,batch_size\ntwice,3\n")
    (tmp_path / "doubles_tiny.csv").write_text("name,batch_size\ntwice,1\n")
    monkeypatch.setattr(csv_file, "data_folder", lambda: tmp_path)
    entry = registry.BundledSuite("doubles", variants=(registry.TINY,))
    monkeypatch.setattr(registry, "BUNDLED", {suite.name: suite for suite in entry.with_variants()})
    module = types.ModuleType("hashbench.core.suites.doubles")
    module.load = lambda spec, *, batch_size, mode: (spec.suite, spec.name, batch_size, mode)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert names()[0] == "doubles"
    assert choose(["all"], tiny=True).suites == ("doubles_tiny",)
    (tiny,) = catalog("doubles_tiny")
    assert load(tiny, mode="training") == ("doubles_tiny", "twice", 1, "training")


def test_a_suite_whose_package_is_missing_is_listed_but_not_swept(monkeypatch):
    timm = dataclasses.replace(registry.BUNDLED["timm"], package="no_such_package")
    monkeypatch.setattr(registry, "BUNDLED", {**registry.BUNDLED, "timm": timm})
    assert len(catalog("timm")) > 50
    assert how_to_install("timm") == "pip install 'hashbench[timm]'"
    assert "timm is left out: not installed: pip install 'hashbench[timm]'" in choose(["all"]).notes
    with pytest.raises(HashbenchError) as caught:
        require(["torchvision", "timm"])
    assert str(caught.value) == (
        "cannot sweep timm: the package no_such_package is not installed. Install it: pip install 'hashbench[timm]'"
    )


def test_two_zoo_files_of_one_name_are_refused(tmp_path):
    files = [str(tmp_path / folder / "zoo.py") for folder in ("first", "second")]
    with pytest.raises(HashbenchError, match=r"first/zoo\.py and .*second/zoo\.py have one name.*Rename one"):
        choose(files)
    assert choose([files[0], "torchvision"]).suites == (files[0], "torchvision")


@pytest.mark.parametrize("name", ["timm", "all"])
def test_a_zoo_file_may_not_take_the_name_of_a_bundled_suite(tmp_path, name):
    path = tmp_path / f"{name}.py"
    path.write_text("MODELS = {'a': print}")
    with pytest.raises(HashbenchError, match=rf"has the name of the suite '{name}'.*Rename the file"):
        catalog(str(path))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("suite", "name"),
    [
        ("torchvision", "keypointrcnn_resnet50_fpn"),
        ("timm", "lcnet_050"),
        ("huggingface_tiny", "BertForQuestionAnswering"),
    ],
)
def test_a_seed_makes_the_same_weights_inputs_and_targets_again(suite, name):
    (spec,) = [spec for spec in catalog(suite) if spec.name == name]
    made = []
    for _ in range(2):
        torch.manual_seed(1337)
        workload = load(spec, batch_size=1, mode="training")
        targets = getattr(workload.loss, "keywords", {})
        made.append([*workload.module.state_dict().values(), *tree_leaves((workload.inputs, targets))])
    assert all(map(torch.equal, *made))
    assert load(spec, batch_size=1, mode="inference").loss is None
