"""A trace that is taken part by part is the trace of the whole, whatever the program does and wherever it is cut."""

from __future__ import annotations

import functools
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hashbench import HashDebugTrace
from hashbench.core.records import Trace
from hashbench.core.run.rng import reset_rng_state
from hashbench.core.trace import file
from hashbench.core.trace.calls import CallRecorder
from hashbench.core.trace.collectives import Collectives
from hashbench.core.trace.digest import digest
from hashbench.core.trace.raw import RawTrace
from hashbench.core.trace.segments import TracePlaces, TraceSegment
from hashbench.core.trace.stepped import SteppedTrace
from tests.core.trace.native import programs

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
    trace.add_results(found.items())
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


def threaded(cut: Callable[[], None]) -> Mapping[str, Any]:
    """Threads go on while parts end; each has records in several parts."""
    barrier = threading.Barrier(3)
    left: dict[str, torch.Tensor] = {}

    def work(number: int) -> None:
        x = torch.full((3,), float(number))
        for _ in range(4):
            barrier.wait()
            x = torch.sin(x) + x
            barrier.wait()
        left[str(number)] = x

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    y = torch.ones(3)
    for _ in range(4):
        barrier.wait()
        barrier.wait()
        y = torch.cos(y)
        cut()
    for thread in threads:
        thread.join()
    return {"sum": y + left["0"] + left["1"]}


def test_records_of_threads_are_in_one_part_each() -> None:
    trace, parts = in_parts(threaded, "native")
    expected = at_once(threaded, "native")
    assert parts == 5
    assert trace != expected  # the order is that of the parts
    assert {record.id: record for record in trace.records} == {record.id: record for record in expected.records}
    assert {leaf.id: leaf.digest for leaf in trace.leaves} == {leaf.id: leaf.digest for leaf in expected.leaves}
    assert trace.results == expected.results


@torch.library.custom_op("hashbench_tests::taken_inside", mutates_args=())
def taken_inside(x: torch.Tensor) -> torch.Tensor:
    made = x.sin()
    INSIDE[-1]()
    return made * 2


INSIDE: list[Callable[[], None]] = []


def test_part_that_ends_within_a_call_has_what_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    def program(cut: Callable[[], None]) -> Mapping[str, Any]:
        monkeypatch.setitem(globals(), "INSIDE", [cut])
        return {"out": taken_inside(torch.ones(3)) + 1}

    trace, parts = in_parts(program, "native")
    expected = at_once(program, "native")
    assert parts == 2
    assert [(one.id, one.outputs) for one in trace.records] == [(one.id, one.outputs) for one in expected.records]
    outer = next(one for one in trace.records if one.op.startswith("hashbench_tests"))
    inner = [one.id for one in trace.records if one.op in ("aten.sin.default", "aten.mul.Tensor")]
    assert [ref.source for ref in outer.inputs if ref.argument == "inside"] == inner


def test_call_without_a_record_when_a_part_ends_has_it_later() -> None:
    """Hashing a sparse tensor, which Python does, is where this part ends."""
    cuts: list[Callable[[], None]] = []

    def program(cut: Callable[[], None]) -> Mapping[str, Any]:
        cuts.append(cut)
        made = torch.eye(3).to_sparse()
        return {"sum": (made + made).to_dense() + 1}

    real = RawTrace.write

    def write(self: RawTrace, tensor: torch.Tensor, mark: Any, blank: bool) -> Any:
        if cuts:
            cuts.pop()()
        return real(self, tensor, mark, blank)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(RawTrace, "write", write)
        patched.setattr(CallRecorder, "__init__", _with_write(CallRecorder.__init__))
        trace, parts = in_parts(program, "native")
    assert parts == 2
    assert trace == at_once(program, "native")


def _with_write(made: Callable[..., None]) -> Callable[..., None]:
    def init(self: Any, trace: RawTrace, *args: Any, **kwargs: Any) -> None:
        made(self, trace, *args, **kwargs)
        self._write = functools.partial(RawTrace.write, trace)

    return init


def test_places_of_records_with_gaps_and_moves() -> None:
    places = TracePlaces()
    places.add([0, 1, 2], 2)
    assert places.are_numbers
    places.add([3, 5], 1)
    assert [places(number) for number in (0, 3, 4, 5, 9, -1, -3)] == [0, 3, 4, 4, 4, -1, -3]
    assert [places.has(number) for number in (3, 4, 5, 6)] == [True, False, True, False]
    places.add([4, 6], 2)
    assert [places(number) for number in (4, 5, 6)] == [5, 4, 6]
    places.move([4, 6], 2, {5: 6, 6: 5, -4: -5, -5: -4})
    assert [places(number) for number in (4, 5, 6, -3, -4, -5)] == [6, 4, 5, -3, -5, -4]


@pytest.fixture
def alone() -> Iterator[None]:
    """A default group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("tracer", TRACERS)
def test_collective_under_way_is_not_waited_for_and_arrives_later(tracer: str) -> None:
    def program(cut: Callable[[], None]) -> Mapping[str, Any]:
        reduced = torch.ops._c10d_functional.all_reduce(torch.ones(3), "sum", dist.group.WORLD.group_name)
        cut()
        waited = torch.ops._c10d_functional.wait_tensor(reduced)
        cut()
        return {"sum": waited + 1}

    seen: list[TraceSegment] = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(SteppedTrace, "taken", _kept(SteppedTrace.taken, seen))
        trace, _ = in_parts(program, tracer)
    begun = next(record for record in seen[0].trace.records if record.op.startswith("_c10d_functional.all_reduce"))
    assert [output.value for output in begun.outputs] == ["pending"]
    assert [list(part.arrived) for part in seen] == [[], [begun.id], []]
    assert trace == at_once(program, tracer)
    outputs = next(record.outputs for record in trace.records if record.id == begun.id)
    assert [output.value for output in outputs] == [digest(torch.ones(3)).value]


def _kept(taken: Callable[[SteppedTrace], TraceSegment], seen: list[TraceSegment]) -> Any:
    def kept(self: SteppedTrace) -> TraceSegment:
        seen.append(taken(self))
        return seen[-1]

    return kept


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("tracer", TRACERS)
def test_result_under_way_is_pending_unless_it_is_waited_for(tracer: str) -> None:
    trace = SteppedTrace(after_step=lambda _: None, tracer=tracer)
    trace.start()
    reduced = torch.ops._c10d_functional.all_reduce(torch.ones(3), "sum", dist.group.WORLD.group_name)
    trace.add_results([("early", reduced)], wait=False)
    trace.add_results([("waited", reduced)])
    trace.add_results([("late", reduced)], wait=False)
    trace.stop()
    values = [result.digest.value for result in trace.taken().trace.results]
    assert values == ["pending", digest(torch.ones(3)).value, digest(torch.ones(3)).value]


def test_stop_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def finish(_: Collectives) -> None:
        pytest.fail("it waits for collectives")

    monkeypatch.setattr(Collectives, "finish", finish)
    monkeypatch.setattr(Collectives, "under_way", True)
    for tracer in TRACERS:
        trace = SteppedTrace(after_step=lambda _: None, tracer=tracer)
        trace.start()
        trace.stop()
