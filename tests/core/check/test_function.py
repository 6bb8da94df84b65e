"""Functions in place of models: what their runs share, what they do not, and what they are compared by."""

from __future__ import annotations

import functools
import os
import random
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from hashbench.core.check.function import FunctionCall, check_function, device_of, fresh_copy
from hashbench.core.errors import HashbenchError
from hashbench.core.records import Row, RunOptions

OPTIONS = RunOptions(diagnose_budget=0)


def examine(function, *args, options: RunOptions = OPTIONS, every_op: bool = False, **kwargs) -> Row:
    return check_function(FunctionCall.of(function, args, kwargs), "it", options, every_op=every_op)[0]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.layer(x)

    def twice(self, x: torch.Tensor) -> torch.Tensor:
        return self(self(x))


@pytest.mark.slow
@pytest.mark.parametrize(("seconds", "runs", "expected"), [(0.0, None, 5), (1.1, None, 2), (0.0, 2, 2), (0.0, 7, 7)])
def test_quick_functions_run_more_often(
    seconds: float, runs: int | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hashbench.core.check.function.QUICK_SECONDS", 1.0)  # a busy machine may take more than 50 ms
    calls = []

    def function() -> int:
        calls.append(1)
        time.sleep(seconds)
        return 1

    options = replace(OPTIONS, runs=runs)
    row, _ = check_function(FunctionCall.of(function, (), {}), "it", options, quick_runs=5)

    assert (len(calls), row.runs, row.accuracy) == (expected, expected, "pass")


# ------------------------------------------------------------------------------------------------------- copies


def test_copies_keep_shared_memory_and_references() -> None:
    base, net = torch.zeros(4), Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=1)
    call = fresh_copy(FunctionCall(print, (base, base[1:3], net), {"optimizer": optimizer}))
    call.args[0][1] = 7

    assert call.args[1].tolist() == [7, 0]
    assert call.kwargs["optimizer"].param_groups[0]["params"][0] is call.args[2].layer.weight
    assert call.args[2] is not net
    assert base.tolist() == [0, 0, 0, 0]


def test_a_tensor_in_the_middle_of_a_graph_is_copied_as_a_leaf() -> None:
    middle = torch.ones(2, requires_grad=True) * 3
    copied = fresh_copy(FunctionCall(print, ([middle],))).args[0][0]

    assert copied.is_leaf
    assert copied.requires_grad
    assert copied.tolist() == [3, 3]


@pytest.mark.parametrize("bind", [lambda net: net, lambda net: net.twice, lambda net: functools.partial(net.forward)])
def test_a_module_that_is_called_is_copied(bind) -> None:
    net = Net()
    assert examine(bind(net), torch.ones(2)).accuracy == "pass"
    assert net.calls == 0


def test_only_stateful_fixtures_are_copied() -> None:
    lock, generator, net, numbers = threading.Lock(), random.Random(1), Net(), np.random.default_rng(1)
    fixtures = {"lock": lock, "nested": [{"net": net, "lock": lock}], "generator": generator, "numbers": numbers}
    copied = fresh_copy(FunctionCall(print, (), fixtures, wholly=False)).kwargs

    assert copied["lock"] is lock
    assert copied["nested"][0]["lock"] is lock
    assert copied["nested"][0]["net"] is not net
    assert copied["generator"] is not generator
    assert copied["numbers"].random() == numbers.random()


# ----------------------------------------------------------------------------------------------- what is compared


def entropy() -> float:
    return random.SystemRandom().random()


def write_into(x: torch.Tensor) -> int:
    x.fill_(entropy())
    return 1


def gradient_of(x: torch.Tensor) -> int:
    (x * entropy()).sum().backward()
    return 1


def train(net: nn.Module) -> int:
    (net.layer(torch.ones(2)) * entropy()).sum().backward()
    return 1


def step(net: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    for parameter in net.parameters():
        parameter.grad = torch.full_like(parameter, entropy())
    optimizer.step()
    return 1


def net_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    net = Net()
    return net, torch.optim.SGD(net.parameters(), lr=0, momentum=0.5)


@pytest.mark.parametrize(
    ("function", "arguments", "differing"),
    [
        pytest.param(write_into, lambda: [torch.ones(2)], "input.0", id="an argument that is written"),
        pytest.param(gradient_of, lambda: [torch.ones(2, requires_grad=True)], "input_grad.0", id="its gradient"),
        pytest.param(train, lambda: [Net()], "grad.0.layer.weight, grad.0.layer.bias", id="gradients of a module"),
        pytest.param(step, net_and_optimizer, "optimizer.1.0.momentum_buffer", id="the state of an optimizer"),
    ],
)
def test_what_a_function_changes_is_compared(function, arguments, differing) -> None:
    row = examine(function, *arguments())
    assert row.accuracy == "eager_two_runs_differ"
    assert differing in row.differing_results


@pytest.mark.parametrize(("every_op", "accuracy"), [(False, "pass"), (True, "eager_two_runs_differ")])
def test_an_op_whose_result_is_dropped_counts_where_every_op_does(every_op: bool, accuracy: str) -> None:
    def dropped() -> torch.Tensor:
        torch.ones(1) * entropy()
        return torch.ones(1)

    assert examine(dropped, every_op=every_op).accuracy == accuracy


def test_a_function_that_returns_nothing_is_compared_by_its_ops() -> None:
    row = examine(lambda: torch.full((2,), entropy()).sum() and None)
    assert (row.accuracy, row.kernel) == ("eager_two_runs_differ", "aten.full.default")


def test_a_second_run_without_any_op_is_a_difference() -> None:
    ops = iter([True])
    row = examine(lambda: torch.ones(1) and None if next(ops, False) else None)
    assert (row.accuracy, row.origin) == ("eager_two_runs_differ", "sequence")


def test_a_function_that_does_nothing_shows_nothing() -> None:
    with pytest.raises(HashbenchError, match=r"nothing to compare: .* ran no op .* allow_empty=True"):
        examine(lambda: None)


# ---------------------------------------------------------------------------------------------------- how it runs


def test_modules_are_named_by_their_class_and_several_by_their_place() -> None:
    def both(one: Net, other: Net) -> torch.Tensor:
        return one.layer(other.layer(torch.ones(2))) * entropy() + one(torch.ones(2))

    single = examine(lambda net: net(torch.full((2,), entropy())), Net())
    several = examine(lambda x, nets: nets["b"](x * entropy()), torch.ones(2), nets={"a": Net(), "b": Net()})

    assert (single.kernel, several.kernel) == ("aten.full.default", "aten.mul.Tensor")
    assert "calls" not in single.differing_results
    assert examine(both, Net(), Net()).kernel == "aten.mul.Tensor"


def refused() -> torch.Tensor:
    """Torch has no deterministic implementation of this on the CPU."""
    return torch.zeros(4).put_(torch.tensor([1]), torch.ones(1), accumulate=False)


@pytest.mark.filterwarnings("ignore:put_ does not have a deterministic implementation")
def test_an_op_that_is_refused_is_run_again_with_warnings() -> None:
    row = examine(refused, options=RunOptions(deterministic="on", diagnose_budget=0))
    assert (row.accuracy, row.deterministic, row.nondeterministic_op) == ("pass", "warn", "aten.put_.default")


def test_op_refused_by_the_callers_settings_raises() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(RuntimeError, match="deterministic implementation") as caught:
            examine(refused)
    finally:
        torch.use_deterministic_algorithms(False)
    assert caught.value.__notes__ == ["(hashbench: raised in run 1 of 2)"]


def test_each_run_begins_in_the_same_place_and_random_state(tmp_path) -> None:
    seen = []

    def wandering() -> torch.Tensor:
        seen.append((os.getcwd(), random.random(), np.random.rand()))  # noqa: PTH109
        os.chdir(tmp_path)
        return torch.ones(1)

    assert examine(wandering, options=RunOptions(runs=3, diagnose_budget=0)).runs == 3
    assert len(set(seen)) == 1


def test_exceptions_in_diagnosis_stay_in_the_evidence() -> None:
    runs = iter(range(5))

    def fails_later() -> torch.Tensor:
        if next(runs, None) is None:
            raise SystemError("too often")
        return torch.full((1,), entropy())

    row = examine(fails_later, options=RunOptions(diagnose_budget=2, replays=2))

    assert row.accuracy == "eager_two_runs_differ"
    assert "a run failed: SystemError: too often" in row.evidence.text


def test_an_interrupt_ends_a_diagnosis() -> None:
    runs = iter(range(3))

    def interrupted() -> torch.Tensor:
        if next(runs, None) is None:
            raise KeyboardInterrupt
        return torch.full((1,), entropy())

    with pytest.raises(KeyboardInterrupt):
        examine(interrupted)


def test_the_device_is_that_of_the_arguments() -> None:
    assert device_of(FunctionCall(print, (torch.ones(1), Net()))) == "cpu"
    assert device_of(FunctionCall(print, (torch.ones(1), [nn.Linear(1, 1, device="meta")]))) == "meta"
