"""Run captured graphs node by node, and AOTAutograd's op by op, none of them decomposed, on a model's own tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from hashbench.core.errors import named_line
from hashbench.core.trace.op_schema import plan_of
from hashbench.extensions.compiled.aot import Backend, aot_backend


@dataclass(frozen=True, slots=True, eq=False)
class NodeCall:
    """A node of a captured graph that is about to run.

    Attributes:
        node: itself.
        args, kwargs: the values of its arguments.
        run: runs it.
        backward: the graph is that of a backward pass.
    """

    node: torch.fx.Node
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    run: Callable[[], Any]
    backward: bool = False

    @property
    def is_op(self) -> bool:
        """True if it calls an op."""
        return self.node.op == "call_function" and isinstance(self.node.target, torch._ops.OpOverload)


Visit = Callable[[NodeCall], Any]
"""Run a node, or something else in its place, and return the result."""


def visited(graph: torch.fx.GraphModule, inputs: Sequence[Any], visit: Visit, *, backward: bool = False) -> Any:
    """Run a captured graph, every node by ``visit``, and return its outputs."""
    return _Visiting(graph, visit, backward).run(*inputs)


def visiting_backend(visit: Visit) -> Backend:
    """Return the backend that runs the forward and backward graphs and lets ``visit`` make every call of an op."""

    def of_op(call: NodeCall) -> Any:
        return visit(call) if call.is_op else call.run()

    return aot_backend(
        lambda graph, inputs: visited(graph, inputs, of_op),
        lambda graph, inputs: visited(graph, inputs, of_op, backward=True),
    )


class _Visiting(torch.fx.Interpreter):
    def __init__(self, graph: torch.fx.GraphModule, visit: Visit, backward: bool) -> None:
        super().__init__(graph)
        self._visit, self._backward = visit, backward

    def run_node(self, n: torch.fx.Node) -> Any:
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        run = functools.partial(super().run_node, n)
        return self._visit(NodeCall(n, tuple(plain(args)), plain(kwargs), run, self._backward))


def plain(value: Any) -> Any:
    """Copy what ``torch.fx`` keeps in immutable lists and dictionaries."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return (list if isinstance(value, list) else tuple)(plain(item) for item in value)
    return value


def is_random(func: Any) -> bool:
    """Return whether an op of an FX graph draws random numbers, from a generator or a seed (``prims.inductor_random``,
    which has no tag)."""
    namespace = str(func._schema.name).partition("::")[0]
    names = {argument.name for argument in func._schema.arguments}
    return plan_of(func).seeded or namespace == "rngprims" or (namespace == "prims" and not names.isdisjoint(_SEEDS))


_SEEDS = {"seed", "seeds"}


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


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Checked(Generic[T]):
    """What a check of a model's ops found.

    Attributes:
        wrong: in the order of the first calls.
        calls: that were checked.
        raised: what was tried and raised, also a run that ended early; what was seen until then is among ``wrong``.
    """

    wrong: tuple[T, ...] = ()
    calls: int = 0
    raised: tuple[NotedException, ...] = ()


def noted(what: str, run: Callable[[], object]) -> tuple[NotedException, ...]:
    """Run something, and return the exception that it raises, if it does."""
    try:
        run()
    except Exception as error:
        return (NotedException.of(what, error),)
    return ()
