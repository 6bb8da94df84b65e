"""Backends of dynamo that run captured graphs as they are, and TorchInductor's table of decompositions: every use of
what torch does not document for these."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

Backend = Callable[[torch.fx.GraphModule, Sequence[Any]], Callable[..., Any]]
"""A backend of ``torch.compile``: the captured graph and its example inputs, to what is called in its place."""

Results = Mapping[str, torch.Tensor]
"""What a step of a model computes, by name: outputs, loss, gradients, buffers, gradients of inputs."""

StepRunner = Callable[[str | Backend | None, torch.dtype | None], Results]
"""Build everything anew (``torch._dynamo.reset``, copy of the model, cast to the dtype, seeds, inputs), run a step
under a backend of ``torch.compile`` (``None``: eager mode) in a dtype (``None``: the model's own), and return its
results."""

GraphRun = Callable[[torch.fx.GraphModule, Sequence[Any]], Any]
"""Run a graph on the inputs of one call, and return its outputs."""


def reset() -> None:
    """Forget every compiled frame (``torch._dynamo.reset``)."""
    torch._dynamo.reset()


def decomposition_table() -> Mapping[Any, Callable[..., Any]]:
    """Return the decompositions that TorchInductor applies under its present configuration, by op overload."""
    from torch._inductor.decomposition import select_decomp_table

    importlib.import_module("torch._inductor.lowering")  # where that of max_pool2d_with_indices looks for limits
    table: Mapping[Any, Callable[..., Any]] = select_decomp_table()
    return table


def dynamo_backend(run: GraphRun) -> Backend:
    """Return the backend that runs each graph as dynamo captured it, autograd recording its ops."""

    def compiler(graph: torch.fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        def call(*inputs: Any) -> Any:
            return run(graph, inputs)

        return call

    return compiler


def aot_backend(forward: GraphRun, backward: GraphRun) -> Backend:
    """Return the backend that runs AOTAutograd's graphs, none of whose ops is decomposed, without autograd."""
    from torch._dynamo.backends.common import aot_autograd

    def compiler(run: GraphRun) -> Callable[..., Any]:
        def compiled(graph: torch.fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
            def call(inputs: list[Any]) -> Any:
                given = list(inputs)
                inputs.clear()  # the convention of a boxed call: the caller keeps none of them alive
                with torch.no_grad():
                    return run(graph, given)

            call._boxed_call = True  # type: ignore[attr-defined]
            return call

        return compiled

    backend: Backend = aot_autograd(fw_compiler=compiler(forward), bw_compiler=compiler(backward), decompositions={})
    return backend
