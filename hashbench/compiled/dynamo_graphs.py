"""Find the first node of dynamo's graphs that computes what eager mode never computes.

A graph that dynamo captured runs the ops of eager mode, on the same values: without decompositions and rounding, every
result is found among those of eager mode, bit by bit. After a constant that is none (``assume_constant_result``), a
guard that misses a change, or a wrong trace of Python, it is not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hashbench.inductor.aot import Backend, dynamo_backend
from hashbench.inductor.nodes import NodeFacts, facts_of
from hashbench.records import TensorDigest
from hashbench.trace.arguments import leaves, tensors_in
from hashbench.trace.digest import digest

_NUMBERS = (int, float, complex)


@dataclass(frozen=True, slots=True)
class StaleNode:
    """The first node whose result eager mode never computes, though it computes all that the node reads.

    Attributes:
        graph: number of the call of a captured graph, from 0.
        node: name of the node.
        facts: op as dynamo has it, module, source.
        constants: what stands in the graph where eager mode may have called something: names of ``get_attr`` nodes that
            eager mode has no such tensor for, and numbers, among the node's arguments.
    """

    graph: int
    node: str
    facts: NodeFacts
    constants: tuple[str, ...] = ()


def first_stale(
    run: Callable[[str | Backend | None, torch.dtype | None], Any], *, dtype: torch.dtype | None = torch.float64
) -> StaleNode | None:
    """Return the first node of the captured graphs that parts from eager mode; ``None`` if there is none.

    Args:
        run: as :data:`hashbench.compiled.ladder.Run`; called twice.
        dtype: in which the model runs; ``None``: its own.

    Seen: forward passes. Where a frame ran eagerly, and in backward passes, nothing is compared. A node is only blamed
    if what its graph returns depends on it and is not found in eager mode either.
    """
    eager = _EagerResults()
    with eager:
        run(None, dtype)
    found = _Search(eager.digests)
    run(dynamo_backend(found.run), dtype)
    return found.first


class _EagerResults(TorchDispatchMode):
    """Digests of all that ops read and return."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.digests: set[TensorDigest] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._see([args, kwargs or {}])
        result = func(*args, **(kwargs or {}))
        self._see(result)
        return result

    def _see(self, value: Any) -> None:
        self.digests.update(digest(tensor.detach()) for tensor in tensors_in(value))


class _Search:
    """Run captured graphs, and keep the first node that parts."""

    def __init__(self, known: set[TensorDigest]) -> None:
        self._known = known
        self._graphs = 0
        self.first: StaleNode | None = None

    def run(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        interpreter = _Digesting(graph)
        result = interpreter.run(*inputs)
        if self.first is None:
            self.first = _first_unknown(graph.graph, interpreter.digests, self._known, self._graphs)
        self._graphs += 1
        return result


class _Digesting(torch.fx.Interpreter):
    """Keep the digests of every node's results, as they are when it has run."""

    def __init__(self, graph: torch.fx.GraphModule) -> None:
        super().__init__(graph)
        self.digests: dict[torch.fx.Node, tuple[TensorDigest, ...]] = {}

    def run_node(self, n: torch.fx.Node) -> Any:
        result = super().run_node(n)
        self.digests[n] = tuple(digest(tensor.detach()) for tensor in tensors_in(result))
        return result


def _first_unknown(
    graph: torch.fx.Graph,
    digests: Mapping[torch.fx.Node, tuple[TensorDigest, ...]],
    known: set[TensorDigest],
    number: int,
) -> StaleNode | None:
    unknown = {node for node, found in digests.items() if node.op != "output" and not known.issuperset(found)}
    (output,) = graph.find_nodes(op="output")
    guilty = unknown & _ancestors(node for node in output.all_input_nodes if node in unknown)
    for node in graph.nodes:
        if node not in guilty or node.op in {"placeholder", "get_attr"}:
            continue
        if any(parent in unknown and parent.op != "get_attr" for parent in node.all_input_nodes):
            continue
        attributes = [str(parent.target) for parent in node.all_input_nodes if parent in unknown]
        numbers = [repr(leaf) for leaf in leaves([node.args, node.kwargs]) if isinstance(leaf, _NUMBERS)]
        return StaleNode(number, node.name, facts_of(node), (*attributes, *numbers))
    return None


def _ancestors(nodes: Iterable[torch.fx.Node]) -> set[torch.fx.Node]:
    """Return the nodes and all that they follow from."""
    found: set[torch.fx.Node] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += node.all_input_nodes
    return found
