"""Calls of modules under a trace, without torch's slow way for global hooks: what runs, in which order, and where."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_modules
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
    register_optimizer_step_post_hook,
)

from hashbench import HashDebugTrace
from hashbench.core.trace import module_paths
from hashbench.core.trace.api import Recording
from hashbench.core.trace.callbacks import TraceCallback
from hashbench.core.trace.tracer import native_unavailable

TRACERS = ["python"] if native_unavailable() else ["python", "native"]
_CALL = nn.Module._call_impl
_CODE = _CALL.__code__
_STEP_HOOKS: tuple[dict[int, Any], ...] = (_global_optimizer_pre_hooks, _global_optimizer_post_hooks)


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


def _global_hook(kind: str, hook: Callable[..., Any]) -> Callable[[Outer, torch.Tensor], Any]:
    """A program that has one hook for all modules."""

    def program(model: Outer, x: torch.Tensor) -> Any:
        handle = getattr(torch_modules, f"register_module_{kind}")(hook)
        try:
            model(x).sum().backward()
            return model.linear.weight.grad
        finally:
            handle.remove()

    program.__name__ = f"global_{kind}"
    return program


def _backward_hook(model: Outer, x: torch.Tensor) -> Any:
    model.inner.register_full_backward_hook(_opposite)
    model(x).sum().backward()


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
    graph = torch.jit.trace(model, (x,), check_trace=False).inlined_graph
    return str([node.scopeName() for node in graph.nodes()])


PROGRAMS = [
    _plain,
    _pre_hooks,
    _forward_hooks,
    _global_hooks,
    _global_hook("forward_pre_hook", _changed),
    _global_hook("forward_hook", _changed),
    _global_hook("full_backward_pre_hook", _changed),
    _global_hook("full_backward_hook", lambda *given: tuple(one if one is None else one.neg() for one in given[1])),
    _backward_hook,
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


@pytest.fixture(params=[False, True], ids=["alone", "beside hooks"])
def _hooks(request: pytest.FixtureRequest) -> Iterator[None]:
    """With a hook of another's in force all modules are called by torch's own code."""
    handle = torch_modules.register_module_forward_hook(lambda *_: None) if request.param else None
    yield
    if handle is not None:
        handle.remove()


both = pytest.mark.parametrize("tracer", TRACERS)


@both
@pytest.mark.usefixtures("_hooks")
def test_a_step_inside_a_module_does_not_leave_it(tracer: str) -> None:
    class Steps(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            trace.step()
            return x.sin()

    x = torch.ones(2)
    with HashDebugTrace(tracer=tracer) as trace:
        Steps()(x).cos()
    assert [(record.module, record.iteration) for record in trace] == [("Steps", 1), ("", 1)]


@both
@pytest.mark.usefixtures("_hooks")
def test_trace_reentered_in_module_is_in_none(tracer: str) -> None:
    class Again(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x.sin()
            trace.__exit__(None, None, None)
            trace.__enter__()
            return y.cos()

    x, again, trace = torch.zeros(2), Again(), HashDebugTrace(tracer=tracer)
    with trace:
        again(x).exp()
        Inner()(x)
    modules = [(record.op.split(".")[1], record.module) for record in trace]
    assert modules == [("sin", "Again"), ("cos", ""), ("exp", ""), ("mul", "Inner"), ("sin", "Inner")]


@both
def test_trace_reentered_in_optimizer_step_is_in_none(tracer: str) -> None:
    class Again(torch.optim.SGD):
        def step(self, _closure: Any = None) -> None:
            x.sin()
            trace.__exit__(None, None, None)
            trace.__enter__()
            x.cos()

    x, trace = torch.zeros(2), HashDebugTrace(tracer=tracer)
    with trace:
        Again([nn.Parameter(x)], lr=0.1).step()
    phases = {record.op.split(".")[1]: record.phase for record in trace}
    assert (phases["sin"], phases["cos"]) == ("optimizer", "forward")


@both
@pytest.mark.usefixtures("_hooks")
def test_other_threads_modules_are_not_followed(tracer: str) -> None:
    inside, go_on = threading.Event(), threading.Event()

    class Waits(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inside.set()
            assert go_on.wait(60)
            return x

    class Starts(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            thread = threading.Thread(target=Waits(), args=(x,))
            thread.start()
            assert inside.wait(60)
            y = x.sin()
            go_on.set()
            thread.join()
            return y.cos()

    x = torch.ones(2)
    with HashDebugTrace(tracer=tracer) as trace:
        Starts()(x).exp()
    modules = [(record.op.split(".")[1], record.module) for record in trace]
    assert modules == [("sin", "Starts"), ("cos", "Starts"), ("exp", "")]


@both
@pytest.mark.usefixtures("_hooks")
def test_a_module_at_the_place_of_a_dead_one_has_its_own_name(tracer: str) -> None:
    class Other(Inner):
        pass

    x, places, names = torch.ones(2), [], []
    with HashDebugTrace(tracer=tracer) as trace:
        for number in range(1, 11):
            for kind in (Inner, Other):
                module = kind()
                places.append(id(module))
                names += [kind.__name__ if number == 1 else f"{kind.__name__}@{number}"] * 2
                module(x)
                del module
    assert len(set(places)) < len(places)
    assert [record.module for record in trace] == names


@both
@pytest.mark.usefixtures("_hooks")
def test_modules_keep_their_names_when_others_die(tracer: str) -> None:
    model, x = Outer(), torch.ones(2, 3)
    with HashDebugTrace(tracer=tracer) as trace:
        for _ in range(3):
            model(x)
            Inner()(x)
    modules = list(dict.fromkeys(record.module for record in trace))
    assert modules == ["Outer.linear", "Outer.inner", "Outer", "Inner", "Inner@2", "Inner@3"]


@both
def test_many_modules_each_have_their_name(tracer: str) -> None:
    model, x = nn.Sequential(*[Inner() for _ in range(300)]), torch.ones(2)
    with HashDebugTrace(tracer=tracer) as trace:
        model(x)
    assert list(dict.fromkeys(record.module for record in trace)) == [f"Sequential.{number}" for number in range(300)]


@both
@pytest.mark.usefixtures("_hooks")
def test_a_module_that_calls_itself_is_left_once_for_each_call(tracer: str) -> None:
    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, x: torch.Tensor, depth: int) -> torch.Tensor:
            return self.inner(self(x, depth - 1)).exp() if depth else x.cos()

    again, x = Again(), torch.ones(2)
    with HashDebugTrace(tracer=tracer) as trace:
        again(x, 2).tan()
    modules = [(record.op.split(".")[1], record.module) for record in trace if record.op.split(".")[1] != "mul"]
    twice = [("sin", "Again.inner"), ("exp", "Again")] * 2
    assert modules == [("cos", "Again"), *twice, ("tan", "")]


@both
def test_another_trace_begun_inside_a_module_is_in_none_after_it(tracer: str) -> None:
    second = HashDebugTrace(tracer=tracer)

    class Changes(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first.__exit__(None, None, None)
            second.__enter__()
            return Inner()(x).cos()

    x, first = torch.zeros(2), HashDebugTrace(tracer=tracer)
    first.__enter__()
    Changes()(x).exp()
    second.__exit__(None, None, None)
    modules = [(record.op.split(".")[1], record.module) for record in second]
    assert modules == [("mul", "Inner"), ("sin", "Inner"), ("cos", ""), ("exp", "")]


@both
@pytest.mark.filterwarnings("ignore")
def test_reentered_trace_follows_modules_beside_hooks(tracer: str) -> None:
    model, x = Inner(), torch.ones(2)
    model.register_forward_hook(lambda *_: None)
    trace = HashDebugTrace(tracer=tracer)
    for _ in range(2):
        with trace:
            model(x)
    assert [record.module for record in trace] == ["Inner"] * 4


@pytest.mark.usefixtures("_hooks")
def test_a_module_that_failed_is_left_beside_hooks() -> None:
    class Fails(nn.Module):
        def forward(self) -> None:
            raise ArithmeticError

    x = torch.ones(2)
    with HashDebugTrace() as trace:
        with pytest.raises(ArithmeticError):
            Fails()()
        x.sin()
    assert [record.module for record in trace] == [""]


@both
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_module_that_raised_is_left(tracer: str, error: type[BaseException]) -> None:
    class Fails(nn.Module):
        def forward(self) -> None:
            raise error

    class Goes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fails = Fails()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with pytest.raises(error):
                self.fails()
            return x.sin()

    x = torch.ones(2)
    with HashDebugTrace(tracer=tracer) as trace:
        Goes()(x).cos()
    assert [record.module for record in trace] == ["Goes", ""]


@both
def test_an_optimizer_that_another_thread_steps_ends_no_iteration(tracer: str) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    with HashDebugTrace(tracer=tracer) as trace:
        thread = threading.Thread(target=optimizer.step)
        thread.start()
        thread.join()
        assert trace.iteration is None
        optimizer.step()
        assert trace.iteration == 1


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


def test_hook_registered_during_forward_runs_as_untraced() -> None:
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
def test_global_hooks_only_beside_others_and_first() -> None:
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
def test_trace_is_released_without_garbage_collection(tracer: str, finished: bool, options: dict[str, Any]) -> None:
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
        raw = trace._tracer.raw
        kept = [weakref.ref(one) for one in (trace._tracer, raw, raw.modules, raw.observer, raw.nodes)]
        del trace, raw
        assert [one() for one in kept] == [None] * len(kept)
    finally:
        gc.enable()


class Told(module_paths.ModuleListener):
    """Starts and stops following when told of certain steps."""

    def __init__(self, paths: module_paths.ModulePaths, at: dict[int, Callable[[], None]]) -> None:
        self.paths, self.at, self.steps = paths, at, 0

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:  # noqa: ARG002
        self.steps += 1
        self.at.get(self.steps, lambda: None)()


def test_steps_are_counted_while_nothing_is_followed() -> None:
    paths = module_paths.ModulePaths()
    told = Told(paths, {2: lambda: paths.start(told), 4: paths.stop})
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1)
    following = []
    before = [dict(hooks) for hooks in _STEP_HOOKS]
    paths.keep_counting(told)
    after = register_optimizer_step_post_hook(lambda *_: following.append(paths.following))
    try:
        for _ in range(5):
            optimizer.step()
        paths.stop_counting()
        optimizer.step()
    finally:
        after.remove()
    assert told.steps == 5
    assert following == [False, True, True, False, False, False]
    assert [dict(hooks) for hooks in _STEP_HOOKS] == before


class Wraps(torch.optim.Optimizer):
    """An optimizer that lets another one step within its own step."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner, self.fails = inner, False

    def step(self, closure: Any = None) -> None:
        assert closure is None
        self.inner.step()
        torch.zeros(2).cos()
        if self.fails:
            raise ValueError


@both
def test_a_step_within_a_step_is_part_of_it(tracer: str) -> None:
    inner = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1)
    outer = Wraps(inner)
    with HashDebugTrace(tracer=tracer) as trace:
        for outer.fails in (True, False, False):
            with suppress(ValueError):
                outer.step()
        inner.step()
        torch.zeros(2).sin()
    steps = [(record.op.split(".")[1], record.phase, record.iteration) for record in trace]
    cosines = [("cos", "optimizer", number) for number in (None, None, 1)]
    assert [step for step in steps if step[0] in ("cos", "sin")] == [*cosines, ("sin", "forward", 2)]


def test_suspension_outside_of_a_step_removes_the_hooks_and_resumption_counts_on() -> None:
    """As around compiled code."""
    paths = module_paths.ModulePaths()
    told = Told(paths, {})
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1)
    paths.keep_counting(told)
    paths.start(told)
    paths.remove_hooks()
    assert all(-id(paths.clock) not in hooks for hooks in _STEP_HOOKS)
    paths.install_hooks()
    optimizer.step()
    paths.stop()
    optimizer.step()
    paths.stop_counting()
    assert told.steps == 2
