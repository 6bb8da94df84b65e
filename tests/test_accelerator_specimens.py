"""Specimens of accelerators: what they are on a CPU, and on a GPU that each shows what its written truth says."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from hashbench import cli
from hashbench.core.errors import HashbenchError
from hashbench.core.records import MODES, ModelSpec, Row
from hashbench.core.results.rows import read_rows
from hashbench.core.run.settings import preserved
from hashbench.core.suites import registry
from hashbench.core.suites.csv_file import data_folder
from tests.test_specimens import MODE_OF, SPECIMENS, agrees, untrue

SPECS: Mapping[str, ModelSpec] = {spec.name: spec for spec in registry.catalog("specimens") if spec.devices}
SLOTS = data_folder() / "specimens" / "_atomic_slots.py"


def sweep(names: list[str], folder: Path, *, mode: str, device: str) -> dict[str, Row]:
    """The rows of a sweep of these specimens. A model that differs makes the exit code 1 on no device."""
    command = ["sweep", "--suite", "specimens", f"--{mode}", "--device", device, "--output", str(folder)]
    assert cli.main([*command, "--only", *names]) == 0
    return {row.name: row for row in read_rows(folder / "accuracy.csv")}


# ------------------------------------------------------------------------------------------------- what is written


def test_every_kind_of_difference_of_a_gpu_is_planted() -> None:
    """Of those that issue 6 lists; each has a twin, which test_specimens.py checks."""
    kernels = {SPECIMENS[name]["truth_kernel"] for name in SPECS}
    assert kernels >= {
        *("aten.scatter_add.default", "aten.index_add.default", "aten.embedding_dense_backward.default"),
        *("aten.upsample_bilinear2d_backward.default", "aten.grid_sampler_2d_backward.default"),
        *("aten.median.dim", "aten.bmm.default", "aten._scaled_dot_product_efficient_attention_backward.default"),
        *("aten.convolution_backward.default", "aten.empty.memory_format"),
    }
    causes = {SPECIMENS[name]["truth_cause"] for name in SPECS}
    assert causes >= {"accumulation_order", "unordered_output", "uninitialized_memory"}
    assert causes >= {"external_mutation", "global_settings"}


@pytest.mark.parametrize("name", SPECS)
def test_the_note_says_what_a_gpu_has_shown(name: str) -> None:
    """The rows are in ``results/measured``; a run on another GPU corrects note and truth where they differ."""
    seen = SPECS[name].note.rpartition("(")[2].rstrip(")")
    assert seen == "seen on an H100" or seen.startswith("expected; on an H100 ")
    assert SPECS[name].devices == ("cuda",)


# ----------------------------------------------------------------------------------------------------- on a CPU


@pytest.mark.parametrize("name", SPECS)
def test_it_is_built_and_runs_on_a_cpu(name: str) -> None:
    mode = MODE_OF[name]
    with preserved():
        torch.manual_seed(0)
        workload = registry.load(SPECS[name], mode=mode)
        with torch.set_grad_enabled(mode == "training"):
            found = workload.module(*workload.inputs)
        if mode == "training":
            found.square().mean().backward()
            gradients = [parameter.grad for parameter in workload.module.parameters()]
            assert (
                any(gradient is not None and bool(gradient.any()) for gradient in gradients) or not found.requires_grad
            )
    assert found.numel() > 1
    if name.endswith("_twin"):  # what a specimen leaves unwritten may be anything
        assert bool(found.isfinite().all())
        assert float(found.detach().std()) > 0


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_on_a_cpu_all_of_them_are_skipped_with_the_device_that_they_need(mode: str, tmp_path: Path) -> None:
    rows = sweep(list(SPECS), tmp_path, mode=mode, device="cpu")
    assert {(row.accuracy, row.error) for row in rows.values()} == {("pass_due_to_skip", "needs cuda")}
    assert not list(tmp_path.glob("traces/*"))


INTERPRETED = """
import runpy, sys, torch
order_by_key = runpy.run_path(sys.argv[1])["atomic_slots"]().order_by_key
keys = torch.randint(7, (1000,), generator=torch.Generator().manual_seed(0))
order = order_by_key(keys, 9)
assert torch.equal(order.sort().values, torch.arange(1000))
assert torch.equal(keys[order], keys.sort().values)
print("sorted")
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_the_sort_by_atomic_counters_sorts(monkeypatch: pytest.MonkeyPatch) -> None:
    """In Triton's interpreter, in a process of its own: triton reads the variable once."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    command = [sys.executable, "-P", "-c", INTERPRETED, str(SLOTS.parent / "accelerators.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "sorted\n", done.stderr


def test_files_that_begin_with_an_underscore_are_no_zoo() -> None:
    unknown = ModelSpec(suite="specimens", name="order_by_key")
    with pytest.raises(HashbenchError) as caught:
        registry.load(unknown, mode="inference")
    assert SLOTS.exists()
    assert "_atomic_slots" not in str(caught.value)


# ----------------------------------------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
@pytest.mark.parametrize("name", SPECS)
def test_row_says_the_truth_on_a_gpu(name: str, tmp_path: Path) -> None:
    row = sweep([name], tmp_path, mode=MODE_OF[name], device="cuda")[name]
    assert untrue(row) == {}, f"{row.detail} {row.evidence.text} {row.error}".strip()
    if agrees(row.accuracy, "eager_two_runs_differ") and row.cause != "global_settings":
        assert row.repro
