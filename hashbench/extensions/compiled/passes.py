"""Find the pass over TorchInductor's FX graphs that changes what they compute, on the inputs of a recorded call."""

from __future__ import annotations

import contextlib
import enum
import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

import torch

from hashbench.core.errors import named_line
from hashbench.core.inductor.graphs import GraphPass
from hashbench.core.inductor.nodes import NodeFacts, facts_of
from hashbench.core.run import distance
from hashbench.core.trace.arguments import leaves, mapped, tensors_in
from hashbench.core.trace.op_schema import plan_of
from hashbench.core.trace.storage_writers import storage_key
from hashbench.extensions.compiled.aot_graphs import is_random, plain
from hashbench.extensions.compiled.evaluate import narrowed, recorded_inputs, widened
from hashbench.extensions.compiled.units import SUSPICIOUS, WRONG, WRONG_BESIDE_ROUNDING


class Change(enum.Enum):
    """What a pass did to a node."""

    MADE = "made"
    CHANGED = "changed"
    FED = "reads what was made"
    REMOVED = "removed"
    MOVED = "moved"


@dataclass(frozen=True, slots=True)
class ChangedNode:
    """A node that a pass made, gave other arguments, or removed. ``facts``: of the node itself; passes may make nodes
    that have none."""

    name: str
    target: str
    change: Change
    facts: NodeFacts


@dataclass(frozen=True, slots=True)
class WrongPass:
    """A pass that changes what a graph computes.

    Attributes:
        name: of the pass.
        subsystem: ``joint_graph_passes`` or ``post_grad_passes``.
        result: name of the output's node before the pass, or of the input that the graph writes.
        relative: largest difference over the largest magnitude.
        error: the same in units of what the graph loses in its own dtype; ``inf`` if integers, shapes or NaN differ.
        nodes: what the pass made, changed and removed.
    """

    name: str
    subsystem: str
    result: str
    relative: float
    error: float
    nodes: tuple[ChangedNode, ...] = ()


@dataclass(frozen=True, slots=True)
class NoValue:
    """Value of a node that cannot be evaluated, and of all that follow from it."""

    reason: str


@dataclass(frozen=True, slots=True)
class Passes:
    """The passes over the graphs of one call.

    Attributes:
        wrong: the first that changes results; ``None`` if none does.
        evaluated: passes of which every result was compared.
        partly: passes of which some were not, or none, with a reason.
    """

    wrong: WrongPass | None = None
    evaluated: int = 0
    partly: tuple[tuple[str, str], ...] = ()


@torch.no_grad()
def first_wrong_pass(passes: Iterable[GraphPass], inputs: Mapping[str, Any]) -> Passes:
    """Return the first pass that changes what its graph computes in float64.

    Args:
        passes: in the order in which they ran.
        inputs: values of placeholders by name (:func:`inputs_by_name`). The joint graph of a training step has those of
            its forward and backward (``primals_1``, ``tangents_1``); results that follow from others are not compared.

    A random op that both graphs hold has the same arbitrary values in both; results behind any other are not compared.
    """
    evaluated = 0
    partly: list[tuple[str, str]] = []
    for step in passes:
        comparison = _PassComparison(step, inputs)
        wrong = comparison.first_difference()
        if wrong is not None:
            return Passes(wrong, evaluated, tuple(partly))
        if comparison.reason:
            partly.append((step.name, comparison.reason))
        else:
            evaluated += 1
    return Passes(None, evaluated, tuple(partly))


def inputs_by_name(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> dict[str, Any]:
    """Return copies of the inputs of a call by the names of the graph's placeholders."""
    return {node.name: value for node, value in recorded_inputs(graph, inputs).items()}


class _PassComparison:
    """A graph before and after a pass, on the same inputs."""

    def __init__(self, step: GraphPass, inputs: Mapping[str, Any]) -> None:
        self._step, self._inputs = step, inputs
        self._frozen = _random_in_both(step)
        self._known: dict[tuple[bool, bool, bool], list[Any]] = {}
        self.reason = ""

    def first_difference(self) -> WrongPass | None:
        names = _result_names(self._step.before)
        if names != _result_names(self._step.after) and len(names) != len(_result_names(self._step.after)):
            self.reason = "the pass changes the number of inputs or outputs"
            return None
        before, after = self._values(after=False), self._values(after=True)
        found = []
        for number, (name, first, other) in enumerate(zip(names, before, after, strict=True)):
            if isinstance(first, NoValue) or isinstance(other, NoValue):
                found.append(self._in_own_dtype(number, name))
            elif (relative := _relative(other, first)) > SUSPICIOUS:
                found.append(self._judged(number, name, relative, other, first))
        return next((wrong for wrong in found if wrong is not None), None)

    def _values(self, *, after: bool, float64: bool = True, narrow: bool = False) -> list[Any]:
        key = (after, float64, narrow)
        if key not in self._known:
            graph = self._step.after if after else self._step.before
            self._known[key] = self._evaluated(graph, float64=float64, narrow=narrow)
        return self._known[key]

    def _evaluated(self, graph: torch.fx.GraphModule, *, float64: bool, narrow: bool) -> list[Any]:
        given = [
            self._inputs.get(node.name, NoValue(f"no value of {node.name} is known"))
            for node in graph.graph.find_nodes(op="placeholder")
        ]
        if narrow:
            given = [mapped(value, narrowed) for value in given]
        return outputs_of(graph, given, float64=float64, frozen=self._frozen)

    def _judged(self, number: int, name: str, relative: float, after: Any, before: Any) -> WrongPass | None:
        is_float64 = all(widened(tensor.dtype) == tensor.dtype for tensor in tensors_in(list(self._inputs.values())))
        own = self._values(after=False, float64=False, narrow=is_float64)[number]
        own = narrowed(own) if is_float64 else own
        own = own if isinstance(own, torch.Tensor) else None
        error = _in_units(after, before, own)
        rounded = not is_float64 and _has_new_constant(self._step)
        if error <= (WRONG_BESIDE_ROUNDING if rounded else WRONG):
            if error > WRONG:
                self.reason = f"{name} differs as a constant does that was rounded to the graph's dtype"
            return None
        return self._wrong(name, relative, error)

    def _in_own_dtype(self, number: int, name: str) -> WrongPass | None:
        """Compare a result that has no float64 value: a large difference in the graph's own dtype counts."""
        before, after = (self._values(after=which, float64=False)[number] for which in (False, True))
        missing = next((value for value in (before, after) if isinstance(value, NoValue)), None)
        if missing is not None:
            self.reason = missing.reason
            return None
        relative = _relative(after, before)
        error = _in_units(after, before, None)
        if not relative or not _are_tensors(after, before) or not math.isfinite(error):
            self.reason = f"{name} cannot be evaluated in float64" if relative else self.reason
            return None
        units = relative / distance.unit_roundoff(before.dtype) if before.dtype.is_floating_point else error
        if units > WRONG_BESIDE_ROUNDING:
            return self._wrong(name, relative, units)
        self.reason = f"{name} cannot be evaluated in float64"
        return None

    def _wrong(self, result: str, relative: float, error: float) -> WrongPass:
        nodes = tuple(changed_nodes(self._step))
        return WrongPass(self._step.name, self._step.subsystem, result, relative, error, nodes)


def changed_nodes(step: GraphPass) -> list[ChangedNode]:
    """Return the nodes that a pass made or gave another target or arguments, in the order of the graph, then those that
    it removed; if there are none, those that it moved. What only reads a node that was made is ``FED``."""
    before, after = ({node.name: node for node in graph.graph.nodes} for graph in (step.before, step.after))
    found = []
    for name, node in after.items():
        if node.op in {"placeholder", "output"}:
            continue
        if name not in before:
            found.append(ChangedNode(name, str(node.target), Change.MADE, facts_of(node)))
        elif _call(node) != _call(before[name]):
            change = Change.FED if _is_fed(node, before[name], before) else Change.CHANGED
            found.append(ChangedNode(name, str(node.target), change, facts_of(node)))
    removed = [node for name, node in before.items() if name not in after]
    if not (found or removed):
        moved = _moved(list(before), list(after))
        found += [ChangedNode(name, str(after[name].target), Change.MOVED, facts_of(after[name])) for name in moved]
    return found + [ChangedNode(node.name, str(node.target), Change.REMOVED, facts_of(node)) for node in removed]


def _moved(before: Sequence[str], after: Sequence[str]) -> list[str]:
    """Return the names that stand elsewhere among the others, the fewest that explain it."""
    blocks = SequenceMatcher(None, before, after, autojunk=False).get_matching_blocks()
    still = {name for block in blocks for name in after[block.b : block.b + block.size]}
    return [name for name in after if name not in still]


def _call(node: torch.fx.Node) -> tuple[str, str, str]:
    return str(node.target), str(node.args), str(node.kwargs)


def _is_fed(node: torch.fx.Node, old: torch.fx.Node, before: Mapping[str, torch.fx.Node]) -> bool:
    """Return whether a node differs from an old one only in that it reads nodes that were not there."""
    if node.target != old.target:
        return False
    pairs = [[*leaves([list(each.args), dict(each.kwargs)])] for each in (node, old)]
    differing = [(new, was) for new, was in zip(*pairs, strict=False) if str(new) != str(was)]
    made = all(isinstance(new, torch.fx.Node) and new.name not in before for new, _ in differing)
    return made and len(pairs[0]) == len(pairs[1])


def _has_new_constant(step: GraphPass) -> bool:
    """Return whether the pass put a number or a tensor into the graph that was not there."""
    known = {value for node in step.before.graph.nodes for value in _constants(node)}
    return any(value not in known for node in step.after.graph.nodes for value in _constants(node))


def _constants(node: torch.fx.Node) -> list[str]:
    if node.op == "get_attr":
        return [f"get_attr {node.target}"]
    found = leaves([list(node.args), dict(node.kwargs)])
    return [repr(leaf) for leaf in found if isinstance(leaf, (float, complex))]


def _random_in_both(step: GraphPass) -> frozenset[str]:
    first, other = ({node.name: _call(node) for node in graph.graph.nodes} for graph in (step.before, step.after))
    return frozenset(name for name, call in first.items() if other.get(name) == call)


def _result_names(graph: torch.fx.GraphModule) -> list[str]:
    (output,) = graph.graph.find_nodes(op="output")
    returned = [str(leaf) for leaf in leaves(output.args[0] if output.args else ())]
    return returned + [node.name for node in graph.graph.find_nodes(op="placeholder")]


def _are_tensors(*values: Any) -> bool:
    return all(isinstance(value, torch.Tensor) for value in values)


def _in_units(value: Any, reference: Any, own: torch.Tensor | None) -> float:
    if not _are_tensors(value, reference):
        return math.inf
    return distance.in_units(value, reference, own, own_dtype=torch.float32)


def _relative(value: Any, reference: Any) -> float:
    if _are_tensors(value, reference):
        return distance.relative(value, reference)
    return 0.0 if type(value) is type(reference) and value == reference else math.inf


# --------------------------------------------------------------------------------------------------------- evaluation


def outputs_of(
    graph: torch.fx.GraphModule, inputs: Sequence[Any], *, float64: bool = True, frozen: frozenset[str] = frozenset()
) -> list[Any]:
    """Return what a graph of aten ops computes: its outputs in order, then what each of its inputs holds afterwards.

    Args:
        inputs: values of the placeholders in order, which are not written; :class:`NoValue` where none is known.
        float64: replaces lower floating-point dtypes, also those that ops are given as arguments.
        frozen: names of the random nodes that get a generator seeded by their name; others are not evaluated.

    Returns:
        For each of them the value, or :class:`NoValue` if an op raised or was random, or read such a value.
    """
    kinds = {tensor.device.type for tensor in tensors_in(list(inputs))} - {"cpu", "meta"}
    with contextlib.ExitStack() as restored:
        restored.enter_context(torch.random.fork_rng(devices=[]))
        for kind in sorted(kinds):
            devices = range(torch.get_device_module(kind).device_count())
            restored.enter_context(torch.random.fork_rng(devices, device_type=kind))
        return _Evaluation(graph, float64=float64, frozen=frozen, kinds=kinds).outputs(inputs)


class _Evaluation(torch.fx.Interpreter):
    def __init__(
        self, graph: torch.fx.GraphModule, *, float64: bool, frozen: frozenset[str], kinds: Iterable[str]
    ) -> None:
        super().__init__(graph, garbage_collect_values=False)
        self._float64, self._frozen, self._kinds = float64, frozen, kinds

    def outputs(self, inputs: Sequence[Any]) -> list[Any]:
        returned = self.run(*inputs, enable_io_processing=False)
        return [*leaves(returned), *(self.env[node] for node in self.graph.find_nodes(op="placeholder"))]

    def run_node(self, n: torch.fx.Node) -> Any:
        if n.op == "output":
            return super().run_node(n)
        unknown = next((v for node in n.all_input_nodes if isinstance(v := self.env[node], NoValue)), None)
        if unknown is None:
            try:
                return self._computed(n)
            except Exception as error:
                unknown = NoValue(f"{n.target}: {named_line(error, limit=120)}")
        self._lose_what_it_writes(n, unknown)
        return unknown

    def _computed(self, node: torch.fx.Node) -> Any:
        if node.op in {"placeholder", "get_attr"}:
            copied = mapped(super().run_node(node), _copied)
            return mapped(copied, self._wide)
        args, kwargs = (mapped(plain(given), self._wide) for given in self.fetch_args_kwargs_from_env(node))
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        if node.op != "call_function" or not callable(node.target):
            return NoValue(f"{node.op} {node.target}")
        if _holds_random([node.target, args, kwargs]):
            if node.name not in self._frozen:
                return NoValue(f"{node.target} is random")
            self._seed(zlib.crc32(node.name.encode()))
        if not isinstance(node.target, torch._ops.OpOverload):
            return node.target(*args, **kwargs)
        if self._float64 and node.target is torch.ops.aten.view.dtype:
            return NoValue(f"{node.target} reads the bits of a dtype")
        plan = plan_of(node.target)
        result = node.target(*args, **kwargs)
        if plan.blank:
            return mapped(result, lambda leaf: leaf.zero_() if isinstance(leaf, torch.Tensor) else leaf)
        return _as_traced(result, node) if plan.fresh else result

    def _seed(self, number: int) -> None:
        torch.default_generator.manual_seed(number)
        for kind in self._kinds:
            torch.get_device_module(kind).manual_seed_all(number)

    def _lose_what_it_writes(self, node: torch.fx.Node, unknown: NoValue) -> None:
        if not isinstance(node.target, torch._ops.OpOverload) or not plan_of(node.target).writes_arguments:
            return
        written = {storage_key(tensor) for n in node.all_input_nodes for tensor in tensors_in(self.env[n])}
        for other, value in self.env.items():
            if not written.isdisjoint(storage_key(tensor) for tensor in tensors_in(value)):
                self.env[other] = unknown

    def _wide(self, leaf: Any) -> Any:
        return widened(leaf) if self._float64 else leaf


def _copied(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf


def _holds_random(value: Any) -> bool:
    """Return whether a target or its arguments hold a random op, or a graph with one (of a higher-order operator)."""
    for leaf in leaves(value):
        if isinstance(leaf, torch._ops.OpOverload) and is_random(leaf):
            return True
        if isinstance(leaf, torch.fx.GraphModule) and any(
            _holds_random([node.target, getattr(leaf, str(node.target)) if node.op == "get_attr" else None])
            for node in leaf.graph.nodes
        ):
            return True
    return False


def _as_traced(result: Any, node: torch.fx.Node) -> Any:
    """Copy a new tensor into the strides that it had when the graph was traced, on which a later ``view`` relies: in
    float64 a kernel may choose others."""
    promised = node.meta.get("val")
    if not isinstance(result, torch.Tensor) or not isinstance(promised, torch.Tensor):
        return result
    sizes, strides = tuple(promised.shape), tuple(promised.stride()) if promised.layout == torch.strided else ()
    if sizes != tuple(result.shape) or len(strides) != len(sizes) or strides == result.stride():
        return result
    if not all(isinstance(item, int) for item in (*sizes, *strides)) or not _is_dense(sizes, strides):
        return result
    return torch.empty_strided(sizes, strides, dtype=result.dtype, device=result.device).copy_(result)


def _is_dense(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    return 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True)) == math.prod(sizes)
