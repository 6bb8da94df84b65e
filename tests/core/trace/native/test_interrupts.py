"""Signal handlers and finalisers that call ops while the native recorder is in Python for a call of the program."""

from __future__ import annotations

import gc
import signal
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch

from hashbench import HashDebugTrace
from hashbench.core.native.library import is_recorded
from hashbench.core.records import Trace
from hashbench.core.trace.callbacks import TraceCallback
from hashbench.core.trace.tracer import native_unavailable

pytestmark = pytest.mark.skipif(native_unavailable() is not None, reason="the native tracer cannot be built here")

LOOKING: list[dict[str, Any]] = [{"source_lines": True}, {"hash_inputs": True}, {"watcher": TraceCallback()}]
"""Traces in which every call is handed to Python."""

STEPS = 1500


class Handler:
    """A signal handler that is called all the time, and never inside itself."""

    def __init__(self, body: Callable[[], Any]) -> None:
        self.body, self.calls, self.inside = body, 0, False

    def __call__(self, *_: Any) -> None:
        if self.inside:
            return
        self.inside = True
        try:
            self.calls += 1
            self.body()
        finally:
            self.inside = False


@contextmanager
def signalled(body: Callable[[], Any]) -> Iterator[Handler]:
    """Call ``body`` from a signal handler every 0.5 ms."""
    handler = Handler(body)
    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
        yield handler
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def added(y: torch.Tensor) -> None:
    for _ in range(STEPS):
        y.add_(1)


def counts(trace: Trace) -> Counter[str]:
    return Counter(record.op for record in trace.records)


@pytest.mark.parametrize("options", [{}, *LOOKING[:2]], ids=["plain", "source lines", "hashed inputs"])
def test_a_handler_that_calls_the_programs_op_is_another_call(options: dict[str, Any]) -> None:
    y, other = torch.zeros(3), torch.zeros(3)
    with HashDebugTrace(tracer="native", **options) as trace, signalled(lambda: other.add_(1)) as handler:
        added(y)
    assert handler.calls
    assert (y.tolist(), other.tolist()) == ([STEPS] * 3, [handler.calls] * 3)
    assert counts(trace.finish()) == {"aten.add_.Tensor": STEPS + handler.calls}


@pytest.mark.parametrize("options", LOOKING, ids=["source lines", "hashed inputs", "watcher"])
def test_a_handler_may_call_an_op_of_another_signature(options: dict[str, Any]) -> None:
    y, other = torch.zeros(3), torch.ones(2, 2)
    with HashDebugTrace(tracer="native", **options) as trace, signalled(lambda: torch.cat([other, other])) as handler:
        added(y)
    found = counts(trace.finish())
    assert handler.calls
    assert y.tolist() == [STEPS] * 3
    assert found.pop("aten.add_.Tensor") == STEPS
    # What interrupts the watcher itself is no part of the program's.
    assert found["aten.cat.default"] == handler.calls or ("watcher" in options and found["aten.cat.default"])


@pytest.mark.slow
@pytest.mark.parametrize("options", LOOKING[:2], ids=["source lines", "hashed inputs"])
def test_a_handler_may_compute_gradients(options: dict[str, Any]) -> None:
    y, weight = torch.zeros(3), torch.ones(2, requires_grad=True)
    with (
        HashDebugTrace(tracer="native", **options) as trace,
        signalled(lambda: (weight * 2).sum().backward()) as handler,
    ):
        added(y)
    assert weight.grad is not None
    assert (y.tolist(), weight.grad.tolist()) == ([STEPS] * 3, [2.0 * handler.calls] * 2)
    assert counts(trace.finish())["aten.mul.Tensor"] == 2 * handler.calls


def test_raising_signal_handler_leaves_no_state() -> None:
    def ended() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)  # or the next signal could end what leaves the trace
        raise TimeoutError

    y = torch.zeros(3)
    for _ in range(20):
        with suppress(TimeoutError), HashDebugTrace(tracer="native", source_lines=True), signalled(ended):
            added(y)
        assert not is_recorded()
        assert gc.isenabled()
    with HashDebugTrace(tracer="native") as trace:
        y.add_(1)
    assert counts(trace.finish()) == {"aten.add_.Tensor": 1}


class Finalised:
    """An object that only the garbage collector frees; its finaliser computes a gradient."""

    def __init__(self, weight: torch.Tensor, done: list[str]) -> None:
        self.myself, self.weight, self.done = self, weight, done

    def __del__(self) -> None:
        (self.weight * 2).sum().backward()
        self.done.append("finalised")


@pytest.mark.slow
@pytest.mark.parametrize("way", ["finaliser", "weak reference"])
@pytest.mark.parametrize("options", [{}, *LOOKING], ids=["plain", "source lines", "hashed inputs", "watcher"])
def test_ops_of_finalisers_are_recorded(options: dict[str, Any], way: str) -> None:
    gc.collect()
    y, weight, done = torch.zeros(3), torch.ones(2, requires_grad=True), []
    sparse = torch.eye(3).to_sparse()  # recorded in Python in every trace
    with HashDebugTrace(tracer="native", **options) as trace:
        for _ in range(STEPS):
            if way == "finaliser":
                Finalised(weight, done)
            else:
                cycle: list[Any] = [Referred()]
                cycle.append(cycle)
                REFERENCES.append(
                    weakref.ref(cycle[0], lambda _: ((weight * 2).sum().backward(), done.append("freed")))
                )
            y.add_(1)
            sparse.sin()
        gc.disable()
    gc.enable()
    recorded = len(done)
    found = counts(trace.finish())
    REFERENCES.clear()
    assert recorded > STEPS / 2
    assert (y.tolist(), found["aten.add_.Tensor"] >= STEPS) == ([STEPS] * 3, True)
    assert found["aten.mul.Tensor"] == 2 * recorded


class Referred:
    """Something to which there are weak references."""


REFERENCES: list[weakref.ref[Any]] = []
