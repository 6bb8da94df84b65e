"""Steps that are taken while the program goes on: what fetches them is no part of the trace."""

from __future__ import annotations

import pytest
import torch

from hashbench import HashDebugTrace
from hashbench.core.records import OpRecord
from hashbench.core.trace.stepped import SteppedTrace

STEPS = 3


def train() -> None:
    """Train a layer, from a fixed seed."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for _ in range(STEPS):
        layer(torch.ones(3, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("tracer", ["native", "python"])
def test_digests_are_fetched_from_a_device_unrecorded(tracer: str) -> None:
    """The sums lie in tensors of torch, on the CPU here: an op that fetched them would be recorded, and summed."""
    with HashDebugTrace(tracer=tracer, digests="device") as whole:
        train()
    taken: list[OpRecord] = []
    stepped = SteppedTrace(
        after_step=lambda _: taken.extend(stepped.taken().trace.records),
        tracer=tracer,
        digests="device",
    )
    stepped.follow()
    stepped.start()
    train()
    stepped.stop()
    stepped.unfollow()
    taken += stepped.taken().trace.records
    assert [(record.id, record.outputs) for record in taken] == [
        (record.id, record.outputs) for record in whole.finish().records
    ]


@pytest.mark.parametrize("tracer", ["native", "python"])
def test_queries_of_an_active_trace_record_nothing(tracer: str) -> None:
    with HashDebugTrace(tracer=tracer, digests="device") as trace:
        for count in range(1, 4):
            torch.ones(3)
            assert trace.stats["total_ops"] == count


def test_steps_of_a_torch_that_hides_calls_within_ops_are_recorded_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hashbench.core.trace.tracer.native_sees_into_subclasses", lambda: False)
    assert SteppedTrace(after_step=lambda _: None).head.tracer == "python"
    assert SteppedTrace(after_step=lambda _: None, tracer="native").head.tracer == "native"
