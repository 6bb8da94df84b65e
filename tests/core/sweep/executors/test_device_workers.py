"""What real workers of the local executor see of accelerators: decided by plain values, so no accelerator is needed."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from hashbench.core.devices.visibility import DeviceAssignment
from hashbench.core.records import ModelSpec, Row, RunOptions
from hashbench.core.sweep.executors.local import LocalExecutor
from hashbench.core.sweep.run import Event, ModelFinished, ModelStarted, SweepPlanned, run_sweep
from hashbench.core.sweep.schedule import CONTEXT_MIB, EarlierSweep

FIRST, SECOND = (
    DeviceAssignment({"CUDA_VISIBLE_DEVICES": "3"}, 900.0),
    DeviceAssignment({"CUDA_VISIBLE_DEVICES": "GPU-1c5e9a02"}, 900.0),
)


def swept(
    output: Path, names: str, *, executor: LocalExecutor, target: str = "tell", together: int = 1, **more: Any
) -> list[Row]:
    specs = [ModelSpec("fake", name, arguments={"together": together}) for name in names]
    return list(
        run_sweep(
            specs,
            RunOptions(device="cuda", threads=1),
            output=output / "results",
            environment={"key": "e1"},
            target=f"device_targets:{target}",
            executor=executor,
            **more,
        ).rows
    )


def told(row: Row) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(row.detail)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("jobs", "devices", "seen"),
    [
        pytest.param(2, (FIRST, SECOND), {"3": 1, "GPU-1c5e9a02": 1}, id="a device each"),
        pytest.param(4, (FIRST, SECOND), {"3": 2, "GPU-1c5e9a02": 2}, id="two workers a device"),
        pytest.param(2, (SECOND,), {"GPU-1c5e9a02": 2}, id="one that was asked for by number"),
        pytest.param(2, (), {None: 2}, id="on the CPU"),
    ],
)
def test_workers_that_run_at_once_see_a_device_each(
    tmp_path: Path,
    jobs: int,
    devices: tuple[DeviceAssignment, ...],
    seen: dict[str | None, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    executor = LocalExecutor(jobs=jobs, preload=(), devices=devices)
    rows = swept(tmp_path, "abcd"[:jobs], executor=executor, together=jobs)
    assert Counter(told(row)["CUDA_VISIBLE_DEVICES"] for row in rows) == seen
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


def test_one_worker_at_a_time_sees_the_first_device_alone(tmp_path: Path) -> None:
    rows = swept(tmp_path, "ab", executor=LocalExecutor(preload=(), devices=(SECOND, FIRST)))
    assert [told(row)["CUDA_VISIBLE_DEVICES"] for row in rows] == ["GPU-1c5e9a02"] * 2


@pytest.mark.parametrize(
    ("takes", "order"),
    [
        pytest.param(100.0, ["start a", "start b"], id="room for both"),
        pytest.param(300.0, ["start a", "end a", "start b", "end b"], id="no room for a second one"),
    ],
)
def test_models_that_do_not_fit_on_a_device_together_run_one_after_the_other(
    tmp_path: Path, takes: float, order: list[str]
) -> None:
    """The device has room for two contexts and 900 MiB; each takes what an earlier sweep saw, and its context."""
    peaks = {("fake", name): takes + 300 for name in "ab"}
    happened: list[str] = []
    plans: list[SweepPlanned] = []

    def note(event: Event) -> None:
        match event:
            case ModelStarted():
                happened.append(f"start {event.name}")
            case ModelFinished():
                happened.append(f"end {event.row.name}")
            case SweepPlanned():
                plans.append(event)

    swept(
        tmp_path,
        "ab",
        executor=LocalExecutor(
            jobs=2, preload=(), devices=(DeviceAssignment({"CUDA_VISIBLE_DEVICES": "0"}, 2 * CONTEXT_MIB + 900),)
        ),
        earlier=EarlierSweep("last night", device_memory_mib=peaks),
        on_event=note,
    )
    assert happened[: len(order)] == order
    assert len(plans[0].resources.devices) == 1
    assert plans[0].resources.memory_mib, "that of the machine counts, too"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "seen", "said"),
    [
        pytest.param(None, ":4096:8", False, id="not set"),
        pytest.param(":16:8", ":16:8", False, id="set by the user"),
        pytest.param(":0:0", ":4096:8", True, id="set to what does not repeat itself"),
    ],
)
def test_every_worker_has_the_workspace_of_cublas(tmp_path: Path, given: str | None, seen: str, said: bool) -> None:
    executor = WithWorkspace(given)
    (row,) = swept(tmp_path, "a", executor=executor)
    assert told(row)["CUBLAS_WORKSPACE_CONFIG"] == seen
    log = tmp_path / "results" / "logs" / "fake.inference.a.log"
    assert (log.read_text() if log.exists() else "") == (
        "hashbench: CUBLAS_WORKSPACE_CONFIG=:0:0 lets cuBLAS differ from call to call: :4096:8 is in force instead\n"
        if said
        else ""
    )


class WithWorkspace(LocalExecutor):
    """Its fork server is born with a variable, as that of a user who has set it is. The server outlives an executor, so
    each gets another one by a preload of its own."""

    def __init__(self, given: str | None) -> None:
        super().__init__(preload=("json", f"no_such_module_{given}"))
        self.given = given

    def start(self, *, target: str) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
            if self.given is not None:
                patch.setenv("CUBLAS_WORKSPACE_CONFIG", self.given)
            super().start(target=target)


needs_cuda_build = pytest.mark.skipif(not torch.cuda._is_compiled(), reason="this torch is built without CUDA")


@needs_cuda_build
@pytest.mark.slow
def test_when_torch_starts_cuda_in_a_worker_all_is_set_and_nobody_was_there_before(tmp_path: Path) -> None:
    (row,) = swept(tmp_path, "a", executor=LocalExecutor(devices=(SECOND,)), target="start_cuda")
    assert told(row) == {
        "preloaded": True,
        "running": False,
        "forked from a process that asked for CUDA": False,
        "CUDA_VISIBLE_DEVICES": "GPU-1c5e9a02",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "error": "seen enough",
    }


@needs_cuda_build
@pytest.mark.slow
def test_a_fork_server_that_asked_for_cuda_would_be_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    (row,) = swept(tmp_path, "a", executor=LocalExecutor(preload=("asks_for_cuda",)), target="start_cuda")
    assert told(row)["forked from a process that asked for CUDA"]
