"""Lower a function with Inductor, without a C++ compiler, and interpret the graph that it lowered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch._functorch.config as functorch_config
from torch._inductor import compile_fx, config, ir
from torch._inductor.graph import GraphLowering
from torch.fx.experimental.proxy_tensor import make_fx

from hashbench.extensions.compiled.lowered import evaluate


@dataclass(frozen=True, slots=True)
class Lowering:
    """A lowered function: Inductor's graph and code, the value of each node of its FX graph, and of each input."""

    graph: GraphLowering
    code: str
    nodes: dict[torch.fx.Node, Any]
    inputs: dict[str, Any]
    results: tuple[torch.Tensor, ...] = ()

    def values(self) -> dict[str, torch.Tensor]:
        """Return the inputs, and the results of extern kernels, by name of buffer."""
        found = {name: value for name, value in self.inputs.items() if isinstance(value, torch.Tensor)}
        for buffer in self.graph.buffers:
            node = buffer.get_origin_node()
            if not isinstance(buffer, ir.ComputedBuffer | ir.ConcatKernel) and node in self.nodes:
                value = self.nodes[node]
                if isinstance(value, torch.Tensor):
                    found[buffer.get_name()] = value
        return found

    def outputs(self, **how: Any) -> list[torch.Tensor]:
        """Return the results of the graph, by the evaluation of its IR."""
        found = []
        for output in self.graph.graph_outputs:
            name = output.get_name()
            writer = [b for b in self.graph.buffers if name in (b.get_name(), *b.get_mutation_names())][-1]
            value = evaluate(writer, self.values(), graph=self.graph, **how)
            found.append(value.reshape([int(size) for size in output.get_size()]))
        return found

    def computed(self) -> list[ir.Buffer]:
        return [b for b in self.graph.buffers if isinstance(b, ir.ComputedBuffer | ir.ConcatKernel)]


class _Stop(BaseException):
    pass


def lower(function: Callable[..., Any], inputs: Sequence[Any], *, interpret: bool = True, **settings: Any) -> Lowering:
    """Lower ``function(*inputs)`` up to, and without, the compilation of its C++."""
    module = make_fx(function, tracing_mode="real")(
        *[x.detach().clone() if isinstance(x, torch.Tensor) else x for x in inputs]
    )
    return lower_module(module, inputs, interpret=interpret, **settings)


def lower_module(module: Any, inputs: Sequence[Any], *, interpret: bool = True, **settings: Any) -> Lowering:
    captured: list[tuple[GraphLowering, str]] = []

    def compile_to_module(self: GraphLowering) -> Any:
        captured.append((self, self.codegen()[0].value))
        raise _Stop

    settings = {"fx_graph_cache": False, "compile_threads": 1, **settings}
    with (
        torch.no_grad(),
        config.patch(settings),
        functorch_config.patch(enable_autograd_cache=False),
        patch.object(GraphLowering, "compile_to_module", compile_to_module),
        suppress(_Stop),
    ):
        compile_fx.compile_fx(module, list(inputs))
    graph, code = captured[0]
    constants = [*module.parameters(), *module.buffers()]  # tensors of the closure
    given = [x.detach().clone() for x in (*constants, *inputs) if isinstance(x, torch.Tensor)]
    nodes: dict[torch.fx.Node, Any] = {}
    if interpret:
        with torch.no_grad():
            interpreter = _Interpreter(graph.module, nodes)
            interpreter.run(*[x.clone() for x in given])
    return Lowering(graph, code, nodes, dict(zip(graph.graph_inputs, given, strict=True)))


def lower_compiled(
    function: Callable[..., Any], inputs: Sequence[Any], *, dynamic: bool = False, run: bool = False
) -> Lowering:
    """Lower what dynamo makes of a function; if ``run``, compile it and keep what its kernels compute."""
    captured: list[tuple[GraphLowering, str]] = []
    compile_to_module = GraphLowering.compile_to_module

    def capture(self: GraphLowering) -> Any:
        if run:
            made = compile_to_module(self)
            captured.append((self, ""))
            return made
        captured.append((self, self.codegen()[0].value))
        raise _Stop

    torch._dynamo.reset()
    results: Any = ()
    with (
        torch.no_grad(),
        config.patch(fx_graph_cache=False, compile_threads=1),
        functorch_config.patch(enable_autograd_cache=False),
        patch.object(GraphLowering, "compile_to_module", capture),
        suppress(_Stop),
    ):
        results = torch.compile(function, dynamic=dynamic)(*inputs)
    torch._dynamo.reset()
    ((graph, code),) = captured
    given = {} if dynamic else dict(zip(graph.graph_inputs, inputs, strict=True))
    return Lowering(graph, code, {}, given, (results,) if isinstance(results, torch.Tensor) else tuple(results))


class _Interpreter(torch.fx.Interpreter):
    def __init__(self, module: Any, nodes: dict[torch.fx.Node, Any]) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.nodes = nodes

    def run_node(self, n: torch.fx.Node) -> Any:
        value = super().run_node(n)
        self.nodes[n] = value.clone() if isinstance(value, torch.Tensor) else value
        return value
