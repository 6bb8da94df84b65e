"""Which parameters several ranks must hold alike, and after which steps. Pure: no torch, no files.

What the program says of a parameter (:attr:`~hashbench.core.records.Result.replicas`) decides. Where it says nothing, a
parameter is a replica if what its optimizer reads to write it is a reduced gradient, or state that came from one. A
plain parameter beside DTensors is one by convention, unless it differs from the start, as the experts of each rank do.

A parameter is not compared after a step where a rank replaces it before anything reads it, as where each rank updates
its share of the parameters and broadcasts it then.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from hashbench.core.divergence.align import OVERWRITING_ALL, name_of
from hashbench.core.divergence.collective_calls import equalizes, exchanges
from hashbench.core.records import BESIDE_DTENSORS, OpRecord, Ref, Result, TensorDigest, Trace
from hashbench.extensions.ranks.whole_steps import results_by_step

Replica = tuple[tuple[int, ...], str]
"""The ranks that must hold a parameter alike, and its name."""

_CARRYING = frozenset({"_to_copy", "clone", "copy_", "div", "div_", "mul", "mul_"} | {"view", "wait_tensor"})
"""Ops through which a reduced gradient is still one: copies, and divisions by the number of ranks."""

_OPTIMIZER = "optimizer"

STATED, REDUCED, CONVENTION = "stated", "reduced", "convention"
"""Why a parameter is a replica: its placement, its gradient, or that it lies beside DTensors."""


def replicas_of(run: Mapping[int, Trace]) -> Mapping[Replica, str]:
    """Return the replicas, by ranks that have a trace and name: why they are, :data:`STATED` and so on.

    Only a stated replica is certain. An expert of each rank whose gradient is reduced for its norm alone looks
    ``REDUCED``; a plain parameter of one rank beside DTensors looks like ``CONVENTION`` until its start differs.
    """
    found: dict[Replica, str] = {}
    apart = differing_from_the_start(run)
    inferred: dict[tuple[tuple[int, ...], str], set[tuple[int, ...]]] = defaultdict(set)
    for trace in run.values():
        known: dict[str, Result] = {}
        for result in (result for results in results_by_step(trace).values() for result in results):
            if result.replicas or result.name not in known:  # at the end groups may be gone
                known[result.name] = result
        reduced: ReducedGradients | None = None
        for name, result in known.items():
            ranks, by_convention = result.replicas, result.placement == BESIDE_DTENSORS
            if (not ranks or by_convention) and result.placement in ("", BESIDE_DTENSORS) and result.source:
                reduced = ReducedGradients.of(trace) if reduced is None else reduced
                held = reduced.written(result)
                inferred[_present(held.over, run), name].add(held.offsets)
            if not by_convention:
                found[_present(ranks, run), name] = STATED
            elif name not in apart:
                found.setdefault((_present(ranks, run), name), CONVENTION)
    for replica, offsets in inferred.items():
        if len(offsets) == 1:  # else each rank has a part of its own
            found[replica] = REDUCED if found.get(replica, CONVENTION) == CONVENTION else STATED
    return {replica: how for replica, how in found.items() if len(replica[0]) > 1}


def _present(ranks: Iterable[int], run: Mapping[int, Trace]) -> tuple[int, ...]:
    return tuple(rank for rank in ranks if rank in run)


class Reduced(NamedTuple):
    """What an output holds of a reduced gradient.

    Attributes:
        over: the ranks that the gradient was reduced over; nothing is known to be reduced: empty.
        offsets: where it lies in what was reduced, such as a flat buffer: by each read of a part.
    """

    over: tuple[int, ...] = ()
    offsets: tuple[int, ...] = ()


@dataclass(frozen=True)
class ReducedGradients:
    """What holds a reduced gradient, or came from one within an optimizer.

    Attributes:
        held: by record, what each of its outputs holds.
        outputs: by the same records, the outputs.
        steps: those of them by which an optimizer wrote.
    """

    held: dict[str, tuple[Reduced, ...]] = field(default_factory=dict)
    outputs: dict[str, tuple[TensorDigest, ...]] = field(default_factory=dict)
    steps: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, trace: Trace) -> ReducedGradients:
        """Follow the gradients through a trace."""
        made = cls()
        for record in trace.records:
            collective = record.collective
            if collective is not None and exchanges(record):
                if collective.kind == "combine" and equalizes(collective):
                    made._add(record, (Reduced(collective.process_group),) * len(record.outputs))
            elif any(ref.source in made.held for ref in record.inputs):
                held = tuple(made._carried(record, *output) for output in _read_for_outputs(record))
                if any(reduced.over for reduced in held):
                    made._add(record, held)
        return made

    def written(self, result: Result) -> Reduced:
        """Return the reduced gradient by which an optimizer wrote a result last."""
        if result.source not in self.steps:
            return Reduced()
        pairs = list(zip(self.outputs[result.source], self.held[result.source], strict=True))
        found = {held for digest, held in pairs if digest == result.digest} or {held for _, held in pairs}
        return found.pop() if len(found) == 1 else Reduced()

    def _add(self, record: OpRecord, held: tuple[Reduced, ...]) -> None:
        self.held[record.id], self.outputs[record.id] = held, record.outputs
        if record.phase == _OPTIMIZER and any(ref.written for ref in record.inputs):
            self.steps.add(record.id)

    def _carried(self, record: OpRecord, output: TensorDigest, refs: tuple[Ref, ...]) -> Reduced:
        """Return what an output of a record still holds of a reduced gradient. A number that scales a larger tensor,
        such as a norm, is no gradient of it."""
        carries = name_of(record).removeprefix("_foreach_") in _CARRYING
        for ref in refs:
            if ref.source in self.held and (carries or (record.phase == _OPTIMIZER and not ref.written)):
                pairs = {*self._read(record, ref)}
                held = {reduced for reduced, _ in pairs}
                size = max(size for _, size in pairs)
                if len(held) == 1 and _size(output) <= size:
                    item = held.pop()
                    return item._replace(offsets=(*item.offsets, ref.offset)) if _size(output) < size else item
        return Reduced()

    def _read(self, record: OpRecord, ref: Ref) -> Iterator[tuple[Reduced, int]]:
        """Yield what a record may have read here of what another one wrote, each with its size: of a list that is all
        that the other one wrote, what lies at the same place."""
        argument, _, place = ref.argument.rpartition(".")
        outputs = self.outputs[ref.source]
        if argument and len(outputs) > 1:
            beside = [ref.source for ref in record.inputs if ref.argument.rpartition(".")[0] == argument]
            if beside == [ref.source] * len(outputs):
                yield self.held[ref.source][int(place)], _size(outputs[int(place)])
                return
        yield from zip(self.held[ref.source], map(_size, outputs), strict=True)


def _read_for_outputs(record: OpRecord) -> Iterator[tuple[TensorDigest, tuple[Ref, ...]]]:
    """Yield each output of a record with the tensors that were read for it: of an op on lists, those at its place. What
    an op wrote by calls of its own is not among its outputs: then all were read for each."""
    written = [ref.argument for ref in record.inputs if ref.written]
    returned = len(record.outputs) - len(written)
    if len(record.outputs) == 1 or returned < 0:
        yield from ((output, record.inputs) for output in record.outputs)
        return
    places = [*map(str, range(returned)), *(argument.partition(".")[2] for argument in written)]
    for output, place in zip(record.outputs, places, strict=True):
        yield output, tuple(ref for ref in record.inputs if ref.argument.partition(".")[2] == place)


def _size(digest: TensorDigest) -> int:
    return math.prod(digest.shape)


def differing_from_the_start(run: Mapping[int, Trace]) -> frozenset[str]:
    """Return the plain parameters beside DTensors that differ between ranks before the first step that writes them."""
    before: dict[str, set[TensorDigest | None]] = defaultdict(set)
    for trace in run.values():
        beside = {
            result.name
            for results in results_by_step(trace).values()
            for result in results
            if result.placement == BESIDE_DTENSORS
        }
        for name, (content, _) in _first_updates(trace).items() if beside else ():
            if name in beside:
                before[name].add(content)
    return frozenset(name for name, contents in before.items() if len(contents) > 1)


def unexplained_drift(run: Mapping[int, Trace], replicas: Iterable[Replica]) -> tuple[str, ...]:
    """Return the parameters of which nothing says that they are replicas, or parts of a tensor, and which were equal on
    all ranks that have them before their first step, and not behind a step.

    They may diverge by design: experts that start from one seed and train on tokens of their own look the same.
    """
    known = {name for _, name in replicas}
    before: dict[str, list[TensorDigest | None]] = defaultdict(list)
    after: dict[str, dict[int | None, set[TensorDigest]]] = defaultdict(lambda: defaultdict(set))
    for trace in run.values():
        for name, (content, _) in _first_updates(trace).items():
            before[name].append(content)
        for step, results in results_by_step(trace).items():
            for result in results:
                after[result.name][step].add(result.digest)
    return tuple(
        name
        for name, contents in before.items()
        if name not in known and len({*contents}) == 1 and None not in contents
        if len(contents) > 1 and any(len(several) > 1 for several in after[name].values())
    )


def _first_updates(trace: Trace) -> dict[str, tuple[TensorDigest | None, TensorDigest]]:
    """Return the parameters that an optimizer wrote, of which no placement is known, with their content before the
    first step that wrote them, if it is known, and after it."""
    records = {record.id: record for record in trace.records}
    leaves = {leaf.id: leaf.digest for leaf in trace.leaves}
    found: dict[str, tuple[TensorDigest | None, TensorDigest]] = {}
    for result in (result for results in results_by_step(trace).values() for result in results):
        record = records.get(result.source)
        placed = result.placement not in ("", BESIDE_DTENSORS)
        if result.name in found or placed or record is None or record.phase != _OPTIMIZER:
            continue
        node, alike = result.source, result.digest
        while node in records and records[node].phase == _OPTIMIZER:
            node = next((ref.source for ref in _targets(records[node], alike)), "")
        left = [leaves[node]] if node in leaves else list(records[node].outputs) if node in records else []
        found[result.name] = (left[0] if len(left) == 1 else None, result.digest)
    return found


def _targets(record: OpRecord, digest: TensorDigest) -> Iterator[Ref]:
    """Yield the tensors of a shape that a record wrote into, if there is but one."""
    written = [ref for ref in record.inputs if ref.written]
    outputs = record.outputs[-len(written) :] if len(record.outputs) >= len(written) > 0 else ()
    alike = [ref for ref, output in zip(written, outputs, strict=False) if output.shape == digest.shape]
    yield from alike if len(alike) == 1 else ()


def version_before(record: OpRecord, digest: TensorDigest) -> str:
    """Return the node that had written the memory into which a record wrote a tensor of this content, or shape."""
    written = [ref for ref in record.inputs if ref.written]
    left = record.outputs[-len(written) :] if written else ()
    exact = [ref for ref, content in zip(written, left, strict=False) if content == digest]
    alike = [ref for ref, content in zip(written, left, strict=False) if content.shape == digest.shape]
    return next((ref.source for ref in [*exact, *alike]), "")


class ParameterVersions:
    """What the memory of the parameters of one rank held between two steps."""

    def __init__(self, trace: Trace) -> None:
        self._results = {
            step: {result.name: result for result in results} for step, results in results_by_step(trace).items()
        }
        self._records = {record.id: record for record in trace.records}
        self._places = {record.id: at for at, record in enumerate(trace.records)}
        self._ends = {step.number: step.position for step in trace.steps}

    def before(self, name: str, step: int | None, *, since: int | None) -> frozenset[object]:
        """Return all contents that a parameter had in between, each comparable with those of other ranks, behind the
        end of a step and before the last write of another one."""
        result = self._results.get(step, {}).get(name)
        begin, found = 0 if since is None else self._ends.get(since, 0), set[object]()
        if result is None:
            return frozenset()
        seen: set[str] = set()
        waiting = [result.source]
        while waiting:
            node = waiting.pop()
            if node in seen or self._places.get(node, -1) < begin:
                continue
            seen.add(node)
            if node != result.source or step is None:
                found.add(self._content(node, result.digest))
            record = self._records[node]
            exact = version_before(record, result.digest)
            waiting += [exact] if exact else [ref.source for ref in record.inputs if ref.written]
        return frozenset(found)

    def _content(self, node: str, digest: TensorDigest) -> object:
        outputs = self._records[node].outputs
        return tuple(output for output in outputs if output.shape == digest.shape) or outputs


class ReplacedParameters:
    """Which parameters of one rank are replaced after a step before anything reads them."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._results = {
            step: {result.name: result for result in results} for step, results in results_by_step(trace).items()
        }

    def replaced(self, name: str, step: int | None) -> bool:
        """Return True if what a step left of a parameter is replaced before anything reads it."""
        result, position = self._results.get(step, {}).get(name), self._positions.get(step)
        if result is None or position is None:
            return False
        for at, record, ref in self._uses.get(result.source, ()):
            if at < position or not self._is_this(ref, result):
                continue
            return ref.written and (exchanges(record) or name_of(record) in OVERWRITING_ALL)
        return False

    def _is_this(self, ref: Ref, result: Result) -> bool:
        """Return True if an op takes this parameter, and not another one that the same record wrote."""
        return len(self._outputs.get(result.source, ())) < 2 or ref.digest == result.digest.value

    @functools.cached_property
    def _positions(self) -> Mapping[int | None, int]:
        return {step.number: step.position for step in self._trace.steps}

    @functools.cached_property
    def _outputs(self) -> Mapping[str, tuple[TensorDigest, ...]]:
        return {record.id: record.outputs for record in self._trace.records}

    @functools.cached_property
    def _uses(self) -> Mapping[str, list[tuple[int, OpRecord, Ref]]]:
        uses: dict[str, list[tuple[int, OpRecord, Ref]]] = defaultdict(list)
        for at, record in enumerate(self._trace.records):
            for ref in record.inputs:
                if record.outputs or record.scalar or exchanges(record):
                    uses[ref.source].append((at, record, ref))
        return uses
