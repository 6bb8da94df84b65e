"""Which device a worker sees, and how cuBLAS repeats itself: tables on plain values."""

from __future__ import annotations

from typing import Any

import pytest

from hashbench.core.devices.visibility import (
    DeviceAssignment,
    assignments,
    freest,
    kind,
    left_out,
    workspace_config,
    workspace_conflict,
)


def fingerprint(*names: str, hip: str | None = None, memory: float | None = 1000) -> dict[str, Any]:
    """What the child process tells of a machine that has devices of these models."""
    told = {"memory_mib": memory} if memory is not None else {}
    return {"torch": {"hip_build": hip}, "device": {"each": [{"name": name, **told} for name in names]}}


ONE, TWO, FOUR = (fingerprint(*["H200"] * count) for count in (1, 2, 4))
ROCM = fingerprint("MI300", "MI300", hip="7.0")
VARIABLES = {name: f"{name}_VISIBLE_DEVICES" for name in ("CUDA", "HIP", "ROCR")} | {"ZE": "ZE_AFFINITY_MASK"}


@pytest.mark.parametrize(
    ("count", "taken", "device"),
    [
        pytest.param(0, [None, None], None, id="no devices"),
        pytest.param(2, [], 0, id="the first"),
        pytest.param(2, [0], 1, id="the one that is free"),
        pytest.param(2, [1], 0, id="the one that became free"),
        pytest.param(3, [0, 1, 2, 0, 2], 1, id="the one with fewest workers"),
    ],
)
def test_the_next_worker_gets_the_device_with_the_fewest(count: int, taken: list[int | None], device: int) -> None:
    assert freest(count, taken) == device


@pytest.mark.parametrize(
    ("device", "told", "environment", "seen"),
    [
        pytest.param("cpu", {"device": {"type": "cpu"}}, {}, "", id="the CPU"),
        pytest.param("mps", ONE, {}, "", id="a kind without such a variable"),
        pytest.param("cuda", {}, {}, "", id="nothing is told"),
        pytest.param("cuda", ONE, {}, "CUDA 0", id="one GPU"),
        pytest.param("cuda", FOUR, {}, "CUDA 0 1 2 3", id="four GPUs"),
        pytest.param("cuda:1", FOUR, {}, "CUDA 1", id="one of four by number"),
        pytest.param("cuda:4", FOUR, {}, "", id="a number that is not there"),
        pytest.param("cuda", TWO, {"CUDA": "6, 3"}, "CUDA 6 3", id="those that the user made visible, in that order"),
        pytest.param("cuda:1", TWO, {"CUDA": "6,3"}, "CUDA 3", id="a number counts among those"),
        pytest.param("cuda", TWO, {"CUDA": "GPU-8932f937,GPU-1c5e"}, "CUDA GPU-8932f937 GPU-1c5e", id="by UUID"),
        pytest.param("cuda", ONE, {"CUDA": "2,-1,3"}, "CUDA 2", id="the driver stops at what is not a device"),
        pytest.param("cuda", fingerprint("H200", "T400", "H200"), {}, "CUDA 0 2", id="not those of another model"),
        pytest.param("cuda:1", fingerprint("H200", "T400"), {}, "CUDA 1", id="unless asked for by number"),
        pytest.param("cuda", ROCM, {}, "HIP 0 1", id="ROCm"),
        pytest.param("cuda", ROCM, {"HIP": "2,3", "CUDA": "6,7", "ROCR": "1,2"}, "HIP 2 3", id="ROCm, the user's own"),
        pytest.param("cuda", ROCM, {"CUDA": "6,7"}, "HIP 6 7", id="ROCm, with CUDA's variable"),
        pytest.param("cuda", FOUR, {"HIP": "3"}, "CUDA 0 1 2 3", id="no ROCm"),
        pytest.param("xpu", fingerprint("Max", "Max"), {"ZE": "1,0"}, "ZE 1 0", id="XPU"),
    ],
)
def test_what_each_worker_sees(device: str, told: dict[str, Any], environment: dict[str, str], seen: str) -> None:
    variable, *entries = seen.split() or [""]
    expected = [{VARIABLES[variable]: entry} for entry in entries]
    given = {VARIABLES[name]: value for name, value in environment.items()}
    assert [share.variables for share in assignments(device, told, given)] == expected


@pytest.mark.parametrize(("memory", "share"), [(1000, 900.0), (None, None)], ids=["known", "not known"])
def test_workers_may_take_most_of_a_devices_memory(memory: float | None, share: float | None) -> None:
    assert assignments("cuda", fingerprint("H200", memory=memory), {}) == (
        DeviceAssignment({"CUDA_VISIBLE_DEVICES": "0"}, share),
    )


@pytest.mark.parametrize(
    ("device", "told", "line"),
    [
        pytest.param("cuda", FOUR, "", id="all alike"),
        pytest.param("cuda:0", fingerprint("H200", "T400"), "", id="asked for by number"),
        pytest.param("cpu", fingerprint("H200", "T400"), "", id="the CPU"),
        pytest.param(
            "cuda",
            fingerprint("H200", "T400", "T400"),
            "only devices like H200 are used, not T400: sweep those by number, as cuda:1",
            id="others",
        ),
    ],
)
def test_devices_that_are_not_used_are_named(device: str, told: dict[str, Any], line: str) -> None:
    assert left_out(device, told) == line


@pytest.mark.parametrize(("device", "expected"), [("cuda:1", "cuda"), ("xpu", "xpu")])
def test_the_kind_of_a_device(device: str, expected: str) -> None:
    assert kind(device) == expected


@pytest.mark.parametrize(
    ("given", "counts", "said"),
    [
        pytest.param(None, ":4096:8", False, id="not set"),
        pytest.param(":4096:8", ":4096:8", False, id="as dynamo sets it"),
        pytest.param(":16:8", ":16:8", False, id="the other one that repeats itself: the user's wins"),
        pytest.param(":0:0", ":4096:8", True, id="one that does not: ours wins, and it is said"),
        pytest.param(":4096:2:16:8", ":4096:8", True, id="torch's own default"),
        pytest.param("", ":4096:8", True, id="empty"),
    ],
)
def test_which_workspace_of_cublas_counts(given: str | None, counts: str, said: bool) -> None:
    assert workspace_config(given) == counts
    conflict = workspace_conflict(given)
    assert bool(conflict) is said
    assert not said or (f"={given} " in conflict and ":4096:8" in conflict)
