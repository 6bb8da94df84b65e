"""Compiled code: a trace steps aside for it and says so; in a check it runs eagerly, and the row says so."""

from __future__ import annotations

import inspect
import itertools
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from torch._dynamo.utils import counters

from hashbench import HashDebugTrace, Workload, find_divergence
from hashbench.core.catalog import OPAQUE
from hashbench.core.records import OpRecord, Trace
from hashbench.core.trace import file
from hashbench.core.trace.callbacks import TraceCallback
from tests.core.check.test_model import INFERENCE, TRAINING, row_of

BACKENDS = ("eager", "aot_eager")
needs_result = pytest.mark.skipif(
    "result = fn(" not in inspect.getsource(torch._dynamo.eval_frame),
    reason="this torch returns what compiled code computed without keeping it where a trace sees it",
)
X = torch.arange(12.0).reshape(3, 4)


class Net(torch.nn.Module):
    """Linear layers and a norm, which writes its buffers, with or without a graph break between them."""

    def __init__(self, *, breaks: bool = False) -> None:
        super().__init__()
        self.first, self.norm, self.second = torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2)
        self.breaks = breaks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x))
        if self.breaks:
            torch._dynamo.graph_break()
            x = x.cos()
        return self.second(x).sin()


def optimized(model: Net, backend: str) -> Any:
    return torch.compile(model, backend=backend)


def in_place(model: Net, backend: str) -> Any:
    model.compile(backend=backend)
    return model


def function(model: Net, backend: str) -> Any:
    return torch.compile(lambda x: model(x).exp(), backend=backend)


def trained(
    make: Callable[[Net, str], Any], backend: str, trace: HashDebugTrace | None, *, breaks: bool = False
) -> Any:
    """Three steps and a call of a different shape, and how often dynamo compiled and why it stopped."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    model = Net(breaks=breaks)
    compiled = make(model, backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if trace is not None:
        trace.__enter__()
    try:
        for _ in range(3):
            optimizer.zero_grad()
            compiled(X * 2).sum().backward()
            optimizer.step()
        result = compiled(torch.cat([X, X]))
    finally:
        if trace is not None:
            trace.__exit__(None, None, None)
    seen = {name: dict(counters[name]) for name in ("frames", "stats", "graph_break", "recompiles", "unimplemented")}
    return result.detach(), seen


def compilations() -> list[Any]:
    """Return every way to compile, backend, and with or without graph break; those beside a sample that has every two
    of them are exhaustive."""
    found = itertools.product(enumerate((optimized, in_place, function)), enumerate(BACKENDS), (False, True))
    return [
        pytest.param(make, backend, breaks, marks=pytest.mark.exhaustive if (one + other + breaks) % 2 else ())
        for (one, make), (other, backend), breaks in found
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("make", "backend", "breaks"), compilations())
def test_a_trace_adds_no_graph_break_and_no_recompile(make: Any, backend: str, breaks: bool) -> None:
    alone, expected = trained(make, backend, None, breaks=breaks)
    traced, seen = trained(make, backend, HashDebugTrace(hash_inputs=True, source_lines=True), breaks=breaks)
    assert seen == expected
    assert torch.equal(alone, traced)


def traced(program: Callable[[torch.Tensor], Any], *, seed: int = 0, results: bool = True, **options: Any) -> Trace:
    torch._dynamo.reset()
    torch.manual_seed(seed)
    with HashDebugTrace(**options) as trace:
        value = program(X)
    if results:
        trace.add_result("value", value)
    return trace.finish()


@needs_result
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_call_of_compiled_code_is_one_record_that_says_so(backend: str) -> None:
    compiled = torch.compile(lambda x: x.sin().cos() + 1, backend=backend)
    trace = traced(lambda x: compiled(x * 2) * 3)
    before, call, behind = trace.records
    assert [record.op for record in trace.records] == ["aten.mul.Tensor", "torch.compile", "aten.mul.Tensor"]
    assert (call.opaque, before.opaque, behind.opaque) == ("compiled code", "", "")
    assert [ref.source for ref in call.inputs] == [before.id]
    assert [ref.source for ref in behind.inputs] == [call.id]
    assert len(call.outputs) == 1
    assert "opaque=compiled code" in file.dumps(trace)
    assert file.loads(file.dumps(trace)) == trace
    assert find_divergence(trace, trace).divergence is None


def test_a_verdict_of_equal_traces_says_what_was_not_seen() -> None:
    compiled = torch.compile(torch.sin, backend="eager")
    verdict = find_divergence(*(traced(lambda x: compiled(compiled(x))) for _ in range(2)))
    assert verdict.divergence is None
    for text in (verdict.unseen, str(verdict)):
        assert "Compiled code ran 2 times, first as forward//torch.compile#0" in text
        assert OPAQUE["compiled code"] in text
    assert "not all was seen" in repr(verdict)
    eager = find_divergence(*(traced(torch.sin) for _ in range(2)))
    assert eager.unseen == ""


def draw(x: torch.Tensor) -> torch.Tensor:
    return x + torch.rand(3, 4)


def forget(x: torch.Tensor) -> torch.Tensor:
    """Fills memory that was allocated eagerly before."""
    BUFFER[0].copy_(draw(x))
    return x.sin()


BUFFER = [torch.empty(0)]


def into_a_buffer(x: torch.Tensor, compiled: Any) -> torch.Tensor:
    BUFFER[0] = torch.empty(3, 4)
    compiled(x)
    return BUFFER[0] * 2


OWN_RESULT = "its own result"
PROGRAMS: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[torch.Tensor, Any], Any]]] = {
    OWN_RESULT: (draw, lambda x, compiled: compiled(x)),
    "a kernel that reads it": (draw, lambda x, compiled: (compiled(x) * 2).relu()),
    "a kernel behind it that reads nothing of it": (torch.sin, lambda x, compiled: (compiled(x), draw(x))[1]),
    "memory that it writes": (forget, into_a_buffer),
    "a gradient": (draw, lambda x, compiled: gradient(x, compiled)),
}


def gradient(x: torch.Tensor, compiled: Any) -> torch.Tensor:
    leaf = x.clone().requires_grad_()
    compiled(leaf).square().sum().backward()
    assert leaf.grad is not None
    return leaf.grad * 1


def ways() -> list[Any]:
    """Return every backend, with traces compared by results or records, without and with hashed inputs; those beside a
    sample that has every two of them are exhaustive."""
    all_ways = itertools.product(BACKENDS, (True, False), (False, True))
    sampled = {way: ((way[0] == "eager") + way[1] + way[2]) % 2 == 0 for way in all_ways}
    return [pytest.param(*way, marks=() if sample else pytest.mark.exhaustive) for way, sample in sampled.items()]


@pytest.mark.parametrize(("backend", "results", "hash_inputs"), ways())
@pytest.mark.parametrize(
    "what", [pytest.param(OWN_RESULT, marks=needs_result), *[n for n in PROGRAMS if n != OWN_RESULT]]
)
def test_no_kernel_behind_compiled_code_is_named(what: str, backend: str, results: bool, hash_inputs: bool) -> None:
    inner, program = PROGRAMS[what]
    compiled = torch.compile(inner, backend=backend)
    first, second = (
        traced(lambda x: program(x * 2, compiled), seed=seed, results=results, hash_inputs=hash_inputs)
        for seed in (1, 2)
    )
    verdict = find_divergence(first, second)
    assert verdict.divergence is not None
    assert (verdict.divergence.origin, verdict.divergence.kernel) == ("outside", "")
    assert verdict.divergence.node == "forward//torch.compile#0"
    assert "compiled code" in verdict.divergence.detail


@pytest.mark.parametrize("hash_inputs", [False, True])
def test_a_kernel_before_compiled_code_is_named(hash_inputs: bool) -> None:
    compiled = torch.compile(torch.sin, backend="eager")
    runs = [traced(lambda x: compiled(draw(x)).cos(), seed=seed, hash_inputs=hash_inputs) for seed in (1, 2)]
    divergence = find_divergence(*runs).divergence
    assert divergence is not None
    assert (divergence.origin, divergence.kernel) == ("rng", "aten.rand.default")


@needs_result
def test_the_state_that_compiled_code_reads_is_compared() -> None:
    runs = []
    for seed in (1, 2):
        torch._dynamo.reset()
        torch.manual_seed(seed)
        model = Net()
        with HashDebugTrace(model=model, inputs=X) as trace:
            trace.add_result("value", torch.compile(model, backend="eager")(X))
        runs.append(trace.finish())
    divergence = find_divergence(*runs).divergence
    assert divergence is not None
    assert (divergence.origin, divergence.node) == ("state", "parameter/Net.first.weight")


@pytest.mark.parametrize("tracer", ["auto", "python"])
def test_unread_registrations_are_read_by_compiled_code(tracer: str) -> None:
    compiled = torch.compile(lambda x: x.sin(), backend="eager")
    inputs = {"read": X, "unread": torch.ones(2)}
    trace = traced(lambda x: compiled(x * 2), inputs=inputs, tracer=tracer)
    assert [leaf.id for leaf in trace.leaves] == ["input/read", "input/unread"]


@pytest.mark.parametrize("tracer", ["auto", "python"])
def test_compiled_code_may_read_what_was_named_anew_after_it_was_read(tracer: str) -> None:
    compiled = torch.compile(lambda x: x.sin(), backend="eager")
    torch._dynamo.reset()
    with HashDebugTrace(inputs={"first": X}, tracer=tracer) as trace:
        value = X * 2
        trace.register_inputs({"second": X})
        compiled(value)
    assert [leaf.id for leaf in trace.finish().leaves] == ["input/first", "input/second"]


def test_callback_gets_final_records_after_compiled_code() -> None:
    class Kept(TraceCallback):
        wants_records = True

        def __init__(self) -> None:
            self.records: list[OpRecord] = []

        def recorded(self, record: OpRecord) -> None:
            self.records.append(record)

    kept, model = Kept(), Net()
    compiled = torch.compile(model, backend="aot_eager")
    trace = traced(lambda x: gradient(x * 2, compiled), model=model, watcher=kept)
    assert tuple(kept.records) == trace.records


@pytest.mark.parametrize("tracer", ["auto", "python"])
def test_traceless_callback_sees_calls_around_compiled(tracer: str) -> None:
    class Names(TraceCallback):
        wants_trace = False

        def __init__(self) -> None:
            self.names: list[str] = []

        def before(self, _node: str, func: Any, *_: Any) -> None:
            self.names.append(str(func))

    names, model = Names(), Net()
    compiled = torch.compile(model, backend="eager")
    with HashDebugTrace(tracer=tracer, watcher=names) as trace:
        compiled(X.sin()).sum().cos()
    assert names.names == ["aten.sin.default", "aten.sum.default", "aten.cos.default"]
    assert trace.finish().records == trace.finish().leaves == ()


def test_compiled_code_that_raises_leaves_the_trace_as_it_was() -> None:
    def fails(x: torch.Tensor) -> torch.Tensor:
        return x.reshape(5)

    with HashDebugTrace() as trace:
        with pytest.raises(Exception, match=r"reshape|shape"):
            torch.compile(fails, backend="eager")(X)
        torch.nn.Linear(4, 2)(X)
    ops = [record.op for record in trace.finish().records]
    assert ops[0] == "torch.compile"
    assert "aten.addmm.default" in ops
    assert trace.finish().records[-1].module == "Linear"


# -------------------------------------------------------------------------------------------------------- in a sweep


@pytest.mark.parametrize("options", [INFERENCE, TRAINING], ids=["inference", "training"])
@pytest.mark.parametrize("make", [optimized, in_place])
def test_the_row_of_a_compiled_model_says_that_it_ran_eagerly(make: Any, options: Any) -> None:
    row = row_of(lambda: Workload(make(Net(), "inductor"), (X,), iterations=2), options)
    assert (row.accuracy, row.compiled) == ("pass", "ran eagerly: Net")


def test_so_does_that_of_a_model_of_which_a_function_is_compiled() -> None:
    class Calls(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.compile(draw)(x).sum()

    row = row_of(lambda: Workload(Calls(), (X,), iterations=1))
    assert (row.accuracy, row.compiled) == ("pass", "ran eagerly: draw")
    assert row_of(lambda: Workload(Net(), (X,), iterations=1)).compiled == ""


LATE = """
import os
import sys
import torch
from hashbench import BenchmarkRunner, HashDebugTrace, RunOptions, Workload, find_divergence

class Late(torch.nn.Module):
    def forward(self, x):
        return torch.compile(lambda x: x.sin().cos() + torch.rand(4), backend="eager")(x) if self.late else x.sin()

def outcome(late):
    model = Late()
    model.late = late
    return BenchmarkRunner(RunOptions()).check_accuracy(Workload(model, (torch.ones(4),), iterations=1))

plain = outcome(False)
print(plain.accuracy, plain.compiled, "torch._dynamo" in sys.modules, flush=True)
child = os.fork()
if child == 0:
    late = outcome(True)
    print(late.accuracy, len(late.compiled), "torch._dynamo" in sys.modules)
else:
    os.waitpid(child, 0)
    x = torch.ones(4)
    with HashDebugTrace() as trace:
        torch.compile(torch.sin, backend="eager")(x)
    from torch._dynamo.utils import counters
    print([record.op for record in trace], dict(counters["frames"]), dict(counters["graph_break"]))
assert not [finder for finder in sys.meta_path if type(finder).__module__.startswith("hashbench")]
assert type(sys.modules["torch._dynamo"].__loader__).__module__ != "hashbench.core.trace.compiled"
"""


@pytest.mark.slow
def test_first_compile_in_a_run_is_noticed_without_import() -> None:
    done = subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True, check=False)
    expected = ["pass () False", "pass 1 True", "['torch.compile'] {'total': 1, 'ok': 1} {}"]
    assert (done.stdout.splitlines(), done.returncode) == (expected, 0), done.stderr


def test_warning_filters_are_unchanged() -> None:
    def warn() -> None:
        warnings.warn("of the program", stacklevel=1)

    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        before = list(warnings.filters)
        warn()
        with HashDebugTrace():
            warn()
            warnings.filterwarnings("ignore", message="something else")
        kind, *_ = warnings.filters[0]
        assert kind == "ignore"
        assert warnings.filters[1:] == before
    assert len(shown) == 1
