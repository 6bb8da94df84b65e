"""What a program may do to tensors, threads and the trace itself while it is traced: nothing of it may change, and
nothing may upset the trace."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from hashbench import HashDebugTrace
from hashbench.core.native.library import is_recorded
from hashbench.core.records import Trace
from hashbench.core.trace import native
from hashbench.core.trace.callbacks import TraceCallback
from hashbench.core.trace.digest import digest
from hashbench.core.trace.tracer import native_unavailable

pytestmark = pytest.mark.skipif(bool(native_unavailable()), reason="the native tracer cannot be built here")

WAYS: tuple[Mapping[str, Any], ...] = (
    {"tracer": "native"},
    {"tracer": "native", "hash_inputs": True},
    {"tracer": "python", "hash_inputs": True},
)
NATIVE = WAYS[:2]
either = pytest.mark.parametrize("options", NATIVE, ids=["plain", "hashed inputs"])
each = pytest.mark.parametrize("options", WAYS, ids=["plain", "hashed inputs", "python"])


def names(trace: Trace) -> list[str]:
    return [record.op.split(".")[1] for record in trace.records]


@each
def test_tensors_of_a_model_may_be_swapped(options: Mapping[str, Any]) -> None:
    model, other = nn.Linear(2, 2, bias=False), nn.Parameter(torch.full((2, 2), 3.0))
    with HashDebugTrace(**options) as trace:
        model(torch.ones(1, 2))
        torch.utils.swap_tensors(model.weight, other)
        found = model(torch.ones(1, 2))
    assert found.tolist() == [[6.0, 6.0]]
    leaves = {leaf.id: leaf.digest.value for leaf in trace.finish().leaves}
    assert leaves["parameter/Linear.weight"] == digest(other).value


@each
def test_the_memory_of_a_parameter_may_be_another_before_it_is_read(options: Mapping[str, Any]) -> None:
    model = nn.Linear(2, 2, bias=False)
    given = torch.full((2, 2), 3.0)
    with HashDebugTrace(model=model, **options) as trace:
        model.weight.data = given
        model(torch.ones(1, 2))
    assert [leaf.id for leaf in trace.finish().leaves if leaf.digest == digest(given)] == ["parameter/Linear.weight"]


@either
def test_a_trace_may_be_left_in_another_thread(options: Mapping[str, Any]) -> None:
    with HashDebugTrace(**options) as trace:
        torch.ones(2)
        thread = threading.Thread(target=trace.__exit__, args=(None, None, None))
        thread.start()
        thread.join()
        with HashDebugTrace(**options) as other:
            torch.zeros(2)
    assert not is_recorded()
    assert (names(trace.finish()), names(other.finish())) == (["ones"], ["zeros"])


@either
def test_thread_of_a_trace_left_elsewhere_is_untraced(options: Mapping[str, Any]) -> None:
    trace = HashDebugTrace(**options).__enter__()
    thread = threading.Thread(target=trace.__exit__, args=(None, None, None))
    thread.start()
    thread.join()
    done, begun = threading.Event(), threading.Event()
    others: list[Trace] = []

    def work() -> None:
        with HashDebugTrace(**options) as other:
            begun.set()
            done.wait()
            torch.zeros(2)
        others.append(other.finish())

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait()
    torch.ones(2)
    done.set()
    thread.join()
    torch.ones(2)
    assert not is_recorded()
    assert [names(found) for found in others] == [["zeros"]]


@either
@pytest.mark.parametrize("called", [False, True], ids=["no call between", "a call between"])
def test_a_trace_may_be_left_in_a_hook_of_autograds(called: bool, options: Mapping[str, Any]) -> None:
    weight = torch.ones(3, requires_grad=True)
    with HashDebugTrace(**options) as trace:
        found = weight * 2
        found.register_hook(lambda _: trace.__exit__(None, None, None))
        found.sum().backward()
        if called:
            torch.ones(2)
            assert not is_recorded()
        with HashDebugTrace(**options) as other:
            torch.zeros(2)
    assert names(other.finish()) == ["zeros"]
    assert names(trace.finish())[:2] == ["mul", "sum"]


class Seeing(TorchFunctionMode):
    """Keeps what it is shown."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


@each
def test_programs_own_function_mode_sees_its_calls(options: Mapping[str, Any]) -> None:
    def compute() -> list[str]:
        with Seeing() as mode:
            nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()
        return mode.seen

    with HashDebugTrace(**options):
        seen = compute()
    assert seen == compute()


def test_what_is_allocated_is_blank_whatever_its_kind() -> None:
    with HashDebugTrace(tracer="native") as trace:
        torch._empty_affine_quantized([3], scale=0.1, zero_point=0, dtype=torch.qint8)
    (record,) = trace.finish().records
    assert (record.blank, [output.value for output in record.outputs]) == (True, [""])


@each
def test_a_lazy_module_gets_its_shape(options: Mapping[str, Any]) -> None:
    model = nn.LazyLinear(2)
    with HashDebugTrace(**options):
        assert model(torch.ones(1, 3)).shape == (1, 2)
    with HashDebugTrace(model=nn.LazyLinear(2), **options) as trace:
        torch.ones(2)
    assert names(trace.finish()) == ["ones"]


@each
def test_memory_that_a_storage_has_no_longer_is_not_read(options: Mapping[str, Any]) -> None:
    """A gigabyte of it, so that to read it ends the process."""
    whole = torch.empty(1 << 28)
    whole.untyped_storage().resize_(8)
    with HashDebugTrace(**options) as trace:
        whole.view(2, -1)
    assert names(trace.finish()) == ["view"]


class _Library:
    """What is defined while it is entered."""

    def __init__(self, name: str) -> None:
        self.library = torch.library.Library(name, "DEF")

    def __enter__(self) -> Any:
        self.library.define("op(Tensor x) -> Tensor")
        self.library.impl("op", torch.neg, "CPU")
        return getattr(torch.ops, self.library.ns).op

    def __exit__(self, *_: object) -> None:
        self.library._destroy()


class Ending(TraceCallback):
    """Ends its trace before the second call."""

    def __init__(self) -> None:
        self.calls = 0
        self.end: Callable[[], object] = lambda: None

    def before(self, *_: Any) -> None:
        self.calls += 1
        if self.calls == 2:
            self.end()


@either
def test_call_that_ends_its_trace_runs_as_untraced(options: Mapping[str, Any]) -> None:
    watcher, x = Ending(), torch.arange(3.0)
    trace = HashDebugTrace(watcher=watcher, **options).__enter__()

    def end() -> None:
        trace.__exit__(None, None, None)
        trace.finish()

    watcher.end = end
    y = x.mul(2).add(1)
    y.mul_(2)
    assert y.tolist() == [2.0, 6.0, 10.0]
    assert not is_recorded()
    assert names(trace.finish()) == ["mul"]


@either
@pytest.mark.parametrize("thread", [False, True], ids=["by itself", "in another thread"])
def test_an_op_may_end_the_trace_that_asks_for_its_schema(
    thread: bool, options: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = native.load()
    assert isinstance(loaded, tuple)
    library, ops = loaded
    asked, over = threading.Event(), threading.Event()

    def describe(number: int, name: str, overload: str) -> Any:
        if name.startswith("hashbench_ending"):
            asked.set()
            if thread:
                over.wait()
            else:
                trace.__exit__(None, None, None)
                trace.finish()
        return ops.describe(number, name, overload)

    found: list[torch.Tensor] = []
    monkeypatch.setattr(library, "_describe", describe)
    trace = HashDebugTrace(**options)
    with _Library(f"hashbench_ending_{thread}_{len(options)}") as op:

        def work() -> None:
            found.append(op(torch.ones(2)).add_(1))

        trace.__enter__()
        if thread:
            worker = threading.Thread(target=work)
            worker.start()
            asked.wait()
            trace.__exit__(None, None, None)
            over.set()
            worker.join()
        else:
            work()
    assert found[0].tolist() == [0.0, 0.0]
    assert not is_recorded()


class Wrapping(torch.Tensor):
    """Has no memory of its own."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return NotImplemented

    @staticmethod
    def __new__(cls) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, (2,))


def test_ctrl_c_while_a_tensor_is_looked_at_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapping = Wrapping()
    monkeypatch.setattr(native, "has_no_data", lambda *_: signal.raise_signal(signal.SIGINT))
    below = torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.Python))
    with pytest.raises(KeyboardInterrupt), HashDebugTrace(tracer="native"), below:
        wrapping.detach()
