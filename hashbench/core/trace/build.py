"""Build a :class:`~hashbench.core.records.Trace` from the raw records of a run: ids, references by id, texts."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, make_dataclass, replace
from operator import attrgetter
from types import MappingProxyType
from typing import Any, NamedTuple

from hashbench.core.processes import uncollected
from hashbench.core.records import (
    EarlyRead,
    Leaf,
    OpRecord,
    Ref,
    Result,
    SettingsMark,
    TensorDigest,
    Trace,
    layout_text,
)
from hashbench.core.trace.arguments import argument_text
from hashbench.core.trace.digest import RawDigest, readable
from hashbench.core.trace.op_schema import OpPlan
from hashbench.core.trace.placements import Placement

EARLY = "early"
"""Key in the notes of a record: source lines, by index into its reads, of reads of a collective's output that changed
afterwards."""


EXCHANGED = "exchanged"
"""Key in the notes of a collective's record: what it exchanged
(:class:`~hashbench.core.trace.collectives.Exchanged`)."""


class RawRecord(NamedTuple):
    """Raw record of one call. The dispatch mode keeps plain tuples of this form, which cost less.

    Attributes:
        reads: three entries for every tensor read: its argument, the number of its writer (records count from 0, leaves
            from -1 down), its storage offset.
        others: the non-tensor arguments, or their text.
        written: digests of the tensors written.
        rng: digest of the generator's state.
        number: the record's own number.
    """

    plan: OpPlan
    phase: str
    iteration: int | None
    module: str
    sequence: int
    reads: tuple[Any, ...]
    others: Sequence[Any] | str
    written: tuple[RawDigest | TensorDigest, ...]
    scalar: Any
    rng: int | None
    number: int

    def renumbered(self, node: Callable[[int], int]) -> RawRecord:
        """Return a copy with its own number and those of its writers mapped by ``node``."""
        reads = tuple([node(value) if at % 3 == 1 else value for at, value in enumerate(self.reads)])
        return self._replace(reads=reads, number=node(self.number))


RawLeaf = tuple[str, str, RawDigest, int, tuple[RawDigest, RawDigest] | None]
"""``(kind, name, digest, position of the first reader, digests of the same at registration and then)``"""

RawResult = tuple[tuple[str, Placement], RawDigest | TensorDigest, int | None]
"""``((name, placement), digest, number of the writer)``"""


def place_among(numbers: Sequence[int], node: int) -> int:
    """Return the index of record ``node`` in the sorted ``numbers``. A record that was dropped because its digest
    failed maps to the next one; a leaf keeps its number."""
    return node if node < 0 else min(bisect_left(numbers, node), len(numbers) - 1)


def without_gaps(
    records: Sequence[RawRecord],
    results: Sequence[RawResult],
    notes: Mapping[int, Mapping[str, Any]],
    writer: Callable[[int], int] = int,
) -> tuple[list[RawRecord], list[RawResult], dict[int, Mapping[str, Any]]]:
    """Sort records by number and renumber records, results and notes by index.

    ``writer`` maps a number among the reads to the actual writer, which is unknown while a trace is being made.
    """
    numbers = sorted([record.number for record in records])

    def place(number: int) -> int:
        return place_among(numbers, writer(number))

    return (
        [record.renumbered(place) for record in sorted(records, key=attrgetter("number"))],
        [(label, digest, None if node is None else place(node)) for label, digest, node in results],
        {place(number): kept for number, kept in notes.items()},
    )


class IndexedTrace(NamedTuple):
    """Raw trace in which all record numbers are indices into ``records``.

    Attributes:
        records: raw records, in order.
        leaves: raw leaves, in order.
        results: raw results.
        marks: settings marks.
        notes: notes by record number.
        callers: number of the enclosing record, by record number.
        threads: name of the thread that made a record, by record number; absent for the main thread.
    """

    records: Sequence[RawRecord]
    leaves: Sequence[RawLeaf]
    results: Sequence[RawResult]
    marks: Sequence[SettingsMark]
    notes: Mapping[int, Mapping[str, Any]]
    callers: Mapping[int, int]
    threads: Mapping[int, str] = MappingProxyType({})


def build_trace(
    raw: IndexedTrace, early_results: Mapping[str, str], *, first_sequence: int, hashed_inputs: bool
) -> Trace:
    """Give every record its id, turn numbers into ids, and make backward records children of their forward op.

    Args:
        raw: records, leaves and results.
        early_results: source lines, by result name, of reads of a collective's output that changed afterwards.
        first_sequence: autograd nodes with a smaller sequence number were created before the trace, so none of their
            forward ops has a record.
        hashed_inputs: whether inputs were hashed around every op.
    """
    return TraceBuilder(first_sequence, hashed_inputs=hashed_inputs).add(raw, early_results)


class Forward(NamedTuple):
    """Forward record of a backward one: its id, and its source line."""

    id: str
    source: str


class TraceBuilder:
    """Builder of a trace, all at once or part by part: each part costs what is new in it.

    Args:
        first_sequence: as for :func:`build_trace`, as is ``hashed_inputs``.

    Attributes:
        ids: ids of the records and leaves so far.
    """

    def __init__(self, first_sequence: int, *, hashed_inputs: bool) -> None:
        self.ids = Ids(first_sequence)
        self._hashed_inputs = hashed_inputs
        self._sources: dict[int, str] = {}

    def add(self, part: IndexedTrace, early_results: Mapping[str, str]) -> Trace:
        """Return the next part of the trace. All numbers and positions in ``part`` count from the start of the trace;
        its records and leaves have the next ones."""
        with uncollected():  # a collection would find nothing, and scan all of torch's objects
            trace = self._built(part)
            early = tuple(_early_reads(trace, len(self.ids.records), part.notes, early_results))
            return replace(trace, early_reads=early) if early else trace

    def _built(self, part: IndexedTrace) -> Trace:
        records, leaves, results, marks, notes, callers, threads = part
        ids, first, first_leaf = self.ids, len(self.ids.records), len(self.ids.leaves)
        for kind, name, *_ in leaves:
            ids.add_leaf(kind, name)
        built: list[OpRecord] = []
        for number, raw in enumerate(records, first):
            # A caller's record follows those of its inner calls, and is the forward op of the call's autograd nodes.
            sequence = -1 if number in callers and raw.phase != "backward" else raw.sequence
            identity = ids.add_record(
                raw.plan.name,
                phase=raw.phase,
                iteration=raw.iteration,
                module=raw.module,
                sequence=sequence,
                thread=threads.get(number, ""),
            )
            at = identity.forward
            forward = None if at is None else built[at - first] if at >= first else self._forward(at)
            built.append(build_record(raw, ids, identity, forward, notes.get(number, {})))
        self._sources.update((number, record.source) for number, record in enumerate(built, first) if record.source)
        for number, caller in callers.items():  # a caller's outputs depend on its inner calls
            values = [""]
            if number >= first:  # else its line is written
                built[number - first] = inner = replace(built[number - first], inside=ids.records[caller])
                values = [output.value if self._hashed_inputs else "" for output in inner.outputs]
            shown = [Ref("inside", ids.records[number], digest=value) for value in dict.fromkeys(values)]
            outer = built[caller - first]
            built[caller - first] = replace(outer, inputs=(*outer.inputs, *shown))
        for number, caller in sorted(callers.items()):  # callers follow their inner calls
            if number >= first and built[number - first].rng and records[caller - first].plan.drawn_inside:
                built[caller - first] = replace(built[caller - first], rng=_rng(records[caller - first]))
        return Trace(
            records=tuple(built),
            leaves=tuple(map(_build_leaf, ids.leaves[first_leaf:], leaves)),
            results=tuple(_build_result(ids, *result) for result in results),
            marks=tuple(marks),
            hashed_inputs=self._hashed_inputs,
        )

    def _forward(self, number: int) -> Forward:
        return Forward(self.ids.records[number], self._sources.get(number, ""))


def _early_reads(
    trace: Trace, count: int, notes: Mapping[int, Mapping[str, Any]], early_results: Mapping[str, str]
) -> Iterator[EarlyRead]:
    first = count - len(trace.records)
    for number in sorted(number for number, kept in notes.items() if EARLY in kept):
        record = trace.records[number - first]
        for at, source in sorted(notes[number][EARLY].items()):
            yield EarlyRead(record.inputs[at].source, record.id, source)
    for result in trace.results:
        if result.name in early_results:
            yield EarlyRead(result.source, result.name, early_results[result.name], is_result=True)


class RecordIdentity(NamedTuple):
    """Identity of a record: its id, its module, and the number of its forward record."""

    id: str
    module: str
    forward: int | None


class Ids:
    """Ids of records and leaves, assigned in order.

    A record's id is its phase, iteration, module and op, and a count within these, so that an insertion in one module
    does not rename later records of other modules; each thread that the program starts (``#t0.2``: the third in its
    first thread) counts separately. Leaves without a name from a model or caller always have a count.
    """

    def __init__(self, first_sequence: int = 0) -> None:
        self.leaves: list[str] = []
        self.records: list[str] = []
        self._modules: list[str] = []
        self._forward: dict[int, int] = {}
        self.first_sequence = first_sequence
        self._counts: dict[tuple[str, ...], int] = {}  # last number in use
        self._arguments: dict[tuple[str, int | str], tuple[str, bool]] = {}

    def add_record(
        self, op: str, *, phase: str, iteration: int | None, module: str, sequence: int, thread: str = ""
    ) -> RecordIdentity:
        """Return the identity of the next record; ``sequence`` is its autograd sequence number."""
        forward = None
        if phase == "backward":
            forward = self._forward.get(sequence)
        elif sequence >= self.first_sequence:
            self._forward.setdefault(sequence, len(self.records))
        if forward is not None and self._modules[forward].startswith(module):
            module = self._modules[forward]  # else a module is called in backward: activation recomputation
        step = phase if iteration is None else f"{phase}.{iteration}"
        key = (step, module, op, thread) if thread else (step, module, op)
        self._counts[key] = count = self._counts.get(key, -1) + 1
        identity = f"{step}/{module}/{op}#{thread}{count}"
        self.records.append(identity)
        self._modules.append(module)
        made: RecordIdentity = _made(RecordIdentity, (identity, module, forward))
        return made

    def take_back_record(self, identity: str) -> None:
        """Release the id of a record whose call failed: later ids are assigned as if it had never existed."""
        at = next(at for at in reversed(range(len(self.records))) if self.records[at] == identity)
        if at == len(self.records) - 1:
            self.records.pop()
            self._modules.pop()
        step, module, op = _parts(identity)
        thread = op.partition("#")[2].rpartition(".")[0]
        key = (step, module, op.partition("#")[0], *((f"{thread}.",) if thread else ()))
        self._counts[key] -= 1

    def add_leaf(self, kind: str, name: str) -> str:
        """Return the id of the next leaf."""
        count = self._count(kind, name)
        self.leaves.append(f"{kind}/{name}#{count}" if count or kind == "other" else f"{kind}/{name}")
        return self.leaves[-1]

    def of(self, node: int) -> str:
        """Return the id of a record (number >= 0) or leaf (number < 0)."""
        return self.records[node] if node >= 0 else self.leaves[-node - 1]

    def argument(self, plan: OpPlan, argument: int | str) -> tuple[str, bool]:
        """Return the text of an argument, and whether the op writes it."""
        key = plan.name, argument
        if key not in self._arguments:
            self._arguments[key] = str(argument), plan.writes(argument)
        return self._arguments[key]

    def _count(self, *key: str) -> int:
        self._counts[key] = count = self._counts.get(key, -1) + 1
        return count


def _parts(identity: str) -> tuple[str, str, str]:
    step, _, rest = identity.partition("/")
    module, _, op = rest.rpartition("/")
    return step, module, op


_UNHASHED = ("", "")
"""Digest and layout of an input that was not hashed."""


def build_record(
    raw: RawRecord, ids: Ids, identity: RecordIdentity, forward: OpRecord | Forward | None, notes: Mapping[str, Any]
) -> OpRecord:
    """Convert a raw record to its final form; ``forward`` is the forward record of a backward one."""
    digests: dict[str, tuple[str, str]] = {}
    exchanged, line = None, ""
    forward_line = "" if forward is None else forward.source
    if notes:
        exchanged, line = notes.get(EXCHANGED), notes.get("source", "")
        forward_line = "" if notes.get("own") else forward_line
        for argument, digest in notes.get("inputs", {}).items():
            _, shape, stride, value = readable(digest)
            digests[argument] = value, layout_text(shape, stride) if value else ""
        if exchanged is not None:
            digests |= {argument: (readable(digest).value, "") for argument, digest in exchanged.contributed.items()}
    argument_of, records, leaves = ids.argument, ids.records, ids.leaves
    reads, inputs = iter(raw.reads), []
    for argument, node, at in zip(reads, reads, reads, strict=True):
        text, written = argument_of(raw.plan, argument)
        source = records[node] if node >= 0 else leaves[-node - 1]
        digest, layout = digests.get(text, _UNHASHED) if digests else _UNHASHED
        inputs.append(_made(Ref, (text, source, at, written, digest, layout)))
    outputs = tuple([digest if type(digest) is TensorDigest else readable(digest) for digest in raw.written])
    others, source = raw.others, raw.plan.source or forward_line or line
    return _record(
        identity.id,
        raw.phase,
        raw.iteration,
        identity.module,
        raw.plan.name,
        tuple(inputs),
        others if isinstance(others, str) else argument_text(others),
        outputs,
        "" if raw.scalar is None else repr(raw.scalar),
        "" if raw.plan.drawn_inside else _rng(raw),
        forward.id if forward is not None else "",
        "" in [output.value for output in outputs],
        source,
        raw.plan.opaque,
        None if exchanged is None else exchanged.collective,
        "",
        "" if raw.plan.launch is None else raw.plan.launch(),
    )


_made: Any = tuple.__new__
"""Construct a named tuple from its values, in half the time of its own constructor."""

_Open = make_dataclass(
    "_Open", [(field.name, Any) for field in fields(OpRecord)], slots=True, eq=False, repr=False, match_args=False
)
"""Mutable :class:`OpRecord`."""


def _record(*values: Any) -> OpRecord:
    """Construct an :class:`OpRecord` from the values of all its fields, in a third of the time of its own constructor
    (which calls ``object.__setattr__`` for each field)."""
    record: Any = _Open(*values)
    record.__class__ = OpRecord
    return record  # type: ignore[no-any-return]


def _rng(raw: RawRecord) -> str:
    return "" if raw.rng is None else f"{raw.rng:016x}"


def _build_leaf(leaf_id: str, leaf: RawLeaf) -> Leaf:
    kind, _, raw, position, registered = leaf
    before, then = map(readable, registered) if registered else (None, None)
    return Leaf(leaf_id, kind, readable(raw), position, "" if before is None or before == then else before.value)


def _build_result(ids: Ids, label: tuple[str, Placement], raw: RawDigest | TensorDigest, node: int | None) -> Result:
    digest = raw if isinstance(raw, TensorDigest) else readable(raw)
    name, placement = label
    return Result(name, digest, "" if node is None else ids.of(node), *placement)
