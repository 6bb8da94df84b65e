"""The hash mode among the dispatch modes of others: last on, first off; what cannot nest is an error, not a loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import _python_dispatch as modes

from hashbench.core.errors import HashbenchError
from hashbench.core.records import OpRecord
from hashbench.core.trace.api import HashDebugTrace
from hashbench.core.trace.callbacks import TraceCallback
from hashbench.tools.observer import HashMode, ObserverContext


class Counting(modes.TorchDispatchMode):
    """Counts the ops that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.ops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops += 1
        return func(*args, **(kwargs or {}))


def flags() -> tuple[bool, ...]:
    return (
        modes._is_in_torch_dispatch_mode,
        modes._is_in_non_infra_torch_dispatch_mode,
        modes._is_in_any_mode_without_ignore_compile_internals,
    )


def stack() -> list[Any]:
    return modes._get_current_dispatch_mode_stack()


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> Any:
    yield
    assert stack() == []
    assert flags() == (False, False, False)


def ops(observer: Any) -> list[str]:
    return [one.record.op.split(".")[1] for one in observer.observations]


def test_it_goes_on_and_off_again_and_again(tmp_path: Path) -> None:
    with ObserverContext(tmp_path, "run") as observer:
        for function in (torch.sin, torch.cos):
            x = torch.full((2,), 1.0)
            observer.enable_mode()
            observer.enable_mode()
            function(x)
            observer.disable_mode()
            observer.disable_mode()
            function(x)
    assert ops(observer) == ["sin", "cos"]


def test_a_jagged_batch_is_observed_through_its_backward(tmp_path: Path) -> None:
    with ObserverContext(tmp_path, "run") as observer:
        observer.enable_mode()
        batch = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged, requires_grad=True)
        batch.sin().values().sum().backward()
        observer.disable_mode()
    assert {"sin", "sum", "cos"} <= set(ops(observer))


@pytest.mark.parametrize("by", ["with", "enabling"])
def test_between_two_modes_it_observes_what_runs_inside_it(tmp_path: Path, by: str) -> None:
    with ObserverContext(tmp_path, "run") as observer, Counting() as below:
        if by == "with":
            with observer.hash_mode, Counting() as above:
                assert observer.hash_mode.enabled
                torch.full((2,), 1.0)
        else:
            observer.enable_mode()
            with Counting() as above:
                torch.full((2,), 1.0)
            observer.disable_mode()
        assert stack() == [below]
        assert flags()[0] is True
        torch.full((2,), 1.0)
    assert (below.ops, above.ops) == (2, 1)
    assert ops(observer) == ["full"]


def test_below_another_mode_it_cannot_be_disabled_and_stays_on(tmp_path: Path) -> None:
    with ObserverContext(tmp_path, "run") as observer:
        observer.enable_mode()
        with Counting() as above:
            with pytest.raises(HashbenchError, match="a dispatch mode is on that was entered after it"):
                observer.disable_mode()
            torch.full((2,), 1.0)
        observer.disable_mode()
    assert above.ops == 1
    assert ops(observer) == ["full"]


def test_a_context_that_is_left_below_another_mode_ends_with_an_error_and_observes_no_more(tmp_path: Path) -> None:
    context = ObserverContext(tmp_path, "run")
    observer = context.__enter__()
    observer.enable_mode()
    with Counting():
        with pytest.raises(HashbenchError, match="entered after it"):
            context.__exit__(None, None, None)
        torch.full((2,), 1.0)
    assert ops(observer) == []
    assert not (tmp_path / "run.json").exists()
    assert (tmp_path / "run.incomplete.json").exists()
    observer.disable_mode()


def test_a_mode_below_it_that_is_left_first_is_an_error_not_a_silent_loss(tmp_path: Path) -> None:
    context, below = ObserverContext(tmp_path, "run"), Counting()
    observer = context.__enter__()
    with below:
        observer.enable_mode()
        torch.full((2,), 1.0)
    torch.full((2,), 1.0).sin()
    with pytest.raises(HashbenchError, match="ops since then were not observed"):
        context.__exit__(None, None, None)
    assert ops(observer) == ["full"]
    assert not (tmp_path / "run.json").exists()
    assert stack() == [below]  # as the error says
    torch._C._pop_torch_dispatch_stack(None)
    with HashDebugTrace() as trace:
        torch.nn.ReLU()(torch.ones(1))
    assert len(trace.finish().records) == 2


def test_it_is_a_trace_of_its_own(tmp_path: Path) -> None:
    with HashMode() as mode:
        torch.full((2,), 1.0).sin()
    assert [record.op for record in mode.finish().records] == ["aten.full.default", "aten.sin.default"]
    with HashDebugTrace(), ObserverContext(tmp_path, "run") as observer:
        with pytest.raises(HashbenchError, match="cannot nest traces"):
            observer.enable_mode()
        assert not observer.hash_mode.enabled


class Collecting(TraceCallback):
    wants_records = True

    def __init__(self) -> None:
        self.records: list[OpRecord] = []

    def recorded(self, record: OpRecord) -> None:
        self.records.append(record)


def test_records_told_at_once_are_those_of_the_finished_trace() -> None:
    watcher = Collecting()
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(), torch.nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with HashDebugTrace(watcher=watcher, source_lines=True) as trace:
        for _ in range(2):
            with pytest.raises(RuntimeError):
                torch.ones(2, 3) @ torch.ones(2, 3)
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
    assert len(watcher.records) > 40
    assert tuple(watcher.records) == trace.finish().records
    unasked = Collecting()
    unasked.wants_records = False
    with HashDebugTrace(watcher=unasked):
        torch.ones(2).sin()
    assert unasked.records == []


def test_what_it_raises_reaches_whoever_called_the_op() -> None:
    class Stopping(Collecting):
        def recorded(self, record: OpRecord) -> None:
            raise LookupError(record.op)

    with pytest.raises(LookupError, match=r"aten\.full\.default"), HashDebugTrace(watcher=Stopping()):
        torch.full((2,), 1.0)
