"""Live copies and the devices of a captured call."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from hashbench.core.diagnose.calls.call import CapturedCall, TensorForm
from hashbench.core.diagnose.calls.capture import capture, capture_arguments
from hashbench.core.diagnose.calls.live import LiveCall, captured_environment, flat_memory, laid_over, wait_for
from hashbench.core.diagnose.replay import methods
from hashbench.core.trace.op_schema import OpPlan
from tests.core.diagnose.replay.replay_helpers import aten, captured, numbers, tried


def test_accelerator_memory_moves_by_offset() -> None:
    """Its allocator gives addresses that 512 divides; here the device is one without any, at address 0."""
    device = torch.device("meta")
    assert flat_memory(1000, device, address=0).storage_offset() == 0
    for shift in methods.SHIFTS:
        found = flat_memory(1000, device, address=4096 + shift)
        assert (found.storage_offset(), found.numel()) == (shift % 64, 1000)
        form = TensorForm(0, torch.float32, (10, 5), (6, 1), offset=2)
        tensor = laid_over(found, form)
        assert (tensor.storage_offset(), tensor.shape, tensor.stride()) == (shift % 64 // 4 + 2, (10, 5), (6, 1))


def test_call_waits_for_its_devices_only(monkeypatch: pytest.MonkeyPatch) -> None:
    call = captured(aten.add.Tensor, numbers(3), numbers(3))
    waited: list[Any] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 3)
    wait_for(call.accelerators)
    assert (call.device, waited) == (torch.device("cpu"), [])
    devices = {"a": torch.device("cuda:1"), "b": torch.device("cuda"), "c": torch.device("cuda:1")}
    elsewhere = replace(call, kwargs=devices)
    wait_for(elsewhere.accelerators)
    assert elsewhere.device == torch.device("cuda:1")
    assert waited == [torch.device("cuda:1"), torch.device("cuda:3")]


def test_environment_sets_the_current_device(monkeypatch: pytest.MonkeyPatch) -> None:
    call = captured(aten.add.Tensor, numbers(3), numbers(3))
    chosen: list[int | None] = []
    real = torch.accelerator.device_index
    monkeypatch.setattr(torch.accelerator, "device_index", lambda index: [chosen.append(index), real(None)][1])
    for kwargs in ({}, {"device": torch.device("cuda:2")}):
        with captured_environment(replace(call, kwargs=kwargs)):
            pass
    assert chosen == [None, 2]


# -------------------------------------------------------------------------------------------- what can be called


class Kernel:
    """As a compiled kernel: it returns nothing, and writes what its plan names."""

    plan = OpPlan("kernel", call=print, written=(2,), writes_arguments=True)

    def __call__(self, x: torch.Tensor, y: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(x + y)


class Exchange:
    """As a collective: it writes its argument later, and waits for that."""

    plan = OpPlan("exchange", call=print, written=(0,), writes_arguments=True, collective=True)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        pending = x * 2
        return x.copy_(pending)


def added(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, float]:
    return x + y, 1.5


CALLEES: dict[str, tuple[Any, tuple[torch.Tensor, ...], int, str]] = {
    "kernel": (Kernel(), (numbers(3), numbers(3), torch.zeros(3)), 1, ""),
    "exchange": (Exchange(), (numbers(3),), 1, ""),
    "added": (added, (numbers(3), numbers(3)), 1, "1.5"),
    "aten.add_.Tensor": (aten.add_.Tensor, (numbers(3), numbers(3)), 1, ""),
}


@pytest.mark.parametrize("name", CALLEES)
def test_any_callee_is_called_again(name: str) -> None:
    func, args, written, scalar = CALLEES[name]
    before = [tensor.clone() for tensor in args]
    call = capture_arguments(func, args, {})
    with captured_environment(call):
        live = LiveCall(call)
        first = live.run()
        expected, left = first.digests(), [tensor.tolist() for tensor in first.left]
        live.reset()
        again = live.run()
        assert again.digests() == expected
        assert [tensor.tolist() for tensor in again.left] == left == [(numbers(3) * 2).tolist()]
    assert (call.op, len(first.written), expected.scalar) == (name, written, scalar)
    assert all(map(torch.equal, args, before))


def test_experiments_are_made_on_a_callee() -> None:
    call = captured(Kernel(), numbers(3), numbers(3), torch.zeros(3))
    found = tried(call, "fresh_memory", "copied_sources", replays=2)
    assert found.arm("repeat").ran
    assert not found.arm("repeat").differing
    assert found.arm("fresh_memory").ran


def test_memory_of_the_call_itself_serves_one_run() -> None:
    call = captured(aten.add_.Tensor, numbers(3), numbers(3))
    rooms = [memory.content for memory in call.memories]
    with captured_environment(call):
        outcome = LiveCall(call, rooms=rooms).run()
    (written,) = [room for room in rooms if room.data_ptr() == outcome.output.data_ptr()]
    assert written.view(torch.float32).tolist() == (numbers(3) * 2).tolist()


def test_time_of_a_run_is_never_negative() -> None:
    call: CapturedCall = captured(aten.relu.default, numbers(3))
    ticks = iter([5.0, 3.0, 1.0, 4.0])
    with captured_environment(call):
        live = LiveCall(call)
        assert [live.run(clock=lambda: next(ticks)).seconds for _ in range(2)] == [0.0, 3.0]


def test_generator_state_of_attention_without_dropout_is_undefined() -> None:
    """As on a GPU: outputs of these names are allocated, and nobody writes them."""
    library = torch.library.Library("hashbench_live_attention", "DEF")
    try:
        library.define("forward(Tensor query, float dropout_p=0.) -> (Tensor output, Tensor philox_seed)")
        garbage = itertools.count()
        library.impl("forward", lambda query, *_: (query * 2, torch.tensor(next(garbage))), "CPU")
        func = torch.ops.hashbench_live_attention.forward.default
        for dropout, count in ((0.0, 1), (0.5, 3)):
            live = LiveCall(capture(func, (torch.ones(3), dropout), {}, limit_bytes=2**20))
            outcomes = [live.run() for _ in range(3)]
            assert len({outcome.digests() for outcome in outcomes}) == count
            assert [len(outcome.left[1].shape) for outcome in outcomes] == [dropout == 0] * 3
            assert [len(outcome.written[1].shape) for outcome in outcomes] == [dropout == 0] * 3
    finally:
        library._destroy()
