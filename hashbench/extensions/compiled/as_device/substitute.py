"""What a kernel that the interpreter refuses was to write, computed by ATen from the nodes of its graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hashbench.core.inductor.internals import inside_wrapper, wrapper_of
from hashbench.extensions.compiled.as_device.interpreter import NotInterpretedError
from hashbench.extensions.compiled.evaluate import Evaluator, NotEvaluated, Operands, subgraph_of


@dataclass(frozen=True, slots=True, eq=False)
class AtenSubstitute:
    """Makes calls of kernels of one generated module.

    Attributes:
        module: the graph after all passes.
        nodes: the node whose value each buffer holds, by buffer name.
        path: file of the generated module.
    """

    module: torch.fx.GraphModule
    nodes: Mapping[str, torch.fx.Node]
    path: str

    def __call__(self, args: Sequence[Any]) -> None:
        """Compute what the call that is under way writes, from what it reads.

        Raises:
            NotInterpretedError: that is not known.
        """
        place = inside_wrapper()
        source = wrapper_of(self.path)
        call = source.calls.get(place[1]) if place is not None and place[0] == self.path else None
        kernel = None if call is None else source.kernel(call.kernel)
        if call is None or kernel is None:
            raise NotInterpretedError("the call that was refused is not known")
        nodes = {**{node.name: node for node in self.module.graph.find_nodes(op="placeholder")}, **self.nodes}
        named = {at: nodes[name] for at, name in enumerate(call.arguments) if name in nodes}
        recorded = {node: _fitted(args[at], node) for at, node in named.items() if at in call.reads}
        operands = Operands(self.module.graph)
        values = Evaluator(self.module, recorded, operands)
        for at in kernel.writes:
            if at not in named:
                raise NotInterpretedError(f"{call.kernel}: {call.arguments[at]} has no node of its own")
            try:
                value = values.value(subgraph_of(named[at], recorded, operands))
            except NotEvaluated as answer:
                raise NotInterpretedError(f"{call.kernel}: ATen cannot stand in for it ({answer})") from answer
            args[at].copy_(value.reshape(args[at].shape))


def _fitted(value: Any, node: torch.fx.Node) -> Any:
    """Return a copy of an argument in the shape of its node."""
    if not isinstance(value, torch.Tensor):
        return value
    shape = getattr(node.meta.get("val"), "shape", value.shape)
    known = all(type(size) is int for size in shape) and value.numel() == torch.Size(shape).numel()
    return value.detach().clone().reshape(shape if known else value.shape)
