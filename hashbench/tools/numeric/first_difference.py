"""Find the first difference of two models: both run once more under a trace that keeps what every op left.

``divergence.find`` judges two runs of one model, which should agree in every bit. Here the executions may have
different ops, fewer ops (fused, folded, compiled), and values that are only close. From the results that differ, both
graphs are walked back through whatever differs. The walk ends at the earliest place of both executions that differs,
and goes on from there, through ops that only one of them has, to where everything that is read agrees. What agrees
again on every way to a result is not blamed.

Compiled code is not judged here: the answer is the ops around it that both executions ran.
`hashbench sweep --backend` judges its kernels.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from hashbench.core.divergence.align import PairedRuns, pair
from hashbench.core.divergence.slice import backward_slice
from hashbench.core.records import OpRecord, Trace
from hashbench.core.run.workload import clone_inputs
from hashbench.core.trace.api import HashDebugTrace
from hashbench.core.trace.arguments import tensors_in
from hashbench.core.trace.callbacks import TraceCallback
from hashbench.core.trace.digest import unobserved, untraced
from hashbench.core.trace.op_schema import plan_of
from hashbench.tools.numeric.compare import compare_mappings, compare_values, renamed, without_wrapper
from hashbench.tools.numeric.counterparts import (
    Counterparts,
    Item,
    alone_in_words,
    correspondence,
    is_compiled,
    is_filled,
    is_silent,
    left_elsewhere,
    named,
    same_size,
)
from hashbench.tools.numeric.report import LONE, SIDES, CommonRecord, FirstDifference, Rename, Rule, TensorComparison

if TYPE_CHECKING:
    from hashbench.tools.numeric.running import ModelRun, NumericRequest

KEPT_MIB = 1024
"""How much of what the ops of one execution left is kept, in MiB."""

# ------------------------------------------------------------------------------------------------ one execution


@dataclass(frozen=True, slots=True)
class Execution:
    """One traced execution: its trace, its results by stage, iteration and name, what its ops and leaves held by their
    ids, and of how many ops nothing was kept."""

    trace: Trace
    results: Mapping[str, Any] = field(repr=False)
    values: Mapping[str, list[torch.Tensor]] = field(repr=False)
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

    def opaque(self, node: str, output: Any) -> None:
        """Keep what compiled code returned."""
        self._keep(node, tensors_in(output))

    def leaf(self, node: str, tensor: torch.Tensor) -> None:
        """Keep a tensor that no op wrote."""
        self._keep(node, [tensor])

    def _keep(self, node: str, tensors: Sequence[torch.Tensor]) -> None:
        if node in self.values:
            return
        size = sum(tensor.nbytes for tensor in tensors if tensor.layout is torch.strided)
        if size > self._left:
            self.dropped += 1
            return
        self._left -= size
        with torch.no_grad():
            self.values[node] = [tensor.detach().clone() for tensor in tensors]


def execute(subject: ModelRun, request: NumericRequest, *, iterations: int, names: Mapping[str, str]) -> Execution:
    """Run a model for some iterations under a trace. Whatever the model raises is raised.

    ``names`` of parameters, buffers and modules are replaced by those that the other model has for them.
    """
    keeper = _Keeper()
    inputs = clone_inputs(request.inputs)
    trace = HashDebugTrace(model=subject.module, inputs=inputs, watcher=keeper, tracer=request.tracer)
    results: dict[str, Any] = {}
    with trace, request.gradients():
        for iteration in range(iterations):
            trace.iteration = iteration
            with unobserved():
                inputs = clone_inputs(request.inputs)
                trace.register_inputs(inputs)
            for stage, values in subject.iteration(inputs):
                if stage == "parameters" or stage not in request.stages:
                    continue
                with untraced():
                    for name, value in values.items():
                        known = f"{stage}.{iteration}/{name if stage == 'outputs' else names.get(name, name)}"
                        trace.add_result(known, value)
                        results[known] = value.detach().clone() if isinstance(value, torch.Tensor) else value
    renamed_trace, leaves = _with_names(trace.finish(), subject.module, names)
    values = {leaves.get(node, node): kept for node, kept in keeper.values.items()}
    return Execution(renamed_trace, results, values, keeper.dropped)


def _with_names(
    trace: Trace, module: torch.nn.Module | None, names: Mapping[str, str]
) -> tuple[Trace, Mapping[str, str]]:
    """Return the trace with the other model's paths of modules, parameters and buffers, without the name of the model's
    class; and the new ids of leaves. Those of records are as they were."""
    root = type(module).__name__ if module is not None else ""

    def renamed_path(path: str) -> str:
        first, _, rest = path.partition(".")
        path = rest if first == root else path
        inside = without_wrapper(path)
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
    """Map names in the model after to those in the model before: of parameters and buffers, given as the model before
    has them, and of the modules that hold them."""
    back = {new: old for old, new in renamed(names, rename).items()}
    modules = {new.rpartition(".")[0]: old.rpartition(".")[0] for new, old in back.items()}
    return {**{new: old for new, old in modules.items() if new and old}, **back}


def same_modules(before: Any, after: Any, rename: Rename = None) -> bool:
    """Return whether the modules of two models correspond by name: those that hold parameters in one are in the other.

    A transformation may take modules away, or put others into their places. Functions have none.
    """
    ours, theirs = (
        dict(model.named_parameters()) if isinstance(model, torch.nn.Module) else {} for model in (before, after)
    )
    back = names_back(map(without_wrapper, ours), rename)
    holders, other_holders = _holders(ours, {}), _holders(theirs, back)
    return holders <= _paths(after, back) or (bool(other_holders) and other_holders <= _paths(before, {}))


def _holders(parameters: Iterable[str], names: Mapping[str, str]) -> set[str]:
    """Return the paths of the modules that hold these parameters, under other ``names``."""
    paths = (without_wrapper(name) for name in parameters)
    return {names.get(path, path).rpartition(".")[0] for path in paths}


def _paths(model: Any, names: Mapping[str, str]) -> set[str]:
    """Return the paths of all modules of a model, under other ``names``."""
    paths = (without_wrapper(path) for path, _ in model.named_modules()) if isinstance(model, torch.nn.Module) else ()
    return {names.get(path, path) for path in paths}


# -------------------------------------------------------------------------------------- where they first differ


def first_differences(before: Execution, after: Execution, rule: Rule) -> Iterator[FirstDifference]:
    """Find where two executions first differ, by tolerance and bit by bit, each if they do.

    Their results are compared anew, since a trace may make torch take another formula.
    """
    digests = [
        {leaf.id: (leaf.digest,) for leaf in trace.leaves} | {record.id: record.outputs for record in trace.records}
        for trace in (before.trace, after.trace)
    ]

    @functools.cache
    def numbers(first: str, second: str) -> TensorComparison | None:
        """Return the comparison of what two records or leaves held, of several tensors the worst; ``None`` if not
        kept."""
        a, b = before.values.get(first), after.values.get(second)
        pairs = itertools.starmap(_in_one_shape, itertools.zip_longest(a, b)) if a and b else ()
        compared = [compare_values(first, *pair, rule=rule) for pair in pairs]
        return max(compared, key=lambda item: item.severity, default=None)

    def differ(level: str, first: str, second: str) -> bool:
        if digests[0].get(first) == digests[1].get(second):
            return False
        compared = numbers(first, second)
        return compared is None or _differs(compared, level)  # what was not kept agrees only where its digests do

    compared = compare_mappings("results", before.results, after.results, rule=rule)
    tensors = [item for item in compared.tensors if item.kind not in LONE]  # not what one model lacks
    for level in ("tolerance", "bitwise"):
        differing = [item.name for item in tensors if _differs(item, level)]
        if differing:
            differ_here = functools.partial(differ, level)
            first = find(before.trace, after.trace, level=level, differ=differ_here, differing=differing)
            yield replace(first, numbers=numbers(first.name, first.other))


def _in_one_shape(a: torch.Tensor | None, b: torch.Tensor | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return two tensors of equally many elements in one shape: implementations may lay out the same values as
    ``[1, 11, 1]`` and ``[11]``. Transposed values still differ."""
    plain = a is not None and b is not None and a.layout is b.layout is torch.strided
    if not plain or a is None or b is None or a.shape == b.shape or a.numel() != b.numel():
        return a, b
    with untraced():
        return a.reshape(-1), b.reshape(-1)


def _differs(compared: TensorComparison, level: str) -> bool:
    return not (compared.within if level == "tolerance" else compared.bitwise)


def notes_on(before: Execution, after: Execution, *, differs: bool) -> Iterator[str]:
    """Yield what a reader must know of two executions, and of a search that found whether anything ``differs``."""
    if not differs:
        yield "under the trace all that both executions have agrees bit by bit: there is no first difference"
    for side, execution, other in ((SIDES[0], before, after), (SIDES[1], after, before)):
        if any(map(is_compiled, execution.trace.records)):
            own, others = (sum(not item.opaque for item in ran.trace.records) for ran in (execution, other))
            seen = f"{own} ops of it were seen, {others} of the other; what compiled code does inside is hidden"
            yield f"the model {side} is compiled: {seen}. `hashbench sweep --backend inductor` judges each kernel"
    if before.dropped or after.dropped:
        yield (
            "not all that ops left was kept for the trace: of what was not, another digest counts as beyond tolerance"
        )


# -------------------------------------------------------------------------------------------------- the search


def find(
    first: Trace, second: Trace, *, level: str, differ: Callable[[str, str], bool], differing: Sequence[str]
) -> FirstDifference:
    """Find where two executions first differ.

    Args:
        first, second: their traces, with names of modules, leaves and results that correspond.
        level: ``tolerance`` or ``bitwise``.
        differ: whether what two records or leaves left, given by the ids in both traces, differs at this level.
        differing: names of the results that differ at this level; at least one.
    """
    aligned, replacing = correspondence(first.records, second.records)
    runs, replaced = pair(first, second, aligned), {first.records[a].id for a, _ in replacing if a is not None}
    items: Mapping[str, tuple[Item | None, Item | None]] = {**runs.leaves, **runs.records}
    elsewhere = left_elsewhere(runs)
    differs = {
        node for node, (a, b) in items.items() if node not in elsewhere and _differs_at(a, b, differ)
    }.__contains__
    roots = [result.source for result in first.results if result.name in differing and result.source]
    roots += [runs.node_of[result.source] for result in second.results if result.name in differing and result.source]

    def read_by(node: str) -> Iterator[str]:
        return (source for source, ref in runs.reads(node) if not is_filled(ref, items[source]))

    def place(node: str) -> tuple[int, bool, int]:  # a leaf is before the record that reads it first
        return runs.position[node], node in runs.records, runs.order[node]

    counterparts = Counterparts.of(runs, elsewhere, replaced)
    both = {node for node in runs.records if _is_seen_in_both(runs, node)}
    blamed = backward_slice(roots, read_by, differs)
    sure = sorted(filter(counterparts.is_sure, blamed.reached), key=place)
    known = sure[0] if sure else None
    if known is not None and known in runs.records and known not in both:  # compiled code: name what comes after it
        known = next((node for node in sure if node in both), None)
    way = blamed if known is None else backward_slice([known], read_by, differs)
    unseen = FirstDifference(
        *(level, "unseen", "", "", "", 0),
        detail=f"no recorded op explains that {differing[0]} differs",
        healed=sum(differs(node) and node not in blamed.reached for node in both),
        aligned=len(both),
        only_before=sum(b is None for _, b in runs.records.values()),
        only_after=sum(a is None for a, _ in runs.records.values()),
    )
    if not way.frontier:
        return unseen
    node = min(way.frontier, key=place)
    found = replace(unseen, until=named(items[known]) if known is not None and known != node else "")
    if node in runs.leaves and counterparts.is_sure(node):
        return _at_leaf(found, runs, node)
    op = _to_blame(counterparts, node, known, way.reached, differ)
    if op is None:
        agreeing = {source for reader in way.reached for source in read_by(reader)} - set(way.reached)
        return _between(unseen, counterparts, known, way.reached, sorted(agreeing, key=place), differing[0])
    lone = [source for source, ref in runs.reads(op) if None in items[source] and not is_filled(ref, items[source])]
    if op != node:
        found, lone = unseen, []  # what it reads was compared in place of each other
    return _at_record(found, runs, op, is_replaced=op in replaced, lone=named(items[lone[0]]) if lone else "")


def _to_blame(
    counterparts: Counterparts,
    node: str,
    known: str | None,
    reached: Iterable[str],
    differ: Callable[[str, str], bool],
) -> str | None:
    """Return the op that may be blamed: all that it reads was compared and agrees, and so was what it leaves.

    An op that one execution alone runs is blamed where at most another of the other execution, given the same, stands
    beside it between what agrees and what differs. What it leaves must differ from what is read in its place; where it
    does not, the op that reads it is blamed. Where code is compiled, no such op is blamed: its counterpart may be
    hidden.
    """
    runs = counterparts.runs
    if node == known:
        return None if counterparts.unlike(node) else node
    lone = [item for item in reached if item != known]
    if node not in runs.records or not all(item in runs.records and None in runs.records[item] for item in lone):
        return None
    if known is None:
        return node if lone == [node] and not counterparts.hidden else None
    ends = counterparts.inserted(known) if known in runs.records else None
    if ends is None:
        return None
    first, second = counterparts.items(ends[0])[0], counterparts.items(ends[1])[1]
    if first is None or second is None or not same_size(first, second):
        return None
    if not differ(first.id, second.id):
        return known
    inside = set(lone) <= set(ends) and not counterparts.hidden
    return node if inside and counterparts.are_given_the_same(lone) else None


def _between(
    found: FirstDifference,
    counterparts: Counterparts,
    known: str | None,
    reached: Iterable[str],
    agreeing: Sequence[str],
    result: str,
) -> FirstDifference:
    """Return a difference of which no op is known: what agrees before it, what differs after it, and what of either
    execution has no counterpart between these."""
    runs = counterparts.runs
    start = [node for node in agreeing if counterparts.is_sure(node)]
    unmatched = alone_in_words(runs, [node for node in reached if node != known])
    anchors = [node for node in start if node in runs.records and _is_seen_in_both(runs, node)][-1:]
    end = [known] if known is not None and known in runs.records else []
    record = _records_of(runs, end or [max(reached, key=runs.order.__getitem__)])
    first_after = _place(runs, end)
    words = [f"{named(counterparts.items(item))}, which agrees," for item in anchors or start[-1:]]
    begin = words[0] if words else "the start of the trace"
    goal = f"{first_after}, the first that differs of the ops taken for the same" if first_after else result
    unlike = counterparts.unlike(known) if end and known is not None and not any(unmatched) else ""
    return replace(
        found,
        kind="between",
        phase=record[0].phase if record else "",
        iteration=record[0].iteration if record else 0,
        detail=f"not known at which op: between {begin} and {goal}{f', but {unlike}' if unlike else ''}",
        name=first_after.name if first_after else "",
        other=first_after.other if first_after else "",
        last_before=_place(runs, anchors),
        first_after=first_after,
        unmatched_before=unmatched[0],
        unmatched_after=unmatched[1],
    )


def _differs_at(a: Item | None, b: Item | None, differ: Callable[[str, str], bool]) -> bool:
    """Return True if what is left at a node differs. An op that only one execution runs does, unless it leaves nothing;
    a tensor that only one reads does not, for the op that reads it says more."""
    if a is None or b is None:
        lone = a or b
        return isinstance(lone, OpRecord) and not is_silent(lone)
    if isinstance(a, OpRecord) and isinstance(b, OpRecord):
        if a.scalar != b.scalar:
            return True
        if is_silent(a) and is_silent(b):
            return False
    return differ(a.id, b.id)


def _is_seen_in_both(runs: PairedRuns, node: str) -> bool:
    """Return whether both executions ran this op themselves."""
    a, b = runs.records[node]
    return a is not None and b is not None and is_compiled(a) == is_compiled(b) and not a.opaque


def _records_of(runs: PairedRuns, nodes: Iterable[str]) -> list[OpRecord]:
    return [record for node in nodes for record in runs.records[node] if record is not None]


def _place(runs: PairedRuns, nodes: Sequence[str]) -> CommonRecord | None:
    if not nodes:
        return None
    a, b = _records_of(runs, nodes)
    return CommonRecord(a.op, a.module, a.phase, a.iteration, a.id, b.id)


# -------------------------------------------------------------------------------------------------------- words


def _at_record(found: FirstDifference, runs: PairedRuns, node: str, *, is_replaced: bool, lone: str) -> FirstDifference:
    a, b = runs.records[node]
    record = _records_of(runs, [node])[0]
    kind = "only before" if b is None else "only after" if a is None else "replaced" if is_replaced else "op"
    return replace(
        found,
        **_where(record),
        kind=kind,
        detail=_detail(kind, a, b, lone),
        before="" if a is None else f"{a.op}({a.arguments})",
        after="" if b is None else f"{b.op}({b.arguments})",
        name="" if a is None else a.id,
        other="" if b is None else b.id,
        index=None if a is None else runs.position[node],
    )


def _detail(kind: str, a: OpRecord | None, b: OpRecord | None, lone: str) -> str:
    """Say how an op differs. ``lone``: what it reads and one execution alone has, which was compared with nothing."""
    unknown = f"not all that it reads was compared: one execution alone has {lone}" if lone else ""
    if a is None or b is None:
        agrees = unknown or "everything that it reads agrees"
        return f"only the execution {kind.removeprefix('only ')} runs this op, and {agrees}"
    if kind == "replaced":
        return f"{b.op} in place of {a.op}, and {unknown or 'what they read agrees'}"
    if unknown:
        return unknown
    if a.arguments != b.arguments:
        return "its other arguments differ"
    if [ref.argument for ref in a.inputs] != [ref.argument for ref in b.inputs]:
        return "it is given other tensors"
    return "what it leaves differs although everything that it reads agrees"


def _at_leaf(found: FirstDifference, runs: PairedRuns, node: str) -> FirstDifference:
    a, b = runs.leaves[node]
    leaf, trace = (a, runs.first) if a is not None else (b, runs.second)
    assert leaf is not None
    name = leaf.id.partition("/")[2]
    what = f"the {leaf.kind} {name}" if leaf.kind != "other" else f"a tensor that no recorded op wrote ({leaf.id})"
    found = replace(
        found,
        kind=leaf.kind,
        detail=f"{what} holds different values",
        name=leaf.id,
        other=leaf.id,
        index=leaf.position if a is not None else None,
    )
    if leaf.position >= len(trace.records):
        return found
    return replace(found, **_where(trace.records[leaf.position]))


def _where(record: OpRecord) -> dict[str, Any]:
    return {name: getattr(record, name) for name in ("op", "module", "phase", "iteration")}
