"""The front door of the suites: names, catalogues, and no torch until a model is built."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hashbench.records import HashbenchError, ModelSpec
from hashbench.suites import SUITES, catalog, load


def test_torchvision_is_bundled():
    assert "torchvision" in SUITES


@pytest.mark.parametrize("suite", SUITES)
def test_a_bundled_suite_is_listed_sorted(suite):
    names = [spec.name for spec in catalog(suite)]
    assert names
    assert names == sorted(names)


def test_listing_does_not_import_torch():
    code = (
        "import sys; from hashbench.suites import SUITES, catalog, select;"
        "[select(catalog(suite), mode='training') for suite in SUITES]; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.parametrize(
    ("suite", "said"),
    [("torchvison", "Did you mean torchvision?"), ("", "Choose one of"), ("qqqq", "a Python file with MODELS")],
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
