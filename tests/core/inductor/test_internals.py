"""Internals of torch that compiled models lean on: what is missing, or has another signature, fails by its name."""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._inductor.config

from hashbench.core.inductor import failures, internals
from hashbench.core.inductor.graphs import CompiledGraph
from hashbench.core.inductor.internals import (
    CapturedGraphs,
    CompiledGraphCalls,
    KernelSite,
    TritonLaunch,
    backend_of,
    backends,
    dynamo_counters,
    generated_function,
    inside_wrapper,
    is_compiling,
    reset_dynamo,
    unseen_kinds,
    why_hidden,
    without_graph_caches,
    wrapper_of,
)
from hashbench.core.inductor.nodes import NodeFacts

NO_SIGNATURE = "-"
INTERNALS: dict[str, tuple[str, tuple[str, ...]]] = {
    # name: (parameters; those behind them may be more, versions of torch in which it was seen so)
    "torch._inductor.output_code:CompiledFxGraph.__call__": ("self inputs", ("2.14", "2.15")),
    "torch._inductor.codecache:PyCodeCache.modules": (NO_SIGNATURE, ("2.14", "2.15")),
    "torch._inductor.graph:GraphLowering.compile_to_module": ("self", ("2.14", "2.15")),
    "torch._inductor.ir:Buffer.get_name": ("self", ("2.15",)),
    "torch._inductor.ir:Buffer.get_origin_node": ("self", ("2.14", "2.15")),
    "torch.fx.passes.graph_transform_observer:GraphTransformObserver.apply_graph_pass": (
        "self pass_fn",
        ("2.14", "2.15"),
    ),
    "torch.fx.passes.graph_transform_observer:GraphTransformObserver.apply_gm_pass": ("self pass_fn", ("2.14", "2.15")),
    "torch._dynamo.eval_frame:_callback_from_stance": ("callback", ("2.15",)),
    "torch._dynamo.eval_frame:_maybe_set_eval_frame": (NO_SIGNATURE, ("2.15",)),
    "torch._guards:CompileContext.try_get": ("", ("2.15",)),
    "torch._dynamo.utils:counters": (NO_SIGNATURE, ("2.15",)),
    "torch._dynamo:list_backends": ("exclude_tags", ("2.15",)),
    "torch._inductor.config:fx_graph_cache": (NO_SIGNATURE, ("2.15",)),
    "torch._inductor.config:cpp_wrapper": (NO_SIGNATURE, ("2.15",)),
    "torch._inductor.config:triton.cudagraphs": (NO_SIGNATURE, ("2.15",)),
    "torch._inductor.config:fx_graph_remote_cache": (NO_SIGNATURE, ("2.15",)),
    "torch._functorch.config:enable_autograd_cache": (NO_SIGNATURE, ("2.15",)),
    "torch.export._trace:_export": (NO_SIGNATURE, ("2.15",)),
    "torch.export.pt2_archive._package:AOTICompiledModel.__call__": ("self", ("2.15",)),
    "torch._inductor.select_algorithm:extern_kernels": (NO_SIGNATURE, ("2.15",)),
    "torch._ops:_OpNamespace": (NO_SIGNATURE, ("2.15",)),
    "torch._inductor.runtime.triton_heuristics:CachingAutotuner.run": ("self args stream", ("2.15",)),
    "torch._inductor.runtime.triton_heuristics:CachingAutotuner.bench": ("self launcher args", ("2.15",)),
    "torch._dynamo.device_interface:get_interface_for_device": ("device", ("2.15",)),
    "torch._dynamo.device_interface:DeviceInterface.get_raw_stream": ("device_idx", ("2.15",)),
    "torch:_C._current_autograd_node": (NO_SIGNATURE, ("2.15",)),
    "torch:_C._dynamo.guards._empty_strided_cpu": (NO_SIGNATURE, ("2.15",)),
}
"""2.14 by the experiments that came before, 2.15 by this test; other versions have not been tried. What is only looked
at inside a call is covered by the tests of records."""


@pytest.mark.parametrize("name", INTERNALS)
def test_internal_is_where_it_was(name: str) -> None:
    module, _, path = name.partition(":")
    try:
        found: Any = functools.reduce(getattr, path.split("."), importlib.import_module(module))
    except (ImportError, AttributeError) as error:
        pytest.fail(f"torch {torch.__version__} has no {name}: {error}")
    parameters, _ = INTERNALS[name]
    if parameters != NO_SIGNATURE:
        names = list(inspect.signature(found).parameters)
        expected = parameters.split()
        assert names[: len(expected)] == expected, f"{name} of torch {torch.__version__} takes {names}"


def test_all_versions_in_the_table_are_supported() -> None:
    assert {version for _, versions in INTERNALS.values() for version in versions} <= {"2.12", "2.13", "2.14", "2.15"}


def test_stages_name_exceptions_that_exist() -> None:
    holders = ("torch._inductor.exc", "torch._dynamo.exc", "torch._inductor.ir", "torch._inductor.codecache")
    known = {name for holder in holders for name in vars(importlib.import_module(holder))}
    gone = [name for name, _ in failures._STAGES if name not in known]
    assert gone == []


# ------------------------------------------------------------------------------------------------------- small parts


def test_backend_of_a_callback_is_found_through_wrappers() -> None:
    inner = types.SimpleNamespace(compiler_name="inductor")
    outer = types.SimpleNamespace(_torchdynamo_orig_backend=types.SimpleNamespace(_torchdynamo_orig_backend=inner))
    assert backend_of(outer) == backend_of(inner) == "inductor"
    assert backend_of(None) == backend_of(lambda: None) == ""
    loop: Any = types.SimpleNamespace()
    loop._torchdynamo_orig_backend = loop
    assert backend_of(loop) == ""


def module_of(text: str, path: str) -> dict[str, Any]:
    values: dict[str, Any] = {"__file__": path, "recursively_apply_fns": None}
    exec(compile(text, path, "exec"), values)
    return values


def test_generated_function_is_found_behind_wrappers_or_not_at_all() -> None:
    values = module_of(
        "def call(args):\n    return args\n\nclass Runner:\n    def call(self, args):\n        return args\n", "w.py"
    )
    call, method = values["call"], values["Runner"]().call
    wrapped = functools.wraps(call)(lambda args: call(args))
    for function in (call, wrapped):
        assert generated_function(types.SimpleNamespace(current_callable=function)) is call
    assert generated_function(types.SimpleNamespace(current_callable=method)) is method.__func__
    for function in (lambda args: args, None, print):
        assert generated_function(types.SimpleNamespace(current_callable=function)) is None


def test_a_file_that_is_gone_is_an_empty_module(tmp_path: Path) -> None:
    assert wrapper_of(str(tmp_path / "gone.py")).kernels == ()


def test_nothing_is_compiling_or_running_here() -> None:
    assert not is_compiling()
    assert inside_wrapper() is None


def test_backends_and_counters() -> None:
    assert {"eager", "aot_eager", "inductor"} <= set(backends())
    torch._dynamo.utils.counters["frames"]["total"] += 1
    assert dynamo_counters()["frames"]["total"] >= 1
    reset_dynamo()
    assert dynamo_counters() == {}


# -------------------------------------------------------------------------------------------- a generated module, faked


class Listener:
    """Notes what it is shown, and makes the calls."""

    def __init__(self, *, shows: bool = True) -> None:
        self.notes: list[Any] = []
        self.shows = shows

    def begin(self, path: str, inputs: Any, *, seen: bool) -> bool:
        self.notes.append(("begin", Path(path).name, len(inputs), seen))
        return self.shows

    def end(self, result: Any) -> None:
        self.notes.append(("end", result))

    def op(self, path: str, line: int, facts: Any) -> None:  # noqa: ARG002
        self.notes.append(("op", line))

    def kernel(self, site: KernelSite, line: int, args: tuple[Any, ...]) -> Any:
        self.notes.append((site.name, site.types, line, args))
        return site.function(*args)

    def allocate(self, name: str, function: Any, args: tuple[Any, ...]) -> Any:
        self.notes.append((name, args))
        return function(*args)


MODULE = """\
import torch
from torch._inductor.select_algorithm import extern_kernels
aten = torch.ops.aten
empty_strided_cpu = torch._C._dynamo.guards._empty_strided_cpu
recursively_apply_fns = None
{imports}
cpp_fused_0 = async_compile.{kind}(['const float*', 'float*'], '''
 void kernel
''')
def call(args):
    buf0 = empty_strided_cpu((2, 2), (2, 1), torch.float32)
    cpp_fused_0(args[0], buf0)
    buf1 = torch.ops.aten.add.Tensor(buf0, buf0)
    extern_kernels.mm(buf1, buf1, out=buf0)
    return (buf0,)
"""
IMPORTS = """\
class async_compile:
    cpp_pybinding = staticmethod(lambda *_: lambda read, written: written.copy_(read))
    multi_kernel = pallas = cpp_pybinding
"""


@pytest.fixture
def graph(tmp_path: Path) -> Any:
    return graph_of(tmp_path / "kind.py", "cpp_pybinding")


def graph_of(path: Path, kind: str) -> Any:
    path.write_text(MODULE.format(imports=IMPORTS, kind=kind), encoding="utf-8")
    values: dict[str, Any] = {"__file__": str(path)}
    exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), values)
    return types.SimpleNamespace(current_callable=values["call"])


def shown(graph: Any, listener: Listener, *, here: bool = True) -> Any:
    """Call the graph as ``CompiledFxGraph.__call__`` does, with hooks around it."""
    calls = CompiledGraphCalls(listener, lambda: here)
    try:
        return calls._call(lambda graph, inputs: graph.current_callable(inputs), graph, [torch.eye(2)])
    finally:
        calls.stop()


def test_kernels_allocations_and_ops_are_shown_and_everything_is_put_back(graph: Any) -> None:
    values, listener = graph.current_callable.__globals__, Listener()
    before = dict(values)
    (result,) = shown(graph, listener)
    assert torch.equal(result, 4 * torch.eye(2))
    first = graph.current_callable.__code__.co_firstlineno
    begin, allocation, kernel, added, product, end = listener.notes
    assert begin == ("begin", "kind.py", 1, True)
    assert allocation == ("empty_strided_cpu", ((2, 2), (2, 1), torch.float32))
    assert kernel[:3] == ("cpp_fused_0", ("const float*", "float*"), first + 2)
    assert (added, product) == (("op", first + 3), ("op", first + 4))
    assert end[1][0] is result
    assert values == before


def test_nothing_inside_is_shown_if_the_listener_declines_or_the_thread_is_another(graph: Any) -> None:
    declines, elsewhere = Listener(shows=False), Listener()
    shown(graph, declines)
    assert [note[0] for note in declines.notes] == ["begin", "end"]
    shown(graph, elsewhere, here=False)
    assert elsewhere.notes == []


@pytest.mark.parametrize("kind", ["multi_kernel", "pallas"])
def test_a_module_with_kernels_of_another_kind_is_not_seen(tmp_path: Path, kind: str) -> None:
    listener = Listener()
    shown(graph_of(tmp_path / f"{kind}.py", kind), listener)
    assert [note[0] for note in listener.notes] == ["begin", "end"]
    assert listener.notes[0][3] is False
    assert unseen_kinds(wrapper_of(str(tmp_path / f"{kind}.py"))) == (kind,)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, ""),
        ({"cpp_wrapper": True}, "Inductor's cpp_wrapper calls them from C++ (cpp_wrapper)"),
        ({"triton.cudagraphs": True}, "CUDA graphs replay their launches (triton.cudagraphs)"),
    ],
)
def test_settings_that_hide_the_calls_of_kernels_are_told(settings: dict[str, bool], expected: str) -> None:
    with torch._inductor.config.patch(settings):
        assert why_hidden([]) == expected


def test_kernels_that_another_kernel_calls_are_told(tmp_path: Path) -> None:
    paths = [tmp_path / "multi_kernel.py", tmp_path / "cpp_pybinding.py"]
    for path in paths:
        graph_of(path, path.stem)
    assert why_hidden(map(str, paths)) == "multi_kernel makes the calls of some"
    assert why_hidden([str(paths[1])]) == ""


class Autotuner:
    """Stands in for a ``CachingAutotuner`` on tensors of a CPU: its first launch tries each configuration."""

    def __init__(self, *configs: Any) -> None:
        self.configs, self.launchers, self.ran = configs, [], []

    def run(self, read: torch.Tensor, written: torch.Tensor, *_: Any, stream: int) -> None:
        if not self.launchers:
            for _ in self.configs:
                self.launch(read.clone(), written.clone())
            self.launchers = [types.SimpleNamespace(config=self.configs[-1])]
        self.ran.append(stream)
        self.launch(read, written)

    def launch(self, read: torch.Tensor, written: torch.Tensor) -> None:
        torch.add(read, 0, out=written)


def config(block: int, warps: int, stages: int = 1) -> Any:
    return types.SimpleNamespace(kwargs={"XBLOCK": block}, num_warps=warps, num_stages=stages)


TRITON_MODULE = """\
import torch
recursively_apply_fns = None
empty_strided_cpu = torch._C._dynamo.guards._empty_strided_cpu
class async_compile:
    triton = staticmethod(lambda name, source: AUTOTUNER)
triton_poi_0 = async_compile.triton('triton_poi_0', '''
@triton_heuristics.pointwise(triton_meta={'signature': {'in_ptr0': '*fp32', 'out_ptr0': '*fp32', 'xnumel': 'i32', \
'XBLOCK': 'constexpr'}}, inductor_meta={'mutated_arg_names': []})
@triton.jit
def triton_poi_0(in_ptr0, out_ptr0, xnumel, XBLOCK : tl.constexpr):
    tl.store(out_ptr0, tl.load(in_ptr0))
''')
def call(args):
    buf0 = empty_strided_cpu((2, 2), (2, 1), torch.float32)
    triton_poi_0.run(args[0], buf0, 4, stream=7)
    return (buf0,)
"""


def test_each_launch_of_a_triton_kernel_is_shown_and_no_benchmark_of_autotuning(tmp_path: Path) -> None:
    autotuner, listener, path = Autotuner(config(256, 4), config(1024, 8, 2)), Listener(), tmp_path / "triton.py"
    path.write_text(TRITON_MODULE, encoding="utf-8")
    values: dict[str, Any] = {"__file__": str(path), "AUTOTUNER": autotuner}
    exec(compile(TRITON_MODULE, str(path), "exec"), values)
    graph = types.SimpleNamespace(current_callable=values["call"])
    (result,) = shown(graph, listener)
    begin, _, launched, _ = listener.notes
    assert begin == ("begin", "triton.py", 1, True)
    assert launched[:3] == ("triton_poi_0", ("*fp32", "*fp32", "i32"), values["call"].__code__.co_firstlineno + 2)
    assert torch.equal(launched[3][0], torch.eye(2))
    assert launched[3][1] is result
    assert launched[3][2:] == (4,)
    assert torch.equal(result, torch.eye(2))
    assert autotuner.ran == [0]  # the stream of a CPU
    assert values["triton_poi_0"] is autotuner


def test_configuration_of_a_launch_is_that_which_autotuning_chose() -> None:
    autotuner = Autotuner(config(256, 4), config(1024, 8, 2))
    launch = TritonLaunch(autotuner)
    assert launch.configuration() == ""
    launch(torch.ones(1), torch.ones(1))
    assert launch.configuration() == "XBLOCK 1024, 8 warps, 2 stages"
    assert launch.expression() == "triton.Config({'XBLOCK': 1024}, num_warps=8, num_stages=2)"
    assert TritonLaunch(Autotuner(config(64, 1))).configuration() == "XBLOCK 64, 1 warp, 1 stage"
    autotuner.launchers, autotuner.triton_interpret = [], True  # type: ignore[attr-defined]
    assert launch.configuration() == "XBLOCK 256, 4 warps, 1 stage"
    assert TritonLaunch(object()).configuration() == TritonLaunch(object()).expression() == ""


def test_a_module_whose_file_is_gone_is_not_seen(tmp_path: Path) -> None:
    listener, graph = Listener(), graph_of(tmp_path / "gone.py", "cpp_pybinding")
    (tmp_path / "gone.py").unlink()
    shown(graph, listener)
    assert listener.notes[0] == ("begin", "", 1, False)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_exception_ends_the_call_and_puts_everything_back(graph: Any, error: type[BaseException]) -> None:
    class Raises(Listener):
        def kernel(self, *_: Any) -> Any:
            raise error

    values, listener = graph.current_callable.__globals__, Raises()
    before = dict(values)
    with pytest.raises(error):
        shown(graph, listener)
    assert listener.notes[-1] == ("end", None)
    assert values == before


def test_two_listeners_stop_in_any_order(graph: Any) -> None:
    values = graph.current_callable.__globals__
    before = dict(values)

    def call(graph: Any, inputs: Any) -> Any:
        return graph.current_callable(inputs)

    first, second = Listener(), Listener()
    one, other = CompiledGraphCalls(first, lambda: True), CompiledGraphCalls(second, lambda: True)
    one._call(call, graph, [torch.eye(2)])
    other._call(call, graph, [torch.eye(2)])
    one.stop()
    seen = len(first.notes)
    other._call(call, graph, [torch.eye(2)])
    other.stop()
    assert (len(first.notes), len(second.notes)) == (seen, 2 * seen)
    assert values == before


# ---------------------------------------------------------------------------------------------------- real graphs


@pytest.mark.slow
def test_captured_graphs_know_the_nodes_of_their_buffers() -> None:
    torch._dynamo.reset()
    captured = CapturedGraphs(passes=True)
    captured.start()
    try:
        with without_graph_caches():
            torch.compile(lambda x: (x.sin() @ x.T).exp())(torch.ones(6, 8))
    finally:
        captured.stop()
        torch._dynamo.reset()
    ((path, graph),) = captured.graphs.items()
    assert type(graph) is CompiledGraph
    assert not graph.backward
    assert {str(node.target) for node in graph.nodes.values()} == {
        *("aten.sin.default", "aten.mm.default", "aten.exp.default")
    }
    names = {name for call in wrapper_of(path).calls.values() for name in call.targets}
    assert set(graph.nodes) <= names | set(graph.buffers)


@pytest.mark.slow
def test_graphs_of_one_text_keep_their_own_facts() -> None:
    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.one(x).exp()
            torch._dynamo.graph_break()
            result: torch.Tensor = self.two(x).exp()
            return result

    torch._dynamo.reset()
    captured = CapturedGraphs(keep=False)
    captured.start()
    before = len(modules())
    try:
        with without_graph_caches(), torch.no_grad():
            torch.compile(Two())(torch.ones(6, 8))
    finally:
        captured.stop()
        torch._dynamo.reset()
    facts = [vars(module)[internals._FACTS] for module in modules()[before:]]
    found = [
        sorted({one.module for one in each.values() if isinstance(one, NodeFacts) and one.module}) for each in facts
    ]
    assert [{re.sub(r".*\.", "", name) for name in names} for names in found] == [{"one"}, {"two"}]


def modules() -> list[Any]:
    from torch._inductor.codecache import PyCodeCache

    return list(PyCodeCache.modules)
