"""Evaluate nodes of a post-grad graph from recorded values: in their own dtypes, in float64, or in float64 with random
rounding.

A :class:`Subgraph` is what lies between a node and recorded values. An :class:`Evaluator` keeps what it has computed;
whoever judges several buffers of one kernel shares it between them.

Ops run eagerly, outside of autograd, autocast, dispatch modes and traces. What an op would write is cloned before.
"""

from __future__ import annotations

import builtins
import enum
import math
import operator
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx.node import map_arg
from torch.utils._pytree import tree_map

from hashbench.core.errors import named_line
from hashbench.core.run.distance import unit_roundoff
from hashbench.core.run.rounding_noise import RandomRounding, folded_terms
from hashbench.core.trace.digest import untraced
from hashbench.core.trace.op_schema import OpPlan, Pattern, plan_of

_PLAIN = (builtins, operator, math)
"""Modules of Python functions on sizes; ``operator`` has ``getitem``."""


class NoValueReason(enum.StrEnum):
    """Why the value of a node has no reference."""

    RANDOM = "random"
    UNKNOWN_OP = "unknown op"
    UNINITIALIZED = "uninitialized"
    MISSING = "value not recorded"
    CHANGED = "reads memory that another op changed"
    COLLECTIVE = "collective"
    NO_ORIGIN = "no origin node"
    SHAPE = "shape"
    LAYOUT = "layout"
    RAISED = "raised"
    NOT_IN_FLOAT64 = "not in float64"
    NOT_RUN = "kernel not run"


class NotEvaluated(Exception):  # noqa: N818 - an answer, not an error
    """The value of a node is unknown, for a ``reason`` that is the same for many nodes and a ``detail``."""

    def __init__(self, reason: NoValueReason, detail: str = "") -> None:
        self.reason, self.detail = reason, detail
        super().__init__(f"{reason}: {detail}" if detail else str(reason))


class Precision(enum.Enum):
    """How a node is evaluated: in its own dtype; in float64 (complex128); the same with a random rounding by one unit
    roundoff of its own dtype after every op and of every recorded input, of a sum of n terms by sqrt(n)."""

    OWN = "own dtype"
    FLOAT64 = "float64"
    ROUNDED = "float64, randomly rounded"


# ------------------------------------------------------------------------------------------------------- which nodes


@dataclass(frozen=True, slots=True)
class Subgraph:
    """What a node is computed by.

    Attributes:
        ops: ``call_function`` nodes in the order of evaluation; the last is the node itself.
        inputs: recorded nodes that they read.
    """

    ops: tuple[torch.fx.Node, ...]
    inputs: tuple[torch.fx.Node, ...]


class Operands:
    """Operands of the nodes of a graph; after an op has written an operand in place, the op's own node instead.

    Functionalized graphs write in place only where Inductor put that back (``index_put_``) and at their end (``copy_``
    to an input).
    """

    def __init__(self, graph: torch.fx.Graph) -> None:
        self.written: dict[torch.fx.Node, torch.fx.Node] = {}
        """By node (an input of the graph): the last op that wrote all of it in place."""
        self.storage: dict[torch.fx.Node, torch.fx.Node] = {}
        """By node: the first node with the same memory, if that is another."""
        self._replaced: dict[tuple[torch.fx.Node, torch.fx.Node], torch.fx.Node | None] = {}
        whole: dict[torch.fx.Node, torch.fx.Node] = {}  # by node: the first node that is the same memory, entirely
        storage = self.storage
        writes: dict[torch.fx.Node, list[tuple[torch.fx.Node, torch.fx.Node, int]]] = {}
        order = {node: position for position, node in enumerate(graph.nodes)}
        for node in graph.nodes:
            for operand in node.all_input_nodes:
                for writer, target, position in reversed(writes.get(storage.get(operand, operand), [])):
                    if position > order[operand]:
                        same = whole.get(writer) is whole.get(operand, operand) is whole.get(target, target)
                        self._replaced[node, operand] = writer if same else None
                        break
            if not _is_op(node):
                continue
            plan = plan_of(node.target)
            for target in written_operands(node, plan):
                root = storage.get(target, target)
                writes.setdefault(root, []).append((node, target, order[node]))
                if plan.pattern is Pattern.INPLACE:
                    whole[node], storage[node] = whole.get(target, target), root
                    self.written[whole[node]] = node
            if plan.pattern is Pattern.VIEW and node.all_input_nodes:
                source = node.all_input_nodes[0]
                storage[node] = storage.get(source, source)

    def of(self, reader: torch.fx.Node, operand: torch.fx.Node) -> torch.fx.Node:
        """Return the node whose value ``reader`` reads as ``operand``.

        Raises:
            NotEvaluated: another op wrote a part of its memory.
        """
        found = self._replaced.get((reader, operand), operand)
        if found is None:
            raise NotEvaluated(NoValueReason.CHANGED, f"{reader.name} reads {operand.name}")
        return found


def written_operands(node: torch.fx.Node, plan: OpPlan) -> list[torch.fx.Node]:
    """Return the nodes whose memory a ``call_function`` node of an op writes."""
    if not plan.writes_arguments:
        return []
    return [value for value in plan.written_values(node.args, node.kwargs) if isinstance(value, torch.fx.Node)]


def subgraph_of(node: torch.fx.Node, recorded: Container[torch.fx.Node], operands: Operands) -> Subgraph:
    """Return what lies between a node and recorded nodes or constants. The node itself counts as not recorded.

    Raises:
        NotEvaluated: it reads a value that is neither recorded nor computed, or what :meth:`Operands.of` refuses.
    """
    ops: dict[torch.fx.Node, None] = {}
    inputs: dict[torch.fx.Node, None] = {}
    opened: set[torch.fx.Node] = set()
    waiting = [node]
    while waiting:
        item = waiting[-1]
        if item in ops or item in inputs or item.op == "get_attr":
            waiting.pop()
        elif item in recorded and (item is not node or item.op == "placeholder"):
            inputs[item] = None
        elif item.op != "call_function":
            raise NotEvaluated(NoValueReason.MISSING, item.name)
        elif item in opened:
            ops[waiting.pop()] = None
        else:
            opened.add(item)
            waiting += [operands.of(item, operand) for operand in item.all_input_nodes]
    return Subgraph(tuple(ops), tuple(inputs))


def _is_op(node: torch.fx.Node) -> bool:
    return node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload)


def recorded_inputs(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> dict[torch.fx.Node, Any]:
    """Return copies of the inputs of a call by the graph's placeholders."""
    kept = [value.detach().clone() if isinstance(value, torch.Tensor) else value for value in inputs]
    return dict(zip(module.graph.find_nodes(op="placeholder"), kept, strict=False))


# -------------------------------------------------------------------------------------------------------- their value


def widened(value: Any) -> Any:
    """Return a value with floating tensors and dtypes as float64, complex ones as complex128; others as they are."""
    return _converted(value, torch.float64, torch.complex128)


def narrowed(value: Any) -> Any:
    """Return a value with floating tensors and dtypes as float32, complex ones as complex64; others as they are."""
    return _converted(value, torch.float32, torch.complex64)


def _converted(value: Any, floating: torch.dtype, of_complex: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor) and not value.is_quantized:
        return value.to(_converted(value.dtype, floating, of_complex))
    if not isinstance(value, torch.dtype):
        return value
    return floating if value.is_floating_point else of_complex if value.is_complex else value


class Evaluator:
    """Values of nodes.

    Args:
        module: whose ``get_attr`` nodes are read.
        recorded: the value of each recorded node, as it was read: a tensor, or a number for a size.
        operands: of the nodes.
    """

    def __init__(self, module: torch.fx.GraphModule, recorded: Mapping[torch.fx.Node, Any], operands: Operands) -> None:
        self._graph = module, recorded, operands
        self._evaluations: dict[tuple[Precision, int, float], _Evaluation] = {}

    def value(
        self, subgraph: Subgraph, precision: Precision = Precision.OWN, seed: int = 0, scale: float = 1.0
    ) -> torch.Tensor:
        """Return the tensor that the last op of a subgraph computes, in the dtype of the precision.

        Args:
            subgraph: what it is computed by; without ops its only input.
            precision: of the evaluation.
            seed: of random rounding.
            scale: units of roundoff by which random rounding changes a value.

        Raises:
            NotEvaluated: an op of it is random, unknown, leaves its memory uninitialized, or raises; or its value is no
                tensor.
        """
        key = precision, seed, scale
        if key not in self._evaluations:
            self._evaluations[key] = _Evaluation(*self._graph, *key)
        value = self._evaluations[key].value(subgraph)
        if not isinstance(value, torch.Tensor):
            raise NotEvaluated(NoValueReason.NO_ORIGIN, "its node has no tensor")
        return value


class _Evaluation:
    """Values of nodes in one precision."""

    def __init__(
        self,
        module: torch.fx.GraphModule,
        recorded: Mapping[torch.fx.Node, Any],
        operands: Operands,
        precision: Precision,
        seed: int,
        scale: float,
    ) -> None:
        self._module, self._recorded, self._operands = module, recorded, operands
        self._precision, self._scale = precision, scale
        self._noise = RandomRounding(seed)
        self._device = _device_of(recorded)
        self._values: dict[torch.fx.Node, Any] = {}

    def value(self, subgraph: Subgraph) -> Any:
        with untraced(), torch._C._DisableAutocast():
            for node in subgraph.ops:
                if node not in self._values:
                    self._values[node] = self._computed(node)
            return self._of((subgraph.ops or subgraph.inputs)[-1])

    def _of(self, node: torch.fx.Node) -> Any:
        if node not in self._values:
            value = _constant(self._module, node) if node.op == "get_attr" else self._recorded[node]
            self._values[node] = value if self._precision is Precision.OWN else self._rounded(widened(value), value)
        return self._values[node]

    def _computed(self, node: torch.fx.Node) -> Any:
        compute = function_of(node)
        try:
            value = self._called(node, compute)
        except NotEvaluated:
            raise
        except Exception as error:  # of any kind: a kernel lacks for float64, a library is missing, memory
            reason = NoValueReason.RAISED if self._precision is Precision.OWN else NoValueReason.NOT_IN_FLOAT64
            raise NotEvaluated(reason, f"{node.target}: {named_line(error, limit=200)}") from error
        if self._precision is Precision.OWN:
            return value
        meta = node.meta.get("val")
        if isinstance(value, (tuple, list)) and isinstance(meta, (tuple, list)) and len(value) == len(meta):
            return tuple(self._checked(node, *pair) for pair in zip(value, meta, strict=True))
        return self._checked(node, value, meta)

    def _checked(self, node: torch.fx.Node, value: Any, traced: Any) -> Any:
        """Return a value, rounded, whose shape is the one that was traced."""
        if not (isinstance(value, torch.Tensor) and isinstance(traced, torch.Tensor)):
            return value
        if len(value.shape) != len(traced.shape) or _other_shape(value.shape, traced.shape):
            raise NotEvaluated(
                NoValueReason.NOT_IN_FLOAT64, f"{node.target} reads bits: its result has a different shape"
            )
        return value if _moves(node) else self._rounded(value, traced, terms_of(node))

    def _called(self, node: torch.fx.Node, compute: Callable[..., Any]) -> Any:
        def operand(item: torch.fx.Node) -> Any:
            return self._of(self._operands.of(node, item))

        args, kwargs = map_arg(node.args, operand), dict(map_arg(node.kwargs, operand))
        args, kwargs = tree_map(self._here, args), tree_map(self._here, kwargs)
        if self._precision is not Precision.OWN:
            args, kwargs = tree_map(widened, args), tree_map(widened, kwargs)
        if _is_op(node) and plan_of(node.target).writes_arguments:
            args, kwargs = tree_map(_cloned, args), tree_map(_cloned, kwargs)
        return compute(*args, **kwargs)

    def _here(self, value: Any) -> Any:
        """Return a device of the code that is not there as the device of what was recorded."""
        elsewhere = isinstance(value, torch.device) and value.type == "cuda" and self._device.type == "cpu"
        return self._device if elsewhere else value

    def _rounded(self, value: Any, own: Any, terms: int = 1) -> Any:
        if self._precision is not Precision.ROUNDED or not isinstance(own, torch.Tensor):
            return value
        if not (own.dtype.is_floating_point or own.dtype.is_complex) or own.is_quantized:
            return value
        unit = min(unit_roundoff(own.dtype) * self._scale * math.sqrt(terms), 0.5)
        return self._noise.moved(value, unit)


def _device_of(recorded: Mapping[torch.fx.Node, Any]) -> torch.device:
    """Return the device on which a graph ran: that of an accelerator, if one of the values is there."""
    devices = {value.device for value in recorded.values() if isinstance(value, torch.Tensor)}
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


def terms_of(node: torch.fx.Node) -> int:
    """Return how many elements a reduction folds into one; 1 for other nodes and unknown sizes."""
    if not _is_op(node):
        return 1
    results = node.meta.get("val")
    result = results[0] if isinstance(results, (tuple, list)) else results
    operand = node.all_input_nodes[0].meta.get("val") if node.all_input_nodes else None
    return folded_terms(node.target, operand, result)


def function_of(node: torch.fx.Node) -> Callable[..., Any]:
    """Return the function of a ``call_function`` node that gives the same value at every call.

    Raises:
        NotEvaluated: it does not, or nobody knows: a higher-order op, a Python function.
    """
    target: Any = node.target
    if not isinstance(target, torch._ops.OpOverload):
        name = getattr(target, "__name__", "")
        if name.startswith("sym_") or any(getattr(module, name, None) is target for module in _PLAIN):
            return target  # type: ignore[no-any-return]
        raise NotEvaluated(NoValueReason.UNKNOWN_OP, str(target))
    plan = plan_of(target)
    if plan.seeded and not _draws_nothing(node):
        raise NotEvaluated(NoValueReason.RANDOM, str(target))
    if plan.blank:
        raise NotEvaluated(NoValueReason.UNINITIALIZED, str(target))
    if plan.collective or plan.waits:
        raise NotEvaluated(NoValueReason.COLLECTIVE, str(target))
    return target


def _draws_nothing(node: torch.fx.Node) -> bool:
    """Return True if a random op has a probability of dropout, of zero."""
    target: Any = node.target
    names = [argument.name for argument in target._schema.arguments]
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    return "dropout_p" in names and bool(given.get("dropout_p", 0.0) == 0.0)


def _constant(module: torch.fx.GraphModule, node: torch.fx.Node) -> Any:
    value: Any = module
    for name in str(node.target).split("."):
        if not hasattr(value, name):
            raise NotEvaluated(NoValueReason.MISSING, str(node.target))
        value = getattr(value, name)
    return value.detach() if isinstance(value, torch.Tensor) else value


def _moves(node: torch.fx.Node) -> bool:
    """Return True if a node's values are an operand's, unrounded: views, and pieces of an op's outputs."""
    return not _is_op(node) or plan_of(node.target).pattern is Pattern.VIEW


def _other_shape(shape: Sequence[int], traced: Sequence[Any]) -> bool:
    return any(type(size) is int and size != actual for actual, size in zip(shape, traced, strict=True))


def _cloned(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
