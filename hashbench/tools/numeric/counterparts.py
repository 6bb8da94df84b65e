"""What two executions of other models have in common: which ops may be taken for the same, and whether they read the
same.

Ops are paired in order, by their names and modules. Where modules do not correspond, such a pair may be two ops that
have nothing to do with each other. Pure decisions on records, apart from torch and from values.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hashbench.core.divergence.align import PairedRuns, align
from hashbench.core.divergence.fills import Pair
from hashbench.core.records import Leaf, OpRecord, Ref, TensorDigest

Item = OpRecord | Leaf
"""What a node of two executions holds of either."""

_GENERATED = ("cpp_", "triton_")
"""Prefixes of the names that Inductor gives to kernels; ops of torch begin with a namespace and a dot."""


def is_compiled(record: OpRecord) -> bool:
    """Return whether a record stands for compiled code: what a trace cannot look into, or a kernel that Inductor
    generated, by its name (``cpp_fused_relu_0``)."""
    return bool(record.opaque) or record.op.startswith(_GENERATED)


def is_silent(record: OpRecord) -> bool:
    """Return True for a view, which writes nothing, and for an allocation, whose content is no result."""
    return record.blank or not (record.outputs or record.scalar)


def is_filled(ref: Ref, source: tuple[Item | None, Item | None]) -> bool:
    """Return whether ``ref`` is memory that the op only fills: an ``out=``, which is passed by name, or memory that
    nothing recorded has written."""
    item = source[0] or source[1]
    is_new = isinstance(item, Leaf) and item.kind == "other"
    return ref.written and (is_new or not ref.argument[:1].isdigit())


def without_overload(record: OpRecord) -> OpRecord:
    return replace(record, op=record.op.rpartition(".")[0] or record.op)


# ----------------------------------------------------------------------------------------------- correspondence


def correspondence(first: Sequence[OpRecord], second: Sequence[OpRecord]) -> tuple[list[Pair], set[Pair]]:
    """Return the records that correspond, in order, and which of these pairs replace one op by another.

    By op, module, phase and iteration; or without the modules, of which compiled code has none; or with any overload of
    the op, since transformed code calls out-variants: whichever aligns most. Other overloads replace each other. What
    is left over between two that correspond: see :func:`_replacements`.
    """
    ways = [align(*(list(map(form, records)) for records in (first, second))) for form in _FORMS]
    aligned = max(ways, key=lambda pairs: _likeness(pairs, first, second))  # of equals the first
    pairs: list[Pair] = []
    replaced: list[Pair] = [
        (a, b) for a, b in aligned if a is not None and b is not None and first[a].op != second[b].op
    ]
    for correspond, group in itertools.groupby(aligned, key=lambda pair: None not in pair):
        stretch = list(group)
        if correspond:
            pairs += stretch
            continue
        joined = _replacements(stretch, first, second)
        replaced += joined
        pairs += _joined(stretch, joined)
    return pairs, set(replaced)


def _likeness(pairs: Sequence[Pair], first: Sequence[OpRecord], second: Sequence[OpRecord]) -> tuple[int, int]:
    """Return how many records correspond, and how many of these leave the same."""
    both = [(first[a], second[b]) for a, b in pairs if a is not None and b is not None]
    return len(both), sum(a.outputs == b.outputs for a, b in both)


def _without_module(record: OpRecord) -> OpRecord:
    return replace(record, module="")


_FORMS: tuple[Callable[[OpRecord], OpRecord], ...] = (
    lambda record: record,
    _without_module,
    without_overload,
    lambda record: without_overload(_without_module(record)),
)
"""What is compared of records to align them, the most particular first."""


def _replacements(stretch: Sequence[Pair], first: Sequence[OpRecord], second: Sequence[OpRecord]) -> list[Pair]:
    """Pair records in one stretch without correspondence: by module, the last op that wrote something in each of the
    two, if what they leave has the same shape (a quantized linear layer in place of a plain one); and compiled code
    with the last op that it stands for, likewise."""
    last_a = {_module_of(first[a]): a for a, _ in stretch if a is not None and _may_replace(first[a])}
    last_b = {_module_of(second[b]): b for _, b in stretch if b is not None and _may_replace(second[b])}
    last = [(last_a[module], last_b[module]) for module in last_a if module in last_b]
    ends_a = [a for a, _ in stretch if a is not None and not is_silent(first[a])][-1:]
    ends_b = [b for _, b in stretch if b is not None and not is_silent(second[b])][-1:]
    last += [(a, b) for a in ends_a for b in ends_b if is_compiled(first[a]) != is_compiled(second[b])]
    joined: list[Pair] = []
    reached = (-1, -1)
    for a, b in sorted(last):
        if a > reached[0] and b > reached[1] and _shape_left(first[a]) == _shape_left(second[b]):
            joined.append((a, b))
            reached = a, b
    return joined


def _may_replace(record: OpRecord) -> bool:
    """Return whether a record is of one op that leaves something; compiled code stands for many."""
    return not is_silent(record) and not is_compiled(record)


def _module_of(record: OpRecord) -> tuple[str, int | None, str]:
    return record.phase, record.iteration, record.module


def _shape_left(record: OpRecord) -> tuple[int, ...]:
    return record.outputs[0].shape if record.outputs else ()


def _joined(stretch: Sequence[Pair], joined: Sequence[Pair]) -> Iterator[Pair]:
    """Yield the stretch with replacements as pairs; what stood before them stays before them, on both sides."""
    left_a = [a for a, _ in stretch if a is not None]
    left_b = [b for _, b in stretch if b is not None]
    for end_a, end_b in [*joined, (None, None)]:
        while left_a and left_a[0] != end_a:
            yield left_a.pop(0), None
        while left_b and left_b[0] != end_b:
            yield None, left_b.pop(0)
        if end_a is not None:
            yield left_a.pop(0), left_b.pop(0)


def left_elsewhere(runs: PairedRuns) -> frozenset[str]:
    """Return the nodes of ops that one execution alone has, and of which the other has the results all the same: from
    another overload of the op (compiled code calls out-variants, in an order of its own)."""
    kept = [set(map(_op_and_words, filter(_may_replace, trace.records))) for trace in (runs.first, runs.second)]
    lone = ((node, a, b) for node, (a, b) in runs.records.items() if (a is None) != (b is None))
    return frozenset(
        node
        for node, a, b in lone
        for record, others in ((a, kept[1]), (b, kept[0]))
        if record is not None and record.outputs and _may_replace(record) and _op_and_words(record) in others
    )


def _op_and_words(record: OpRecord) -> tuple[Any, ...]:
    words = (output.word() for output in record.outputs)
    return without_overload(record).op, record.phase, record.iteration, *words


# -------------------------------------------------------------------------------------------- what was compared


@dataclass(frozen=True, slots=True)
class Counterparts:
    """What is known of the pairs of two executions.

    ``elsewhere``: nodes of one execution alone of which the other has the results all the same. ``replaced``: ids of
    records that another op stands in place of. ``alone``: how many ops of each name one execution alone has, with the
    module and without it. ``hidden``: some code is compiled, so that not all ops are seen.
    """

    runs: PairedRuns
    elsewhere: Container[str]
    replaced: Container[str]
    alone: Mapping[tuple[object, ...], int]
    hidden: bool

    @classmethod
    def of(cls, runs: PairedRuns, elsewhere: Container[str], replaced: Container[str]) -> Counterparts:
        """Count the ops of one execution alone, by module and in all."""
        alone: Counter[tuple[object, ...]] = Counter()
        for node, (a, b) in runs.records.items():
            record = a or b
            if (a is None) != (b is None) and record is not None and not is_silent(record) and node not in elsewhere:
                alone.update((_group(record), (*_group(record), record.module)))
        others = [sum(leaf.kind == "other" for leaf in trace.leaves) for trace in (runs.first, runs.second)]
        alone["other",] = abs(others[0] - others[1])  # numbered in order of their reading
        hidden = any(is_compiled(record) for trace in (runs.first, runs.second) for record in trace.records)
        return cls(runs, elsewhere, replaced, alone, hidden)

    def is_sure(self, node: str) -> bool:
        """Return whether a node is the same in both executions, and can be compared.

        Not where one execution alone has it, the two left another number of elements, or one execution ran this op more
        often than the other, in this module or, of modules that do not correspond, anywhere: then these may be two of
        its calls that have nothing to do with each other. Doubt remains where both ran it equally often in another
        order.
        """
        if node in self.runs.leaves:
            leaves = self.runs.leaves[node]
            return None not in leaves and not (_of_other(leaves) and self.alone["other",])
        a, b = self.runs.records[node]
        if a is None or b is None:
            return False
        if is_compiled(a) != is_compiled(b):
            return True  # compiled code is located by what is around it
        if not same_size(a, b):
            return False
        located = self._is_located(a, b)
        if node in self.replaced and without_overload(a).op != without_overload(b).op:
            return located
        return not self.alone[(*_group(a), a.module) if a.module == b.module else _group(a)]

    def _is_located(self, a: OpRecord, b: OpRecord) -> bool:
        return bool(a.module) and a.module == b.module

    def unlike(self, node: str) -> str:
        """Return in words what two paired records read that was not compared, or that is not the same; ``""`` if all is
        the same. Weights that one execution alone has are looked past in a module that both have: they are part of
        what replaces what."""
        a, b = self.runs.records[node]
        assert a is not None
        assert b is not None
        reads = [self._read_by(record, side) for side, record in enumerate((a, b))]
        for source, _ in (*reads[0], *reads[1]):
            if None in self.items(source) and source not in self.elsewhere:
                if self._is_located(a, b) and source in self.runs.leaves:
                    return ""
                return f"it reads what one execution alone has, {named(self.items(source))}"
        if node in self.replaced and without_overload(a).op != without_overload(b).op:
            return ""  # another op may be given its tensors in another order, or fewer
        keys = [[self._key(*item, side) for item in items] for side, items in enumerate(reads)]
        if Counter(keys[0]) != Counter(keys[1]):
            return "it is given other tensors, or other parts of them"
        return ""

    def inserted(self, node: str) -> tuple[str, str] | None:
        """Return what the pair ``node`` reads in each execution, where that is one node of each and all else is the
        same; ``None`` where more differs."""
        keys = [
            {self._key(source, ref, side): source for source, ref in self._read_by(record, side)}
            for side, record in enumerate(self.runs.records[node])
            if record is not None
        ]
        first, second = ({source for key, source in keys[side].items() if key not in keys[1 - side]} for side in (0, 1))
        return (first.pop(), second.pop()) if len(first) == len(second) == 1 else None

    def are_given_the_same(self, lone: Iterable[str]) -> bool:
        """Return whether ops, of one execution alone each, read the same, apart from weights."""
        found = set()
        for node in lone:
            for side, record in enumerate(self.runs.records[node]):
                if record is not None:
                    reads = self._read_by(record, side)
                    found.add(frozenset(self._key(*item, side) for item in reads if not self._is_lone_leaf(item[0])))
        return len(found) <= 1

    def _is_lone_leaf(self, node: str) -> bool:
        return node in self.runs.leaves and None in self.runs.leaves[node]

    def items(self, node: str) -> tuple[Item | None, Item | None]:
        """Return what both executions have at a node."""
        return self.runs.leaves[node] if node in self.runs.leaves else self.runs.records[node]

    def _read_by(self, record: OpRecord, side: int) -> list[tuple[str, Ref]]:
        """List what a record of one execution reads, without what it only fills: nodes and references."""
        found = []
        for ref in record.inputs:
            node = self.runs.node_of[ref.source] if side else ref.source
            items = self.items(node)
            item = items[0] or items[1]
            if not is_filled(ref, items) and not (isinstance(item, OpRecord) and is_silent(item)):
                found.append((node, ref))
        return found

    def _key(self, node: str, ref: Ref, side: int) -> tuple[object, ...]:
        """Return what a reference must be equal in: the node, or what it left elsewhere, and which part of it."""
        item = self.items(node)[side]
        left = () if item is None else item.outputs if isinstance(item, OpRecord) else (item.digest,)
        is_lone = None in self.items(node)
        what: object = tuple(digest.word() for digest in left) if is_lone and node in self.elsewhere else node
        return what, *_part(ref, left)


def _group(record: OpRecord) -> tuple[object, ...]:
    return record.phase, record.iteration, without_overload(record).op


def _of_other(leaves: tuple[Leaf | None, Leaf | None]) -> bool:
    return any(leaf is not None and leaf.kind == "other" for leaf in leaves)


def same_size(a: Item, b: Item) -> bool:
    """Return whether two records or leaves hold tensors of like shapes, one by one; see :func:`are_alike`."""
    left = [item.outputs if isinstance(item, OpRecord) else (item.digest,) for item in (a, b)]
    return len(left[0]) == len(left[1]) and all(are_alike(x.shape, y.shape) for x, y in zip(*left, strict=True))


def are_alike(a: Sequence[int], b: Sequence[int]) -> bool:
    """Return whether one of two shapes only joins neighbouring dimensions of the other, as ``[14, 32]`` does of
    ``[2, 7, 32]``. Shapes ``[7, 8]`` and ``[14, 4]`` have as many elements by chance."""
    ends = [set(itertools.accumulate(shape, operator.mul)) - {1} for shape in (a, b)]
    return math.prod(a) == math.prod(b) and (ends[0] <= ends[1] or ends[1] <= ends[0])


def _part(ref: Ref, left: tuple[TensorDigest, ...]) -> tuple[object, ...]:
    """Return which part of what was left a reference is: nothing more where it is a whole tensor, as written or in
    order; offset and layout of a part or of a transposition."""
    if not ref.layout:
        return (ref.offset,)
    sizes, _, strides = ref.layout.partition("{")
    shape = [int(size) for size in sizes.strip("[]").split(",") if size]
    for digest in left if ref.offset == 0 else ():
        stride = f"{','.join(map(str, digest.stride))}}}"
        as_written = list(digest.shape) == shape and strides in ("", stride)
        if as_written or (not strides and math.prod(shape) == math.prod(digest.shape)):
            return ("whole",)
    return ref.offset, ref.layout


# -------------------------------------------------------------------------------------------------------- words


def named(items: tuple[Item | None, Item | None]) -> str:
    item = items[0] or items[1]
    if isinstance(item, Leaf):
        return f"the {item.kind} {item.id.partition('/')[2]}"
    return f"{item.op}{f' in {item.module}' if item.module else ''} ({item.phase})" if item is not None else ""


def alone_in_words(runs: PairedRuns, nodes: Iterable[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the ops among ``nodes`` without a counterpart, of each execution, in order."""
    pairs = [runs.records[node] for node in sorted(nodes, key=runs.order.__getitem__) if node in runs.records]
    found = [tuple(_short(record) for pair in pairs if (record := pair[side]) is not None) for side in (0, 1)]
    return found[0], found[1]


def _short(record: OpRecord) -> str:
    return f"{record.op}{f' in {record.module}' if record.module else ''}"
