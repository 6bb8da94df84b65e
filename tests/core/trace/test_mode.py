"""The rules of tracing (docstring of ``hashbench.core.trace``) on real models; nothing changed, kept or left behind."""

from __future__ import annotations

import gc
import random
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import optimizer as optimizer_module

from hashbench import HashDebugTrace
from tests.core.trace.mode_helpers import Attending, Dropping, record, text_of, train, value

pytestmark = pytest.mark.usefixtures("seeded", "each_tracer")


class Twice(nn.Module):
    """Calls one module twice and a shared one from two places."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
        self.again = self.inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.again(self.inner(x)) + 1


def test_module_paths_follow_nesting_repetition_and_sharing() -> None:
    with HashDebugTrace() as trace:
        Twice()(torch.ones(1, 3))
    found = [(r.op.split(".")[1], r.module) for r in trace.finish().records if r.outputs]
    once = [("addmm", "Twice.inner.0"), ("relu", "Twice.inner.1")]
    assert found[-5:] == [*once, *once, ("add", "Twice")]


class Catches(nn.Module):
    """Catches the exception of a module inside it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            return self.inner(x)
        except RuntimeError:
            return x + 1


def test_path_is_right_after_a_caught_exception() -> None:
    with HashDebugTrace() as trace:
        Catches(Catches(nn.Sequential(nn.Linear(7, 7))))(torch.ones(1, 3)).mul(2)
    assert (record(trace, "add").module, record(trace, "mul").module) == ("Catches.inner", "")


class Convolving(nn.Module):
    """Convolution in channels-last, pooling and an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1).to(memory_format=torch.channels_last)
        self.lstm = nn.LSTM(8, 4, batch_first=True, dropout=0.5, num_layers=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x[None, None].contiguous(memory_format=torch.channels_last))
        return self.lstm(nn.functional.adaptive_avg_pool2d(y, (4, 8)).flatten(0, 1))[0]


@pytest.mark.parametrize("options", [{}, {"hash_inputs": True, "source_lines": True}], ids=["plain", "all noted"])
@pytest.mark.parametrize("kind", [Dropping, Attending, Convolving])
def test_trace_changes_no_result_or_generator(kind: type[nn.Module], options: dict[str, bool]) -> None:
    random.seed(1), np.random.seed(1)
    expected = train(kind)
    with HashDebugTrace(**options) as trace:
        found = train(kind)
    assert [value(tensor) for tensor in found] == [value(tensor) for tensor in expected]
    assert (random.random(), np.random.rand()) == (random.Random(1).random(), np.random.RandomState(1).rand())
    assert len(trace.finish().records) > 50


@pytest.mark.parametrize("options", [{}, {"hash_inputs": True, "verbose": True}], ids=["plain", "all noted"])
def test_no_tensor_is_kept_alive(options: dict[str, bool], capsys: pytest.CaptureFixture[str]) -> None:
    dead: list[weakref.ref[Any]] = []
    with HashDebugTrace(**options) as trace:
        leaf = torch.rand(10)
        for _ in range(3):
            x = (leaf[:5] * 2).requires_grad_()
            y = x.tanh().sum()
            y.backward()
            torch.empty(4).resize_(100)
            dead += [weakref.ref(t) for t in (x, y, x.grad, leaf[2:], x.untyped_storage())]
            del x, y
        gc.collect()
        assert [reference() for reference in dead] == [None] * len(dead)
    assert trace.finish().records
    capsys.readouterr()


def hooks_and_modes() -> tuple[Any, ...]:
    """What torch has installed globally."""
    hooks = torch.nn.modules.module
    return (
        dict(hooks._global_forward_hooks),
        dict(hooks._global_forward_pre_hooks),
        dict(hooks._global_forward_hooks_always_called),
        dict(optimizer_module._global_optimizer_pre_hooks),
        dict(optimizer_module._global_optimizer_post_hooks),
        torch.utils._python_dispatch._get_current_dispatch_mode_stack(),
        torch.overrides._get_current_function_mode_stack(),
        nn.Module.__call__,
        nn.Module.__dict__.get("__setattr__"),
        torch.Tensor.__dict__.get("__torch_dispatch__"),
    )


@pytest.mark.parametrize("fails", [False, True], ids=["normally", "by an exception"])
def test_nothing_stays_installed_when_a_trace_is_left(fails: bool) -> None:
    before, trace = hooks_and_modes(), HashDebugTrace()
    try:
        with trace:
            assert hooks_and_modes() != before
            train(Dropping, 1)
            if fails:
                nn.Linear(7, 7)(torch.ones(1, 3))
    except RuntimeError:
        assert fails
    assert hooks_and_modes() == before
    assert trace.failed_op == ("aten.addmm.default" if fails else "")
    assert not trace.is_active()
    assert len(trace.finish().records) > 10


def test_equal_runs_give_equal_text() -> None:
    model, x = Dropping().eval(), torch.ones(3, 6)
    assert text_of(model, x) == text_of(model, x) != text_of(model, x + 1)
