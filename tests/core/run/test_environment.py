"""What of a machine counts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hashbench.core.errors import HashbenchError
from hashbench.core.run.environment import check_backend, collect, facts_of, variables_that_matter, what_to_do
from hashbench.core.run.settings import preserved


def test_library_variables_count_visible_devices_not():
    variables = {"OMP_NUM_THREADS": "2", "CUDA_VISIBLE_DEVICES": "3", "CUDA_LAUNCH_BLOCKING": "1", "HOME": "/root"}
    assert variables_that_matter(variables) == {"CUDA_LAUNCH_BLOCKING": "1", "OMP_NUM_THREADS": "2"}


@pytest.mark.parametrize(("given", "told"), [(":0:0", ":4096:8"), (":16:8", ":16:8")])
def test_cublas_workspace_is_that_of_a_run(given: str, told: str) -> None:
    assert variables_that_matter({"CUBLAS_WORKSPACE_CONFIG": given}) == {"CUBLAS_WORKSPACE_CONFIG": told}


@pytest.mark.parametrize(
    ("properties", "facts"),
    [
        pytest.param(
            SimpleNamespace(name="NVIDIA H200", total_memory=150_000 * 2**20 + 5, major=9, minor=0),
            {"name": "NVIDIA H200", "memory_mib": 150_000, "capability": [9, 0]},
            id="CUDA",
        ),
        pytest.param(
            SimpleNamespace(
                name="AMD Instinct MI300X", total_memory=2**30, major=9, minor=4, gcnArchName="gfx942:sramecc+"
            ),
            {"name": "AMD Instinct MI300X", "memory_mib": 1024, "capability": "gfx942:sramecc+"},
            id="ROCm",
        ),
        pytest.param(
            SimpleNamespace(name="Intel Max 1550", total_memory=2**30, driver_version="1.6.33578"),
            {"name": "Intel Max 1550", "memory_mib": 1024, "driver": "1.6.33578"},
            id="XPU",
        ),
        pytest.param({"total_memory": 2**30}, {"memory_mib": 1024}, id="a mapping, as MTIA has"),
        pytest.param(None, {}, id="nothing is told"),
    ],
)
def test_what_torch_tells_of_a_device(properties: Any, facts: dict[str, Any]) -> None:
    assert facts_of(properties) == facts


@pytest.mark.parametrize(
    ("wanted", "built_for", "count", "advice"),
    [
        pytest.param("cuda", "", 0, "for the CPU alone: install one for cuda, or choose --device cpu", id="CPU build"),
        pytest.param("cuda", "xpu", 2, "for xpu: install one for cuda, or choose --device xpu", id="another kind"),
        pytest.param("xpu", "cuda", 0, "for cuda: install one for xpu, or choose --device cpu", id="and not there"),
        pytest.param("cuda", "cuda", 0, "look at its driver and at variables such as CUDA_VISIBLE", id="no device"),
        pytest.param("cuda", "cuda", 1, "Choose cuda:0 with --device", id="a number too high, of one"),
        pytest.param("cuda", "cuda", 4, "Choose cuda:0 to cuda:3 with --device", id="a number too high, of four"),
    ],
)
def test_missing_device_gives_advice(wanted: str, built_for: str, count: int, advice: str) -> None:
    assert advice in what_to_do(wanted, built_for=built_for, count=count)


def test_environment_lists_every_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    properties = [SimpleNamespace(name=name, total_memory=2**30) for name in ("Max 1100", "Max 1550")]
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    module = SimpleNamespace(get_device_properties=lambda index: properties[index])
    monkeypatch.setattr(torch, "get_device_module", lambda _kind: module)
    with preserved():
        torch.set_float32_matmul_precision("high")
        told = collect("xpu:1")["device"]
    assert told == {
        "type": "xpu",
        "count": 2,
        "name": "Max 1550",
        "memory_mib": 1024,
        "each": [{"name": "Max 1100", "memory_mib": 1024}, {"name": "Max 1550", "memory_mib": 1024}],
        "tf32": "off",
    }


@pytest.mark.parametrize(
    ("name", "tip"),
    [("inductr", "Did you mean inductor?"), ("nothing like it", "It has: ")],
)
def test_an_unknown_backend_of_the_compiler_is_named(name: str, tip: str) -> None:
    with pytest.raises(HashbenchError) as caught:
        check_backend(name)
    assert caught.value.what == f"torch.compile has no backend {name!r}"
    assert caught.value.tip.startswith(tip)
    check_backend("inductor")
    check_backend("")
