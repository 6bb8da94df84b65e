"""Calls of modules under a trace, without torch's slow way for global hooks: what runs, in which order, and where."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_modules

from hashbench import HashDebugTrace
from hashbench.trace import module_paths
from hashbench.trace.api import Recording
from hashbench.trace.callbacks import TraceCallback
from hashbench.trace.tracer import native_unavailable

TRACERS = ["python"] if native_unavailable() else ["python", "native"]
_CALL = nn.Module._call_impl
_CODE = _CALL.__code__


@pytest.fixture(autouse=True)
def _restored() -> Any:
    yield
    assert _CALL.__code__ is _CODE
    assert _CALL.__kwdefaults__ is None


class Inner(nn.Module):
    def forward(self, x: torch.Tensor, *, times: float = 2.0) -> torch.Tensor:
        return torch.sin(x * times)


class Outer(nn.Module):
    """Calls another module, and computes before and after it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.linear = Inner(), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cos(self.inner(self.linear(x), times=3.0))


def _changed(*given: Any) -> Any:
    """A hook: what is computed from the last thing that it is given."""
    last = given[-1]
    return (last[0].exp(),) if isinstance(last, tuple) else last.abs()


def _other_arguments(_module: nn.Module, args: Any, _kwargs: Any) -> Any:
    return args, {"times": 5.0}


def _opposite(*given: Any) -> Any:
    return (given[1][0].neg(),)


def _plain(model: Outer, x: torch.Tensor) -> Any:
    model(x).sum().backward()


def _pre_hooks(model: Outer, x: torch.Tensor) -> Any:
    model.inner.register_forward_pre_hook(_changed)
    model.inner.register_forward_pre_hook(_other_arguments, with_kwargs=True)
    return model(x)


def _forward_hooks(model: Outer, x: torch.Tensor) -> Any:
    model.inner.register_forward_hook(_changed)
    model.linear.register_forward_hook(_changed, with_kwargs=True)
    return model(x)


def _global_hooks(model: Outer, x: torch.Tensor) -> Any:
    handles = [
        torch_modules.register_module_forward_pre_hook(_changed),
        torch_modules.register_module_forward_hook(_changed),
    ]
    try:
        return model(x)
    finally:
        for handle in handles:
            handle.remove()


def _backward_hooks(model: Outer, x: torch.Tensor) -> Any:
    model.inner.register_full_backward_hook(_opposite)
    model.linear.register_full_backward_pre_hook(_changed)
    model(x).sum().backward()


def _failing(model: Outer, x: torch.Tensor) -> Any:
    model.inner.register_forward_hook(_opposite, always_call=True)
    with pytest.raises(TypeError):
        model.inner(x, times="many")
    with pytest.raises(RuntimeError):
        model(x[:, :2])
    return x + 1


def _in_another_thread(model: Outer, x: torch.Tensor) -> Any:
    thread = threading.Thread(target=model, args=(x,))
    thread.start()
    thread.join()
    return model(x)


def _traced_by_jit(model: Outer, x: torch.Tensor) -> Any:
    torch.jit.trace(model, (x,), check_trace=False)


PROGRAMS = [
    _plain,
    _pre_hooks,
    _forward_hooks,
    _global_hooks,
    _backward_hooks,
    _failing,
    _in_another_thread,
    _traced_by_jit,
]


def _traced(program: Callable[[Outer, torch.Tensor], Any]) -> tuple[list[Any], bytes]:
    torch.manual_seed(0)
    model = Outer()
    with HashDebugTrace() as trace:
        result = program(model, torch.randn(2, 3))
    trace.add_result("result", result)
    content = Recording(trace).content
    return [(record.id, record.module, record.outputs) for record in trace.finish().records], content


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__.strip("_"))
@pytest.mark.filterwarnings("ignore")
def test_modules_are_followed_as_by_torchs_own_call_with_hooks(
    program: Callable[[Outer, torch.Tensor], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    fewer_steps = _traced(program)
    monkeypatch.setattr(module_paths, "known_original", lambda _: None)
    assert fewer_steps == _traced(program)


@pytest.mark.skipif(module_paths.known_original(_CALL) is None, reason="not the code of torch that is known")
def test_a_module_is_called_with_no_more_frames_than_untraced() -> None:
    class Deep(nn.Module):
        def forward(self) -> int:
            depth, frame = 0, sys._getframe(0).f_back
            while frame is not None:
                frame, depth = frame.f_back, depth + 1
            return depth

    model = Deep()
    untraced = model()
    with HashDebugTrace():
        assert model() == untraced


def test_a_hook_that_a_module_registers_while_it_runs_runs_as_untraced() -> None:
    class Registers(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.register_forward_hook(_changed)
            return x.clone()

    x = -torch.ones(2)
    untraced = Registers()(x)
    with HashDebugTrace():
        traced = Registers()(x)
    assert torch.equal(traced, untraced)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_torchs_own_code_is_back_after_a_trace_that_raised(error: type[BaseException]) -> None:
    class Fails(nn.Module):
        def forward(self) -> None:
            assert module_paths.known_original(_CALL) is None or _CALL.__code__ is not _CODE
            raise error

    with pytest.raises(error), HashDebugTrace():
        Fails()()


def test_a_trace_that_ends_inside_a_module_leaves_it_alone_afterwards() -> None:
    class Ends(nn.Module):
        def forward(self, trace: HashDebugTrace, x: torch.Tensor) -> torch.Tensor:
            y = x + 1
            trace.__exit__(None, None, None)
            trace.finish()
            return y + 1

    x, trace = torch.zeros(2), HashDebugTrace()
    trace.__enter__()
    Ends()(trace, x)
    assert [record.module for record in trace] == ["Ends"]


def test_code_of_torchs_that_is_not_known_is_called_with_hooks() -> None:
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    assert module_paths.known_original(call) is None


@pytest.mark.skipif(module_paths.known_original(_CALL) is None, reason="not the code of torch that is known")
@pytest.mark.filterwarnings("ignore")
def test_modules_have_global_hooks_only_where_others_have_some_and_then_before_them() -> None:
    told: list[int] = []
    hooks = (torch_modules._global_forward_pre_hooks, torch_modules._global_forward_hooks)

    def count(*_: Any) -> None:
        told.append(len(hooks[0]))

    model, x = Outer(), torch.ones(2, 3)
    with HashDebugTrace():
        model(x)
        assert [len(one) for one in hooks] == [0, 0]
        handle = torch_modules.register_module_forward_pre_hook(count)
        model.inner(x)
        assert [list(one)[-1] == handle.id for one in hooks] == [True, False]
        handle.remove()
        model(x)
        assert [len(one) for one in hooks] == [1, 1]
    assert [len(one) for one in hooks] == [0, 0]
    assert told == [2]


NOTED: tuple[dict[str, Any], ...] = ({}, {"hash_inputs": True}, {"watcher": TraceCallback()})


@pytest.mark.parametrize("finished", [True, False], ids=["finished", "left"])
@pytest.mark.parametrize("options", NOTED, ids=["plain", "hashed inputs", "watched"])
@pytest.mark.parametrize("tracer", TRACERS)
def test_what_a_trace_keeps_is_released_with_it_without_a_garbage_collection(
    tracer: str, finished: bool, options: dict[str, Any]
) -> None:
    model, x = Outer(), torch.ones(2, 3)
    sparse = torch.eye(3).to_sparse()  # the native tracer has Python record what is done with it
    gc.collect()
    gc.disable()
    try:
        with HashDebugTrace(tracer=tracer, **options) as trace:
            model(x).sum().backward()
            (sparse * 2).to_dense().sin()
        if finished:
            trace.finish()
        kept = [weakref.ref(one) for one in (trace._tracer, trace._tracer._modules, trace._tracer._observer)]
        del trace
        assert [one() for one in kept] == [None, None, None]
    finally:
        gc.enable()
