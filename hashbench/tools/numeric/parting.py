"""Two traces of models that need not run the same ops, to the first place at which they part. Pure: no torch.

``divergence.find`` judges two runs of one model, which should agree in every bit. Here the executions may have other
ops, fewer ops (fused, folded, compiled), and values that are only close; how well two records agree is given by the
caller, who has the values. From the results that differ, both graphs are walked back through whatever differs: to the
earliest place of both executions that differs, and from there, through ops that only one of them has, to where
everything that is read agrees. What agrees again on every way to a result is not blamed.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from hashbench.divergence.align import Pair, align
from hashbench.records import Leaf, OpRecord, Ref, Trace
from hashbench.tools.numeric.report import Parting


class Agreement(enum.IntEnum):
    """How well two values agree."""

    BITWISE = 0
    WITHIN = 1
    BEYOND = 2


LEVELS = {"bitwise": Agreement.WITHIN, "tolerance": Agreement.BEYOND}
"""From which agreement on two values count as different."""

_in_order = attrgetter("number")


@dataclass(frozen=True, slots=True)
class Node:
    """A place in one or both executions: records that correspond, or a leaf. ``number`` orders them."""

    number: int
    a: OpRecord | Leaf | None
    b: OpRecord | Leaf | None
    replaced: bool = False

    @property
    def is_pair(self) -> bool:
        """Whether both executions have it."""
        return self.a is not None and self.b is not None

    @property
    def item(self) -> OpRecord | Leaf:
        """That of the first execution, else of the second."""
        item = self.a or self.b
        assert item is not None
        return item

    def __str__(self) -> str:
        item = self.item
        if isinstance(item, Leaf):
            return f"the {item.kind} {item.id.partition('/')[2]}"
        return f"{item.op}{f' in {item.module}' if item.module else ''} ({item.phase})"


def find(
    first: Trace,
    second: Trace,
    *,
    level: str,
    agreement: Callable[[str, str], Agreement],
    differing: Sequence[str],
) -> Parting:
    """Where two executions part.

    Args:
        first, second: their traces, with names of modules, leaves and results that correspond.
        level: ``tolerance`` or ``bitwise``.
        agreement: of what two records or leaves, given by the ids in the first and in the second trace, left.
        differing: names of the results that differ at this level; at least one.
    """
    search = _Search(first, second, LEVELS[level], agreement)
    reached = search.back_from(search.sources(differing))
    known = min((node for node in reached if node.is_pair), key=_in_order, default=None)
    way = reached if known is None else search.back_from([known])
    entered = [node for node in way if not any(read.number in search.differs for read in search.read_by(node))]
    records = [node for node in search.nodes if isinstance(node.item, OpRecord)]
    pairs = [node for node in records if node.is_pair]
    blamed = {node.number for node in reached}
    unseen = Parting(
        level,
        "unseen",
        op="",
        module="",
        phase="",
        iteration=0,
        detail=f"no recorded op explains that {differing[0]} differs",
        healed=sum(node.number in search.differs and node.number not in blamed for node in pairs),
        aligned=len(pairs),
        only_before=sum(node.b is None for node in records),
        only_after=sum(node.a is None for node in records),
    )
    if not entered:
        return unseen
    node = min(entered, key=_in_order)
    parting = replace(unseen, until=str(known) if known is not None and node is not known else "")
    if isinstance(node.item, Leaf):
        return _at_leaf(parting, node.item, first if node.a is not None else second, is_first=node.a is not None)
    return _at_record(parting, node, first)


class _Search:
    """The nodes of two executions, which of them differ, and how they read each other."""

    def __init__(
        self, first: Trace, second: Trace, threshold: Agreement, agreement: Callable[[str, str], Agreement]
    ) -> None:
        self.threshold, self.agreement = threshold, agreement
        self.nodes = _nodes(first, second)
        self.sides = (
            (first, {node.a.id: node for node in self.nodes if node.a is not None}),
            (second, {node.b.id: node for node in self.nodes if node.b is not None}),
        )
        self.differs = {node.number for node in self.nodes if self._differs(node)}

    def _differs(self, node: Node) -> bool:
        """Whether what is left at a node differs. An op that only one execution runs does, unless it leaves nothing; a
        tensor that only one reads does not, for the op that reads it says more."""
        a, b = node.a, node.b
        if a is None or b is None:
            return isinstance(node.item, OpRecord) and not _is_silent(node.item)
        if isinstance(a, OpRecord) and isinstance(b, OpRecord):
            if a.scalar != b.scalar:
                return True
            if _is_silent(a) and _is_silent(b):
                return False
        return self.agreement(a.id, b.id) >= self.threshold

    def sources(self, differing: Sequence[str]) -> list[Node]:
        """What wrote the results that differ."""
        return [
            nodes[result.source]
            for trace, nodes in self.sides
            for result in trace.results
            if result.name in differing and result.source
        ]

    def back_from(self, nodes: Sequence[Node]) -> list[Node]:
        """Whatever differs and leads to one of these, which are among them if they do."""
        waiting, reached = list(nodes), dict[int, Node]()
        while waiting:
            node = waiting.pop()
            if node.number in self.differs and node.number not in reached:
                reached[node.number] = node
                waiting.extend(self.read_by(node))
        return list(reached.values())

    def read_by(self, node: Node) -> Iterator[Node]:
        """What the records of a node read."""
        for record, (_, nodes) in zip((node.a, node.b), self.sides, strict=True):
            if isinstance(record, OpRecord):
                yield from (nodes[ref.source] for ref in record.inputs if not _is_filled(ref, nodes))


def _is_filled(ref: Ref, nodes: Mapping[str, Node]) -> bool:
    """Whether ``ref`` is memory that the op only fills: that of ``out=``, which compiled code allocates unseen."""
    source = nodes[ref.source].item
    return ref.written and isinstance(source, Leaf) and source.kind == "other"


def _is_silent(record: OpRecord) -> bool:
    """A view, which writes nothing, or an allocation, whose content is no result."""
    return record.blank or not (record.outputs or record.scalar)


# -------------------------------------------------------------------------------------------------------- words


def _at_record(parting: Parting, node: Node, first: Trace) -> Parting:
    a, b = (item if isinstance(item, OpRecord) else None for item in (node.a, node.b))
    record = a or b
    assert record is not None
    kind = "only before" if b is None else "only after" if a is None else "replaced" if node.replaced else "op"
    return replace(
        parting,
        kind=kind,
        op=record.op,
        module=record.module,
        phase=record.phase,
        iteration=record.iteration,
        detail=_detail(kind, a, b),
        before="" if a is None else f"{a.op}({a.arguments})",
        after="" if b is None else f"{b.op}({b.arguments})",
        name="" if a is None else a.id,
        other="" if b is None else b.id,
        index=None if a is None else next(n for n, item in enumerate(first.records) if item.id == a.id),
    )


def _detail(kind: str, a: OpRecord | None, b: OpRecord | None) -> str:
    if a is None or b is None:
        return f"only the execution {kind.removeprefix('only ')} runs this op, and everything that it reads agrees"
    if kind == "replaced":
        return f"{b.op} in place of {a.op}, and what they read agrees"
    if a.arguments != b.arguments:
        return "its other arguments differ"
    if [ref.argument for ref in a.inputs] != [ref.argument for ref in b.inputs]:
        return "it is given other tensors"
    return "what it leaves differs although everything that it reads agrees"


def _at_leaf(parting: Parting, leaf: Leaf, trace: Trace, *, is_first: bool) -> Parting:
    name = leaf.id.partition("/")[2]
    what = f"the {leaf.kind} {name}" if leaf.kind != "other" else f"a tensor that no recorded op wrote ({leaf.id})"
    parting = replace(
        parting,
        kind=leaf.kind,
        detail=f"{what} holds other values",
        name=leaf.id,
        other=leaf.id,
        index=leaf.position if is_first else None,
    )
    if leaf.position >= len(trace.records):
        return parting
    reader = trace.records[leaf.position]
    return replace(parting, op=reader.op, module=reader.module, phase=reader.phase, iteration=reader.iteration)


# ----------------------------------------------------------------------------------------------- correspondence


def _nodes(first: Trace, second: Trace) -> list[Node]:
    """Leaves, each before the first record that reads it, and records, in order of execution."""
    pairs, replaced = correspondence(first.records, second.records)
    numbers = [{pair[side]: number for number, pair in enumerate(pairs)} for side in (0, 1)]
    leaves_b = {leaf.id: leaf for leaf in second.leaves}
    leaves: list[tuple[int, Leaf | None, Leaf | None]] = [
        (numbers[0].get(leaf.position, len(pairs)), leaf, leaves_b.pop(leaf.id, None)) for leaf in first.leaves
    ]
    leaves += [(numbers[1].get(leaf.position, len(pairs)), None, leaf) for leaf in leaves_b.values()]
    leaves.sort(key=lambda item: item[0])
    nodes: list[Node] = []
    for number, (a, b) in enumerate([*pairs, (None, None)]):
        while leaves and leaves[0][0] == number:
            nodes.append(Node(len(nodes), *leaves.pop(0)[1:]))
        if number < len(pairs):
            records = (None if a is None else first.records[a], None if b is None else second.records[b])
            nodes.append(Node(len(nodes), *records, replaced=(a, b) in replaced))
    return nodes


def correspondence(first: Sequence[OpRecord], second: Sequence[OpRecord]) -> tuple[list[Pair], set[Pair]]:
    """The records that correspond, in order, and which of these pairs replace one op by another.

    By op, module, phase and iteration; or without the modules, of which compiled code has none: whichever aligns more.
    What is left over between two that correspond: see :func:`_replacements`.
    """
    by_module = align(first, second)
    by_op = align([replace(record, module="") for record in first], [replace(record, module="") for record in second])
    aligned = max((by_module, by_op), key=lambda pairs: sum(None not in pair for pair in pairs))  # of equals the first
    pairs: list[Pair] = []
    replaced: list[Pair] = []
    for correspond, group in itertools.groupby(aligned, key=lambda pair: None not in pair):
        stretch = list(group)
        if correspond:
            pairs += stretch
            continue
        joined = _replacements(stretch, first, second)
        replaced += joined
        pairs += _joined(stretch, joined)
    return pairs, set(replaced)


def _replacements(stretch: Sequence[Pair], first: Sequence[OpRecord], second: Sequence[OpRecord]) -> list[Pair]:
    """In one stretch without correspondence: by module, the last op that wrote something in each of the two, if what
    they leave has the same shape (a quantized linear layer in place of a plain one)."""
    last_a = {_module_of(first[a]): a for a, _ in stretch if a is not None and not _is_silent(first[a])}
    last_b = {_module_of(second[b]): b for _, b in stretch if b is not None and not _is_silent(second[b])}
    joined: list[Pair] = []
    reached = -1
    for a, b in sorted((last_a[module], last_b[module]) for module in last_a if module in last_b):
        if b > reached and _shape_left(first[a]) == _shape_left(second[b]):
            joined.append((a, b))
            reached = b
    return joined


def _module_of(record: OpRecord) -> tuple[str, int, str]:
    return record.phase, record.iteration, record.module


def _shape_left(record: OpRecord) -> tuple[int, ...]:
    return record.outputs[0].shape if record.outputs else ()


def _joined(stretch: Sequence[Pair], joined: Sequence[Pair]) -> Iterator[Pair]:
    """The stretch with replacements as pairs; what stood before them stays before them, on both sides."""
    left_a = [a for a, _ in stretch if a is not None]
    left_b = [b for _, b in stretch if b is not None]
    for end_a, end_b in [*joined, (None, None)]:
        while left_a and left_a[0] != end_a:
            yield left_a.pop(0), None
        while left_b and left_b[0] != end_b:
            yield None, left_b.pop(0)
        if end_a is not None:
            yield left_a.pop(0), left_b.pop(0)
