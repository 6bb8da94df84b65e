"""The native tracer changes nothing of what it watches, and sees what a dispatch mode does not."""

from __future__ import annotations

import contextlib
import gc
import itertools
import signal
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hashbench import HashDebugTrace
from hashbench.core.diagnose.replay.controls.perturbations import _heap
from hashbench.core.divergence import find
from hashbench.core.errors import HashbenchError
from hashbench.core.native.library import Library, is_recorded
from hashbench.core.records import Trace
from hashbench.core.trace import callbacks, file, native, raw, reads
from hashbench.core.trace.callbacks import TraceCallback
from hashbench.core.trace.digest import digest, untraced
from hashbench.core.trace.tracer import native_unavailable
from tests.core.trace.native import programs
from tests.core.trace.native.tracer_helpers import alone, names, scaled, traced

pytestmark = pytest.mark.skipif(native_unavailable() is not None, reason="the native tracer cannot be built here")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def profiled(compute: Callable[[], Any]) -> list[str]:
    """The ops that torch's own profiler sees in the untraced program, outermost kernels only: those that it says called
    no other op, or which are no composite."""
    with torch.profiler.profile() as profile:
        compute()
    return [event.name for event in profile.events() if event.name.startswith("aten::")]


class Residual(nn.Module):
    """Gradients of ``x`` come from two places and are added up."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.BatchNorm2d(2), nn.Hardswish(inplace=True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


def step(model: nn.Module) -> list[torch.Tensor]:
    model.zero_grad()
    x = torch.rand(2, 2, 5, 5, generator=torch.Generator().manual_seed(1), requires_grad=True)
    model(model(x)).prod().backward()
    return [x.grad, *(parameter.grad for parameter in model.parameters())]


@pytest.mark.parametrize("options", [{}, {"hash_inputs": True, "source_lines": True}], ids=["plain", "all noted"])
def test_gradients_are_added_in_place_as_they_are_untraced(options: dict[str, Any]) -> None:
    model = Residual()
    expected = step(model)
    trace, found = traced(lambda: step(model), **options)
    assert [digest(tensor) for tensor in found] == [digest(tensor) for tensor in expected]
    assert "aten.add_.Tensor" in [record.op for record in trace.records if record.phase == "backward"]
    with HashDebugTrace(tracer="python") as mode:
        step(model)
    assert "aten.add.Tensor" in [record.op for record in mode.finish().records if record.phase == "backward"]


@pytest.mark.parametrize("options", [{}, {"hash_inputs": True}], ids=["plain", "hashed inputs"])
def test_mode_dependent_formulas_are_the_untraced_ones(options: dict[str, Any]) -> None:
    values = torch.rand(200, requires_grad=True)

    def compute() -> torch.Tensor:
        return torch.autograd.grad(values.prod(), values)[0]

    expected = compute()
    _, found = traced(compute, **options)
    assert digest(found) == digest(expected)


def test_a_trace_with_all_noted_has_the_records_of_one_without() -> None:
    def trace_of(**options: Any) -> Trace:
        torch.manual_seed(0)
        model = Residual()
        return traced(lambda: step(model), model=model, **options)[0]

    plain = trace_of()
    noted = trace_of(hash_inputs=True, source_lines=True, watcher=TraceCallback())
    assert [(record.id, record.outputs, record.arguments) for record in plain.records] == [
        (record.id, record.outputs, record.arguments) for record in noted.records
    ]
    assert [[ref.source for ref in record.inputs] for record in plain.records] == [
        [ref.source for ref in record.inputs] for record in noted.records
    ]
    assert plain.leaves == noted.leaves


class Looking(TraceCallback):
    """Needs no trace."""

    wants_trace = False

    def __init__(self) -> None:
        self.nodes: list[str] = []
        self.leaves = self.called = 0

    def before(self, node: str, *_: Any) -> None:
        self.nodes.append(node)

    def after(self, *_: Any) -> None:
        self.called += 1

    def leaf(self, *_: Any) -> None:
        self.leaves += 1


@pytest.mark.parametrize("program", map(programs.made, range(12)))
def test_traceless_callback_sees_untraced_calls(program: Callable[[], Any]) -> None:
    watcher = Looking()
    torch.manual_seed(0)
    trace, _ = traced(program)
    torch.manual_seed(0)
    empty, _ = traced(program, watcher=watcher)
    assert watcher.nodes == [record.id for record in trace.records]
    assert (len(watcher.nodes), 0) == (watcher.called, watcher.leaves)
    assert (empty.records, empty.leaves, empty.results) == ((), (), ())


def test_traceless_callback_gets_aliases() -> None:
    """A Python object of a tensor counts as one more owner of it, and autograd looks at their number."""
    whole = torch.ones(4, 4)
    parts = [whole, whole.t(), whole[1:], whole.sin().t()]
    shown: list[torch.Tensor] = []
    watcher = Looking()
    watcher.before = lambda _node, _func, args, _kwargs: shown.append(args[0])  # type: ignore[method-assign]
    traced(lambda: [part.cos() for part in parts], watcher=watcher)
    assert [tensor.data_ptr() for tensor in shown] == [part.data_ptr() for part in parts]
    assert not any(tensor is part for tensor, part in zip(shown, parts, strict=True))


@pytest.mark.parametrize("tracer", ["native", "python"])
def test_nothing_is_hashed_for_a_watcher_that_needs_no_trace(tracer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> Any:
        raise AssertionError("hashed")

    for module, name in ((raw, "raw_digest"), (raw, "_hash"), (reads, "raw_digest"), (callbacks, "raw_digest")):
        monkeypatch.setattr(module, name, refused)
    watcher, model = Looking(), Residual()
    with HashDebugTrace(tracer=tracer, watcher=watcher, model=model, inputs=torch.ones(2)) as trace:
        found = step(model)
    trace.add_result("gradient", found[0])
    finished = trace.finish()
    assert (finished.records, finished.leaves, finished.results) == ((), (), ())
    assert any(node.startswith("backward/Residual.inner.1/aten.native_batch_norm_backward") for node in watcher.nodes)


class Stopping(TraceCallback):
    """Ends the run once a custom op has been called, as whoever looks for one call does."""

    def after(self, node: str, func: Any, *_: Any) -> None:
        if func.namespace != "aten":
            raise KeyError(node)


@pytest.mark.parametrize("watcher", [Looking, Stopping])
def test_a_custom_op_that_has_no_record_ends_what_is_inside_it(watcher: type[TraceCallback]) -> None:
    """Else what later traces record would be kept as made inside it, for as long as the process lives."""
    library = native.load()
    assert isinstance(library, tuple)
    assert inside(library[0]) == 0
    with contextlib.suppress(KeyError):
        traced(lambda: scaled(torch.ones(3)), watcher=watcher())
    assert inside(library[0]) == 0


def inside(library: Library) -> int:
    """How many records count as made inside of an op that this thread is in, once there is one more."""
    with HashDebugTrace(tracer="native") as trace:
        torch.ones(3)
        found = int(library.open())
        library.close(trace._tracer.nodes.recorder, found, -1)  # type: ignore[union-attr]
    return found


def test_every_op_of_a_step_is_one_that_the_profiler_sees_untraced() -> None:
    model = Residual()
    step(model)
    trace, _ = traced(lambda: step(model))
    seen = profiled(lambda: step(model))
    recorded = [f"aten::{record.op.split('.')[1]}" for record in trace.records]
    assert all(recorded.count(name) <= seen.count(name) for name in set(recorded))
    for name in ("convolution", "native_batch_norm", "hardswish_", "add", "prod", "add_"):
        assert recorded.count(f"aten::{name}") == seen.count(f"aten::{name}") > 0


@torch.library.custom_op("hashbench_tests::by_numpy", mutates_args=())
def by_numpy(x: torch.Tensor) -> torch.Tensor:
    made = torch.empty_like(x)
    made.numpy()[:] = x.numpy() + 1
    return made


@pytest.mark.parametrize("options", [{}, {"hash_inputs": True}], ids=["plain", "hashed inputs"])
def test_kernels_inside_a_custom_op_are_seen(options: dict[str, Any]) -> None:
    x = torch.rand(3)
    trace, _ = traced(lambda: scaled(x).cos(), **options)
    assert names(trace) == ["aten.sin.default", "aten.mul.Tensor", "hashbench_tests.scaled.default", "aten.cos.default"]
    multiplied, outer, cosine = trace.records[1:]
    assert [record.inside for record in trace.records] == [outer.id, outer.id, "", ""]
    assert file.loads(file.dumps(trace)) == trace
    assert multiplied.outputs[0] == digest(x.sin() * 2)
    assert [ref.source for ref in cosine.inputs] == [outer.id if options else multiplied.id]


@torch.library.custom_op("hashbench_tests::counted", mutates_args=())
def counted(x: torch.Tensor) -> torch.Tensor:
    made = torch.zeros_like(x)
    made.numpy()[:] = next(CALLS)
    return made


@torch.library.custom_op("hashbench_tests::around", mutates_args=())
def around(x: torch.Tensor) -> torch.Tensor:
    return counted(x) * 2


CALLS = itertools.count()


@pytest.mark.parametrize("options", [{}, {"hash_inputs": True}], ids=["plain", "hashed inputs"])
def test_verdict_names_kernel_and_custom_op(options: dict[str, Any]) -> None:
    def run() -> Trace:
        with HashDebugTrace(tracer="native", **options) as trace:
            found = around(torch.ones(3, requires_grad=True)).sin()
        trace.add_result("output", found)
        return trace.finish()

    verdict = find(run(), run())
    assert verdict.divergence is not None
    assert (verdict.divergence.kernel, verdict.divergence.inside) == (
        "hashbench_tests.counted.default",
        "hashbench_tests.around.default",
    )
    assert "hashbench_tests.counted.default inside hashbench_tests.around.default" in repr(verdict)


def test_what_a_custom_op_writes_behind_torchs_back_is_its_own() -> None:
    x = torch.rand(3)
    trace, _ = traced(lambda: by_numpy(x) + 1)
    *_, scripted, added = trace.records
    assert (scripted.op, added.op) == ("hashbench_tests.by_numpy.default", "aten.add.Tensor")
    assert scripted.outputs == (digest(x + 1),)
    assert added.inputs[0].source == scripted.id


def test_partial_view_is_a_leaf_of_its_part() -> None:
    memory = torch.rand(4, 4)
    trace, _ = traced(lambda: (memory[1] + 1, memory[:, 2] + 1))
    assert len(trace.leaves) == 1
    first, second = memory[1], memory[:, 2]
    trace, _ = traced(lambda: (first + 1, second + 1, first + 2))
    assert [leaf.digest for leaf in trace.leaves] == [digest(first), digest(second)]
    assert [record.inputs[0].source for record in trace.records] == ["other/#0", "other/#1", "other/#0"]


def test_forwarded_and_own_calls_form_one_graph() -> None:
    def compute() -> torch.Tensor:
        sparse = torch.rand(3, 3).to_sparse()
        dense = (sparse * 2).to_dense()
        return dense.add_(1) @ torch.rand(3, 3)

    trace, _ = traced(compute)
    writers = {record.id for record in trace.records}
    assert not trace.leaves
    assert {ref.source for record in trace.records for ref in record.inputs} <= writers
    product = trace.records[-1]
    assert [ref.source.rpartition("/")[2] for ref in product.inputs] == ["aten.add_.Tensor#0", "aten.rand.default#1"]


class FailingError(Exception):
    """Raised inside an op."""


@torch.library.custom_op("hashbench_tests::failing", mutates_args=())
def failing(x: torch.Tensor) -> torch.Tensor:
    x.cos()
    raise FailingError


@pytest.mark.parametrize("options", [{}, {"hash_inputs": True}], ids=["plain", "hashed inputs"])
def test_error_leaves_torch_and_next_trace_unchanged(options: dict[str, Any]) -> None:
    trace = HashDebugTrace(tracer="native", **options)
    with pytest.raises(FailingError), trace:
        failing(torch.ones(2))
    assert trace.failed_op == "hashbench_tests.failing.default"
    assert not is_recorded()
    with pytest.raises(RuntimeError, match="must match"), HashDebugTrace(tracer="native", **options) as trace:
        torch.ones(2) + torch.ones(3)
    assert trace.failed_op == "aten.add.Tensor"
    found, _ = traced(lambda: torch.ones(2) + 1, **options)
    assert names(found) == ["aten.ones.default", "aten.add.Tensor"]


@torch.library.custom_op("hashbench_tests::interrupted", mutates_args=())
def interrupted(x: torch.Tensor) -> torch.Tensor:
    x.cos()
    signal.raise_signal(signal.SIGINT)  # Ctrl-C, which Python raises here
    return x.sin()


def too_large() -> torch.Tensor:
    return torch.ones(2).repeat(2**50)  # more than any machine has


@pytest.mark.parametrize("options", [{}, {"hash_inputs": True}], ids=["plain", "hashed inputs"])
@pytest.mark.parametrize(
    ("fails", "raised"),
    [(lambda: interrupted(torch.ones(2)), KeyboardInterrupt), (too_large, RuntimeError)],
    ids=["Ctrl-C", "out of memory"],
)
def test_a_trace_goes_on_after_an_op_that_was_ended(
    fails: Callable[[], torch.Tensor], raised: type[BaseException], options: dict[str, Any]
) -> None:
    def compute() -> torch.Tensor:
        weight = torch.rand(3, requires_grad=True)
        with pytest.raises(raised):
            fails()
        weight.exp().sum().backward()
        return weight.grad

    untraced = compute()
    torch.manual_seed(0)
    found, gradient = traced(compute, **options)
    assert not is_recorded()
    assert torch.equal(gradient, untraced)
    by_op = {record.op.split(".")[1]: record for record in found.records}
    assert list(by_op)[-6:] == ["exp", "sum", "ones_like", "expand", "mul", "detach"]
    assert [one.source for one in by_op["mul"].inputs] == [by_op["ones_like"].id, by_op["exp"].id]


def test_record_with_failed_digest_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise FailingError

    with HashDebugTrace(tracer="native") as trace:
        first = torch.rand(3)
        sparse = first.to_sparse()
        with monkeypatch.context() as patch:
            patch.setattr(raw, "raw_digest", fails)
            with pytest.raises(FailingError):
                sparse.neg()
        second = first * 2
        third = second + first
    trace.add_result("third", third)
    finished = trace.finish()
    added = finished.records[-1]
    assert [ref.source for ref in added.inputs] == ["forward//aten.mul.Tensor#0", "forward//aten.rand.default#0"]
    assert finished.results[0].source == added.id == "forward//aten.add.Tensor#0"


def test_a_trace_in_another_thread_meanwhile_is_refused() -> None:
    refused: list[str] = []

    def other() -> None:
        try:
            with HashDebugTrace(tracer="native"):
                pass
        except HashbenchError as error:
            refused.append(str(error))

    with HashDebugTrace(tracer="native") as trace:
        thread = threading.Thread(target=other)
        with untraced():
            thread.start()
        thread.join()
        torch.ones(2)
    (said,) = refused
    assert "another thread" in said
    assert names(trace.finish()) == ["aten.ones.default"]


def test_no_tensor_kept_alive_nor_address_confused() -> None:
    with HashDebugTrace(tracer="native") as trace:
        tensor = torch.rand(1000)
        seen = weakref.ref(tensor)
        doubled = tensor * 2
        del tensor
        assert seen() is None
        for _ in range(50):  # some of these get the memory of the first
            torch.rand(1000)
    records = trace.finish().records
    assert all(not record.inputs for record in records if record.op.startswith("aten.rand"))
    assert digest(doubled) == records[1].outputs[0]


def test_structs_of_dead_storages_are_reused() -> None:
    with HashDebugTrace(tracer="native"):
        places = {torch.rand(8).untyped_storage()._cdata for _ in range(400)}
    assert len(places) < 100


@pytest.mark.skipif(_heap() is None, reason="this C library does not say what its heap holds")
@pytest.mark.parametrize(("elements", "calls"), [(1 << 15, 3_000), (8, 11_000)], ids=["large", "small"])
def test_structs_of_dead_storages_are_released_soon(elements: int, calls: int) -> None:
    """A quarter as many calls later where they make large storages, between which the structs would lie, as many where
    they make small ones."""
    library = _heap()
    assert library is not None

    def growth(*, lived: bool) -> int:
        """Bytes by which the heap grows with the records of the calls, less the structs that are given back."""
        with HashDebugTrace(tracer="native"):
            held = []
            for _ in range(10_000):
                tensor = torch.rand(8)
                if lived:
                    held.append(tensor)
            del held, tensor
            before = library.mallinfo2().uordblks
            for _ in range(calls):
                torch.empty(elements)
            return int(library.mallinfo2().uordblks - before)

    growth(lived=False)  # of tables that the next trace finds
    assert growth(lived=False) - growth(lived=True) > 10_000 * 80


class Counting(TorchDispatchMode):
    """Another mode of the program's own."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("options", [{}, {"hash_inputs": True}], ids=["plain", "hashed inputs"])
def test_programs_own_dispatch_mode_sees_each_op_once(options: dict[str, Any]) -> None:
    def compute() -> list[str]:
        with Counting() as mode:
            torch.rand(3).sin().sum()
        return mode.seen

    trace, seen = traced(compute, **options)
    assert names(trace) == seen == compute()


class Bare(torch.Tensor):
    """A subclass whose ops reach the kernels with the subclass itself, as torch's ``no_dispatch`` does."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C._DisableTorchDispatch():
            return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("options", [{}, {"hash_inputs": True}], ids=["plain", "hashed inputs"])
def test_subclass_below_its_dispatch_is_recorded(options: dict[str, Any]) -> None:
    """torch looks up what Python registered by an argument's own interpreter, which knows no fallback."""
    x, plain = torch.Tensor._make_subclass(Bare, torch.ones(3)), torch.ones(3)
    trace, total = traced(lambda: torch.stack([x * x, x]).sum(), **options)
    expected, _ = traced(lambda: torch.stack([plain * plain, plain]).sum(), **options)
    assert names(trace) == names(expected)
    assert float(total) == 6
    assert torch._C._dispatch_keys(x).has(torch._C.DispatchKey.Python)  # as before the trace
    assert (x + 1).tolist() == [2, 2, 2]


@pytest.mark.parametrize("tracer", ["native", "python"])
def test_a_trace_is_released_with_its_last_reference(tracer: str) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gc.disable()
    try:
        with HashDebugTrace(tracer=tracer) as trace:
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        kept = weakref.ref(trace._tracer)
        del trace
        assert kept() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("options", [{}, {"hash_inputs": True}], ids=["plain", "hashed inputs"])
@pytest.mark.parametrize("of", ["a leaf", "what an op wrote"])
def test_a_conjugated_view_writes_nothing(of: str, options: dict[str, Any]) -> None:
    x = torch.ones(3, dtype=torch.complex64)
    with HashDebugTrace(tracer="native", **options) as trace:
        (x if of == "a leaf" else x * 2).conj().add(1)
    written = {record.op: len(record.outputs) for record in trace.finish().records}
    assert (written["aten._conj.default"], written["aten.add.Tensor"]) == (0, 1)


class Refusing(TraceCallback):
    """Fails at the second leaf."""

    def __init__(self, error: type[Exception]) -> None:
        self.leaves, self.error = 0, error

    def leaf(self, _node: str, _tensor: torch.Tensor) -> None:
        self.leaves += 1
        if self.leaves == 2:
            raise self.error


@pytest.mark.parametrize("error", [RuntimeError, ValueError])
def test_callback_failing_at_a_leaf_keeps_other_leaves(error: type[Exception]) -> None:
    first, second, third = (torch.full((2,), float(number)) for number in range(3))
    with HashDebugTrace(tracer="native", watcher=Refusing(error)) as trace:
        first.sin()
        with contextlib.suppress(ValueError):  # an op with a tensor that raises RuntimeError is tried in another way
            second.sin()
        third.sin()
        second.cos()
    finished = trace.finish()
    digests = {leaf.id: leaf.digest for leaf in finished.leaves}
    read = [digests[record.inputs[0].source] for record in finished.records]
    assert read[-2:] == [digest(third), digest(second)]
    assert read[0] == digest(first)


class Ending:
    """What an op that ends its trace finds: the trace alone, so that it may be dropped."""

    def __init__(self) -> None:
        self.held: list[HashDebugTrace] = []

    def end(self, *, finished: bool, dropped: bool) -> None:
        self.held[0].__exit__(None, None, None)
        if finished:
            self.held[0].finish()
        if dropped:
            self.held.clear()


ENDING = Ending()


@torch.library.custom_op("hashbench_tests::ending", mutates_args=())
def ending(x: torch.Tensor, finished: bool, dropped: bool) -> torch.Tensor:
    y = x.sin()
    ENDING.end(finished=finished, dropped=dropped)
    return y.cos()


_ENDS = """
from tests.core.trace.native import test_tracer as tests
for options in ({}, {"hash_inputs": True}):
    for finished, dropped in ((False, False), (True, False), (False, True), (True, True)):
        tests.ENDING.held.append(tests.HashDebugTrace(tracer="native", **options))
        tests.ENDING.held[0].__enter__()
        tests.ending(tests.torch.ones(3), finished, dropped)
        assert not tests.is_recorded()
        tests.ENDING.held.clear()
        with tests.HashDebugTrace(tracer="native", **options) as trace:
            tests.scaled(tests.torch.ones(3))
        assert len(trace.finish().records) == 4
print("done")
"""


@pytest.mark.slow
def test_op_may_end_and_drop_its_trace() -> None:
    alone(_ENDS)


@pytest.mark.parametrize("options", [{}, {"hash_inputs": True}], ids=["plain", "hashed inputs"])
def test_failed_op_is_named_on_both_sides(options: dict[str, Any]) -> None:
    with HashDebugTrace(tracer="native", **options) as trace:
        with pytest.raises(RuntimeError, match="must match"):
            torch.ones(2) + torch.ones(3)
        with pytest.raises(RuntimeError):
            torch.eye(3).to_sparse().mm(torch.ones(2, 2))
    assert trace.failed_op == "aten.mm.default"


def test_an_error_of_a_trace_that_raised_is_not_the_next_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise FailingError

    def compute() -> None:
        with monkeypatch.context() as patch:
            patch.setattr("hashbench.core.trace.native.forwarded.raw_digest", fails)
            torch.ones(2).to_sparse()
        raise KeyError

    with pytest.raises(KeyError):
        traced(compute)
    trace, _ = traced(lambda: torch.ones(2))
    assert names(trace) == ["aten.ones.default"]
