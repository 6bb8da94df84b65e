"""Live copies and the devices of a captured call."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from hashbench.replay import call as calls_module
from hashbench.replay import methods
from hashbench.replay.call import TensorForm, in_force
from tests.replay.replay_helpers import aten, captured, numbers

pytestmark = pytest.mark.usefixtures("eight_threads")


def test_accelerator_memory_moves_by_offset() -> None:
    """Its allocator gives addresses that 512 divides; here the device is one without any, at address 0."""
    like = torch.empty(1000, dtype=torch.uint8, device="meta")
    assert calls_module._aligned(like, 0, exact=True).storage_offset() == 0
    for shift in methods.SHIFTS:
        found = calls_module._aligned(like, shift % 64, exact=shift % 64 == 0)
        assert (found.storage_offset(), found.numel()) == (shift % 64, 1000)
        form = TensorForm(0, torch.float32, (10, 5), (6, 1), offset=2)
        tensor = calls_module.laid_over(found, form)
        assert (tensor.storage_offset(), tensor.shape, tensor.stride()) == (shift % 64 // 4 + 2, (10, 5), (6, 1))


def test_call_waits_for_its_devices_only(monkeypatch: pytest.MonkeyPatch) -> None:
    call = captured(aten.add.Tensor, numbers(3), numbers(3))
    waited: list[Any] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 3)
    calls_module.wait_for(call.accelerators)
    assert (call.device, waited) == (torch.device("cpu"), [])
    devices = {"a": torch.device("cuda:1"), "b": torch.device("cuda"), "c": torch.device("cuda:1")}
    elsewhere = replace(call, kwargs=devices)
    calls_module.wait_for(elsewhere.accelerators)
    assert elsewhere.device == torch.device("cuda:1")
    assert waited == [torch.device("cuda:1"), torch.device("cuda:3")]


def test_in_force_sets_the_current_device(monkeypatch: pytest.MonkeyPatch) -> None:
    call = captured(aten.add.Tensor, numbers(3), numbers(3))
    chosen: list[int | None] = []
    real = torch.accelerator.device_index
    monkeypatch.setattr(torch.accelerator, "device_index", lambda index: [chosen.append(index), real(None)][1])
    for kwargs in ({}, {"device": torch.device("cuda:2")}):
        with in_force(replace(call, kwargs=kwargs)):
            pass
    assert chosen == [None, 2]
