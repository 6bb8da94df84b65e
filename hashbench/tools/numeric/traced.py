"""Both models of a pair run once more under a trace that keeps what every op left, to find where they part."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from hashbench.records import TensorDigest, Trace
from hashbench.run.workload import clone_inputs
from hashbench.tools.numeric import parting
from hashbench.tools.numeric.compare import compare_mappings, compare_values, renamed, without_wrapper
from hashbench.tools.numeric.parting import Agreement
from hashbench.tools.numeric.report import LONE, SIDES, Parting, Rename, Rule, TensorComparison
from hashbench.trace.api import HashDebugTrace
from hashbench.trace.arguments import tensors_in
from hashbench.trace.callbacks import TraceCallback
from hashbench.trace.op_schema import plan_of

if TYPE_CHECKING:
    from hashbench.tools.numeric.running import Model, Request, Subject

KEPT_MIB = 1024
"""How much of what the ops of one execution left is kept, in MiB."""


# ------------------------------------------------------------------------------------------------ one execution


@dataclass(frozen=True, slots=True)
class Execution:
    """One traced execution: its trace, the names of its parameters and buffers, its results by stage, iteration and
    name, what its ops and leaves held by their ids, whether ``torch.compile`` may have hidden some, and of how many ops
    nothing was kept."""

    trace: Trace
    names: Sequence[str]
    results: Mapping[str, Any] = field(repr=False)
    values: Mapping[str, list[torch.Tensor]] = field(repr=False)
    compiled: bool
    dropped: int


class _Keeper(TraceCallback):
    """Keeps a copy of everything that ops and leaves held, by the ids of their records, up to :data:`KEPT_MIB`."""

    def __init__(self) -> None:
        self.values: dict[str, list[torch.Tensor]] = {}
        self.dropped = 0
        self._left = KEPT_MIB * 2**20

    def after(self, node: str, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any) -> None:
        """Keep what the call wrote: its outputs, then its written arguments."""
        written = plan_of(func).written_tensors(args, kwargs)
        seen = {id(tensor) for tensor in written}
        self._keep(node, [tensor for tensor in tensors_in(output) if id(tensor) not in seen] + written)

    def leaf(self, node: str, tensor: torch.Tensor) -> None:
        """Keep a tensor that no op wrote."""
        self._keep(node, [tensor])

    def _keep(self, node: str, tensors: Sequence[torch.Tensor]) -> None:
        size = sum(tensor.nbytes for tensor in tensors if tensor.layout is torch.strided)
        if node in self.values:
            return
        if size > self._left:
            self.dropped += 1
            return
        self._left -= size
        with torch.no_grad():
            self.values[node] = [tensor.detach().clone() for tensor in tensors]


def execute(subject: Subject, request: Request, *, iterations: int, names: Mapping[str, str]) -> Execution:
    """Run a model for some iterations under a trace. Whatever the model raises is raised.

    ``names`` of parameters, buffers and modules are replaced by those that the other model has for them.
    """
    keeper = _Keeper()
    inputs = clone_inputs(request.inputs)
    trace = HashDebugTrace(model=subject.module, inputs=inputs, watcher=keeper)
    results: dict[str, Any] = {}
    with trace, request.gradients():
        for iteration in range(iterations):
            trace.iteration = iteration
            with _disable_current_modes():
                inputs = clone_inputs(request.inputs)
                trace.register_inputs(inputs)
            for stage, values in subject.iteration(inputs):
                if stage == "parameters" or stage not in request.stages:
                    continue
                with _disable_current_modes(), torch.no_grad():
                    for name, value in values.items():
                        known = f"{stage}.{iteration}/{name if stage == 'outputs' else names.get(name, name)}"
                        trace.add_result(known, value)
                        results[known] = value.detach().clone() if isinstance(value, torch.Tensor) else value
    renamed_trace, leaves = _with_names(trace.finish(), subject.module, names)
    values = {leaves.get(node, node): kept for node, kept in keeper.values.items()}
    own = [*subject.parameters(), *subject.buffers()]
    return Execution(renamed_trace, own, results, values, is_compiled(subject.model), keeper.dropped)


def _with_names(
    trace: Trace, module: torch.nn.Module | None, names: Mapping[str, str]
) -> tuple[Trace, Mapping[str, str]]:
    """The trace with the other model's paths of modules, parameters and buffers, without the name of the model's class;
    and the new ids of leaves. Those of records are as they were."""
    root = type(module).__name__ if module is not None else ""

    def renamed_path(path: str) -> str:
        inside = "" if path == root else path.removeprefix(f"{root}.") if root else path
        inside = without_wrapper(inside)
        return names.get(inside, inside)

    leaves = {}
    for leaf in trace.leaves:
        kind, _, name = leaf.id.partition("/")
        name, mark, count = name.partition("#")
        leaves[leaf.id] = leaf.id if kind == "input" else f"{kind}/{renamed_path(name)}{mark}{count}"
    records = []
    for record in trace.records:
        inputs = tuple(ref._replace(source=leaves.get(ref.source, ref.source)) for ref in record.inputs)
        records.append(replace(record, module=renamed_path(record.module), inputs=inputs))
    return replace(
        trace,
        records=tuple(records),
        leaves=tuple(replace(leaf, id=leaves[leaf.id]) for leaf in trace.leaves),
        results=tuple(replace(item, source=leaves.get(item.source, item.source)) for item in trace.results),
    ), leaves


def names_back(names: Iterable[str], rename: Rename) -> dict[str, str]:
    """From names in the model after to those in the model before: of parameters and buffers, given as the model before
    has them, and of the modules that hold them."""
    back = {new: old for old, new in renamed(names, rename).items()}
    modules = {new.rpartition(".")[0]: old.rpartition(".")[0] for new, old in back.items()}
    return {**{new: old for new, old in modules.items() if new and old}, **back}


def is_compiled(model: Model) -> bool:
    """Whether ``torch.compile`` has wrapped the model, a module in it, or the function; its ops may be hidden."""
    evaluation = sys.modules.get("torch._dynamo.eval_frame")  # not imported: nothing is compiled
    if evaluation is None:
        return False
    if not isinstance(model, torch.nn.Module):
        return hasattr(model, "_torchdynamo_orig_callable")
    return any(
        isinstance(module, evaluation.OptimizedModule) or module._compiled_call_impl is not None
        for module in model.modules()
    )


# --------------------------------------------------------------------------------------------- where they part


def partings_of(before: Execution, after: Execution, rule: Rule) -> Iterator[Parting]:
    """Where two executions part, by tolerance and bit by bit, each if they do. Their results are compared anew, since a
    trace may make torch take another formula."""
    digests = _digests(before.trace), _digests(after.trace)

    @functools.cache
    def numbers(first: str, second: str) -> TensorComparison | None:
        """The comparison of what two records or leaves held, of several tensors the worst; ``None`` if not kept."""
        a, b = before.values.get(first), after.values.get(second)
        compared = [compare_values(first, *pair, rule=rule) for pair in zip_longest(a, b)] if a and b else []
        return max(compared, key=lambda item: item.severity, default=None)

    def agreement(first: str, second: str) -> Agreement:
        if digests[0].get(first) == digests[1].get(second):
            return Agreement.BITWISE
        compared = numbers(first, second)
        if compared is None or not compared.within:
            return Agreement.BEYOND  # what was not kept agrees only where its digests do
        return Agreement.BITWISE if compared.bitwise else Agreement.WITHIN

    compared = compare_mappings("results", before.results, after.results, rule=rule)
    tensors = [item for item in compared.tensors if item.kind not in LONE]  # what one model lacks parts nothing
    for level in ("tolerance", "bitwise"):
        differing = [item.name for item in tensors if not (item.within if level == "tolerance" else item.bitwise)]
        if differing:
            first = parting.find(before.trace, after.trace, level=level, agreement=agreement, differing=differing)
            yield replace(first, numbers=numbers(first.name, first.other))


def _digests(trace: Trace) -> dict[str, tuple[TensorDigest, ...]]:
    """By id: what was left."""
    return {leaf.id: (leaf.digest,) for leaf in trace.leaves} | {record.id: record.outputs for record in trace.records}


def notes_on(before: Execution, after: Execution, *, parted: bool) -> Iterator[str]:
    if not parted:
        yield "under the trace all that both executions have agrees bit by bit: there is no place at which they part"
    for side, execution, other in ((SIDES[0], before, after), (SIDES[1], after, before)):
        if execution.compiled:
            own, others = len(execution.trace.records), len(other.trace.records)
            seen = f"{own} ops of it were seen, {others} of the other; what compiled kernels do inside is hidden"
            tip = "With backend='eager', then 'aot_eager', see which stage of compiling parts them"
            yield f"the model {side} is compiled: {seen}. {tip}"
    if before.dropped or after.dropped:
        yield (
            "not all that ops left was kept for the trace: of what was not, another digest counts as beyond tolerance"
        )
