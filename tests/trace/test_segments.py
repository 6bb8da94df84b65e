"""A trace that is taken part by part is the trace of the whole, whatever the program does and wherever it is cut."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from hashbench import HashDebugTrace
from hashbench.records import Trace
from hashbench.run.rng import reset_rng_state
from hashbench.trace import file
from hashbench.trace.segments import TraceSegment
from hashbench.trace.stepped import SteppedTrace
from tests.trace.native import programs

TRACERS = ("native", "python")
Program = Callable[[], Mapping[str, Any]]


def joined(segments: list[TraceSegment]) -> Trace:
    """One trace of all the segments, as a reader makes it of their text."""
    text = file.TraceText(replace(segments[0].trace, records=()))
    for segment in segments:
        text.add(segment.trace, first=segment.first, arrived=segment.arrived)
    text.end([result for segment in segments for result in segment.trace.results])
    return file.loads(text.taken())


def in_parts(program: Callable[[Callable[[], None]], Mapping[str, Any]], tracer: str) -> tuple[Trace, int]:
    """The trace of a program that says where a part ends, and the number of parts."""
    trace = SteppedTrace(after_step=lambda _: None, tracer=tracer)
    reset_rng_state(0)
    trace.start()
    parts: list[TraceSegment] = []
    try:
        found = program(lambda: parts.append(trace.taken()))
    finally:
        trace.stop()
    for name, value in found.items():
        trace.add_result(name, value)
    parts.append(trace.taken())
    assert [part.first for part in parts] == [
        sum(len(one.trace.records) for one in parts[:number]) for number in range(len(parts))
    ]
    return replace(joined(parts), tracer=tracer), len(parts)


def at_once(program: Callable[[Callable[[], None]], Mapping[str, Any]], tracer: str) -> Trace:
    trace = HashDebugTrace(tracer=tracer)
    reset_rng_state(0)
    with trace:
        found = program(lambda: None)
    for name, value in found.items():
        trace.add_result(name, value)
    return trace.finish()


def trained(cut: Callable[[], None]) -> Mapping[str, Any]:
    """Backward reads what earlier parts wrote, and has its forward ops there."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(torch.rand(5, 4)).square().mean()
        cut()
        loss.backward()
        cut()
        cut()
        optimizer.step()
    return {"loss": loss, **dict(model.named_parameters())}


@pytest.mark.parametrize("tracer", TRACERS)
def test_parts_of_a_training_are_its_trace(tracer: str) -> None:
    trace, parts = in_parts(trained, tracer)
    assert parts == 10
    assert trace == at_once(trained, tracer)
    assert len(trace.records) > 100
    assert any(record.forward_op for record in trace.records)


@pytest.mark.parametrize("tracer", TRACERS)
@pytest.mark.parametrize("seed", range(12))
def test_parts_of_any_program_are_its_trace(seed: int, tracer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program is cut at calls of a function that all of them make."""
    rng = random.Random(seed)
    cuts: list[Callable[[], None]] = []

    def bounded(x: torch.Tensor) -> torch.Tensor:
        if rng.random() < 0.3:
            cuts[-1]()
        return torch.tanh(x)

    monkeypatch.setattr(programs, "bounded", bounded)

    def program(cut: Callable[[], None]) -> Mapping[str, Any]:
        cuts.append(cut)
        rng.seed(seed)
        return programs.made(seed)()

    trace, parts = in_parts(program, tracer)
    assert trace == at_once(program, tracer)
    assert parts > 1
