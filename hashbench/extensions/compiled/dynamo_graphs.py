"""Find the first node of dynamo's graphs that computes what eager mode never computes.

A graph that dynamo captured runs the ops of eager mode, on the same values and in the same order: without
decompositions and rounding, every result is found among those of eager mode behind the graphs before it, bit by bit.
After a constant that is none (``assume_constant_result``), a
guard that misses a change, or a wrong trace of Python, it is not.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hashbench.core.inductor.nodes import NodeFacts, facts_of
from hashbench.core.records import TensorDigest
from hashbench.core.trace.arguments import leaves, tensors_in
from hashbench.core.trace.digest import digest
from hashbench.extensions.compiled.aot import StepRunner, dynamo_backend
from hashbench.extensions.compiled.aot_graphs import NodeCall, visited

_NUMBERS = (int, float, complex)


@dataclass(frozen=True, slots=True)
class StaleNode:
    """The first node whose result eager mode never computes, though it computes all that the node reads.

    Attributes:
        graph: number of the call of a captured graph, from 0.
        node: name of the node.
        facts: op as dynamo has it, module, source.
        constants: names of tensors that the graph holds (``get_attr``), and numbers, among the node's arguments: where
            dynamo puts what it takes for constant.
    """

    graph: int
    node: str
    facts: NodeFacts
    constants: tuple[str, ...] = ()

    def __str__(self) -> str:
        """The finding: ``net.py:7 multiplies by 1.01 where eager mode does not (y_1 of graph 0)``."""
        line = re.match(r"(?:.*/)?(.+?:\d+)(?= |$)", self.facts.source)
        where = line[1] if line else self.facts.module or "the program"
        constants = " and ".join(self.constants)
        verb = _VERBS.get(self.facts.op.rpartition(".")[2].rstrip("_"), "") if constants else ""
        does = f"{verb} {constants}" if verb else f"calls {self.facts.op}{constants and f' with {constants}'}"
        return f"{where} {does} where eager mode does not ({self.node} of graph {self.graph})"


_VERBS: Mapping[str, str] = MappingProxyType(
    {
        "add": "adds",
        "iadd": "adds",
        "sub": "subtracts",
        "isub": "subtracts",
        "mul": "multiplies by",
        "imul": "multiplies by",
        "truediv": "divides by",
        "itruediv": "divides by",
        "div": "divides by",
        "pow": "raises to the power of",
    }
)
"""Last part of the name of a binary op → what it does with a constant."""


def first_stale(run: StepRunner, *, dtype: torch.dtype | None = torch.float64) -> StaleNode | None:
    """Return the first node of the captured graphs that parts from eager mode; ``None`` if there is none.

    Args:
        run: makes one step of the model; called twice.
        dtype: in which the model runs; ``None``: its own.

    Seen: forward passes. Where a frame ran eagerly, and in backward passes, nothing is compared. A node is only blamed
    if what its graph returns depends on it and is not found in eager mode either.
    """
    eager = _EagerResults()
    with eager:
        run(None, dtype)
    found = _Search(eager)
    run(dynamo_backend(found.run), dtype)
    return found.first


class _EagerResults(TorchDispatchMode):
    """Digests of what ops compute, with the numbers of those ops, ascending. An op that returns the content of an
    argument (``detach``) computes nothing."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.positions: dict[TensorDigest, list[int]] = {}
        self._ops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = set(_digests([args, kwargs or {}]))
        result = func(*args, **(kwargs or {}))
        for found in _digests(result):
            if found not in given:
                self.positions.setdefault(found, []).append(self._ops)
        self._ops += 1
        return result


def _digests(value: Any) -> tuple[TensorDigest, ...]:
    return tuple(digest(tensor.detach()) for tensor in tensors_in(value))


class _Search:
    """Run captured graphs, and keep the first node that parts."""

    def __init__(self, eager: _EagerResults) -> None:
        self._eager = eager
        self._start = self._graphs = 0
        self.first: StaleNode | None = None

    def run(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        digests: dict[torch.fx.Node, tuple[TensorDigest, ...]] = {}

        def digested(call: NodeCall) -> Any:
            found = call.run()
            digests[call.node] = _digests(found)
            return found

        result = visited(graph, inputs, digested)
        if self.first is None:
            unknown, last = _unknown(digests, self._eager, self._start)
            self.first = _first_stale(graph.graph, unknown, self._graphs)
            self._start = last + 1
        self._graphs += 1
        return result


def _unknown(
    digests: Mapping[torch.fx.Node, tuple[TensorDigest, ...]], eager: _EagerResults, start: int
) -> tuple[set[torch.fx.Node], int]:
    """Return the nodes whose results no op from number ``start`` on computes, and the number of an op that is not
    behind the last one of this graph."""
    unknown, last = set(), start - 1
    for node, found in digests.items():
        if node.op in {"placeholder", "get_attr", "output"}:
            continue
        given = {value for parent in node.all_input_nodes if parent not in unknown for value in digests[parent]}
        for value in found:
            if value in given:
                continue
            numbers = eager.positions.get(value, [])
            if bisect.bisect_left(numbers, start) == len(numbers):
                unknown.add(node)
            elif (at := bisect.bisect_left(numbers, last)) < len(numbers):
                last = numbers[at]
    return unknown, last


def _first_stale(graph: torch.fx.Graph, unknown: set[torch.fx.Node], number: int) -> StaleNode | None:
    (output,) = graph.find_nodes(op="output")
    guilty = unknown & _ancestors(node for node in output.all_input_nodes if node in unknown)
    for node in graph.nodes:
        if node not in guilty or not unknown.isdisjoint(node.all_input_nodes):
            continue
        attributes = [str(parent.target) for parent in node.all_input_nodes if parent.op == "get_attr"]
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
