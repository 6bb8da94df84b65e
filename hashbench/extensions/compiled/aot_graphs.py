"""Run AOTAutograd's graphs op by op, none of them decomposed, on a model's own tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hashbench.core.errors import named_line
from hashbench.core.trace.op_schema import plan_of
from hashbench.extensions.compiled.aot import Backend, aot_backend

Visit = Callable[[torch.fx.Node, tuple[Any, ...], dict[str, Any], bool], Any]
"""Call a node's op on its arguments and return the result; the last says that the graph is that of a backward pass."""


def visiting_backend(visit: Visit) -> Backend:
    """Return the backend that runs the forward and backward graphs and lets ``visit`` make every call of an op."""

    def forward(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        return _Visiting(graph, visit, backward=False).run(*inputs)

    def backward(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        return _Visiting(graph, visit, backward=True).run(*inputs)

    return aot_backend(forward, backward)


def is_random(func: Any) -> bool:
    """Return whether an op of an FX graph draws random numbers, from a generator or a seed (``prims.inductor_random``,
    which has no tag)."""
    namespace = str(func._schema.name).partition("::")[0]
    names = {argument.name for argument in func._schema.arguments}
    return plan_of(func).seeded or namespace == "rngprims" or (namespace == "prims" and not names.isdisjoint(_SEEDS))


_SEEDS = {"seed", "seeds"}


class _Visiting(torch.fx.Interpreter):
    def __init__(self, graph: torch.fx.GraphModule, visit: Visit, *, backward: bool) -> None:
        super().__init__(graph)
        self._visit, self._backward = visit, backward

    def run_node(self, n: torch.fx.Node) -> Any:
        if n.op != "call_function" or not isinstance(n.target, torch._ops.OpOverload):
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        return self._visit(n, tuple(_plain(args)), _plain(kwargs), self._backward)


def _plain(value: Any) -> Any:
    """Copy what ``torch.fx`` keeps in immutable lists and dictionaries."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return (list if isinstance(value, list) else tuple)(_plain(item) for item in value)
    return value


@dataclass(frozen=True, slots=True)
class NotedException:
    """An exception of something that was tried, which is noted and blamed for nothing.

    Attributes:
        what: that was tried.
        exception: on one line.
    """

    what: str
    exception: str

    @staticmethod
    def of(what: object, error: Exception) -> NotedException:
        """Return the record of an exception."""
        return NotedException(str(what), named_line(error, limit=200))
