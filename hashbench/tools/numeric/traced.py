"""Both models of a pair run once more under a trace that keeps what every op left, to find where they part."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from hashbench.records import TensorDigest, Trace
from hashbench.tools.numeric import parting
from hashbench.tools.numeric.findings import LONE, Parting, Rename, Rule, TensorComparison, renamed, without_wrapper
from hashbench.tools.numeric.measuring import compare_mappings, compare_values
from hashbench.tools.numeric.parting import Agreement
from hashbench.tools.numeric.running import Plan, Subject, fresh_inputs, gradients_wanted, is_compiled
from hashbench.trace.api import HashDebugTrace
from hashbench.trace.arguments import tensors_in
from hashbench.trace.callbacks import TraceCallback
from hashbench.trace.op_schema import plan_of

KEPT_MIB = 1024
"""How much of what the ops of one execution left is kept, in MiB."""


class Keeper(TraceCallback):
    """Keeps a copy of everything that ops and leaves held, by the ids of their records, up to ``mib``."""

    def __init__(self, mib: float) -> None:
        self.values: dict[str, list[torch.Tensor]] = {}
        self.dropped = 0
        self._left = mib * 2**20

    def after(self, node: str, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any) -> None:
        """Keep what the call wrote: its outputs, then its written arguments."""
        plan = plan_of(func)
        written = plan.written_tensors(args, kwargs)
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


@dataclass(frozen=True, slots=True)
class Execution:
    """One traced execution: its trace, its results by stage, iteration and name, what its ops and leaves held by their
    ids, and whether ``torch.compile`` may have hidden some."""

    trace: Trace
    results: Mapping[str, Any] = field(repr=False)
    values: Mapping[str, list[torch.Tensor]] = field(repr=False)
    compiled: bool = False
    dropped: int = 0


def execute(
    subject: Subject, plan: Plan, *, iterations: int, names: Mapping[str, str], mib: float = KEPT_MIB
) -> Execution:
    """Run a model for some iterations under a trace. Whatever the model raises is raised.

    ``names`` of parameters, buffers and modules are replaced by those that the other model has for them.
    """
    keeper = Keeper(mib)
    inputs = fresh_inputs(plan)
    module = subject.module
    trace = HashDebugTrace(model=module, inputs=inputs, watcher=keeper)
    found: dict[str, Any] = {}
    with trace, gradients_wanted(plan):
        for iteration in range(iterations):
            trace.iteration = iteration
            with _disable_current_modes():
                inputs = fresh_inputs(plan)
                trace.register_inputs(inputs)
            subject.set_inputs(inputs)
            for stage, values in _stages(subject, plan):
                with _disable_current_modes(), torch.no_grad():
                    for name, value in values.items():
                        shown = f"{stage}.{iteration}/{name if stage == 'outputs' else names.get(name, name)}"
                        trace.add_result(shown, value)
                        found[shown] = value.detach().clone() if isinstance(value, torch.Tensor) else value
    root = type(module).__name__ if module is not None else ""
    return _with_names(trace.finish(), found, keeper, lambda path: _canonical(path, root, names), subject)


def _stages(subject: Subject, plan: Plan) -> Iterator[tuple[str, dict[str, Any]]]:
    outputs = subject.forward()
    if "outputs" in plan.stages:
        yield "outputs", outputs
    if "buffers" in plan.stages:
        yield "buffers", subject.buffers()
    if not plan.differentiates or not subject.has_gradient:
        return
    gradients = subject.backward()
    if "gradients" in plan.stages:
        yield "gradients", gradients
    if plan.steps:
        yield "stepped", subject.step()


def _canonical(path: str, root: str, names: Mapping[str, str]) -> str:
    """A path without the name of the model's class and what ``torch.compile`` adds, as the other model has it."""
    inside = "" if path == root else path.removeprefix(f"{root}.") if root else path
    inside = without_wrapper(inside)
    return names.get(inside, inside)


def _with_names(
    trace: Trace, found: Mapping[str, Any], keeper: Keeper, change: Callable[[str], str], subject: Subject
) -> Execution:
    """The execution with other paths of modules, parameters and buffers; the ids of records are as they were."""
    leaves = {}
    for leaf in trace.leaves:
        kind, _, name = leaf.id.partition("/")
        name, mark, count = name.partition("#")
        leaves[leaf.id] = leaf.id if kind == "input" else f"{kind}/{change(name)}{mark}{count}"
    records = tuple(
        replace(
            record,
            module=change(record.module),
            inputs=tuple([ref._replace(source=leaves.get(ref.source, ref.source)) for ref in record.inputs]),
        )
        for record in trace.records
    )
    results = tuple([replace(result, source=leaves.get(result.source, result.source)) for result in trace.results])
    named = replace(
        trace,
        records=records,
        leaves=tuple([replace(leaf, id=leaves[leaf.id]) for leaf in trace.leaves]),
        results=results,
    )
    values = {leaves.get(node, node): kept for node, kept in keeper.values.items()}
    return Execution(named, found, values, is_compiled(subject.model), keeper.dropped)


def names_back(names: Iterable[str], rename: Rename) -> dict[str, str]:
    """From names in the model after to those in the model before: of parameters and buffers, given as the model before
    has them, and of the modules that hold them."""
    back = {new: old for old, new in renamed(names, rename).items()}
    modules = {new.rpartition(".")[0]: old.rpartition(".")[0] for new, old in back.items()}
    return {**{new: old for new, old in modules.items() if new and old}, **back}


class _Judge:
    """How well what two executions left agrees; what was not kept agrees only where its digests do."""

    def __init__(self, before: Execution, after: Execution, rule: Rule) -> None:
        self.before, self.after, self.rule = before, after, rule
        self.digests = [_digests(before.trace), _digests(after.trace)]
        self.known: dict[tuple[str, str], TensorComparison | None] = {}

    def agreement(self, first: str, second: str) -> Agreement:
        """How well a record or leaf of one agrees with one of the other; ids as in their traces."""
        if self.digests[0].get(first) == self.digests[1].get(second):
            return Agreement.BITWISE
        found = self.numbers(first, second)
        if found is None or not found.within:
            return Agreement.BEYOND
        return Agreement.BITWISE if found.bitwise else Agreement.WITHIN

    def numbers(self, first: str, second: str) -> TensorComparison | None:
        """The comparison of what two records or leaves held, of several tensors the worst; ``None`` if not kept."""
        if (first, second) not in self.known:
            self.known[first, second] = self._compare(first, second)
        return self.known[first, second]

    def _compare(self, first: str, second: str) -> TensorComparison | None:
        a, b = self.before.values.get(first), self.after.values.get(second)
        if not a or not b:
            return None
        found = [compare_values(first, one, other, rule=self.rule) for one, other in zip_longest(a, b)]
        return max(found, key=lambda item: item.severity)


def _digests(trace: Trace) -> dict[str, tuple[TensorDigest, ...]]:
    """By id: what was left."""
    return {leaf.id: (leaf.digest,) for leaf in trace.leaves} | {record.id: record.outputs for record in trace.records}


def find_partings(before: Execution, after: Execution, *, rule: Rule) -> tuple[tuple[Parting, ...], tuple[str, ...]]:
    """Where two executions part, by tolerance and bit by bit, each if they do; and what a reader must know of that.

    The results of the executions are compared anew, since a trace may make torch take another formula.
    """
    judge = _Judge(before, after, rule)
    compared = compare_mappings("results", before.results, after.results, rule=rule)
    partings = []
    for level in ("tolerance", "bitwise"):
        differing = [item for item in compared.tensors if not (item.within if level == "tolerance" else item.bitwise)]
        names = [item.name for item in differing if item.kind not in LONE]  # what one model lacks parts nothing
        if names:
            found = parting.find(before.trace, after.trace, level=level, agreement=judge.agreement, differing=names)
            partings.append(replace(found, numbers=judge.numbers(found.name, found.other)))
    return tuple(partings), tuple(_notes(before, after, parted=bool(partings)))


def _notes(before: Execution, after: Execution, *, parted: bool) -> Iterator[str]:
    if not parted:
        yield "under the trace all that both executions have agrees bit by bit: there is no place at which they part"
    seen = {"before": (before, len(after.trace.records)), "after": (after, len(before.trace.records))}
    for side, (execution, other) in seen.items():
        own = len(execution.trace.records)
        if execution.compiled:
            yield (
                f"the model {side} is compiled: {own} ops of it were seen, {other} of the other; what compiled kernels "
                "do inside is hidden. With backend='eager', then 'aot_eager', see which stage of compiling parts them"
            )
    if any(execution.dropped for execution in (before, after)):
        yield (
            "not all that ops left was kept for the trace: of what was not, another digest counts as beyond tolerance"
        )
