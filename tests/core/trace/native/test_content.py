"""Whether two native traces are equal is known from what the recorder kept, before any record is made of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hashbench import HashDebugTrace
from hashbench.core.records import ModelSpec, Row, RunOptions
from hashbench.core.run.outcome import Run
from hashbench.core.run.workload import Workload
from hashbench.core.trace.api import Recording
from hashbench.core.trace.tracer import native_unavailable
from tests.runner_helpers import FunctionRunner

pytestmark = pytest.mark.skipif(native_unavailable() is not None, reason="the native tracer cannot be built here")


def traced(compute: Callable[[], Any], **options: Any) -> Recording:
    torch.manual_seed(0)
    with HashDebugTrace(tracer="native", **options) as trace:
        found = compute()
    trace.add_result("found", found)
    assert Recording(trace).content == Recording(trace).content
    return Recording(trace)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))


def step() -> torch.Tensor:
    """A whole step of training; another one has autograd nodes of other numbers."""
    net = model()
    loss = net(torch.linspace(0.0, 1.0, 12).reshape(3, 4)).square().mean()
    loss.backward()
    torch.optim.Adam(net.parameters()).step()
    return loss.detach()


SAME = {
    "a step of training": step,
    "an op without an input": lambda: torch.ones(2, 3),
    "an op inside a leaf's part": lambda: torch.arange(6.0)[2:].mul(2),
    "random numbers": lambda: torch.rand(3).add_(1),
    "a number that was read": lambda: torch.ones(3) * torch.ones(3).sum().item(),
}


@pytest.mark.parametrize("compute", SAME.values(), ids=SAME)
def test_equal_traces_are_known_to_be(compute: Callable[[], Any]) -> None:
    first, second = traced(compute), traced(compute)
    assert first.content == second.content != b""
    assert first.noted == {result.name: result.digest for result in first.finish().results}
    names = first.op_names
    assert first.ops == len(first.finish().records)
    assert names == first.op_names == {record.op for record in first.finish().records}
    assert first.finish() == second.finish()


def test_a_model_that_is_named_and_has_its_state_and_inputs_noted() -> None:
    def run(net: nn.Module) -> Recording:
        given = torch.linspace(0.0, 1.0, 12).reshape(3, 4)
        return traced(lambda: net(given), model=net, inputs=(given,), settings=lambda: {"threads": "1"})

    first, second = run(model()), run(model())
    other = model()
    with torch.no_grad():
        other[3].bias[0] += 1.0
    third = run(other)
    assert first.content == second.content
    assert third.content not in (b"", first.content)
    assert first.finish() == second.finish()
    assert first.finish() != third.finish()


GIVEN = torch.linspace(0.0, 1.0, 12).reshape(3, 4)


class Named(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mul(2)


class Other(Named):
    """Computes the same."""


DIFFERENT: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "another op": (lambda: GIVEN.add(1), lambda: GIVEN.sub(1)),
    "another number": (lambda: GIVEN.add(1), lambda: GIVEN.add(2)),
    "the sign of a zero that is multiplied by a zero": (
        lambda: torch.zeros(2).add(1, alpha=0.0),
        lambda: torch.zeros(2).add(1, alpha=-0.0),
    ),
    "a whole number for a float": (lambda: GIVEN.add(1), lambda: GIVEN.add(1.0)),
    "different content": (lambda: GIVEN.add(1), lambda: GIVEN.clone().add(1)),
    "a further op": (lambda: GIVEN.add(1), lambda: GIVEN.add(1).view(-1)),
    "an op in place": (lambda: torch.ones(2).add(1), lambda: torch.ones(2).add_(1)),
    "another part of the same": (lambda: GIVEN[0].add(0) * 0, lambda: GIVEN[1].add(0) * 0),
    "which of two equal tensors is read": (
        lambda: [one := torch.ones(2), torch.ones(2), one.add(1)][-1],
        lambda: [torch.ones(2), two := torch.ones(2), two.add(1)][-1],
    ),
    "a module around it": (lambda: GIVEN.mul(2), lambda: Named()(GIVEN)),
    "another module around it": (lambda: Named()(GIVEN), lambda: Other()(GIVEN)),
    "the order of two ops": (
        lambda: [torch.ones(2), torch.zeros(2)][0],
        lambda: [torch.zeros(2), torch.ones(2)][1],
    ),
    "the state of the generator": (
        lambda: torch.zeros(2).bernoulli_(0.0),
        lambda: [torch.manual_seed(1), torch.zeros(2).bernoulli_(0.0)][1],
    ),
}


@pytest.mark.parametrize(("one", "other"), DIFFERENT.values(), ids=DIFFERENT)
def test_traces_that_differ_are_never_taken_for_equal(one: Callable[[], Any], other: Callable[[], Any]) -> None:
    first, second = traced(one), traced(other)
    assert first.content != second.content
    assert first.finish() != second.finish()


def test_a_result_and_a_setting_count() -> None:
    def run(*, result: float = 1.0, threads: str = "1") -> Recording:
        with HashDebugTrace(tracer="native", settings=lambda: {"threads": threads}) as trace:
            GIVEN.add(1)
        trace.add_result("value", result)
        return Recording(trace)

    contents = [run().content, run(result=2.0).content, run(threads="2").content]
    assert len({*contents, b""}) == 4
    assert run().content == contents[0]


@pytest.mark.parametrize(
    "compute",
    [lambda: torch.eye(3).to_sparse().mul(2).to_dense(), lambda: torch.quantize_per_tensor(GIVEN, 0.1, 0, torch.qint8)],
    ids=["sparse", "quantized"],
)
def test_what_python_recorded_is_compared_record_by_record(compute: Callable[[], Any]) -> None:
    first, second = traced(compute), traced(compute)
    assert (first.content, second.content) == (b"", b"")
    assert not Run(first, {}).agrees_with(Run(second, {}))


def test_nothing_recorded_is_never_equal() -> None:
    with HashDebugTrace(tracer="native") as first, torch.no_grad():
        pass
    assert Recording(first).content == b""


def test_the_python_tracer_does_not_know() -> None:
    with HashDebugTrace(tracer="python") as trace:
        GIVEN.add(1)
    recording = Recording(trace)
    assert recording.content == b""
    assert recording.noted == {}
    assert recording.ops == 1


class Drifting(nn.Module):
    """Adds something else in each of its calls."""

    def __init__(self, numbers: Iterator[int]) -> None:
        super().__init__()
        self.layer, self.numbers = nn.Linear(4, 2), numbers

    def __deepcopy__(self, memo: dict[int, Any]) -> Drifting:
        made = Drifting(self.numbers)
        made.load_state_dict(self.state_dict())
        return made

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).add(next(self.numbers))


def row_of(numbers: Iterator[int], options: RunOptions) -> Row:
    runner = FunctionRunner(options)
    runner.build = lambda: Workload(module=Drifting(numbers), inputs=(GIVEN,))
    return runner.run_model(ModelSpec("here", "model"))


@pytest.mark.parametrize("mode", ["inference", "training"])
def test_records_are_made_of_runs_that_differ_only(mode: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    finished: list[HashDebugTrace] = []
    finish = HashDebugTrace.finish
    monkeypatch.setattr(HashDebugTrace, "finish", lambda trace: [finished.append(trace), finish(trace)][1])
    options = RunOptions(mode=mode, tracer="native", diagnose_budget=0.0, runs=3)
    passing = row_of(itertools.repeat(0), options)
    assert finished == []
    kept = row_of(itertools.repeat(0), replace(options, keep_traces=True, output=str(tmp_path)))
    assert len({id(trace) for trace in finished}) == 3
    columns = ("accuracy", "ops", "benign", "benign_ops", "distinct", "trials", "runs", "tracer", "perturbed_ops")
    assert [getattr(passing, name) for name in columns] == [getattr(kept, name) for name in columns]
    assert passing.accuracy == "pass"
    assert passing.ops
    finished.clear()
    row = row_of(itertools.count(), options)
    assert row.accuracy == "eager_two_runs_differ"
    assert row.origin
    assert finished


def test_threads_are_put_in_order_first() -> None:
    def compute() -> torch.Tensor:
        with ThreadPoolExecutor(2) as pool:
            return torch.stack(list(pool.map(lambda number: GIVEN.mul(number), range(2))))

    first, second = traced(compute), traced(compute)
    assert (first.content, second.content) == (b"", b"")
    assert first.finish() == second.finish()
