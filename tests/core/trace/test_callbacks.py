"""Callbacks around traced calls, and writes that no schema declares."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hashbench import HashDebugTrace, Trace, find_divergence
from hashbench.core.records import OpRecord
from hashbench.core.trace.callbacks import PossibleWrites, TraceCallback
from hashbench.core.trace.digest import RawDigest
from tests.core.trace.mode_helpers import record, value, values

traced = pytest.mark.usefixtures("seeded", "each_tracer")


@traced
def test_hash_inputs_exposes_numpy_writes() -> None:
    with HashDebugTrace(hash_inputs=True) as trace:
        x = torch.ones(4) * 2
        x.numpy()[0] = 7
        x + 1
    (ref,) = record(trace, "add").inputs
    assert ref.digest == value(x) != values(record(trace, "mul"))[0]


class Log(TraceCallback):
    """Log every event with its id, and whether the op has run."""

    def __init__(self, *, records: bool = False, trace: bool = True) -> None:
        self.wants_records, self.wants_trace = records, trace
        self.events: list[tuple[str, str]] = []
        self.recorded_ids: list[OpRecord] = []

    def before(self, node: str, *_: Any) -> None:
        self.events.append(("before", node))

    def after(self, node: str, *call: Any) -> None:
        assert isinstance(call[-1], torch.Tensor)  # the output
        self.events.append(("after", node))

    def leaf(self, node: str, *_: Any) -> None:
        self.events.append(("leaf", node))

    def recorded(self, record: OpRecord) -> None:
        self.events.append(("recorded", record.id))
        self.recorded_ids.append(record)


@traced
def test_events_come_in_order_with_the_ids_of_the_trace() -> None:
    log, x = Log(records=True), torch.ones(2)
    with HashDebugTrace(watcher=log) as trace:
        x.mul(2).add_(1)
    finished = trace.finish()
    (leaf,), (mul, add) = finished.leaves, finished.records
    assert log.events == [
        ("leaf", leaf.id),
        *((event, record.id) for record in (mul, add) for event in ("before", "after", "recorded")),
    ]
    assert tuple(log.recorded_ids) == finished.records


@traced
def test_records_are_not_built_unless_wanted() -> None:
    log = Log()
    with HashDebugTrace(watcher=log) as trace:
        torch.ones(2).mul(2)
    assert len(trace.finish().records) == 2
    assert [event for event, _ in log.events] == ["before", "after"] * 2


@traced
def test_without_a_trace_only_calls_are_shown() -> None:
    log = Log(trace=False)
    with HashDebugTrace(watcher=log, inputs=torch.ones(2)) as trace:
        torch.ones(2).mul(2)
    assert (trace.finish().records, trace.finish().leaves) == ((), ())
    assert [event for event, _ in log.events] == ["before", "after"] * 2


@traced
@pytest.mark.parametrize("at", ["before", "after", "recorded"])
def test_exception_of_a_callback_reaches_the_caller(at: str) -> None:
    log = Log(records=True)

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    with HashDebugTrace(watcher=log) as trace:
        x = torch.ones(2)
        setattr(log, at, fail)
        with pytest.raises(ZeroDivisionError):
            x.mul(2)
        delattr(log, at)
        x.mul(2)
    muls = [record.id for record in trace.finish().records if record.op == "aten.mul.Tensor"]
    assert [name.rpartition("#")[2] for name in muls] == (["0", "1"] if at == "recorded" else ["0"])
    assert [node for event, node in log.events if event == "before"][-1] == muls[
        -1
    ]  # the failed call's id is free again


def raw(number: int) -> RawDigest:
    return torch.float32, torch.Size([1]), None, number


def test_possible_writes_resolve_to_the_last_writer() -> None:
    token, writes = object(), PossibleWrites()
    unchanged = writes.mark(5, (token, 2, None), (raw(1), raw(1)))
    changed = writes.mark(6, unchanged, (raw(1), raw(9)))
    again = writes.mark(7, changed, (raw(9), raw(9)))
    assert writes.resolve() == [(6, raw(9))]
    assert [writes.node(mark[1]) for mark in (unchanged, changed, again)] == [2, 6, 6]
    assert writes.node(3) == 3
    assert writes.resolve() == []


def test_possible_write_of_a_partly_seen_leaf_marks_each_part() -> None:
    token, writes = object(), PossibleWrites()
    assert writes.empty
    views = {(0, (1,), (1,)): -1, (4, (1,), (1,)): -2}
    found = writes.mark(8, (token, -1, views), (raw(1), raw(2)))
    assert not writes.empty
    assert isinstance(found[2], dict)
    assert writes.resolve() == [(8, raw(2))]  # one write, seen through two views
    assert {view: writes.node(node) for view, node in found[2].items()} == dict.fromkeys(views, 8)


class Disturbing(TorchDispatchMode):
    """Write to a buffer, past torch, once an op that reads it has begun: as another stream, a copy or a thread does."""

    def __init__(self, buffer: np.ndarray, *, when: str) -> None:
        super().__init__()
        self.buffer, self.when = buffer, when

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func) == self.when:
            self.buffer += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("digests", ["fast", "device"])
def test_input_that_others_write_during_a_call_is_no_write_of_the_op(digests: str) -> None:
    def run(when: str) -> Trace:
        buffer = np.zeros(4, dtype=np.float32)
        # The outer mode is called by the trace, after the inputs are hashed.
        with Disturbing(buffer, when=when), HashDebugTrace(tracer="python", hash_inputs=True, digests=digests) as trace:
            shared = torch.from_numpy(buffer)
            shared.add_(1)
            trace.add_result("output", shared.expm1().sum())
        return trace.finish()

    first, second = run("none"), run("aten.expm1.default")
    assert [len(record.outputs) for record in second.records][-2:] == [1, 1]  # expm1, sum
    divergence = find_divergence(first, second).divergence
    assert divergence is not None
    assert (divergence.origin, divergence.kernel) == ("outside", "aten.expm1.default")


@traced
def test_input_that_shares_memory_with_what_an_op_writes_is_written_by_it() -> None:
    x = torch.arange(18.0).reshape(3, 6)[:, ::2]  # with holes: else torch sees that both overlap
    with HashDebugTrace(hash_inputs=True) as trace:
        x.add_(x.t())
    added = record(trace, "add_")
    assert len(added.outputs) == 2, "x, and its transpose, which changed with it"
    assert added.inputs[1].digest not in {output.value for output in added.outputs}
