"""The specimens of torch's own kernels, of which the machine decides whether an item's rows depend on the number of
items: torch alone says first in which batches they do, and exactly that is the verdict."""

from __future__ import annotations

import copy
import csv

import pytest
import torch

from hashbench.core.check.model import run_model
from hashbench.core.records import BATCH_INVARIANCE, ModelSpec, RunOptions
from hashbench.core.run.outputs import bitwise_equal
from hashbench.core.run.rng import reset_rng_state
from hashbench.core.run.settings import deterministic_settings
from hashbench.core.run.workload import Workload
from hashbench.core.suites import registry
from hashbench.core.suites.csv_file import data_folder

BY_TORCH = "by torch alone"
OPTIONS = RunOptions(mode=BATCH_INVARIANCE, deterministic="off", threads=1, diagnose_budget=10.0)


def lines() -> dict[str, dict[str, str]]:
    with (data_folder() / "specimens.csv").open(newline="", encoding="utf-8") as file:
        return {line["name"]: line for line in csv.DictReader(file)}


LINES = lines()
NATURAL = [name for name, line in LINES.items() if line["truth_batch_accuracy"] == BY_TORCH]


@pytest.fixture(scope="module")
def specimens() -> dict[str, ModelSpec]:
    return {spec.name: spec for spec in registry.catalog("specimens")}


def differs_at(workload: Workload) -> int | None:
    """The largest half of the batch whose items torch alone computes otherwise."""
    (x,) = workload.inputs
    model = copy.deepcopy(workload.module).eval()
    with deterministic_settings("off", threads=1), torch.no_grad():
        whole = model(x)
        sizes = (len(x) >> halved for halved in range(1, len(x).bit_length()))
        return next((size for size in sizes if not bitwise_equal(model(x[:size].clone()), whole[:size])), None)


@pytest.mark.parametrize("name", NATURAL)
def test_the_verdict_is_what_torch_alone_does_on_this_machine(
    name: str, specimens: dict[str, ModelSpec], record_property: pytest.RecordProperty
) -> None:
    reset_rng_state(OPTIONS.seed)
    size = differs_at(registry.load(specimens[name], mode="inference"))
    row, line = run_model(specimens[name], OPTIONS), LINES[name]
    if size is None:
        assert (row.accuracy, row.kernel) == ("pass", ""), row.detail
    else:
        assert row.accuracy == f"fail_batch_invariance_at_{size}"
        assert row.kernel in line["truth_batch_kernel"].split()
        said = row.module, row.cause, row.origin
        assert said == (line["truth_batch_module"], line["truth_batch_cause"], "kernel"), row.because
    record_property("probe", f"{name}: {row.accuracy}")


@pytest.mark.parametrize("name", [f"{name}_twin" for name in NATURAL])
def test_its_twin_is_the_same_in_every_batch_on_any_machine(name: str, specimens: dict[str, ModelSpec]) -> None:
    row = run_model(specimens[name], OPTIONS)
    assert (row.accuracy, row.kernel) == ("pass", ""), row.detail
