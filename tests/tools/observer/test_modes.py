"""The hash mode on torch's stack of modes: on and off in any order, with whatever else is on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import _python_dispatch as modes
from torch.utils.flop_counter import FlopCounterMode

from hashbench.errors import HashbenchError
from hashbench.records import OpRecord
from hashbench.tools.observer import HashMode, ObserverContext
from hashbench.trace.api import HashDebugTrace
from hashbench.trace.callbacks import TraceCallback


class Counting(modes.TorchDispatchMode):
    """Counts the ops that it sees, and how often it was entered and left."""

    def __init__(self) -> None:
        super().__init__()
        self.ops = self.entered = self.left = 0

    def __enter__(self) -> Any:
        self.entered += 1
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self.left += 1
        super().__exit__(*error)

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


@pytest.mark.parametrize("above", [Counting, lambda: FlopCounterMode(display=False)], ids=["mode", "flop counter"])
def test_it_is_taken_out_from_below_another_mode(tmp_path: Path, above: Any) -> None:
    x = torch.ones(2, 2)
    with ObserverContext(tmp_path, "run") as observer:
        observer.enable_mode()
        with above() as other:
            x @ x
            observer.disable_mode()
            assert flags()[0] is True
            x @ x
        assert flags() == (False, False, False)
        assert stack() == []
        x @ x
    assert ops(observer) == ["mm"]
    if isinstance(other, Counting):
        assert (other.ops, other.entered, other.left) == (2, 1, 1)
    else:
        assert other.get_total_flops() == 2 * 2 * 2**3


@pytest.mark.parametrize("by", ["disabling it", "leaving its context"])
def test_between_two_modes_it_is_the_one_that_goes(tmp_path: Path, by: str) -> None:
    context, below, above = ObserverContext(tmp_path, "run"), Counting(), Counting()
    observer = context.__enter__()
    with below:
        observer.enable_mode()
        with above:
            observer.disable_mode() if by == "disabling it" else context.__exit__(None, None, None)
            assert stack() == [below, above]
            torch.full((2,), 1.0)
        assert stack() == [below]
        assert flags()[0] is True
    if by == "disabling it":
        context.__exit__(None, None, None)
    assert (below.ops, above.ops) == (1, 1)
    assert ops(observer) == []


def test_a_mode_that_a_library_pushed_by_hand_stays(tmp_path: Path) -> None:
    by_hand = Counting()
    with ObserverContext(tmp_path, "run") as observer:
        observer.enable_mode()
        torch._C._push_on_torch_dispatch_stack(by_hand)
        observer.disable_mode()
        assert stack() == [by_hand]
        torch._C._pop_torch_dispatch_stack(None)
        assert flags() == (False, False, False)


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
    assert below.ops == 3  # torch kept it on the stack in the place of the other
    assert not (tmp_path / "run.json").exists()
    assert (tmp_path / "run.incomplete.json").exists()


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
