"""Graphs that Inductor compiled: every kernel and op in them is a record; nothing changes; what is not seen is said."""

from __future__ import annotations

import gc
import json
import re
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._inductor.codecache
import torch._inductor.config
import xxhash
from torch._dynamo.utils import counters, guard_failures
from torch._inductor.graph import GraphLowering
from torch._inductor.output_code import CompiledFxGraph
from torch.utils import _python_dispatch

from hashbench import HashDebugTrace, find_divergence
from hashbench.core.inductor.internals import without_graph_caches
from hashbench.core.records import OpRecord, Trace
from hashbench.core.trace import file
from hashbench.core.trace.callbacks import TraceCallback
from hashbench.core.trace.compiled_records import CompiledRecords
from hashbench.core.trace.generated import GRAPH
from hashbench.core.trace.tracer import native_unavailable
from tests.core.inductor import interpreted

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("inductor")]
TRACERS = [
    pytest.param("native", marks=pytest.mark.skipif(native_unavailable() is not None, reason="no native tracer")),
    "python",
]
each = pytest.mark.parametrize("tracer", TRACERS)
X = torch.linspace(-1, 1, 48).reshape(6, 8)
ALLOCATES = "inductor.empty_strided_cpu"


@pytest.fixture(autouse=True)
def _reset() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.second = torch.nn.Linear(8, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.nn.functional.gelu(self.norm(self.first(x))))


def kernels(x: torch.Tensor) -> torch.Tensor:
    """Two generated kernels around a matrix product."""
    return (x.sin() @ x.T).exp()


KERNELS = [GRAPH, "cpp_fused_sin_0", "aten.mm.out", "cpp_fused_exp_1"]


def traced(program: Callable[[], Any], tracer: str, **options: Any) -> Trace:
    with HashDebugTrace(tracer=tracer, **options) as trace:
        program()
    return trace.finish()


def ops(trace: Trace) -> list[str]:
    return [record.op for record in trace.records if record.op != ALLOCATES]


def step(model: Any) -> None:
    model.zero_grad()
    model(X * 1).square().sum().backward()


class Kept(TraceCallback):
    wants_records = True

    def __init__(self) -> None:
        self.records: list[OpRecord] = []

    def recorded(self, record: OpRecord) -> None:
        self.records.append(record)


# ------------------------------------------------------------------------------------------------- what is recorded


def test_every_kernel_and_op_is_a_record_with_its_module_and_line() -> None:
    model = Net()
    model.compile()
    traces = []
    with without_graph_caches():
        for tracer in [value for value in ("native", "python") if value == "python" or native_unavailable() is None]:
            alone = traced(lambda: step(model), tracer, model=model, inputs=X)
            kept = Kept()
            watched = traced(lambda: step(model), tracer, model=model, inputs=X, watcher=kept)
            assert watched.records == tuple(kept.records) == alone.records
            traces.append(alone)
    (trace, *others) = traces
    assert all(other.records == trace.records and other.leaves == trace.leaves for other in others)
    found = {record.id: record for record in trace.records}
    assert [name for name in found if "cpp_fused" in name or ".out" in name] == [
        "forward/first/aten.addmm.out#0",
        "forward/norm/cpp_fused_gelu_native_layer_norm_0#0",
        "forward/second/aten.addmm.out#0",
        "backward/second/aten.mm.out#0",
        "backward/second/aten.mm.out#1",
        next(name for name in found if name.startswith("backward/norm/cpp_fused")),
        "backward/first/aten.mm.out#0",
        next(name for name in found if name.startswith("backward/first/cpp_fused_sum")),
    ]
    fused = found["forward/norm/cpp_fused_gelu_native_layer_norm_0#0"]
    assert fused.source.endswith("return self.second(torch.nn.functional.gelu(self.norm(self.first(x))))")
    assert found["forward/first/aten.addmm.out#0"].source == fused.source
    assert [(ref.source.rpartition("/")[2], ref.written) for ref in fused.inputs] == [
        ("inductor.empty_strided_cpu#1", True),
        ("inductor.empty_strided_cpu#3", True),
        ("aten.addmm.out#0", False),
        ("Net.norm.weight", False),
        ("Net.norm.bias", False),
        ("inductor.empty_strided_cpu#2", True),
    ]
    assert [output.shape for output in fused.outputs] == [(6, 1), (6, 8), (6, 1)]
    assert all(output.value for output in fused.outputs)
    assert {record.forward_op for record in trace.records if record.id.startswith("backward/")} >= {
        "forward//inductor.graph#0"
    }
    assert "aten.pow.Tensor_Scalar" in ops(trace)  # eager, between the two graphs
    assert file.loads(file.dumps(trace)).records == trace.records


@each
@pytest.mark.parametrize("hash_inputs", [False, True])
def test_equal_runs_have_equal_traces(tracer: str, hash_inputs: bool) -> None:
    compiled = torch.compile(Net())
    step(compiled)
    traces = []
    for fill in (1.0, 2.0, float("nan")):
        rubbish = [torch.full((6, 8), fill) for _ in range(40)]  # what new memory holds
        del rubbish
        traces.append(traced(lambda: step(compiled), tracer, hash_inputs=hash_inputs))
    assert traces[0] == traces[1] == traces[2]
    assert find_divergence(*traces[:2]).divergence is None


@each
def test_code_compiled_before_during_and_from_warm_caches_has_the_same_ops(tracer: str) -> None:
    compiled = torch.compile(kernels)
    during = traced(lambda: compiled(X), tracer)
    before = traced(lambda: compiled(X), tracer)
    torch._dynamo.reset()
    counters.clear()
    warm = traced(lambda: torch.compile(kernels)(X), tracer)
    assert counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"] > 0
    assert ops(during) == ops(before) == ops(warm) == KERNELS
    with without_graph_caches():
        torch._dynamo.reset()
        assert ops(traced(lambda: torch.compile(kernels)(X), tracer)) == KERNELS


@each
def test_two_graphs_after_a_break_and_a_backward_alone(tracer: str) -> None:
    weight = torch.eye(8).requires_grad_()

    def broken(x: torch.Tensor) -> torch.Tensor:
        x = (x @ weight).relu()
        torch._dynamo.graph_break()
        return (x @ weight).sin()

    compiled = torch.compile(broken)

    def whole() -> None:
        weight.grad = None
        compiled(X).sum().backward()

    trace = traced(whole, tracer)
    assert [op for op in ops(trace) if op == GRAPH or "fused" in op or "mm" in op] == [
        *(GRAPH, "aten.mm.out", "cpp_fused_relu_threshold_backward_0", GRAPH, "aten.mm.out", "cpp_fused_sin_0"),
        *(GRAPH, "cpp_fused_cos_mul_0", "aten.mm.out", "aten.mm.out"),
        *(GRAPH, "cpp_fused_threshold_backward_0", "aten.mm.out"),
    ]
    assert traced(whole, tracer) == trace
    weight.grad = None
    loss = compiled(X).sum()
    alone = traced(loss.backward, tracer)
    assert ops(alone).count(GRAPH) == 2
    assert {record.phase for record in alone.records if "fused" in record.op} == {"backward"}


@each
def test_dynamic_shapes(tracer: str) -> None:
    compiled = torch.compile(lambda x: (x.sin() + x.shape[0]).sum(0), dynamic=True)
    shapes = []
    for size in (3, 7):
        trace = traced(lambda: compiled(X.reshape(-1)[: size * 4].reshape(size, 4).clone()), tracer)  # noqa: B023
        fused = [record for record in trace.records if "fused" in record.op]
        shapes.append([record.outputs[0].shape for record in fused])
        assert str(size) in fused[0].arguments
    assert shapes == [[(4,)], [(4,)]]


@each
def test_graph_partitions(tracer: str) -> None:
    with torch._inductor.config.patch(graph_partition=True):
        compiled = torch.compile(kernels)
        assert ops(traced(lambda: compiled(X), tracer)) == KERNELS


@each
def test_a_mutated_buffer_and_a_renamed_one_keep_their_writers(tracer: str) -> None:
    state = torch.zeros(8)

    def program(x: torch.Tensor) -> torch.Tensor:
        state.add_(x.sum(0))
        return ((x.sin() @ x.T).cos() @ x).exp()

    compiled = torch.compile(program)
    with torch.no_grad():
        compiled(X)
        trace = traced(lambda: (compiled(X), state + 1), tracer)
    writer = next(ref.source for ref in trace.records[-1].inputs)
    assert "cpp_fused" in writer
    named = {record.id: record for record in trace.records}
    for record in trace.records:
        if record.op == "aten.mm.out":
            read = [ref.source for ref in record.inputs if not ref.written]
            assert any("cpp_fused" in source for source in read)
            assert all(source not in named or named[source].op != ALLOCATES for source in read)


@each
def test_calls_in_another_thread_are_one_opaque_record_or_none(tracer: str) -> None:
    compiled = torch.compile(kernels)
    compiled(X)

    def program() -> None:
        thread = threading.Thread(target=compiled, args=(X,))
        thread.start()
        thread.join()
        compiled(X)

    trace = traced(program, tracer)
    assert ops(trace) == (["torch.compile"] if tracer == "native" else []) + KERNELS
    assert trace == traced(program, tracer)


@each
def test_a_callback_without_trace_is_shown_kernels_and_ops(tracer: str) -> None:
    class Names(TraceCallback):
        wants_trace = False

        def __init__(self) -> None:
            self.names: list[str] = []

        def before(self, _node: str, func: Any, *_: Any) -> None:
            self.names.append(str(func))

        def graph(self, path: str, inputs: Any) -> None:
            assert Path(path).is_file()
            self.names.append(f"graph of {len(inputs)}")

        def graph_ended(self) -> None:
            self.names.append("end")

    names, compiled = Names(), torch.compile(kernels)
    assert traced(lambda: compiled(X), tracer, watcher=names).records == ()
    assert names.names == ["graph of 1", *KERNELS[1:], "end"]


# ------------------------------------------------------------------------------------------------- what is not seen


@each
def test_graphs_of_cpp_wrapper_are_opaque(tracer: str) -> None:
    with torch._inductor.config.patch(cpp_wrapper=True):
        compiled = torch.compile(kernels)
        leaf = X.clone().requires_grad_()

        def program() -> None:
            leaf.grad = None
            compiled(leaf * 1).sum().backward()

        program()
        trace = traced(program, tracer)
    assert [record.op for record in trace.records if record.opaque] == ["torch.compile"] * 2
    assert not [op for op in ops(trace) if "mm" in op or "fused" in op]
    assert "Compiled code ran 2 times" in find_divergence(trace, trace).unseen


@pytest.mark.parametrize("tracer", [TRACERS[0], pytest.param("python", marks=pytest.mark.exhaustive)])
def test_packaged_models_are_opaque(tracer: str, tmp_path: Path) -> None:
    exported = torch.export.export(Net(), (X,))
    path = torch._inductor.aoti_compile_and_package(exported, package_path=str(tmp_path / "net.pt2"))
    loaded = torch._inductor.aoti_load_package(path)
    trace = traced(lambda: loaded(X * 1) * 2, tracer)
    assert ops(trace) == ["aten.mul.Tensor", "torch.compile", "aten.mul.Tensor"]
    assert [ref.source for ref in trace.records[2].inputs] == [trace.records[1].id]


@each
def test_code_that_dynamo_did_not_compile_is_opaque(tracer: str) -> None:
    @torch._dynamo.disable
    def eager(x: torch.Tensor) -> torch.Tensor:
        return x.cos()

    compiled = torch.compile(lambda x: eager(x.sin() * 2))
    trace = traced(lambda: compiled(X) * 2, tracer)
    assert ops(trace) == [GRAPH, "cpp_fused_mul_sin_0", "torch.compile", "aten.mul.Tensor"]
    assert [ref.source for ref in trace.records[-1].inputs] == ["forward//torch.compile#0"]


@each
def test_an_input_that_is_returned_is_not_opaque(tracer: str) -> None:
    compiled = torch.compile(lambda x: (x, x.sin()))
    assert ops(traced(lambda: compiled(X), tracer)) == [GRAPH, "cpp_fused_sin_0"]


def wrapping(module: Any, inputs: Any) -> Any:
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(module, inputs)


@each
def test_other_backends_are_opaque_and_one_around_inductor_is_not(tracer: str) -> None:
    other, around = torch.compile(kernels, backend="aot_eager"), torch.compile(kernels, backend=wrapping)
    assert ops(traced(lambda: other(X), tracer)) == ["torch.compile"]
    assert ops(traced(lambda: around(X), tracer)) == KERNELS


# --------------------------------------------------------------------------------------------------- nothing changes


def state_of_torch() -> list[Any]:
    """Everything that a trace replaces, with the namespaces of the generated modules."""
    modules = torch._inductor.codecache.PyCodeCache.modules
    return [
        CompiledFxGraph.__call__,
        GraphLowering.compile_to_module,
        vars(torch._inductor.codecache.PyCodeCache)["load_by_key_path"],
        torch._dynamo.eval_frame._callback_from_stance,
        torch._dynamo.eval_frame._maybe_set_eval_frame,
        [(id(module), {name: id(value) for name, value in vars(module).items()}) for module in modules],
    ]


@each
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_exception_in_a_kernel_leaves_everything_as_it_was(tracer: str, error: type[BaseException]) -> None:
    compiled = torch.compile(kernels)
    compiled(X)
    module = next(
        one
        for one in reversed(torch._inductor.codecache.PyCodeCache.modules)
        if hasattr(one, "cpp_fused_exp_1") and hasattr(one, "cpp_fused_sin_0")
    )
    kernel = module.cpp_fused_exp_1

    def fails(*_: Any) -> None:
        raise error

    module.cpp_fused_exp_1 = fails
    before = state_of_torch()
    with pytest.raises(error), HashDebugTrace(tracer=tracer) as trace:
        compiled(X)
    assert state_of_torch() == before
    assert ops(trace.finish()) == KERNELS[:-1]
    assert trace.failed_op == "cpp_fused_exp_1"
    module.cpp_fused_exp_1 = kernel
    assert ops(traced(lambda: compiled(X), tracer)) == KERNELS


@each
def test_after_an_exception_the_trace_goes_on(tracer: str) -> None:
    class Raises(TraceCallback):
        def graph_ended(self) -> None:
            raise ValueError("planted")

    compiled = torch.compile(kernels)
    compiled(X)
    with HashDebugTrace(tracer=tracer, watcher=Raises()) as trace:
        with pytest.raises(ValueError, match="planted"):
            compiled(X)
        X.cos()
    assert ops(trace.finish()) == [*KERNELS, "aten.cos.default"]


_FLAGS_OF_MODES = (
    "_is_in_torch_dispatch_mode",
    "_is_in_non_infra_torch_dispatch_mode",
    "_is_in_any_mode_without_ignore_compile_internals",
)


def test_two_traces_in_two_threads_stop_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    for flag in _FLAGS_OF_MODES:  # of the process, in which torch keeps what each mode found: not in this order
        monkeypatch.setattr(_python_dispatch, flag, getattr(_python_dispatch, flag))
    compiled = torch.compile(kernels)
    compiled(X)
    before = state_of_torch()
    go, done = threading.Event(), threading.Event()
    first, second = HashDebugTrace(tracer="python"), HashDebugTrace(tracer="python")

    def other() -> None:
        with second:
            compiled(X)
            go.set()
            done.wait(60)
            compiled(X)

    thread = threading.Thread(target=other)
    with first:
        compiled(X)
        thread.start()
        go.wait(60)
        compiled(X)
    done.set()
    thread.join()
    assert state_of_torch() == before
    assert ops(first.finish()) == ops(second.finish()) == KERNELS * 2


@each
def test_no_tensor_and_no_recorder_is_kept_alive(tracer: str) -> None:
    compiled, kept = torch.compile(kernels), []
    trace = HashDebugTrace(tracer=tracer)
    with trace:
        kept.append(weakref.ref(compiled(X * 1)))
    assert kept[0]() is None
    recorders = weakref.WeakSet(one for one in gc.get_objects() if type(one) is CompiledRecords)
    gc.collect()
    assert not recorders


def sources() -> set[str]:
    """Digests of all generated modules that are loaded."""
    paths = [module.__file__ for module in torch._inductor.codecache.PyCodeCache.modules]
    return {xxhash.xxh3_64_hexdigest(Path(path).read_bytes()) for path in paths if path}


def dynamic(x: torch.Tensor) -> torch.Tensor:
    return (x * x.shape[0]).softmax(-1)


def breaks(x: torch.Tensor) -> torch.Tensor:
    x = x.relu()
    torch._dynamo.graph_break()
    return (x @ x.T).sum(0)


def program_of(name: str) -> Callable[[], object]:
    """A program that compiles anew: a model trained, shapes that change, a graph break."""
    if name == "training":
        model = torch.compile(Net())
        return lambda: [step(model) for _ in range(2)]
    compiled = torch.compile({"shapes": dynamic, "breaks": breaks}[name])
    return lambda: [compiled(X[:rows].clone()) for rows in (2, 4, 6)]


@each
@pytest.mark.parametrize("name", ["training", "shapes", "breaks"])
def test_counters_guards_and_sources_are_equal_with_and_without_a_trace(tracer: str, name: str) -> None:
    program_of(name)()  # both then find the same caches
    seen = []
    for options in (None, {}, {"hash_inputs": True, "source_lines": True, "watcher": Kept()}):
        torch._dynamo.reset()
        torch._inductor.codecache.PyCodeCache.cache_clear()
        counters.clear()
        guard_failures.clear()
        program = program_of(name)
        if options is None:
            program()
        else:
            traced(program, tracer, **options)
        failures = sorted(str(failure) for found in guard_failures.values() for failure in found)
        seen.append(({kind: dict(found) for kind, found in counters.items() if found}, failures, sources()))
    assert seen[0] == seen[1] == seen[2]
    assert seen[0][0]["stats"]["unique_graphs"] >= 1
    assert seen[0][2]


# --------------------------------------------------------------------------------------------------- Triton kernels


DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, interpreted.NEEDS_CUDA])]


@each
@pytest.mark.parametrize("device", DEVICES)
def test_each_launch_of_a_triton_kernel_is_a_record_and_no_benchmark_is(tracer: str, device: str) -> None:
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "tests.core.trace.interpreted_launches", tracer, device]
    env = interpreted.environment(device)
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    compiling, again = map(file.loads, json.loads(done.stdout))
    assert compiling.records == again.records  # the first call compiles, and tries configurations
    computed = [record.op for record in again.records if not record.blank]
    assert [op for op in computed if op.startswith("aten.")] == ["aten.mm.out"]
    found = [record for record in again.records if record.op.startswith("triton_")]
    assert [re.sub(r"_\d+$|^triton_..._", "", record.op) for record in found] == [
        "fused_mul_relu",
        "fused_sum",
        "fused_add_copy_",
    ]
    product, total, update = found
    assert [(ref.source.rpartition("/")[2], ref.written) for ref in product.inputs] == [
        *(("0", False), ("1", False)),
        (f"inductor.empty_strided_{device}#0", True),
    ]
    assert [digest.shape for digest in product.outputs] == [(6, 8)]
    assert product.arguments == "48"  # its size, and no stream
    assert product.source.endswith("return ((x * y).relu() @ y.T).sum(0)")
    assert re.fullmatch(r"XBLOCK \d+, \d+ warps?, \d+ stages?", product.launch)
    assert total.outputs == (next(result for result in again.results if result.name == "output").digest,)
    assert {ref.source for ref in update.inputs if ref.written} == {"input/2"}
