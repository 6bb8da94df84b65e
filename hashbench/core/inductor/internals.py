"""Every use of what TorchInductor does not document: hooks on its generated modules and on what it compiles.

Generated modules keep their kernels and allocators as globals, which they look up at each call: they are replaced
there and put back. ``CompiledFxGraph.__call__`` is looked up on the class. Neither is seen by dynamo's guards, which
have been checked by then, nor part of a cache's key.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, Protocol

from hashbench.core.imports import ModulePatch
from hashbench.core.inductor import wrapper
from hashbench.core.inductor.graphs import CompiledGraph, GraphPass
from hashbench.core.inductor.nodes import BufferFacts, facts_of

_OUTPUT_CODE = "torch._inductor.output_code"
_PACKAGE = "torch.export.pt2_archive._package"
_GRAPH = "torch._inductor.graph"
_OBSERVER = "torch.fx.passes.graph_transform_observer"

_ALLOCATOR = "empty_strided_"
"""Prefix of the allocators among the globals of a generated module (``empty_strided_cpu``)."""


_PARSED = 256
"""Generated modules whose text stays parsed."""

_DEEPEST = 8
"""Wrappers that are looked through at most."""


@dataclass(frozen=True, slots=True, eq=False)
class KernelSite:
    """A kernel of a generated module.

    Attributes:
        path: file of the module.
        name: name of the kernel there.
        types: types of the arguments of a call, as :class:`~hashbench.core.inductor.wrapper.KernelSource` has them.
        function: makes the call; of a Triton kernel a :class:`TritonLaunch`.
        facts: what the buffers of the module stand for, by name; empty if it was not captured.
    """

    path: str
    name: str
    types: tuple[str, ...]
    function: Callable[..., Any]
    facts: BufferFacts = field(default_factory=BufferFacts, repr=False)


@dataclass(frozen=True, slots=True, eq=False)
class TritonLaunch:
    """Launches a Triton kernel on the current stream.

    Attributes:
        kernel: what the generated module holds under the kernel's name: a ``CachingAutotuner``, or what stands in for
            one. ``run(*args, stream=)`` launches it; the benchmarks that autotuning makes in there are not shown.
    """

    kernel: Any

    def __call__(self, *args: Any) -> Any:
        """Launch the kernel."""
        return self.kernel.run(*args, stream=_stream_for(args))

    def configuration(self) -> str:
        """Return the configuration with which it is compiled and launched: ``XBLOCK 1024, 4 warps, 1 stage``. Empty
        before the first launch, if autotuning is to choose it."""
        chosen = self._chosen()
        return "" if chosen is None else configuration_text(chosen)

    def expression(self) -> str:
        """Return the same configuration as Python that makes it: ``triton.Config({'XBLOCK': 1024}, num_warps=4)``."""
        chosen = self._chosen()
        if chosen is None:
            return ""
        named = [(name, getattr(chosen, name, None)) for name in _OF_CONFIG]
        words = [repr(dict(chosen.kwargs)), *(f"{name}={value}" for name, value in named if value is not None)]
        return f"triton.Config({', '.join(words)})"

    def _chosen(self) -> Any:
        kernel = self.kernel
        chosen = [launcher.config for launcher in getattr(kernel, "launchers", ())]
        configurations = chosen or list(getattr(kernel, "configs", None) or ())
        known = len(configurations) == 1 or (configurations and getattr(kernel, "triton_interpret", False))
        return configurations[0] if known else None


_OF_CONFIG = {"num_warps": "warp", "num_stages": "stage"}
"""Attributes of a ``triton.Config`` beside its constants, and the word of each."""


def configuration_text(configuration: Any) -> str:
    """Format a ``triton.Config``: its block sizes and other constants, warps and stages."""
    parts = [f"{name} {value}" for name, value in configuration.kwargs.items()]
    for name, word in _OF_CONFIG.items():
        number = getattr(configuration, name, None)
        if number is not None:
            parts.append(f"{number} {word}{'' if number == 1 else 's'}")
    return ", ".join(parts)


def _stream_for(args: Sequence[Any]) -> int:
    """Return the current stream of the device of the first tensor, as generated modules pass it; 0 on a CPU."""
    device = next((value.device for value in args if hasattr(value, "untyped_storage")), None)
    if device is None or device.type == "cpu":
        return 0
    from torch._dynamo.device_interface import get_interface_for_device

    return int(get_interface_for_device(device.type).get_raw_stream(device.index or 0))


class GraphListener(Protocol):
    """What is told about calls of compiled graphs, in the thread that makes them."""

    def begin(self, path: str, inputs: Sequence[Any], *, seen: bool) -> bool:
        """A compiled graph is called. Return whether to show its kernels, which is possible if they are ``seen``: the
        generated module is in Python, and has only kernels in C++ and Triton that it calls itself."""

    def end(self, result: Any) -> None:
        """The call has ended; with ``None`` also if it raised."""

    def op(self, path: str, line: int, facts: BufferFacts) -> None:
        """An op is about to be called by this line of the generated module, whose buffers stand for ``facts``."""

    def kernel(self, site: KernelSite, line: int, args: tuple[Any, ...]) -> Any:
        """Make the call of a kernel at this line of the generated module."""

    def allocate(self, name: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Make the call of an allocator."""


class CompiledGraphCalls(ModulePatch):
    """Show every outermost call of a graph that Inductor compiled to a listener, and the calls of its kernels and
    allocators, from :meth:`start` until :meth:`stop`.

    Generated modules are patched at the first call of their graph, whenever that was compiled or loaded.

    Args:
        listener: is shown them.
        shown: whether calls in the current thread are shown.
    """

    module = _OUTPUT_CODE

    def __init__(self, listener: GraphListener, shown: Callable[[], bool]) -> None:
        super().__init__()
        self._listener: GraphListener | None = listener
        self._shown: Callable[[], bool] = shown
        self._inside = threading.local()
        self._known: dict[int, tuple[dict[str, Any], bool]] = {}  # namespaces, which stay alive and keep their id

    def stop(self) -> None:
        super().stop()
        self._known, self._listener, self._shown = {}, None, bool

    def _replace(self) -> None:
        compiled = sys.modules[_OUTPUT_CODE].CompiledFxGraph
        call, hooks = compiled.__call__, self

        @functools.wraps(call)
        def called(graph: Any, inputs: Sequence[Any]) -> Any:
            return hooks._call(call, graph, inputs)

        self._put(compiled, __call__=called)

    def _call(self, call: Callable[..., Any], graph: Any, inputs: Sequence[Any]) -> Any:
        listener = self._listener
        if listener is None or getattr(self._inside, "graph", False) or not self._shown():
            return call(graph, inputs)
        function = generated_function(graph)
        values = {} if function is None else _globals_of(function)
        seen, result = function is not None and self._show(function, values), None
        self._inside.graph = True
        try:
            shown = listener.begin(values["__file__"] if seen else "", inputs, seen=seen)
            self._inside.graph = "shown" if seen and shown else True
            result = call(graph, inputs)
            return result
        finally:
            self._inside.graph = False
            listener.end(result)

    def _show(self, function: Any, values: dict[str, Any]) -> bool:
        """Patch the namespace of a generated function's module; return whether all of its kernels can be shown."""
        if id(values) in self._known:
            return self._known[id(values)][1]
        path = values.get("__file__") or ""
        source = wrapper_of(path)
        seen = Path(path).is_file() and not unseen_kinds(source)
        self._known[id(values)] = values, seen
        if seen:
            facts = values.get(_FACTS) or vars(function).setdefault(_FACTS, BufferFacts())
            for kernel in source.kernels:
                callee = values.get(kernel.name)
                if kernel.kind == TRITON and hasattr(callee, "run"):
                    launch = _launch_of(callee, kernel.name, facts)
                    site = KernelSite(path, kernel.name, kernel.argument_types, launch, facts)
                    self._put(values, **{kernel.name: _TritonKernel(self, site, callee)})
                elif callable(callee):
                    site = KernelSite(path, kernel.name, kernel.argument_types, callee, facts)
                    self._put(values, **{kernel.name: functools.partial(_called, self, site)})
            for name, value in list(values.items()):
                if name.startswith(_ALLOCATOR):
                    self._put(values, **{name: functools.partial(_allocated, self, name, value)})
                elif _holds_ops(name, value):
                    self._put(values, **{name: _OpCalls(value, self, path, facts)})
            if any(call.kernel.startswith("torch.ops.") for call in source.calls.values()):
                self._put(values, torch=_Torch(values["torch"], self, path, facts))
        return seen


TRITON = "triton"
_SEEN = ("cpp", TRITON)
"""Kinds of kernels whose calls are shown."""


def unseen_kinds(source: wrapper.Wrapper) -> tuple[str, ...]:
    """Return the kinds of kernels in a generated module whose calls cannot be shown: ``multi_kernel``, ``pallas``."""
    kinds = [*(kernel.kind for kernel in source.kernels), *source.others.values()]
    return tuple(dict.fromkeys(kind for kind in kinds if kind not in _SEEN))


def _launch_of(kernel: Any, name: str, facts: BufferFacts) -> TritonLaunch:
    """Return what launches a kernel: the same object for as long as the kernel is the same."""
    known: TritonLaunch | None = facts.derived.get(name)
    if known is None or known.kernel is not kernel:
        facts.derived[name] = known = TritonLaunch(kernel)
    return known


class _TritonKernel:
    """Stand-in for a Triton kernel among the globals of a generated module: as that object, and shows each launch."""

    __slots__ = ("_hooks", "_of", "_site")

    def __init__(self, hooks: CompiledGraphCalls, site: KernelSite, of: Any) -> None:
        self._hooks, self._site, self._of = hooks, site, of

    def run(self, *args: Any, **others: Any) -> Any:
        hooks, site = self._hooks, self._site
        hidden = getattr(hooks._inside, "graph", False) != "shown" or others.keys() - {"stream"}
        if hidden or (listener := hooks._listener) is None:
            return self._of.run(*args, **others)
        return listener.kernel(site, _line_in(site.path, site.facts), args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of, name)


def _holds_ops(name: str, value: Any) -> bool:
    """Return whether a global of a generated module holds ops that the module calls as attributes."""
    return name == "extern_kernels" or type(value).__name__ == "_OpNamespace"


def _called(hooks: CompiledGraphCalls, site: KernelSite, /, *args: Any) -> Any:
    if getattr(hooks._inside, "graph", False) != "shown" or (listener := hooks._listener) is None:
        return site.function(*args)
    return listener.kernel(site, _line_in(site.path, site.facts), args)


def _allocated(hooks: CompiledGraphCalls, name: str, function: Callable[..., Any], /, *args: Any) -> Any:
    if getattr(hooks._inside, "graph", False) != "shown" or (listener := hooks._listener) is None:
        return function(*args)
    return listener.allocate(name, function, args)


def _line_in(path: str, facts: BufferFacts) -> int:
    """Return the line of the innermost frame of a generated module; 0 if there is none."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename != path:
        frame = frame.f_back  # another trace's proxy or stand-in
    if frame is None:
        return 0
    at = frame.f_code.co_firstlineno, frame.f_lasti
    line = facts.lines.get(at)
    if line is None:  # computed from the start of a function with thousands of lines
        facts.lines[at] = line = frame.f_lineno
    return line


class _OpCalls:
    """Stand-in for a global of a generated module that holds ops (``extern_kernels``, ``aten``): as that object, and
    announces each op that is looked up."""

    __slots__ = ("_facts", "_hooks", "_of", "_path")

    def __init__(self, of: Any, hooks: CompiledGraphCalls, path: str, facts: BufferFacts) -> None:
        self._of, self._hooks, self._path, self._facts = of, hooks, path, facts

    def __getattr__(self, name: str) -> Any:
        _announce(self._hooks, self._path, self._facts)
        return getattr(self._of, name)


class _Torch(ModuleType):
    """Stand-in for ``torch`` in a generated module, which keeps what is looked up there, except its ops."""

    def __init__(self, of: ModuleType, hooks: CompiledGraphCalls, path: str, facts: BufferFacts) -> None:
        super().__init__(of.__name__)
        vars(self)["_stands_for"] = of, hooks, path, facts

    @property
    def ops(self) -> Any:
        of, *known = vars(self)["_stands_for"]
        _announce(*known)
        return of.ops

    def __getattr__(self, name: str) -> Any:
        vars(self)[name] = value = getattr(vars(self)["_stands_for"][0], name)
        return value


def _announce(hooks: CompiledGraphCalls, path: str, facts: BufferFacts) -> None:
    if getattr(hooks._inside, "graph", False) == "shown" and (listener := hooks._listener) is not None:
        listener.op(path, _line_in(path, facts), facts)


class PackagedModelCalls(ModulePatch):
    """Show every call of a model that AOTInductor compiled and packaged to a listener, as a graph that is not seen."""

    module = _PACKAGE

    def __init__(self, listener: GraphListener, shown: Callable[[], bool]) -> None:
        super().__init__()
        self._listener: GraphListener | None = listener
        self._shown: Callable[[], bool] = shown

    def stop(self) -> None:
        super().stop()
        self._listener, self._shown = None, bool

    def _replace(self) -> None:
        model = getattr(sys.modules[_PACKAGE], "AOTICompiledModel", None)
        if model is None:
            return
        call, hooks = model.__call__, self

        @functools.wraps(call)
        def called(model: Any, *args: Any, **kwargs: Any) -> Any:
            return hooks._call(call, model, args, kwargs)

        self._put(model, __call__=called)

    def _call(self, call: Callable[..., Any], model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        listener, result = self._listener, None
        if listener is None or not self._shown():
            return call(model, *args, **kwargs)
        try:
            listener.begin("", [*args, *kwargs.values()], seen=False)
            result = call(model, *args, **kwargs)
            return result
        finally:
            listener.end(result)


def generated_function(graph: Any) -> Any:
    """Return the generated function that a ``CompiledFxGraph`` calls; ``None`` if that is not in a Python module
    (``cpp_wrapper``) or not called each time (CUDA graphs)."""
    function = graph.current_callable
    for _ in range(_DEEPEST):
        function = getattr(function, "__func__", function)
        code = getattr(function, "__code__", None)
        if code is not None and code.co_name == "call" and "recursively_apply_fns" in _globals_of(function):
            return function
        function = getattr(function, "__wrapped__", None)
        if function is None:
            break
    return None


def _globals_of(function: Any) -> dict[str, Any]:
    values: dict[str, Any] = getattr(function, "__globals__", {})
    return values


def inside_wrapper() -> tuple[str, int] | None:
    """Return file and line of the generated module that is running in this thread; ``None`` outside of all."""
    frame = sys._getframe(1)
    while frame is not None:
        if "recursively_apply_fns" in frame.f_globals and frame.f_code.co_filename == frame.f_globals.get("__file__"):
            return frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back  # type: ignore[assignment]
    return None


def is_compiling() -> bool:
    """Return whether this thread is compiling a graph."""
    guards = sys.modules.get("torch._guards")
    return guards is not None and guards.CompileContext.try_get() is not None


def backend_of(callback: Any) -> str:
    """Return the backend of one of dynamo's callbacks: its ``compiler_name``; empty for those that have none."""
    for _ in range(_DEEPEST):
        inner = getattr(callback, "_torchdynamo_orig_backend", None)
        if inner is None:
            break
        callback = inner
    return getattr(callback, "compiler_name", "")


class CapturedGraphs(ModulePatch):
    """Keep the graphs that Inductor compiles from :meth:`start` until :meth:`stop`.

    Each generated module is told what its buffers stand for, for as long as it lives. Graphs that
    come out of Inductor's or AOTAutograd's graph cache are not seen (:func:`without_graph_caches`).

    Args:
        keep: keep graphs, not only the facts.
        passes: keep a copy of the graph before and after each pass that changed it.

    Attributes:
        graphs: by the file of the generated module.
        joint: passes over joint graphs, which belong to a forward and a backward graph.
    """

    module = _GRAPH

    def __init__(self, *, keep: bool = True, passes: bool = False) -> None:
        super().__init__()
        self.graphs: dict[str, CompiledGraph] = {}
        self.joint: list[GraphPass] = []
        self._keep, self._wants_passes = keep, passes
        self._passes: list[GraphPass] = []

    def __enter__(self) -> CapturedGraphs:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop, and keep no graph."""
        self.stop()
        self.graphs.clear()
        self.joint.clear()

    def _replace(self) -> None:
        lowering = sys.modules[_GRAPH].GraphLowering
        compile_to_module, hooks = lowering.compile_to_module, self

        @functools.wraps(compile_to_module)
        def compiled(graph: Any) -> Any:
            module = compile_to_module(graph)
            hooks._compiled(graph, module)
            return module

        self._put(lowering, compile_to_module=compiled)
        if self._wants_passes:
            self._watch_passes()

    def _watch_passes(self) -> None:
        observer = importlib.import_module(_OBSERVER).GraphTransformObserver
        for name in ("apply_graph_pass", "apply_gm_pass"):
            self._put(observer, **{name: _watched_pass(getattr(observer, name), self)})

    def _compiled(self, graph: Any, module: Any) -> None:
        nodes = nodes_of(graph)
        facts = BufferFacts({name: facts_of(node) for name, node in nodes.items()})
        path = module.__file__
        vars(module)[_FACTS] = facts  # of this module alone: another graph may have the same text
        names = _inputs_of(graph.module)
        mine = tuple(graph_pass for graph_pass in self._passes if _inputs_of(graph_pass.after) == names)
        self._passes = [graph_pass for graph_pass in self._passes if graph_pass not in mine]
        if self._keep:
            backward = bool(getattr(graph, "is_backward", False))
            buffers = {buffer.get_name(): buffer for buffer in graph.buffers}
            self.graphs[path] = CompiledGraph(path, graph.module, nodes, buffers, backward, mine, graph)

    def _passed(self, name: str, subsystem: str, before: Any, after: Any) -> None:
        passed = GraphPass(name, subsystem, before, after)
        (self.joint if "joint" in subsystem else self._passes).append(passed)


@functools.lru_cache(_PARSED)
def wrapper_of(path: str) -> wrapper.Wrapper:
    """Parse a generated module; its name is a digest of its text. Empty if the file is gone."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError:
        return wrapper.Wrapper()
    return wrapper.parse(text, mutated=_mutated)


def _mutated(op: str) -> Sequence[str | int]:
    """Return the arguments that an op mutates: those of its schema, if it is one of ``torch.ops``."""
    import torch

    function: Any = torch
    for name in op.split(".")[1:] if op.startswith("torch.ops.") else ():
        function = getattr(function, name, None) if name != "ops" else torch.ops
    schema = getattr(function, "_schema", None)
    if schema is None:
        return wrapper.mutated_by_name(op)
    written = [
        (at, argument)
        for at, argument in enumerate(schema.arguments)
        if argument.alias_info and argument.alias_info.is_write
    ]
    return [place for at, argument in written for place in (at, argument.name)]


_FACTS = "_hashbench_facts"
"""Global of a generated module, or attribute of its function where that is not known: what its buffers stand for."""


def _inputs_of(module: Any) -> list[str]:
    return [node.name for node in module.graph.nodes if node.op == "placeholder"]


def _watched_pass(apply: Callable[..., Any], hooks: CapturedGraphs) -> Callable[..., Any]:
    @functools.wraps(apply)
    def watched(observer: Any, *args: Any, **kwargs: Any) -> Any:
        before = copy.deepcopy(observer.gm)
        result = apply(observer, *args, **kwargs)
        if _text_of(before) != _text_of(observer.gm):
            hooks._passed(observer.passname, observer.subsystem or "", before, copy.deepcopy(observer.gm))
        return result

    return watched


def _text_of(module: Any) -> str:
    return "\n".join(f"{node.format_node()}" for node in module.graph.nodes)


@contextlib.contextmanager
def without_graph_caches() -> Iterator[None]:
    """Compile graphs anew: what comes out of a graph cache was not lowered here. Compiled kernels are still cached."""
    import torch._functorch.config
    import torch._inductor.config

    with (
        torch._inductor.config.patch(fx_graph_cache=False, fx_graph_remote_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False, enable_remote_autograd_cache=False),
    ):
        yield


def reset_dynamo() -> None:
    """Forget everything that dynamo has compiled, and its counters."""
    import torch._dynamo
    import torch._dynamo.utils

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def dynamo_counters() -> dict[str, dict[str, int]]:
    """Return what dynamo has counted since :func:`reset_dynamo`: graphs, frames, graph breaks by their reason."""
    from torch._dynamo.utils import counters

    return {kind: dict(counts) for kind, counts in counters.items()}


def clear_compiler_caches() -> None:
    """Forget compiled kernels and graphs of this process; those on disk stay."""
    from torch._inductor.utils import clear_caches

    clear_caches()


def compile_threads() -> int:
    """Return the number of Inductor's compile threads."""
    import torch._inductor.config

    return int(torch._inductor.config.compile_threads or 1)


_HIDES = {
    "cpp_wrapper": "Inductor's cpp_wrapper calls them from C++",
    "triton.cudagraphs": "CUDA graphs replay their launches",
}
"""Settings of Inductor under which no Python sees the calls of kernels, and what they do."""


def why_hidden(unseen: Iterable[str]) -> str:
    """Return why the kernels of graphs, by the files of their modules, are not shown; empty if nothing is known to hide
    them.

    ``CUDA graphs replay their launches (triton.cudagraphs)``, ``multi_kernel makes the calls of some``.
    """
    import torch._inductor.config as settings

    known = [
        f"{what} ({name})" for name, what in _HIDES.items() if functools.reduce(getattr, name.split("."), settings)
    ]
    kinds = {kind: None for path in unseen for kind in unseen_kinds(wrapper_of(path))}
    return "; ".join([*known, *(f"{kind} makes the calls of some" for kind in kinds)])


def backends() -> tuple[str, ...]:
    """Return the names that ``torch.compile(backend=)`` takes here."""
    import torch._dynamo

    return tuple(torch._dynamo.list_backends(exclude_tags=None))


def nodes_of(graph: Any) -> dict[str, Any]:
    """Return the node whose value each buffer of a ``GraphLowering`` holds after its last writer, by buffer name."""
    nodes = {}
    for buffer in graph.buffers:
        writers = last_writer(buffer, graph), buffer  # a mutation may have no node of its own
        origins = [writer.get_origin_node() for writer in writers if hasattr(writer, "get_origin_node")]
        node = next((origin for origin in origins if origin is not None), None)
        if node is not None:
            nodes[buffer.get_name()] = node
    return nodes


def last_writer(buffer: Any, graph: Any) -> Any:
    """Return the buffer after whose computation a buffer holds the value of its origin node.

    A lowering may fill a buffer and then mutate it (``index_put``, ``embedding_dense_backward``): both come from one
    node, and only the first has it as its origin node.

    Args:
        buffer: an ``ir.Buffer`` of inductor.
        graph: the ``GraphLowering`` that holds it.
    """
    found, name, node = buffer, str(buffer.get_name()), buffer.get_origin_node()
    for other in graph.buffers:
        if (mutated_by(other) == name or name in other.get_mutation_names()) and node in other.origins:
            found = other
    return found


def mutated_by(buffer: Any) -> str:
    """Return the name of the buffer that the computation of an ``ir.Buffer`` writes into; empty if it is its own."""
    from torch._inductor import ir

    layout = buffer.layout
    return str(layout.get_buffer().get_name()) if isinstance(layout, ir.MutationLayoutSHOULDREMOVE) else ""
