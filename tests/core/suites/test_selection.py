"""Which models a sweep takes: dynamo's rules, as a table."""

from __future__ import annotations

import pytest

from hashbench.core.errors import HashbenchError
from hashbench.core.records import ModelSpec
from hashbench.core.suites.selection import Selection

ZOO = tuple(
    ModelSpec(suite="zoo", name=name, default=default, skip_training="int8" if name == "quant" else "")
    for name, default in [
        ("resnet50", False),
        ("alexnet", True),
        ("resnet18", True),
        ("vgg11", False),
        ("quant", True),
    ]
)
UNMARKED = (ModelSpec(suite="plain", name="b"), ModelSpec(suite="plain", name="a"))


def selected(specs=ZOO, **flags):
    return " ".join(spec.name for spec in Selection(**flags).of(specs))


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        pytest.param({}, "alexnet quant resnet18", id="defaults, sorted, skipped ones kept"),
        pytest.param({"which": "all"}, "alexnet quant resnet18 resnet50 vgg11", id="all"),
        pytest.param({"only": ["vgg11"]}, "vgg11", id="only picks a model that is no default"),
        pytest.param({"only": ["vgg11", "alexnet"]}, "alexnet vgg11", id="only several"),
        pytest.param({"filters": ["resnet"]}, "resnet18 resnet50", id="-k searches all models"),
        pytest.param({"filters": ["RES"]}, "resnet18 resnet50", id="-k without regard to case"),
        pytest.param({"filters": ["net$"]}, "alexnet", id="-k is a regular expression"),
        pytest.param({"filters": ["^alex", "50"]}, "alexnet resnet50", id="several -k are alternatives"),
        pytest.param({"filters": ["^a|v"]}, "alexnet vgg11", id="-k with its own alternatives"),
        pytest.param({"excludes": ["RESNET"]}, "alexnet quant", id="-x without regard to case"),
        pytest.param({"excludes": ["^a", "^q"]}, "resnet18", id="several -x"),
        pytest.param({"filters": ["resnet"], "excludes": ["18"]}, "resnet50", id="-k and -x"),
        pytest.param({"exclude_exact": ["alexnet"]}, "quant resnet18", id="exclude exact"),
        pytest.param({"which": "all", "total_partitions": 2}, "alexnet quant", id="first half"),
        pytest.param(
            {"which": "all", "total_partitions": 2, "partition_id": 1},
            "resnet18 resnet50 vgg11",
            id="the last part takes the remainder",
        ),
        pytest.param(
            {"filters": ["resnet|vgg|alex"], "total_partitions": 2},
            "alexnet",
            id="a partition is cut before -k is applied",
        ),
    ],
)
def test_selection(flags, names):
    assert selected(**flags) == names


def test_a_suite_that_marks_no_default_runs_whole():
    assert selected((*ZOO, *UNMARKED)) == "a b alexnet quant resnet18"


@pytest.mark.parametrize("total", [1, 2, 3, 4, 5])
def test_partitions_are_the_whole_list_once(total):
    parts = [Selection(which="all", total_partitions=total, partition_id=index).of(ZOO) for index in range(total)]
    assert sorted(spec.name for part in parts for spec in part) == sorted(spec.name for spec in ZOO)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        pytest.param({"only": ["resnet81"]}, "Did you mean resnet18", id="unknown name with a near one"),
        pytest.param({"only": ["zzzzzzzzzz"]}, "hashbench list", id="unknown name with none near"),
        pytest.param({"exclude_exact": ["alexnot"]}, "Did you mean alexnet", id="unknown name to exclude"),
        pytest.param({"filters": ["("]}, "'(' is not a regular expression", id="-k is no pattern"),
        pytest.param({"excludes": ["*"]}, "'*' is not a regular expression", id="-x is no pattern"),
        pytest.param({"filters": ["nothing"]}, "no model is selected", id="nothing matches"),
        pytest.param(
            {"total_partitions": 2, "partition_id": 3}, "partition 3 of 2 does not exist", id="partition 3 of 2"
        ),
        pytest.param({"total_partitions": 2, "partition_id": 2}, "Give --partition-id 0 to 1", id="partition 2 of 2"),
        pytest.param({"partition_id": -1}, "partition -1 of 1 does not exist", id="negative partition"),
        pytest.param({"total_partitions": 0}, "0 partitions", id="no partitions"),
        pytest.param({"total_partitions": 9}, "no model is selected", id="an empty partition"),
        pytest.param(
            {"only": ["alexnet"], "filters": ["a"]}, "--only cannot be combined with -k:", id="-k beside --only"
        ),
        pytest.param(
            {"only": ["alexnet"], "excludes": ["b"], "total_partitions": 2},
            "--only cannot be combined with -x or --total-partitions: it names each model",
            id="-x and partitions beside --only",
        ),
        pytest.param(
            {"only": ["alexnet"], "exclude_exact": ["alexnet"]}, "no model is selected", id="--only, all of it excluded"
        ),
        pytest.param({"which": "some"}, "Choose one of default, all", id="unknown choice"),
    ],
)
def test_what_cannot_be_selected_is_one_line(flags, said):
    with pytest.raises(HashbenchError) as caught:
        selected(**flags)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
