"""Reads of calls: every leaf once, with its name and kind."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn

from hashbench import HashDebugTrace
from hashbench.core.divergence import find
from hashbench.core.records import Trace
from tests.core.trace.mode_helpers import record, value

pytestmark = pytest.mark.usefixtures("seeded", "each_tracer")


def test_every_kind_of_leaf_is_hashed_once_and_named() -> None:
    model = nn.BatchNorm1d(3).eval()
    x, other = torch.rand(4, 3), torch.rand(4, 3)
    with HashDebugTrace(model=model, inputs=(x,)) as trace:
        model(x) + other + x + other
    found = {leaf.id: leaf.digest.value for leaf in trace.finish().leaves}
    assert found == {
        "input/0": value(x),
        "parameter/BatchNorm1d.weight": value(model.weight),
        "parameter/BatchNorm1d.bias": value(model.bias),
        "buffer/BatchNorm1d.running_mean": value(model.running_mean),
        "buffer/BatchNorm1d.running_var": value(model.running_var),
        "other/#0": value(other),
    }


@pytest.mark.parametrize("registered", [True, False])
def test_unregistered_parameters_are_named_tied_once(registered: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    with HashDebugTrace(model=model if registered else None) as trace:
        model(torch.ones(1, 3))
    assert [leaf.id for leaf in trace.finish().leaves if leaf.kind == "parameter"] == ["parameter/Sequential.0.weight"]


def test_parameter_with_two_names_has_the_first() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_parameter("none", None)
            self.first = nn.Parameter(torch.ones(2))
            self.second = self.first
            self.register_buffer("state", torch.zeros(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.second + self.state

    model, x = Twice(), torch.ones(2)
    with HashDebugTrace() as trace:
        model(x)
    names = [leaf.id for leaf in trace.finish().leaves if leaf.kind != "other"]
    assert names == ["parameter/Twice.first", "buffer/Twice.state"]


def test_tensor_of_an_untraced_thread_is_a_leaf() -> None:
    made: list[torch.Tensor] = []
    with HashDebugTrace() as trace:
        thread = threading.Thread(target=lambda: made.append(torch.ones(3) * 2))
        thread.start()
        thread.join()
        made[0] + 1
    seen = "forward//aten.mul.Tensor#t0.0"
    assert record(trace, "add").inputs[0].source == (seen if trace.tracer == "native" else "other/#0")


class _OwnParameter(nn.Parameter):
    pass


class _OwnTensor(torch.Tensor):
    pass


def _marked() -> torch.Tensor:
    tensor = torch.ones(2)
    tensor._is_param = True  # type: ignore[attr-defined]
    return tensor


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(2),
        lambda: nn.Parameter(torch.ones(2)),
        lambda: _OwnParameter(torch.ones(2)),
        lambda: torch.ones(2).as_subclass(_OwnTensor),
        lambda: nn.Parameter(torch.ones(2).as_subclass(_OwnTensor)),
        _marked,
    ],
    ids=[
        "a tensor",
        "a parameter",
        "of a class of its own",
        "another class",
        "a parameter of it",
        "a tensor marked so",
    ],
)
def test_leaf_kind_follows_is_parameter(make: Callable[[], torch.Tensor]) -> None:
    tensor = make()
    with HashDebugTrace() as trace, torch.no_grad():
        tensor * 2
    (leaf,) = trace.finish().leaves
    assert leaf.id.partition("/")[0] == ("parameter" if isinstance(tensor, nn.Parameter) else "other")


@pytest.mark.parametrize("hash_inputs", [False, True], ids=["plain", "hashed inputs"])
@pytest.mark.parametrize("what", ["input", "other"])
@pytest.mark.parametrize("filled", [False, True], ids=["read", "filled"])
def test_stride_only_difference_is_reported(hash_inputs: bool, what: str, filled: bool) -> None:
    def run(*, transposed: bool) -> Trace:
        x = torch.arange(12.0).reshape(3, 4)
        given = torch.zeros(4, 3).t() if transposed else torch.zeros(3, 4)
        with HashDebugTrace(inputs=given if what == "input" else None, hash_inputs=hash_inputs) as trace:
            trace.add_result("it", given.copy_(x.sin()) if filled else given + 1)
        return trace.finish()

    assert find(run(transposed=True), run(transposed=True)).equal
    divergence = find(run(transposed=False), run(transposed=True)).divergence
    assert divergence is not None
    assert divergence.origin == ("input" if what == "input" else "outside")
    assert "has different strides" in divergence.detail
    assert (divergence.first[-13:], divergence.second[-13:]) == ("stride [4, 1]", "stride [1, 3]")


@pytest.mark.parametrize(
    ("factor", "state", "expected"),
    [
        pytest.param(1.0, 1.0, None, id="equal"),
        pytest.param(2.0, 1.0, ("outside", "aten.mul.Tensor"), id="another factor"),
        pytest.param(1.0, 2.0, ("sequence", "aten.copy_.default"), id="another state"),
    ],
)
@pytest.mark.parametrize("hash_inputs", [False, True], ids=["plain", "hashed inputs"])
def test_overwritten_initialization_introduces_nothing(
    factor: float, state: float, expected: tuple[str, str] | None, hash_inputs: bool
) -> None:
    torch.manual_seed(0)
    kept = nn.Linear(3, 2)
    loaded = {name: value * state for name, value in kept.state_dict().items()}

    def run(*, rebuilt: bool, factor: float) -> Trace:
        with HashDebugTrace(hash_inputs=hash_inputs) as trace:
            model = kept
            if rebuilt:
                model = nn.Linear(3, 2)
                model.load_state_dict(loaded)
            trace.add_result("it", nn.functional.linear(torch.ones(4, 3) * factor, model.weight, model.bias))
        return trace.finish()

    divergence = find(run(rebuilt=False, factor=1.0), run(rebuilt=True, factor=factor)).divergence
    assert expected == (divergence and (divergence.origin, divergence.kernel))
